"""The play: one run is started, its workers are killed, one of them over a page, and what it told is read."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from taskq.demo.counting import count_file
from taskq.demo.pipeline.report import Report
from taskq.demo.pipeline.tasks import (
    AHEAD,
    MOST_LINES,
    QUEUE,
    Row,
    Summary,
    app,
    list_files,
    pipeline,
    summary_of,
)
from taskq.demo.stage import Stage
from taskq.demo.strikes import strike
from taskq.errors import RunFailed

__all__ = ["KILLS", "LEAST", "WORKERS", "play"]

WORKERS = 2
CONCURRENCY = 5
KILLS = 4
LEAST = 100
"""Files; of fewer all would be open before the last worker is killed."""
PAGES = 20
"""Into so many pages few files are divided; of many files each page has as many as fit the bound."""
LARGEST = 25
SHORTEST = 12.0
"""Seconds that few files are made to last, so that there is time to strike."""
PAGE_PAUSE = 0.3


def play(
    dsn: str,
    schema: str,
    files: list[str],
    folder: Path | None,
    seed: int,
    work: Path,
    tell: Callable[[int, str], None],
    *,
    own: bool,
) -> Report:
    """Play it once.

    Args:
        dsn: A migrated database.
        schema: Its schema.
        files: What the source will find.
        folder: Where; None for the standard library.
        seed: Decides who is killed, and when.
        work: A folder for the logs.
        tell: Is told how many files are left, and what goes on.
        own: Whether the database is this play's alone, so that all of it is verified.

    Raises:
        TaskQError: It could not be played to its end.
    """
    rand = random.Random(seed)
    size = max(1, min(LARGEST, len(files) // PAGES))
    pause = max(0.0, SHORTEST * WORKERS * CONCURRENCY / len(files) - 0.1)
    app.use_database(dsn, schema)
    began = time.monotonic()
    stage = Stage(
        dsn,
        schema,
        work,
        app="taskq.demo.pipeline.tasks:app",
        workers=WORKERS,
        concurrency=CONCURRENCY,
        queue=QUEUE,
        supervised=True,
    )
    with stage.open():
        run = pipeline.start_sync(None if folder is None else str(folder.resolve()), size, pause, PAGE_PAUSE)
        run_id = str(run.id)
        most_open = 0

        def left() -> int:
            nonlocal most_open
            for row in stage.rows("emitted", run_id):
                most_open = max(most_open, row["open"])
                return len(files) - int(row["ended"])
            return len(files)

        tasks = [None, list_files.name, None, list_files.name]
        strikes = strike(stage, len(files), ["killed"] * KILLS, "jobs", rand, tell, look=left, tasks=tasks)
        stage.run_until(0, lambda n: tell(n, "nobody strikes any more"), left)
        stage.run_until_ended([run_id])
        told: Summary | None = None
        try:
            told = run.result_sync(timeout=60)
            status = "succeeded"
        except RunFailed as exc:
            status = f"failed: {exc}"
        app.close_sync()
        exits = [stage.stop(worker) for worker in list(stage.workers)]
        seconds = time.monotonic() - began
        plain_began = time.monotonic()
        plain = summary_of(_plainly(files))
        return Report(
            seed=seed,
            status=status,
            told=told,
            plain=plain,
            files=files,
            items=[row["item"] for row in stage.rows("emitted_items", run_id)],
            pages=sum(int(row["pages"]) for row in stage.rows("emitted", run_id)),
            lost_pages=stage.number("lost_of", list_files.name, run_id),
            most_open=most_open,
            may_be_open=AHEAD + size,
            strikes=strikes,
            violations=stage.rows("verify", "all" if own else "since", run_id),
            exits=exits,
            seconds=seconds,
            plain_seconds=time.monotonic() - plain_began,
        )


def _plainly(files: Iterable[str]) -> Iterator[Row | str]:
    """What the chains tell of files, by a plain loop."""
    for ix, path in enumerate(files):
        counted = count_file(path)
        if counted.lines > MOST_LINES:
            yield f"file[{ix}]"
        else:
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
            yield Row(path, digest, counted.lines, counted.functions, counted.classes)
