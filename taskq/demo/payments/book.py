"""What the provider does with a request: decided in one go, and in the journal before it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskq.demo.payments.journal import Entry, Event, Journal

__all__ = ["Answer", "Book"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of a response."""

    status: int
    body: dict[str, Any]


class Book:
    """The provider's keys and what came of them.

    Args:
        file: The journal; what it says is taken up.
        honours_keys: Whether a repeated key is answered with what came of the first request. Otherwise each request
            is carried out again, and no key can be closed.
    """

    def __init__(self, file: Path, *, honours_keys: bool = True) -> None:
        self.honours_keys = honours_keys
        self._known: dict[str, Entry] = {}
        for entry in Journal.read(file):
            self._learn(entry)
        self._journal = Journal(file)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def asked(self, event: Event, key: str, payment: str, cents: int) -> None:
        """A request has arrived."""
        self._note(event, key, payment, cents)

    def failed(self, key: str, payment: str, cents: int) -> Answer:
        """An error of the provider's own: nothing is done."""
        self._note("failed", key, payment, cents)
        return Answer(500, {"error": "internal"})

    def charge(self, key: str, payment: str, cents: int, *, decline: bool = False) -> Answer:
        """Charge, or answer with what came of this key."""
        if self.honours_keys and (first := self._known.get(key)):
            if first.event == "closed":
                self._note("refused", key, payment, cents)
                return Answer(409, {"error": "key_closed"})
            return self._repeated(first, key, payment, cents)
        self._note("declined" if decline else "charged", key, payment, cents)
        return self._said(self._known[key])

    def refund(self, key: str, of_key: str, payment: str, cents: int) -> Answer:
        """Refund what was charged under ``of_key``; if nothing was, nothing will be any more."""
        if self.honours_keys and (first := self._known.get(key)):
            return self._repeated(first, key, payment, cents)
        charge = self._known.get(of_key)
        if charge is None and self.honours_keys:
            self._note("closed", of_key, payment)
        done = charge is not None and charge.event == "charged"
        self._note("refunded" if done else "not_charged", key, payment, cents)
        return self._said(self._known[key])

    def void(self, key: str) -> Answer:
        """Close a key for good, unless something came of it before; the answer says what."""
        if not self.honours_keys:
            return Answer(501, {"error": "keys_not_honoured"})
        if key not in self._known:
            self._note("closed", key)
        return self.look(key)

    def look(self, key: str) -> Answer:
        """What became of a key."""
        known = self._known.get(key)
        return Answer(404, {"error": "key_unknown"}) if known is None else Answer(200, self._told(known))

    def _repeated(self, first: Entry, key: str, payment: str, cents: int) -> Answer:
        if (first.payment, first.cents) != (payment, cents):
            self._note("refused", key, payment, cents)
            return Answer(422, {"error": "key_reused", "first": self._told(first)})
        self._note("repeated", key, payment, cents)
        return self._said(first)

    def _said(self, entry: Entry) -> Answer:
        return Answer(402 if entry.event == "declined" else 200, self._told(entry))

    def _told(self, entry: Entry) -> dict[str, Any]:
        return {"state": entry.event, "payment": entry.payment, "cents": entry.cents}

    def _note(self, event: Event, key: str, payment: str = "", cents: int = 0) -> None:
        entry = Entry(event, key, payment, cents)
        self._journal.append(entry)
        self._learn(entry)

    def _learn(self, entry: Entry) -> None:
        if entry.event in {"charged", "declined", "closed", "refunded", "not_charged"}:
            self._known.setdefault(entry.key, entry)
