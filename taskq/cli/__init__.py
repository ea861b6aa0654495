"""The ``taskq`` command. One module a subcommand; a module is imported only when its command is asked for.

A subcommand's module has either ``app``, a ``typer.Typer`` with commands of its own, or ``command``, a function that
is the command. To add one, write the module and a line in ``COMMANDS``. So that help stays quick, such a module imports
what it works with inside its functions.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

from taskq.cli.output import run_cli

__all__ = ["COMMANDS", "build", "main"]

COMMANDS: dict[str, str] = {
    "worker": "taskq.cli.worker",
    "migrate": "taskq.cli.migrate",
}
"""Subcommand to module, in the order in which help lists them."""


def build(argv: Sequence[str]) -> typer.Typer:
    """The root command with the subcommand that ``argv`` names, or with all of them if it names none."""
    root = typer.Typer(
        name="taskq",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @root.callback()
    def callback() -> None:
        """A job queue on PostgreSQL whose side effects are never silently repeated and never silently lost."""

    wanted = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    for name in wanted:
        module = importlib.import_module(COMMANDS[name])
        if hasattr(module, "app"):
            root.add_typer(module.app, name=name)
        else:
            root.command(name)(module.command)
    return root


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 ok, 1 found something or failed, 2 usage or settings, 3 no connection."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(run_cli(lambda: build(args)(args=args, prog_name="taskq", standalone_mode=False), args))
