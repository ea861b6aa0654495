"""The worker: claims jobs, runs their bodies, tells the database how they ended, and looks after the rest.

``service`` builds and starts the parts, ``shutdown`` brings them to rest; ``exchange`` is the main loop, fed by
``fetch`` (where to claim) and ``complete`` (what has ended), with ``resend`` for what was refused or not answered;
``execute`` runs bodies (``bodies`` in this process, ``process_body`` in a ``child`` out of ``process_pool``) and
``disposition`` decides what their end means; ``registration`` and ``lease`` hold the right to all that; ``wake``
shortens waits, ``maintenance`` does what one worker does for all; ``supervisor`` keeps several worker processes.
Nothing here writes to a job but through the fenced functions of the schema.

The public names are imported when they are first used: a child process needs little of this, and starts sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskq.worker.options import WorkerOptions
    from taskq.worker.service import Worker

__all__ = ["Worker", "WorkerOptions"]


def __getattr__(name: str) -> Any:
    if name == "Worker":
        from taskq.worker.service import Worker

        return Worker
    if name == "WorkerOptions":
        from taskq.worker.options import WorkerOptions

        return WorkerOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
