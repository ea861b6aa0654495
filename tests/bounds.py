"""Which UPDATE and DELETE statements taskq can execute, and what bounds the rows that each may touch.

The statements are parsed with PostgreSQL's own grammar: those in ``db/sql``, those in the bodies of the migrations'
functions, and those that a function builds as text and executes. A write is bounded where its WHERE compares a key of
its table with a value, with rows of ``unnest``, or with a query that has a LIMIT, itself or through CTEs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pglast import ast, parse_plpgsql, parse_sql
from pglast.enums import BoolExprType, SubLinkType
from pglast.stream import RawStream

from taskq.db.queries import load

SCHEMA = "public"
"""What the parser for PL/pgSQL, which has no catalog, can look up."""

KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "jobs": (("id",),),
    "history": (("id",),),
    "workers": (("id",),),
    "effect_intents": (("id",), ("effect_key",)),
    "leader": (("role",),),
    "queues": (("name",),),
    "sleepers": (("worker_id",),),
    "idempotency_keys": (("scope", "key"),),
    "unique_keys": (("scope", "key"),),
    "ordering_keys": (("key",),),
    "ordering_halts": (("key", "job_id"),),
    "task_config": (("name",),),
    "unknowns": (("job_id", "claim_epoch"),),
    "signals": (("id",),),
    "steps": (("job_id", "generation", "kind", "name", "occurrence"),),
    "installation": (("one",),),
    "limits": (("name",),),
    "runs": (("id",),),
    "run_pauses": (("run_id",),),
    "work_budgets": (("run_id",),),
    "incidents": (("id",), ("job_id", "is_current")),
    "preparations": (("job_id", "claim_epoch"),),
    "facts": (("owner", "name"),),
    "nodes": (("id",), ("run_id", "ix")),
    "receipts": (("run_id", "sequence"),),
    "stock": (("item",),),
}
"""The columns that pick at most one row (of history: one row, whose partition is found by its day)."""


@dataclass(frozen=True)
class Write:
    """One UPDATE or DELETE.

    Attributes:
        place: The function or named query that holds it.
        verb: ``update`` or ``delete``.
        table: The table, without its schema.
        predicate: Its WHERE clause as PostgreSQL's grammar writes it out, empty if it has none.
        bounded: Whether its rows are bounded by a key or a LIMIT.
    """

    place: str
    verb: str
    table: str
    predicate: str
    bounded: bool


def of_sql(place: str, text: str, variables: Sequence[str] = ()) -> list[Write]:
    """The writes of one or more SQL statements, in order.

    Args:
        place: What to call the place in the result.
        text: SQL.
        variables: Names that stand for values and not for columns.
    """
    found: list[Write] = []
    for raw in parse_sql(text):
        for node in _walk(raw.stmt):
            if isinstance(node, ast.UpdateStmt | ast.DeleteStmt):
                found.append(_write(place, node, raw.stmt, set(variables)))
    return found


def of_migration(text: str) -> list[Write]:
    """The writes in the functions that a migration creates, and in its DO blocks."""
    found: list[Write] = []
    for raw in parse_sql(text.replace("{{schema}}", SCHEMA)):
        statement = raw.stmt
        if isinstance(statement, ast.CreateFunctionStmt):
            name = statement.funcname[-1].sval
            options = {option.defname: option.arg for option in statement.options}
            arguments = [p.name for p in statement.parameters or () if p.name]
            if options["language"].sval == "plpgsql":
                found += _of_plpgsql(name, RawStream()(statement), arguments)
            else:
                found += of_sql(name, options["as"][0].sval, arguments)
        elif isinstance(statement, ast.DoStmt):
            body = next(option.arg.sval for option in statement.args if option.defname == "as")
            found += _of_plpgsql(
                "do", f"create function f() returns void language plpgsql as $outermost${body}$outermost$", []
            )
    return found


def of_queries(file: Path) -> list[Write]:
    """The writes of a file of named queries, each called ``file: name``."""
    found: list[Write] = []
    for name, text in load(file.stem, SCHEMA).items():
        found += of_sql(f"{file.stem}: {name}", text)
    return found


def _of_plpgsql(name: str, text: str, arguments: list[str]) -> list[Write]:
    tree = parse_plpgsql(text)
    variables = {*arguments, *_values(tree, "refname"), *_values(tree, "fieldname")}
    found: list[Write] = []
    dynamic = list(_values(list(_nodes(tree, "PLpgSQL_stmt_dynexecute")), "query"))
    for query in _values(tree, "query"):
        if query in dynamic:
            found += _of_text(name, query, variables)
        elif re.match(r"\s*(with|insert|update|delete|select)\b", query, re.I):
            found += of_sql(name, query, sorted(variables))
    return found


def _of_text(name: str, expression: str, variables: set[str]) -> list[Write]:
    """The writes of a statement that is executed from text: every string constant in the expression is one."""
    found: list[Write] = []
    for node in _walk(parse_sql(f"select {expression}")[0].stmt):
        if isinstance(node, ast.A_Const) and isinstance(node.val, ast.String):
            text = node.val.sval
            if not re.search(r"\b(update|delete)\b", text, re.I):
                continue
            text = re.sub(r"%1\$I", SCHEMA, text)
            text = re.sub(r"%(\d\$)?I", "given", text)
            text = re.sub(r"%(\d\$)?L", "'given'", text)
            found += of_sql(name, text, sorted(variables))
    return found


def _write(place: str, node: Any, whole: Any, variables: set[str]) -> Write:
    table = node.relation.relname
    alias = node.relation.alias.aliasname if node.relation.alias else table
    where = node.whereClause
    bounded = False
    if where is not None:
        scope = _Scope(node, whole, alias, variables)
        bounded_columns = {c for part in _conjuncts(where) for c in scope.bounded_columns(part)}
        keys = (*KEYS.get(table, ()), ("ctid",))
        bounded = any(set(key) <= bounded_columns for key in keys)
    return Write(
        place,
        "update" if isinstance(node, ast.UpdateStmt) else "delete",
        table,
        RawStream()(where) if where else "",
        bounded,
    )


class _Scope:
    """The names that a write sees: its target, what it joins, and the CTEs of its statement."""

    def __init__(self, node: Any, whole: Any, alias: str, variables: set[str]) -> None:
        self.alias = alias
        self.variables = variables
        self.ctes = {cte.ctename: cte.ctequery for cte in _walk(whole) if isinstance(cte, ast.CommonTableExpr)}
        self.sources: dict[str, Any] = {}
        joined = node.fromClause if isinstance(node, ast.UpdateStmt) else node.usingClause
        for item in joined or ():
            for part in _walk(item, into_queries=False):
                if isinstance(part, ast.RangeVar):
                    self.sources[part.alias.aliasname if part.alias else part.relname] = part
                elif isinstance(part, ast.RangeSubselect | ast.RangeFunction):
                    self.sources[part.alias.aliasname] = part

    def bounded_columns(self, part: Any) -> set[str]:
        """The target's columns that a condition compares with boundedly many values."""
        if isinstance(part, ast.A_Expr) and part.name[-1].sval == "=":
            for one, other in ((part.lexpr, part.rexpr), (part.rexpr, part.lexpr)):
                column = self._own(one)
                if column and self._bounded(other):
                    return {column}
        if isinstance(part, ast.SubLink) and part.subLinkType == SubLinkType.ANY_SUBLINK and part.testexpr is not None:
            columns = part.testexpr.args if isinstance(part.testexpr, ast.RowExpr) else [part.testexpr]
            names = {name for c in columns if (name := self._own(c))}
            return names if self._bounded_query(part.subselect) else set()
        return set()

    def _own(self, node: Any) -> str | None:
        """The name of the target's column that an expression is, if it is one."""
        if not isinstance(node, ast.ColumnRef) or isinstance(node.fields[-1], ast.A_Star):
            return None
        names = [f.sval for f in node.fields]
        if len(names) == 2:
            return names[1] if names[0] == self.alias else None
        return names[0] if len(names) == 1 and names[0] not in self.variables else None

    def _bounded(self, node: Any) -> bool:
        """Whether an expression has boundedly many values: it names no column, or one of a bounded source."""
        if isinstance(node, ast.SubLink):
            return self._bounded_query(node.subselect)
        for part in _walk(node, into_queries=False):
            if isinstance(part, ast.SubLink):
                if not self._bounded_query(part.subselect):
                    return False
            elif isinstance(part, ast.ColumnRef):
                names = [getattr(f, "sval", "*") for f in part.fields]
                if names[0] in self.sources and len(names) > 1:
                    if not self._bounded_source(self.sources[names[0]]):
                        return False
                elif names[0] not in self.variables:
                    return False
        return True

    def _bounded_source(self, source: Any, seen: frozenset[str] = frozenset()) -> bool:
        if isinstance(source, ast.RangeFunction):
            call = source.functions[0][0]
            return isinstance(call, ast.FuncCall) and call.funcname[-1].sval == "unnest"
        if isinstance(source, ast.RangeSubselect):
            return self._bounded_query(source.subquery, seen)
        if source.schemaname is None and source.relname in self.ctes and source.relname not in seen:
            return self._bounded_query(self.ctes[source.relname], seen | {source.relname})
        return False

    def _bounded_query(self, query: Any, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a query has a LIMIT, or reads from bounded sources only."""
        if not isinstance(query, ast.SelectStmt):
            return False
        if query.limitCount is not None:
            return True
        items = [
            part
            for item in query.fromClause or ()
            for part in _walk(item, into_queries=False)
            if isinstance(part, ast.RangeVar | ast.RangeSubselect | ast.RangeFunction)
        ]
        return all(self._bounded_source(item, seen) for item in items)


def _conjuncts(node: Any) -> Iterator[Any]:
    if isinstance(node, ast.BoolExpr) and node.boolop == BoolExprType.AND_EXPR:
        for arg in node.args:
            yield from _conjuncts(arg)
    elif isinstance(node, ast.BooleanTest):
        yield from _conjuncts(node.arg)
    else:
        yield node


def _walk(node: Any, *, into_queries: bool = True) -> Iterator[Any]:
    """A node and all below it."""
    if isinstance(node, tuple | list):
        for item in node:
            yield from _walk(item, into_queries=into_queries)
    elif isinstance(node, ast.Node):
        yield node
        if not into_queries and isinstance(node, ast.SubLink | ast.RangeSubselect):
            return
        for name in node:
            yield from _walk(getattr(node, name), into_queries=into_queries)


def _nodes(tree: Any, kind: str) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == kind:
                yield value
            yield from _nodes(value, kind)
    elif isinstance(tree, list):
        for item in tree:
            yield from _nodes(item, kind)


def _values(tree: Any, key: str) -> Iterator[str]:
    for value in _nodes(tree, key):
        if isinstance(value, str):
            yield value


def shown(writes: Sequence[Write]) -> str:
    """Writes as text, for a failing test's message."""
    return json.dumps([w.__dict__ for w in writes], indent=1)
