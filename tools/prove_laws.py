"""Take away each guard of the laws in turn, and show the test that turns red.

Run by ``make prove-laws``. The guards stand in ``tools/guards``. Each is removed by replacing text in a scratch copy of
``migrations``; then the tests named for it run against that copy, all on one throwaway server, in a few processes. A
removal that stays green, does not apply, or breaks the migrations themselves is a failure: a test is missing, or the
list is out of date. First all named tests must be green with nothing removed.

    python tools/prove_laws.py [WORD ...]     only guards with one of these words in law or name
    python tools/prove_laws.py --check        only look whether every text is found exactly once
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from guards import FILES, Guard  # noqa: E402
from guards.around import AROUND  # noqa: E402
from guards.cohorts import COHORTS  # noqa: E402
from guards.effect_steps import OF_EFFECT_STEPS  # noqa: E402
from guards.effects import OF_EFFECTS  # noqa: E402
from guards.emits import OF_EMITS  # noqa: E402
from guards.fences import FENCES  # noqa: E402
from guards.incidents import OF_INCIDENTS  # noqa: E402
from guards.knobs import KNOBS  # noqa: E402
from guards.laws import LAWS  # noqa: E402
from guards.loops import OF_LOOPS  # noqa: E402
from guards.maps import OF_MAPS  # noqa: E402
from guards.ordering import ORDERING  # noqa: E402
from guards.pauses import OF_PAUSES  # noqa: E402
from guards.record import RECORD  # noqa: E402
from guards.rules import RULES  # noqa: E402
from guards.run_locks import AROUND_RUNS  # noqa: E402
from guards.runs import OF_RUNS  # noqa: E402
from guards.safe import SAFE  # noqa: E402
from guards.starts import OF_STARTS  # noqa: E402
from guards.steps import RECORDED  # noqa: E402
from guards.work_budgets import OF_WORK_BUDGETS  # noqa: E402
from servers import serve  # noqa: E402

from taskq import migrate  # noqa: E402

GUARDS: tuple[Guard, ...] = (
    *(*RECORD, *FENCES, *LAWS, *RULES, *SAFE, *RECORDED, *ORDERING, *AROUND),
    *(
        *OF_EFFECTS,
        *OF_STARTS,
        *OF_RUNS,
        *OF_MAPS,
        *OF_LOOPS,
        *OF_PAUSES,
        *OF_WORK_BUDGETS,
        *OF_INCIDENTS,
        *AROUND_RUNS,
        *COHORTS,
        *KNOBS,
        *OF_EFFECT_STEPS,
        *OF_EMITS,
    ),
)
AT_ONCE = max(2, (os.cpu_count() or 2))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of removing one guard.

    Attributes:
        guard: The guard.
        red: The test that failed, or None.
        problem: What is wrong where no test failed as it should; '' else.
    """

    guard: Guard
    red: str | None
    problem: str = ""


def text_problems(guard: Guard, texts: dict[str, str]) -> list[str]:
    """The texts of a guard that do not stand in its file exactly once."""
    found = ((old, texts[guard.file].count(old)) for old, _ in guard.cuts)
    return [f"stands {n} times in {FILES[guard.file]}: {old!r}" for old, n in found if n != 1]


def without(guard: Guard, texts: dict[str, str]) -> str:
    """The guard's file with its cuts made."""
    text = texts[guard.file]
    for old, new in guard.cuts:
        text = text.replace(old, new)
    return text


def scratch(folder: Path, replaced: dict[str, str]) -> Path:
    """A frozen copy of the migrations in a folder, with some files replaced."""
    copy = folder / "migrations"
    shutil.copytree(ROOT / "migrations", copy)
    for name, text in replaced.items():
        (copy / FILES[name]).write_text(text)
    (copy / "released_migrations.sha256").write_text("")
    migrate.freeze(copy)
    return copy


class Failures:
    """A pytest plugin that remembers what failed: (test, phase, in a line why)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each phase of a test."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else report.longreprtext
            self.seen.append((report.nodeid, str(report.when), " ".join(why.split())[:300]))


def run_tests(migrations: Path, socket: Path, tests: Sequence[str]) -> tuple[int, list[tuple[str, str, str]]]:
    """Run tests, in this process, until the first failure, on databases that these migrations make."""
    os.environ |= {"TASKQ_TEST_MIGRATIONS": str(migrations), "TASKQ_TEST_SERVER": str(socket)}
    failures = Failures()
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:terminal", "-o", "addopts=", f"--rootdir={ROOT}"]
    code = pytest.main([*options, *(f"{ROOT}/tests/{test}" for test in tests)], plugins=[failures])
    return int(code), failures.seen


def quietly() -> None:
    """In a process of the pool: what tests print is of no use."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (for as long as the process lives)


def try_without(guard: Guard, texts: dict[str, str], socket: Path) -> Verdict:
    """Remove a guard and run its tests."""
    if problems := text_problems(guard, texts):
        return Verdict(guard, None, "; ".join(problems))
    with tempfile.TemporaryDirectory(prefix="taskq-guard-") as folder:
        copy = scratch(Path(folder), {guard.file: without(guard, texts)})
        code, failures = run_tests(copy, socket, guard.tests)
    if code == 0:
        return Verdict(guard, None, f"stays green: {', '.join(guard.tests)}")
    # A failure while setting up is one of a test only where something was asserted; else the migrations are broken.
    if code == 1 and failures and (failures[0][1] != "setup" or failures[0][2].startswith("AssertionError")):
        return Verdict(guard, failures[0][0])
    return Verdict(guard, None, f"its tests did not run (pytest: {code}): {failures}")


def show(verdict: Verdict) -> None:
    """Print a line of the table."""
    mark = "red  " if verdict.red else "GREEN"
    name = verdict.red.rpartition("/")[2][:120] if verdict.red else verdict.problem
    print(f"{verdict.guard.law:<10} {verdict.guard.what:<55} {mark} {name}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Prove the guards; the exit code is 1 where one is not proven."""
    texts = {key: (ROOT / "migrations" / name).read_text() for key, name in FILES.items()}
    words = [word for word in arguments if not word.startswith("--")]
    chosen = [g for g in GUARDS if not words or any(word in f"{g.law} {g.what}" for word in words)]
    stale = [f"{g.law}, {g.what}: {problem}" for g in chosen for problem in text_problems(g, texts)]
    print("\n".join(stale))
    if "--check" in arguments:
        return 1 if stale else 0
    started = time.monotonic()
    verdicts: list[Verdict] = []
    with (
        serve(settings={"max_connections": "300"}) as server,
        tempfile.TemporaryDirectory(prefix="taskq-guard-") as folder,
        ProcessPoolExecutor(AT_ONCE, get_context("spawn"), quietly) as pool,
    ):
        tests = sorted({test for g in chosen for test in g.tests})
        whole = scratch(Path(folder), {})
        parts = [part for n in range(AT_ONCE) if (part := tests[n::AT_ONCE])]
        baseline = [pool.submit(run_tests, whole, server.socket_dir, part) for part in parts]
        for code, failures in (done.result() for done in baseline):
            if code != 0:
                print(f"Not all is green with every guard in place (pytest: {code}): {failures}")
                return 1
        together = [g for g in chosen if g.law != "plans"]
        for done in [pool.submit(try_without, g, texts, server.socket_dir) for g in together]:
            verdicts.append(done.result())
            show(verdicts[-1])
        # Migrations that run meanwhile make a session forget its cached plans, which these tests are about.
        for g in chosen[len(together) :]:
            verdicts.append(pool.submit(try_without, g, texts, server.socket_dir).result())
            show(verdicts[-1])
    unproven = [v for v in verdicts if v.red is None]
    seconds = time.monotonic() - started
    print(f"\n{len(verdicts) - len(unproven)} of {len(verdicts)} guards proven in {seconds:.0f} s")
    return 1 if unproven else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
