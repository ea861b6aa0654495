"""What a measure gets: the systems that are there, and databases for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.environments import Environments, NotInstalled
from benchmarks.harness.processes import AdapterFailed, Workers, run_adapter
from benchmarks.harness.server import BenchServer, Database
from benchmarks.peers.kit import Traits

__all__ = ["Bench", "LawBroken", "System"]


class LawBroken(Exception):
    """taskq's own check of its record found something; no figure of such a run counts."""


@dataclass(frozen=True)
class System:
    """A system that can be measured."""

    traits: Traits
    python: str

    @property
    def name(self) -> str:
        """What it is called."""
        return self.traits.name


class Bench:
    """The systems and the server.

    Args:
        server: Where databases are made.
        environments: Where interpreters come from.
        names: The systems that are wanted; those that cannot be had are in ``left_out`` with the reason.
    """

    def __init__(self, server: BenchServer, environments: Environments, names: Sequence[str]) -> None:
        self.server = server
        self.systems: dict[str, System] = {}
        self.left_out: dict[str, str] = {}
        self.checked = 0
        for name in names:
            try:
                python = environments.python_of(name)
                said = run_adapter(python, name, "describe")[0]
            except (NotInstalled, AdapterFailed) as exc:
                self.left_out[name] = str(exc)
                print(f"{name} is left out: {exc}", file=sys.stderr, flush=True)
                continue
            said.pop("event")
            self.systems[name] = System(Traits(**said), python)

    @contextmanager
    def fresh(self, system: System) -> Iterator[Database]:
        """A fresh database with the system's schema; taskq's record is checked in it at the end.

        Raises:
            LawBroken: The check found something.
            AdapterFailed: The schema could not be made.
        """

        def setup(dsn: str) -> None:
            run_adapter(system.python, system.name, "setup", "--dsn", dsn)

        with self.server.fresh(system.name, setup) as database:
            yield database
            if system.name == "taskq":
                self.check(database)

    def check(self, database: Database) -> None:
        """Check taskq's record, finished jobs included.

        Raises:
            LawBroken: The check found something.
        """
        found = database.watch.execute("select law, code, job_id, detail from taskq.check_invariants('all')").fetchall()
        if found:
            raise LawBroken(f"{len(found)} violations in {database.name}, the first: {found[0]}")
        self.checked += 1

    def enqueue(self, system: System, database: Database, command: str, jobs: int, *more: str) -> dict[str, Any]:
        """Enqueue by an adapter: its answer, and the bytes of WAL and the server's CPU that it took."""
        before = database.read()
        answers = run_adapter(system.python, system.name, command, str(jobs), "--dsn", database.dsn, *more)
        used = database.read().since(before)
        answer = next(each for each in answers if each["event"] == "enqueued")
        return {
            "jobs": answer["jobs"],
            "in_all": answer["in_all"],
            "seconds": answer["seconds"],
            "jobs_per_s": answer["jobs"] / answer["seconds"],
            "client_cpu_s": answer["cpu"],
            "server_cpu_s": used.cpu,
            "wal_bytes_per_job": used.wal / answer["in_all"],
            "statements_per_job": used.statements / answer["in_all"],
        }

    def workers(
        self, system: System, database: Database, processes: int = 1, concurrency: int | None = None, queues: int = 1
    ) -> Workers:
        """Workers of a system, started when entered; with its best concurrency unless one is given."""
        return Workers(
            system.python, system.name, database.dsn, processes, concurrency or system.traits.concurrency, queues
        )
