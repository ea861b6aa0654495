"""The end of the demonstration: the provider's journal and the warehouse beside the runs, order by order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from taskq.demo.strikes import Strike, show_strikes
from taskq.demo.tables import show_table

__all__ = ["Order", "Report", "Stock"]

UNDONE = (("charged", "refunded", "refund"), ("reserved", "released", "release"), ("shipped", "recalled", "recall"))
"""What is done for an order, what undoes it, and the compensation that does."""
SIDES = tuple(side for done, undone, _ in UNDONE for side in (done, undone))


@dataclass(frozen=True, slots=True)
class Order:
    """One order, as its run, its effects, the provider and the warehouse have it.

    Attributes:
        number: The order; the provider's journal calls its payment ``order-<number>``.
        status: Of its run; ``missing`` where there is none.
        node: The node that failed; empty for none.
        error: The type of that node's error; empty for none.
        charged: Charges that the provider made.
        refunded: Refunds that it made.
        reserved: How often one was reserved for it.
        released: How often that was given back.
        shipped: How often one was taken from the shelf.
        recalled: How often it was put back there.
        promised: By the compensation's name, what its body returned; ``not settled`` where it has not succeeded.
    """

    number: int
    status: str
    node: str = ""
    error: str = ""
    charged: int = 0
    refunded: int = 0
    reserved: int = 0
    released: int = 0
    shipped: int = 0
    recalled: int = 0
    promised: Mapping[str, str] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """In what the sides disagree."""
        sides = {side: int(getattr(self, side)) for side in SIDES}
        found = [f"DOUBLED: order {self.number} was {side} {n} times" for side, n in sides.items() if n > 1]
        found += [
            f"LOST: order {self.number} is {self.status}, and its {name} is {said}"
            for name, said in self.promised.items()
            if said == "not settled"
        ]
        if self.status not in {"succeeded", "failed", "cancelled"}:
            return [*found, f"LOST: the run of order {self.number} is {self.status}"]
        for done, undone, compensation in UNDONE:
            said = (
                f"order {self.number} {self.status}, was {done} {sides[done]} times and {undone} {sides[undone]} times"
            )
            if self.status == "succeeded":
                if not sides[done] or sides[undone]:
                    found.append(f"LOST: {said}")
            elif sides[done] != sides[undone]:
                found.append(f"LOST: {said}")
            if (compensation in self.promised) != bool(sides[undone]):
                told = "promised" if compensation in self.promised else "not promised"
                found.append(
                    f"the {compensation} of order {self.number} was {told}; it was {undone} {sides[undone]} times"
                )
        return found

    @property
    def story(self) -> str:
        """What happened, by the run's record."""
        if not self.node:
            return self.status
        return f"{self.status}: {self.node} ({self.error.rpartition('.')[2] or '?'})"


@dataclass(frozen=True, slots=True)
class Stock:
    """What the books and the shelf had of an item to begin with, and have in the end."""

    item: str
    books_before: int
    shelf_before: int
    books: int
    shelf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one demonstration.

    Attributes:
        seed: What repeats its faults.
        orders: Each order.
        stock: Each item.
        strangers: Payments that the provider's journal has, and nobody asked for.
        cancels: What cancelling was answered, how often.
        strikes: What was done to workers.
        unknowns: Attempts that became unknown, by reason and by how they ended.
        left_unknown: Jobs that are unknown in the end.
        requests: What the provider was asked and did, by event.
        violations: What ``taskq verify`` found.
        exits: Exit codes of the workers at the end.
        seconds: How long it took.
    """

    seed: int
    orders: Sequence[Order]
    stock: Sequence[Stock]
    strangers: Sequence[str]
    cancels: Mapping[str, int]
    strikes: Sequence[Strike]
    unknowns: Sequence[Mapping[str, Any]]
    left_unknown: int
    requests: Mapping[str, int]
    violations: Sequence[Mapping[str, Any]]
    exits: Sequence[int]
    seconds: float

    @property
    def undone(self) -> int:
        """Orders that were charged, and did not succeed."""
        return sum(bool(order.charged) for order in self.orders if order.status != "succeeded")

    def problems(self) -> list[str]:
        """What is not as it should be, one line each; empty when all is well."""
        found = [problem for order in self.orders for problem in order.problems()]
        kept = sum(order.status == "succeeded" for order in self.orders)
        for place in ("books", "shelf"):
            gone = sum(getattr(item, f"{place}_before") - getattr(item, place) for item in self.stock)
            if gone != kept:
                found.append(f"LOST: the {place} have given away {gone}, and {kept} orders have succeeded")
        found += [f"the provider has a payment that nobody asked for: {name}" for name in self.strangers]
        if self.left_unknown:
            found.append(f"{self.left_unknown} outcomes are still unknown")
        found += [
            f"taskq verify: law {v['law']}, {v['code']}, job {v['job_id']}: {v['detail']}" for v in self.violations
        ]
        if any(self.exits):
            found.append(f"workers ended with exit codes {', '.join(map(str, self.exits))}, not 0")
        if not any(strike.held for strike in self.strikes):
            found.append("no worker was killed while it ran jobs, so this has shown nothing; run it again")
        failed_at = {order.node for order in self.orders if order.status == "failed"}
        if not {"charge", "ship"} <= failed_at:
            found.append("no charge or no shipment failed for good, so this has shown nothing; run it again")
        return found

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {"ok": not self.problems(), "problems": self.problems(), **asdict(self)}

    def well(self) -> str:
        """What a report without problems comes to."""
        return (
            f"{len(self.orders)} orders ended, {self.undone} of them were charged in vain and refunded; none was "
            f"charged twice, and all their stock is accounted for, in {self.seconds:.0f} s"
        )

    def show(self, console: Console) -> None:
        """Print the report for people."""
        show_strikes(console, self.strikes, "jobs")
        show_table(console, "What became of the orders", ("the run", "orders", *SIDES), self._sides())
        stock = [(s.item, f"{s.books_before}", f"{s.books}", f"{s.shelf_before}", f"{s.shelf}") for s in self.stock]
        heads = ("item", "in the books", "in the end", "on the shelf", "in the end")
        show_table(console, "Stock", heads, stock)
        rows = [(str(row["reason"]), str(row["n"]), str(row["outcome"] or "OPEN")) for row in self.unknowns]
        show_table(console, "Attempts that were unknown", ("because", "attempts", "how they ended"), rows)
        for title, counts in (("The provider's journal", self.requests), ("Cancelling was answered", self.cancels)):
            console.print(
                f"{title}: " + ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in sorted(counts.items()))
            )
        console.print(f"taskq verify: {len(self.violations) or 'no'} violations")

    def _sides(self) -> list[tuple[str, ...]]:
        stories = sorted({order.story for order in self.orders})
        groups = [(story, [order for order in self.orders if order.story == story]) for story in stories]
        return [
            (story, f"{len(group)}", *(f"{sum(getattr(order, side) for order in group)}" for side in SIDES))
            for story, group in (*groups, ("all", list(self.orders)))
        ]
