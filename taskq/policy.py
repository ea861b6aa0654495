"""How a job is run: the policy, its layers, and the one resolver.

An ``ExecutionPolicy`` is whole and immutable; its id is a hash, and the row of a job carries that id, so that a deploy
does not change work that is in flight. Layers are partial; ``resolve`` puts them together, the nearest wins. Every way
of making a job goes through ``resolve``. This module depends on nothing of ours but ``errors``, ``effects`` and
``cohorts``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from taskq.cohorts import Cohort
from taskq.durations import Duration, parse_duration
from taskq.effects import PromisedEffect, TerminalEffect
from taskq.errors import InvalidDuration, InvalidPolicy

__all__ = [
    "DEFAULT_RETRY",
    "EFFECT_START_LEVEL",
    "FORMAT",
    "UNLIMITED",
    "UNSET",
    "Backoff",
    "Duration",
    "EffectClass",
    "ExecutionPolicy",
    "History",
    "OnExhausted",
    "Ordering",
    "PolicyLayer",
    "Retry",
    "Unset",
    "check_name",
    "constant",
    "exponential",
    "linear",
    "parse_duration",
    "resolve",
]

FORMAT: Final = 1
"""Version of the form and of the defaults of a spec. It is part of every id: raise it when a default changes."""
UNLIMITED: Final = 2**31 - 1
"""What ``max_attempts=None`` is stored as."""
EffectClass: TypeAlias = Literal["pure", "idempotent", "side_effecting"]
EFFECT_START_LEVEL: Final = 2
"""The capability level of workers that commit an effect start before a side-effecting body; its jobs require it."""
Ordering: TypeAlias = Literal["halt", "continue"]
History: TypeAlias = Literal["full", "slim"]
OnExhausted: TypeAlias = Literal["fail", "hold"]


class Unset(Enum):
    """The type of ``UNSET``: a field that a layer says nothing about."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET


def check_name(what: str, name: object) -> str:
    """Return ``name`` if it is 1 to 128 printable ASCII characters without spaces.

    Raises:
        InvalidPolicy: It is not; the message names ``what``.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= 128 or not all("!" <= c <= "~" for c in name):
        raise InvalidPolicy(f"{what} is {_short(name)}; give 1 to 128 printable ASCII characters without spaces")
    return name


def _check_int(what: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        most = "" if high == UNLIMITED else f" to {high}"
        raise InvalidPolicy(f"{what} is {_short(value)}; give a whole number from {low}{most}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _duration(what: str, value: Duration) -> float:
    try:
        return parse_duration(value)
    except InvalidDuration as exc:
        raise InvalidDuration(f"{what}: {exc}") from None


def _names(what: str, kinds: Iterable[type[BaseException] | str]) -> tuple[str, ...]:
    if isinstance(kinds, (str, type)):
        raise InvalidPolicy(f"{what} is {kinds!r}; give a tuple of exception classes, such as ({kinds!r},)")
    found = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseException):
            found.append(kind_name(kind))
        elif isinstance(kind, str) and kind:
            found.append(kind)
        else:
            raise InvalidPolicy(f"{what} has {kind!r}, which is no exception class; give classes or qualified names")
    return tuple(sorted(set(found)))


def kinds_of(exc: BaseException) -> list[str]:
    """The qualified names of an exception's class and of those that it is derived from."""
    return [kind_name(c) for c in type(exc).__mro__]


def kind_name(kind: type) -> str:
    """The qualified name of a class, as retry rules have it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # such as an integer of over 4,300 digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:79] + "…"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait after each failure; made by ``exponential``, ``linear`` and ``constant``. Times in seconds."""

    kind: Literal["exponential", "linear", "constant"]
    base: float
    factor: float = 2.0
    cap: float = 3600.0
    jitter: float = 0.1

    def delay(self, attempt: int, rand: float) -> float:
        """Seconds to wait after failure number ``attempt``; never above ``cap``, above 0 if ``base`` is.

        Args:
            attempt: 1 for the first failure. Any number is safe: nothing overflows.
            rand: From 0 up to, not including, 1; the share of ``jitter`` by which the delay is shortened, so that
                jobs that failed together do not come back together.
        """
        n = min(max(attempt, 1), 2**53) - 1
        match self.kind:
            case "exponential" if self.base > 0:
                # In logarithms, since factor ** n has no bound.
                grown = math.log(self.base) + n * math.log(self.factor)
                whole = self.cap if grown > math.log(self.cap) + 1 else self.base * self.factor**n
            case "linear":
                whole = self.base * (n + 1)
            case _:
                whole = self.base
        whole = min(whole, self.cap)
        return whole * (1 - self.jitter * min(max(rand, 0.0), 1.0))


def exponential(base: Duration, *, factor: float = 2.0, cap: Duration = "1h", jitter: float = 0.1) -> Backoff:
    """Wait ``base``, then ``factor`` times as long after each further failure, at most ``cap``.

    Args:
        base: The first delay, ``"1s"`` or seconds.
        factor: At least 1.
        cap: No delay is longer.
        jitter: 0 to 0.9: the share by which a delay may be shortened at random.

    Raises:
        InvalidPolicy: A value is out of its bounds.
    """
    return _backoff("exponential", base, cap, jitter, factor)


def linear(base: Duration, *, cap: Duration = "1h", jitter: float = 0.1) -> Backoff:
    """Wait ``base``, then ``base`` longer after each further failure, at most ``cap``.

    Raises:
        InvalidPolicy: A value is out of its bounds.
    """
    return _backoff("linear", base, cap, jitter)


def constant(base: Duration, *, jitter: float = 0.0) -> Backoff:
    """Wait ``base`` after every failure.

    Raises:
        InvalidPolicy: A value is out of its bounds.
    """
    return _backoff("constant", base, max(parse_duration(base), 0.001), jitter)


def _backoff(
    kind: Literal["exponential", "linear", "constant"],
    base: Duration,
    cap: Duration,
    jitter: float,
    factor: float = 2.0,
) -> Backoff:
    first, most = _duration("backoff.base", base), _duration("backoff.cap", cap)
    if most <= 0:
        raise InvalidPolicy("backoff.cap is 0: no delay would be left; give a duration above 0")
    if not _is_number(factor) or not 1 <= factor <= 1000:
        raise InvalidPolicy(f"backoff.factor is {factor!r}; give a number from 1 to 1000")
    if not _is_number(jitter) or not 0 <= jitter <= 0.9:
        raise InvalidPolicy(f"backoff.jitter is {jitter!r}; give a number from 0 to 0.9")
    if first > most:
        raise InvalidPolicy(f"backoff.base ({first:g} s) is above backoff.cap ({most:g} s); raise the cap")
    return Backoff(kind, first, float(factor), most, float(jitter))


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """What happens when a body fails.

    Attributes:
        max_attempts: How many failures of the body end the job; the first run counts. None means no limit.
        backoff: How long to wait in between.
        on: Qualified names of the exceptions that are retried, subclasses too; None means all.
        give_up_on: Qualified names of the exceptions that end the job at once; they win over ``on``.

    Raises:
        InvalidPolicy: A value is out of its bounds.
    """

    max_attempts: int
    backoff: Backoff
    on: tuple[str, ...] | None
    give_up_on: tuple[str, ...]

    def __init__(
        self,
        max_attempts: int | None = 3,
        backoff: Backoff | None = None,
        *,
        on: Iterable[type[BaseException] | str] | None = None,
        give_up_on: Iterable[type[BaseException] | str] = (),
    ) -> None:
        attempts = UNLIMITED if max_attempts is None else max_attempts
        _check_int("retry.max_attempts", attempts, 1, UNLIMITED)
        curve = exponential("5s") if backoff is None else backoff
        if not isinstance(curve, Backoff):
            raise InvalidPolicy(f"retry.backoff is {curve!r}; use exponential(...), linear(...) or constant(...)")
        object.__setattr__(self, "max_attempts", attempts)
        object.__setattr__(self, "backoff", curve)
        object.__setattr__(self, "on", None if on is None else _names("retry.on", on))
        object.__setattr__(self, "give_up_on", _names("retry.give_up_on", give_up_on))

    def retries(self, exc: BaseException) -> bool:
        """Whether this kind of failure may be tried again; says nothing about how many attempts are left."""
        return (self.on is None and not self.give_up_on) or self.retries_kinds(kinds_of(exc))

    def retries_kinds(self, kinds: Iterable[str]) -> bool:
        """Like ``retries``, for an exception of another process, by what ``kinds_of`` says of it there."""
        kinds = set(kinds)
        if kinds.intersection(self.give_up_on):
            return False
        return self.on is None or bool(kinds.intersection(self.on))


DEFAULT_RETRY: Final = Retry()
"""For tasks that say nothing: three attempts, 5 s and 10 s apart (up to a tenth less, at random)."""


@dataclass(frozen=True, slots=True)
class ExecutionPolicy:
    """A whole policy; times in seconds.

    Attributes:
        queue: Where the job waits.
        priority: 0 to 9, higher first.
        retry: What happens when the body fails.
        timeout: How long one attempt may run; None for no limit.
        deadline: How long after enqueue the job may still start; None for no limit.
        effect_class: What may happen to a body whose outcome is unknown.
        max_recoveries: How often the job may run again because its worker was lost, or its hook said that its effect
            did not happen.
        max_retry_afters: How often the body may raise ``RetryAfter``.
        max_snoozes: How often the body may raise ``Snooze``.
        effects: What runs because the job has ended, resolved as well.
        ordering: What becomes of the rest of its ordering key while the job has failed, is unknown or waits out a
            delay: ``"halt"`` holds it, ``"continue"`` lets it go on; None is ``"halt"`` for side-effecting tasks and
            ``"continue"`` for others.
        cohort: Whose limit the job counts against while it runs; None for none.
        history: What is kept of a job that has succeeded: ``"full"``, or ``"slim"`` without payload and result. Slim
            jobs keep both where they fail, are cancelled, promise effects, belong to a run, a body or an effect, were
            resolved or reopened.
        on_exhausted: What becomes of a job once its recoveries are used up: it has failed (``"fail"``), or is held
            with an incident, and its run paused, until somebody grants it one more (``"hold"``).

    Raises:
        InvalidPolicy: A value is out of its bounds; the message names the field and the cure.
    """

    queue: str = "default"
    priority: int = 5
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = None
    deadline: float | None = None
    effect_class: EffectClass = "idempotent"
    max_recoveries: int = 10
    max_retry_afters: int = 100
    max_snoozes: int = 1000
    effects: tuple[PromisedEffect, ...] = ()
    ordering: Ordering | None = None
    cohort: Cohort | None = None
    history: History = "full"
    on_exhausted: OnExhausted = "fail"

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        _check_int("priority", self.priority, 0, 9)
        if not isinstance(self.retry, Retry):
            raise InvalidPolicy(f"retry is {self.retry!r}; give Retry(max_attempts=..., backoff=...)")
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if value is not None:
                seconds = _duration(name, value)
                if seconds <= 0:
                    raise InvalidPolicy(f"{name} is 0; give a duration above 0, or None for no limit")
                object.__setattr__(self, name, seconds)
        if self.effect_class not in ("pure", "idempotent", "side_effecting"):
            raise InvalidPolicy(
                f"effect_class is {_short(self.effect_class)}; give 'pure', 'idempotent' or 'side_effecting'"
            )
        for name in ("max_recoveries", "max_retry_afters", "max_snoozes"):
            _check_int(name, getattr(self, name), 0, UNLIMITED)
        if self.ordering not in ("halt", "continue", None):
            raise InvalidPolicy(f"ordering is {_short(self.ordering)}; give 'halt', 'continue' or None")
        if self.cohort is not None and not isinstance(self.cohort, Cohort):
            raise InvalidPolicy(f"cohort is {_short(self.cohort)}; give Cohort(name, limit=...) or None")
        if self.history not in ("full", "slim"):
            raise InvalidPolicy(f"history is {_short(self.history)}; give 'full' or 'slim'")
        if self.on_exhausted not in ("fail", "hold"):
            raise InvalidPolicy(f"on_exhausted is {_short(self.on_exhausted)}; give 'fail' or 'hold'")

    @property
    def required_worker_schema(self) -> int | None:
        """The capability level that its jobs require of a worker; None for none."""
        return EFFECT_START_LEVEL if self.effect_class == "side_effecting" else None

    @property
    def id(self) -> str:
        """Its name: the format version and a hash of what differs from the defaults."""
        text = json.dumps(_differences(self.spec(), _DEFAULT_SPEC), sort_keys=True, separators=(",", ":"))
        return f"{FORMAT}-{hashlib.sha256(f'{FORMAT}:{text}'.encode()).hexdigest()[:24]}"

    def spec(self) -> dict[str, Any]:
        """The whole policy as JSON-able data, defaults included; what the table ``policies`` holds."""
        retry, curve = self.retry, self.retry.backoff
        return {
            "queue": self.queue,
            "priority": self.priority,
            "retry": {
                "max_attempts": retry.max_attempts,
                "backoff": {f.name: getattr(curve, f.name) for f in fields(curve)},
                "on": None if retry.on is None else list(retry.on),
                "give_up_on": list(retry.give_up_on),
            },
            **{name: getattr(self, name) for name in _PLAIN},
            # Left out where there are none, as policies were stored before there could be any.
            **({"effects": [effect.spec() for effect in self.effects]} if self.effects else {}),
            **{name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None},
            # Its name alone: a limit that changes is no other policy.
            **({"cohort": self.cohort.name} if self.cohort else {}),
            **({"history": self.history} if self.history != "full" else {}),
            **({"on_exhausted": self.on_exhausted} if self.on_exhausted != "fail" else {}),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> ExecutionPolicy:
        """The policy of a spec. Missing fields have their defaults; unknown ones, of a later release, are left out.

        Raises:
            InvalidPolicy: A value is out of its bounds.
        """
        told = spec.get("retry") or {}
        retry = Retry(
            told.get("max_attempts", DEFAULT_RETRY.max_attempts),
            Backoff(**told["backoff"]) if told.get("backoff") else None,
            on=told.get("on"),
            give_up_on=told.get("give_up_on") or (),
        )
        effects = tuple(PromisedEffect.from_spec(effect) for effect in spec.get("effects") or ())
        plain = {
            name: spec[name]
            for name in ("queue", "priority", "history", "on_exhausted", *_PLAIN, *_OPTIONAL)
            if name in spec
        }
        cohort = None if spec.get("cohort") is None else Cohort.stored(spec["cohort"])
        return cls(retry=retry, effects=effects, cohort=cohort, **plain)


_PLAIN = (
    "timeout",
    "deadline",
    "effect_class",
    "max_recoveries",
    "max_retry_afters",
    "max_snoozes",
)
_OPTIONAL = ("ordering",)
"""Fields that a spec leaves out where they are None."""
_DEFAULT_SPEC = ExecutionPolicy().spec()


def _differences(spec: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    different: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            if inner := _differences(value, default[key]):
                different[key] = inner
        elif value != default.get(key):
            different[key] = value
    return different


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLayer:
    """What one layer (call site, task, queue, app) says about the policy; what it leaves ``UNSET`` is another's to say.

    Fields are those of ``ExecutionPolicy``; durations also as ``"30s"`` or a timedelta. ``max_attempts`` changes only
    that part of the retry that the layers below give.
    """

    queue: str | Unset = UNSET
    priority: int | Unset = UNSET
    retry: Retry | Unset = UNSET
    max_attempts: int | Unset | None = UNSET
    timeout: Duration | Unset | None = UNSET
    deadline: Duration | Unset | None = UNSET
    effect_class: EffectClass | Unset = UNSET
    max_recoveries: int | Unset = UNSET
    max_retry_afters: int | Unset = UNSET
    max_snoozes: int | Unset = UNSET
    ordering: Ordering | Unset | None = UNSET
    cohort: Cohort | Unset | None = UNSET
    history: History | Unset = UNSET
    on_exhausted: OnExhausted | Unset = UNSET
    effects: Iterable[TerminalEffect] | Unset = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.effects, Unset):
            return
        listed = tuple(self.effects) if isinstance(self.effects, Iterable) else (self.effects,)
        if wrong := [each for each in listed if not isinstance(each, TerminalEffect)]:
            raise InvalidPolicy(f"effects has {_short(wrong[0])}; give a list of TerminalEffect(...)")
        object.__setattr__(self, "effects", listed)


Promise: TypeAlias = Callable[[tuple[TerminalEffect, ...]], tuple[PromisedEffect, ...]]


def resolve(*layers: PolicyLayer, promise: Promise | None = None) -> ExecutionPolicy:
    """Put layers together, the nearest first: call site, step, chain, task, queue, app. The nearest wins.

    What a side-effecting body raises ends its job, unless ``Retry(on=...)`` names it. So the layer that declares
    ``side_effecting`` starts with one attempt, where the layers below it name no errors.

    Args:
        *layers: What each says.
        promise: Resolves the effects that are left against the tasks of the application; without it there are none.

    Raises:
        InvalidPolicy: A value is out of its bounds; the message names the field and the cure. Or more than one attempt
            is asked for and the class is ``side_effecting``, without the errors that are worth another.
    """
    values: dict[str, Any] = {"retry": DEFAULT_RETRY}
    for layer in reversed(layers):
        retry = values["retry"]
        if layer.effect_class == "side_effecting" and isinstance(retry, Retry) and retry.on is None:
            values["retry"] = Retry(1, retry.backoff, give_up_on=retry.give_up_on)
        for f in fields(layer):
            value = getattr(layer, f.name)
            if value is not UNSET and f.name != "max_attempts":
                values[f.name] = value
        if layer.max_attempts is not UNSET:
            retry = values["retry"]
            if isinstance(retry, Retry):
                values["retry"] = Retry(layer.max_attempts, retry.backoff, on=retry.on, give_up_on=retry.give_up_on)
    declared = values.pop("effects", ())
    policy = ExecutionPolicy(**values, effects=promise(declared) if promise and declared else ())
    if policy.effect_class == "side_effecting" and policy.retry.max_attempts > 1 and policy.retry.on is None:
        raise InvalidPolicy(
            f"retry.max_attempts is {policy.retry.max_attempts} for a side_effecting task, and retry.on names no "
            "errors: a failure may have had its effect, so it is tried again only if you say which failures had none; "
            "give Retry(max_attempts=..., on=(...,)), leave the retry out, or raise RetryAfter in the body"
        )
    return policy
