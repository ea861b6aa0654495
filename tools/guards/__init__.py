"""The guards that the laws stand on, each as the text that removes it from the migrations.

A removal replaces text that stands in a migration file exactly once. ``prove_laws`` applies one at a time to a scratch
copy and expects one of the named tests to turn red. What is listed together in one guard is redundant alone: the rows
are protected twice, and only without both does a test see it.
"""

from __future__ import annotations

from dataclasses import dataclass

FILES = {
    "base": "00.01.00_01_pre_base.sql",
    "tables": "00.01.00_02_pre_tables.sql",
    "laws": "00.01.00_03_pre_laws.sql",
    "partitions": "00.01.00_04_pre_partitions.sql",
    "enqueue": "00.01.00_05_pre_enqueue.sql",
    "exchange": "00.01.00_06_pre_exchange.sql",
    "leases": "00.01.00_07_pre_leases.sql",
    "operate": "00.01.00_08_pre_operate.sql",
    "unknown": "00.01.00_09_pre_unknown.sql",
    "reconcile": "00.01.00_10_pre_reconcile.sql",
    "effects": "00.01.00_11_pre_terminal_effects.sql",
    "ordering": "00.01.00_13_pre_ordering.sql",
    "checkpoints": "00.01.00_12_pre_checkpoints.sql",
    "plans": "00.01.00_14_pre_plans.sql",
    "runs": "00.01.00_15_pre_runs.sql",
    "run_ends": "00.01.00_16_pre_run_ends.sql",
    "run_views": "00.01.00_17_pre_run_views.sql",
    "cohorts": "00.01.00_18_pre_cohorts.sql",
    "durable": "00.01.00_19_pre_durable.sql",
    "run_signals": "00.01.00_20_pre_run_signals.sql",
    "maps": "00.01.00_21_pre_maps.sql",
    "children": "00.01.00_22_pre_children.sql",
    "loops": "00.01.00_23_pre_loops.sql",
    "emits": "00.01.00_24_pre_emits.sql",
    "effect_steps": "00.01.00_25_pre_effect_steps.sql",
    "pauses": "00.01.00_26_pre_pauses.sql",
    "work_budgets": "00.01.00_27_pre_work_budgets.sql",
    "incidents": "00.01.00_28_pre_incidents.sql",
    "invariants": "00.01.00_29_pre_invariants.sql",
    "roles": "00.01.00_30_pre_roles.sql",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard and the tests that stand for it.

    Attributes:
        law: What it belongs to: a law's number, or a word.
        what: The guard in a few words.
        file: A key of ``FILES``.
        cuts: Pairs of text and its replacement; each text stands in the file exactly once.
        tests: ``file::test``, relative to ``tests``; parameters are all taken.
    """

    law: str
    what: str
    file: str
    cuts: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def guard(law: str, what: str, file: str, old: str, new: str, *tests: str) -> Guard:
    """A guard with one cut. Tests without a slash are in ``tests/laws``."""
    return guards(law, what, file, ((old, new),), *tests)


def guards(law: str, what: str, file: str, cuts: tuple[tuple[str, str], ...], *tests: str) -> Guard:
    """A guard with several cuts."""
    return Guard(law, what, file, cuts, tuple("laws/" + t if not t.startswith("/") else t[1:] for t in tests))
