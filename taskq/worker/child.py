"""A child process: it runs bodies of tasks with ``process=True``, one at a time, until its worker needs it no more.

Bodies run in the main thread, so that a function can be interrupted by a signal; a second thread listens to the
worker. When the worker goes, however it goes, the child goes too: the kernel kills it (Linux), and the pipe closes.
Signals to the whole process group are for the worker to act on, and are ignored here.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from taskq import errors
from taskq.policy import kinds_of
from taskq.tasks import Task
from taskq.worker.bodies import returned, self_cancelled
from taskq.worker.disposition import Raised, Returned
from taskq.worker.memory import resident_bytes
from taskq.worker.parent import be_first_to_go, follow
from taskq.worker.pipes import Message, frame, receive
from taskq.worker.process_context import ProcessContext, context_of
from taskq.worker.process_logs import Forwarder
from taskq.worker.process_tasks import Place, Tasks

EXIT_ORPHANED = 1


class BodyStopped(BaseException):
    """Raised inside a function that the worker stops, wherever it is; no ``except Exception`` catches it."""


def main(handle: int, parent: int) -> None:
    """Serve the worker at the other end of a socket.

    Args:
        handle: The socket's file descriptor.
        parent: The worker's process id.
    """
    if not follow(parent):
        os._exit(EXIT_ORPHANED)
    be_first_to_go()
    faulthandler.enable()
    os.set_inheritable(handle, False)
    child = Child(socket.socket(fileno=handle))
    signal.signal(signal.SIGTERM, child.on_signal)
    signal.signal(signal.SIGINT, child.on_signal)
    child.serve()


class Child:
    """This process, as its worker knows it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._context: ProcessContext | None = None
        self._may_interrupt = False
        self._stopping = False
        self._told = False
        self._body: asyncio.Task[Any] | None = None
        self._runner = asyncio.Runner()
        self._told_apps: set[int] = set()
        self._database: tuple[str | None, str | None] = (None, None)

    def serve(self) -> None:
        """Run bodies until told to leave."""
        threading.Thread(target=self._listen, name="taskq-worker-link", daemon=True).start()
        while (message := self._inbox.get())["do"] != "leave":
            if message["do"] == "setup":
                self._set_up(message)
            else:
                self._run(message)
        with suppress(Exception):
            self._runner.close()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the function that runs, if it was the worker who asked for it."""
        if self._stopping and self._may_interrupt:
            self._may_interrupt = False
            raise BodyStopped

    def send(self, message: Message) -> None:
        """Tell the worker; if it has gone, so do we."""
        data = frame(message)
        # A function that logs must not be interrupted in the middle of a frame.
        interruptible = self._may_interrupt and threading.current_thread() is threading.main_thread()
        if interruptible:
            self._may_interrupt = False
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError:
            _go()
        if interruptible:
            self._may_interrupt = True
            if self._stopping:
                self.on_signal(signal.SIGTERM, None)

    def _listen(self) -> None:
        while (message := receive(self._sock)) is not None:
            if message["do"] == "stop":
                self._stop()
            elif message["do"] == "tell":
                self._told = True
                if self._context is not None:
                    self._context.cancel_requested = True
            else:
                self._told = False
                self._inbox.put(message)
        _go()

    def _stop(self) -> None:
        self._stopping = True
        if self._context is not None:
            self._context.cancel_requested = True
        body = self._body
        if body is not None:
            with suppress(RuntimeError):
                self._runner.get_loop().call_soon_threadsafe(body.cancel)
        elif (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def _set_up(self, message: Message) -> None:
        try:
            for name, level in message["levels"].items():
                logging.getLogger(name).setLevel(level)
            self._tasks = Tasks(message["app"], message["main"] and tuple(message["main"]))
            self._database = (message["dsn"], message["schema"])
            for where in message["tasks"]:
                self._find(Place(**where))
            Forwarder.install(self.send)
        except BaseException as exc:
            self.send({"is": "not_ready", "error": errors.describe(exc)})
        else:
            self.send({"is": "ready"})

    def _find(self, where: Place) -> Task[..., Any]:
        task = self._tasks.find(where)
        if id(task._app) not in self._told_apps:
            self._told_apps.add(id(task._app))
            task._app.use_database(*self._database)
        return task

    def _run(self, message: Message) -> None:
        self._context = context_of(message["context"])
        self._context.cancel_requested = self._told
        if self._stopping:
            self.send({"is": "stopped"})
            return
        self.send({"is": "started"})
        reply: Message
        try:
            end = self._end_of(self._find(Place(**message["task"])), message["payload"], self._context)
            reply = {"is": "returned", "result": end.result} if isinstance(end, Returned) else _raised(end.error)
        except BodyStopped:
            reply = {"is": "stopped"}
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError):
                reply = {"is": "stopped"} if self._stopping else _raised(self_cancelled(exc))
            else:
                reply = _raised(exc)
        if os.getpid() != self._pid:
            # A copy that the body has made with os.fork: how the attempt ends is not for it to say.
            os._exit(0 if reply["is"] == "returned" else 1)
        self._context = self._body = None
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self.send({**reply, "resident": resident_bytes()})

    def _end_of(self, task: Task[..., Any], payload: str, context: ProcessContext) -> Returned | Raised:
        kwargs = task.codec.decode(payload)
        args = (context,) if task.takes_context else ()
        if task.is_async:
            value = self._runner.run(self._drive(task.fn(*args, **kwargs)), context=contextvars.copy_context())
        else:
            self._may_interrupt = True
            try:
                value = contextvars.copy_context().run(task.fn, *args, **kwargs)
            finally:
                self._may_interrupt = False
        end = returned(task, value)
        assert isinstance(end, (Returned, Raised))
        return end

    async def _drive(self, body: Any) -> Any:
        self._body = asyncio.current_task()
        if self._stopping:
            body.close()
            raise asyncio.CancelledError
        return await body


def _raised(exc: BaseException) -> Message:
    kinds: list[str] = []
    with suppress(BaseException):
        kinds = kinds_of(exc)
    message: Message = {"is": "raised", "error": errors.describe(exc), "kinds": kinds}
    with suppress(BaseException):
        message |= {"delay": float(exc.delay), "reason": exc.reason}  # type: ignore[attr-defined]
    return message


def _go() -> None:
    """End at once, with everything that bodies have started in this process group."""
    with suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(EXIT_ORPHANED)
