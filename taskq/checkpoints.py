"""Checkpoints as text: what a body saves is checked before anything is sent, and read back as it asks."""

from __future__ import annotations

from typing import Any

from taskq.codec import decode_any, encode_any
from taskq.codec_types import decoder, readable, type_name
from taskq.errors import CheckpointConflict, PayloadError

__all__ = ["conflict", "decode", "encode"]


def encode(value: Any) -> str:
    """The JSON text of a checkpoint.

    Raises:
        PayloadError: JSON or PostgreSQL cannot hold it; ``path`` says where.
    """
    return encode_any(value, "checkpoint")


def decode(text: str | None, kind: Any = Any) -> Any:
    """A checkpoint of this type; None for none.

    Raises:
        PayloadError: It does not fit the type.
    """
    if text is None or kind is Any:
        return decode_any(text)
    try:
        return decoder(readable("load_checkpoint", "the checkpoint", kind)).decode(text)
    except Exception as exc:
        raise PayloadError(
            f"checkpoint: {exc}; what is saved does not fit {type_name(kind)}: an earlier version of the body may have "
            "saved it; load it without a type and convert it",
            path="checkpoint",
        ) from exc


def conflict(job: object, asked: int, stands: int, text: str | None) -> CheckpointConflict:
    """The error for a checkpoint that was to replace another version than the one that stands."""
    return CheckpointConflict(
        f"the checkpoint of job {job} stands at version {stands}, not {asked}: nothing was saved; go on from what "
        "stands (the error has it), or load it again",
        version=stands,
        value=decode_any(text),
    )
