"""Settings: which source wins, and complaints that name setting, source and cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taskq.errors import ConfigurationError
from taskq.settings import Settings, load


def _load(folder: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    if toml:
        (folder / "pyproject.toml").write_text(toml)
    else:
        (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    return load(folder=folder, environ=environ or {}, require_dsn=False, **flags)


def test_defaults(tmp_path: Path) -> None:
    settings = _load(tmp_path)
    assert (settings.schema, settings.queues, settings.concurrency) == ("taskq", (), 50)
    assert (settings.lease, settings.grace, settings.poll_interval) == (15.0, 25.0, 1.0)
    assert (settings.log_format, settings.log_level, settings.app) == ("console", "info", None)
    assert settings.sources == {}


def test_flags_win_over_the_environment_and_it_over_the_file(tmp_path: Path) -> None:
    toml = '[tool.taskq]\nschema = "file"\nconcurrency = 3\nqueues = ["a", "b"]\nlease = 12.5\n'
    environ = {"TASKQ_SCHEMA": "env", "TASKQ_CONCURRENCY": "4", "TASKQ_LOG_LEVEL": "DEBUG"}
    settings = _load(tmp_path, toml, environ, schema="flag", concurrency=None)
    assert (settings.schema, settings.concurrency, settings.queues) == ("flag", 4, ("a", "b"))
    assert (settings.lease, settings.log_level) == (12.5, "debug")
    assert settings.sources["schema"] == "the flag --schema"
    assert settings.sources["concurrency"] == "the environment variable TASKQ_CONCURRENCY"
    assert settings.sources["lease"] == f"[tool.taskq] in {tmp_path / 'pyproject.toml'}"


def test_the_nearest_pyproject_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.taskq]\nschema = "outer"\n')
    assert load(folder=inner, environ={}, require_dsn=False).schema == "outer"
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert load(folder=inner, environ={}, require_dsn=False).schema == "taskq"


@pytest.mark.parametrize(
    ("toml", "environ", "flags", "words"),
    [
        ("[tool.taskq]\nconcurency = 3\n", {}, {}, ("unknown setting 'concurency'", "pyproject.toml", "concurrency")),
        ("[tool.taskq\n", {}, {}, ("pyproject.toml is not valid TOML",)),
        ("[tool]\ntaskq = 3\n", {}, {}, ("is not a table",)),
        ("[tool.taskq]\nlease = true\n", {}, {}, ("lease", "pyproject.toml", "number of seconds from 1 to 3600")),
        ("", {"TASKQ_CONCURRENCY": "ten"}, {}, ("concurrency", "TASKQ_CONCURRENCY", "'ten'", "whole number")),
        ("", {"TASKQ_CONCURRENCY": "2.5"}, {}, ("concurrency", "whole number")),
        ("", {"TASKQ_LEASE": "nan"}, {}, ("lease", "TASKQ_LEASE", "number of seconds")),
        ("", {"TASKQ_GRACE": "-1"}, {}, ("grace", "0 to 86400")),
        ("", {"TASKQ_LOG_FORMAT": "xml"}, {}, ("log_format", "console, json")),
        ("", {"TASKQ_APP": "shop.tasks"}, {}, ("app", "module:attribute")),
        ("", {"TASKQ_QUEUES": "a, b c"}, {}, ("queues", "'b c'")),
        ("", {}, {"poll_interval": 0}, ("poll_interval", "--poll-interval", "0.01")),
        ("", {}, {"schema": "Jobs"}, ("schema", "--schema", "lower-case")),
        ("", {"TASKQ_DSN": " "}, {}, ("dsn", "TASKQ_DSN", "it is blank; give it a value, or leave it out")),
        ("", {"TASKQ_CONCURENCY": "3"}, {}, ("TASKQ_CONCURENCY", "no setting", "looks like TASKQ_CONCURRENCY")),
        ("", {"TASKQ_COLOUR": "3"}, {}, ("TASKQ_COLOUR", "no setting", "known are TASKQ_DSN, TASKQ_SCHEMA")),
        ("", {}, {"app": "shop"}, ("app", "the command line", "module:attribute")),
        ("", {}, {"queues": "a b"}, ("queues", "the flag --queue,")),
        ("", {"TASKQ_DSN": "postgresql://u:p@s@h/db"}, {}, ("dsn", "TASKQ_DSN", "percent-encode")),
    ],
)
def test_a_wrong_setting_is_explained(
    tmp_path: Path, toml: str, environ: dict[str, str], flags: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        _load(tmp_path, toml, environ, **flags)
    message = str(refused.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


def test_a_missing_dsn_is_named_with_every_way_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"TASKQ_DSN.*--dsn.*\[tool\.taskq\]"):
        load(folder=tmp_path, environ={})


def test_variables_that_are_no_settings_but_known_are_left_alone(tmp_path: Path) -> None:
    others = (
        "HOME",
        "PRINT_ORIGIN",
        "UNDER_TEST",
        "TEST_PG",
        "TEST_SERVER",
        "PORT",
        "PORT_5432_TCP_ADDR",
        "SERVICE_HOST",
    )
    _load(tmp_path, "", {f"TASKQ_{name}": "x" for name in others})


def test_settings_do_not_show_the_dsn(tmp_path: Path) -> None:
    settings = _load(tmp_path, "", {"TASKQ_DSN": "postgresql://u:hunter2@h/db"})
    assert settings.dsn.endswith("hunter2@h/db")
    assert "hunter2" not in repr(settings)


def test_an_unknown_flag_is_a_programming_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no setting 'dns'"):
        load(folder=tmp_path, environ={}, dns="x")


def test_sizes_ports_and_processes_are_read(tmp_path: Path) -> None:
    told = {"MAX_MEMORY": "1.5G", "CHILD_MAX_MEMORY": "2MiB", "HEALTH_PORT": "8080", "PROCESSES": "3"}
    settings = _load(tmp_path, environ={f"TASKQ_{name}": value for name, value in told.items()})
    assert (settings.max_memory, settings.child_max_memory) == (3 * 2**29, 2 * 2**20)
    assert (settings.health_port, settings.processes) == (8080, 3)
    assert _load(tmp_path, processes="auto").processes >= 1


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("MAX_MEMORY", "1023K", "is no size from 1M to 1024T"),
        ("MAX_MEMORY", "much", "is no size from 1M to 1024T"),
        ("HEALTH_PORT", "65536", "is not a port, a whole number from 0 to 65535"),
        ("PROCESSES", "some", "neither a whole number of processes from 0 to 1000 nor auto"),
    ],
)
def test_sizes_ports_and_processes_that_cannot_be(tmp_path: Path, name: str, wrong: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        _load(tmp_path, environ={f"TASKQ_{name}": wrong})
