"""The worker: claims jobs, runs their bodies, tells the database how they ended, and looks after the rest.

``service`` builds and starts the parts, ``shutdown`` brings them to rest; ``exchange`` is the main loop, fed by
``fetch`` (where to claim) and ``complete`` (what has ended), with ``resend`` for what was refused or not answered;
``execute`` runs bodies and ``disposition`` decides what their end means; ``registration`` and ``lease`` hold the right
to all that; ``wake`` shortens waits, ``maintenance`` does what one worker does for all. Nothing here writes to a job
but through the fenced functions of the schema.
"""

from taskq.worker.service import Worker, WorkerOptions

__all__ = ["Worker", "WorkerOptions"]
