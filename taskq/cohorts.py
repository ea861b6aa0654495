"""Cohorts: limits on how many jobs run at once, shared by name across tasks, queues and applications."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from taskq.errors import InvalidPolicy

__all__ = ["Cohort", "Cohorts"]

MOST_LIMIT: Final = 2**31 - 1
MOST_KEPT: Final = 10_000
"""Of so many names an application remembers the limit, to find two that differ; names may be made from data."""


@dataclass(frozen=True, slots=True, init=False)
class Cohort:
    """A limit on how many jobs run at once, whatever their tasks, queues and workers: ``Cohort("stripe", limit=4)``.

    A job of a cohort runs only while fewer than ``limit`` others of it do; until then it waits, and uses up nothing.
    The name is what counts: two objects with one name are one cohort, and must have one limit.

    Attributes:
        name: 1 to 128 printable ASCII characters without spaces.
        limit: How many run at once, from 0 (nobody); what an operator has set (``taskq limits set``) goes before it.
            None where a stored policy was read, which keeps the name alone.
        place: Where it was made, as ``module:line``.

    Raises:
        InvalidPolicy: The name or the limit is not valid.
    """

    name: str
    limit: int | None
    place: str = field(compare=False, repr=False)

    def __init__(self, name: str, limit: int) -> None:
        from taskq.policy import check_name

        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= MOST_LIMIT:
            raise InvalidPolicy(
                f"the limit of cohort {str(name)[:80]!r} is {str(limit)[:80]}; give a whole number from 0, which lets "
                "nobody run"
            )
        object.__setattr__(self, "name", check_name("the name of a cohort", name))
        object.__setattr__(self, "limit", limit)
        caller = sys._getframe(1)
        object.__setattr__(self, "place", f"{caller.f_globals.get('__name__', '?')}:{caller.f_lineno}")

    @classmethod
    def stored(cls, name: str) -> Cohort:
        """The cohort that a stored policy names; its limit stands in the table ``limits``."""
        made = cls(name, 0)
        object.__setattr__(made, "limit", None)
        object.__setattr__(made, "place", "the database")
        return made


class Cohorts:
    """The cohorts that one application has met, by name, in the order in which it met them."""

    def __init__(self) -> None:
        self._known: dict[str, Cohort] = {}

    def meet(self, cohorts: Iterable[object]) -> None:
        """Remember these; what is no cohort is left to the policy to refuse.

        Raises:
            InvalidPolicy: One has another limit than a cohort of the same name before it.
        """
        for cohort in cohorts:
            if not isinstance(cohort, Cohort) or cohort.limit is None:
                continue
            if cohort.name not in self._known and len(self._known) >= MOST_KEPT:
                continue
            known = self._known.setdefault(cohort.name, cohort)
            if known.limit != cohort.limit:
                raise InvalidPolicy(
                    f"cohort {cohort.name!r} has limit {known.limit} at {known.place} and limit {cohort.limit} at "
                    f"{cohort.place}; one name has one limit: make it once and use it in both places"
                )

    def known(self) -> dict[str, Cohort]:
        """All of them, by name."""
        return dict(self._known)
