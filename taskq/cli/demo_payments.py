"""``taskq demo-payments``: charges by workers that are killed and frozen; none is doubled, and none is lost."""

from __future__ import annotations

from typing import Annotated

import typer

from taskq.cli.demo import chosen_seed, conclude, progress, workplace
from taskq.cli.options import JsonOption, SchemaOption

__all__ = ["command"]


def command(
    payments: Annotated[int, typer.Option("--payments", min=20, help="How many payments there are.")] = 300,
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
    """See charges survive kills: none doubled, none lost.

    Charges payments at a provider on this machine, which drops answers, hangs, fails and declines. Of the three worker
    processes some are killed (SIGKILL), and some frozen (SIGSTOP) until others have taken over. What became of charges
    whose outcome is unknown is asked of the provider, and what failed after its charge is refunded. In the end the
    provider's journal and the record in the database are compared, payment by payment.

    Exit codes: 0 nothing is doubled or lost; 1 something differs; 2 usage or settings; 3 cannot connect.
    """
    from taskq import migrate
    from taskq.demo.payments.play import play
    from taskq.settings import load

    settings = load(require_dsn=False, dsn=dsn, schema=schema)
    chosen = chosen_seed(seed)
    with workplace(dsn, keep=keep) as (found, work), progress(payments, "payments", "three workers") as tell:
        migrate.up(found, settings.schema)
        report = play(found, settings.schema, payments, chosen, work, tell, own=dsn is None)
    became = sum(int(row["n"]) for row in report.unknowns)
    well = f"{became} outcomes were unknown, each was settled; nothing was doubled or lost in {report.seconds:.0f} s"
    return conclude(report, well, as_json=as_json)
