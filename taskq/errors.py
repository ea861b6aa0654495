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


class MigrationChanged(MigrationError):
    """A frozen or applied migration file no longer has the content that was frozen or applied."""


class MigrationMissing(MigrationError):
    """A frozen migration file is not there."""


class MigrationUnknown(MigrationError):
    """A migration file is not frozen, or the database has one that this code never had."""


class MigrationReordered(MigrationError):
    """Migration files stand, or were applied, in another order than that of their names."""


class SchemaNewer(MigrationError):
    """The database has migrations of a later release than the code."""


class SchemaBehind(MigrationError):
    """The database lacks migrations that the code needs; the message names them in order."""


class MigrationLocked(MigrationError):
    """Another session holds a lock, or another runner the lease, that the migration needs."""


class MigrationFailed(MigrationError):
    """PostgreSQL refused a statement of a migration; nothing of that file's transaction remains."""


class DatabaseUnavailable(TaskQError):
    """PostgreSQL could not be reached or refused the login; the message names host, port and database."""
