"""The benchmark's arithmetic on made-up figures, and taskq's adapter on a real server; no other queue is needed."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # last, so that an installed taskq under test stays the one that is imported

from benchmarks.harness import report  # noqa: E402
from benchmarks.harness.environments import SYSTEMS  # noqa: E402
from benchmarks.harness.figures import (  # noqa: E402
    Sample,
    Summary,
    quantile,
    rate_around,
    ratio,
    steady_rate,
    summarise,
    time_at,
)
from benchmarks.harness.measures.drain import run_down  # noqa: E402
from benchmarks.harness.measures.pickup import latencies  # noqa: E402
from benchmarks.harness.plan import DRAIN_SHARE, FORMS, GROUPS, steps_of  # noqa: E402
from benchmarks.harness.processes import AdapterFailed, Workers, run_adapter  # noqa: E402
from benchmarks.harness.targets import RATIOS, Record, Results, judge  # noqa: E402

FIGURES = (
    "jobs_per_s",
    "p50_ms",
    "p99_ms",
    "wal_bytes_per_job",
    "statements_per_s",
    "resident_mib",
    "adaptive_jobs_per_s",
    "silent_jobs_per_s",
    "jobs_per_s_at_end",
    "nodes_per_s",
)
TRAITS: dict[str, dict[str, Any]] = {
    name: {
        "core": "rust" if name == "awa" else "python",
        "keeps": name != "pgqueuer",
        "version": "1",
        "settings": "none",
        "loop": "asyncio",
        "concurrency": 100,
    }
    for name in SYSTEMS
}


def drained(system: str, *rates: float, measure: str = "drain_noop_1", **more: Any) -> list[Record]:
    return [
        Record(measure, system, number, {"jobs_per_s": rate, "jobs_per_s_whole": rate / 2, **more})
        for number, rate in enumerate(rates)
    ]


# Arithmetic ---------------------------------------------------------------------------------------------------------


def test_a_summary_is_the_median_with_the_smallest_and_the_largest_round() -> None:
    assert summarise([3.0, 1.0, 8.0]) == Summary(median=3.0, low=1.0, high=8.0, rounds=3)
    assert summarise([1.0, 3.0]).median == 2.0
    with pytest.raises(ValueError, match="nothing"):
        summarise([])


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert quantile([7.0], 0.5) == 7.0
    for bad in (0.0, 1.1):
        with pytest.raises(ValueError, match="no quantile"):
            quantile(values, bad)


def test_the_steady_rate_leaves_out_a_slow_start_and_a_slow_end() -> None:
    samples = [Sample(0, 0), Sample(10, 100), Sample(12, 500), Sample(14, 900), Sample(30, 1000)]
    assert steady_rate(samples, 1000) == pytest.approx(200.0)


def test_the_steady_rate_takes_the_points_between_two_samples() -> None:
    samples = [Sample(5.0, 0), Sample(5.5, 50), Sample(6.0, 100)]
    assert time_at(samples, 25) == pytest.approx(5.25)
    assert steady_rate(samples, 100) == pytest.approx(100.0)


def test_without_a_sample_in_between_there_is_no_steady_rate() -> None:
    assert steady_rate([Sample(0, 0), Sample(1, 100)], 100) is None
    assert steady_rate([Sample(0, 0), Sample(1, 5), Sample(2, 95), Sample(3, 100)], 100) is None
    assert time_at([Sample(0, 0)], 1) is None


def test_the_rate_around_a_point_is_that_of_its_stretch_alone() -> None:
    samples = [Sample(0, 0), Sample(1, 1000), Sample(3, 2000)]
    assert rate_around(samples, 0, 1000) == pytest.approx(1000.0)
    assert rate_around(samples, 1000, 1000) == pytest.approx(500.0)
    assert rate_around(samples, 1800, 1000) == pytest.approx(500.0)
    assert rate_around([], 0, 10) is None


def test_a_ratio_needs_both_sides() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None


def test_waits_begin_where_enqueue_returned_and_are_never_negative() -> None:
    sent = [{"number": n, "called": n * 10**9, "returned": n * 10**9 + 2_000_000} for n in range(100)]
    began = {n: n * 10**9 + 5_000_000 for n in range(100)}
    began[0] = 1_000_000
    figures = latencies(sent, began)
    assert (figures["p50_ms"], figures["p50_from_call_ms"], figures["missing"]) == (3.0, 5.0, 0)
    assert latencies(sent[:1], began)["p50_ms"] == 0.0
    del began[5]
    assert latencies(sent, began)["missing"] == 1
    del began[6]
    with pytest.raises(AdapterFailed, match="98 of 100"):
        latencies(sent, began)


# Ratios and targets -------------------------------------------------------------------------------------------------


def test_ratios_are_taken_in_each_round_against_the_peer_with_the_best_median() -> None:
    records = [*drained("taskq", 100, 200, 900), *drained("pgqueuer", 50, 50, 300), *drained("oban", 40, 60, 40)]
    judged = judge(Results(records, TRAITS))["drain_noop_1_process_vs_fastest_python_peer"]
    assert judged == {"value": 3.0, "low": 2.0, "high": 4.0, "target": ">= 2", "met": True, "against": "pgqueuer"}


def test_a_core_in_rust_is_no_python_peer_but_is_a_peer() -> None:
    records = [*drained("taskq", 100), *drained("awa", 400), *drained("oban", 80)]
    records += [Record("bulk", name, 0, {"jobs_per_s": rate}) for name, rate in (("taskq", 9.0), ("awa", 10.0))]
    judged = judge(Results(records, TRAITS))
    assert judged["drain_noop_1_process_vs_fastest_python_peer"]["against"] == "oban"
    assert judged["drain_noop_1_process_vs_fastest_python_peer"]["met"] is False
    assert judged["bulk_vs_fastest_peer"] == {
        "value": 0.9,
        "low": 0.9,
        "high": 0.9,
        "target": ">= 1.5",
        "met": False,
        "against": "awa",
    }


def test_wal_is_compared_with_those_that_keep_what_is_finished() -> None:
    sizes = {"taskq": 1500.0, "pgqueuer": 500.0, "oban": 2000.0, "chancy": 1600.0}
    records = [record for name, size in sizes.items() for record in drained(name, 1, wal_bytes_per_job=size)]
    judged = judge(Results(records, TRAITS))["wal_vs_leanest_keeping_peer"]
    assert (judged["against"], judged["value"], judged["met"]) == ("chancy", 0.9375, True)


def test_a_run_too_short_for_a_steady_rate_is_compared_by_whole_runs() -> None:
    records = [*drained("taskq", 100, 100), Record("drain_noop_1", "taskq", 2, {"jobs_per_s_whole": 70.0})]
    assert Results(records, TRAITS).rounds("drain_noop_1", "taskq", "jobs_per_s") == {0: 50.0, 1: 50.0, 2: 70.0}
    judged = judge(Results([*records, *drained("oban", 20, 20, 20)], TRAITS))
    assert judged["drain_noop_1_process_vs_fastest_python_peer"]["value"] == 50 / 10


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    judged = judge(Results(drained("taskq", 100), TRAITS))
    assert {each["met"] for each in judged.values()} == {None}
    assert set(judged) == {target.name for target in RATIOS}
    for name in (
        "drain_noop_2_process_vs_fastest_python_peer",
        "drain_1ms_1_process_vs_fastest_python_peer",
        "single_vs_fastest_peer",
        "notify_vs_silent",
        "pickup_p99_vs_best_peer",
        "idle_statements_per_s",
        "drain_pinned_horizon_vs_free",
        "drain_10m_finished_vs_empty",
        "drain_1m_later_vs_empty",
    ):
        assert name in judged


def test_own_comparisons_and_bounds() -> None:
    records = [
        Record("notify", "taskq", 0, {"adaptive_jobs_per_s": 90.0, "silent_jobs_per_s": 100.0}),
        Record("idle", "taskq", 0, {"statements_per_s": 2.5}),
        *drained("taskq", 80, measure="pinned_held", jobs_per_s_at_end=70.0),
        *drained("taskq", 100, measure="pinned_free", jobs_per_s_at_end=100.0),
    ]
    judged = judge(Results(records, TRAITS))
    assert (judged["notify_vs_silent"]["value"], judged["notify_vs_silent"]["met"]) == (0.9, True)
    assert (judged["idle_statements_per_s"]["value"], judged["idle_statements_per_s"]["met"]) == (2.5, False)
    assert judged["drain_pinned_horizon_vs_free"]["value"] == 0.8
    assert judged["drain_pinned_horizon_at_end_vs_free"]["value"] == 0.7


# Plan and report ----------------------------------------------------------------------------------------------------


def test_each_round_begins_with_another_system_and_systems_alternate() -> None:
    form = FORMS["full"]
    names = ["taskq", "pgqueuer", "oban"]
    orders = [[s.system for s in steps_of(form, number, names, ("single",))] for number in range(3)]
    assert orders == [["taskq", "pgqueuer", "oban"], ["pgqueuer", "oban", "taskq"], ["oban", "taskq", "pgqueuer"]]


def test_the_short_form_measures_the_slow_ones_once() -> None:
    systems = [{s.system for s in steps_of(FORMS["short"], number, SYSTEMS, ("drain",))} for number in range(2)]
    assert systems[0] == set(SYSTEMS)
    assert systems[1] == set(SYSTEMS) - {"absurd", "procrastinate", "dbos"}


def test_every_group_and_every_ratio_is_measured_by_the_full_form() -> None:
    steps = steps_of(FORMS["full"], 0, SYSTEMS)
    assert {step.group for step in steps} == set(GROUPS)
    records = [
        Record(
            step.measure,
            name,
            0,
            dict.fromkeys(FIGURES, 1.0),
        )
        for step in steps
        for name in ([step.system] if step.system else SYSTEMS)
    ]
    assert [name for name, each in judge(Results(records, TRAITS)).items() if each["value"] is None] == []


def test_fewer_jobs_shrink_everything_and_more_jobs_nothing_but_the_drain() -> None:
    form = FORMS["short"]
    small, large = form.with_jobs(form.drain // 10), form.with_jobs(form.drain * 10)
    assert (small.single, small.bulk, small.pinned) == (50, 5000, (("taskq", 10_000),))
    assert (large.drain, large.single, large.bulk) == (form.drain * 10, form.single, form.bulk)


def test_the_report_has_ratios_spreads_and_reasons_but_no_paths_or_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "quiet-otter")
    records = [*drained("taskq", 100, 300), *drained("pgqueuer", 50, 50)]
    reason = f"pip failed in {ROOT}/build/bench-venvs/awa/bin/python on quiet-otter"
    surroundings = report.environment("18.6", {"fsync": "on"}, "3.13.0")
    results = report.build(
        records,
        TRAITS,
        surroundings,
        {"name": "short", "rounds": 2},
        [{"measure": "all", "system": "awa", "reason": reason}],
        4,
    )
    text = report.markdown(results)
    assert "| drain_noop_1_process_vs_fastest_python_peer (pgqueuer) | 4 (2 to 6) | >= 2 | yes |" in text
    assert "| taskq | 200 (100 to 300) | 100 (50 to 150) |" in text
    assert "- awa, all: pip failed in <path> on <host>" in text
    whole = json.dumps(results)
    assert str(ROOT) not in whole
    assert "quiet-otter" not in whole
    assert results["summary"]["drain_noop_1"]["taskq"]["jobs_per_s"] == {
        "median": 200,
        "low": 100,
        "high": 300,
        "rounds": 2,
    }
    assert results["invariants"] == {"checks": 4, "violations": 0}


def test_every_system_has_an_adapter_a_share_and_pins_and_nothing_but_pins() -> None:
    assert set(DRAIN_SHARE) == set(SYSTEMS)
    for name in SYSTEMS:
        assert (ROOT / "benchmarks" / "peers" / f"{name}.py").is_file()
        for line in (ROOT / "benchmarks" / "peers" / f"{name}.txt").read_text().splitlines():
            assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line), line


def test_an_unknown_system_is_named_with_those_that_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--systems", "celery"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "there is no system celery; there are taskq," in done.stderr


class Alive:
    """Workers that run and do nothing."""

    def check(self) -> None:
        pass


def test_a_drain_that_stands_still_is_given_up_and_one_that_goes_on_is_not() -> None:
    counts = iter([0, 1, 1, 2])
    assert [s.done for s in run_down(lambda: next(counts), 2, Alive(), patience=30)] == [0, 1, 1, 2]  # type: ignore[arg-type]
    with pytest.raises(AdapterFailed, match="stood still at 1 of 2 jobs"):
        run_down(lambda: 1, 2, Alive(), patience=0.05)  # type: ignore[arg-type]


# On a server ----------------------------------------------------------------------------------------------------------


def test_the_adapter_of_taskq_runs_jobs_from_enqueue_to_their_end(dsn: str, conn: psycopg.Connection[Any]) -> None:
    traits = run_adapter(sys.executable, "taskq", "describe")[0]
    mark = {"mark": conn.execute(traits["mark"]).fetchone()[0]}  # type: ignore[index]

    def done() -> int:
        return int(conn.execute(traits["done"], mark).fetchone()[0])  # type: ignore[index]

    told = run_adapter(sys.executable, "taskq", "enqueue-bulk", "200", "--dsn", dsn, "--queues", "2")
    assert (told[0]["jobs"], told[-1]) == (200, {"event": "done", "command": "enqueue-bulk"})
    assert conn.execute("select count(distinct queue) from taskq.jobs").fetchone() == (2,)
    with Workers(sys.executable, "taskq", dsn, processes=1, concurrency=10, queues=2) as workers:
        assert done() == 0
        workers.begin()
        samples = run_down(done, 200, workers)
        assert workers.cpu() > 0
        assert workers.resident() > 10_000_000
        one = run_adapter(sys.executable, "taskq", "enqueue-one", "3", "--dsn", dsn, "--kind", "probe")
        samples = run_down(done, 200 + one[0]["in_all"], workers)
        probes = [each for each in workers.stop() if each["event"] == "probe"]
    assert samples[-1].done == 200 + one[0]["in_all"]
    assert len(probes) == one[0]["in_all"]
    assert conn.execute("select * from taskq.check_invariants('all')").fetchall() == []
    assert conn.execute("select count(*) from taskq.jobs").fetchone() == (0,)
    with pytest.raises(AdapterFailed, match=r"\d+ jobs are done of 5"):
        run_down(done, 5, workers)


def test_the_adapter_of_taskq_runs_workflows_to_their_end(dsn: str, conn: psycopg.Connection[Any]) -> None:
    flows = run_adapter(sys.executable, "taskq", "describe")[0]["flows"]
    for kind, number in (("fan", 20), ("chain", 3), ("steps", 3)):
        run_adapter(sys.executable, "taskq", "enqueue-flows", str(number), "--dsn", dsn, "--kind", kind)

    def done() -> int:
        return sum(int(conn.execute(query).fetchone()[0]) for query in flows.values())  # type: ignore[index]

    with Workers(sys.executable, "taskq", dsn, processes=1, concurrency=10) as workers:
        workers.begin()
        run_down(done, 1 + 3 + 3, workers)
    assert conn.execute("select count(*) from taskq.nodes where status = 'succeeded'").fetchone() == (20 + 2 + 3 * 10,)
    assert conn.execute("select count(*) from taskq.steps").fetchone() == (3 * 10,)
    assert conn.execute("select * from taskq.check_invariants('all')").fetchall() == []


def test_a_worker_that_ends_is_reported_with_its_last_words(empty_dsn: str) -> None:
    with Workers(sys.executable, "taskq", empty_dsn) as workers:
        workers.begin()
        with pytest.raises(AdapterFailed, match=r"a taskq worker ended: .*SchemaBehind"):
            run_down(lambda: 0, 1, workers)
