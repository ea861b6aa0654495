"""Migrations: forward only, frozen by a manifest, applied by one runner at a time.

A migration is a file ``VV.VV.VV_NN_{pre|post}_name.sql``. ``pre`` runs before the new code, while the old code still
works; ``post`` once the old code is gone. The rule of order is simple: files are applied in the order of their names,
except that pending post files may be left out, and then later pre files go ahead of them. So a pre file must never
depend on a post file. Post files wait for ``up(include_post=True)`` (``taskq migrate up --post``); only the first
installation, where no old code can be running, takes them along by default, even if several runners share it.

``released_migrations.sha256`` freezes the files. ``up`` refuses a changed, missing, reordered or unfrozen one, and a
database that is newer than the code. What was applied stands in the schema's ``schema_migrations``, written in the
transaction of the file itself. A file whose header says ``-- taskq: no-transaction`` runs statement by statement (cut
at ``-- taskq: next``): those that PostgreSQL allows only outside a transaction run alone, the others each in one, and
indexes that an earlier try left invalid are dropped and built anew. Every statement of such a file must be harmless
when it is repeated. ``search_path`` holds only pg_catalog while a file runs, so every name is written in full.

Runners agree through a lease, one row that they poll: nobody waits inside a statement, nothing depends on a session.

Modules: ``files`` (folder and manifest), ``records`` (the runner's tables), ``sentry`` (renewal and blockers),
``indexes`` (repair), ``runner`` (``up``), ``state`` (status, verify, the check at boot, SQL by hand).
"""

from taskq.migrate.files import Migration, code_version, freeze, load_migrations, new
from taskq.migrate.runner import Applied, up
from taskq.migrate.state import (
    MigrationStatus,
    applied_names,
    check_applied,
    check_compatible,
    missing_roles,
    render_sql,
    status,
    verify,
)

__all__ = [
    "Applied",
    "Migration",
    "MigrationStatus",
    "applied_names",
    "check_applied",
    "check_compatible",
    "code_version",
    "freeze",
    "load_migrations",
    "missing_roles",
    "new",
    "render_sql",
    "status",
    "up",
    "verify",
]
