"""The lease thread by itself: answers that come too late, bodies that outlive the lease, and an end without a start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from helpers import eventually
from proxy import proxy
from sql import register
from worker_kit import claim_of

from taskq import JobContext
from taskq.db.queries import load
from taskq.policy import ExecutionPolicy
from taskq.worker.lease import EXIT_LEASE_LOST, LeaseKeeper, Progress, Renewal, boot_clock
from taskq.worker.running import Running, effects, overlapping

OUTLIVES = """\
import sys
from taskq.worker.lease import LeaseKeeper, Progress, boot_clock
from uuid import UUID
keeper = LeaseKeeper(dsn=sys.argv[1], query="", lease=1.0, progress=Progress(), tolerance=60.0,
                     bodies=lambda: int(sys.argv[2]), effects=lambda: 0, on_renewed=print,
                     on_expiring=lambda: print("expiring"))
keeper.hold(UUID(int=1), boot_clock())
keeper.start()
keeper.join(float(sys.argv[3]))
keeper.halt()
keeper.join()
print("unharmed")
"""
WAKES_UP = """\
import sys
from taskq.worker.lease import LeaseKeeper, Progress, boot_clock
from uuid import UUID
told = []
effects, end_after = int(sys.argv[2]), float(sys.argv[3])
runs = lambda: not told or boot_clock() < told[0] + end_after
keeper = LeaseKeeper(dsn=sys.argv[1], query="", lease=20.0, progress=Progress(), tolerance=60.0,
                     bodies=lambda: int(runs()), effects=lambda: effects, on_renewed=print,
                     on_expiring=lambda: told.append(boot_clock()))
keeper.hold(UUID(int=1), boot_clock() - 60)
keeper.start()
keeper.join(float(sys.argv[4]))
print("went on" if told else "was not told")
"""
# Seconds that a process gets: until it ends itself, however slow the machine; or until it would have done so by far.
MUST_END, MUST_NOT_END = "50", "3"
NOBODY_ANSWERS = "postgresql://taskq@127.0.0.1:1/nothing"


def keep(dsn: str, on_renewed: Callable[[Renewal], None], **values: Any) -> LeaseKeeper:
    """A keeper of no body, with a lease that outlasts the test."""
    whole: dict[str, Any] = {
        "query": load("worker", "taskq")["renew"],
        "lease": 60.0,
        "progress": Progress(),
        "tolerance": 60.0,
        "bodies": lambda: 0,
        "effects": lambda: 0,
        "on_expiring": lambda: None,
    }
    return LeaseKeeper(dsn=dsn, on_renewed=on_renewed, **(whole | values))


def test_an_answer_for_a_registration_that_was_replaced_is_left_alone(conn: psycopg.Connection, dsn: str) -> None:
    first, second = register(conn), register(conn)
    renewed: list[UUID] = []
    with proxy(dsn) as way:
        keeper = keep(way.dsn, lambda renewal: renewed.append(renewal.worker_id))
        held = way.hold(answer="live")
        keeper.hold(first, boot_clock())
        keeper.start()
        assert held.wait(30)
        sent_at = boot_clock()
        keeper.hold(second, sent_at)
        way.restore()
        eventually(lambda: renewed)
        assert set(renewed) == {second}
        assert keeper.answered_at >= sent_at
        keeper.halt()
        keeper.join(10)
    assert not keeper.is_alive()


def test_a_keeper_that_never_had_anything_to_renew_ends(dsn: str) -> None:
    keeper = keep(dsn, lambda renewal: None)
    keeper.start()
    assert (keeper.holds, keeper.halted) == (False, False)
    keeper.halt()
    keeper.join(10)
    assert keeper.halted
    assert not keeper.is_alive()


def outlive(bodies: int) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", OUTLIVES, NOBODY_ANSWERS, str(bodies), MUST_END if bodies else MUST_NOT_END]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=60)


def test_a_body_that_runs_on_without_a_lease_takes_the_process_with_it() -> None:
    done = outlive(bodies=1)
    assert done.returncode == EXIT_LEASE_LOST, done.stderr
    # What was said before is not lost with the process.
    assert done.stdout == "expiring\n"


def test_a_process_without_bodies_outlives_its_lease() -> None:
    done = outlive(bodies=0)
    assert (done.returncode, done.stdout) == (0, "expiring\nunharmed\n"), done.stderr


@pytest.mark.parametrize(
    ("started", "end_after", "goes_on"), [(1, 0.1, True), (1, 60.0, False), (0, 0.1, False), (0, 0.0, True)]
)
def test_a_process_that_wakes_up_past_its_lease_spares_started_effects_for_a_moment(
    started: int, end_after: float, goes_on: bool
) -> None:
    """If the bodies beside them end in it; without effects the process ends at once, and with it what still runs."""
    wait = MUST_NOT_END if goes_on else MUST_END
    arguments = [sys.executable, "-c", WAKES_UP, NOBODY_ANSWERS, str(started), str(end_after), wait]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if goes_on else EXIT_LEASE_LOST), done.stderr
    assert done.stdout == ("went on\n" if goes_on else "")


def run_of(phase: str, effect_class: str = "idempotent") -> Running:
    run = Running(claim_of("t", effect_class=effect_class), ExecutionPolicy(), JobContext.local("t"), 0.0)
    run.phase = phase  # type: ignore[assignment]
    return run


def test_what_must_not_outlive_the_lease_are_bodies_that_would_run_beside_their_successors() -> None:
    body, pure = run_of("body"), run_of("body", "pure")
    starting, effect = run_of("starting", "side_effecting"), run_of("effect", "side_effecting")
    assert overlapping([]) == 0
    assert overlapping([body, pure]) == 2
    assert overlapping([starting]) == 0, "its body is not called any more"
    assert overlapping([effect]) == 0, "it is let finish"
    assert overlapping([body, pure, starting, effect]) == 1, "what may run twice does not end a started effect"
    assert (effects([body, pure, starting]), effects([body, effect])) == (0, 1)
