"""Several sessions in turn, one statement at a time: each goes on while another waits for a lock.

A program is a few transactions for each line; a schedule says whose turn it is. A statement that waits for a lock is
left waiting, and is looked at again after every step. The order in which things happened is kept, so that a test can
say which transactions were over before another began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
from sql import BOUND, Conn, Session, rows

DEADLOCK = "40P01"


@dataclass(frozen=True, slots=True)
class Call:
    """One statement.

    Attributes:
        name: Its function.
        what: Its arguments, for people.
        ask: Sends it.
        say: What the model says to it, given the model, the answer, and whether no other transaction was at work.
        given: Its arguments, as far as a test looks at them.
    """

    name: str
    what: str
    ask: Callable[[Conn], Any]
    say: Callable[[Any, Any, bool], Any]
    given: Any = None

    def __repr__(self) -> str:
        return f"{self.name}({self.what})"


@dataclass(slots=True)
class Transaction:
    """One transaction of a line and what came of it.

    Attributes:
        calls: Its statements, in order.
        commits: Whether it commits or rolls back.
        line: Whose it is.
        answers: What was answered, as far as it came; a refusal is the last, as text.
        refused: The SQLSTATE that ended it, or None.
        began: The step at which its first statement was sent.
        ended: The step at which it was over.
        waited_for: The transactions that held a lock which it waited for.
    """

    calls: Sequence[Call]
    commits: bool = True
    line: int = 0
    answers: list[Any] = field(default_factory=list)
    refused: str | None = None
    began: int = 0
    ended: int = 0
    waited_for: list[Transaction] = field(default_factory=list, repr=False)

    @property
    def committed(self) -> bool:
        return self.commits and self.refused is None

    def __repr__(self) -> str:
        said = ", ".join(f"{call} -> {answer!r}" for call, answer in zip(self.calls, self.answers, strict=False))
        end = self.refused or ("commit" if self.commits else "rollback")
        return f"line {self.line} [{self.began}..{self.ended}] {said}; {end}"


class Lines:
    """The sessions, opened once and used by one program after the other."""

    def __init__(self, dsn: str, n: int) -> None:
        self._dsn, self._n = dsn, n
        self._watch: Conn = psycopg.connect(dsn, autocommit=True)
        self._open()

    def _open(self) -> None:
        self._sessions = [Session(self._dsn) for _ in range(self._n)]
        for session in self._sessions:
            session.conn.execute("set deadlock_timeout = '50ms'")

    def close(self) -> None:
        """End all sessions, whatever they wait for."""
        for session in self._sessions:
            session.close()
        self._watch.close()

    def run(self, program: Sequence[Sequence[Transaction]], schedule: Sequence[int]) -> None:
        """Run a program to its end; what came of it stands in its transactions.

        Raises:
            AssertionError: A statement neither ended nor waited for a lock within the bound.
        """
        try:
            _Run(self._watch, self._sessions, program).go(schedule)
        except BaseException:
            for session in self._sessions:
                session.close()
            self._open()
            raise


class _Run:
    """One run of one program."""

    def __init__(self, watch: Conn, sessions: Sequence[Session], program: Sequence[Sequence[Transaction]]) -> None:
        self._watch, self._sessions = watch, sessions
        self._todo = [[step for transaction in line for step in _steps(transaction)] for line in program]
        self._waiting: dict[int, tuple[Transaction, Future[Any]]] = {}
        self._open: dict[int, Transaction] = {}
        self._clock = count(1)
        for n, line in enumerate(program):
            for transaction in line:
                transaction.line = n

    def go(self, schedule: Sequence[int]) -> None:
        for turn in (*schedule, *([0] * sum(map(len, self._todo)))):
            ready = [n for n, todo in enumerate(self._todo) if todo and n not in self._waiting]
            if ready:
                self._step(ready[turn % len(ready)])
            elif self._waiting:
                self._await_someone()
        while self._waiting or any(self._todo):
            for n, todo in enumerate(self._todo):
                if todo and n not in self._waiting:
                    self._step(n)
            if self._waiting:
                self._await_someone()

    def _step(self, n: int) -> None:
        transaction, call = self._todo[n].pop(0)
        now = next(self._clock)
        if call is None:
            session = self._sessions[n]
            session.do(lambda conn: conn.execute("commit" if transaction.commits else "rollback"))
            transaction.ended = now
            self._open.pop(n, None)
        elif transaction.refused is None:
            if not transaction.began:
                transaction.began = now
                self._open[n] = transaction
                self._sessions[n].do(lambda conn: conn.execute("begin"))
            self._waiting[n] = transaction, self._sessions[n].start(call.ask)
        self._settle()

    def _settle(self) -> None:
        """Return once each statement under way has ended or waits for a lock."""
        deadline = time.monotonic() + BOUND
        while True:
            moved = self._collect()
            blocked = self._blocked()
            if not moved and self._waiting.keys() <= blocked and not self._collect():
                return
            assert time.monotonic() < deadline, f"neither ended nor waits for a lock: {self._waiting}"

    def _collect(self) -> bool:
        """Take the answers that are there; whether there was one."""
        moved = False
        for n, (transaction, future) in list(self._waiting.items()):
            if not future.done() and len(self._waiting) == 1:
                _wait(future, 0.003)
            if future.done():
                moved = True
                del self._waiting[n]
                try:
                    transaction.answers.append(future.result())
                except psycopg.Error as error:
                    transaction.refused = error.sqlstate or "?"
                    transaction.answers.append(f"refused: {transaction.refused}")
        return moved

    def _blocked(self) -> set[int]:
        """Who waits for a lock that another session holds."""
        lines = {session.pid: n for n, session in enumerate(self._sessions)}
        if not self._waiting:
            return set()
        query = (
            "select pid, pg_blocking_pids(pid) as holders from unnest(%s::int[]) as pid"
            " where cardinality(pg_blocking_pids(pid)) > 0"
        )
        blocked: set[int] = set()
        for row in rows(self._watch, query, [self._sessions[n].pid for n in self._waiting]):
            blocked.add(line := lines[row["pid"]])
            holders = [self._open[lines[pid]] for pid in row["holders"] if lines.get(pid) in self._open]
            self._waiting[line][0].waited_for += [held for held in holders if held is not self._waiting[line][0]]
        return blocked

    def _await_someone(self) -> None:
        """All wait: for each other, so that the server ends one of them."""
        deadline = time.monotonic() + BOUND
        while not self._collect():
            assert time.monotonic() < deadline, f"all wait for ever: {self._waiting}"
            time.sleep(0.002)
        self._settle()


def _steps(transaction: Transaction) -> list[tuple[Transaction, Call | None]]:
    return [*((transaction, call) for call in transaction.calls), (transaction, None)]


def _wait(future: Future[Any], seconds: float) -> None:
    try:
        future.exception(seconds)
    except TimeoutError:
        return
