"""Options that many commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["DsnOption", "JsonOption", "SchemaOption"]

DsnOption = Annotated[
    str | None, typer.Option("--dsn", help="The database [TASKQ_DSN].", metavar="URL", show_default=False)
]
SchemaOption = Annotated[
    str | None, typer.Option("--schema", help="The schema, taskq by default [TASKQ_SCHEMA].", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
