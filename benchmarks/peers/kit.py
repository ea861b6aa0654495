"""What every adapter shares: its commands, and how they answer.

Answers are JSON objects, one a line, on standard output; each has an ``event``. Times are seconds. The commands:

``describe``
    What the adapter is, and the SQL by which the harness counts. Needs no database.
``setup``
    Make the queue's schema in an empty database.
``enqueue-one N``
    Enqueue N jobs one by one, each committed before the next; ``--clients`` at once, each with a connection.
``enqueue-bulk N``
    Enqueue N jobs by the queue's own way for many; ``--queues`` spreads them, ``--later`` makes them due later.
``enqueue-flows N``
    Start N workflows of a kind: ``fan`` (one, of N children and what takes all their results), ``chain`` or ``steps``.
``work``
    Say ``ready``, wait for a line on standard input, then work until standard input ends or SIGTERM comes.
``pickup N``
    Enqueue N probes with pauses and say when each was enqueued; ``--load`` jobs a second go in beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

__all__ = ["Adapter", "Client", "FlowClient", "Gate", "Traits", "main", "queue_name"]

WARM_UP = 10
"""Jobs that each client enqueues before the clock starts, so that connections and plans are there."""
LOAD_EVERY = 0.05


@dataclass(frozen=True)
class Traits:
    """What the harness has to know about a queue.

    Attributes:
        name: What it is called.
        version: The release that is installed.
        settings: The settings that it runs with here, for the report.
        done: SQL that counts the jobs that are durably done; with ``%(mark)s``, those enqueued after the mark.
        mark: SQL for such a mark; empty where ``done`` needs none.
        keeps: Whether a finished job's row, with its payload, is kept by default.
        loop: The event loop that runs the bodies.
        core: The language of what claims and ends jobs.
        concurrency: Bodies at once that serve it best, where the measure does not name a number.
        later: Whether jobs that are due later are enqueued in bulk here.
        queues: Whether one worker here serves as many queues as there are.
        finished: The table that finished jobs are in, where multiplying them by SQL is cheap; else empty.
        flows: SQL that counts the workflows of each kind that are durably done; empty where there are none.
        fresh: Its columns that each copy needs a value of its own for: an expression, or empty for the default.
    """

    name: str
    version: str
    settings: str
    done: str
    keeps: bool
    loop: str
    core: str = "python"
    mark: str = ""
    concurrency: int = 100
    later: bool = False
    queues: bool = False
    finished: str = ""
    flows: dict[str, str] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)


class Client(Protocol):
    """One enqueuer with a connection of its own."""

    async def one(self, kind: str, number: int) -> object:
        """Enqueue one job, committed when this returns."""

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> object:
        """Enqueue many, over so many queues, due in so many seconds."""

    async def close(self) -> object:
        """Close the connection."""


class FlowClient(Protocol):
    """A client that starts workflows, too."""

    async def flows(self, kind: str, number: int) -> object:
        """Start so many, or the one that has so many children."""


class Gate:
    """When a worker begins and when it stops."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = asyncio.Event()
        self.stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop.set)
        threading.Thread(target=self._listen, daemon=True).start()

    async def ready(self) -> None:
        """Say that everything is imported, and wait until all workers may begin."""
        say("ready", pid=os.getpid())
        await self._begin.wait()

    def _listen(self) -> None:
        # The descriptor itself: the buffered object could not be closed while a thread waits in it.
        while os.read(0, 4096):
            self._loop.call_soon_threadsafe(self._begin.set)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.stop.set)


class Adapter(Protocol):
    """One queue."""

    traits: Traits

    async def setup(self, dsn: str) -> None:
        """Make the schema, and whatever it needs to be ready for jobs and workers."""

    async def client(self, dsn: str) -> Client:
        """Connect one enqueuer."""

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        """Pass the gate, then run jobs until ``gate.stop`` is set."""


def queue_name(number: int, queues: int) -> str:
    """The queue of a job."""
    return f"bench{number % queues}"


def say(event: str, **fields: Any) -> None:
    """One answer."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def main(adapter: Adapter, new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Run the command that the arguments name, and leave.

    Args:
        adapter: The queue.
        new_loop: Makes the event loop; by default asyncio's own.
    """
    args = _parse()
    if args.command == "describe":
        say("traits", **asdict(adapter.traits))
        return
    commands: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "setup": lambda: adapter.setup(args.dsn),
        "enqueue-one": lambda: _enqueue_one(adapter, args),
        "enqueue-bulk": lambda: _enqueue_bulk(adapter, args),
        "enqueue-flows": lambda: _enqueue_flows(adapter, args),
        "work": lambda: _work(adapter, args),
        "pickup": lambda: _pickup(adapter, args),
    }
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(commands[args.command]())
        say("done", command=args.command)
        sys.stderr.flush()
        # Some queues leave threads or pools behind that would hold up an orderly end.
        os._exit(0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("describe")
    for name in ("setup", "enqueue-one", "enqueue-bulk", "enqueue-flows", "work", "pickup"):
        command = commands.add_parser(name)
        command.add_argument("--dsn", required=True)
        if name == "enqueue-flows":
            command.add_argument("jobs", type=int)
            command.add_argument("--kind", required=True, choices=("fan", "chain", "steps"))
        if name in ("enqueue-one", "enqueue-bulk", "pickup"):
            command.add_argument("jobs", type=int)
            command.add_argument("--kind", default="noop", choices=("noop", "sleep", "probe"))
        if name in ("enqueue-bulk", "work"):
            command.add_argument("--queues", type=int, default=1)
        if name == "enqueue-one":
            command.add_argument("--clients", type=int, default=1)
        if name == "enqueue-bulk":
            command.add_argument("--later", type=float, default=None)
        if name == "work":
            command.add_argument("--concurrency", type=int, default=100)
        if name == "pickup":
            command.add_argument("--every", type=float, default=0.03)
            command.add_argument("--load", type=float, default=0.0)
    return parser.parse_args()


async def _enqueue_one(adapter: Adapter, args: argparse.Namespace) -> None:
    clients = [await adapter.client(args.dsn) for _ in range(args.clients)]

    async def run(client: Client, numbers: range) -> None:
        for number in numbers:
            await client.one(args.kind, number)

    each = args.jobs // args.clients
    await asyncio.gather(*(run(client, range(WARM_UP)) for client in clients))
    seconds, cpu = await _timed(lambda: asyncio.gather(*(run(client, range(each)) for client in clients)))
    jobs = each * args.clients
    say("enqueued", jobs=jobs, in_all=jobs + WARM_UP * args.clients, seconds=seconds, cpu=cpu)
    for client in clients:
        await client.close()


async def _enqueue_bulk(adapter: Adapter, args: argparse.Namespace) -> None:
    client = await adapter.client(args.dsn)
    numbers = range(args.jobs)
    seconds, cpu = await _timed(lambda: client.many(args.kind, numbers, args.queues, args.later))
    say("enqueued", jobs=args.jobs, in_all=args.jobs, seconds=seconds, cpu=cpu)
    await client.close()


async def _enqueue_flows(adapter: Adapter, args: argparse.Namespace) -> None:
    client = await adapter.client(args.dsn)
    seconds, cpu = await _timed(lambda: cast(FlowClient, client).flows(args.kind, args.jobs))
    say("enqueued", jobs=args.jobs, in_all=args.jobs, seconds=seconds, cpu=cpu)
    await client.close()


async def _work(adapter: Adapter, args: argparse.Namespace) -> None:
    gate = Gate()
    await adapter.work(args.dsn, args.concurrency, args.queues, gate)


async def _pickup(adapter: Adapter, args: argparse.Namespace) -> None:
    client = await adapter.client(args.dsn)
    load = asyncio.create_task(_keep_loading(adapter, args)) if args.load else None
    if load is not None:
        await asyncio.sleep(1.0)
    for number in range(args.jobs):
        called = time.monotonic_ns()
        await client.one("probe", number)
        returned = time.monotonic_ns()
        say("sent", number=number, called=called, returned=returned)
        # Uneven, so that the probes do not fall into step with anyone's polling.
        await asyncio.sleep(args.every * random.uniform(0.5, 1.5))
    if load is not None:
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
    await client.close()


async def _keep_loading(adapter: Adapter, args: argparse.Namespace) -> None:
    client = await adapter.client(args.dsn)
    sent, started = 0, time.monotonic()
    try:
        while True:
            due = int((time.monotonic() - started) * args.load)
            # Behind by more than a second it leaves out what it could not send, and says how much it did send.
            batch = min(due - sent, max(1, int(args.load)))
            if batch > 0:
                await client.many("noop", range(batch), 1, None)
                sent += batch
            await asyncio.sleep(LOAD_EVERY)
    finally:
        say("load", jobs=sent, seconds=time.monotonic() - started)


async def _timed(act: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before, started = cpu(), time.perf_counter()
    await act()
    return time.perf_counter() - started, cpu() - before
