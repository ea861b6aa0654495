"""Search the model: ``python -m docs.model``, from the root of the checkout.

Without an option, the small configurations (under a minute). ``--full`` adds two workers with two jobs of all classes
(some minutes), ``--mutations`` searches the broken designs instead and shows how each falls, and ``--replay DSN``
replays the record of a database.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from .configs import FULL, QUICK, Config
from .mutations import MUTATIONS, run
from .properties import NAMES
from .replay import read, replay
from .search import Result, Violation, search


def main() -> int:
    """Run what was asked for; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m docs.model", description="Search the model of jobs exhaustively.")
    parser.add_argument("--full", action="store_true", help="two workers, two jobs, all classes: some minutes")
    parser.add_argument("--mutations", action="store_true", help="search each broken design until it falls")
    parser.add_argument("--faults", type=int, help="faults in each configuration, instead of its own bound")
    parser.add_argument("--replay", metavar="DSN", help="replay the record of a database, which is only read")
    asked = parser.parse_args()
    if asked.replay:
        return _replay(asked.replay)
    if asked.mutations:
        return _mutations()
    configs = FULL if asked.full else QUICK
    results = [_searched(c if asked.faults is None else replace(c, faults=asked.faults)) for c in configs]
    print(f"\n{'property':28}{'looked at':>12}  holds")
    for name in NAMES:
        held = all(name not in r.violations for r in results)
        print(f"{name:28}{sum(r.checked[name] for r in results):12,}  {'yes' if held else 'NO'}")
    return 0 if all(r.holds for r in results) else 1


def _searched(config: Config) -> Result:
    print(f"{config.name + ':':32}", end="", flush=True)
    result = search(config)
    size = f"{result.states:10,} states {result.transitions:11,} transitions, depth {result.depth:3}"
    print(f"{size}, {result.seconds:6.1f} s of CPU", flush=True)
    for violation in result.violations.values():
        show(violation)
    return result


def _mutations() -> int:
    failed = 0
    for mutation in MUTATIONS:
        result = run(mutation)
        found = [v for v in result.violations.values() if v.name in mutation.breaks]
        print(f"\n{mutation.name}: {mutation.what} ({result.states:,} states, {result.seconds:.1f} s)")
        if not found:
            failed += 1
            print("  NOT FOUND OUT")
        for violation in found[:1]:
            show(violation)
    print(f"\n{len(MUTATIONS) - failed} of {len(MUTATIONS)} broken designs are found out")
    return 1 if failed else 0


def _replay(dsn: str) -> int:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.read_only = True
        found = read(lambda query: conn.execute(query.encode()).fetchall())
    refused = replay(found)
    for refusal in refused:
        print(refusal)
    print(f"{len(found) - len(refused)} of {len(found)} jobs have a record that is a path of the model")
    return 1 if refused else 0


def show(violation: Violation) -> None:
    """Print the shortest way to a violation."""
    print(f"  {violation.name} does not hold after:")
    for n, what in enumerate(violation.trace, 1):
        print(f"  {n:4}  {what}")


if __name__ == "__main__":
    sys.exit(main())
