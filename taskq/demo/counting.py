"""What the demonstration counts in a Python file. The workers and the plain loop both call this, and nothing else."""

from __future__ import annotations

import ast
import os
import sysconfig
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskq.errors import ConfigurationError

__all__ = ["Totals", "count_all", "count_file", "find_files"]

# Several threads that parse at once make CPython before 3.11.8 and 3.12.2 raise SystemError now and then, of a depth of
# recursion that they share. It holds the GIL for most of it, so one at a time costs nothing.
_PARSING = threading.Lock()

_NOT_OURS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Totals:
    """What stands in one file, or in many."""

    files: int = 0
    unparsable: int = 0
    """Files that are no valid Python of this interpreter's; their lines count."""
    lines: int = 0
    functions: int = 0
    classes: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.files + other.files,
            self.unparsable + other.unparsable,
            self.lines + other.lines,
            self.functions + other.functions,
            self.classes + other.classes,
        )


def count_file(path: str) -> Totals:
    """Count lines, functions and classes. A file that cannot be read or parsed is counted as such."""
    try:
        source = Path(path).read_bytes()
    except OSError:
        return Totals(files=1, unparsable=1)
    lines = len(source.splitlines())
    try:
        with _PARSING:
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Totals(files=1, unparsable=1, lines=lines)
    functions = classes = 0
    blocks: list[Any] = [tree]
    while blocks:
        block = blocks.pop()
        functions += isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef))
        classes += isinstance(block, ast.ClassDef)
        # Definitions are statements, so expressions need no look: ten times as quick as ast.walk.
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(block, name, None)
            if isinstance(inner, list):
                blocks += inner
    return Totals(1, 0, lines, functions, classes)


def find_files(folder: Path | None = None) -> list[str]:
    """The Python files under a folder, installed packages and bytecode apart, in the order of their names.

    Args:
        folder: By default this interpreter's standard library, without the regression tests of CPython: they are
            two thirds of it, and many distributions leave them out.

    Raises:
        ConfigurationError: It is no folder, or has fewer than ten such files.
    """
    root = (folder or Path(sysconfig.get_paths()["stdlib"])).resolve()
    left_out = root / "test" if folder is None else None
    if not root.is_dir():
        raise ConfigurationError(f"{root} is not a folder; name one with Python files in it")
    found = sorted(_usable(root, left_out))
    if len(found) < 10:
        raise ConfigurationError(f"{root} has {len(found)} Python files; the demo needs ten, to kill a worker half-way")
    return found


def _usable(root: Path, left_out: Path | None) -> Iterable[str]:
    # Installed packages are not even looked into: somebody may be installing or removing one.
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_OURS and Path(folder, name) != left_out]
        for name in files:
            path = Path(folder, name)
            text = str(path)
            printable = text.isprintable() and text.encode("utf-8", "ignore").decode() == text
            if path.suffix == ".py" and printable and path.is_file():
                yield text


def count_all(paths: Iterable[str]) -> Totals:
    """The plain loop that the demonstration compares itself with."""
    totals = Totals()
    for path in paths:
        totals += count_file(path)
    return totals


# Files of the standard library's tests are full of what the parser warns about.
warnings.filterwarnings("ignore", category=SyntaxWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning, message="invalid (escape|octal)")
