"""What there is: rows of the database, bodies and messages of workers, the journal of the outside provider.

A state is a tuple of tuples, so that it can be compared, hashed and shared. A worker is a slot that a process runs in;
each registration of it is a worker of its own to the database, so a fence is ``(slot, registration)`` and an epoch.
"""

from __future__ import annotations

from typing import NamedTuple

PURE, IDEMPOTENT, SIDE_EFFECTING = "pure", "idempotent", "side_effecting"

Owner = tuple[int, int]
"""Slot and registration of a worker."""
NOBODY: Owner = (-1, 0)

ENDED = ("succeeded", "failed", "cancelled")
OPEN = ("running", "unknown")


class Entry(NamedTuple):
    """An ended attempt on record: its epoch, its outcome, and the epoch of the body whose word it is (0: nobody's)."""

    epoch: int
    outcome: str
    by: int


class Job(NamedTuple):
    """A job's rows: ``status`` in ``jobs`` and ``final`` in ``history``, each empty where it has no row there."""

    effect: str
    status: str = ""
    final: str = ""
    epoch: int = 0
    owner: Owner = NOBODY
    started: bool = False
    cancel: bool = False
    attempt: int = 0
    recoveries: int = 0
    generation: int = 0
    unattempted: bool = False
    """Finished without an attempt of its own: cancelled while it waited, or swept."""
    record: tuple[Entry, ...] = ()


class Provider(NamedTuple):
    """What happened outside for one job: each effect as (epoch, key), and up to which epoch requests are refused."""

    journal: tuple[tuple[int, int], ...] = ()
    closed: int = 0


class Verdict(NamedTuple):
    """What somebody has found out about one attempt and not yet said: by the hook, or by an operator."""

    epoch: int
    happened: bool
    operator: bool


class Case(NamedTuple):
    """Everything about one job that is not inside a worker."""

    job: Job
    provider: Provider = Provider()
    verdicts: tuple[Verdict, ...] = ()


class Worker(NamedTuple):
    """A slot: whether its process lives, its registration, whose lease is live or expired; older ones are lost."""

    alive: bool = True
    registration: int = 1
    row: str = "live"


class Attempt(NamedTuple):
    """What a process, or the network, still holds of an attempt.

    Phases: ``claimed`` (its answer is on the way or there: the same thing, for nothing waits for either), ``allowed``
    (effect start proven), ``body`` (it runs), ``telling`` (the end is sent until it is confirmed), ``stray`` (an end
    that outlived its process), ``request`` (a request to the provider that did). ``claiming`` is of a broken design.
    """

    job: int
    epoch: int
    owner: Owner
    phase: str
    says: str = ""
    did: bool = False


class State(NamedTuple):
    """One state of the whole; ``faults``, ``orders`` and ``repeats`` are what the world may still do to it."""

    cases: tuple[Case, ...]
    workers: tuple[Worker, ...]
    attempts: tuple[Attempt, ...]
    faults: int
    orders: int
    repeats: int
