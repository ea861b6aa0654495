"""``taskq migrate up | status | verify | sql | new``: the schema and its migrations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from taskq import migrate
from taskq.cli.options import DsnOption, JsonOption, SchemaOption
from taskq.cli.output import ExitCode, note, print_json, show
from taskq.db.dsn import describe_dsn
from taskq.settings import load

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Bring the database's schema up to date, and see where it stands.\n\n"
    "Exit codes: 0 ok; 1 a discrepancy, or it could not be done; 2 usage or settings; 3 cannot connect.",
)

LockTimeoutOption = Annotated[
    float,
    typer.Option("--lock-timeout", min=0.001, help="Seconds to wait for locks before stepping back."),
]


@app.command()
def up(
    dsn: DsnOption = None,
    schema: SchemaOption = None,
    post: Annotated[
        bool | None,
        typer.Option(
            "--post/--no-post",
            help="Apply post files too, now that the old code is gone. By default only at the first installation.",
            show_default=False,
        ),
    ] = None,
    lock_timeout: LockTimeoutOption = 2.0,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for another runner.")] = 120.0,
    build_timeout: Annotated[
        float,
        typer.Option("--build-timeout", min=0.1, help="Seconds that an index build may wait for older transactions."),
    ] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Apply what is pending. Any number may run at once: one applies, the others wait and agree."""
    settings = load(dsn=dsn, schema=schema)
    done = migrate.up(
        settings.dsn,
        settings.schema,
        include_post=post,
        lock_timeout=lock_timeout,
        wait=wait,
        build_timeout=build_timeout,
        progress=note,
    )
    note(f"the database is {describe_dsn(settings.dsn)}")
    if as_json:
        print_json(asdict(done))
        return
    if done.applied:
        print(f"{len(done.applied)} applied; the schema {settings.schema} is up to date")
    else:
        print(f"the schema {settings.schema} is up to date ({len(done.already)} migrations)")
    if done.left_out:
        print(f"left for 'taskq migrate up --post', once the old code is gone: {', '.join(done.left_out)}")


@app.command()
def status(dsn: DsnOption = None, schema: SchemaOption = None, as_json: JsonOption = False) -> None:
    """List every migration: applied, pending, changed, missing or unknown."""
    settings = load(dsn=dsn, schema=schema)
    rows = [asdict(row) for row in migrate.status(settings.dsn, settings.schema)]
    columns = ["filename", "kind", "state", "applied_at", "seconds", "taskq_version"]
    show(rows, columns, as_json=as_json, empty="there are no migrations")
    if any(row["state"] not in {"applied", "pending"} for row in rows):
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def verify(dsn: DsnOption = None, schema: SchemaOption = None, as_json: JsonOption = False) -> None:
    """Compare files, manifest and database; print each discrepancy in a line and exit 1 if there is any."""
    settings = load(dsn=dsn, schema=schema)
    found = migrate.verify(settings.dsn, settings.schema)
    if as_json:
        print_json({"ok": not found, "discrepancies": found})
    else:
        print("\n".join(found) if found else f"the schema {settings.schema} agrees with the migrations")
    if absent := migrate.missing_roles(settings.dsn, settings.schema):
        note(
            f"note: the roles {', '.join(absent)} do not exist, so only the schema's owner can use it; create them, "
            "then run the statements of the roles migration again ('taskq migrate sql --all' prints them)"
        )
    if found:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def sql(
    dsn: DsnOption = None,
    schema: SchemaOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="For an empty database: everything, without connecting to any.")
    ] = False,
    post: Annotated[bool, typer.Option("--post/--no-post", help="With the post files.")] = True,
    lock_timeout: LockTimeoutOption = 2.0,
) -> None:
    """Print the SQL that would be run, records included, to apply it by hand."""
    settings = load(dsn=dsn, schema=schema, require_dsn=not everything)
    applied = [] if everything else migrate.applied_names(settings.dsn, settings.schema)
    text = migrate.render_sql(settings.schema, applied=applied, include_post=post, lock_timeout=lock_timeout)
    print(text, end="")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="What it does, in a few words.")],
    kind: Annotated[str, typer.Option("--kind", help="pre: before the new code; post: after the old code is gone.")],
    folder: Annotated[Path | None, typer.Option("--folder", help="The migrations folder, if not taskq's own.")] = None,
) -> None:
    """Write the next migration file, with a header to fill in (for those who develop taskq)."""
    if kind not in {"pre", "post"}:
        raise typer.BadParameter("say pre or post", param_hint="--kind")
    path = migrate.new(name, "pre" if kind == "pre" else "post", folder=folder)
    print(path)
    note("once it is written, freeze it: python -m taskq.migrate freeze")
