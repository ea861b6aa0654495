"""What the wiring of an emit comes to, which are refused before any row is written, and emits as workers run them."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_kit import wires
from started_kit import working
from wiring_kit import faults, source, task
from worker_kit import BOUND

from taskq import Outcome, Page, Retry, RunFailed, Tally, TaskQ, TerminalEffect, collect, tally
from taskq.errors import WiringError
from taskq.testing import drain
from taskq.workflow import Plan, Workflow
from taskq.workflow.show import mermaid, text


@pytest.fixture
def app(nowhere: TaskQ) -> TaskQ:
    return nowhere


def files(app: TaskQ, returns: Any = Page[str, int], takes: Any = int | None, **more: Any) -> Any:
    return task(app, "files", returns, after=takes, **more)


def count(app: TaskQ, **more: Any) -> Any:
    return task(app, "count", int, path=str, **more)


def child_of(plan: Plan, name: str) -> Plan:
    [found] = [node["child"] for node in plan.spec["nodes"] if node["name"] == name]
    return plan.children[found]


# What it comes to -----------------------------------------------------------------------------------------------------


def test_an_emit_is_a_node_with_a_plan_for_its_items_and_its_pages(app: TaskQ) -> None:
    of, pages, root, end = count(app, root=str), files(app, root=str), source(app, str, "root"), task(
        app, "end", None, ns=list[int]
    )  # fmt: skip

    def flow(lang: str) -> None:
        listed = pages.node(priority=2, queue="slow").pages(root.step())
        end.step(of.node("words", at_once=5, ahead=7, at_most=9).emit(listed, lang))

    plan = app.workflow(flow).plan
    assert wires(dict(plan.spec)) == {("root", "words", "fail"), ("words", "end", "fail")}
    [_, over, last] = plan.spec["nodes"]
    assert over["args"] == {
        "each": {"object": {"root": {"input": "lang", "path": []}}},
        "source": {"object": {"root": {"node": 0, "path": []}}},
    }
    assert (over["job"]["task"], last["args"]) == ("flow:await", {"ns": {"results": 1, "path": []}})
    child = child_of(plan, "words")
    assert child.spec["map"] == {"item": "path", "most": 9, "at_once": 5, "pages": {"item": "after", "ahead": 7}}
    assert (child.workflow, child.spec["parameters"]) == ("flow:words", ["each", "source"])
    [each, page] = child.spec["nodes"]
    assert each["args"] == {name: {"input": "each", "path": [name]} for name in ("path", "root")}
    assert page["args"] == {"after": {"value": None}, "root": {"input": "source", "path": ["root"]}}
    assert (page["name"], page["job"]["task"], page["job"]["priority"]) == ("words.page", "files", 2)
    assert (child.size, plan.size, plan.depth) == (6, 9, 1)
    assert "each count of pages of files" in text(plan)
    assert "for each path, 5 at a time, at most 9, a page while at most 7 are open" in text(plan)
    assert '"words<br/>each count of pages of files"' in mermaid(plan)


def test_as_many_may_be_open_as_have_jobs_where_nothing_is_said(app: TaskQ) -> None:
    of, pages = count(app), files(app)

    @app.workflow
    def inner(path: str, times: int = 3) -> int:
        made: int = of.step(path)
        return made

    def flow() -> list[int]:
        made: list[int] = inner.emit(pages.node("list").pages())
        return made

    plan = app.workflow(flow).plan
    child = child_of(plan, "inner")
    assert child.spec["map"] == {
        "item": "path",
        "most": 100_000,
        "at_once": 1000,
        "pages": {"item": "after", "ahead": 1000},
    }
    assert plan.spec["nodes"][0]["args"]["each"] == {"object": {"times": {"value": 3}}}
    assert [node["name"] for node in child.spec["nodes"]] == ["inner", "list"]
    assert child.spec["nodes"][0]["child"] == inner.plan.hash


def test_an_emit_that_is_collected_goes_on_after_failures(app: TaskQ) -> None:
    of, pages = count(app), files(app)
    end, told = task(app, "end", None, x=list[Outcome[int]]), task(app, "told", None, x=Tally)

    def flow() -> None:
        end.step(collect(of.emit(pages.pages())))
        told.step(tally(of.emit(pages.pages())))

    plan = app.workflow(flow).plan
    assert [child_of(plan, name).spec["on_failure"] for name in ("count", "count-2")] == ["finish", "finish"]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "takes", "says"),
    [
        (list[str], int | None, "the source files returns list[str]; a source returns Page[item, cursor]"),
        (Page[int, int], int | None, "path takes str, and the pages of files have items of int"),
        (Page[str, str], int | None, "after of the source files takes int | None, and the cursor of its pages is str"),
        (Page[str, int], int, "after of the source files takes int, and the cursor for the first page is None"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(app: TaskQ, returns: Any, takes: Any, says: str) -> None:
    of, pages = count(app), files(app, returns, takes)
    assert faults(app, lambda: of.emit(pages.pages())) == [f"node count: {says}"]


def test_what_is_wrong_with_an_emit_is_told(app: TaskQ) -> None:
    of, pages, bare = count(app), files(app, n=int), task(app, "bare", Page[str, int])
    undo = TerminalEffect(task(app, "undo", None))
    effects: list[Any] = [
        (lambda: of.emit([1]), "node count: emit() was given [1]; give it the pages of a source: source.pages(...)"),
        (lambda: of.emit(bare.pages()), "node count: the source bare takes no cursor; its first parameter is what"),
        (lambda: of.emit(pages.pages()), "node count: the source files: "),
        (lambda: of.emit(pages.pages("x")), "node count, its source files: "),
        (lambda: of.node(ahead=-1).emit(pages.pages(1)), "node count: ahead is -1; give a number of items from 0 to"),
        (lambda: of.node(ahead=1).map(["a"]), "ahead is a bound of emit(), and map() has its whole list"),
        (lambda: of.node(ahead=1).step("a"), "at_once, at_most and ahead are the bounds of a map or an emit, and"),
        (lambda: of.emit(pages.node(at_once=1).pages(1)), "pages of files: a source takes a name and the options"),
        (lambda: of.emit(pages.node(compensate=undo).pages(1)), "pages of files: a source takes a name and the"),
        (lambda: of.emit(pages.node("count").pages(1)), "node count: its pages are called count, too"),
        (lambda: of.emit(files(TaskQ()).pages()), "node count: the source files belongs to another TaskQ"),
    ]
    for n, (wrong, says) in enumerate(effects):
        [fault, *_] = faults(app, wrong, name=f"w{n}")
        assert fault.startswith(says), fault


def test_a_source_that_says_nothing_of_its_pages_is_wired_as_it_is(app: TaskQ) -> None:
    of, pages = count(app), files(app, returns=Any)

    def flow() -> Any:
        return tally(of.emit(pages.pages()))

    assert len(app.workflow(flow).plan.children) == 1


def test_pages_outside_of_a_workflow_are_for_bodies_and_have_no_bounds_of_their_own(app: TaskQ) -> None:
    of = files(app)
    assert (of.pages().task, of.node("list").pages().name) == (of, "list")
    with pytest.raises(WiringError, match="pages of files: a source takes a name and the options of its jobs"):
        of.node(at_once=2).pages()


# As workers run them --------------------------------------------------------------------------------------------------


def listing(app: TaskQ, **bounds: Any) -> Workflow[[int, int], int]:
    """The sum of twice each number below n, by pages of so many; a run of its own for each."""

    @app.task
    async def numbers(after: int | None, n: int, size: int) -> Page[int, int]:
        begin = after or 0
        end = min(begin + size, n)
        return Page(list(range(begin, end)), end if end < n else None)

    @app.task(retry=Retry(max_attempts=1))
    async def double(n: int) -> int:
        if n == 13:
            raise ValueError("no 13")
        return 2 * n

    @app.task
    async def total(told: list[int]) -> int:
        return sum(told)

    @app.workflow
    def twice(n: int) -> int:
        return double.step(n)

    @app.workflow
    def flow(n: int, size: int) -> int:
        return total.step(twice.node(**bounds).emit(numbers.pages(n, size)))

    return flow


class TestRuns:
    """Emits from their start to what takes their results."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def app(self, dsn: str) -> TaskQ:
        return TaskQ(dsn)

    async def test_workers_run_what_a_source_gives(self, app: TaskQ, dsn: str) -> None:
        flow = listing(app, ahead=2, at_once=4)
        async with app, working(app, dsn):
            run, none = await flow.start(12, 5), await flow.start(0, 5)
            assert (await run.result(timeout=BOUND), await none.result(timeout=BOUND)) == (132, 0)
            [over, _] = await run.nodes()
            assert over.child_run is not None
            nodes = await flow.handle(over.child_run).nodes()
        assert [(node.name, node.task) for node in nodes] == [(f"twice[{n}]", "twice:await") for n in range(12)] + [
            (f"twice.page[{n}]", "numbers") for n in range(3)
        ]
        assert violations(dsn) == []

    async def test_a_child_that_fails_fails_the_run_with_its_number(self, app: TaskQ, dsn: str) -> None:
        flow = listing(app)
        async with app:
            run = await flow.start(20, 7)
            await drain(app)
            with pytest.raises(RunFailed, match=r"node twice\[13\] has failed"):
                await run.result()
        assert violations(dsn) == []


def violations(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        return conn.execute("select code, detail from taskq.check_invariants('all')").fetchall()
