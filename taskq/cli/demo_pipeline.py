"""``taskq demo-pipeline``: a source pages through files while workers are killed, and no file is lost or doubled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from taskq.cli.demo import chosen_seed, conclude, progress, workplace
from taskq.cli.options import JsonOption, SchemaOption

__all__ = ["command"]


def command(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A folder with Python files; the standard library by default.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Repeat the kills of another run; random by default.", show_default=False),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the database and the workers' logs there.")] = False,
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Use this database, and migrate it, instead of one of its own.", metavar="URL"),
    ] = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> int:
    """See pages of files survive kills: none doubled, none lost.

    A source pages through the Python files of the standard library, or of FOLDER. Each file is a run of its own: read,
    count, tell. A page is asked for once few enough files are open, and workers are killed (SIGKILL) over pages and
    files alike. In the end what the fan-in collected is compared with a plain loop over the same files, file by file.

    Exit codes: 0 all agrees, and pages were lost to kills; 1 something differs; 2 usage or settings; 3 cannot connect.
    """
    from taskq import migrate
    from taskq.demo.counting import find_files
    from taskq.demo.pipeline.play import LEAST, play
    from taskq.errors import ConfigurationError
    from taskq.settings import load

    settings = load(require_dsn=False, dsn=dsn, schema=schema)
    files = find_files(folder)
    if len(files) < LEAST:
        raise ConfigurationError(
            f"{folder} has {len(files)} Python files; the demo needs {LEAST}, to kill workers over pages of them"
        )
    chosen = chosen_seed(seed)
    with workplace(dsn, keep=keep) as (found, work), progress(len(files), "files", "two workers") as tell:
        migrate.up(found, settings.schema)
        report = play(found, settings.schema, files, folder, chosen, work, tell, own=dsn is None)
    return conclude(report, report.well(), as_json=as_json)
