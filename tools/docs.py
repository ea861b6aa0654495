"""Write the generated sections of the documentation from the code and the schema that they describe.

A section stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. Run ``python tools/docs.py`` after a change
of what it shows; ``tests/test_docs.py`` compares. The schema's own comments are the source of its tables, so a
throwaway PostgreSQL is started to read them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psycopg
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from doc_events import MEANING, events
from doc_python import (
    columns,
    public_errors,
    python_app,
    python_bodies,
    python_jobs,
    python_policy,
    python_tasks,
    python_worker,
)
from doc_text import code, first_sentence, table

import taskq
from taskq import errors
from taskq.cli import COMMANDS, build
from taskq.settings import Settings
from taskq.telemetry.events import events_of
from taskq.testing import Point
from taskq.transitions import TRANSITIONS, Transition

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/laws.md", "docs/python.md", "docs/reference.md", "docs/how-to/testing.md")
SECTION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def transitions() -> str:
    """The life of a job, a row a transition."""
    return table(
        ("from", "to", "who", "when", "function", "ledger outcome", "counter", "refused with"),
        (
            (
                code(t.source) if t.source else "(new)",
                code(t.target),
                t.by,
                t.when,
                code(t.function),
                code(t.outcome),
                code(t.counter),
                guards(t),
            )
            for t in TRANSITIONS
        ),
    )


def guards(t: Transition) -> str:
    """The SQLSTATEs with which the database refuses this very transition where its conditions do not hold."""
    if t.source is None:
        enqueue = "`WF006` `WF007` `WF008` `WF009` `WF014`"
        return f"`WF003` {enqueue}" if t.function else "`WF003`"
    if t.target == "running":
        return "`WF001` `WF002` `WF027`"
    if t.function == "resolve":
        return "`WF009` `WF011` `WF012` `WF016`"
    if t.function == "answer_reconcile":
        return "`WF009` `WF011` `WF012` `WF016` `WF017`"
    if t.function == "retry":
        return "`WF003` `WF007` `WF011` `WF012` `WF020`"
    return "-"


def sqlstates() -> str:
    """Every SQLSTATE of class WF with its exception."""
    rows = errors._BY_SQLSTATE
    return table(
        ("SQLSTATE", "exception", "meaning"),
        ((code(s), code(f"taskq.errors.{rows[s].__name__}"), first_sentence(rows[s].__doc__)) for s in sorted(rows)),
    )


def settings() -> str:
    """The settings with their defaults; each one's docstring stands below it in the source."""
    source = inspect.getsource(Settings)
    defaults = Settings()
    rows = []
    for f in fields(Settings):
        if f.name == "sources":
            continue
        found = re.search(rf'^    {f.name}: [^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
        assert found, f.name
        value = getattr(defaults, f.name)
        shown = "none" if value in ("", None, ()) else ", ".join(value) if isinstance(value, tuple) else value
        about = " ".join(found[1].split()).replace("``", "`")
        rows.append(
            (code(f.name), code(f"TASKQ_{f.name.upper()}"), f"{shown:g}" if isinstance(shown, float) else shown, about)
        )
    return table(("setting", "environment", "default", "meaning"), rows)


def api() -> str:
    """The public names of the package."""
    rows = []
    for name in taskq.__all__:
        thing = getattr(taskq, name)
        path = Path(inspect.getsourcefile(thing) or "").resolve()
        where = f"taskq/{path.relative_to(Path(taskq.__file__ or '').resolve().parent)}"
        rows.append((f"[`taskq.{name}`](../{where})", first_sentence(thing.__doc__)))
    return table(("name", "what it is"), rows)


def commands() -> str:
    """Every command of the CLI with its arguments and options."""
    rows: list[tuple[str, str, str]] = []

    def walk(command: Any, path: str) -> None:
        inner = getattr(command, "commands", None)
        if inner:
            for name, found in inner.items():
                walk(found, f"{path} {name}")
            return
        takes = []
        for param in command.params:
            if param.param_type_name == "argument":
                takes.append(f"`{param.metavar or param.name.upper()}`")
            elif "--help" not in param.opts:
                takes.append(f"`{param.opts[0]}`")
        rows.append((code(path), first_sentence(command.help), " ".join(takes) or "-"))

    for name in COMMANDS:
        root: Any = typer.main.get_command(build([name]))
        walk(root.commands[name], f"taskq {name}")
    return table(("command", "what it does", "takes"), rows)


def fault_points() -> str:
    """The points at which a test may stop a worker; each one's docstring stands below it in the source."""
    found = re.findall(r'^    [A-Z_]+ = "(\w+)"\n    """(.*?)"""', inspect.getsource(Point), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == [str(point) for point in Point], "every point explains itself"
    return table(
        ("point", "what stands on either side"),
        ((code(f"Point.{name.upper()}"), " ".join(about.split()).replace("``", "`")) for name, about in found),
    )


def log_events() -> str:
    """Every log event with its level and fields."""
    found = events(Path(taskq.__file__ or "").resolve().parent)
    if missing := sorted(set(found) ^ set(MEANING)):
        raise RuntimeError(f"tools/doc_events.py and the code differ about {', '.join(missing)}; put MEANING right")
    rows = (
        (code(name), level, " ".join(map(code, fields)) or "-", MEANING[name])
        for name, (level, fields) in found.items()
    )
    return table(("event", "level", "fields", "meaning"), rows)


def job_events() -> str:
    """The event of each transition that a worker or the leader carries out."""
    found = events(Path(taskq.__file__ or "").resolve().parent)
    return table(
        ("from", "to", "who", "when", "event", "level"),
        (
            (
                code(t.source),
                code(t.target),
                t.by,
                t.when,
                " ".join(map(code, events_of(t))),
                " ".join(found[name][0] for name in events_of(t)),
            )
            for t in TRANSITIONS
            if events_of(t)
        ),
    )


CALLED_BY_PEOPLE = (
    "enqueue",
    "enqueue_many",
    "cancel",
    "retry",
    "resolve",
    "pause_queue",
    "resume_queue",
    "drain",
    "steer_many",
    "check_invariants",
    "ensure_partitions",
)


def functions(conn: psycopg.Connection[Any]) -> str:
    """The SQL functions, those that people call first."""
    rows = conn.execute(
        "select p.proname, pg_get_function_arguments(p.oid), obj_description(p.oid) from pg_proc p "
        "where p.pronamespace = 'taskq'::regnamespace and p.prorettype <> 'trigger'::regtype order by p.proname"
    ).fetchall()
    found = {name: (arguments, about) for name, arguments, about in rows}
    mine = table(
        ("function", "arguments", "what it does"),
        ((f"`taskq.{n}`", f"`{_plainly(found[n][0])}`", found[n][1]) for n in CALLED_BY_PEOPLE),
    )
    others = table(
        ("function", "what it does"),
        ((f"`taskq.{n}`", about) for n, (_, about) in found.items() if n not in CALLED_BY_PEOPLE),
    )
    return f"{mine}\nCalled by clients, workers and the leader:\n\n{others}"


def _plainly(arguments: str) -> str:
    text = re.sub(r"::[a-z ]+(\[\])?", "", arguments).replace("timestamp with time zone", "timestamptz")
    return text.replace("DEFAULT NULL", "default null").replace("DEFAULT", "default")


def relations(conn: psycopg.Connection[Any]) -> str:
    """The tables and views."""
    rows = conn.execute(
        "select c.relname, case c.relkind when 'v' then 'view' else 'table' end, obj_description(c.oid, 'pg_class') "
        "from pg_class c where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p', 'v') "
        "and not c.relispartition order by c.relkind = 'v', c.relname"
    ).fetchall()
    return table(("name", "kind", "what it holds"), ((f"`taskq.{n}`", kind, about) for n, kind, about in rows))


def job_columns(conn: psycopg.Connection[Any]) -> str:
    """Handles of jobs, with the fields of ``JobInfo`` as the columns of ``jobs`` and ``history`` explain them."""
    rows = conn.execute(
        "select attname::text, col_description(attrelid, attnum) from pg_attribute where attnum > 0 and "
        "attrelid in ('taskq.jobs'::regclass, 'taskq.history'::regclass) and col_description(attrelid, attnum) <> '' "
        "order by attrelid = 'taskq.history'::regclass, attnum"
    ).fetchall()
    return python_jobs(columns(rows))


def sections(dsn: str) -> dict[str, str]:
    """Every generated section by name, from the code and a database with the schema."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        from_schema: dict[str, Callable[[psycopg.Connection[Any]], str]] = {
            "functions": functions,
            "relations": relations,
            "python_jobs": job_columns,
        }
        made = {name: make(conn) for name, make in from_schema.items()}
    from_code = (transitions, sqlstates, settings, api, commands, fault_points, job_events, log_events)
    of_python = (python_app, python_tasks, python_policy, python_bodies, python_worker, public_errors)
    return made | {make.__name__: make() for make in (*from_code, *of_python)}


def rendered(text: str, made: dict[str, str]) -> str:
    """A page with its generated sections filled in."""
    return SECTION.sub(lambda m: f"{m[1]}\n{made[m[2]]}\n{m[3]}", text)


def main() -> None:
    """Write every page that differs."""
    sys.path.insert(0, str(ROOT / "tests"))
    from servers import serve

    from taskq import migrate

    with serve() as server:
        migrate.up(server.dsn())
        made = sections(server.dsn())
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = rendered(old, made)
        if new != old:
            path.write_text(new)
            print(f"{page}: written")


if __name__ == "__main__":
    main()
