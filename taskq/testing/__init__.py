"""For tests of applications that use taskq: a database to run against, a worker that runs what is due, and faults.

``database`` makes a database for the length of a block, ``drain`` runs what is due in it, in this process and with the
real worker, and ``faults`` stops a worker at a named ``Point``. Nothing in production imports this package.
"""

from taskq.testing import faults
from taskq.testing.databases import Database, database
from taskq.testing.draining import Drained, drain, drain_sync
from taskq.testing.points import Fault, How, Passage, Point, When

__all__ = [
    "Database",
    "Drained",
    "Fault",
    "How",
    "Passage",
    "Point",
    "When",
    "database",
    "drain",
    "drain_sync",
    "faults",
]
