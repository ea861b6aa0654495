"""The app of the demonstration: files are listed in pages, each is read, counted and told of, and all is summed up.

A file that is too long is refused: its chain fails, and the fan-in, which collects, is told so.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from taskq import Outcome, Page, Retry, TaskQ, collect, constant
from taskq.demo.counting import Totals, count_file, find_files

__all__ = [
    "AHEAD",
    "MOST_LINES",
    "QUEUE",
    "FileTooLong",
    "Read",
    "Row",
    "Summary",
    "app",
    "count_lines",
    "list_files",
    "one_file",
    "pipeline",
    "read_file",
    "sum_up",
    "summary_of",
    "tell_of",
]

QUEUE = "taskq-demo-pipeline"
AHEAD = 15
"""Files that may be open, not yet told of, when the next page is asked for."""
AT_ONCE = 40
MOST_LINES = 2500
"""A file that has more is refused."""

app = TaskQ()


class FileTooLong(Exception):
    """It has too many lines: no further attempt finds fewer."""


@dataclass(frozen=True, slots=True)
class Read:
    """A file that was read.

    Attributes:
        path: Which.
        digest: The first 16 digits of the SHA-256 of what it has.
    """

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Row:
    """What is told of a file."""

    path: str
    digest: str
    lines: int
    functions: int
    classes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What all files come to.

    Attributes:
        files: How many were told of.
        lines: How many lines they have.
        functions: How many functions.
        classes: How many classes.
        refused: How many files failed.
        digest: The SHA-256 of what was told of each, and of which failed how, in the order of their names.
    """

    files: int
    lines: int
    functions: int
    classes: int
    refused: int
    digest: str


AGAIN = Retry(5, constant("300ms"), give_up_on=[FileTooLong])


@app.task(name="taskq.demo.pipeline.list_files", queue=QUEUE, effect_class="pure", retry=AGAIN, max_recoveries=20)
def list_files(after: str | None, folder: str | None, size: int, pause: float) -> Page[str, str]:
    """The next files by name.

    Args:
        after: The last file of the page before; None for the first page.
        folder: Where they are; None for the standard library.
        size: How many make a page.
        pause: Seconds to wait besides, in which a worker can be killed.
    """
    found = find_files(None if folder is None else Path(folder))
    begin = 0 if after is None else bisect_right(found, after)
    page = found[begin : begin + size]
    time.sleep(pause)
    return Page(page, page[-1] if begin + size < len(found) else None)


@app.task(name="taskq.demo.pipeline.read", queue=QUEUE, effect_class="pure", retry=AGAIN, max_recoveries=20)
def read_file(path: str) -> Read:
    """Read a file."""
    return Read(path, hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16])


@app.task(name="taskq.demo.pipeline.count", queue=QUEUE, effect_class="pure", retry=AGAIN, max_recoveries=20)
def count_lines(path: str, pause: float) -> Totals:
    """Count what is in a file.

    Raises:
        FileTooLong: It has more than ``MOST_LINES`` lines.
    """
    counted = count_file(path)
    time.sleep(pause)
    if counted.lines > MOST_LINES:
        raise FileTooLong(f"{path} has {counted.lines} lines")
    return counted


@app.task(name="taskq.demo.pipeline.tell", queue=QUEUE, effect_class="pure", retry=AGAIN, max_recoveries=20)
def tell_of(read: Read, counted: Totals) -> Row:
    """What is told of a file."""
    return Row(read.path, read.digest, counted.lines, counted.functions, counted.classes)


@app.task(name="taskq.demo.pipeline.sum_up", queue=QUEUE, effect_class="pure", retry=AGAIN, max_recoveries=20)
def sum_up(told: list[Outcome[Row]]) -> Summary:
    """What all files come to, failed ones with the place at which each was emitted."""
    return summary_of([each.value if each.ok else each.node for each in told])


def summary_of(told: Iterable[Row | str | None]) -> Summary:
    """The summary of what was told of files, in their order; of one that failed the name of its node."""
    files = lines = functions = classes = refused = 0
    digest = hashlib.sha256()
    for each in told:
        digest.update(f"{each}\n".encode())
        if isinstance(each, Row):
            files, lines = files + 1, lines + each.lines
            functions, classes = functions + each.functions, classes + each.classes
        else:
            refused += 1
    return Summary(files, lines, functions, classes, refused, digest.hexdigest())


@app.workflow(name="taskq.demo.file")
def one_file(path: str, pause: float) -> Row:
    """One file: read, count, tell."""
    read = read_file.node("read").step(path)
    # Files that have begun go ahead of new ones.
    counted = count_lines.node("count", priority=4).step(read.path, pause)
    return tell_of.node("tell", priority=3).step(read, counted)


@app.workflow(name="taskq.demo.pipeline")
def pipeline(folder: str | None, size: int, pause: float, page_pause: float) -> Summary:
    """A chain for each file that the source lists, and a summary of them all."""
    pages = list_files.node("list", priority=2).pages(folder, size, page_pause)
    rows = one_file.node("file", at_once=AT_ONCE, ahead=AHEAD).emit(pages, pause)
    return sum_up.step(collect(rows))
