"""``taskq queues list | pause | resume``."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, ReasonOption, SchemaOption

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at queues, pause and resume them.\n\n"
    "Exit codes: 0 done, or as asked already; 1 refused; 2 usage or settings; 3 cannot connect.",
)
NamesArgument = Annotated[list[str], typer.Argument(help="Names of queues.", metavar="QUEUE...", show_default=False)]


@app.command("list")
def list_(as_json: JsonOption = False, dsn: DsnOption = None, schema: SchemaOption = None) -> None:
    """List queues with what is due, waits for its time, runs, is held, or is unknown."""
    from taskq.cli.database import open_database
    from taskq.cli.output import show

    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("queues")
    columns = ["queue", "due", "waiting", "running", "held", "unknown", "oldest_due", "paused_at"]
    show(rows, columns, as_json=as_json, empty="no queues")


@app.command()
def pause(
    names: NamesArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Let nothing more be claimed from queues; what runs goes on."""
    _steer("pause_queue", names, ("paused", "was paused already"), reason, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def resume(
    names: NamesArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Let claims from paused queues go on."""
    _steer("resume_queue", names, ("resumed", "was not paused"), reason, as_json=as_json, dsn=dsn, schema=schema)


def _steer(
    query: str,
    names: list[str],
    said: tuple[str, str],
    reason: str | None,
    *,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> None:
    from taskq.cli.database import actor, open_database
    from taskq.cli.output import show
    from taskq.policy import check_name

    for name in names:
        check_name("the queue's name", name)
    with open_database(dsn, schema) as database:
        changed = [database.value(query, name, reason, actor()) for name in names]
    rows = [{"queue": n, "answer": said[0] if c else said[1]} for n, c in zip(names, changed, strict=True)]
    show(rows, ["queue", "answer"], as_json=as_json)
