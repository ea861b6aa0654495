"""``taskq jobs list | show | cancel | retry | resolve``: look at jobs and steer them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, ReasonOption, SchemaOption, SinceOption

__all__ = ["app"]

STATUSES = ("pending", "running", "held", "unknown", "succeeded", "failed", "cancelled")
IdsArgument = Annotated[list[str], typer.Argument(help="Ids of jobs.", metavar="ID...", show_default=False)]
IdArgument = Annotated[str, typer.Argument(help="The id of a job.", metavar="ID", show_default=False)]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at jobs and steer them.\n\n"
    "Exit codes: 0 done; 1 refused, or there is no such job; 2 usage or settings; 3 cannot connect.",
)


@app.command("list")
def list_(
    status: Annotated[
        list[str] | None, typer.Option("--status", help=f"{', '.join(STATUSES)}; repeat it or separate by commas.")
    ] = None,
    queue: Annotated[list[str] | None, typer.Option("--queue", "-q", help="A queue; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="A task; may be repeated.")] = None,
    since: SinceOption = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List jobs, the newest first. With --since: finished since then, or made since then and not finished."""
    from taskq.cli.database import moment, open_database
    from taskq.cli.output import note, show

    statuses = [part.strip() for each in status or () for part in each.split(",")]
    if unknown := set(statuses) - set(STATUSES):
        raise typer.BadParameter(f"there is no status {sorted(unknown)[0]!r}; there are {', '.join(STATUSES)}")
    at, ago = moment(since)
    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("jobs", statuses or None, queue or None, task or None, limit, at, ago)
    columns = ["id", "status", "queue", "task", "attempt", "created_at", "run_at", "finished_at", "error"]
    shown = rows if as_json else [{**r, "attempt": f"{r['attempt']}/{r['max_attempts']}"} for r in rows]
    optional = ["run_at", "finished_at", "created_at", "attempt", "queue"]
    show(shown, columns, as_json=as_json, empty="no jobs", optional=optional)
    if len(rows) == limit and not as_json:
        note(f"the newest {limit}; --limit shows more")


@app.command("show")
def show_(id_: IdArgument, as_json: JsonOption = False, dsn: DsnOption = None, schema: SchemaOption = None) -> int:
    """Show one job: its row, its ended attempts, what operators did, payload, result and error."""
    from taskq.cli.database import job_id, open_database
    from taskq.cli.output import ExitCode, print_json, print_table
    from taskq.errors import JobNotFound

    job = job_id(id_)
    with open_database(dsn, schema) as database:
        found = database.rows("job", job)
        if not found:
            missing = JobNotFound(f"there is no job {job}", hint="Check the id; retention may have dropped it.")
            if not as_json:
                raise missing
            print_json({"id": job, "answer": "not_found", "why": str(missing)})
            return ExitCode.FAILED
        attempts = database.rows("attempts", job)
        audit = database.rows("audit", job)
    row = found[0]
    if as_json:
        print_json({**row, "attempts": attempts, "audit": audit})
        return ExitCode.OK
    values = ("payload", "result", "error", "meta")
    facts = [{"what": k.replace("_", " "), "is": v} for k, v in row.items() if k not in values and v not in (None, [])]
    print_table(facts, ["what", "is"])
    for name in values:
        if row[name] is not None:
            print(f"\n{name}\n{_readable(row[name])}")
    print("\nattempts")
    print_table(
        [{**a, "error": _said(a["error"])} for a in attempts],
        ["claim_epoch", "outcome", "worker", "claimed_at", "ended_at", "error"],
        empty="none has ended",
    )
    if audit:
        print("\naudit")
        print_table(
            [{**a, "details": json.dumps(a["details"])} for a in audit], ["at", "actor", "action", "reason", "details"]
        )
    return ExitCode.OK


@app.command()
def cancel(
    ids: IdsArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Cancel jobs: cancelled (will not run), requested (runs, and is told), finished, unknown or not_found."""
    return _each(
        "cancel",
        ids,
        lambda answer: answer in {"cancelled", "requested"},
        reason,
        as_json=as_json,
        dsn=dsn,
        schema=schema,
    )


@app.command()
def retry(
    ids: IdsArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Reopen failed or cancelled jobs with fresh counters (reopened), or make waiting ones due (due)."""
    return _each("retry", ids, lambda _: True, reason, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def resolve(
    id_: IdArgument,
    happened: Annotated[
        bool,
        typer.Option(
            "--happened/--did-not-happen",
            help="Whether its effect happened. If so it has succeeded; if not it is cancelled where cancelling was "
            "requested, else it is pending again and runs anew.",
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", help="What you checked; it goes on the record.")],
    result: Annotated[
        str | None, typer.Option("--result", help="What the body would have returned.", metavar="JSON")
    ] = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Decide the outcome of a job that is unknown, once and on the record."""
    from taskq.cli.database import actor, job_id, open_database
    from taskq.cli.output import ExitCode
    from taskq.errors import DatabaseRefusal

    job = job_id(id_)
    if not reason.strip():
        raise typer.BadParameter("say what you checked, with --reason; it goes on the record")
    if result is not None:
        if not happened:
            raise typer.BadParameter("--result goes with --happened only")
        check_json(result, "--result")
    with open_database(dsn, schema) as database:
        try:
            answer = database.value("resolve", job, happened, result, reason, actor())
        except DatabaseRefusal as exc:
            if not as_json:
                raise
            _report([{"id": job, "answer": "refused", "why": str(exc)}], as_json=True)
            return ExitCode.FAILED
    _report([{"id": job, "answer": answer}], as_json=as_json)
    return ExitCode.OK


def check_json(text: str, what: str) -> Any:
    """What a JSON text of the command line says.

    Raises:
        typer.BadParameter: It is not JSON.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as exc:
        raise typer.BadParameter(f"{what} is not valid JSON: {exc}") from None


def _each(
    query: str,
    ids: list[str],
    is_done: Callable[[str], bool],
    reason: str | None,
    *,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    from taskq.cli.database import actor, job_id, open_database
    from taskq.cli.output import ExitCode
    from taskq.errors import DatabaseRefusal

    jobs = [job_id(each) for each in ids]
    rows: list[dict[str, Any]] = []
    done = True
    with open_database(dsn, schema) as database:
        for job in jobs:
            try:
                answer = database.value(query, job, reason, actor())
                done = done and is_done(answer)
                rows.append({"id": job, "answer": answer})
            except DatabaseRefusal as exc:
                done = False
                rows.append({"id": job, "answer": "refused", "why": str(exc)})
    _report(rows, as_json=as_json)
    return ExitCode.OK if done else ExitCode.FAILED


def _report(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    from taskq.cli.output import show

    columns = ["id", "answer", "why"] if any("why" in row for row in rows) else ["id", "answer"]
    show(rows, columns, as_json=as_json)


def _readable(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("traceback"), str):
        rest = {k: v for k, v in value.items() if k != "traceback"}
        return f"{json.dumps(rest, indent=2, ensure_ascii=False)}\n{value['traceback'].rstrip()}"
    return json.dumps(value, indent=2, ensure_ascii=False)


def _said(error: Any) -> str | None:
    return None if error is None else f"{error.get('type')}: {error.get('message')}"
