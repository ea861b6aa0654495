"""The demonstration's app: one task, which counts what is in a file."""

from __future__ import annotations

import time
from dataclasses import asdict

from taskq import TaskQ
from taskq.demo.counting import count_file

__all__ = ["app", "index_file"]

app = TaskQ()


@app.task(name="taskq.demo.index_file", queue="taskq-demo", effect_class="pure", max_attempts=1)
def index_file(path: str, pause: float = 0.0) -> dict[str, int]:
    """Count lines, functions and classes of a file.

    Args:
        path: The file.
        pause: Seconds to wait besides, so that a small folder lasts long enough to kill a worker in between.
    """
    counted = count_file(path)
    time.sleep(pause)
    return asdict(counted)
