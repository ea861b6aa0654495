"""How much memory a process uses."""

from __future__ import annotations

import os
import resource
import sys


def resident_bytes() -> int:
    """The resident memory of this process in bytes; where the system does not tell, the most that it ever was."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
