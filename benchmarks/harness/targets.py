"""The ratios that the results end with, each with its target. A ratio is taken in each round, then their median.

Within a round the systems were measured one after the other, so what the machine did to one it did to the others too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness.figures import ratio, summarise

__all__ = ["RATIOS", "Record", "Results", "Target", "judge"]

OURS = "taskq"
STEADY = "jobs_per_s"
WHOLE = "jobs_per_s_whole"


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        measure: Its name.
        system: Who was measured.
        number: The round.
        figures: What came out, by name.
    """

    measure: str
    system: str
    number: int
    figures: Mapping[str, Any]


class Results:
    """All measurements, and what is asked of them.

    Args:
        records: The measurements.
        traits: Of each system what tells peers apart: ``core`` and ``keeps``.
    """

    def __init__(self, records: Sequence[Record], traits: Mapping[str, Mapping[str, Any]]) -> None:
        self.records = list(records)
        self.traits = traits

    def rounds(self, measure: str, system: str, figure: str) -> dict[int, float]:
        """A figure by round; of a drain the steady rate, and where a round has none the whole run's for all of them."""
        if figure == STEADY and self._lacks_steady(measure, system):
            figure = WHOLE
        found = {r.number: r.figures for r in self.records if (r.measure, r.system) == (measure, system)}
        return {number: each[figure] for number, each in found.items() if each.get(figure) is not None}

    def pair(
        self, ours: tuple[str, str, str], theirs: tuple[str, str, str]
    ) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """Two figures by round, each given by measure, system and figure: both steady rates, or both of whole runs."""
        if any(figure == STEADY and self._lacks_steady(measure, system) for measure, system, figure in (ours, theirs)):
            ours, theirs = (
                (measure, system, WHOLE if figure == STEADY else figure) for measure, system, figure in (ours, theirs)
            )
        return self.rounds(*ours), self.rounds(*theirs)

    def _lacks_steady(self, measure: str, system: str) -> bool:
        mine = (r.figures for r in self.records if (r.measure, r.system) == (measure, system))
        return any(each.get(STEADY) is None and WHOLE in each for each in mine)

    def median(self, measure: str, system: str, figure: str) -> float | None:
        """The median over the rounds; None if there is none."""
        values = list(self.rounds(measure, system, figure).values())
        return summarise(values).median if values else None

    def best_peer(
        self, measure: str, figure: str, largest: bool = True, among: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> str | None:
        """The peer with the best median.

        Args:
            measure: The measure.
            figure: The figure.
            largest: Whether more is better.
            among: Which peers count, by their traits; by default all.
        """
        medians = {
            name: value
            for name, traits in self.traits.items()
            if name != OURS and (among is None or among(traits))
            if (value := self.median(measure, name, figure)) is not None
        }
        if not medians:
            return None
        return (max if largest else min)(medians, key=lambda name: medians[name])


@dataclass(frozen=True)
class Target:
    """A ratio and what is wanted of it.

    Attributes:
        name: Its name in the results.
        compare: Gives the values of the rounds, and against whom.
        wanted: ``>=`` or ``<=``.
        target: The bound.
    """

    name: str
    compare: Callable[[Results], tuple[list[float], str | None]]
    wanted: Literal[">=", "<="]
    target: float


def judge(results: Results) -> dict[str, dict[str, Any]]:
    """Each ratio with its spread, whom it is against, its target, and whether it is met (None: not measured)."""
    judged: dict[str, dict[str, Any]] = {}
    for target in RATIOS:
        values, against = target.compare(results)
        entry: dict[str, Any] = {"value": None, "target": f"{target.wanted} {target.target:g}", "met": None}
        if values:
            summary = summarise(values)
            met = summary.median >= target.target if target.wanted == ">=" else summary.median <= target.target
            entry |= {"value": summary.median, "low": summary.low, "high": summary.high, "met": met}
        if against:
            entry["against"] = against
        judged[target.name] = entry
    return judged


def _over_peer(
    measure: str, figure: str, largest: bool = True, among: Callable[[Mapping[str, Any]], bool] | None = None
) -> Callable[[Results], tuple[list[float], str | None]]:
    def compare(results: Results) -> tuple[list[float], str | None]:
        peer = results.best_peer(measure, figure, largest, among)
        if peer is None:
            return [], None
        return _paired(*results.pair((measure, OURS, figure), (measure, peer, figure))), peer

    return compare


def _over_one(measure: str, peer: str, figure: str) -> Callable[[Results], tuple[list[float], str | None]]:
    def compare(results: Results) -> tuple[list[float], str | None]:
        return _paired(*results.pair((measure, OURS, figure), (measure, peer, figure))), None

    return compare


def _over_own(
    measure: str, base: str, figure: str = "jobs_per_s", base_figure: str | None = None
) -> Callable[[Results], tuple[list[float], str | None]]:
    def compare(results: Results) -> tuple[list[float], str | None]:
        return _paired(*results.pair((measure, OURS, figure), (base, OURS, base_figure or figure))), None

    return compare


def _figure(measure: str, figure: str) -> Callable[[Results], tuple[list[float], str | None]]:
    return lambda results: (list(results.rounds(measure, OURS, figure).values()), None)


def _paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    found = [ratio(value, theirs.get(number)) for number, value in ours.items()]
    return [value for value in found if value is not None]


def _python(traits: Mapping[str, Any]) -> bool:
    return bool(traits["core"] == "python")


def _keeps(traits: Mapping[str, Any]) -> bool:
    return bool(traits["keeps"])


RATIOS: Collection[Target] = (
    *(
        Target(
            f"drain_{kind}_{processes}_process_vs_fastest_python_peer",
            _over_peer(f"drain_{kind}_{processes}", "jobs_per_s", among=_python),
            ">=",
            2.0,
        )
        for kind in ("noop", "1ms")
        for processes in (1, 2, 4)
    ),
    Target("bulk_vs_fastest_peer", _over_peer("bulk", "jobs_per_s"), ">=", 1.5),
    Target("single_vs_fastest_peer", _over_peer("single", "jobs_per_s"), ">=", 1.1),
    Target("notify_vs_silent", _over_own("notify", "notify", "adaptive_jobs_per_s", "silent_jobs_per_s"), ">=", 0.8),
    Target("pickup_p50_vs_best_peer", _over_peer("pickup_idle", "p50_ms", largest=False), "<=", 1.0),
    Target("pickup_p99_vs_best_peer", _over_peer("pickup_idle", "p99_ms", largest=False), "<=", 1.0),
    Target("pickup_half_load_p50_vs_best_peer", _over_peer("pickup_half", "p50_ms", largest=False), "<=", 1.0),
    Target("pickup_half_load_p99_vs_best_peer", _over_peer("pickup_half", "p99_ms", largest=False), "<=", 1.0),
    Target(
        "wal_vs_leanest_keeping_peer",
        _over_peer("drain_noop_1", "wal_bytes_per_job", largest=False, among=_keeps),
        "<=",
        1.0,
    ),
    Target("idle_statements_per_s", _figure("idle", "statements_per_s"), "<=", 1.5),
    Target("idle_memory_vs_leanest_peer", _over_peer("idle", "resident_mib", largest=False), "<=", 1.5),
    Target("drain_pinned_horizon_vs_free", _over_own("pinned_held", "pinned_free"), ">=", 0.9),
    Target(
        "drain_pinned_horizon_at_end_vs_free", _over_own("pinned_held", "pinned_free", "jobs_per_s_at_end"), ">=", 0.9
    ),
    Target("drain_1m_finished_vs_empty", _over_own("finished_1m", "finished_0"), ">=", 0.9),
    Target("drain_10m_finished_vs_empty", _over_own("finished_10m", "finished_0"), ">=", 0.9),
    Target("drain_1m_later_vs_empty", _over_own("later_1m", "later_0"), ">=", 0.9),
    *(
        Target(f"flows_{kind}_vs_{peer}", _over_one(f"flows_{kind}", peer, "nodes_per_s"), ">=", 3.0)
        for kind in ("fan", "chain", "steps")
        for peer in ("dbos", "absurd")
    ),
    Target("drain_1000_queues_vs_one", _over_own("queues_1000", "queues_1"), ">=", 0.5),
)
