"""What goes wrong at the provider: told for single payments, or drawn by a seed that makes a run repeatable."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

__all__ = ["Fault", "FaultPlan"]

Fault: TypeAlias = Literal["none", "hang", "drop", "do_and_hang", "fail", "decline"]
"""hang: wait, and then do it, whoever still listens. drop: do it, and close the connection without an answer.
do_and_hang: do it, and answer much later. fail: status 500, and nothing done. decline: a refusal that stays."""
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which request meets which fault.

    Attributes:
        seed: With the payment and the number of the request it decides what is drawn.
        rates: Share of requests, from 0 to 1, that meets each fault; the rest meets none.
        told: For a payment the faults of its first requests, in order; those after them, and those of all payments that
            are not named, are drawn.
        hang: Seconds that something hangs.

    Raises:
        ValueError: A fault is not known, or the rates come to more than 1.
    """

    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    told: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hang: float = 5.0

    def __post_init__(self) -> None:
        named = {*self.rates, *(fault for faults in self.told.values() for fault in faults)}
        if unknown := named - set(FAULTS):
            raise ValueError(f"unknown faults: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
        if sum(self.rates.values()) > 1:
            raise ValueError(f"the rates come to {sum(self.rates.values()):g}; at most 1")

    def of(self, payment: str, request: int) -> Fault:
        """The fault that the n-th request about a payment meets; the first is 1."""
        told = self.told.get(payment, ())
        if request <= len(told):
            return next(fault for fault in FAULTS if fault == told[request - 1])
        drawn = random.Random(f"{self.seed}:{payment}:{request}").random()
        for fault in FAULTS:
            drawn -= self.rates.get(fault, 0.0)
            if drawn < 0:
                return fault
        return "none"

    def as_json(self) -> str:
        """As text, for the provider's process."""
        return json.dumps({"seed": self.seed, "rates": {**self.rates}, "told": {**self.told}, "hang": self.hang})

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Of that text."""
        return cls(**json.loads(text))
