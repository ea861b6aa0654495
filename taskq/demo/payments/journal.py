"""The provider's journal: one line for everything that it was asked and did, on disk before any answer is sent."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["Entry", "Event", "Journal", "Ledger"]

Event: TypeAlias = Literal[
    "asked", "charged", "declined", "repeated", "refused", "failed", "closed", "refund_asked", "refunded", "not_charged"
]
"""asked, refund_asked: a request arrived. charged, refunded: money moved. declined: it will not. repeated: answered
with what came of the first request under its key. refused: another request under a used key, or a key that is closed.
failed: an error, and nothing done. closed: nothing will be charged under the key any more. not_charged: there was
nothing to refund, and there will be nothing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line.

    Attributes:
        event: What happened.
        key: The idempotency key.
        payment: What the request was about, as the caller named it.
        cents: The amount.
    """

    event: Event
    key: str
    payment: str = ""
    cents: int = 0


class Journal:
    """The file, open for appending.

    Args:
        file: It is made where it is missing; the lines that it has are kept, but for a last one that was cut off.
    """

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        whole = file.read_bytes()
        os.ftruncate(self._handle, whole.rfind(b"\n") + 1)

    def append(self, entry: Entry) -> None:
        """Write one line, and have it on disk."""
        os.write(self._handle, (json.dumps(asdict(entry), separators=(",", ":")) + "\n").encode())
        os.fdatasync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    @staticmethod
    def read(file: Path) -> list[Entry]:
        """All lines in order; a last one that was cut off in the middle is left out, as it was never answered."""
        if not file.exists():
            return []
        whole = file.read_text(encoding="utf-8")
        return [Entry(**json.loads(line)) for line in whole[: whole.rfind("\n") + 1].splitlines()]


class Ledger:
    """What the lines add up to.

    Attributes:
        entries: The lines.
        calls: Requests to charge, by key.
        charges: Charges that were made, by payment.
        refunds: Refunds that were made, by payment.
        declined: Payments that were declined.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.calls = Counter(e.key for e in self._of("asked"))
        self.charges = Counter(e.payment for e in self._of("charged"))
        self.refunds = Counter(e.payment for e in self._of("refunded"))
        self.declined = {e.payment for e in self._of("declined")}

    @classmethod
    def read(cls, file: Path) -> Ledger:
        """Of a journal's file."""
        return cls(Journal.read(file))

    def charged(self, key: str) -> int:
        """How many charges were made under a key."""
        return sum(e.key == key for e in self._of("charged"))

    def events(self) -> dict[str, int]:
        """How many lines there are of each event."""
        return dict(Counter(entry.event for entry in self.entries))

    def _of(self, event: Event) -> Iterator[Entry]:
        return (e for e in self.entries if e.event == event)
