"""``python -m taskq.migrate freeze [--rewrite] | check [FOLDER]``: the manifest, for those who develop taskq."""

import argparse
import sys
from pathlib import Path

from taskq.errors import TaskQError
from taskq.migrate.files import discrepancies, freeze


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 ok, 1 a discrepancy or a refusal, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m taskq.migrate", description=__doc__)
    parser.add_argument("command", choices=["freeze", "check"])
    parser.add_argument("folder", nargs="?", type=Path, help="the migrations folder (default: taskq's own)")
    parser.add_argument("--rewrite", action="store_true", help="write the manifest anew; only before 0.1.0")
    args = parser.parse_args(argv)
    try:
        if args.command == "freeze":
            for name in freeze(args.folder, rewrite=args.rewrite):
                print(f"frozen: {name}")
            return 0
        problems = discrepancies(args.folder)
    except TaskQError as exc:
        print(exc, file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
