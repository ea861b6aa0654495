"""``taskq worker module:app``: run a worker until it is told to stop."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import typer

from taskq.cli.options import DsnOption, SchemaOption

__all__ = ["command"]

QueueOption = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", help="A queue to serve; repeat it or separate by commas. By default the tasks' own."),
]
ConcurrencyOption = Annotated[
    str | None, typer.Option("--concurrency", "-c", help="Bodies to run at once [50].", metavar="N")
]
LogFormatOption = Annotated[str | None, typer.Option("--log-format", help="console (the default) or json.")]
LogLevelOption = Annotated[str | None, typer.Option("--log-level", help="debug, info (the default), warning or error.")]


def command(
    app: Annotated[
        str | None, typer.Argument(help="The application object as module:attribute [TASKQ_APP].", metavar="APP")
    ] = None,
    queue: QueueOption = None,
    concurrency: ConcurrencyOption = None,
    lease: Annotated[
        str | None, typer.Option("--lease", help="Seconds for which claims live without renewal [15].", metavar="S")
    ] = None,
    grace: Annotated[
        str | None, typer.Option("--grace", help="Seconds that bodies get to end after a signal [25].", metavar="S")
    ] = None,
    poll_interval: Annotated[
        str | None, typer.Option("--poll-interval", help="Seconds between looks for work while idle [1].", metavar="S")
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            "--processes", help="Run N worker processes under a supervisor; auto: one a core.", metavar="N|auto"
        ),
    ] = None,
    max_jobs: Annotated[
        str | None, typer.Option("--max-jobs", help="Replace a process after about N bodies.", metavar="N")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", help="Replace a process that has about SIZE in memory: 512M, 2G.", metavar="SIZE"),
    ] = None,
    ends_commit: Annotated[
        str | None,
        typer.Option(
            "--ends-commit",
            help="sync (the default), or async: ends alone do not wait for the disk; they may run again.",
            metavar="sync|async",
        ),
    ] = None,
    child_max_jobs: Annotated[
        str | None,
        typer.Option("--child-max-jobs", help="The same for child processes of process=True [1000].", metavar="N"),
    ] = None,
    child_max_memory: Annotated[
        str | None, typer.Option("--child-max-memory", help="The same for child processes.", metavar="SIZE")
    ] = None,
    health_port: Annotated[
        str | None,
        typer.Option("--health-port", help="Port that answers /live and /ready; by default none.", metavar="PORT"),
    ] = None,
    health_host: Annotated[
        str | None, typer.Option("--health-host", help="Address for it [127.0.0.1].", metavar="HOST")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What people call it; by default host and pid.")] = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    schema: SchemaOption = None,
    dsn: DsnOption = None,
) -> int:
    """Run a worker: claim jobs of the app's tasks and run them, until SIGTERM or Ctrl-C.

    The first signal lets running bodies end; a second one a second later hands them back at once. Settings come from
    flags, then TASKQ_... variables, then pyproject.toml. With --processes a supervisor keeps that many workers running,
    each with the --concurrency given, named NAME-1 and so on; with a --health-port each answers at a port of its own,
    from that one upwards.

    Exit codes: 0 stopped; 1 the schema does not fit, or outcomes were left unconfirmed; 2 usage or settings; 3 cannot
    connect; 75 a body still ran as the lease ran out; 76 a body in a thread outlived its timeout; 77 --max-jobs or
    --max-memory was reached. After 75, 76 and 77 start the worker again; a supervisor does.
    """
    from taskq import boot
    from taskq.cli.apps import load_app
    from taskq.cli.serve import check_origin, choose_database, options_of, run_worker
    from taskq.errors import ConfigurationError, SchemaBehind
    from taskq.settings import load
    from taskq.telemetry import configure_for_terminal
    from taskq.worker.supervised import Supervised

    link = Supervised.from_environ()
    flags: dict[str, Any] = {
        "queues": ",".join(queue) if queue else None,
        "concurrency": concurrency,
        "lease": lease,
        "grace": grace,
        "poll_interval": poll_interval,
        "ends_commit": ends_commit,
        "max_jobs": max_jobs,
        "max_memory": max_memory,
        "child_max_jobs": child_max_jobs,
        "child_max_memory": child_max_memory,
        "health_host": health_host,
        "log_format": log_format,
        "log_level": log_level,
        "schema": schema,
        "dsn": dsn,
    }
    settings = load(require_dsn=False, app=app, processes=processes, health_port=health_port, **flags)
    boot.use_format(settings.log_format)
    if settings.app is None:
        raise ConfigurationError(
            "no app is named; write 'taskq worker module:attribute', such as shop.tasks:app, or set TASKQ_APP"
        )
    options = options_of(settings, name)
    style = cast(Literal["console", "json"], settings.log_format)
    if settings.processes and link is None:
        from taskq.cli.supervise import supervise

        configure_for_terminal(style, settings.log_level)
        check_origin()
        return supervise(settings, flags, options.name)
    loaded = load_app(settings.app)
    configure_for_terminal(style, settings.log_level, process=None if link is None else options.name)
    check_origin()
    dsn = choose_database(loaded, settings)
    try:
        return run_worker(loaded, dsn, options, reference=settings.app, link=link)
    except SchemaBehind:
        if link is None or link.number == 0:
            raise
        # The list may be long, and the first of the processes prints it.
        raise SchemaBehind(
            f"the schema {loaded.schema} lacks migrations ('taskq migrate status' lists them); run 'taskq migrate up'"
        ) from None
