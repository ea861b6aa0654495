"""``taskq workers list | show | drain``: look at worker processes, and ask one to stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, ReasonOption, SchemaOption

if TYPE_CHECKING:
    from taskq.cli.database import Database

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at worker processes, and ask one to stop.\n\n"
    "Exit codes: 0 done; 1 there is no such worker, or it did not stop; 2 usage or settings; 3 cannot connect.",
)
LOOK_EVERY = 0.5
"""Seconds between looks at a worker that drains."""
WorkerArgument = Annotated[
    str, typer.Argument(help="The name or the id of a worker.", metavar="NAME|ID", show_default=False)
]


@app.callback()
def callback() -> None:
    """Look at worker processes, and ask one to stop."""


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Those that stopped or were lost as well.")] = False,
    limit: LimitOption = 200,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List workers, the newest first, with how many jobs each holds now."""
    from taskq.cli.database import open_database
    from taskq.cli.output import show

    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("workers", everything, limit)
    columns = ["id", "name", "status", "queues", "holds", "concurrency", "started_at", "lease_expires_at", "version"]
    optional = ["version", "lease_expires_at", "started_at", "concurrency", "queues"]
    show(rows, columns, as_json=as_json, empty="no workers", optional=optional)


@app.command("show")
def show_(
    worker: WorkerArgument,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Show one worker: its row, what it has claimed, what operators did. Of several of a name, those at work."""
    from taskq.cli.database import open_database
    from taskq.cli.output import ExitCode, print_json, print_table

    with open_database(dsn, schema) as database:
        row = _the_one(_find(database, worker), worker)
        claimed = database.bounded_rows("claimed_jobs", row["id"], limit)
        audit = database.rows("audit", row["id"])
    if as_json:
        print_json({**row, "claims": claimed, "audit": audit})
        return ExitCode.OK
    print_table([{"what": k.replace("_", " "), "is": v} for k, v in row.items() if v is not None], ["what", "is"])
    print("\nclaims")
    print_table(claimed, ["id", "status", "task", "queue", "claim_epoch", "claimed_at"], empty="none")
    if audit:
        print("\naudit")
        print_table(audit, ["at", "actor", "action", "reason"])
    return ExitCode.OK


@app.command()
def drain(
    worker: WorkerArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has stopped.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait with --wait.", metavar="S")
    ] = 300.0,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Ask a worker to stop: it claims nothing more, lets its bodies end within its grace, and exits with 0.

    It is what SIGTERM does, from afar: the worker learns it within a third of its lease. What starts it again, such as
    a supervisor, decides whether it comes back. Answers requested, draining (asked before), stopped or lost.
    """
    from taskq.cli.database import actor, open_database
    from taskq.cli.output import ExitCode, note, show

    with open_database(dsn, schema) as database:
        row = _the_one(_find(database, worker), worker)
        answer = database.value("drain", row["id"], reason, actor())
        fine = answer in {"requested", "draining", "stopped"}
        if wait and answer in {"requested", "draining"}:
            answer = _wait(database, row["id"], timeout)
            fine = answer == "stopped"
            if answer == "draining":
                note(f"it still had bodies that ran after {timeout:g} s; it goes on draining")
    show([{"id": row["id"], "name": row["name"], "answer": answer}], ["id", "name", "answer"], as_json=as_json)
    return ExitCode.OK if fine else ExitCode.FAILED


def _wait(database: Database, worker: str, timeout: float) -> str:
    """Wait until the worker has ended; its status then, or ``draining`` where it took longer."""
    deadline = time.monotonic() + timeout
    while True:
        rows = database.rows("find_workers", worker)
        status = str(rows[0]["status"]) if rows else "stopped"
        if status not in {"live", "draining"} or time.monotonic() >= deadline:
            return status
        time.sleep(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))


def _find(database: Database, worker: str) -> list[dict[str, Any]]:
    from taskq.errors import TaskQError

    found = database.bounded_rows("find_workers", worker)
    if not found:
        raise TaskQError(f"there is no worker {worker!r}; see taskq workers list --all")
    return found


def _the_one(found: Sequence[dict[str, Any]], worker: str) -> dict[str, Any]:
    """The worker that is meant: the only one at work, else the last of the name.

    Raises:
        TaskQError: Several of the name are at work.
    """
    from taskq.errors import TaskQError

    at_work = [row for row in found if row["status"] in {"live", "draining"}]
    if len(at_work) > 1:
        raise TaskQError(
            f"{len(at_work)} workers of the name {worker} are at work; name one by its id: "
            f"{', '.join(row['id'] for row in at_work[:10])}"
        )
    return (at_work or found)[0]
