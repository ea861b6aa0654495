"""Connections and every statement: DSNs, pools, the drivers' seams, and the named queries in ``sql/``.

Clients, workers, migrations and the CLI come here for the database; nothing in this package knows about them.
"""
