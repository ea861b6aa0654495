"""What the demonstration shows at its end: taskq's record beside a plain loop, and whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from taskq.demo.counting import Totals

__all__ = ["Report", "totals_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one demonstration. Times are in seconds."""

    indexed: Totals
    """What the jobs' results add up to."""
    plain: Totals
    """What a plain loop over the same files counted."""
    jobs: int
    by_worker: Mapping[str, int]
    """Jobs that each worker finished."""
    killed: str
    held: int
    """Running jobs of the killed worker, by the database, just before the kill."""
    lost: int
    """Attempts lost to the kill, by the ledger."""
    not_succeeded: Sequence[str]
    violations: Sequence[Mapping[str, Any]]
    survivor_exit: int
    seconds: float
    plain_seconds: float

    def problems(self) -> list[str]:
        """What is not as it should be, one line each; empty when all is well."""
        found = [
            f"{name}: taskq has {ours}, the plain loop {theirs}"
            for (name, ours), theirs in zip(asdict(self.indexed).items(), asdict(self.plain).values(), strict=True)
            if ours != theirs
        ]
        if self.jobs != self.indexed.files:
            found.append(f"{self.jobs} jobs were enqueued, {self.indexed.files} have a result")
        found += self.not_succeeded
        if not self.lost:
            found.append("no attempt was lost to the kill, so the demo has shown nothing; run it again")
        found += [
            f"taskq verify: law {v['law']}, {v['code']}, job {v['job_id']}: {v['detail']}" for v in self.violations
        ]
        if self.survivor_exit:
            found.append(f"the worker that was left ended with exit code {self.survivor_exit}, not 0")
        return found

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {"ok": not self.problems(), "problems": self.problems(), **asdict(self)}

    def show(self, console: Console) -> None:
        """Print the report for people."""
        table = Table(title="What is in the files", title_justify="left")
        for name, side in (("", "left"), ("taskq", "right"), ("plain loop", "right"), ("", "left")):
            table.add_column(name, justify="right" if side == "right" else "left")
        for (name, ours), theirs in zip(asdict(self.indexed).items(), asdict(self.plain).values(), strict=True):
            said = "not valid Python" if name == "unparsable" else name
            table.add_row(said, f"{ours:,}", f"{theirs:,}", "equal" if ours == theirs else "DIFFERENT")
        table.add_row("seconds", f"{self.seconds:.1f}", f"{self.plain_seconds:.1f}", "")
        console.print(table)
        table = Table(title="Who did it", title_justify="left")
        for name in ("worker", "jobs finished", "attempts lost", "how it ended"):
            table.add_column(name, justify="left" if name in {"worker", "how it ended"} else "right")
        for worker in sorted({*self.by_worker, self.killed}):
            dead = worker == self.killed
            how = f"killed, with {self.held} jobs running" if dead else "stopped in good order"
            table.add_row(worker, f"{self.by_worker.get(worker, 0):,}", str(self.lost) if dead else "0", how)
        console.print(table)
        console.print(f"taskq verify: {len(self.violations) or 'no'} violations")


def totals_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Totals, dict[str, int], list[str]]:
    """Add up the results of finished jobs: the totals, jobs by worker, and a line for each that did not succeed."""
    totals = Totals()
    by_worker: Counter[str] = Counter()
    others: list[str] = []
    for row in rows:
        if row["status"] == "succeeded":
            totals += Totals(**row["result"])
            by_worker[row["worker"]] += 1
        else:
            others.append(f"job {row['id']} is {row['status']}: {row['error']}")
    return totals, dict(by_worker), others
