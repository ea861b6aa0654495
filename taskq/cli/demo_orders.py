"""``taskq demo-orders``: a workflow whose workers are killed; none is charged twice, and what fails is undone."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.demo import chosen_seed, conclude, progress, workplace
from taskq.cli.options import JsonOption, SchemaOption

__all__ = ["command"]


def command(
    orders: Annotated[int, typer.Option("--orders", min=40, help="How many orders there are.")] = 200,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Repeat the faults of another run; random by default.", show_default=False),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the database, the journal and the logs there.")] = False,
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Use this database, and migrate it, instead of one of its own.", metavar="URL"),
    ] = None,
    schema: SchemaOption = None,
    as_json: JsonOption = False,
) -> int:
    """See a workflow survive kills: what fails is undone, once.

    Each order is a run: reserve, charge, ship, notify. Workers are killed (SIGKILL) under them, the payment provider
    drops answers and declines, the shelf has not what the books have, and some customers change their minds. What
    succeeded of an order that failed or was cancelled is undone by its compensations, the last first. In the end the
    provider's journal, the warehouse and the runs are compared, order by order. In a database that --dsn names, the
    warehouse's tables stand in a schema taskq_demo_orders meanwhile.

    Exit codes: 0 all agrees; 1 something differs; 2 usage or settings; 3 cannot connect.
    """
    from taskq import migrate
    from taskq.demo.orders.play import NODES, play
    from taskq.settings import load

    settings = load(require_dsn=False, dsn=dsn, schema=schema)
    chosen = chosen_seed(seed)
    with workplace(dsn, keep=keep) as (found, work), progress(NODES * orders, "steps", "three workers") as tell:
        migrate.up(found, settings.schema)
        report = play(found, settings.schema, orders, chosen, work, tell, own=dsn is None)
    return conclude(report, report.well(), as_json=as_json)
