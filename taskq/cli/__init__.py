"""The ``taskq`` command. One module a subcommand; a module is imported only when its command is asked for.

A subcommand's module has either ``app``, a ``typer.Typer`` with commands of its own, or ``command``, a function that
is the command. To add one, write the module and a line in ``COMMANDS``. So that help stays quick, such a module imports
what it works with inside its functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from taskq import boot
from taskq.cli.output import run_cli
from taskq.cli.pairs import refuse_both

__all__ = ["COMMANDS", "build", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "worker": ("taskq.cli.worker", "Run a worker for an app."),
    "dev": ("taskq.cli.dev", "Start a PostgreSQL for development, and a worker beside it."),
    "demo": ("taskq.cli.demo", "See a worker killed half-way, and nothing lost."),
    "demo-payments": ("taskq.cli.demo_payments", "See charges survive kills: none doubled, none lost."),
    "demo-orders": ("taskq.cli.demo_orders", "See a workflow survive kills: what fails is undone, once."),
    "demo-pipeline": (
        "taskq.cli.demo_pipeline",
        "See pages of files survive kills: none doubled, none lost.",
    ),
    "enqueue": ("taskq.cli.enqueue", "Enqueue one job and print its id."),
    "jobs": ("taskq.cli.jobs", "Look at jobs and steer them."),
    "effects": ("taskq.cli.effects", "Look at terminal effects, settle and retry them."),
    "runs": ("taskq.cli.runs", "Look at runs of workflows, pause, cancel and retry them."),
    "incidents": ("taskq.cli.incidents", "Look at what holds up jobs, and grant one more recovery."),
    "workflows": ("taskq.cli.workflows", "Look at an app's workflows and their plans."),
    "queues": ("taskq.cli.queues", "Look at queues, pause and resume them."),
    "orderings": ("taskq.cli.orderings", "Look at ordering keys, and let halted ones go on."),
    "limits": ("taskq.cli.limits", "Look at cohorts, and set how many of their jobs run at once."),
    "workers": ("taskq.cli.workers", "Look at worker processes, and ask one to stop."),
    "audit": ("taskq.cli.audit", "Look at what operators did."),
    "doctor": ("taskq.cli.doctor", "Check server, schema, workers and queues, and say what cures what."),
    "verify": ("taskq.cli.verify", "Check that nothing was lost, doubled or miscounted."),
    "migrate": ("taskq.cli.migrate", "Bring the database's schema up to date, and see where it stands."),
}
"""Subcommand to its module and what help says of it, in the order in which help lists them."""


def build(argv: Sequence[str], *, completing: bool = False) -> typer.Typer:
    """The root command with the subcommand that ``argv`` names, or with a stand-in for each if it names none.

    Args:
        argv: The command line after ``taskq``.
        completing: A shell asks what may follow.
    """
    wanted = argv[0] if argv and argv[0] in COMMANDS else None
    root = typer.Typer(
        name="taskq",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=wanted is None or completing,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @root.callback(invoke_without_command=True)
    def callback(
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    ) -> None:
        """A job queue on PostgreSQL: bodies run at least once, and every repetition is on record."""
        if version:
            from taskq.version import __version__

            print(f"taskq {__version__}")
            raise typer.Exit

    for name, (module_name, said) in COMMANDS.items():
        if wanted is None:
            root.command(name, help=said)(_stand_in)
        elif name == wanted:
            module = importlib.import_module(module_name)
            if hasattr(module, "app"):
                root.add_typer(module.app, name=name)
            else:
                root.command(name)(module.command)
    return root


def _stand_in() -> None:
    """Only listed: a command that is called is loaded."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 1 found something or failed, 2 usage or settings, 3 no connection."""
    args = list(sys.argv[1:] if argv is None else argv)
    asked = _asked_by_a_shell()
    boot.choose_format(args)
    sys.exit(run_cli(lambda: _run(args, asked), args))


def _run(args: Sequence[str], asked: Sequence[str] | None) -> object:
    root = typer.main.get_command(build(args if asked is None else asked, completing=asked is not None))
    if asked is None:
        refuse_both(root, args)
    return root.main(args=list(args), prog_name="taskq", standalone_mode=False)


def _asked_by_a_shell() -> list[str] | None:
    """The words after ``taskq`` that a shell wants completed, or None where this is no completion."""
    if "_TASKQ_COMPLETE" not in os.environ:
        return None
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return line.split()[1:]
