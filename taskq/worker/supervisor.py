"""Several worker processes on one machine, kept running: ``taskq worker --processes N``.

The supervisor starts the processes, starts anew those that end, passes signals on, and replaces one that wants to be
recycled by a successor that is ready before it drains. It imports no application and opens no connection. Should it be
killed, its workers notice and drain.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from taskq import boot
from taskq.telemetry import get_logger
from taskq.worker.shutdown import EXIT_NOT_FLUSHED, EXIT_OK, EXIT_RECYCLED, EXIT_STUCK, SECOND_SIGNAL_AFTER
from taskq.worker.supervised import READY, VARIABLE, WANTS_SUCCESSOR

log = get_logger("supervisor")

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
HEALTHY_AFTER: Final = 30.0
"""Seconds that a process must have been ready for earlier failures to be forgotten."""
BEYOND_GRACE: Final = 30.0
"""Seconds beyond the grace that processes get to send their outcomes, before they are killed."""
FORCED_WITHIN: Final = 15.0
"""The same after the second signal."""
SUCCESSOR_WITHIN: Final = 120.0
"""Seconds that a successor gets to be ready."""
AT_ONCE: Final = frozenset({EXIT_OK, 75, EXIT_STUCK, EXIT_RECYCLED})
"""Exit codes after which a process that had been ready is started again without a pause."""
HOPELESS: Final = frozenset({1, 2})
"""Exit codes that end all, if no process was ever ready: settings or schema are wrong for every one of them."""


@dataclass(eq=False)
class Member:
    """One worker process."""

    name: str
    process: subprocess.Popen[bytes]
    sock: socket.socket
    started_at: float
    ready_at: float | None = None
    wants_successor: bool = False
    told: int = 0
    kill_at: float | None = None


@dataclass(eq=False)
class Slot:
    """A place for one worker process at a time; for two while one replaces the other."""

    number: int
    starts: int = 0
    failures: int = 0
    start_at: float | None = 0.0
    current: Member | None = None
    successor: Member | None = None
    leaving: list[Member] = field(default_factory=list)

    def members(self) -> Iterator[Member]:
        """All processes that have not ended."""
        yield from (m for m in (self.current, self.successor, *self.leaving) if m is not None)


class Supervisor:
    """Keeps processes running until it is told to stop.

    Args:
        command: The command of one worker; ``--name`` and what differs by slot are appended.
        processes: How many.
        name: Each process gets it with its number: ``NAME-1``, and ``NAME-1.2`` for the second one in that place.
        grace: Seconds that running bodies get to end after the first signal; the workers' own.
        per_slot: Further arguments by the number of the place, from 0.
        overlap: Whether a successor may run beside the process that it replaces.
        environ: The environment of the processes; this process's own by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        name: str,
        grace: float,
        per_slot: Sequence[Sequence[str]] = (),
        overlap: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._name = name
        self._grace = grace
        self._per_slot = per_slot
        self._overlap = overlap
        self._environ = dict(os.environ if environ is None else environ)
        self._slots = [Slot(number) for number in range(processes)]
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._first_stop: float | None = None
        self._ever_ready = False
        self._code = EXIT_OK

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until no process can start. In the main thread.

        Returns:
            0 if all ended in good order after a signal. 1 or 2 if the first process ended so before any was ready.
            Else the code of the first process that did not end in good order; 1 for one that had to be killed.
        """
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        old_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        old = {n: signal.signal(n, self._on_signal) for n in (*boot.SIGNALS, signal.SIGCHLD)}
        boot.release()
        self._selector.register(wake, selectors.EVENT_READ)
        log.info("supervisor.started", processes=len(self._slots), name=self._name, pid=os.getpid())
        try:
            while self._turn():
                for key, _ in self._selector.select(self._pause()):
                    if key.fileobj is wake:
                        with suppress(BlockingIOError):
                            wake.recv(4096)
                    else:
                        self._hear(key.data)
        finally:
            for member in self._members():
                member.process.kill()
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                # After the end the first signal has done all that there is to do.
                signal.signal(number, signal.SIG_IGN if number in boot.SIGNALS and boot.is_held() else handler)
        log.info("supervisor.stopped", exit_code=self._code)
        return self._code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _members(self) -> list[Member]:
        return [member for slot in self._slots for member in slot.members()]

    # One turn -------------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Do what is due; False once there is nothing left to do."""
        now = time.monotonic()
        while self._signals:
            self._stop(self._signals.pop(0), now)
        for slot in self._slots:
            self._look_after(slot, now)
        for member in self._members():
            if member.kill_at is not None and now >= member.kill_at:
                log.error("supervisor.process_killed", name=member.name, pid=member.process.pid)
                member.kill_at = None
                member.process.kill()
        return self._first_stop is None or bool(self._members())

    def _pause(self) -> float | None:
        now = time.monotonic()
        due = [slot.start_at for slot in self._slots if slot.start_at is not None and self._first_stop is None]
        due += [member.kill_at for member in self._members() if member.kill_at is not None]
        return max(0.0, min(due) - now) if due else None

    def _stop(self, number: int, now: float) -> None:
        if self._first_stop is None:
            self._first_stop = now
            log.info("supervisor.stopping", signal=signal.Signals(number).name, processes=len(self._members()))
            within = self._grace + BEYOND_GRACE
        elif now - self._first_stop >= SECOND_SIGNAL_AFTER:
            log.warning("supervisor.forcing", processes=len(self._members()))
            within = FORCED_WITHIN
        else:
            return
        for member in self._members():
            self._tell_to_stop(member, now + within)

    def _tell_to_stop(self, member: Member, kill_at: float) -> None:
        member.told += 1
        member.kill_at = kill_at
        member.process.send_signal(signal.SIGTERM)

    # One place ------------------------------------------------------------------------------------------------------

    def _look_after(self, slot: Slot, now: float) -> None:
        for member in list(slot.members()):
            code = member.process.poll()
            if code is not None:
                self._ended(slot, member, code, now)
        if self._first_stop is not None:
            return
        successor, current = slot.successor, slot.current
        if successor is not None and successor.ready_at is not None:
            slot.current, slot.successor = successor, None
            if current is not None:
                slot.leaving.append(current)
                self._tell_to_stop(current, now + self._grace + BEYOND_GRACE)
        elif slot.start_at is not None and now >= slot.start_at:
            slot.start_at = None
            if slot.current is None:
                slot.current = self._start(slot, now)
            elif slot.successor is None:
                slot.successor = self._start(slot, now)
                slot.successor.kill_at = now + SUCCESSOR_WITHIN

    def _start(self, slot: Slot, now: float) -> Member:
        slot.starts += 1
        name = f"{self._name}-{slot.number + 1}" + (f".{slot.starts}" if slot.starts > 1 else "")
        more = self._per_slot[slot.number] if self._per_slot else ()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                [*self._command, f"--name={name}", *more],
                env={**self._environ, VARIABLE: f"{os.getpid()}:{theirs.fileno()}:{slot.number}"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # Of its own group: Ctrl-C at the terminal is for the supervisor to pass on, once.
                process_group=0,
            )
        member = Member(name, process, ours, now)
        self._selector.register(ours, selectors.EVENT_READ, member)
        log.info("supervisor.process_started", name=name, pid=process.pid)
        return member

    def _hear(self, member: Member) -> None:
        try:
            said = member.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._deafen(member)
        if READY in said:
            member.ready_at = time.monotonic()
            self._ever_ready = True
            if not member.told:
                member.kill_at = None
        if WANTS_SUCCESSOR in said and not member.wants_successor:
            member.wants_successor = True
            slot = next(s for s in self._slots if member in s.members())
            log.info("supervisor.replacing", name=member.name, pid=member.process.pid)
            if self._overlap:
                slot.start_at = time.monotonic()
            else:
                self._tell_to_stop(member, time.monotonic() + self._grace + BEYOND_GRACE)

    def _deafen(self, member: Member) -> None:
        if member.sock.fileno() >= 0:
            self._selector.unregister(member.sock)
            member.sock.close()

    def _ended(self, slot: Slot, member: Member, code: int, now: float) -> None:
        self._hear(member)  # it may have been ready for a moment
        self._deafen(member)
        was_current, was_successor = member is slot.current, member is slot.successor
        if was_current:
            slot.current, slot.successor = slot.successor, None
        elif was_successor:
            slot.successor = None
        else:
            slot.leaving.remove(member)
        if member.told and code == -signal.SIGTERM and member.ready_at is None:
            code = EXIT_OK  # it had not begun
        about = {
            "name": member.name,
            "pid": member.process.pid,
            "exit_code": code,
            "ran": round(now - member.started_at),
        }
        if self._first_stop is not None:
            if self._code == EXIT_OK:
                self._code = EXIT_NOT_FLUSHED if code < 0 else code
            log.info("supervisor.process_ended", **about)
        elif code in HOPELESS and not self._ever_ready:
            log.error("supervisor.hopeless", **about, action="stopping: no process was ever ready")
            self._code = code
            self._first_stop = now
            for other in self._members():
                self._tell_to_stop(other, now + FORCED_WITHIN)
        elif (was_current and slot.current is None) or was_successor:
            pause = self._pause_after(slot, member, code, now)
            slot.start_at = now + pause
            tell = log.warning if pause else log.info
            tell("supervisor.process_ended", **about, failures=slot.failures, again_in=round(pause, 2))
        else:
            log.info("supervisor.process_ended", **about)

    def _pause_after(self, slot: Slot, member: Member, code: int, now: float) -> float:
        """Seconds until the next start in this place: doubled with each failure, less up to a half at random."""
        if member.ready_at is not None and now - member.ready_at >= HEALTHY_AFTER:
            slot.failures = 0
        if member.ready_at is not None and code in AT_ONCE:
            return 0.0
        slot.failures += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(slot.failures - 1, 10)) * random.uniform(0.5, 1)
