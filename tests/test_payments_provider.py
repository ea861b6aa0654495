"""The payment provider of the demonstration and of the system tests: keys, closed keys, faults, and its journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from helpers import aeventually

from taskq.demo.payments.book import Book
from taskq.demo.payments.client import Declined, NoAnswer, NotSent, ProviderClient, Refused, Told
from taskq.demo.payments.faults import FaultPlan
from taskq.demo.payments.journal import Entry, Journal, Ledger
from taskq.demo.payments.provider import Provider, running_provider
from taskq.errors import TaskQError

pytestmark = pytest.mark.anyio
HANG = 1.2


class Bench:
    """A provider in this process, a client, and the journal."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._stack = AsyncExitStack()

    async def start(
        self, told: dict[str, list[str]] | None = None, *, honours_keys: bool = True, timeout: float = 10
    ) -> ProviderClient:
        self.address = await self._stack.enter_async_context(_served(self.file, honours_keys, told or {}))
        return ProviderClient(self.address, timeout)

    def events(self, key: str = "k") -> list[str]:
        return [entry.event for entry in Journal.read(self.file) if entry.key == key]


@asynccontextmanager
async def _served(file: Path, honours_keys: bool, told: dict[str, list[str]]) -> AsyncIterator[str]:
    book = Book(file, honours_keys=honours_keys)
    server = await Provider(book, FaultPlan(told=told, hang=HANG)).serve()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        book.close()


@pytest.fixture
async def bench(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "journal")
    async with made._stack:
        yield made


async def test_a_repeated_key_is_answered_with_what_came_of_the_first(bench: Bench) -> None:
    client = await bench.start()
    first = await client.charge("k", "p1", 100)
    assert await client.charge("k", "p1", 100) == first == Told("charged", "p1", 100)
    assert bench.events() == ["asked", "charged", "asked", "repeated"]
    with pytest.raises(Refused, match="key_reused"):
        await client.charge("k", "p1", 101)
    with pytest.raises(Refused, match="key_reused"):
        await client.charge("k", "p2", 100)
    ledger = Ledger.read(bench.file)
    assert (ledger.charges, ledger.calls, ledger.charged("k")) == ({"p1": 1}, {"k": 4}, 1)


async def test_where_keys_are_not_honoured_each_request_charges(bench: Bench) -> None:
    client = await bench.start(honours_keys=False)
    for _ in range(3):
        await client.charge("k", "p1", 100)
    for _ in range(2):
        assert await client.refund("r", "k", "p1", 100) == Told("refunded", "p1", 100)
    ledger = Ledger.read(bench.file)
    assert (ledger.charges["p1"], ledger.refunds["p1"], ledger.charged("k")) == (3, 2, 3)
    with pytest.raises(Refused, match="keys_not_honoured"):
        await client.void("k")


async def test_a_declined_charge_stays_declined(bench: Bench) -> None:
    client = await bench.start({"p1": ["decline"]})
    for _ in range(2):
        with pytest.raises(Declined):
            await client.charge("k", "p1", 100)
    assert bench.events() == ["asked", "declined", "asked", "repeated"]
    assert (await client.void("k")).state == "declined"
    assert (await client.refund("r", "k", "p1", 100)).state == "not_charged"
    assert Ledger.read(bench.file).declined == {"p1"}


async def test_a_closed_key_charges_nothing_for_good(bench: Bench) -> None:
    client = await bench.start()
    assert (await client.look("k")).state == "unknown"
    assert (await client.void("k")).state == "closed"
    assert (await client.void("k")).state == "closed"
    with pytest.raises(Refused, match="key_closed"):
        await client.charge("k", "p1", 100)
    assert bench.events() == ["closed", "asked", "refused"]
    assert (await client.look("k")).state == "closed"


async def test_closing_a_key_that_was_charged_changes_nothing_and_says_so(bench: Bench) -> None:
    client = await bench.start()
    await client.charge("k", "p1", 100)
    assert await client.void("k") == await client.look("k") == Told("charged", "p1", 100)
    assert bench.events() == ["asked", "charged"]


async def test_a_request_that_hangs_is_carried_out_later_whoever_listens(bench: Bench) -> None:
    client = await bench.start({"p1": ["hang"]}, timeout=HANG / 4)
    with pytest.raises(NoAnswer, match="TimeoutError"):
        await client.charge("k", "p1", 100)
    assert bench.events() == ["asked"]
    await aeventually(lambda: bench.events() == ["asked", "charged"])


async def test_a_request_that_hangs_is_refused_once_its_key_is_closed(bench: Bench) -> None:
    client = await bench.start({"p1": ["hang"]})
    late = asyncio.create_task(client.charge("k", "p1", 100))
    await aeventually(lambda: bench.events() == ["asked"])
    assert (await client.void("k")).state == "closed"
    with pytest.raises(Refused, match="key_closed"):
        await late
    assert bench.events() == ["asked", "closed", "refused"]


@pytest.mark.parametrize("fault", ["drop", "do_and_hang"])
async def test_what_was_done_without_an_answer_is_found_by_its_key(fault: str, bench: Bench) -> None:
    client = await bench.start({"p1": [fault]}, timeout=HANG / 4)
    with pytest.raises(NoAnswer):
        await client.charge("k", "p1", 100)
    assert await client.look("k") == Told("charged", "p1", 100)


async def test_an_answer_that_hangs_comes_in_the_end(bench: Bench) -> None:
    client = await bench.start({"p1": ["do_and_hang"]})
    assert (await client.charge("k", "p1", 100)).state == "charged"


async def test_an_error_does_nothing_and_the_next_request_may(bench: Bench) -> None:
    client = await bench.start({"p1": ["fail"]})
    with pytest.raises(NoAnswer, match="status 500"):
        await client.charge("k", "p1", 100)
    assert (await client.look("k")).state == "unknown"
    assert (await client.charge("k", "p1", 100)).state == "charged"
    assert bench.events() == ["asked", "failed", "asked", "charged"]


async def test_a_refund_is_made_once_and_of_what_was_charged_alone(bench: Bench) -> None:
    client = await bench.start({"refund-p1": ["drop"], "refund-p2": ["fail"]})
    await client.charge("k", "p1", 100)
    with pytest.raises(NoAnswer):
        await client.refund("r", "k", "p1", 100)
    assert (await client.refund("r", "k", "p1", 100)).state == "refunded"
    with pytest.raises(NoAnswer):
        await client.refund("r2", "k2", "p2", 100)
    assert (await client.refund("r2", "k2", "p2", 100)).state == "not_charged"
    # What was answered must stay true.
    with pytest.raises(Refused, match="key_closed"):
        await client.charge("k2", "p2", 100)
    assert Ledger.read(bench.file).refunds == {"p1": 1}


async def test_who_cannot_reach_it_has_not_asked(bench: Bench) -> None:
    await bench.start()
    port = bench.address.rpartition(":")[2]
    await bench._stack.aclose()
    with pytest.raises(NotSent):
        await ProviderClient(f"http://127.0.0.1:{port}").charge("k", "p1", 100)


async def _raw(address: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /charges HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"400"),
        (b"POST /charges HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 3\r\n\r\n[1]", b"400"),
        (b"POST /charges HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
        (b"\r\n\r\n", b"404"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(request_: bytes, status: bytes, bench: Bench) -> None:
    await bench.start()
    assert (await _raw(bench.address, request_)).split(b" ")[1] == status
    assert Journal.read(bench.file) == []


async def test_a_request_that_is_cut_off_does_nothing(bench: Bench) -> None:
    client = await bench.start()
    cut = b"POST /charges HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 30\r\n\r\n{}"
    assert await _raw(bench.address, cut) == b""
    assert await _raw(bench.address, b"POST /ch") == b""
    assert (await client.look("k")).state == "unknown"


async def test_an_answer_that_is_none_may_mean_anything() -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"what?")
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with server:
        client = ProviderClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(NoAnswer):
            await client.look("k")


def test_the_journal_outlives_its_provider_and_a_torn_line_is_no_line(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    assert Journal.read(file) == []
    book = Book(file)
    book.charge("k", "p1", 100)
    book.close()
    with file.open("a") as torn:
        torn.write('{"event": "charged", "key": "k2", "pay')
    assert Journal.read(file) == [Entry("charged", "k", "p1", 100)]
    again = Book(file)
    assert again.charge("k", "p1", 100).body["state"] == "charged"
    again.close()
    assert Ledger.read(file).charges == {"p1": 1}


def test_faults_are_drawn_by_the_seed_and_told_ones_come_first() -> None:
    plan = FaultPlan(seed=3, rates={"hang": 0.2, "drop": 0.2, "decline": 0.1}, told={"p1": ["fail", "none"]})
    assert [plan.of("p1", n) for n in (1, 2)] == ["fail", "none"]
    drawn = [plan.of(f"p{n}", 1) for n in range(2, 1002)]
    assert drawn == [FaultPlan.from_json(plan.as_json()).of(f"p{n}", 1) for n in range(2, 1002)]
    assert drawn != [FaultPlan(4, plan.rates).of(f"p{n}", 1) for n in range(2, 1002)]
    assert 120 < drawn.count("hang") < 280
    assert 420 < drawn.count("none") < 580
    assert set(drawn) == {"hang", "drop", "decline", "none"}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: FaultPlan(rates={"burn": 0.1}), "unknown faults: burn"),
        (lambda: FaultPlan(told={"p": ["freeze"]}), "unknown faults: freeze"),
        (lambda: FaultPlan(rates={"hang": 0.6, "drop": 0.6}), "1.2; at most 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(made: Callable[[], FaultPlan], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made()


async def test_the_process_serves_and_ends_with_who_started_it(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    with running_provider(file, FaultPlan(told={"p1": ["decline"]})) as address:
        client = ProviderClient(address, 10)
        with pytest.raises(Declined):
            await client.charge("k", "p1", 100)
    with pytest.raises(NotSent):
        await client.look("k")
    with running_provider(file, FaultPlan(), honours_keys=False) as address:
        client = ProviderClient(address, 10)
        assert (await client.look("k")).state == "declined"
        for _ in range(2):
            await client.charge("k2", "p2", 100)
    assert Ledger.read(file).charges == {"p2": 2}
    assert len(file.read_text().splitlines()) == len(Journal.read(file)) == 6
    assert json.loads(file.read_text().splitlines()[0])["event"] == "asked"


def test_a_process_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(TaskQError, match="ended with exit code 1"):
        with running_provider(tmp_path / "no" / "folder", FaultPlan()):
            pytest.fail("it started")
