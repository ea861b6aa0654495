"""``taskq demo-payments``: charges by workers that are killed and frozen; none is doubled, and none is lost."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taskq.cli.demo import database, progress
from taskq.cli.options import JsonOption, SchemaOption

if TYPE_CHECKING:
    from taskq.cli.output import ExitCode
    from taskq.demo.payments.report import Report

__all__ = ["command", "conclude"]


def command(
    payments: Annotated[int, typer.Option("--payments", min=20, help="How many payments there are.")] = 300,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Repeat the faults of another run; random by default.", show_default=False),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the database, the journal and the logs there.")] = False,
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Use this database, and migrate it, instead of one of its own.", metavar="URL"),
    ] = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> int:
    """See charges survive kills: none doubled, none lost.

    Charges payments at a provider on this machine, which drops answers, hangs, fails and declines. Of the three worker
    processes some are killed (SIGKILL), and some frozen (SIGSTOP) until others have taken over. What became of charges
    whose outcome is unknown is asked of the provider, and what failed after its charge is refunded. In the end the
    provider's journal and the record in the database are compared, payment by payment.

    Exit codes: 0 nothing is doubled or lost; 1 something differs; 2 usage or settings; 3 cannot connect.
    """
    from taskq import migrate
    from taskq.cli.output import note
    from taskq.demo.payments.play import play
    from taskq.settings import load

    settings = load(require_dsn=False, dsn=dsn, schema=schema)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    note(f"seed {chosen}; repeat its faults with --seed {chosen}")
    work = Path(tempfile.mkdtemp(prefix="taskq-demo-"))
    try:
        # For root the server runs as another user, who must be able to pass through.
        work.chmod(0o711)
        with database(dsn, work) as found, progress(payments, "payments", "three workers") as tell:
            migrate.up(found, settings.schema)
            report = play(found, settings.schema, payments, chosen, work, tell, own=dsn is None)
    finally:
        if keep:
            server = f"; start its database again with: taskq dev --data-dir {work / 'postgres'}" if dsn is None else ""
            note(f"kept in {work}{server}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    return conclude(report, as_json=as_json)


def conclude(report: Report, *, as_json: bool) -> ExitCode:
    """Print a report; the exit code says whether all is well."""
    from rich.console import Console

    from taskq.cli.output import ExitCode, note, print_json

    problems = report.problems()
    if as_json:
        print_json(report.as_json())
    else:
        report.show(Console(width=None if Console().is_terminal else 100))
    for problem in problems:
        note(f"error: {problem}")
    if not problems:
        became = sum(int(row["n"]) for row in report.unknowns)
        note(f"{became} outcomes were unknown, each was settled; nothing was doubled or lost in {report.seconds:.0f} s")
    return ExitCode.FAILED if problems else ExitCode.OK
