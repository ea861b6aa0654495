"""``python -m benchmarks``: run a form of the benchmark, or a part of it, and write the results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.bench import Bench, LawBroken
from benchmarks.harness.environments import ROOT, SYSTEMS, Environments, NotInstalled
from benchmarks.harness.plan import FORMS, GROUPS
from benchmarks.harness.report import build, environment, markdown
from benchmarks.harness.runner import Runner
from benchmarks.harness.server import SETTINGS, bench_server

__all__ = ["main"]

RESULTS = ROOT / "benchmarks" / "results"
TRIALS = ROOT / "build" / "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if it was measured, 1 if taskq's record was found wrong, 2 for a mistake in the arguments."""
    parser = _parser()
    args = parser.parse_args(argv)
    form = FORMS[args.form]
    systems = _names(parser, args.systems, SYSTEMS, "system")
    only = _names(parser, args.only, GROUPS, "group")
    narrowed = args.systems or args.only or args.jobs or args.rounds
    if args.jobs:
        form = form.with_jobs(args.jobs)
    if args.probes:
        form = replace(form, probes=args.probes)
    if args.rounds:
        form = replace(form, rounds=args.rounds)
    folder = Path(args.out) if args.out else TRIALS if narrowed else RESULTS
    environments = Environments(args.python)
    if not narrowed:
        print(f"The {form.name} form takes {form.takes} on a quiet machine.", file=sys.stderr, flush=True)
    started = time.monotonic()
    with bench_server() as server:
        bench = Bench(server, environments, systems)
        if not bench.systems:
            print("there is no system to measure", file=sys.stderr)
            return 1
        python = next(iter(bench.systems.values())).python
        version = subprocess.run(
            [python, "-c", "import platform; print(platform.python_version())"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        surroundings = environment(server.version, SETTINGS, version)
        runner = Runner(bench, form)
        try:
            runner.run(only)
        except LawBroken as exc:
            print(f"taskq verify found the record to be wrong; nothing is written: {exc}", file=sys.stderr)
            return 1
    surroundings["minutes"] = round((time.monotonic() - started) / 60, 1)
    gone = [{"measure": "all", "system": name, "reason": reason} for name, reason in bench.left_out.items()]
    traits = {name: asdict(system.traits) for name, system in bench.systems.items()}
    results = build(runner.records, traits, surroundings, asdict(form), [*gone, *runner.left_out], bench.checked)
    _write(folder, results)
    if args.plots:
        _plot(environments, folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--form", choices=FORMS, default="short", help="how much is measured (%(default)s)")
    parser.add_argument("--systems", metavar="A,B", help=f"only these of {','.join(SYSTEMS)}")
    parser.add_argument("--only", metavar="A,B", help=f"only these of {','.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, metavar="N", help="so many rounds")
    parser.add_argument("--jobs", type=int, metavar="N", help="jobs of taskq's drain; the rest in proportion")
    parser.add_argument("--probes", type=int, metavar="N", help="probes of a pick-up")
    parser.add_argument("--out", metavar="FOLDER", help="where results go; of a part of it, build/bench")
    parser.add_argument("--python", metavar="PATH", help="what environments are made with")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots")
    return parser


def _names(parser: argparse.ArgumentParser, given: str | None, known: Sequence[str], what: str) -> list[str]:
    if given is None:
        return list(known)
    names = [name for name in given.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _write(folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    (folder / "latest.md").write_text(text)
    print(text)


def _plot(environments: Environments, folder: Path) -> None:
    try:
        python = environments.python_of("plots", Path(__file__).with_name("plots.txt"))
    except NotInstalled as exc:
        print(f"no plots: {exc}", file=sys.stderr)
        return
    done = subprocess.run(
        [python, "-m", "benchmarks.harness.plots", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"no plots: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
