"""Terminal effects from Python: what is declared, what is refused, what is promised, and what the bodies see."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from client_kit import finish
from helpers import aeventually
from psycopg.rows import dict_row
from sql import rows, violations

from taskq import EffectInfo, EffectsUnsettled, InvalidPolicy, JobContext, PolicyLayer, Ref, TaskQ, TerminalEffect
from taskq.effects import EffectOrigin
from taskq.errors import UnknownTask
from taskq.policy import ExecutionPolicy
from taskq.tasks import AsyncTask
from taskq.worker import Worker, WorkerOptions

anyio = pytest.mark.anyio
EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)


class Shop:
    """An application whose order, when it fails, is refunded."""

    def __init__(self, dsn: str | None = None, **options: Any) -> None:
        self.app = TaskQ(dsn, **options)

        async def refund(order: int, why: dict[str, Any] | None = None, fixed: int = 0) -> str:
            return f"refunded {order}"

        self.refund: AsyncTask[..., str] = self.app.task(queue="default", max_attempts=4, priority=8, deadline="1h")(
            refund
        )

    def owner(self, *effects: Any, name: str = "double", **options: Any) -> AsyncTask[..., int]:
        async def double(order: int, extra: int = 3) -> int:
            return 2 * order

        made: AsyncTask[..., int] = self.app.task(name=name, effects=effects, **options)(double)
        return made


def refunding(shop: Shop, **more: Any) -> TerminalEffect:
    payload = {"order": Ref.arg("order"), "why": Ref.error(), "fixed": 7}
    return TerminalEffect(shop.refund, on={"failed"}, payload=payload, **more)


# What is promised -----------------------------------------------------------------------------------------------------


def test_what_undoes_says_so_in_the_policy_and_other_ids_stay() -> None:
    shop = Shop()
    told, undone = (shop.owner(refunding(shop, undoes=undoes), name=f"n{undoes}").policy for undoes in (False, True))
    assert "undoes" not in told.spec()["effects"][0]
    assert undone.spec()["effects"][0]["undoes"] is True
    again = ExecutionPolicy.from_spec(json.loads(json.dumps(undone.spec())))
    assert (again.effects[0].undoes, again.id) == (True, undone.id)
    assert told.id != undone.id


def test_a_policy_holds_what_was_resolved() -> None:
    shop = Shop()
    task = shop.owner(refunding(shop))
    [promise] = task.policy.effects
    assert promise.spec() == {
        "name": "refund",
        "on": ["failed"],
        "task": "refund",
        "queue": "default",
        "priority": 8,
        "max_attempts": 4,
        "effect_class": "idempotent",
        "policy_id": shop.refund.policy.id,
        "deadline": 3600.0,
        "payload": {"order": {"arg": "order"}, "why": {"of": "error"}, "fixed": {"value": 7}},
    }
    assert json.loads(task._plain_spec.text)["has_effects"] is True
    again = ExecutionPolicy.from_spec(json.loads(json.dumps(task.policy.spec())))
    assert again == task.policy
    assert again.id == task.policy.id


def test_without_effects_nothing_about_a_policy_has_changed() -> None:
    assert "effects" not in ExecutionPolicy().spec()
    assert ExecutionPolicy().id == "1-798e1fee104b349b1678455f"
    shop = Shop()
    plain = shop.owner(name="plain")
    assert plain.policy == ExecutionPolicy()
    assert "has_effects" not in json.loads(plain._plain_spec.text)
    assert plain.policy.id != shop.owner(refunding(shop)).policy.id


def test_the_nearest_layer_wins_as_a_whole() -> None:
    shop = Shop(
        defaults=PolicyLayer(effects=[TerminalEffect("note", name="app")]),
        queues={"mail": PolicyLayer(effects=[TerminalEffect("note", name="queue")])},
    )

    @shop.app.task(effects=[])
    async def note() -> None: ...

    @shop.app.task
    async def plain() -> None: ...

    @shop.app.task(queue="mail")
    async def mailed() -> None: ...

    @shop.app.task(queue="mail", effects=[TerminalEffect(note, name="task")])
    async def own() -> None: ...

    assert [[e.name for e in t.policy.effects] for t in (note, plain, mailed, own)] == [
        [],
        ["app"],
        ["queue"],
        ["task"],
    ]
    bound = own.using(effects=[TerminalEffect(note, name="call")])
    assert [e.name for e in bound._spec.policy.effects] == ["call"]
    assert own.using(effects=[])._spec.policy.effects == ()
    # Equal options share one spec, whoever writes them.
    assert own.using(effects=[TerminalEffect(note, name="call")])._spec is bound._spec


def test_an_effect_of_a_task_further_down_is_resolved_when_it_is_needed() -> None:
    app = TaskQ()

    @app.task(effects=[TerminalEffect("later")])
    async def first() -> None: ...

    with pytest.raises(UnknownTask, match="effect later of task first"):
        _ = first.policy

    @app.task(queue="effects")
    async def later() -> None: ...

    assert [e.queue for e in first.policy.effects] == ["effects"]


def test_effects_of_effects_are_resolved_inner_first() -> None:
    from taskq.promises import policies_of

    app = TaskQ()

    @app.task
    async def c() -> None: ...

    @app.task(effects=[TerminalEffect(c)])
    async def b() -> None: ...

    @app.task(effects=[TerminalEffect(b), TerminalEffect(c)])
    async def a() -> None: ...

    assert [i for i, _ in policies_of(a.policy)] == [c.policy.id, b.policy.id, c.policy.id, a.policy.id]
    # One that was read from the database was stored after those of its effects.
    read = ExecutionPolicy.from_spec(json.loads(json.dumps(a.policy.spec())))
    assert [i for i, _ in policies_of(read)] == [a.policy.id]


def test_references_stand_for_what_the_database_fills_in() -> None:
    app = TaskQ()

    @app.task
    async def note(**all_of_it: object) -> None: ...

    refs = {k: getattr(Ref, k)() for k in ("result", "error", "status", "job_id", "generation")}

    @app.task(effects=[TerminalEffect(note, payload=refs)])
    async def owner() -> None: ...

    assert json.loads(owner.policy.effects[0].payload) == {k: {"of": k} for k in refs}


def test_a_default_of_the_owner_is_promised_with_it() -> None:
    shop = Shop()
    task = shop.owner(TerminalEffect(shop.refund, payload={"order": Ref.arg("extra"), "fixed": Ref.generation()}))
    [promise] = task.policy.effects
    assert json.loads(promise.payload) == {"order": {"arg": "extra", "default": 3}, "fixed": {"of": "generation"}}


def test_constants_are_stored_as_the_tasks_own_arguments() -> None:
    app = TaskQ()

    @app.task
    async def note(at: datetime, who: UUID, **more: int) -> None: ...

    at, who = datetime(2031, 5, 1, tzinfo=UTC), uuid4()

    @app.task(effects=[TerminalEffect(note, payload={"at": at, "who": who, "n": 3, "m": Ref.arg("any")})])
    async def owner(**rest: int) -> None: ...

    [promise] = owner.policy.effects
    template = json.loads(promise.payload)
    assert template["m"] == {"arg": "any"}
    stored = {name: entry["value"] for name, entry in template.items() if name != "m"}
    assert note.codec.decode(json.dumps(stored)) == {"at": at, "who": who, "n": 3}


# What is refused ------------------------------------------------------------------------------------------------------


def wrongly(**payload: Any) -> Any:
    return lambda shop: shop.owner(TerminalEffect(shop.refund, payload=payload))


REFUSED = [
    (wrongly(), "lacks 'order'"),
    (wrongly(order=1, colour="red"), "has no parameter 'colour'; it has: order, why, fixed"),
    (wrongly(order=Ref.arg("price")), r"Ref.arg\('price'\) is no parameter of double; it has: order, extra"),
    (wrongly(order="many"), "refund takes|order"),
    (wrongly(order=float("nan")), "cannot be stored"),
    (wrongly(order=True), "order"),
    (lambda s: s.owner(refunding(s), refunding(s)), "two effects named 'refund'"),
    (lambda s: s.owner(TerminalEffect("double")), "circle: double -> double"),
    (lambda s: s.owner(*(refunding(s, name=f"n{n}") for n in range(33))), "33 effects, the limit is 32"),
    (lambda s: s.owner("refund"), "effects has 'refund'"),
    (lambda s: s.app.task(effects=refunding(s)) and s.app.task(effects=3), "effects has 3"),
    (lambda s: TerminalEffect(print), "the task of an effect is"),  # type: ignore[arg-type]
    (lambda s: TerminalEffect("a b"), "the task of an effect"),
    (lambda s: TerminalEffect(s.refund, name="a b"), "the name of an effect"),
    (lambda s: TerminalEffect(s.refund, name="*"), "stands for all"),
    (lambda s: TerminalEffect(s.refund, name="#1"), "stands for all"),
    (lambda s: TerminalEffect(s.refund, on=()), "one or more of"),
    (lambda s: TerminalEffect(s.refund, on="running"), "on='running'"),  # type: ignore[arg-type]
    (lambda s: TerminalEffect(s.refund, on=5), "on=5"),  # type: ignore[arg-type]
    (lambda s: TerminalEffect(s.refund, undoes=1), "undoes=1"),  # type: ignore[arg-type]
    (lambda s: TerminalEffect(s.refund, payload=[1]), "a mapping"),  # type: ignore[arg-type]
    (lambda s: TerminalEffect(s.refund, payload={1: 1}), "a mapping"),  # type: ignore[dict-item]
    (lambda s: s.owner(TerminalEffect(Shop().refund, payload={"order": 1})), "another TaskQ"),
]


@pytest.mark.parametrize(("declare", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_promised_is_refused_where_it_is_declared(declare: Any, said: str) -> None:
    with pytest.raises(InvalidPolicy, match=said):
        declare(Shop())


def test_a_default_that_cannot_be_stored_cannot_be_referred_to() -> None:
    shop = Shop()

    async def owner(order: Any = ...) -> None: ...

    with pytest.raises(InvalidPolicy, match="the default of"):
        shop.app.task(effects=[TerminalEffect(shop.refund, payload={"order": Ref.arg("order")})])(owner)


def test_a_circle_by_names_is_found_when_it_is_closed() -> None:
    app = TaskQ()

    @app.task(effects=[TerminalEffect("b")])
    async def a() -> None: ...

    @app.task(effects=[TerminalEffect(a)])
    async def b() -> None: ...

    with pytest.raises(InvalidPolicy, match="circle: a -> b -> a"):
        _ = a.policy


# What happens ---------------------------------------------------------------------------------------------------------


def test_the_sync_client_stores_the_policies_and_shows_the_effects(dsn: str, conn: psycopg.Connection) -> None:
    shop = Shop(dsn)
    job = shop.owner(refunding(shop)).enqueue_sync(5)
    stored = {r["id"] for r in rows(conn, "select id from taskq.policies")}
    assert {shop.refund.policy.id, shop.app.get_task("double").policy.id} <= stored
    assert job.effects_sync() == []
    finish(conn, job.id, "failed", error='{"type": "E", "message": "m"}')
    [found] = job.effects_sync()
    assert isinstance(found, EffectInfo)
    assert (found.effect_key, found.owner_job_id, found.name, found.task) == (
        f"{job.id}:0:refund",
        job.id,
        "refund",
        "refund",
    )
    assert (found.on_status, found.status, found.settled, found.settled_how) == ("failed", "pending", False, None)
    assert found.job_id is not None
    assert found.created_at > EARLIEST
    made = shop.app.get_sync(found.job_id)
    assert made is not None
    assert made.payload == {"order": 5, "why": {"type": "E", "message": "m"}, "fixed": 7}
    assert (made.queue, made.priority, made.max_attempts) == ("default", 8, 4)
    assert made.deadline is not None
    with pytest.raises(EffectsUnsettled) as caught:
        job.retry_sync()
    assert caught.value.job_id == job.id
    assert caught.value.detail["effects"] == [found.effect_key]
    assert violations(conn) == []
    shop.app.close_sync()


def test_a_later_deploy_does_not_change_what_was_promised(dsn: str, conn: psycopg.Connection) -> None:
    before = Shop(dsn)
    job = before.owner(refunding(before)).enqueue_sync(5)
    after = Shop(dsn)
    after.owner(TerminalEffect(after.refund, name="other", payload={"order": 0})).enqueue_sync(6)
    finish(conn, job.id, "failed")
    assert [e.name for e in job.effects_sync()] == ["refund"]
    before.app.close_sync()
    after.app.close_sync()


@anyio
async def test_a_worker_carries_effects_out_and_tells_their_bodies_why(dsn: str, conn: psycopg.Connection) -> None:
    app = TaskQ(dsn)
    seen: dict[str, EffectOrigin | None] = {}

    @app.task
    async def tell(ctx: JobContext, result: int | None, error: dict[str, Any] | None) -> None:
        assert ctx.effect is not None
        seen[ctx.effect.status] = ctx.effect

    @app.task(max_attempts=1, effects=[TerminalEffect(tell, payload={"result": Ref.result(), "error": Ref.error()})])
    async def work(ctx: JobContext, good: bool) -> int:
        seen["owner"] = ctx.effect
        if not good:
            raise ValueError("bad")
        return 5

    worker = Worker(app.tasks, dsn, options=WorkerOptions(concurrency=4, lease=10))
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    jobs = [await work.enqueue(good) for good in (True, False)]

    async def settled() -> bool:
        found = [e for job in jobs for e in await job.effects()]
        return all(e.settled for e in found) and len(seen) == 3

    await aeventually(settled)
    worker.stop()
    await running
    assert seen["owner"] is None
    for job, status in zip(jobs, ("succeeded", "failed"), strict=True):
        [effect] = await job.effects()
        assert (effect.settled_how, effect.on_status) == ("succeeded", status)
        assert seen[status] == EffectOrigin(effect.effect_key, job.id, "work", status, 0)  # type: ignore[arg-type]
    assert await jobs[1].retry() == "reopened"
    assert violations(conn) == []
    await app.close()


@pytest.mark.parametrize("meta", [{}, {"effect": 3}, {"effect": {}}, {"effect": {"key": "k", "owner_job_id": 3}}])
def test_somebodys_own_data_is_no_origin(meta: dict[str, Any]) -> None:
    assert EffectOrigin.of(meta) is None
    assert JobContext(job_id=uuid4(), task="t", meta=meta).effect is None


@anyio
async def test_a_worker_publishes_the_policies_of_effects_before_their_owners(dsn: str) -> None:
    shop = Shop(dsn)
    shop.owner(refunding(shop))
    worker = Worker(shop.app.tasks, dsn, options=WorkerOptions(concurrency=1, lease=10))
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        job = conn.execute("""select taskq.enqueue('double', '{"order": 4}') as id""").fetchone()
        assert job is not None
        conn.execute("select taskq.cancel(%s)", (job["id"],))
        found = conn.execute("select has_effects from taskq.all_jobs where id = %s", (job["id"],)).fetchone()
    worker.stop()
    await running
    assert found == {"has_effects": True}
