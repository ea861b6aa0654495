"""``taskq limits list | set | clear``: how many jobs of a cohort run at once."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, SchemaOption

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at cohorts, and set how many of their jobs run at once.\n\n"
    "Exit codes: 0 done, or as asked already; 1 refused; 2 usage or settings; 3 cannot connect.",
)
NameArgument = Annotated[str, typer.Argument(help="The name of the cohort.", metavar="COHORT", show_default=False)]
WhyOption = Annotated[str, typer.Option("--reason", help="Why; it goes on the record.", show_default=False)]
COLUMNS = ["cohort", "limit", "running", "waiting", "code_limit", "operator_limit", "set_by", "reason"]


@app.command("list")
def list_(
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List cohorts: the limit that counts, how many jobs run and how many are due, and who has said what.

    Those for which most jobs wait come first.
    """
    from taskq.cli.database import open_database
    from taskq.cli.output import note, show

    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("limits", None, limit)
    optional = ["code_limit", "operator_limit", "set_by", "reason"]
    show(rows, COLUMNS, as_json=as_json, empty="no cohorts", optional=optional)
    if len(rows) == limit and not as_json:
        note(f"the first {limit}; --limit shows more")


@app.command("set")
def set_(
    name: NameArgument,
    slots: Annotated[
        int, typer.Argument(help="How many run at once; 0 for nobody.", metavar="N", min=0, max=2**31 - 1)
    ],
    reason: WhyOption,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Let so many jobs of a cohort run at once, whatever code says, until it is cleared.

    What runs goes on: a lower limit counts as soon as enough of them have ended. No deploy overwrites it.
    """
    from taskq.cli.output import note

    answer = _steer("set_limit", (name, slots, reason), name, as_json=as_json, dsn=dsn, schema=schema)
    if answer == "new" and not as_json:
        note(f"no job and no code has named a cohort {name!r} yet; taskq limits list shows those that are")


@app.command()
def clear(
    name: NameArgument,
    reason: WhyOption,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Take back what was set: the limit of the code counts again."""
    _steer("clear_limit", (name, reason), name, as_json=as_json, dsn=dsn, schema=schema)


def _steer(
    query: str, arguments: tuple[object, ...], name: str, *, as_json: bool, dsn: str | None, schema: str | None
) -> str:
    from taskq.cli.database import actor, open_database
    from taskq.cli.output import show

    with open_database(dsn, schema) as database:
        answer: str = database.value(query, *arguments, actor())
        [row] = database.bounded_rows("limits", name, 1)
    said = {"set": "set", "new": "set", "cleared": "cleared", "not_set": "was not set"}
    shown = {**row, "answer": answer if as_json else said[answer]}
    optional = ["code_limit", "operator_limit", "set_by", "reason"]
    show([shown], ["cohort", "answer", *COLUMNS[1:]], as_json=as_json, optional=optional)
    return answer
