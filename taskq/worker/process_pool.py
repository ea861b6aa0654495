"""The child processes of a worker: started when bodies wait for one, kept warm, and replaced before they grow old.

Children are spawned, never forked, and take nothing over from the worker but standard output and error. Each leads a
process group of its own, so that a signal to the worker's group does not reach it, and so that what a body has started
ends with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from taskq.errors import ProcessNotStarted, describe
from taskq.telemetry import get_logger
from taskq.worker import process_logs
from taskq.worker.pipes import Message, frame, read
from taskq.worker.process_tasks import Place, main_script

log = get_logger("worker")

BOOT_WITHIN: Final = 60.0
"""Seconds that a child gets to import the app."""
BOOTS_AT_ONCE: Final = max(1, os.cpu_count() or 1)
"""More would only make each slower."""
IDLE_FOR: Final = 60.0
"""Seconds without a body after which a child is ended."""
LEAVE_WITHIN: Final = 2.0
"""Seconds that a child which is needed no more gets to end by itself."""
_LAST_WORDS: Final = 1.0
_BOOT: Final = (  # the first line is what ``ps`` shows
    "# taskq: bodies of one worker\n"
    "import json, sys; sys.path[:] = json.loads(sys.argv[3])\n"
    "from taskq.worker.child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How children are started, and when they are replaced.

    Attributes:
        app: The application as ``module:attribute``, or None where tasks are found by the modules of their functions.
        tasks: What a child must have found before it counts as started.
        dsn: The database that bodies find in their application.
        schema: taskq's schema there.
        max_bodies: A child is replaced after so many bodies.
        max_memory: A child is replaced once it has so many resident bytes after a body; None for no bound.
    """

    app: str | None = None
    tasks: tuple[Place, ...] = ()
    dsn: str | None = None
    schema: str | None = None
    max_bodies: int = 1000
    max_memory: int | None = None


class Child:
    """One child process, seen from the worker. Made in the loop's thread: the child dies with the thread."""

    def __init__(self, launch: Launch) -> None:
        self._loop = asyncio.get_running_loop()
        self._launch = launch
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._unsent: list[bytes] | None = []
        self._writer: asyncio.StreamWriter
        self.bodies = 0
        self.resident = 0
        self.idle_since = 0.0
        self.gone: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, or the negative number of the signal that ended it, once it has been reaped."""
        self._sock, theirs = socket.socketpair()
        with theirs:
            handle = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        *_flags(),
                        "-c",
                        _BOOT,
                        str(handle),
                        str(os.getpid()),
                        json.dumps([*map(str, sys.path)]),
                    ],
                    pass_fds=(handle,),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                self._sock.close()
                raise
        self.pid = self._process.pid
        threading.Thread(target=self._until_ended, name=f"taskq-child-{self.pid}", daemon=True).start()
        self.reading = self._loop.create_task(self._read(), name=f"taskq-child-{self.pid}")

    async def until_ready(self) -> None:
        """Wait until it has imported the app.

        Raises:
            ProcessNotStarted: It could not, or ended, or took too long; it is gone then.
        """
        launch = self._launch
        self.send(
            {
                "do": "setup",
                "app": launch.app,
                "main": main_script(),
                "tasks": [asdict(where) for where in launch.tasks],
                "dsn": launch.dsn,
                "schema": launch.schema,
                "levels": process_logs.levels(),
            }
        )
        try:
            async with asyncio.timeout(BOOT_WITHIN):
                answer = await self.reply()
        except TimeoutError:
            why = f"it had not imported the app after {BOOT_WITHIN:g} s"
        else:
            if answer is not None and answer["is"] == "ready":
                return
            if answer is None:
                why = f"it ended with exit code {self.gone.result()} while it imported the app"
            else:
                error = answer["error"]
                why = f"importing the app raised {error['type']}: {error['message']}\n{error.get('traceback', '')}"
        self.kill()
        await self.gone
        raise ProcessNotStarted(f"a child process could not be started for bodies with process=True: {why}".rstrip())

    def send(self, message: Message) -> None:
        """Tell the child; if it has gone, nothing happens."""
        data = frame(message)
        if self._unsent is None:
            with suppress(OSError, RuntimeError):
                self._writer.write(data)
        else:
            self._unsent.append(data)

    async def reply(self) -> Message | None:
        """What it says next; None once it has gone and has nothing more to say."""
        if self._inbox.empty() and not self.gone.done():
            said = self._loop.create_task(self._inbox.get())
            try:
                await asyncio.wait(_any(said, self.gone), return_when=asyncio.FIRST_COMPLETED)
                if said.done():
                    return said.result()
            finally:
                said.cancel()
        if self._inbox.empty():
            # Its last words may still be on their way.
            await asyncio.wait([self.reading], timeout=_LAST_WORDS)
        return None if self._inbox.empty() else self._inbox.get_nowait()

    def kill(self) -> None:
        """End it, and all that it has started in its group, at once."""
        if not self.gone.done():
            # It is reaped in the loop alone, so its id is not another's yet.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def leave(self, within: float = LEAVE_WITHIN) -> None:
        """Let it end by itself, and kill it if it does not."""
        self.send({"do": "leave"})
        timer = self._loop.call_later(within, self.kill)
        self.gone.add_done_callback(lambda _: timer.cancel())

    def _until_ended(self) -> None:
        """In a thread: wait for its end, but leave it to be reaped."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        self.kill()
        code = self._process.wait()
        if not self.gone.done():
            self.gone.set_result(code)
        # Its end of the pipe may live on in a process that it forked.
        self._loop.call_later(_LAST_WORDS, self.reading.cancel)

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        unsent, self._unsent = self._unsent or [], None
        self._writer.writelines(unsent)
        try:
            while True:
                message = await read(reader)
                if message["is"] == "log":
                    process_logs.emit(message)
                else:
                    self.resident = message.get("resident", self.resident)
                    self._inbox.put_nowait(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()


class ProcessPool:
    """Gives out children, one to a body.

    Args:
        launch: How they are started.
        size: The most children that may have bodies at once.
    """

    def __init__(self, launch: Launch, size: int) -> None:
        self.launch = launch
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._idle: list[Child] = []
        self._waiting: deque[asyncio.Future[Child]] = deque()
        self._boots: set[asyncio.Task[None]] = set()
        self._children: set[Child] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """The process ids of all children that have not been reaped."""
        return [child.pid for child in self._children]

    async def take(self) -> Child:
        """A child that is ready.

        Raises:
            ProcessNotStarted: None could be started.
        """
        while self._idle:
            child = self._idle.pop()
            if not child.gone.done():
                return child
        waiter: asyncio.Future[Child] = self._loop.create_future()
        self._waiting.append(waiter)
        self._grow()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back(waiter.result())
            raise

    def give_back(self, child: Child) -> None:
        """Take a child back whose body has ended; it is kept for the next, unless it has done or grown enough."""
        launch = self.launch
        if self._closing or child.gone.done():
            child.kill()
        elif child.bodies >= launch.max_bodies or child.resident > (launch.max_memory or child.resident):
            log.debug("process.recycled", pid=child.pid, bodies=child.bodies, resident=child.resident)
            child.leave()
        else:
            self._offer(child)
            return
        self._grow()

    def _offer(self, child: Child) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(child)
                return
        if len(self._children) > self._size:
            child.leave()
            return
        child.idle_since = self._loop.time()
        self._idle.append(child)
        if self._sweep is None:
            self._sweep = self._loop.call_later(IDLE_FOR, self._end_idle)

    def _end_idle(self) -> None:
        self._sweep = None
        before = self._loop.time() - IDLE_FOR
        for child in [c for c in self._idle if c.idle_since <= before]:
            self._idle.remove(child)
            child.leave()
        if self._idle:
            due = min(child.idle_since for child in self._idle) + IDLE_FOR
            self._sweep = self._loop.call_at(max(due, self._loop.time() + 0.01), self._end_idle)

    def _grow(self) -> None:
        wanted = sum(not waiter.done() for waiter in self._waiting)
        while not self._closing and len(self._boots) < min(wanted, BOOTS_AT_ONCE):
            boot = self._loop.create_task(self._boot(), name="taskq-child-boot")
            self._boots.add(boot)
            boot.add_done_callback(self._booted)

    def _booted(self, boot: asyncio.Task[None]) -> None:
        self._boots.discard(boot)
        self._grow()

    async def _boot(self) -> None:
        try:
            child = Child(self.launch)
            self._children.add(child)
            child.gone.add_done_callback(lambda _: self._children.discard(child))
            await child.until_ready()
        except ProcessNotStarted as exc:
            self._refuse(exc)
        except Exception as exc:
            said = describe(exc)["message"]
            self._refuse(
                ProcessNotStarted(f"a child process could not be started for bodies with process=True: {said}")
            )
        else:
            log.debug("process.started", pid=child.pid)
            self._offer(child)

    def _refuse(self, exc: ProcessNotStarted) -> None:
        """One body pays for one start that failed; those that wait behind it get starts of their own."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(exc)
                return

    async def close(self, within: float) -> None:
        """Kill every child, and wait until they are gone, but no longer than ``within`` seconds."""
        self._closing = True
        if self._sweep is not None:
            self._sweep.cancel()
        for boot in list(self._boots):
            boot.cancel()
        for child in list(self._children):
            child.kill()
        for waiter in self._waiting:
            waiter.cancel()
        children = list(self._children)
        if left := _any(*self._boots, *(c.gone for c in children), *(c.reading for c in children)):
            await asyncio.wait(left, timeout=within)


def _any(*futures: asyncio.Future[Any]) -> list[asyncio.Future[Any]]:
    return list(futures)


def _flags() -> list[str]:
    """The interpreter's own options, such as -O and -X dev."""
    found: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return found
