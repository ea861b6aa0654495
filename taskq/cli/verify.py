"""``taskq verify``: check the laws of the queue in the database, as anyone can."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, SchemaOption, SinceOption

__all__ = ["command"]


def command(
    everything: Annotated[bool, typer.Option("--all", help="All finished jobs too, day by day.")] = False,
    since: SinceOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Check that no job and no attempt was lost, doubled or miscounted; list each violation.

    Looks at unfinished jobs; with --since also at those finished since then, with --all at everything.

    Exit codes: 0 clean; 1 violations, or it could not be checked; 2 usage or settings; 3 cannot connect.
    """
    from taskq.cli.database import moment, open_database
    from taskq.cli.output import ExitCode, print_json, print_table

    if everything and since is not None:
        raise typer.BadParameter("give --all or --since, not both")
    scope = "all" if everything else "live" if since is None else "since"
    at, ago = moment(since)
    with open_database(dsn, schema) as database:
        rows = database.rows("verify", scope, at, ago)
    if as_json:
        print_json({"ok": not rows, "scope": scope, "violations": rows})
    else:
        print_table(rows, ["law", "code", "job_id", "detail"], empty=f"no violations (scope: {scope})")
    return ExitCode.FAILED if rows else ExitCode.OK
