"""``taskq audit list``: who did what, when and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, SchemaOption, SinceOption

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at what operators did.\n\nExit codes: 0 done; 1 refused; 2 usage or settings; 3 cannot connect.",
)


@app.callback()
def callback() -> None:
    """Look at what operators did."""


@app.command("list")
def list_(
    action: Annotated[
        list[str] | None,
        typer.Option(
            "--action",
            help="cancel, retry, resolve, pause, resume, drain, cancel_many, retry_many, settle_effect, retry_effect.",
        ),
    ] = None,
    subject: Annotated[
        list[str] | None, typer.Option("--subject", help="A job's id, a queue's name or a worker's id.")
    ] = None,
    actor: Annotated[list[str] | None, typer.Option("--actor", help="Who, such as ann@host.")] = None,
    since: SinceOption = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List what operators did, the newest first. A bulk action has a row for each batch, and one for each job."""
    from datetime import timedelta

    from taskq.cli.database import moment, open_database
    from taskq.cli.output import note, show

    at, ago = moment(since)
    with open_database(dsn, schema) as database:
        if ago is not None:
            at = database.value("now") - timedelta(seconds=ago)
        rows = database.bounded_rows("audits", action or None, subject or None, actor or None, at, limit)
    shown = rows if as_json else [{**r, "details": r["details"] and json.dumps(r["details"])} for r in rows]
    columns = ["at", "actor", "db_user", "action", "subject", "reason", "details"]
    show(shown, columns, as_json=as_json, empty="nothing", optional=["db_user", "details"])
    if len(rows) == limit and not as_json:
        note(f"the newest {limit}; --limit shows more")
