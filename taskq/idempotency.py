"""The key that outside providers tell one job's effect by, whoever asks for it: a body, or what reconciles it."""

from __future__ import annotations

from uuid import UUID

__all__ = ["idempotency_key", "step_key"]


def idempotency_key(job_id: UUID, key_generation: int | None = None) -> str:
    """The key of a job: its id, and ``:gN`` behind that once an effect has undone an earlier generation.

    The same for each attempt, whether retried, recovered or reconciled. Plain ASCII, at most 47 characters.

    Args:
        job_id: The job.
        key_generation: As it stands on the job: set when a finished job is reopened that a terminal effect declared
            ``undoes=True`` had undone; the same work is then a new effect.
    """
    return str(job_id) if key_generation is None else f"{job_id}:g{key_generation}"


def step_key(job_key: str, name: str, occurrence: int = 1) -> str:
    """The key of a step: its job's, its name behind that, and ``#n`` where it is not the first of that name.

    No two steps of a job share one, nor does a step that of its job in another generation: ``steps.check_name`` keeps
    names away from both.

    Args:
        job_key: The key of its job.
        name: The step.
        occurrence: Which call of that name, from 1.
    """
    return f"{job_key}:{name}" if occurrence == 1 else f"{job_key}:{name}#{occurrence}"
