"""``taskq workers list``."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, SchemaOption

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Look at worker processes.")


@app.callback()
def callback() -> None:
    """Look at worker processes."""


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Those that stopped or were lost as well.")] = False,
    limit: LimitOption = 200,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List workers, the newest first, with how many jobs each has claimed."""
    from taskq.cli.database import open_database
    from taskq.cli.output import show

    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("workers", everything, limit)
    columns = ["id", "name", "status", "queues", "claimed", "concurrency", "started_at", "lease_expires_at", "version"]
    optional = ["version", "lease_expires_at", "started_at", "concurrency", "queues"]
    show(rows, columns, as_json=as_json, empty="no workers", optional=optional)
