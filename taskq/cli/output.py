"""What every command shares: tables for people, JSON for programs, and errors turned into one line and an exit code.

Results go to standard output, everything else to standard error, so that a pipe gets results only.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from taskq import boot
from taskq.errors import ConfigurationError, DatabaseUnavailable, TaskQError

__all__ = ["ExitCode", "note", "print_json", "print_table", "run_cli", "show"]


READABLE = 16
"""Characters a line to which a cell of text may be folded."""


_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF}


class ExitCode(IntEnum):
    """What the exit code of every command means."""

    OK = 0
    FAILED = 1
    """The command found a discrepancy, or could not do what it was asked."""
    USAGE = 2
    """The command line or a setting is wrong; nothing was tried."""
    NO_CONNECTION = 3
    """The database cannot be reached, or refused the login."""
    INTERRUPTED = 130
    """Ended from the keyboard."""


def run_cli(command: Callable[[], object], args: Sequence[str] = ()) -> int:
    """Run a command and return its exit code; an error of taskq's or of the user's becomes one line, no traceback.

    Args:
        command: what to do; an ``int`` that it returns is the exit code.
        args: the command line. An argument that holds a DSN may end up in a complaint about it, and is masked there.
    """
    try:
        _check_text(args)
        result = command()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what goes wrong can still be told
        if result == ExitCode.INTERRUPTED:  # as typer answers Ctrl-C
            note("interrupted")
        return result if isinstance(result, int) else ExitCode.OK
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        note(str(exc.code))
        return ExitCode.FAILED
    except typer.Exit as exc:
        return exc.exit_code
    except ConfigurationError as exc:
        return _error(exc, ExitCode.USAGE)
    except DatabaseUnavailable as exc:
        return _error(exc, ExitCode.NO_CONNECTION)
    except TaskQError as exc:
        return _error(exc, ExitCode.FAILED)
    except BrokenPipeError:
        # The reader of our output has gone; leave nothing for Python to flush into the closed pipe at exit.
        sys.stdout = None
        return ExitCode.FAILED
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in _CANNOT_WRITE:
            sys.stdout = None
            return _error(exc, ExitCode.FAILED, "the output could not be written: ")
        if isinstance(exc, _driver_errors()):
            state = getattr(exc, "sqlstate", None)
            if state is None or state.startswith(("08", "57P")):
                return _error(exc, ExitCode.NO_CONNECTION, "the connection to PostgreSQL was lost: ")
            return _error(exc, ExitCode.FAILED, "the database did not answer as expected: ")
        # The usage errors of typer have no common public class over the versions that taskq supports.
        if not isinstance(exc, _UsageError):
            raise
        return _usage(exc, args)


def _check_text(args: Sequence[str]) -> None:
    """Refuse bytes that are no text: they could be neither compared nor stored, nor even printed.

    Raises:
        ConfigurationError: An argument is not UTF-8; it is named by its place, since showing it is not possible.
    """
    for place, arg in enumerate(args, 1):
        try:
            arg.encode()
        except UnicodeEncodeError:
            shown = arg.encode(errors="surrogateescape").decode(errors="backslashreplace")
            shown = "it" if "://" in shown or "password" in shown else repr(shown)
            raise ConfigurationError(
                f"argument {place} is not UTF-8 text ({shown} holds other bytes); write it in UTF-8, and check the "
                "encoding of your terminal and of the file it came from"
            ) from None
        if "\0" in arg:
            raise ConfigurationError(f"argument {place} holds a NUL character, which no text of taskq may")


def _driver_errors() -> tuple[type[Exception], ...]:
    """What psycopg may have raised: nothing as long as no command has imported it."""
    return (sys.modules["psycopg"].OperationalError,) if "psycopg" in sys.modules else ()


def _error(exc: Exception, code: ExitCode, prefix: str = "") -> int:
    _complain(f"{prefix}{' '.join(str(exc).split())}")
    return code


@runtime_checkable
class _UsageError(Protocol):
    exit_code: int
    ctx: Any

    def format_message(self) -> str: ...
    def show(self) -> None: ...


def _usage(exc: _UsageError, args: Sequence[str]) -> int:
    if type(exc).__name__ == "NoArgsIsHelpError":
        exc.show()
        return ExitCode.USAGE
    message = " ".join(exc.format_message().split())
    for arg in args:
        if "://" in arg or "password" in arg:
            message = message.replace(arg, "***").replace(arg.partition("=")[2] or arg, "***")
    path = exc.ctx.command_path if exc.ctx else "taskq"
    _complain(f"{message.rstrip('.')}; see '{path} --help'")
    return ExitCode.USAGE


def _complain(message: str) -> None:
    text = message if boot.is_json() else f"error: {message}"
    print(boot.line(text, event="cli.error", level="error"), end="", file=sys.stderr, flush=True)


def note(line: str) -> None:
    """A line for people on standard error, as it is: not wrapped, no markup; of a worker that logs JSON, in JSON."""
    print(boot.line(line), end="", file=sys.stderr, flush=True)


def counted(n: int, noun: str) -> str:
    """A number with its noun: ``1 job``, ``1,200 jobs``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def show(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    as_json: bool,
    empty: str = "none",
    optional: Sequence[str] = (),
) -> None:
    """Print rows as JSON (a list of objects with every key) or as a table of ``columns``; see ``print_table``."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows, columns, empty=empty, optional=optional)


def print_json(value: Any) -> None:
    """Print one JSON document; times in ISO 8601, durations in seconds."""
    print(json.dumps(value, default=_plain, indent=2, ensure_ascii=False))


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str = "none", optional: Sequence[str] = ()
) -> None:
    """Print a table of the given keys; cells are shown as they are, without markup.

    On a terminal an id stands whole on one line, since people copy it; other cells are folded.

    Args:
        rows: What to print.
        columns: Keys of the rows, in their order.
        empty: What to print instead of a table without rows.
        optional: Columns that a narrow terminal does without, the least important first.
    """
    if not rows:
        print(empty)
        return
    cells = {column: [_cell(row.get(column)) for row in rows] for column in columns}
    if sys.stdout is None or not sys.stdout.isatty():
        _print_plain(cells)
        return
    width = Console().width
    left_out = _left_out(cells, optional, width)
    cells = {column: values for column, values in cells.items() if column not in left_out}
    if left_out:
        note(f"left out on this narrow terminal: {', '.join(left_out)}; --json has everything")
    ids = [column for column in cells if _is_id(column)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, values in cells.items():
        whole = max(map(len, values)) if column in ids else None
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column in ids, min_width=whole)
    for line in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, line))
    # Where not even the ids have room, the terminal breaks lines; that is better than half an id.
    least = sum(max(map(len, cells[column])) + 2 for column in ids) + sum(3 for column in cells if column not in ids)
    Console(width=max(width, least)).print(table)


def _print_plain(cells: Mapping[str, Sequence[str]]) -> None:
    """For a pipe or a file, which has no width to fit in: nothing is folded, however long; cheap for many rows."""
    heads = [column.replace("_", " ") for column in cells]
    columns = [
        [[head], *(value.splitlines() for value in cells[column])] for head, column in zip(heads, cells, strict=True)
    ]
    widths = [max(cell_len(line) for value in column for line in value) for column in columns]
    for row in zip(*columns, strict=True):
        for line in zip_longest(*row, fillvalue=""):
            print("  ".join(map(set_cell_size, line, widths)).rstrip())


def _left_out(cells: Mapping[str, Sequence[str]], optional: Sequence[str], width: int) -> list[str]:
    """The columns to leave out so that the rest fits: the empty ones first, then the less important."""
    left = {column: _wanted(column, values) for column, values in cells.items()}
    out: list[str] = []
    for column in sorted(optional, key=lambda c: any(cells.get(c, ()))):
        if sum(left.values()) + 2 * (len(left) - 1) <= width:
            break
        if column in left:
            out.append(column)
            del left[column]
    return out


def _wanted(column: str, values: Sequence[str]) -> int:
    """How many characters a column needs to be read well."""
    longest = max(map(len, values))
    return max(len(column), longest if _is_id(column) or column.endswith("_at") else min(longest, READABLE))


def _is_id(column: str) -> bool:
    return column == "id" or column.endswith("_id")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, (UUID, bytes)):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be printed as JSON")
