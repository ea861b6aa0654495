"""The one loader of settings: flags, then ``TASKQ_*`` in the environment, then ``[tool.taskq]`` in pyproject.toml.

The CLI, the worker and applications all call ``load``. A setting is read once, checked where it is read, and every
complaint names the setting, where its value came from and the cure. Nothing here connects to anything.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from taskq.db.dsn import parse_dsn
from taskq.errors import ConfigurationError

__all__ = ["Settings", "check_schema", "load"]

_MISSING_DSN = (
    "no database is named: the setting dsn is missing; set TASKQ_DSN, pass --dsn, or put dsn under [tool.taskq] in "
    "pyproject.toml, for example postgresql://user@localhost:5432/app"
)

_GIVEN_AS: Mapping[str, str] = MappingProxyType({"app": "the command line", "queues": "the flag --queue"})
"""Settings that the command line names otherwise than ``--name``."""
# Of the installation, of the tests, and what an orchestrator sets beside a service that is called taskq.
_OTHER_VARIABLES = re.compile(
    r"TASKQ_(HOME|FAULT|PRINT_ORIGIN|SUPERVISOR|UNDER_TEST|TEST_\w+|PORT|PORT_\d+_\w+|SERVICE_HOST|SERVICE_PORT(_\w+)?)"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, resolved. Times are in seconds."""

    dsn: str = field(default="", repr=False)
    """Where the database is; empty only if ``load(require_dsn=False)`` found none. Never shown by ``repr``."""
    schema: str = "taskq"
    """The schema that holds everything of taskq."""
    app: str | None = None
    """The application object, as ``module:attribute``."""
    queues: tuple[str, ...] = ()
    """Queues that a worker serves; empty means those of its tasks."""
    concurrency: int = 50
    """Bodies that a worker runs at once."""
    lease: float = 15.0
    """Seconds for which a worker's claims live without renewal."""
    grace: float = 25.0
    """Seconds that running bodies get to finish when a worker is asked to stop."""
    poll_interval: float = 1.0
    """Seconds between looks for work when no notification comes."""
    processes: int = 0
    """Worker processes under a supervisor, or ``auto`` for one to each core; 0: one worker, in the process itself."""
    max_jobs: int | None = None
    """A worker process is replaced after about so many bodies; never by default."""
    max_memory: int | None = None
    """A worker process is replaced once it has about so many resident bytes (``512M``, ``2G``); never by default."""
    ends_commit: str = "sync"
    """``sync``, or ``async``: what only ends jobs is committed without waiting for the disk."""
    child_max_jobs: int = 1000
    """A child process for tasks with ``process=True`` is replaced after so many bodies."""
    child_max_memory: int | None = None
    """A child process is replaced once it has so many resident bytes after a body; never by default."""
    health_port: int | None = None
    """Port at which a worker answers ``/live`` and ``/ready``; none by default, 0 for a free one."""
    health_host: str = "127.0.0.1"
    """Address for ``health_port``; ``0.0.0.0`` lets other machines ask."""
    log_format: str = "console"
    """``console`` for people or ``json`` for programs."""
    log_level: str = "info"
    """``debug``, ``info``, ``warning``, ``error`` or ``critical``."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    """For each setting that is not a default: where its value came from."""


def load(
    *,
    require_dsn: bool = True,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    **flags: Any,
) -> Settings:
    """Resolve all settings; the nearest wins: flag, environment, ``[tool.taskq]``, default.

    Args:
        require_dsn: raise when no DSN is found anywhere.
        environ: the environment to read; the process's own by default.
        folder: where the search for pyproject.toml begins, upwards; the current folder by default.
        **flags: settings by name, each a typed value or text; ``None`` means not given.

    Raises:
        ConfigurationError: a value is wrong, a key or an environment variable ``TASKQ_...`` is unknown, or the DSN is
            missing.
    """
    names = list(_PARSERS)
    if unknown := sorted(set(flags) - set(names)):
        raise TypeError(f"load() has no setting {unknown[0]!r}; it knows {', '.join(names)}")
    environ = os.environ if environ is None else environ
    _check_environ(environ)
    from_file, path = _read_pyproject(folder or Path.cwd())
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, parse in _PARSERS.items():
        variable = f"TASKQ_{name.upper()}"
        flag = flags.get(name)
        if flag is not None:
            raw, source = flag, _GIVEN_AS.get(name, f"the flag --{name.replace('_', '-')}")
        elif environ.get(variable):
            raw, source = environ[variable], f"the environment variable {variable}"
        elif name in from_file:
            raw, source = from_file[name], f"[tool.taskq] in {path}"
        else:
            continue
        try:
            values[name] = parse(raw)
        except ConfigurationError as exc:
            raise ConfigurationError(f"the setting {name}, from {source}, is wrong: {exc}") from None
        sources[name] = source
    if require_dsn and "dsn" not in values:
        raise ConfigurationError(_MISSING_DSN)
    return Settings(**values, sources=MappingProxyType(sources))


def _check_environ(environ: Mapping[str, str]) -> None:
    """Refuse a variable of ours that sets nothing: misspelt, it would be ignored without a word."""
    known = [f"TASKQ_{name.upper()}" for name in _PARSERS]
    for name in sorted(environ):
        if name.startswith("TASKQ_") and name not in known and not _OTHER_VARIABLES.fullmatch(name):
            near = difflib.get_close_matches(name.removeprefix("TASKQ_"), [n.upper() for n in _PARSERS], n=1)
            cure = f"it looks like TASKQ_{near[0]}" if near else f"known are {', '.join(known)}"
            raise ConfigurationError(
                f"the environment variable {name} is no setting, so it would do nothing: {cure}; correct or unset it"
            )


def check_schema(name: str) -> str:
    """Return ``name`` if it can be the schema's: a lower-case identifier of at most 40 characters, not ``pg_...``.

    Raises:
        ConfigurationError: it cannot; roles and indexes are named after it, so quoting would not help.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"the schema's name is of type {type(name).__name__}; give a text")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", name) or name.startswith("pg_") or name == "information_schema":
        raise ConfigurationError(
            f"{name[:60]!r} cannot be the schema's name; take lower-case letters, digits and _, beginning with a "
            "letter, at most 40 characters, not beginning with pg_"
        )
    return name


def _read_pyproject(start: Path) -> tuple[dict[str, Any], Path | None]:
    for folder in (start, *start.resolve().parents):
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("taskq", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigurationError(f"{path} is not valid TOML ({exc}); correct it") from None
        if not isinstance(table, dict):
            raise ConfigurationError(f"taskq under [tool] in {path} is not a table; write [tool.taskq]")
        for key in table:
            if key not in _PARSERS:
                raise ConfigurationError(
                    f"[tool.taskq] in {path} has an unknown setting {key!r}; remove it, or use one of "
                    f"{', '.join(_PARSERS)}"
                )
        return table, path
    return {}, None


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ConfigurationError("it must be text")
    if not raw.strip():
        raise ConfigurationError("it is blank; give it a value, or leave it out")
    return raw.strip()


def _dsn(raw: Any) -> str:
    text = _text(raw)
    parse_dsn(text)
    return text


def _app(raw: Any) -> str:
    text = _text(raw)
    if not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise ConfigurationError(f"{text!r} is not of the form module:attribute, such as shop.tasks:app")
    return text


def _queues(raw: Any) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = raw.split(",")
    if not isinstance(raw, (list, tuple)) or not all(isinstance(q, str) for q in raw):
        raise ConfigurationError('it must be a list of names: "mail,default", or ["mail", "default"] in TOML')
    names = tuple(dict.fromkeys(q.strip() for q in raw))
    for name in names:
        if not re.fullmatch(r"[!-~]{1,128}", name):
            raise ConfigurationError(
                f"{name!r} cannot name a queue; take 1 to 128 printable ASCII characters, no space"
            )
    if not names:
        raise ConfigurationError("it names no queue; give at least one")
    return names


def _number(low: float, high: float, unit: str, *, whole: bool = False) -> Callable[[Any], Any]:
    def parse(raw: Any) -> float | int:
        kind: type[float] | type[int] = int if whole else float
        try:
            value = kind(raw if isinstance(raw, str) else str(raw))
        except ValueError:
            value = math.nan
        if isinstance(raw, bool) or not low <= value <= high:
            noun = "whole number" if whole else "number"
            raise ConfigurationError(f"{raw!r} is not a {noun} of {unit} from {low:g} to {high:g}")
        return value

    return parse


def _port(raw: Any) -> int:
    try:
        port: int = _number(0, 65_535, "", whole=True)(raw)
    except ConfigurationError:
        raise ConfigurationError(f"{raw!r} is not a port, a whole number from 0 to 65535") from None
    return port


def _processes(raw: Any) -> int:
    if isinstance(raw, str) and raw.strip().lower() == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        count: int = _number(0, 1000, "", whole=True)(raw)
    except ConfigurationError:
        raise ConfigurationError(f"{raw!r} is neither a whole number of processes from 0 to 1000 nor auto") from None
    return count


def _size(raw: Any) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(raw).strip().lower())
    size = 0 if found is None or isinstance(raw, bool) else float(found[1]) * 1024 ** " kmgt".index(found[2] or " ")
    if not 1024**2 <= size <= 1024**5:
        raise ConfigurationError(f"{raw!r} is no size from 1M to 1024T; write bytes, or a number with K, M, G or T")
    return int(size)


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(raw: Any) -> str:
        text = _text(raw).lower()
        if text not in allowed:
            raise ConfigurationError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "dsn": _dsn,
    "schema": lambda raw: check_schema(_text(raw)),
    "app": _app,
    "queues": _queues,
    "concurrency": _number(1, 10_000, "bodies", whole=True),
    "lease": _number(1, 3600, "seconds"),
    "grace": _number(0, 86_400, "seconds"),
    "poll_interval": _number(0.01, 60, "seconds"),
    "processes": _processes,
    "max_jobs": _number(1, 1e12, "bodies", whole=True),
    "max_memory": _size,
    "ends_commit": _choice("sync", "async"),
    "child_max_jobs": _number(1, 1e12, "bodies", whole=True),
    "child_max_memory": _size,
    "health_port": _port,
    "health_host": _text,
    "log_format": _choice("console", "json"),
    "log_level": _choice("debug", "info", "warning", "error", "critical"),
}
assert {f.name for f in fields(Settings)} == {*_PARSERS, "sources"}
