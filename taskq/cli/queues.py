"""``taskq queues list | pause | resume``."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.complete import complete_queue
from taskq.cli.options import DsnOption, JsonOption, ReasonOption, SchemaOption

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at queues, pause and resume them.\n\n"
    "Exit codes: 0 done, or as asked already; 1 refused; 2 usage or settings; 3 cannot connect.",
)
NamesArgument = Annotated[
    list[str],
    typer.Argument(help="Names of queues.", metavar="QUEUE...", show_default=False, autocompletion=complete_queue),
]


@app.command("list")
def list_(as_json: JsonOption = False, dsn: DsnOption = None, schema: SchemaOption = None) -> None:
    """List queues with what is due, waits for its time, runs, is held, or is unknown, and the live workers of each."""
    from taskq.cli.database import open_database
    from taskq.cli.output import show

    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("queues")
    columns = ["queue", "due", "waiting", "running", "held", "unknown", "workers", "oldest_due", "paused_at"]
    show(rows, columns, as_json=as_json, empty="no queues")


@app.command()
def pause(
    names: NamesArgument,
    reason: ReasonOption = None,
    create: Annotated[
        bool, typer.Option("--create", help="Also a queue that has no jobs, tasks or workers yet.")
    ] = False,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Let nothing more be claimed from queues; what runs goes on. Says how many jobs are due and run there."""
    said = ("paused", "was paused already")
    _steer("pause_queue", names, said, reason, create=create, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def resume(
    names: NamesArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Let claims from paused queues go on."""
    said = ("resumed", "was not paused")
    _steer("resume_queue", names, said, reason, create=False, as_json=as_json, dsn=dsn, schema=schema)


def _steer(
    query: str,
    names: list[str],
    said: tuple[str, str],
    reason: str | None,
    *,
    create: bool,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> None:
    from taskq.cli.database import actor, open_database, queue_name
    from taskq.cli.output import show
    from taskq.errors import TaskQError

    names = [queue_name(name) for name in names]
    with open_database(dsn, schema) as database:
        if not create:
            known = [row["queue"] for row in database.bounded_rows("known_queues")]
            if unknown := [name for name in names if name not in known]:
                cure = "; with --create it is paused before it has any jobs" if query == "pause_queue" else ""
                raise TaskQError(
                    f"no job, task or worker knows the queue {unknown[0]!r}, and nothing was changed; known are: "
                    f"{', '.join(known) or 'none'}{cure}"
                )
        changed = [database.value(query, name, reason, actor()) for name in names]
        counts = {row["queue"]: row for row in database.bounded_rows("queues")}
    rows = [
        {"queue": name, "answer": said[0] if done else said[1], **{k: counts[name][k] for k in ("due", "running")}}
        for name, done in zip(names, changed, strict=True)
    ]
    show(rows, ["queue", "answer", "due", "running"], as_json=as_json)
