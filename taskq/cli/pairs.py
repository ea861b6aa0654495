"""Flags that say the opposite of one another, such as ``--happened`` and ``--did-not-happen``.

Of two that are given, the parser would take the last one in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

__all__ = ["refuse_both"]


def refuse_both(command: Any, args: Sequence[str]) -> None:
    """Refuse a command line that has a flag and its opposite.

    Args:
        command: The root command, as typer makes it.
        args: The command line after its name.

    Raises:
        typer.BadParameter: It has.
    """
    context = typer.Context(command, info_name="taskq")
    rest = list(args[: args.index("--")] if "--" in args else args)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest[0]]
        context = typer.Context(command, parent=context, info_name=rest.pop(0))
    words = set(rest)
    for parameter in command.params:
        for_it, against = set(parameter.opts), set(parameter.secondary_opts)
        if words & for_it and words & against:
            both = f"{min(words & for_it)} and {min(words & against)}"
            raise typer.BadParameter(f"{both} say the opposite of one another; give the one that you mean", ctx=context)
