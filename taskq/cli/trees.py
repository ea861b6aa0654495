"""Graphs as indented lists, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["MOST_LEVELS", "Place", "forest", "indented"]

MOST_LEVELS = 20
"""Levels that are indented; a long chain goes on below one another from there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands in the list.

    Attributes:
        ix: The node.
        depth: How far below the top.
        others: What it comes after, beside the node that it stands below.
    """

    ix: int
    depth: int
    others: tuple[int, ...]


def forest(sources: Mapping[int, Iterable[int]]) -> list[Place]:
    """Every node of a graph once, below the last of those that it comes after, in the order of their numbers.

    Args:
        sources: For each node those that it comes after; their numbers are lower. Others are left out, so that rows
            that somebody has damaged are shown as well.
    """
    after = {
        ix: sorted({source for source in found if source in sources and source < ix}) for ix, found in sources.items()
    }
    below: dict[int, list[int]] = {ix: [] for ix in after}
    for ix, found in after.items():
        if found:
            below[found[-1]].append(ix)
    places: list[Place] = []
    left = [(ix, 0) for ix in sorted(after, reverse=True) if not after[ix]]
    while left:
        ix, depth = left.pop()
        places.append(Place(ix, depth, tuple(after[ix][:-1])))
        left += [(each, depth + 1) for each in sorted(below[ix], reverse=True)]
    return places


def indented(name: str, depth: int) -> str:
    """A name as it stands in the list."""
    return f"{'  ' * min(depth, MOST_LEVELS)}{name}"
