"""The end of the demonstration: what the fan-in told beside what a plain loop over the same files comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from taskq.demo.pipeline.tasks import Summary
from taskq.demo.strikes import Strike, show_strikes
from taskq.demo.tables import show_table

__all__ = ["Report"]

MOST_NAMED = 10
"""Files that are named of those that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one demonstration.

    Attributes:
        seed: What repeats it.
        status: How the run ended.
        told: What the fan-in told; None if it did not.
        plain: What a plain loop over the same files comes to.
        files: The files, in the order of their names.
        items: What was emitted, in that order.
        pages: How many pages were asked for.
        lost_pages: How many attempts at a page were lost to kills.
        most_open: The most files that were seen open at once.
        may_be_open: How many may be, by the bound that is declared and the size of a page.
        strikes: What was done to workers.
        violations: What ``taskq verify`` found.
        exits: Exit codes of the workers at the end.
        seconds: How long it took.
        plain_seconds: How long the plain loop took.
    """

    seed: int
    status: str
    told: Summary | None
    plain: Summary
    files: Sequence[str]
    items: Sequence[str]
    pages: int
    lost_pages: int
    most_open: int
    may_be_open: int
    strikes: Sequence[Strike]
    violations: Sequence[Mapping[str, Any]]
    exits: Sequence[int]
    seconds: float
    plain_seconds: float

    def problems(self) -> list[str]:
        """What is not as it should be, one line each; empty when all is well."""
        emitted = Counter(self.items)
        found = [f"LOST: {path} was not emitted" for path in self.files if not emitted[path]][:MOST_NAMED]
        found += [f"DOUBLED: {path} was emitted {n} times" for path, n in emitted.items() if n > 1][:MOST_NAMED]
        found += [f"{path} was emitted, and is none of the files" for path in emitted.keys() - set(self.files)]
        if not found and list(self.items) != list(self.files):
            found.append("the files were not emitted in the order of their names")
        if self.told is None:
            found.append(f"LOST: the run is {self.status}, and has told nothing")
        else:
            found += [
                f"{name}: the fan-in has {ours}, the plain loop {theirs}"
                for (name, ours), theirs in zip(asdict(self.told).items(), asdict(self.plain).values(), strict=True)
                if ours != theirs
            ]
        if self.most_open > self.may_be_open:
            found.append(f"{self.most_open} files were open at once, and {self.may_be_open} may be")
        if not all(strike.held for strike in self.strikes) or not self.lost_pages:
            found.append("no worker was killed over a page, so this has shown nothing; run it again")
        found += [
            f"taskq verify: law {v['law']}, {v['code']}, job {v['job_id']}: {v['detail']}" for v in self.violations
        ]
        if any(self.exits):
            found.append(f"workers ended with exit codes {', '.join(map(str, self.exits))}, not 0")
        return found

    def well(self) -> str:
        """What is said where there are no problems."""
        return (
            f"{len(self.items)} files came in {self.pages} pages, {self.lost_pages} attempts at which were lost to "
            "kills: each was emitted once, and the fan-in's report is that of a plain loop"
        )

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        made = asdict(self)
        return {"ok": not self.problems(), "problems": self.problems(), **made, "files": len(self.files)} | {
            "items": len(self.items)
        }

    def show(self, console: Console) -> None:
        """Print the report for people."""
        told = {} if self.told is None else asdict(self.told)
        rows = []
        for name, theirs in asdict(self.plain).items():
            ours = told.get(name)
            shown = [str(each)[:16] if name == "digest" else f"{each:,}" for each in (ours or 0, theirs)]
            rows.append((name, *shown, "equal" if ours == theirs else "DIFFERENT"))
        rows.append(("seconds", f"{self.seconds:.1f}", f"{self.plain_seconds:.1f}", ""))
        show_table(console, "What is in the files", ("", "the fan-in", "a plain loop", ""), rows)
        rows = [
            ("pages asked for", f"{self.pages:,}"),
            ("attempts at pages that were lost", f"{self.lost_pages:,}"),
            ("files emitted", f"{len(self.items):,}"),
            ("files open at once, at most", f"{self.most_open:,} of {self.may_be_open:,}"),
        ]
        show_table(console, "How they came", ("", ""), rows)
        show_strikes(console, self.strikes, "jobs")
        console.print(f"taskq verify: {len(self.violations) or 'no'} violations")
