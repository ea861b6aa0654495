"""``python -m taskq``, the same as the command ``taskq``."""

from __future__ import annotations

import sys

from taskq import boot


def main() -> None:
    """Run the command line and exit; ``taskq.cli`` has the exit codes."""
    boot.choose_format(sys.argv[1:])
    try:
        if sys.argv[1:2] == ["worker"]:
            boot.hold()
        from taskq.cli import main as run

        run()
    except KeyboardInterrupt:  # while the command is still being loaded, which can answer it from then on
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except boot.StoppedAtBoot:
        sys.stderr.write(boot.line("stopped while starting", event="worker.stopped_at_boot", logger="worker"))
        sys.exit(0)
    except Exception:
        if not boot.is_json():
            raise
        import traceback

        sys.stderr.write(boot.line(traceback.format_exc(), event="cli.crashed", level="error"))
        sys.exit(1)


if __name__ == "__main__":
    main()
