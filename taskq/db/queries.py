"""The loader of named queries.

A file in ``db/sql`` opens with what it is about; then each query follows a line ``-- name: the_name``. Placeholders are
written ``$1``: asyncpg reads them so, and psycopg does with its raw cursors. ``{{schema}}`` stands for the schema, and
``{{the_name}}`` for the text of a query that stands before, where several share a part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

__all__ = ["load"]

_PART = re.compile(r"\{\{(\w+)\}\}")
_NAME = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)


@cache
def load(file: str, schema: str) -> Mapping[str, str]:
    """The queries of ``db/sql/<file>.sql`` by name, for a schema.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A name stands twice.
    """
    text = files("taskq.db").joinpath("sql", f"{file}.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    names, bodies = parts[::2], parts[1::2]
    if len(set(names)) != len(names):
        raise ValueError(f"{file}.sql has two queries of one name")
    known = {"schema": schema}
    found: dict[str, str] = {}
    for name, body in zip(names, bodies, strict=True):
        whole = _PART.sub(lambda match: known[match[1]], body)
        found[name] = whole.strip().rstrip(";")
        # Without its comments, which would hide what follows on the line where it is a part of another.
        known[name] = "\n".join(line for line in found[name].splitlines() if not line.startswith("--"))
    return MappingProxyType(found)
