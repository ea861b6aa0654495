"""``taskq jobs list | show | tail | wait | cancel | retry | unknown | resolve | reconcile``: jobs, steering them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from taskq.cli.filters import Filter, QueueOption, TaskOption, with_filter
from taskq.cli.options import DsnOption, JsonOption, LimitOption, ReasonOption, SchemaOption, TimeoutOption

__all__ = ["app", "check_json", "shortened"]

IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Ids of jobs; or none, and flags that select.", metavar="[ID...]", show_default=False),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it to all that the flags select, without asking.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count what the flags select.")]
MostOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="At most so many, the oldest first.", metavar="N", show_default=False),
]
IdArgument = Annotated[str, typer.Argument(help="The id of a job.", metavar="ID", show_default=False)]

MOST_ALIKE = 10
"""Jobs that are listed where the beginning of an id is not enough."""
MOST_OF_VALUE = 100
"""Characters of a step's value that tables show."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at jobs and steer them.\n\n"
    "Exit codes: 0 done; 1 refused, or there is no such job; 2 usage or settings; 3 cannot connect.",
)


@app.command("list")
@with_filter
def list_(
    chosen: Filter,
    order: Annotated[str, typer.Option("--order", help="newest or oldest first.")] = "newest",
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List jobs that meet every condition, the newest first."""
    from taskq.cli.database import open_database
    from taskq.cli.output import note, show

    if order not in {"newest", "oldest"}:
        raise typer.BadParameter(f"{order!r} is no order; say newest or oldest", param_hint="--order")
    with open_database(dsn, schema) as database:
        rows = database.bounded_rows(f"{order}_jobs", *chosen.select(database).arguments, limit)
    columns = ["id", "status", "queue", "task", "attempt", "created_at", "run_at", "finished_at", "error"]
    columns[4:4] = [name for name in ("ordering_key", "cohort") if any(r[name] is not None for r in rows)]
    shown = rows if as_json else [_in_short(r) for r in rows]
    optional = ["run_at", "finished_at", "created_at", "attempt", "queue"]
    show(shown, columns, as_json=as_json, empty="no jobs", optional=optional)
    if len(rows) == limit and not as_json:
        note(f"the {order} {limit}; --limit shows more")


@app.command("show")
def show_(
    id_: Annotated[
        str,
        typer.Argument(help="The id of a job, or its first 8 hex digits or more.", metavar="ID", show_default=False),
    ],
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Show one job: its row, its ended attempts, its effects, what operators did, payload, result and error.

    Where several ids begin so, they are listed, and the exit code is 1.
    """
    from taskq.cli.database import open_database
    from taskq.cli.filters import id_range
    from taskq.cli.output import ExitCode, note, print_json, print_table
    from taskq.errors import JobNotFound

    low, high = id_range(id_)
    with open_database(dsn, schema) as database:
        like = [] if low == high else database.bounded_rows("like_id", low, high, MOST_ALIKE + 1)
        job = like[0]["id"] if like else low if low == high else id_
        if len(like) > 1:
            if as_json:
                print_json({"id": id_, "answer": "ambiguous", "candidates": like[:MOST_ALIKE]})
            else:
                print_table(like[:MOST_ALIKE], ["id", "status", "task", "created_at"])
                more = ", of which the first are shown" if len(like) > MOST_ALIKE else ""
                note(f"error: several ids begin with {id_}{more}; give more digits")
            return ExitCode.FAILED
        found = database.rows("job", job) if like or low == high else []
        if not found:
            what = f"there is no job {job}" if low == high else f"there is no job whose id begins with {id_}"
            missing = JobNotFound(what, hint="Check the id; retention may have dropped it.")
            if not as_json:
                raise missing
            print_json({"id": job, "answer": "not_found", "why": str(missing)})
            return ExitCode.FAILED
        attempts = database.rows("attempts", job)
        steps = database.rows("steps", job)
        signals = database.rows("signals", job)
        audit = database.rows("audit", job)
        effects = database.rows("job_effects", job)
        line = database.rows("line", job)
        slots = database.rows("slots", job)
        incidents = database.bounded_rows("incidents", None, job, False, 1)
    row = found[0]
    if as_json:
        beside = {
            "line": line[0] if line else None,
            "slots": slots[0] if slots else None,
            "incident": incidents[0] if incidents else None,
        }
        lists = {"attempts": attempts, "steps": steps, "signals": signals, "audit": audit, "effects": effects}
        print_json({**row, **beside, **lists})
        return ExitCode.OK
    values = ("payload", "checkpoint", "result", "error", "meta")
    facts = [{"what": k.replace("_", " "), "is": v} for k, v in row.items() if k not in values and v not in (None, [])]
    if line:
        facts.append({"what": "line", "is": _place(line[0])})
    if slots:
        facts.append({"what": "slots", "is": _slots(slots[0])})
    if incidents:
        facts.append({"what": "incident", "is": _incident(incidents[0])})
    print_table(facts, ["what", "is"])
    for name in values:
        if row[name] is not None:
            print(f"\n{name}\n{_readable(row[name])}")
        elif name in ("payload", "result") and row["payload"] is None:
            print(f"\n{name}\nnot kept (slim)")
    print("\nattempts")
    print_table(
        [{**a, "error": _said(a["error"])} for a in attempts],
        ["claim_epoch", "outcome", "worker", "claimed_at", "ended_at", "error"],
        empty="none has ended",
    )
    if steps:
        print("\nsteps")
        print_table([_step(s) for s in steps], ["name", "attempt", "recorded_at", "value"])
    if signals:
        print("\nsignals")
        print_table([_signal(g) for g in signals], ["name", "key", "sent_at", "became", "payload"])
    if effects:
        print("\neffects")
        print_table(
            [{**e, "settled": e["settled_how"] or "no", "error": _said(e["error"])} for e in effects],
            ["effect_key", "on_status", "task", "job_id", "status", "settled", "error"],
        )
    if audit:
        print("\naudit")
        print_table(
            [{**a, "details": json.dumps(a["details"])} for a in audit], ["at", "actor", "action", "reason", "details"]
        )
    return ExitCode.OK


def _incident(row: dict[str, Any]) -> str:
    """What holds a job up, and the command that goes on where it waits for somebody."""
    said = f"{row['code']}: {row['fault'].get('message')} ({row['status']})"
    return f"{said}; {row['command']}" if row["command"] else said


def _in_short(row: dict[str, Any]) -> dict[str, Any]:
    """A job as tables show it."""
    status = f"held: {row['held_reason']}" if row["held_reason"] else row["status"]
    return {**row, "status": status, "attempt": f"{row['attempt']}/{row['max_attempts']}"}


def _step(step: dict[str, Any]) -> dict[str, Any]:
    """A recorded step as tables show it."""
    name = step["name"] if step["occurrence"] == 1 else f"{step['name']} #{step['occurrence']}"
    if not step["current"]:
        name += f" (of generation {step['generation']})"
    if step["left_out"]:
        name += " (not asked for by the attempt that succeeded)"
    value = shortened(step["value"])
    if step["kind"] == "sleep":
        value = f"sleeps until {step['until']}"
    elif step["kind"] == "child":
        which = f"job {step['child_job']}" if step["child_job"] else f"run {step['child_run']}"
        value = f"waits for {which}" if not step["done"] else f"{which}: {_said(step['error']) or value}"
    elif step["kind"] == "wait":
        limit = "" if step["until"] is None else f", until {step['until']}"
        value = f"waits for its signal{limit}" if not step["done"] else "timed out" if step["value"] is None else value
    elif not step["done"]:
        value = "has started its effect, and nobody has told what became of it"
    elif step["error"] is not None:
        value = _said(step["error"]) or value
    return {"name": name, "attempt": step["claim_epoch"], "recorded_at": step["recorded_at"], "value": value}


def _signal(signal: dict[str, Any]) -> dict[str, Any]:
    """A signal as tables show it."""
    became = "taken" if signal["taken_at"] else "waits"
    if signal["refused_at"]:
        became = f"refused: {signal['refused_why']}"
    return {**signal, "became": became, "payload": shortened(signal["payload"])}


def shortened(value: Any) -> str:
    """A value as JSON, cut to what a table has room for."""
    text = json.dumps(value)
    return text if len(text) <= MOST_OF_VALUE else f"{text[:MOST_OF_VALUE]}..."


def _place(line: dict[str, Any]) -> str:
    """Where a job stands in the line of its ordering key, and what it waits for."""
    if line["place"] is None:
        return f"has its turn, or needs none; {line['waiting']} wait"
    place = f"place {line['place']} of {line['waiting']} that wait"
    if line["turn"] is not None:
        return f"{place}, behind {line['turn']}, which is {line['turn_status']}"
    if line["halted_by"] is not None:
        return f"{place}; the key is halted by {line['halted_by']}, which has failed"
    return place


def _slots(slots: dict[str, Any]) -> str:
    """What runs of a job's cohort, and whether the job waits for that."""
    if slots["limit"] is None:
        return f"{slots['running']} of its cohort run, which has no limit"
    said = f"{slots['running']} of {slots['limit']} of its cohort are taken"
    if slots["by_operator"]:
        said += ", as an operator has set it"
    return f"{said}; waits for one" if slots["status"] == "pending" and slots["running"] >= slots["limit"] else said


@app.command()
def tail(
    queue: QueueOption = None,
    task: TaskOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="End after so many lines.", metavar="N", show_default=False)
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="End after so many seconds.", metavar="S", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")] = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Follow starts and ends of attempts, a line each, until Ctrl-C. For looking on: the record is taskq jobs show.

    It looks every second. An attempt that starts and ends between two looks has only the line of its end, and where
    more than 2,000 end within seconds the newest are shown.
    """
    from taskq.cli.tail import follow

    follow(queue or None, task or None, limit=limit, timeout=timeout, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def wait(
    id_: IdArgument,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Wait until a job has ended, and print its result as JSON.

    Exit code 1 where it failed or was cancelled, or has not ended in time.
    """
    from taskq.cli.waits import until_ended

    return until_ended(id_, timeout, of="job", as_json=as_json, dsn=dsn, schema=schema)


@app.command()
@with_filter
def cancel(
    chosen: Filter,
    ids: IdsArgument = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    limit: MostOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Cancel jobs: cancelled (will not run), requested (runs, and is told), finished, unknown or not_found.

    With flags instead of ids: all pending, held and running jobs that meet every condition. They are counted first, and
    nothing is done without --yes, or a yes to the question on a terminal. It goes in batches, each with its row of
    audit; after an interruption the same command goes on with the others.
    """
    from taskq.cli.bulk import CANCEL, steer

    if _is_bulk(ids, chosen, yes=yes, dry_run=dry_run, limit=limit):
        return steer(
            CANCEL,
            chosen,
            reason=reason,
            yes=yes,
            dry_run=dry_run,
            limit=limit,
            as_json=as_json,
            dsn=dsn,
            schema=schema,
        )
    return _each(
        "cancel",
        ids or [],
        lambda answer: answer in {"cancelled", "requested"},
        reason,
        as_json=as_json,
        dsn=dsn,
        schema=schema,
    )


@app.command()
@with_filter
def retry(
    chosen: Filter,
    ids: IdsArgument = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    limit: MostOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Reopen failed or cancelled jobs with fresh counters (reopened), or make waiting ones due (due).

    With flags instead of ids: all failed jobs that meet every condition; with --status also cancelled or pending ones.
    They are counted first, and nothing is done without --yes, or a yes to the question on a terminal. It goes in
    batches, each with its row of audit; after an interruption the same command goes on with the others.
    """
    from taskq.cli.bulk import RETRY, steer

    if _is_bulk(ids, chosen, yes=yes, dry_run=dry_run, limit=limit):
        return steer(
            RETRY, chosen, reason=reason, yes=yes, dry_run=dry_run, limit=limit, as_json=as_json, dsn=dsn, schema=schema
        )
    return _each("retry", ids or [], lambda _: True, reason, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def unknown(
    task: TaskOption = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="Only those unknown for longer than that, such as 10m.",
            metavar="T",
            show_default=False,
        ),
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """List jobs whose effect may have happened and whose outcome was never told, the oldest first.

    With the job that asks about each, where its task, or its step, has a reconcile hook: pending, running, or failed,
    which leaves it to you. Decide with taskq jobs resolve.

    Exit codes: 0 there is none; 1 there are some, or refused; 2 usage or settings; 3 cannot connect.
    """
    from taskq.cli.unknown import list_unknown

    return list_unknown(task or None, older_than, limit=limit, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def resolve(
    id_: IdArgument,
    happened: Annotated[
        bool | None,
        typer.Option(
            "--happened/--did-not-happen",
            help="Whether its effect happened. If so it has succeeded; if not it is cancelled where cancelling was "
            "requested, else it is pending again and runs anew, with the same idempotency key. Of a step: the body "
            "goes on either way. Required.",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option("--reason", help="What you checked; it goes on the record. Required.", show_default=False),
    ] = None,
    result: Annotated[
        str | None,
        typer.Option(
            "--result",
            help="With --happened: what the body, or the step, would have returned.",
            metavar="JSON",
            show_default=False,
        ),
    ] = None,
    epoch: Annotated[
        int | None,
        typer.Option(
            "--epoch",
            min=1,
            help="The attempt that you looked at (claim_epoch); refused if the job is at another by now.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, on a terminal.")] = False,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Decide the outcome of a job that is unknown, once and on the record.

    Say --did-not-happen only once it can no longer happen: the provider has closed the key (a void, a tombstone, a
    refused idempotency key), or the process that ran it is dead and no request of it is still on its way. That the
    provider has nothing under the key is not enough: a process that was only frozen wakes up and does it. Until you are
    certain, leave it unknown.
    """
    from taskq.cli.unknown import resolve_one

    look = f"first: taskq jobs show {id_}, and the provider by its idempotency key"
    if happened is None:
        raise typer.BadParameter(f"say whether its effect happened, with --happened or --did-not-happen; look {look}")
    if reason is None or not reason.strip():
        raise typer.BadParameter("say what you checked, with --reason TEXT; it goes on the record")
    if result is not None:
        if not happened:
            raise typer.BadParameter("--result goes with --happened only; what did not happen has no result")
        check_json(result, "--result")
    return resolve_one(id_, happened, result, reason, epoch=epoch, yes=yes, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def signal(
    id_: IdArgument,
    name: Annotated[str, typer.Argument(help="The name that its body waits for.", metavar="NAME")],
    payload: Annotated[str, typer.Argument(help="What to send.", metavar="JSON")] = "null",
    key: Annotated[
        str | None,
        typer.Option("--key", help="Sent again under one key, it is there once.", metavar="TEXT", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Send a signal to a job whose body waits for it with ctx.wait_for, or will.

    It is kept until it is taken. Refused for a job that has finished. Answers sent, or already, under the same key.
    """
    from taskq.cli.signals import send

    check_json(payload, "JSON")
    return send(id_, name, payload, key, as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def reconcile(
    id_: IdArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Have the hook of its task, or of its step, asked about an unknown outcome now, also where it has failed before.

    Answers enqueued (a new asking job), due (the one that waits is due now), or running.
    """
    from taskq.cli.unknown import reconcile_one

    return reconcile_one(id_, reason, as_json=as_json, dsn=dsn, schema=schema)


def _is_bulk(ids: list[str] | None, chosen: Filter, *, yes: bool, dry_run: bool, limit: int | None) -> bool:
    """Whether flags select the jobs, and not ids.

    Raises:
        typer.BadParameter: Both do, or neither.
    """
    if ids and (not chosen.is_empty or yes or dry_run or limit is not None):
        raise typer.BadParameter("give ids, or flags that select jobs, not both")
    if not ids and chosen.is_empty:
        raise typer.BadParameter("give ids of jobs, or flags that select them, such as --queue or --task")
    return not ids


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
