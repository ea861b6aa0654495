"""``taskq doctor``: what is wrong with server, schema, workers and queues, what it means, and what cures it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from taskq.cli.options import DsnOption, JsonOption, SchemaOption

if TYPE_CHECKING:
    from taskq.cli.checks import Check, Finding, Patient

__all__ = ["check_names", "command"]


def command(
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings as well.")] = False,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Check server, schema, workers and queues; say what was found, what it means and what cures it.

    Changes nothing, and needs no more than the role of a reader. Each check is ok, warn (look at it, work goes on) or
    fail (something stands still, or is at risk).

    Exit codes: 0 all ok, or warnings; 1 a failure, or with --strict a warning; 2 usage or settings; 3 cannot connect.
    """
    from dataclasses import asdict

    from taskq.cli.checks import Patient
    from taskq.cli.database import open_database
    from taskq.cli.output import ExitCode, print_json
    from taskq.settings import load

    settings = load(dsn=dsn, schema=schema)
    with open_database(dsn, schema, queries="doctor") as database:
        found = list(_examine(Patient(database, settings.dsn, settings.schema)))
    verdicts = {finding.verdict for _, finding in found}
    worst = "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
    if as_json:
        print_json({"verdict": worst, "checks": [{"check": name, **asdict(finding)} for name, finding in found]})
    else:
        _print(found)
    return ExitCode.FAILED if worst == "fail" or (strict and worst == "warn") else ExitCode.OK


def check_names() -> list[str]:
    """The names of all checks, in their order."""
    from taskq.cli.checks import queue, schema, server

    return [*server.CHECKS, "migrations", *schema.CHECKS, *queue.CHECKS]


def _examine(patient: Patient) -> Iterator[tuple[str, Finding]]:
    from taskq.cli.checks import queue, schema, server

    for name, check in server.CHECKS.items():
        yield name, _try(check, patient)
    installed = _try(schema.migrations, patient)
    yield "migrations", installed
    # What looks into a schema that is not there, or not readable, would say the same thing many times over.
    rest = schema.CHECKS | queue.CHECKS if installed.verdict != "fail" else {"roles": schema.CHECKS["roles"]}
    for name, check in rest.items():
        yield name, _try(check, patient)


def _try(check: Check, patient: Patient) -> Finding:
    from taskq.cli.checks import warn
    from taskq.errors import DatabaseUnavailable, TaskQError

    try:
        with patient.database.bounded():
            return check(patient)
    except DatabaseUnavailable:
        raise
    except TaskQError as exc:
        return warn(
            f"this could not be checked: {exc}",
            means="nothing is known about it",
            cure=f"grant {patient.schema}_reader to the user, or look again when the server is less busy",
        )


def _print(found: list[tuple[str, Finding]]) -> None:
    """A line a check; under those that are not well, what it means and what to do."""
    width = max(len(name) for name, _ in found)
    for name, finding in found:
        print(f"{finding.verdict:<4}  {name:<{width}}  {finding.found}")
        if finding.verdict != "ok":
            print(f"{'':<{width + 8}}means: {finding.means}\n{'':<{width + 8}}cure:  {finding.cure}")
    counts = [sum(f.verdict == verdict for _, f in found) for verdict in ("ok", "warn", "fail")]
    print(f"\n{counts[0]} ok, {counts[1]} warn, {counts[2]} fail")
