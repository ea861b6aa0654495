"""The end of the demonstration: the provider's journal beside taskq's record, payment by payment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from taskq.demo.strikes import Strike, show_strikes
from taskq.demo.tables import show_table

__all__ = ["Payment", "Report", "Strike"]


@dataclass(frozen=True, slots=True)
class Payment:
    """One payment, as taskq and as the provider have it.

    Attributes:
        name: What the provider's journal calls it.
        status: Of its job; ``missing`` where there is no finished one.
        error: The type of the job's error; empty for none.
        charged: Charges that the provider made.
        refunded: Refunds that it made.
        refund: What the body of its terminal effect returned; None where it has no effect that is settled.
    """

    name: str
    status: str
    error: str = ""
    charged: int = 0
    refunded: int = 0
    refund: str | None = None

    def problems(self) -> list[str]:
        """In what the two disagree."""
        found = []
        if self.charged > 1:
            found.append(f"DOUBLED: {self.name} was charged {self.charged} times")
        if self.refunded > 1:
            found.append(f"DOUBLED: {self.name} was refunded {self.refunded} times")
        match self.status:
            case "succeeded":
                if not self.charged:
                    found.append(f"LOST: the job of {self.name} has succeeded, and the provider charged nothing")
                if self.refunded:
                    found.append(f"LOST: the job of {self.name} has succeeded, and its charge was refunded")
            case "failed" | "cancelled":
                if self.charged and not self.refunded:
                    found.append(f"LOST: the job of {self.name} {self.status}, and its charge was never refunded")
                if self.refund is None:
                    found.append(f"LOST: the job of {self.name} {self.status}, and its refund is not settled")
                elif (self.refund == "refunded") != bool(self.refunded):
                    found.append(f"{self.name}: its refund says {self.refund}, the provider made {self.refunded}")
            case other:
                found.append(f"LOST: the job of {self.name} is {other}")
        return found

    @property
    def story(self) -> str:
        """What happened, by taskq's record."""
        if self.status == "succeeded":
            return "succeeded: charged"
        return f"{self.status} ({self.error.rpartition('.')[2] or '?'}): {self.refund or 'not settled'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one demonstration.

    Attributes:
        seed: What repeats its faults.
        payments: Each payment.
        strangers: Payments that the provider's journal has, and nobody asked for.
        strikes: What was done to workers.
        unknowns: Attempts that became unknown, by reason and by how they ended.
        resolved: What the hook decided: ``happened``, ``did_not_happen``; how often.
        left_unknown: Jobs that are unknown in the end.
        requests: What the provider was asked and did, by event.
        violations: What ``taskq verify`` found.
        exits: Exit codes of the workers at the end.
        seconds: How long it took.
    """

    seed: int
    payments: Sequence[Payment]
    strangers: Sequence[str]
    strikes: Sequence[Strike]
    unknowns: Sequence[Mapping[str, Any]]
    resolved: Mapping[str, int]
    left_unknown: int
    requests: Mapping[str, int]
    violations: Sequence[Mapping[str, Any]]
    exits: Sequence[int]
    seconds: float

    def problems(self) -> list[str]:
        """What is not as it should be, one line each; empty when all is well."""
        found = [problem for payment in self.payments for problem in payment.problems()]
        found += [f"the provider has a payment that nobody asked for: {name}" for name in self.strangers]
        if self.left_unknown:
            found.append(f"{self.left_unknown} outcomes are still unknown")
        found += [
            f"taskq verify: law {v['law']}, {v['code']}, job {v['job_id']}: {v['detail']}" for v in self.violations
        ]
        if any(self.exits):
            found.append(f"workers ended with exit codes {', '.join(map(str, self.exits))}, not 0")
        kinds = {strike.kind for strike in self.strikes if strike.held}
        if kinds != {"killed", "frozen"}:
            found.append("no worker was killed or none frozen under a charge, so this has shown nothing; run it again")
        if not self.unknowns:
            found.append("no outcome was unknown, so this has shown nothing; run it again")
        return found

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {"ok": not self.problems(), "problems": self.problems(), **asdict(self)}

    def show(self, console: Console) -> None:
        """Print the report for people."""
        show_strikes(console, self.strikes, "charges")
        show_table(console, "What became of the payments", ("the job", "jobs", "charged", "refunded"), self._sides())
        show_table(
            console, "Outcomes that were unknown", ("because", "attempts", "how it was settled"), self._settled()
        )
        asked = ", ".join(f"{n} {event.replace('_', ' ')}" for event, n in sorted(self.requests.items()))
        console.print(f"The provider's journal: {asked}")
        console.print(f"taskq verify: {len(self.violations) or 'no'} violations")

    def _sides(self) -> list[tuple[str, ...]]:
        jobs, charged, refunded = Counter[str](), Counter[str](), Counter[str]()
        for payment in self.payments:
            jobs[payment.story] += 1
            charged[payment.story] += payment.charged
            refunded[payment.story] += payment.refunded
        rows = [(story, f"{jobs[story]}", f"{charged[story]}", f"{refunded[story]}") for story in sorted(jobs)]
        return [*rows, ("all", f"{len(self.payments)}", f"{charged.total()}", f"{refunded.total()}")]

    def _settled(self) -> list[tuple[str, ...]]:
        how = {"resolved": "reconciled with the provider", None: "OPEN"}
        rows = [
            (str(row["reason"]), str(row["n"]), how.get(row["outcome"], "told late by its own body"))
            for row in self.unknowns
        ]
        said = f"{self.resolved.get('happened', 0)} had happened, {self.resolved.get('did_not_happen', 0)} had not"
        return [*rows, ("all", str(sum(int(row["n"]) for row in self.unknowns)), f"reconciled: {said}")]
