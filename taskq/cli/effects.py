"""``taskq effects list | show | settle | retry``: terminal effects, and whether each is settled."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, ReasonOption, SchemaOption

__all__ = ["app"]

KeyArgument = Annotated[
    str, typer.Argument(help="What names the effect: OWNER:GENERATION:NAME.", metavar="KEY", show_default=False)
]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at terminal effects, settle them and give them another go.\n\n"
    "Exit codes: 0 done; 1 refused, or there is no such effect; 2 usage or settings; 3 cannot connect.",
)


@app.command("list")
def list_(
    unsettled: Annotated[bool, typer.Option("--unsettled", help="Only those that are not settled.")] = False,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Only those of this job.", metavar="ID", show_default=False)
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Only those that this task carries out.", show_default=False)
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List effects, the newest first.

    An effect is settled once its job has succeeded or was cancelled, or an operator settled it.
    """
    from taskq.cli.database import job_id, open_database
    from taskq.cli.output import note, show

    wanted = None if owner is None else job_id(owner)
    query = "unsettled_effects" if unsettled else "effects"
    with open_database(dsn, schema) as database:
        rows = database.bounded_rows(query, wanted, task or None, limit)
    shown = rows if as_json else [{**r, "error": _said(r["error"]), "settled": r["settled_how"]} for r in rows]
    columns = ["effect_key", "on_status", "task", "job_id", "status", "settled", "error"]
    show(shown, columns, as_json=as_json, empty="no effects", optional=["on_status", "job_id", "task"])
    if len(rows) == limit and not as_json:
        note(f"the newest {limit}; --limit shows more")


@app.command("show")
def show_(key: KeyArgument, as_json: JsonOption = False, dsn: DsnOption = None, schema: SchemaOption = None) -> int:
    """Show one effect: its owner, its job, its error, who settled it and why."""
    from taskq.cli.database import open_database
    from taskq.cli.output import ExitCode, print_json, print_table
    from taskq.errors import EffectNotFound

    with open_database(dsn, schema) as database:
        found = database.rows("effect", key)
        audit = database.rows("audit", key)
    if not found:
        missing = EffectNotFound(
            f"there is no effect {key}", hint="taskq effects list shows their keys; retention may have dropped it."
        )
        if not as_json:
            raise missing
        print_json({"effect_key": key, "answer": "not_found", "why": str(missing)})
        return ExitCode.FAILED
    row = found[0]
    if as_json:
        print_json({**row, "audit": audit})
        return ExitCode.OK
    facts = [{"what": k.replace("_", " "), "is": v} for k, v in row.items() if k != "error" and v is not None]
    print_table(facts, ["what", "is"])
    if row["error"] is not None:
        print(f"\nerror\n{json.dumps(row['error'], indent=2, ensure_ascii=False)}")
    if audit:
        print("\naudit")
        print_table(
            [{**a, "details": json.dumps(a["details"])} for a in audit], ["at", "actor", "action", "reason", "details"]
        )
    return ExitCode.OK


@app.command()
def settle(
    key: KeyArgument,
    reason: Annotated[str, typer.Option("--reason", help="What you checked or did instead; it goes on the record.")],
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Declare an effect settled, once and on the record; its job, if it waits, is cancelled.

    Refused while the job runs, or while its outcome is unknown.
    """
    if not reason.strip():
        raise typer.BadParameter("say what you checked or did instead, with --reason; it goes on the record")
    return _do("settle_effect", key, reason, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def retry(
    key: KeyArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Give an effect another go.

    Its failed or cancelled job is reopened (reopened), a waiting one made due (due); one that is broken gets the job
    that it lacks (enqueued), if what was wrong is right again.
    """
    return _do("retry_effect", key, reason, as_json=as_json, dsn=dsn, schema=schema)


def _do(query: str, key: str, reason: str | None, *, as_json: bool, dsn: str | None, schema: str | None) -> int:
    from taskq.cli.database import actor, open_database
    from taskq.cli.output import ExitCode, print_json, show
    from taskq.errors import DatabaseRefusal

    with open_database(dsn, schema) as database:
        try:
            answer = database.value(query, key, reason, actor())
        except DatabaseRefusal as exc:
            if not as_json:
                raise
            print_json([{"effect_key": key, "answer": "refused", "why": str(exc)}])
            return ExitCode.FAILED
    show([{"effect_key": key, "answer": answer}], ["effect_key", "answer"], as_json=as_json)
    return ExitCode.OK


def _said(error: Any) -> str | None:
    return None if error is None else f"{error.get('type')}: {error.get('message')}"
