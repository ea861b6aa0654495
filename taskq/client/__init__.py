"""Enqueue, cancel, wait and look: what applications do to jobs.

``requests`` builds what is sent, once for both drivers; ``aio`` sends it on asyncpg, ``sync`` on psycopg. Called by
``taskq.app`` and the handles; nothing here decides about a job, the database's functions do.
"""
