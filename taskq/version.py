"""The release, and the schema level that its code understands."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("taskq")
except PackageNotFoundError:
    __version__ = "0+unknown"

CAPABILITY_LEVEL = 3
"""Stamped on every worker; a job may require a level, and workers below it leave the job alone.

1: the first. 2: commits an effect start before a side-effecting body. 3: ends nodes of runs under the root lock.
"""
