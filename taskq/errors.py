"""Every error that taskq raises on purpose, as one small tree.

Each message says what happened, what it means and what to do. The database's own refusals carry SQLSTATEs of class
``WF``; ``from_sqlstate`` maps each to the one exception that stands for it. Nothing here imports another part of taskq.
"""

from __future__ import annotations


class TaskQError(Exception):
    """The root of all errors of taskq; catch it to catch them all."""


class ConfigurationError(TaskQError):
    """A setting is missing or wrong; the message names the setting and the cure."""


class EmbeddedPostgresError(TaskQError):
    """The embedded PostgreSQL could not be found, started or reached."""


class MigrationError(TaskQError):
    """The schema and the migrations at hand do not agree, or a migration could not be applied."""
