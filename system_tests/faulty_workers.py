"""Starts many workers at once, each with a fault of its own, and tells how each has ended.

``python faulty_workers.py QUEUE=FAULT...``, with the flags of ``taskq worker`` after ``--``. What is imported is
imported once, and each worker is a fork that runs the command as a shell would; its log goes to ``QUEUE.log``.
Standard output gets one line for each: queue and exit code, or the signal as a negative number.
"""

from __future__ import annotations

import os
import sys

import faulty_app
import uvloop

import taskq.cli.worker
from taskq.cli import main
from taskq.testing import faults

__all__ = ["faulty_app", "taskq", "uvloop"]


def start(queue: str, fault: str, flags: list[str]) -> int:
    """Fork one worker; its process id."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(f"{queue}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ[faults.VARIABLE] = fault
    code = 70
    try:
        faults.arm_from_environment()
        main(["worker", "faulty_app:app", "--name", queue, "--queue", queue, *flags])
    except SystemExit as exc:
        code = int(exc.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    split = sys.argv.index("--")
    pids = {}
    for word in sys.argv[1:split]:
        queue, _, fault = word.partition("=")
        pids[start(queue, fault, sys.argv[split + 1 :])] = queue
    while pids:
        pid, status = os.wait()
        print(pids.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
