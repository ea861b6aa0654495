"""``taskq jobs signal`` and ``taskq runs signal``."""

from __future__ import annotations

from typing import Literal

from taskq.cli.database import job_id, open_database
from taskq.cli.output import ExitCode, print_json
from taskq.errors import DatabaseRefusal

__all__ = ["send"]

_SAID = {
    "sent": "sent",
    "given": "sent, and given to a node that waits for it",
    "kept": "sent, and kept until a node of the run waits for it",
    "already": "was sent before under this key; nothing was changed",
}


def send(
    id_: str,
    name: str,
    payload: str,
    key: str | None,
    *,
    to: Literal["job", "run"] = "job",
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    """Send one signal to a job or a run, and say what became of it."""
    whose = job_id(id_, to)
    with open_database(dsn, schema) as database:
        try:
            answer = database.value("send_signal" if to == "job" else "send_run_signal", whose, name, payload, key)
        except DatabaseRefusal as exc:
            if not as_json:
                raise
            print_json([{"id": whose, "answer": "refused", "why": str(exc)}])
            return ExitCode.FAILED
    if as_json:
        print_json([{"id": whose, "answer": answer}])
    else:
        print(f"{whose}: signal {name} {_SAID[answer]}")
    return ExitCode.OK
