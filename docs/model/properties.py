"""What must hold: in every state, on every step, and that every job can still come to an end.

Properties of one job look at its case alone, so that their answer can be kept for each case that was seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .configs import Config
from .state import ENDED, OPEN, PURE, SIDE_EFFECTING, Case, State

TOLD = ("succeeded", "failed", "waited", "cancelled", "happened")
"""Outcomes under which an effect that happened is not lost: its own body's word, or evidence that it happened."""


def effect_at_most_once(case: Case, config: Config) -> bool:
    """A side effect happens at most once, and once more only after an operator has reopened a job that had ended."""
    journal, job = case.provider.journal, case.job
    return job.effect != SIDE_EFFECTING or config.keys or len(journal) <= 1 + job.generation


def effect_once_per_key(case: Case, config: Config) -> bool:
    """Where the provider honours keys, a job has at most one effect, however often its body runs."""
    return not config.keys or len(case.provider.journal) <= 1


def attempts_add_up(case: Case, config: Config) -> bool:
    """Attempts on record + open = epoch, and each epoch is on record once."""
    job = case.job
    ended = tuple(e.epoch for e in job.record)
    return ended == tuple(range(1, len(ended) + 1)) and len(ended) + (job.status in OPEN) == job.epoch


def record_is_its_own(case: Case, config: Config) -> bool:
    """Nobody's word stands under the attempt of another."""
    return all(e.by in (0, e.epoch) for e in case.job.record)


def in_one_place(case: Case, config: Config) -> bool:
    """A job is in exactly one of jobs and history."""
    job = case.job
    never = not job.status and not job.final and not job.epoch
    return never or bool(job.status) != bool(job.final)


def no_effect_untold(case: Case, config: Config) -> bool:
    """A side effect that happened is never on record as lost, released or not happened; nor cancelled over."""
    job = case.job
    if job.effect != SIDE_EFFECTING:
        return True
    happened = {epoch for epoch, _ in case.provider.journal}
    return all(e.outcome in TOLD and (e.outcome != "cancelled" or e.by) for e in job.record if e.epoch in happened)


def no_cancel_over_an_effect(case: Case, config: Config) -> bool:
    """No running or unknown job is called cancelled over an effect of that attempt that was never told."""
    job = case.job
    if job.final != "cancelled" or job.unattempted or job.effect == PURE:
        return True
    last = job.record[-1]
    return last.by > 0 or last.epoch not in {epoch for epoch, _ in case.provider.journal}


def success_is_true(case: Case, config: Config) -> bool:
    """A job that has succeeded has had its effect."""
    return case.job.final != "succeeded" or case.job.effect == PURE or bool(case.provider.journal)


def repeats_are_bounded(case: Case, config: Config) -> bool:
    """Failures, lost workers and hooks run a job again only within their bounds; operators as often as they say so."""
    job = case.job
    return job.attempt <= config.max_attempts and job.recoveries <= config.max_recoveries + 1 + config.orders


def one_body_may_start(state: State, config: Config) -> bool:
    """Of a side-effecting job at most one body may still have its effect."""
    seen = set()
    for a in state.attempts:
        case = state.cases[a.job]
        may = a.phase in ("allowed", "body") and not a.did and a.epoch > case.provider.closed
        if may and case.job.effect == SIDE_EFFECTING:
            if a.job in seen:
                return False
            seen.add(a.job)
    return True


def epoch_rises_by_one(before: State, after: State) -> bool:
    """A claim raises the epoch by exactly one, nothing else changes it, and it never falls."""
    for old, new in zip(before.cases, after.cases, strict=True):
        claimed = new.job.status == "running" and old.job.status != "running"
        if new.job.epoch - old.job.epoch != claimed:
            return False
    return True


def no_start_after_cancel(before: State, after: State) -> bool:
    """No effect start is committed once a cancel has been answered: whichever commits first wins."""
    pairs = zip(before.cases, after.cases, strict=True)
    return not any(new.job.started and not old.job.started and old.job.cancel for old, new in pairs)


OF_A_CASE: tuple[Callable[[Case, Config], bool], ...] = (
    effect_at_most_once,
    effect_once_per_key,
    attempts_add_up,
    record_is_its_own,
    in_one_place,
    no_effect_untold,
    no_cancel_over_an_effect,
    success_is_true,
    repeats_are_bounded,
)
OF_A_STATE: tuple[Callable[[State, Config], bool], ...] = (one_body_may_start,)
OF_A_STEP: tuple[Callable[[State, State], bool], ...] = (epoch_rises_by_one, no_start_after_cancel)
LIVENESS = "every_job_can_end"
"""Without a further fault or order, an end can be reached from every state; or unknown, where nobody reconciles."""

NAMES: tuple[str, ...] = (*(p.__name__ for p in (*OF_A_CASE, *OF_A_STATE, *OF_A_STEP)), LIVENESS)


class Checker:
    """The properties of states and steps under one config."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._cases: dict[Case, tuple[str, ...]] = {}

    def state(self, state: State) -> Iterator[str]:
        """The properties that this state violates."""
        for case in state.cases:
            found = self._cases.get(case)
            if found is None:
                found = tuple(p.__name__ for p in OF_A_CASE if not p(case, self.config))
                self._cases[case] = found
            yield from found
        yield from (p.__name__ for p in OF_A_STATE if not p(state, self.config))

    def step(self, before: State, after: State) -> Iterator[str]:
        """The properties that this step violates."""
        yield from (p.__name__ for p in OF_A_STEP if not p(before, after))


def has_ended(state: State, config: Config) -> bool:
    """Whether every job has ended, or is unknown where nobody is there to reconcile it."""
    return all(
        (c.job.final in ENDED and not c.job.status) or (c.job.status == "unknown" and not config.hook)
        for c in state.cases
    )
