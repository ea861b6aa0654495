"""The documentation against the code: every example runs, every table says what the code says, every name exists.

Conventions for the blocks of README.md and docs/:

- ``python``: a whole file, whose first line ``# NAME.py`` names it. It is written to the page's folder, must pass
  ``mypy --strict``, and must be run by a command further down (``python``, ``pytest``, ``taskq worker``) or imported
  by a file that is. Each ``print(...)`` is followed by ``# TEXT``, what it must print (``...`` is anything).
- ``sql``: run in the page's database, and committed.
- ``console``: each ``$ command`` is run by a shell in the page's folder, must end with 0, and prints the lines shown
  below it in that order. ``python NAME.py`` is run like that too, and its output compared. ``taskq worker`` is started
  for real and lives until ``kill $!`` or the end of the page; so is ``taskq dev``, with the page's database in the
  place of a server of its own. ``ID`` stands for the id that a file printed last; where none has, for ``KEY``, and for
  ``taskq demo`` and ``taskq doctor``, the command is compared with the CLI's commands and flags. What is not taskq's
  (make, pip, docker, apt-get, activating the environment) is looked up where it is defined.
- ``toml``: read as settings. ``text`` or nothing: shown only.

A block in any other language, and a command that nobody knows how to check, fails.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import psycopg
import pytest
import yaml
from docs_kit import ROOT, Reader, blocks

from taskq import errors
from taskq.settings import Settings
from taskq.worker import lease, service

PAGES = sorted(p for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
anyio = pytest.mark.anyio


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_two_files_of_a_page_have_a_task_of_one_name(page: Path) -> None:
    """Their workers run side by side, and either would take the other's jobs."""
    names: dict[str, set[str]] = {}
    for file, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.DOTALL):
        for name in re.findall(r"^@\w+(?:\.\w+)*\.task\b.*?^(?:async )?def (\w+)", text, re.DOTALL | re.MULTILINE):
            names.setdefault(name, set()).add(file)
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_of_a_page_is_run_or_checked(page: Path, dsn: str, tmp_path: Path) -> None:
    reader = Reader(dsn, tmp_path)
    try:
        for block in blocks(page):
            reader.read(block)
    finally:
        reader.close()
        print("\n".join(reader.told))
    assert len(reader.told) == len(blocks(page))
    assert reader.unused_files() == []
    reader.check_types()
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select * from taskq.check_invariants('all')").fetchall() == []


def tools_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_docs", ROOT / "tools/docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_sections_say_what_the_code_says(dsn: str) -> None:
    tool = tools_docs()
    made = tool.sections(dsn)
    used: set[str] = set()
    for page in tool.PAGES:
        text = text_of(page)
        used |= {found[1] for found in tool.SECTION.findall(text)}
        assert tool.rendered(text, made) == text, f"{page} is out of date; run: python tools/docs.py"
    assert used == set(made), "every generated section stands on some page"


def test_links_lead_somewhere() -> None:
    missing = []
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            target, _, anchor = link.partition("#")
            if target.startswith("http"):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                missing.append(f"{page.name}: {link}")
            elif anchor and path.suffix == ".md":
                heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                if anchor not in slugs:
                    missing.append(f"{page.name}: {link} (headings: {sorted(slugs)})")
    assert missing == []


def test_the_tests_that_the_pages_name_exist() -> None:
    named = {n for p in PAGES for n in re.findall(r"`((?:tests|system_tests)/[\w/.]+\.py(?:::\w+)?)`", p.read_text())}
    assert len(named) > 10
    assert [name for name in sorted(named) if not _defined(*name.split("::"))] == []


def _defined(path: str, function: str = "") -> bool:
    if not (ROOT / path).is_file():
        return False
    return not function or f"def {function}(" in text_of(path)


def test_every_guarantee_of_the_readme_names_a_test() -> None:
    table = text_of("README.md").split("## What it guarantees")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8
    assert [row for row in rows if not re.search(r"`(tests|system_tests)/[\w/.]+::\w+`", row)] == []


def section_of(page: str, heading: str) -> str:
    return text_of(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


SHOWN = r"`(tests|system_tests)/[\w/.]+\.py::\w+`"


def test_every_fault_of_the_guarantees_names_its_test() -> None:
    table = section_of("docs/guarantees.md", "From fault to outcome")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 50
    assert [row for row in rows if not re.search(rf"\| {SHOWN} \|$", row)] == []


def test_what_is_not_guaranteed_names_its_test_or_says_that_there_is_none() -> None:
    lines = section_of("docs/guarantees.md", "What is not guaranteed").split("\n- ")[1:]
    assert len(lines) > 10
    assert [line for line in lines if not re.search(rf"\((not tested|{SHOWN})\)\.\s*$", line)] == []


def test_every_violation_that_can_be_reported_is_explained() -> None:
    source = "".join(p.read_text() for p in ROOT.glob("migrations/*.sql"))
    codes = set(re.findall(r"(?:select|\() ?[1-9], '(\w+)'", source))
    assert len(codes) > 8
    explained = set(
        re.findall(r"^\| `(\w+)` \|", text_of("docs/laws.md").split("## What verify reports")[1], re.MULTILINE)
    )
    assert explained == codes


def test_every_sqlstate_that_the_schema_raises_has_its_exception() -> None:
    source = "".join(p.read_text() for p in ROOT.glob("migrations/*.sql"))
    raised = set(re.findall(r"'(WF\d{3})'", source))
    known = set(errors._BY_SQLSTATE)
    assert raised == known


def test_exit_codes_are_those_of_the_worker() -> None:
    operations = text_of("docs/operations.md")
    codes = {
        service.EXIT_OK,
        service.EXIT_NOT_FLUSHED,
        lease.EXIT_LEASE_LOST,
        service.EXIT_STUCK,
        service.EXIT_RECYCLED,
    }
    assert {int(c) for c in re.findall(r"^\| `(\d+)` \|", operations, re.MULTILINE)} >= codes


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    readme = text_of("README.md")
    assert project["requires-python"] == ">=3.11,<3.15"
    assert "Python 3.11 to 3.13" in readme
    assert "PostgreSQL 15 to 18" in readme
    assert f"## [{project['version'].removesuffix('.dev0')}]" in text_of("CHANGELOG.md")


def test_the_compose_file_names_what_exists() -> None:
    compose = yaml.safe_load(text_of("docker-compose.yml"))
    services = compose["services"]
    assert services["postgres"]["image"] == "postgres:18"
    settings = {f"TASKQ_{name.upper()}" for name in Settings.__slots__}
    tool = tools_docs()
    known = tool.commands()
    workers = 0
    for name, service_ in services.items():
        environment = service_.get("environment", {})
        assert {k for k in environment if k.startswith("TASKQ_")} <= settings, name
        if command := service_.get("command"):
            words = command if isinstance(command, list) else command.split()
            assert words[0] == "taskq"
            said = " ".join(w for w in words if not w.startswith("-") and ":" not in w)
            assert f"| `{said}` |" in known, command
            workers += words[1] == "worker" and service_.get("deploy", {}).get("replicas", 1)
        for other in service_.get("depends_on", {}):
            assert other in services
    assert workers == 2
    assert compose["x-taskq"]["build"]["dockerfile_inline"].count("constraints.txt")


@anyio
async def test_the_example_of_a_shop_runs(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import asyncpg

    from taskq.worker import Worker, WorkerOptions

    monkeypatch.setenv("TASKQ_DSN", dsn)
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [m for m in sys.modules if m == "examples" or m.startswith("examples.")]:
        monkeypatch.delitem(sys.modules, name)
    from examples import shop

    worker = Worker(shop.app.tasks, dsn, options=WorkerOptions(lease=5, grace=1))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(20):
            await worker.ready.wait()
            conn = await asyncpg.connect(dsn)
            await conn.execute("create table orders (id bigint generated always as identity primary key, email text)")
            order = await shop.place_order(conn, "ann@example.org")
            again = await shop.send_receipt.using(idempotency_key=f"receipt-{order}").enqueue(order, "ann@example.org")
            assert not again.inserted
            assert await again.result(timeout="10s") == f"order {order} to ann@example.org"
            assert await (await shop.total.enqueue([1, 2, 3])).result(timeout="10s") == 6
            waiting = await shop.reserve.enqueue(order, 0)
            while not (info := await waiting.info()).retry_afters:
                await asyncio.sleep(0.02)
            assert (info.status, info.attempt) == ("pending", 0)
            assert await (await shop.reserve.enqueue(order, 2)).result(timeout="10s") == 1
            await conn.close()
    finally:
        worker.stop()
        await running
        await shop.app.close()
