"""Not outliving the process that started this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def follow(parent: int, with_signal: int = signal.SIGKILL) -> bool:
    """Get a signal from the kernel when the parent dies, however it dies; on Linux only.

    Strictly, when the thread that started this process ends: so processes are started from a main thread.

    Args:
        parent: The process id of the parent, as it knew it when it started this process.
        with_signal: What to get.

    Returns:
        False if the parent has died already.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    return os.getppid() == parent


def be_first_to_go() -> None:
    """Let the kernel, when memory runs out, end this process rather than its parent; on Linux only."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+b") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(min(1000, score + 500)).encode())
