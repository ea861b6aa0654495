"""``taskq orderings list | resume``: the lines of jobs with one ordering key."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, SchemaOption

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at ordering keys, and let halted ones go on.\n\n"
    "Exit codes: 0 done, or as asked already; 1 refused; 2 usage or settings; 3 cannot connect.",
)


@app.command("list")
def list_(
    halted: Annotated[
        bool, typer.Option("--halted", help="Only keys that a failed job or an unknown outcome halts.")
    ] = False,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List ordering keys with unfinished jobs or halted: whose turn it is, how many wait, and what halts it.

    Those behind which most jobs wait come first.
    """
    from taskq.cli.database import open_database
    from taskq.cli.output import note, show

    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("orderings", halted, limit)
    columns = ["ordering_key", "job_id", "status", "waiting", "waiting_since", "halted_by", "halted_at"]
    empty = "no halted keys" if halted else "no ordering keys in use"
    show(rows, columns, as_json=as_json, empty=empty, optional=["waiting_since", "halted_at"])
    if len(rows) == limit and not as_json:
        note(f"the first {limit}; --limit shows more")


@app.command()
def resume(
    key: Annotated[str, typer.Argument(help="The ordering key.", metavar="KEY", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", help="Why; it goes on the record.", show_default=False)],
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Let a key go on that failed jobs have halted. They stay failed; what waits behind them runs.

    Refused while a job of the key is unknown: taskq jobs resolve decides its outcome, and the key goes on by itself.
    """
    from taskq.cli.database import actor, open_database
    from taskq.cli.output import show

    with open_database(dsn, schema) as database:
        answer = database.value("resume_ordering", key, reason, actor())
        line = database.bounded_rows("line_of_key", key)
    row = {
        "ordering_key": key,
        "answer": answer,
        **(line[0] if line else {"job_id": None, "status": None, "waiting": 0}),
    }
    if not as_json:
        row["answer"] = {"resumed": "resumed", "not_halted": "was not halted"}[answer]
    show([row], ["ordering_key", "answer", "job_id", "status", "waiting"], as_json=as_json)
