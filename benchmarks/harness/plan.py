"""What each form of the benchmark measures, of whom, and how much of it.

Sizes differ between systems, so that each measurement takes seconds and not minutes: a slow system gets fewer jobs, and
the rates are those between 10 and 90 percent of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

__all__ = ["DRAIN_SHARE", "FORMS", "GROUPS", "Form", "Step", "steps_of"]

DRAIN_SHARE = {
    "taskq": 1.0,
    "pgqueuer": 0.5,
    "awa": 0.1,
    "oban": 0.05,
    "chancy": 0.05,
    "absurd": 0.02,
    "procrastinate": 0.02,
    "dbos": 0.01,
}
"""Jobs of a drain as a share of the form's."""
BULK_SHARE = {"oban": 0.2, "chancy": 0.2, "absurd": 0.2, "dbos": 0.06}
"""Those that enqueue a few thousand a second get fewer than 50,000."""
SLOW = ("absurd", "procrastinate", "dbos")
"""In the short form these are measured in the first round only."""
GROUPS = ("single", "bulk", "drain", "pickup", "notify", "idle", "finished", "later", "queues", "pinned", "flows")


@dataclass(frozen=True)
class Form:
    """How much is measured.

    Attributes:
        name: What it is called.
        takes: How long it takes on a quiet machine, for people.
        rounds: How often each measurement is made.
        single: Jobs enqueued one by one.
        bulk: Jobs enqueued in bulk.
        drain: Jobs of a drain by the fastest system.
        kinds: What the jobs of a drain do.
        processes: Worker processes of a drain.
        probes: Probes of a pick-up.
        half_load: Who is probed at half load; None for all.
        notify: Jobs of the eight clients.
        idle: Seconds of idling.
        finished: Numbers of finished jobs to drain beside.
        later: Numbers of jobs due later to drain beside.
        queues: Numbers of queues.
        flows: Children of a fan-out, chains, and bodies of steps: the kind and how many.
        pinned: Jobs drained with the horizon held back, by system.
        every_round: Whether all systems are measured in every round.
    """

    name: str
    takes: str
    rounds: int
    single: int
    bulk: int
    drain: int
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    probes: int
    half_load: tuple[str, ...] | None
    notify: int
    idle: float
    finished: tuple[int, ...]
    later: tuple[int, ...]
    queues: tuple[int, ...]
    pinned: tuple[tuple[str, int], ...]
    flows: tuple[tuple[str, int], ...]
    every_round: bool

    def with_jobs(self, jobs: int) -> Form:
        """The same with a drain of so many jobs and everything else in proportion, never more than it was."""
        share = jobs / self.drain
        return replace(
            self,
            drain=jobs,
            single=max(20, min(self.single, int(self.single * share))),
            bulk=max(100, min(self.bulk, int(self.bulk * share))),
            probes=max(10, min(self.probes, int(self.probes * share))),
            notify=max(80, min(self.notify, int(self.notify * share))),
            finished=tuple(min(rows, int(rows * share)) for rows in self.finished),
            later=tuple(min(rows, int(rows * share)) for rows in self.later),
            flows=tuple((kind, max(5, min(number, int(number * share)))) for kind, number in self.flows),
            pinned=tuple((name, min(rows, max(2000, int(rows * share)))) for name, rows in self.pinned),
        )


FORMS = {
    "short": Form(
        name="short",
        takes="under ten minutes",
        rounds=2,
        single=500,
        bulk=50_000,
        drain=120_000,
        kinds=(("noop", (1, 2)), ("sleep", (1, 2))),
        probes=100,
        half_load=("taskq", "pgqueuer", "oban"),
        notify=4000,
        idle=10.0,
        finished=(),
        later=(),
        queues=(),
        pinned=(("taskq", 100_000),),
        flows=(),
        every_round=False,
    ),
    "full": Form(
        name="full",
        takes="about two hours",
        rounds=3,
        single=2000,
        bulk=50_000,
        drain=200_000,
        kinds=(("noop", (1, 2, 4)), ("sleep", (1, 2, 4))),
        probes=300,
        half_load=None,
        notify=16_000,
        idle=30.0,
        finished=(0, 1_000_000, 10_000_000),
        later=(0, 1_000_000),
        queues=(1, 1000),
        pinned=(("taskq", 1_100_000), ("pgqueuer", 250_000)),
        flows=(("fan", 10_000), ("chain", 1000), ("steps", 1000)),
        every_round=True,
    ),
}


@dataclass(frozen=True)
class Step:
    """One measurement of one system, or of all at once.

    Attributes:
        measure: Its name in the results.
        group: The group that it belongs to.
        system: Who is measured; empty for all at once.
        size: Jobs or probes.
        kind: What the jobs do.
        processes: Worker processes.
        rows: Rows beside it, or the number of queues.
        hold: Whether the horizon is held back.
    """

    measure: str
    group: str
    system: str
    size: int = 0
    kind: str = "noop"
    processes: int = 1
    rows: int = 0
    hold: bool = False


def steps_of(form: Form, number: int, systems: Sequence[str], only: Collection[str] = GROUPS) -> list[Step]:
    """The steps of one round, the systems in turn and each round beginning with another one.

    Args:
        form: How much.
        number: The round, from 0.
        systems: Who takes part.
        only: The groups that are wanted.
    """
    first = number % len(systems) if systems else 0
    turn = [*systems[first:], *systems[:first]]
    if not form.every_round and number > 0:
        turn = [name for name in turn if name not in SLOW]
    once = number == 0
    steps: list[Step] = []

    def drained(name: str) -> int:
        return max(100, int(form.drain * DRAIN_SHARE[name]))

    def add(measure: str, group: str, names: Sequence[str], size: int | None = None, **more: object) -> None:
        steps.extend(
            Step(measure, group, name, drained(name) if size is None else size, **more)  # type: ignore[arg-type]
            for name in names
        )

    add("single", "single", turn, form.single)
    for name in turn:
        add("bulk", "bulk", [name], max(100, int(form.bulk * BULK_SHARE.get(name, 1))))
    for kind, processes in form.kinds:
        label = "1ms" if kind == "sleep" else kind
        for each in processes:
            add(f"drain_{label}_{each}", "drain", turn, kind=kind, processes=each)
    add("pickup_idle", "pickup", turn, form.probes)
    half = turn if form.half_load is None else _able(turn, form.half_load)
    add("pickup_half", "pickup", half, form.probes)
    add("notify", "notify", [name for name in turn if name == "taskq"], form.notify)
    if systems and (once or form.every_round):
        steps.append(Step("idle", "idle", ""))
    ours = [name for name in turn if name == "taskq"]
    for rows in form.finished:
        # Ten million, copied and checked, take minutes: of taskq alone.
        add(f"finished_{_short(rows)}", "finished", _able(turn, COPIES) if rows <= 1_000_000 else ours, rows=rows)
    for rows in form.later:
        add(f"later_{_short(rows)}", "later", _able(turn, BULK_LATER), rows=rows)
    for rows in form.queues:
        add(f"queues_{rows}", "queues", _able(turn, MANY_QUEUES), rows=rows)
    for name, jobs in form.pinned:
        if name in turn and (once or form.every_round):
            add("pinned_free", "pinned", [name], jobs)
            add("pinned_held", "pinned", [name], jobs, hold=True)
    for kind, number_of in form.flows:
        add(f"flows_{kind}", "flows", _able(turn, FLOWS), number_of, kind=kind)
    return [step for step in steps if step.group in only]


COPIES = ("taskq", "pgqueuer", "procrastinate", "oban")
"""Whose finished jobs are copied by SQL; the others' stand in several tables, or in arrays."""
BULK_LATER = ("taskq", "pgqueuer", "procrastinate")
"""Who enqueues a million jobs in a minute or two; the others would take up to a quarter of an hour each time."""
FLOWS = ("taskq", "dbos", "absurd")
"""Who has workflows."""
MANY_QUEUES = ("taskq", "pgqueuer", "procrastinate")
"""Whose one worker serves a thousand queues; the others would run a loop for each."""


def _able(names: Sequence[str], able: Collection[str]) -> list[str]:
    return [name for name in names if name in able]


def _short(rows: int) -> str:
    for unit, letter in ((1_000_000, "m"), (1000, "k")):
        if rows >= unit and rows % unit == 0:
            return f"{rows // unit}{letter}"
    return str(rows)
