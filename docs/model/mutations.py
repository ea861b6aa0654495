"""Broken designs, one rule each, that the search must find out: a model that cannot fail proves nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .configs import Config
from .rules import Design
from .search import Result, search
from .state import IDEMPOTENT, SIDE_EFFECTING


@dataclass(frozen=True)
class Mutation:
    """One broken design, the world in which it shows, and the properties of which one must fall first."""

    name: str
    what: str
    config: Config
    breaks: tuple[str, ...]


def _world(name: str, effect: str = SIDE_EFFECTING, jobs: int = 1, **values: int) -> Config:
    chosen = {"faults": 1, "orders": 0} | values
    return Config(name, (effect,) * jobs, design=Design(**{name: False}), **chosen)  # type: ignore[arg-type]


ONCE, TOLD, ADD_UP = "effect_at_most_once", "no_effect_untold", "attempts_add_up"
TWO = "one_body_may_start"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("fenced", "ends are not fenced", _world("fenced"), ("record_is_its_own", ADD_UP)),
    Mutation(
        "ends_by_epoch", "ends match the worker and not the epoch", _world("ends_by_epoch"), ("record_is_its_own",)
    ),
    Mutation("start_by_fence", "effect starts are not fenced", _world("start_by_fence"), (TWO, ONCE, TOLD)),
    Mutation(
        "start_checks_cancel",
        "an effect starts though the job is already cancelled: a start that a cancel has overtaken",
        _world("start_checks_cancel", orders=1),
        ("no_start_after_cancel",),
    ),
    Mutation(
        "start_is_recorded",
        "a body begins before its start is on record",
        _world("start_is_recorded"),
        (TWO, ONCE, TOLD),
    ),
    Mutation(
        "start_is_proven", "a body begins though its start was refused", _world("start_is_proven"), (TWO, ONCE, TOLD)
    ),
    Mutation(
        "started_is_kept",
        "a started effect whose worker is lost runs again",
        _world("started_is_kept"),
        (TWO, ONCE, TOLD),
    ),
    Mutation(
        "lost_is_not_cancelled",
        "a lost worker and a cancel request make a started effect cancelled",
        _world("lost_is_not_cancelled", orders=1),
        (TOLD, "no_cancel_over_an_effect"),
    ),
    Mutation(
        "lost_is_not_cancelled (idempotent)",
        "the same of an idempotent job",
        _world("lost_is_not_cancelled", IDEMPOTENT, orders=1),
        ("no_cancel_over_an_effect",),
    ),
    Mutation(
        "running_is_told",
        "a cancel ends a running job at once",
        _world("running_is_told", orders=1),
        (TOLD, "no_cancel_over_an_effect"),
    ),
    Mutation(
        "started_is_not_interrupted",
        "a cancel stops a side-effecting body after its start",
        _world("started_is_not_interrupted", orders=1),
        (TOLD, "no_cancel_over_an_effect"),
    ),
    Mutation(
        "handed_back_is_unknown",
        "a stopping worker hands a started effect back to be run again",
        _world("handed_back_is_unknown"),
        (TWO, ONCE, TOLD),
    ),
    Mutation(
        "timeout_is_unknown",
        "a body that still runs at its timeout counts as failed",
        _world("timeout_is_unknown"),
        (TWO, ONCE),
    ),
    Mutation("unknown_keeps_claim", "an unknown job may be claimed", _world("unknown_keeps_claim"), (ADD_UP,)),
    Mutation(
        "did_not_happen_is_final",
        "DidNotHappen is said while the old process may still do it",
        _world("did_not_happen_is_final"),
        (TWO, ONCE, TOLD),
    ),
    Mutation(
        "happened_is_seen",
        "a start on record is taken for the effect",
        _world("happened_is_seen"),
        ("success_is_true",),
    ),
    Mutation(
        "resolved_by_epoch",
        "a resolution names the job and not the attempt that was looked at",
        _world("resolved_by_epoch", faults=2, orders=1),
        (TWO, ONCE, TOLD, "success_is_true"),
    ),
    Mutation(
        "did_not_happen_is_bounded",
        "a hook's DidNotHappen runs the job again without a bound",
        _world("did_not_happen_is_bounded", faults=2, max_recoveries=0),
        ("repeats_are_bounded",),
    ),
    Mutation(
        "epoch_rises",
        "an epoch is used again after a lost worker",
        _world("epoch_rises"),
        ("epoch_rises_by_one", ADD_UP),
    ),
    Mutation(
        "one_transaction", "a job enters history and leaves jobs later", _world("one_transaction"), ("in_one_place",)
    ),
    Mutation(
        "settled_apart",
        "claims are settled once, with their worker, and a claim in flight is not waited for",
        _world("settled_apart"),
        ("every_job_can_end",),
    ),
    Mutation("loss_is_recorded", "a lost attempt leaves no record", _world("loss_is_recorded"), (ADD_UP,)),
    Mutation(
        "key_of_the_job",
        "the key for the provider changes with the attempt",
        Config("key_of_the_job", (IDEMPOTENT,), faults=1, orders=0, keys=True, design=Design(key_of_the_job=False)),
        ("effect_once_per_key",),
    ),
    Mutation(
        "requests outlive processes",
        "a dead process counts as proof while its request is still on the way",
        Config("requests outlive", (SIDE_EFFECTING,), faults=1, orders=0, requests_outlive=True),
        (TWO, ONCE, TOLD),
    ),
)


def run(mutation: Mutation) -> Result:
    """Search a broken design until its first violation."""
    return search(mutation.config, first_only=True)


def unbroken() -> set[str]:
    """Switches of the design that no mutation turns off."""
    broken = {f.name for m in MUTATIONS for f in fields(Design) if not getattr(m.config.design, f.name)}
    return {f.name for f in fields(Design)} - broken
