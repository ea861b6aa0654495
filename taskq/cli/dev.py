"""``taskq dev``: a PostgreSQL for development, migrated, and a worker beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from taskq.cli.options import SchemaOption
from taskq.cli.worker import ConcurrencyOption, LogFormatOption, LogLevelOption, QueueOption

__all__ = ["command"]


def command(
    app: Annotated[
        str | None, typer.Argument(help="An app to run a worker for, as module:attribute [TASKQ_APP].", metavar="APP")
    ] = None,
    queue: QueueOption = None,
    concurrency: ConcurrencyOption = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Where the PostgreSQL keeps its data.", show_default=False)
    ] = None,
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Use this database instead, and migrate it.", metavar="URL", show_default=False),
    ] = None,
    schema: SchemaOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> int:
    """Start a PostgreSQL on this machine, install taskq in it, print its DSN, and run a worker for the app, if any.

    The data stays for the next time. TASKQ_DSN is left alone: only --dsn names another database. Ctrl-C stops it all.

    Exit codes: those of taskq worker; 1 if the server could not be started.
    """
    from taskq.cli.apps import load_app
    from taskq.cli.output import note
    from taskq.cli.serve import check_origin, choose_database, options_of, run_worker
    from taskq.settings import load
    from taskq.telemetry import configure_for_terminal

    settings = load(
        require_dsn=False,
        app=app,
        queues=",".join(queue) if queue else None,
        concurrency=concurrency,
        dsn=dsn,
        schema=schema,
        log_format=log_format,
        log_level=log_level,
    )
    options = options_of(settings)
    with _database(dsn, data_dir) as (found, leave):
        if "TASKQ_DSN" in os.environ and os.environ["TASKQ_DSN"] != found:
            note("TASKQ_DSN names another database, which taskq dev does not touch")
        os.environ["TASKQ_DSN"] = found  # for code of the app's that reads it
        loaded = None if settings.app is None else load_app(settings.app)
        configure_for_terminal(cast(Literal["console", "json"], settings.log_format), settings.log_level)
        check_origin()
        if loaded is not None:
            loaded.use_database(found)
            choose_database(loaded, settings)
        _install(found, settings.schema if loaded is None else loaded.schema, shown=dsn is None)
        if loaded is None:
            note("no app is named, so no worker runs; Ctrl-C stops the server")
            _wait_for_signal()
            return 0
        return run_worker(loaded, found, options, reference=settings.app, at_exit=leave)


def _install(dsn: str, schema: str, *, shown: bool) -> None:
    from taskq import migrate
    from taskq.cli.output import note
    from taskq.db.dsn import describe_dsn

    done = migrate.up(dsn, schema)
    if done.applied:
        note(f"installed taskq in the schema {schema}: {len(done.applied)} migrations")
    if shown:  # the server on this machine has no password
        note("in other terminals use this database with:")
        print(f"export TASKQ_DSN='{dsn}'", flush=True)
    else:
        note(f"using {describe_dsn(dsn)}")


@contextmanager
def _database(dsn: str | None, data_dir: Path | None) -> Iterator[tuple[str, Callable[[], None] | None]]:
    if dsn is not None:
        yield dsn, None
        return
    from taskq.embedded import EmbeddedPostgres

    with EmbeddedPostgres.start(data_dir) as server:
        yield server.dsn, server.stop


def _wait_for_signal() -> None:
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
