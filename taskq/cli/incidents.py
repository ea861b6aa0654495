"""``taskq incidents list | show | grant``: what holds up jobs and nodes, and letting them go on once more."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, SchemaOption

__all__ = ["app", "grant_all"]

WhyOption = Annotated[
    str, typer.Option("--reason", help="What was done about it; it goes on the record.", show_default=False)
]
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at what holds up jobs and nodes of runs, and grant them one more recovery.\n\n"
    "Exit codes: 0 done; 1 refused, or there is no such incident; 2 usage or settings; 3 cannot connect.",
)


@app.command("list")
def list_(
    run: Annotated[
        str | None, typer.Option("--run", help="Only those of nodes of this run.", metavar="ID", show_default=False)
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", help="Only those of this job.", metavar="ID", show_default=False)
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Those that are resolved, too.")] = False,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List incidents: what keeps jobs from their attempts, the last seen first.

    One that is exhausted waits for a grant; what is open goes on by itself.
    """
    from taskq.cli.database import job_id, open_database
    from taskq.cli.output import note, show

    of_run = None if run is None else job_id(run, "run")
    of_job = None if job is None else job_id(job)
    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("incidents", of_run, of_job, all_, limit)
    shown = rows if as_json else [_in_short(row) for row in rows]
    columns = ["id", "status", "code", "task", "job_id", "run_id", "seen", "fault"]
    show(shown, columns, as_json=as_json, empty="no incidents", optional=["run_id"])
    if not as_json:
        if any(row["status"] == "exhausted" and row["is_current"] for row in rows):
            note("what is exhausted goes on with: taskq incidents grant ID --reason WHY")
        if len(rows) == limit:
            note(f"the last {limit}; --limit shows more")


@app.command("show")
def show_(
    id_: Annotated[str, typer.Argument(help="The id of an incident.", metavar="ID", show_default=False)],
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Show one incident: its fault, the job that it holds up, its events, and the command that goes on."""
    from taskq.cli.database import job_id, open_database
    from taskq.cli.output import ExitCode, print_json, print_table
    from taskq.errors import IncidentNotFound

    incident = job_id(id_, "incident")
    with open_database(dsn, schema) as database, database.snapshot():
        found = database.rows("incident", incident)
        events = database.rows("incident_events", incident)
    if not found:
        missing = IncidentNotFound(
            f"there is no incident {incident}", hint="See taskq incidents list --all; retention may have dropped it."
        )
        if not as_json:
            raise missing
        print_json({"id": incident, "answer": "not_found", "why": str(missing)})
        return ExitCode.FAILED
    row = found[0]
    if as_json:
        print_json({**row, "events": events})
        return ExitCode.OK
    facts = [
        {"what": k.replace("_", " "), "is": v}
        for k, v in row.items()
        if k not in ("fault", "command") and v is not None
    ]
    print_table(facts, ["what", "is"])
    print(f"\nfault\n{json.dumps(row['fault'], indent=2, ensure_ascii=False)}\n\nevents")
    print_table(
        [{**each, "about": _about(each)} for each in events], ["n", "at", "kind", "claim_epoch", "actor", "about"]
    )
    if row["command"] is not None:
        print(f"\ngoes on with: {row['command']}")
    return ExitCode.OK


@app.command()
def grant(
    ids: Annotated[list[str], typer.Argument(help="The ids of incidents.", metavar="ID...", show_default=False)],
    reason: WhyOption,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Grant the jobs of incidents exactly one more recovery each; a pause that was for that is over.

    Answers granted, already (one is granted, and not used yet), or paused: it is granted, and its run is paused for
    another reason, so resume that. Refused for one that is not current any more, or that goes on by itself.
    """
    from taskq.cli.database import job_id, open_database

    with open_database(dsn, schema) as database:
        return grant_all(database, [job_id(each, "incident") for each in ids], reason, as_json=as_json)


def grant_all(database: Any, incidents: list[str], reason: str, *, as_json: bool, run: str | None = None) -> int:
    """Grant each, in a transaction of its own, and show what came of it; the exit code.

    Where a run is named, only what is an incident of it.
    """
    from taskq.cli.database import actor
    from taskq.cli.output import ExitCode, show
    from taskq.errors import DatabaseRefusal

    rows: list[dict[str, Any]] = []
    for incident in incidents:
        try:
            rows.append({"id": incident, "answer": database.value("grant_recovery", incident, reason, actor(), run)})
        except DatabaseRefusal as exc:
            rows.append({"id": incident, "answer": "refused", "why": str(exc)})
    for row in rows:
        if row["answer"] == "paused" and not as_json:
            row["why"] = "its run is paused for another reason: see taskq runs list --status paused"
    columns = ["id", "answer", "why"] if any("why" in row for row in rows) else ["id", "answer"]
    show(rows, columns, as_json=as_json)
    return ExitCode.FAILED if any(row["answer"] == "refused" for row in rows) else ExitCode.OK


def _in_short(row: dict[str, Any]) -> dict[str, Any]:
    fault = row["fault"]
    seen = f"{row['failures']} times" if row["failures"] != 1 else "once"
    status = row["status"] if row["is_current"] or row["status"] == "resolved" else f"{row['status']}, not current"
    return {**row, "fault": f"{fault.get('type')}: {fault.get('message')}", "seen": seen, "status": status}


def _about(event: dict[str, Any]) -> str | None:
    details = event["details"] or {}
    return details.get("reason") or details.get("because") or details.get("message")
