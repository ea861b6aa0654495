"""Arithmetic on what was measured: medians and spreads, quantiles, rates between two points of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Sample", "Summary", "quantile", "rate_around", "ratio", "steady_rate", "summarise", "time_at"]


@dataclass(frozen=True)
class Sample:
    """So many jobs were done at a time (seconds of any one clock)."""

    at: float
    done: int


@dataclass(frozen=True)
class Summary:
    """Rounds of one figure: the median, the smallest and largest, how many."""

    median: float
    low: float
    high: float
    rounds: int


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value.

    Raises:
        ValueError: There is none.
    """
    if not values:
        raise ValueError("there is nothing to summarise")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed (nearest rank).

    Raises:
        ValueError: There are no values, or the share is not above 0 and at most 1.
    """
    if not values or not 0 < share <= 1:
        raise ValueError(f"no quantile {share} of {len(values)} values")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def time_at(samples: Sequence[Sample], done: float) -> float | None:
    """When so many jobs were done, taking the rate between two samples as even; None if no sample reaches it."""
    before: Sample | None = None
    for sample in samples:
        if sample.done >= done:
            if before is None or sample.done == before.done:
                return sample.at
            share = (done - before.done) / (sample.done - before.done)
            return before.at + share * (sample.at - before.at)
        before = sample
    return None


def steady_rate(samples: Sequence[Sample], jobs: int, low: float = 0.1, high: float = 0.9) -> float | None:
    """Jobs a second between two shares of the run; None unless at least one sample lies between them.

    Starting, and the end when fewer jobs are left than workers want, are left out this way. Without a sample between
    the two, the rate would be a guess from the whole run.
    """
    if not any(low * jobs < sample.done < high * jobs for sample in samples):
        return None
    return rate_between(samples, low * jobs, high * jobs)


def rate_between(samples: Sequence[Sample], low: float, high: float) -> float | None:
    """Jobs a second between two counts; None if a count was not reached."""
    start, end = time_at(samples, low), time_at(samples, high)
    if start is None or end is None or end <= start:
        return None
    return (high - low) / (end - start)


def rate_around(samples: Sequence[Sample], done: int, width: int) -> float | None:
    """Jobs a second from a count on, over a width of jobs; before the last so many if the run ends earlier."""
    if not samples:
        return None
    high = min(done + width, samples[-1].done)
    return rate_between(samples, max(0, high - width), high)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours over theirs; None if either is missing or theirs is zero."""
    if ours is None or not theirs:
        return None
    return ours / theirs
