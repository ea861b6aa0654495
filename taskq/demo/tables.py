"""How reports show figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["show_table"]


def show_table(console: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a column that holds nothing but whole numbers is set to the right."""
    table = Table(title=title, title_justify="left")
    for place, head in enumerate(heads):
        numbers = bool(rows) and all(row[place].isdecimal() for row in rows)
        table.add_column(head, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
