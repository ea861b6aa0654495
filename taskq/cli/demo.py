"""``taskq demo``: two workers index Python files, one is killed half-way, and the totals still are those of a loop."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from taskq.cli.options import JsonOption, SchemaOption

if TYPE_CHECKING:
    from rich.console import Console

    from taskq.cli.output import ExitCode
    from taskq.demo.report import Report

__all__ = ["chosen_seed", "command", "conclude", "database", "progress", "workplace"]

SHORTEST = 4.0
"""Seconds that the indexing of a small folder is made to last."""


def command(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A folder with Python files; the standard library by default.", show_default=False),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the database and the workers' logs there.")] = False,
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Use this database, and migrate it, instead of one of its own.", metavar="URL"),
    ] = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> int:
    """See a worker killed half-way, and nothing lost.

    Indexes the Python files of the standard library, or of FOLDER, as one job a file, with two worker processes. When
    half is done, one of them is killed with SIGKILL while it runs jobs. The other one finishes everything, and the
    totals are compared with those of a plain loop over the same files.

    Exit codes: 0 all agrees, and the kill cost at least one attempt; 1 something differs; 2 usage or settings; 3 cannot
    connect.
    """
    from taskq.demo.counting import find_files
    from taskq.settings import load

    settings = load(require_dsn=False, dsn=dsn, schema=schema)
    files = find_files(folder)
    with workplace(dsn, keep=keep) as (found, work):
        report = _play(found, settings.schema, files, work, own=dsn is None)
    well = f"{report.lost} attempts were lost to the kill, and nothing else: all totals agree"
    return conclude(report, well, as_json=as_json)


class Told(Protocol):
    """What the report of any demonstration can."""

    def problems(self) -> list[str]: ...

    def as_json(self) -> dict[str, Any]: ...

    def show(self, console: Console) -> None: ...


def conclude(report: Told, well: str, *, as_json: bool) -> ExitCode:
    """Print a report, and ``well`` where it has no problems; the exit code says whether it has."""
    from rich.console import Console

    from taskq.cli.output import ExitCode, note, print_json

    problems = report.problems()
    if as_json:
        print_json(report.as_json())
    else:
        report.show(Console(width=None if Console().is_terminal else 100))
    for problem in problems:
        note(f"error: {problem}")
    if not problems:
        note(well)
    return ExitCode.FAILED if problems else ExitCode.OK


def chosen_seed(seed: int | None) -> int:
    """The seed that was given, or a random one, told of."""
    from taskq.cli.output import note

    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    note(f"seed {chosen}; repeat its faults with --seed {chosen}")
    return chosen


@contextmanager
def workplace(dsn: str | None, *, keep: bool) -> Iterator[tuple[str, Path]]:
    """A database and a folder for a demonstration; both are gone after it, unless kept or given."""
    from taskq.cli.output import note

    work = Path(tempfile.mkdtemp(prefix="taskq-demo-"))
    try:
        # For root the server runs as another user, who must be able to pass through.
        work.chmod(0o711)
        with unwound_by_sigterm(), database(dsn, work) as found:
            yield found, work
    finally:
        if keep:
            server = f"; start its database again with: taskq dev --data-dir {work / 'postgres'}" if dsn is None else ""
            note(f"kept in {work}{server}")
        else:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block by SystemExit, so that the server and the workers within are stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def database(dsn: str | None, work: Path) -> Iterator[str]:
    """The database at a DSN, or where there is none a server of its own in the folder ``work``."""
    if dsn is not None:
        yield dsn
        return
    from taskq.embedded import EmbeddedPostgres

    with EmbeddedPostgres.start(work / "postgres") as server:
        yield server.dsn


def _play(dsn: str, schema: str, files: list[str], work: Path, *, own: bool) -> Report:
    from taskq import migrate
    from taskq.cli.output import counted
    from taskq.demo.loop import PlainLoop
    from taskq.demo.report import Report, totals_of
    from taskq.demo.stage import CONCURRENCY, Stage
    from taskq.demo.tasks import app, index_file

    migrate.up(dsn, schema)
    app.use_database(dsn, schema)
    with Stage(dsn, schema, work).open() as stage, progress(len(files), "files", "two workers") as tell:
        began = time.monotonic()
        pause = SHORTEST * 2 * CONCURRENCY / len(files) if len(files) < 500 else 0.0
        task = index_file.using(queue=stage.queue)
        jobs = app.enqueue_many_sync([task.job(path, pause) for path in files])
        ids = [str(job.id) for job in jobs]
        app.close_sync()
        stage.run_until(len(files) // 2, lambda left: tell(left, "two workers"))
        survivor, victim = stage.workers
        held = stage.kill(victim)
        doing = f"one worker; the other was killed, with {counted(held, 'job')} running"
        # From here on a core is free for the plain loop.
        with PlainLoop.start(files, work) as loop:
            stage.run_until(0, lambda left: tell(left, doing))
            seconds = time.monotonic() - began
            code = stage.stop(survivor)
            plain, plain_seconds = loop.result()
        indexed, by_worker, others = totals_of(stage.rows("finished", ids, ids[0]))
        lost = stage.number("lost", ids, victim.worker_id)
        violations = stage.rows("verify", "all" if own else "since", ids[0])
    return Report(
        indexed=indexed,
        plain=plain,
        jobs=len(ids),
        by_worker=by_worker,
        killed=victim.name,
        held=held,
        lost=lost,
        not_succeeded=others,
        violations=violations,
        survivor_exit=code,
        seconds=seconds,
        plain_seconds=plain_seconds,
    )


@contextmanager
def progress(total: int, what: str, who: str) -> Iterator[Callable[[int, str], None]]:
    """A way to tell how many jobs are left, and what goes on: in place on a terminal, else a line for each tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from taskq.cli.output import note

    console = Console(stderr=True)
    if not console.is_terminal:
        tenths = set[int]()

        def tell(left: int, who: str) -> None:
            tenth = 10 * (total - left) // total
            if tenth not in tenths:
                tenths.add(tenth)
                note(f"{total - left} of {total} {what}: {who}")

        yield tell
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task(who, total=total)
        yield lambda left, who: bar.update(shown, completed=total - left, description=who)
