"""taskq: this checkout. The worker is the one that ``taskq worker`` runs, in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.bodies import BODIES, LINKS, TEXT, add
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name
from taskq import JobContext, TaskQ, Workflow, migrate
from taskq.worker import Worker, WorkerOptions

CHUNK = 50_000
VERSION = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop that ``taskq worker`` would run in: uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def make_app(dsn: str) -> TaskQ:
    """An app whose tasks are the bodies."""
    app = TaskQ(dsn, queue=queue_name(0, 1))
    for name, body in BODIES.items():
        app.task(name=name)(body)
    return app


def add_flows(app: TaskQ) -> tuple[Workflow[[list[int]], int], Workflow[[int], int]]:
    """The workflows, and the task ``steps``, on an app."""
    link = app.task(name="add")(add)

    @app.task
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task
    async def steps(ctx: JobContext, number: int) -> int:
        for step in range(LINKS):
            number = await ctx.step(f"add{step}", add, number)
        return number

    @app.workflow
    def fan(numbers: list[int]) -> int:
        return total.step(link.map(numbers))

    @app.workflow
    def chain(number: int) -> int:
        for _ in range(LINKS):
            number = link.step(number)
        return number

    return fan, chain


class TaskqClient:
    """An app with its pool."""

    def __init__(self, dsn: str) -> None:
        self._app = make_app(dsn)
        self._fan, self._chain = add_flows(self._app)

    async def one(self, kind: str, number: int) -> None:
        await self._app.tasks[kind].enqueue(number, TEXT)

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        task = self._app.tasks[kind]
        bound = [task.using(queue=queue_name(number, queues), run_in=later) for number in range(queues)]
        for start in range(0, len(numbers), CHUNK):
            part = numbers[start : start + CHUNK]
            await self._app.enqueue_many(bound[number % queues].job(number, TEXT) for number in part)

    async def flows(self, kind: str, number: int) -> None:
        if kind == "fan":
            await self._fan.start(list(range(number)))
        elif kind == "chain":
            await asyncio.gather(*(self._chain.start(n) for n in range(number)))
        else:
            await self._app.enqueue_many(self._app.tasks["steps"].job(n) for n in range(number))

    async def close(self) -> None:
        await self._app.close()


class Taskq:
    """taskq."""

    traits = Traits(
        name="taskq",
        version=VERSION,
        settings=f"default settings but for concurrency, 100; enqueue_many by {CHUNK:,}",
        done="select count(*) from taskq.history where id > %(mark)s",
        mark="select taskq.new_id()",
        keeps=True,
        loop="asyncio" if loop_factory() is None else "uvloop",
        later=True,
        queues=True,
        flows={
            "fan": "select count(*) from taskq.runs where workflow = 'fan' and status = 'succeeded'",
            "chain": "select count(*) from taskq.runs where workflow = 'chain' and status = 'succeeded'",
            "steps": "select count(*) from taskq.history where task = 'steps' and status = 'succeeded'",
        },
        finished="taskq.history",
        fresh={"id": "taskq.new_id()"},
    )

    async def setup(self, dsn: str) -> None:
        await asyncio.to_thread(migrate.up, dsn)

    async def client(self, dsn: str) -> Client:
        return TaskqClient(dsn)

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        names = tuple(queue_name(number, queues) for number in range(queues))
        app = make_app(dsn)
        add_flows(app)
        worker = Worker(app.tasks, dsn, options=WorkerOptions(concurrency=concurrency, queues=names))
        await gate.ready()
        running = asyncio.create_task(worker.run())
        stopping = asyncio.create_task(gate.stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await running
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping


if __name__ == "__main__":
    main(Taskq(), loop_factory())
