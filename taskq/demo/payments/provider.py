"""``python -m taskq.demo.payments.provider JOURNAL``: a payment provider on this machine, in a process of its own.

``POST /charges`` and ``POST /refunds`` with an ``Idempotency-Key``, ``GET /charges/<key>`` for what became of a key,
``POST /void/<key>`` to close one for good. It prints its address, serves one request a connection, and ends when its
standard input does, so that it never outlives who started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from taskq.demo.payments.book import Answer, Book
from taskq.demo.payments.faults import FaultPlan
from taskq.errors import TaskQError

__all__ = ["Provider", "running_provider"]

LONGEST = 65536
"""Bytes of a request."""
PATIENCE = 30.0
"""Seconds for a request to arrive, and for the process to end."""


class Provider:
    """The server; every decision is the book's.

    Args:
        book: Its book.
        plan: What goes wrong.
    """

    def __init__(self, book: Book, plan: FaultPlan) -> None:
        self._book = book
        self._plan = plan
        self._requests: Counter[str] = Counter()

    async def serve(self, host: str = "127.0.0.1") -> asyncio.Server:
        """Listen on a free port."""
        return await asyncio.start_server(self._on_connection, host, 0, backlog=512)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever asked may be gone: what was begun is carried out all the same, until this process ends.
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            answer = await self._answer(*await asyncio.wait_for(_read(reader), PATIENCE))
            if answer is not None:
                body = json.dumps(answer.body).encode()
                head = f"HTTP/1.1 {answer.status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()

    async def _answer(self, method: str, path: str, key: str, body: dict[str, Any]) -> Answer | None:
        match method, path.strip("/").split("/"):
            case "GET", ["charges", of]:
                return self._book.look(of)
            case "POST", ["void", of]:
                return self._book.void(of)
            case "POST", [("charges" | "refunds") as what]:
                payment, cents = body.get("payment"), body.get("cents")
                if not key or not isinstance(payment, str) or not isinstance(cents, int):
                    return Answer(400, {"error": "needs an Idempotency-Key, payment and cents"})
                if what == "charges":
                    return await self._charge(key, payment, cents)
                return await self._refund(key, str(body.get("charge")), payment, cents)
            case _:
                return Answer(404, {"error": "no such path"})

    async def _charge(self, key: str, payment: str, cents: int) -> Answer | None:
        self._book.asked("asked", key, payment, cents)
        fault = self._fault(payment)
        return await self._carry_out(
            fault,
            do=lambda: self._book.charge(key, payment, cents, decline=fault == "decline"),
            fail=lambda: self._book.failed(key, payment, cents),
        )

    async def _refund(self, key: str, of_key: str, payment: str, cents: int) -> Answer | None:
        self._book.asked("refund_asked", key, payment, cents)
        return await self._carry_out(
            self._fault(f"refund-{payment}"),
            do=lambda: self._book.refund(key, of_key, payment, cents),
            fail=lambda: self._book.failed(key, payment, cents),
        )

    def _fault(self, subject: str) -> str:
        self._requests[subject] += 1
        return self._plan.of(subject, self._requests[subject])

    async def _carry_out(self, fault: str, *, do: Callable[[], Answer], fail: Callable[[], Answer]) -> Answer | None:
        match fault:
            case "hang":
                await asyncio.sleep(self._plan.hang)
                return do()
            case "do_and_hang":
                answer = do()
                await asyncio.sleep(self._plan.hang)
                return answer
            case "drop":
                do()
                return None
            case "fail":
                return fail()
            case _:
                return do()


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, str, dict[str, Any]]:
    """Method, path, idempotency key and body of a request; a body that is no JSON object is empty."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, *_ = [*head[0].split(" "), "", ""]
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    length = fields.get("content-length", "0")
    sent = await reader.readexactly(min(int(length), LONGEST) if length.isdigit() else 0)
    try:
        body = json.loads(sent)
    except ValueError:
        body = {}
    return method, path, fields.get("idempotency-key", ""), body if isinstance(body, dict) else {}


@contextmanager
def running_provider(
    journal: Path, plan: FaultPlan, *, honours_keys: bool = True, environ: dict[str, str] | None = None
) -> Iterator[str]:
    """A provider in a process of its own until the block ends; gives its address.

    Args:
        journal: Its file; what stands in it is taken up.
        plan: What goes wrong.
        honours_keys: Whether it repeats answers, rather than charges.
        environ: The environment of its process; by default this one's.

    Raises:
        TaskQError: It did not start, and has said why on standard error.
    """
    command = [sys.executable, "-m", "taskq.demo.payments.provider", str(journal), "--faults", plan.as_json()]
    process = subprocess.Popen(
        [*command, *([] if honours_keys else ["--ignore-keys"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # Ctrl-C is for who started it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not (address := process.stdout.readline().decode().strip()):
            raise TaskQError(
                f"the payment provider ended with exit code {process.wait(PATIENCE)}; see what it says above"
            )
        yield address
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _serve_until_end_of_input(options: argparse.Namespace) -> None:
    book = Book(options.journal, honours_keys=not options.ignore_keys)
    server = await Provider(book, FaultPlan.from_json(options.faults)).serve(options.host)
    print("http://{}:{}".format(*server.sockets[0].getsockname()[:2]), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    server.close()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("journal", type=Path)
    parser.add_argument("--faults", default="{}")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--ignore-keys", action="store_true")
    asyncio.run(_serve_until_end_of_input(parser.parse_args()))


if __name__ == "__main__":
    _main()
