"""How bodies and hooks ask the provider. What matters in its errors is whether something may have happened."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Declined", "NoAnswer", "NotSent", "ProviderClient", "Refused", "Told"]


class NotSent(Exception):
    """The provider could not be reached: nothing was asked, so nothing happened."""


class NoAnswer(Exception):
    """The request was sent, and no answer came that tells what was done: it may have happened."""


class Declined(Exception):
    """The card was declined; nothing was charged, and nothing will be."""


class Refused(Exception):
    """The provider refused the request as such, and did nothing for it."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the provider says of a key.

    Attributes:
        state: ``charged``, ``declined``, ``closed``, ``refunded``, ``not_charged``, or ``unknown``.
        payment: What it was about.
        cents: The amount.
    """

    state: str
    payment: str = ""
    cents: int = 0


class ProviderClient:
    """One connection a request.

    Args:
        address: ``http://HOST:PORT``.
        timeout: Seconds until no answer counts as none.
    """

    def __init__(self, address: str, timeout: float = 2.0) -> None:
        where = urlsplit(address)
        self._host, self._port = where.hostname or "127.0.0.1", where.port or 80
        self._timeout = timeout

    async def charge(self, key: str, payment: str, cents: int) -> Told:
        """Charge under a key.

        Raises:
            NotSent, NoAnswer, Declined, Refused: See there.
        """
        return await self._ask("POST", "/charges", key, {"payment": payment, "cents": cents})

    async def refund(self, key: str, of_key: str, payment: str, cents: int) -> Told:
        """Refund what was charged under ``of_key``; where nothing was, nothing will be any more.

        Raises:
            NotSent, NoAnswer, Refused: See there.
        """
        return await self._ask("POST", "/refunds", key, {"charge": of_key, "payment": payment, "cents": cents})

    async def look(self, key: str) -> Told:
        """What became of a key so far; it may still change.

        Raises:
            NotSent, NoAnswer: See there.
        """
        return await self._ask("GET", f"/charges/{key}")

    async def void(self, key: str) -> Told:
        """Close a key for good, and hear what came of it before.

        Raises:
            NotSent, NoAnswer, Refused: See there.
        """
        return await self._ask("POST", f"/void/{key}")

    async def _ask(self, method: str, path: str, key: str = "", body: dict[str, Any] | None = None) -> Told:
        sent = json.dumps(body or {}).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(sent)}\r\n"
        status, said = await self._exchange(f"{head}Idempotency-Key: {key}\r\n\r\n".encode() + sent)
        match status:
            case 200:
                return Told(**said)
            case 402:
                raise Declined("the card was declined")
            case 404 if said.get("error") == "key_unknown":
                return Told("unknown")
            case _ if 400 <= status < 500 or status == 501:
                raise Refused(f"the provider refused it: {said.get('error')}")
            case _:
                raise NoAnswer(f"the provider answered with status {status}, which does not tell what it did")

    async def _exchange(self, request: bytes) -> tuple[int, dict[str, Any]]:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(self._host, self._port), self._timeout)
        except (OSError, TimeoutError) as exc:
            raise NotSent(f"the provider could not be reached: {str(exc) or type(exc).__name__}") from None
        try:
            writer.write(request)
            answer = await asyncio.wait_for(reader.read(), self._timeout)
        except (OSError, TimeoutError) as exc:
            raise NoAnswer(f"no answer came from the provider: {str(exc) or type(exc).__name__}") from None
        finally:
            writer.close()
        try:
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split(b" ")[1]), json.loads(body)
        except (IndexError, ValueError):
            raise NoAnswer(f"the provider closed the connection after {len(answer)} bytes, no answer") from None
