"""``taskq runs list | show | tree | wait | signal | pause | resume | budget | grant | cancel | retry``: runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskq.cli.options import DsnOption, JsonOption, LimitOption, ReasonOption, SchemaOption, TimeoutOption
from taskq.cli.trees import Place, forest, indented

if TYPE_CHECKING:
    from taskq.cli.database import Database

__all__ = ["app"]

ALL = 1_000_000
"""More nodes than a run has."""
MOST_PLACES = 100
"""Where the view ``ready_nodes`` stops counting."""
STATUSES = ("running", "paused", "recovering", "succeeded", "failed", "cancelled")
IdsArgument = Annotated[
    list[str], typer.Argument(help="The ids of runs, in full.", metavar="ID...", show_default=False)
]
WhyOption = Annotated[
    str, typer.Option("--reason", help="Why; it goes on the record, and is shown where the run is.", show_default=False)
]
IdArgument = Annotated[str, typer.Argument(help="The id of a run.", metavar="ID", show_default=False)]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at runs of workflows, wait for them, signal, pause, cancel and retry them.\n\n"
    "Exit codes: 0 done; 1 refused, or there is no such run; 2 usage or settings; 3 cannot connect.",
)


@app.command("list")
def list_(
    workflow: Annotated[
        list[str] | None, typer.Option("--workflow", help="A workflow; may be repeated.", show_default=False)
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", help=f"{', '.join(STATUSES)}; repeat it or separate by commas.", show_default=False),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="The run key that it was started with.", show_default=False)
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """List runs that meet every condition, the newest first, with how many of their nodes are done."""
    from taskq.cli.database import open_database
    from taskq.cli.output import note, show

    asked = [part.strip() for each in status or () for part in each.split(",")]
    if unknown := sorted(set(asked) - set(STATUSES)):
        raise typer.BadParameter(
            f"a run is never {unknown[0]!r}; there are {', '.join(STATUSES)}", param_hint="--status"
        )
    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("runs", workflow or None, asked or None, key, limit)
    shown = rows if as_json else [_in_short(row) for row in rows]
    columns = ["id", "workflow", "run_key", "parent", "status", "done", "created_at", "finished_at", "error"]
    if not as_json and not any(row["parent"] for row in rows):
        columns.remove("parent")
    optional = ["finished_at", "created_at", "run_key", "done", "parent"]
    show(shown, columns, as_json=as_json, empty="no runs", optional=optional)
    if len(rows) == limit and not as_json:
        note(f"the newest {limit}; --limit shows more")


@app.command("show")
def show_(
    id_: IdArgument,
    receipts: Annotated[
        bool,
        typer.Option(
            "--receipts",
            help="Also the record of its transitions; exit code 1 if one of them is missing, or out of its place.",
        ),
    ] = False,
    children: Annotated[
        str | None,
        typer.Option(
            "--children",
            help="Instead the children of this node, a map, emit or loop, and what became of each.",
            metavar="NODE",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        int, typer.Option("--start", help="Of a map, or a loop: the first item, or round, to show, from 0.", min=0)
    ] = 0,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Show one run: its row, nodes, signals, effects and whether each is settled, what operators did, result, error.

    A map, emit or loop is one line, with how far it is; --children shows its children, or rounds, --limit at a time.
    """
    from taskq.cli.database import job_id, open_database
    from taskq.cli.output import ExitCode, note, print_json, print_table

    run = job_id(id_, "run")
    with open_database(dsn, schema) as database, database.snapshot():
        if children is not None:
            return _children(database, run, children, start, limit, as_json=as_json)
        faults = database.rows("receipt_faults", run) if receipts else []
        ring = database.rows("receipts", run) if receipts else []
        found = database.rows("run", run)
        if not found:
            return _not_found(run, faults, ring, as_json=as_json)
        is_map = found[0]["items"] is not None
        nodes = database.rows("run_nodes", run, start, limit if is_map else ALL)
        waits = database.rows("run_waits", run)
        signals = database.rows("run_signals", run)
        effects = database.rows("run_effects", run)
        audit = database.rows("audit", run)
    row = found[0]
    if as_json:
        told: dict[str, Any] = {"waits": waits, "signals": signals, "effects": effects, "audit": audit}
        if receipts:
            told |= {"receipts": ring, "receipt_faults": faults}
        print_json({**row, "nodes": nodes, **told})
        return ExitCode.FAILED if faults else ExitCode.OK
    values = ("input", "result", "error", "meta")
    told_apart = (*values, "resume", "work_budget_of", "work_budget", "work_begun")
    facts = [{"what": k.replace("_", " "), "is": v} for k, v in row.items() if k not in told_apart and v is not None]
    if row["resume"] is not None:
        facts.append({"what": "goes on with", "is": _resuming(row)})
    if row["work_budget"] is not None:
        facts.append({"what": "work budget", "is": _budget(row)})
    print_table(facts, ["what", "is"])
    for name in values:
        if row[name] is not None:
            print(f"\n{name}\n{json.dumps(row[name], indent=2, ensure_ascii=False)}")
    print("\nnodes")
    _print_nodes(nodes)
    if is_map and len(nodes) == limit:
        note(f"from item {start}, {limit}; --start and --limit show more")
    if waits:
        print("\nwaits for signals")
        print_table(waits, ["node", "signal", "since", "until", "job_id"])
    if signals:
        print("\nsignals")
        print_table([_signal(each) for each in signals], ["name", "key", "sent_at", "became", "payload"])
    if effects:
        print("\neffects")
        print_table(
            [{**e, "settled": e["settled_how"] or "no", "error": _said(e["error"])} for e in effects],
            ["effect_key", "node", "on_status", "task", "job_id", "status", "settled", "error"],
            optional=["on_status", "task", "node"],
        )
    if audit:
        print("\naudit")
        print_table(
            [{**a, "details": json.dumps(a["details"])} for a in audit], ["at", "actor", "action", "reason", "details"]
        )
    if receipts:
        print("\nreceipts")
        _print_ring(ring)
    for fault in faults:
        note(f"error: the receipts of this run cannot be trusted: {fault['code']}: {fault['detail']}")
    return ExitCode.FAILED if faults else ExitCode.OK


def _children(database: Database, run: str, node: str, start: int, limit: int, *, as_json: bool) -> int:
    """Show the children of a map, the children and pages of an emit, or the rounds of a loop."""
    from taskq.cli.output import ExitCode, note, print_json

    if not database.rows("run", run):
        return _not_found(run, [], [], as_json=as_json)
    named = [each for each in database.rows("run_nodes", run, 0, ALL) if each["name"] == node]
    if not named or (named[0]["map"] is None and named[0]["loop"] is None):
        why = "has not begun as a map or a loop, or is none" if named else "is none of the run"
        raise typer.BadParameter(f"node {node!r} {why}; taskq runs show lists its nodes", param_hint="--children")
    shown = database.rows("run_nodes", named[0]["child_run"], start, limit)
    if as_json:
        print_json({"id": run, "node": node, "map": named[0]["map"], "loop": named[0]["loop"], "children": shown})
        return ExitCode.OK
    print(f"{node}: {_about(named[0])}\n")
    _print_nodes(shown)
    if len(shown) == limit:
        note(f"from item {start}, {limit}; --start and --limit show more")
    return ExitCode.OK


def _print_nodes(nodes: list[dict[str, Any]]) -> None:
    from taskq.cli.output import print_table

    items = any(node["item"] is not None for node in nodes)
    print_table(
        [
            {**n, "node": n["name"], "about": _about(n), "item": json.dumps(n["item"], ensure_ascii=False)}
            for n in nodes
        ],
        [
            "node",
            *(["item"] if items else []),
            "task",
            "status",
            "attempt",
            "job_id",
            "ready_at",
            "finished_at",
            "about",
        ],
        optional=["ready_at", "finished_at", "attempt", "task"],
    )


@app.command()
def tree(id_: IdArgument, as_json: JsonOption = False, dsn: DsnOption = None, schema: SchemaOption = None) -> int:
    """Show the nodes of a run, each below what it comes after: its status, what it waits for, what blocks it.

    A node that comes after several stands below the last of them, and the others are named. The nodes of a child run
    stand below the node that it stands for; a map, or a loop, is one line.
    """
    from taskq.cli.database import job_id, open_database
    from taskq.cli.output import ExitCode, print_json, print_table

    run = job_id(id_, "run")
    with open_database(dsn, schema) as database, database.snapshot():
        found = database.rows("run", run)
        if not found:
            return _not_found(run, [], [], as_json=as_json)
        graph = _Graph.of(database, run)
        if as_json:
            print_json(
                {"id": run, "workflow": found[0]["workflow"], "status": found[0]["status"], "nodes": graph.told()}
            )
            return ExitCode.OK
        shown = list(_shown(database, graph, 0))
    print(f"{found[0]['workflow']} {run} is {_status(found[0])}")
    if found[0]["resume"] is not None:
        row = found[0]
        print(f"since {row['paused_since']}, by {row['paused_by']}: {row['paused_reason']}")
        print(f"goes on with: {_resuming(row)}")
    print()
    columns = ["node", "status", "task", "also_after", "about"]
    if not any(row["also_after"] for row in shown):
        columns.remove("also_after")
    print_table(shown, columns, optional=["task"])
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class _Graph:
    """The nodes of one run, the edges to each, and where each stands in the list."""

    nodes: dict[int, dict[str, Any]]
    sources: dict[int, list[dict[str, Any]]]
    places: list[Place]

    @classmethod
    def of(cls, database: Database, run: str) -> _Graph:
        nodes = {node["ix"]: node for node in database.rows("run_nodes", run, 0, ALL)}
        sources: dict[int, list[dict[str, Any]]] = {ix: [] for ix in nodes}
        for edge in database.rows("run_edges", run):
            if edge["target"] in sources:
                sources[edge["target"]].append(edge)
        return cls(nodes, sources, forest({ix: [e["source"] for e in into] for ix, into in sources.items()}))

    def told(self) -> list[dict[str, Any]]:
        """The nodes for programs."""
        names = {ix: node["name"] for ix, node in self.nodes.items()}
        return [
            {
                "depth": place.depth,
                "after": [
                    {"node": names.get(e["source"]), "policy": e["policy"], "when": e["arm"], "merge": e["merge"]}
                    for e in self.sources[place.ix]
                ],
                **self.nodes[place.ix],
            }
            for place in self.places
        ]


def _shown(database: Database, graph: _Graph, depth: int) -> Iterator[dict[str, Any]]:
    """The nodes for people, with those of child runs."""
    for place in graph.places:
        node = graph.nodes[place.ix]
        yield {
            "node": indented(node["name"], depth + place.depth),
            "status": node["status"],
            "task": node["task"],
            "also_after": ", ".join(graph.nodes[ix]["name"] for ix in place.others if ix in graph.nodes),
            "about": _about(node),
        }
        if node["child_run"] is not None and node["map"] is None and node["loop"] is None:
            yield from _shown(database, _Graph.of(database, node["child_run"]), depth + place.depth + 1)


@app.command()
def signal(
    id_: IdArgument,
    name: Annotated[str, typer.Argument(help="The name that a body waits for.", metavar="NAME")],
    payload: Annotated[str, typer.Argument(help="What to send.", metavar="JSON")] = "null",
    key: Annotated[
        str | None,
        typer.Option("--key", help="Sent again under one key, it is there once.", metavar="TEXT", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Send a signal to a run: to one of its nodes, or of its child runs, that waits with ctx.wait_for, or will.

    The node that has waited longest is given it (given); where none waits it is kept for the first that asks (kept).
    Refused for a run that has ended. Answers already where it was sent before under the same key.
    """
    from taskq.cli.jobs import check_json
    from taskq.cli.signals import send

    check_json(payload, "JSON")
    return send(id_, name, payload, key, to="run", as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def wait(
    id_: IdArgument,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Wait until a run has ended, and print its result as JSON.

    Exit code 1 where it failed or was cancelled, or has not ended in time.
    """
    from taskq.cli.waits import until_ended

    return until_ended(id_, timeout, of="run", as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def pause(
    ids: IdsArgument,
    reason: WhyOption,
    code: Annotated[
        str, typer.Option("--code", help="A short name for the kind of reason, such as incident-42.", metavar="NAME")
    ] = "operator",
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Pause runs with their child runs: nothing of them starts until resume; what runs goes on to its end.

    Answers paused, or already: it is paused, and keeps the code that it has. A run that has finished, or is being
    cancelled (cancelling), is left alone, and the exit code is 1.
    """
    return _each("pause_run", ids, (reason, code), ("paused", "already"), as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def resume(
    ids: IdsArgument,
    reason: WhyOption,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Let paused runs go on with all that is paused below them: what the pause held is due when it was.

    Answers resumed, not_paused, or finished, with exit code 1. Refused while a run above it is paused: resume that.
    """
    return _each("resume_run", ids, (reason,), ("resumed", "not_paused"), as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def budget(
    id_: IdArgument,
    number: Annotated[
        int,
        typer.Argument(
            help="How many bodies it may begin in all, those that it has begun included.",
            metavar="NUMBER",
            min=1,
            max=10_000_000,
            show_default=False,
        ),
    ],
    reason: WhyOption,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Set the work budget of a run: how many bodies it may begin in all, with the runs below it.

    What waits for it goes on at once. Answers set, or already, where it was so many; finished, with exit code 1, for a
    run that has ended. Refused for a run that was admitted without a budget, and where its budget is that of a run
    above it, which the refusal names.
    """
    return _each(
        "set_work_budget",
        [id_],
        (reason,),
        ("set", "already"),
        first=(number,),
        as_json=as_json,
        dsn=dsn,
        schema=schema,
    )


@app.command()
def grant(
    id_: IdArgument,
    reason: WhyOption,
    incident: Annotated[
        list[str] | None,
        typer.Option(
            "--incident",
            help="Only this one; may be repeated. Else all that wait for it.",
            metavar="ID",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Grant the nodes of a run that incidents hold up exactly one more recovery each; a pause for that is over.

    Answers granted, already, or paused: it is granted, and the run is paused for another reason, so resume it. Exit
    code 1 where nothing of the run waits for a grant. Child runs have incidents of their own: taskq incidents list.
    """
    from taskq.cli.database import job_id, open_database
    from taskq.cli.incidents import grant_all
    from taskq.cli.output import ExitCode, note, show

    run = job_id(id_, "run")
    with open_database(dsn, schema) as database:
        found = database.rows("run", run)
        if not found:
            return _not_found(run, [], [], as_json=as_json)
        waiting = [row["id"] for row in database.rows("current_incidents", run)]
        wanted = waiting if incident is None else [job_id(each, "incident") for each in incident]
        if not wanted:
            show([], ["id", "answer"], as_json=as_json, empty="nothing of it waits for a grant")
            if not as_json:
                note(_instead(found[0]))
            return ExitCode.FAILED
        return grant_all(database, wanted, reason, run=run, as_json=as_json)


@app.command()
def cancel(
    id_: IdArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Cancel a run: cancelled, or requested, where jobs of it still run or their outcome is unknown.

    What waits is cancelled with it; what runs is told. Where every failure is dealt with, cancelling what is left may
    also end it as succeeded or failed. Answers finished or not_found, and exits with 1, where nothing was done.
    """
    return _do("cancel_run", id_, reason, undone=("finished", "not_found"), as_json=as_json, dsn=dsn, schema=schema)


@app.command()
def retry(
    id_: IdArgument,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> int:
    """Reopen a run that has failed or was cancelled (reopened): what did not succeed runs again, and what it blocked.

    Refused while what its end promised is not settled, and once a compensation has undone some of its work.
    """
    return _do("retry_run", id_, reason, undone=(), as_json=as_json, dsn=dsn, schema=schema)


def _do(
    query: str,
    id_: str,
    reason: str | None,
    *,
    undone: tuple[str, ...],
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    from taskq.cli.database import actor, job_id, open_database
    from taskq.cli.output import ExitCode, print_json, show
    from taskq.errors import DatabaseRefusal

    run = job_id(id_, "run")
    with open_database(dsn, schema) as database:
        try:
            answer = database.value(query, run, reason, actor())
        except DatabaseRefusal as exc:
            if not as_json:
                raise
            print_json([{"id": run, "answer": "refused", "why": str(exc)}])
            return ExitCode.FAILED
    show([{"id": run, "answer": answer}], ["id", "answer"], as_json=as_json)
    return ExitCode.FAILED if answer in undone else ExitCode.OK


def _each(
    query: str,
    ids: list[str],
    said: tuple[str, ...],
    done: tuple[str, ...],
    *,
    first: tuple[int, ...] = (),
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    """Pause or resume several, each in a transaction of its own; ``done`` are the answers after which it is so."""
    from taskq.cli.database import actor, job_id, open_database
    from taskq.cli.output import ExitCode, show
    from taskq.errors import DatabaseRefusal

    runs = [job_id(each, "run") for each in ids]
    rows: list[dict[str, Any]] = []
    with open_database(dsn, schema) as database:
        for run in runs:
            try:
                rows.append({"id": run, "answer": database.value(query, run, *first, said[0], actor(), *said[1:])})
            except DatabaseRefusal as exc:
                rows.append({"id": run, "answer": "refused", "why": str(exc)})
    columns = ["id", "answer", "why"] if any("why" in row for row in rows) else ["id", "answer"]
    show(rows, columns, as_json=as_json)
    return ExitCode.OK if all(row["answer"] in done for row in rows) else ExitCode.FAILED


def _not_found(run: str, faults: list[dict[str, Any]], ring: list[dict[str, Any]], *, as_json: bool) -> int:
    from taskq.cli.output import ExitCode, print_json
    from taskq.errors import RunNotFound

    without = f"; {faults[0]['code']}: {faults[0]['detail']}" if faults else ""
    missing = RunNotFound(f"there is no run {run}{without}", hint="Check the id; retention may have dropped it.")
    if not as_json:
        raise missing
    told = {"receipts": ring, "receipt_faults": faults} if faults else {}
    print_json({"id": run, "answer": "not_found", "why": str(missing), **told})
    return ExitCode.FAILED


def _print_ring(ring: list[dict[str, Any]]) -> None:
    """A line a receipt; where one is about several nodes, the first and how many more."""
    from taskq.cli.output import print_table

    def nodes(receipt: dict[str, Any]) -> str | None:
        if receipt["node"] is None:
            return None if receipt["n"] == 1 else f"{receipt['n']:,} nodes"
        name = receipt["name"] or f"number {receipt['node']}"
        return str(name) if receipt["n"] == 1 else f"{name} and {receipt['n'] - 1:,} more"

    print_table(
        [{**each, "about": nodes(each)} for each in ring],
        ["sequence", "at", "kind", "about", "claim_epoch", "status"],
        empty="there are none",
    )


def _in_short(row: dict[str, Any]) -> dict[str, Any]:
    """A run as tables show it."""
    done = f"{row['node_count'] - row['open_nodes']:,}/{row['node_count']:,}"
    return {**row, "status": _status(row), "done": done, "error": _said(row["error"])}


def _status(run: dict[str, Any]) -> str:
    if run["status"] in ("running", "recovering") and run["cancel_requested_at"] is not None:
        return f"{run['status']}, cancelling"
    if run["status"] == "paused" and run["paused_code"] is not None:
        return f"paused ({run['paused_code']})"
    return str(run["status"])


def _resuming(run: dict[str, Any]) -> str:
    """The command with which a paused run goes on."""
    if run["paused_incident"] is not None:
        return f"taskq runs grant {run['id']} --reason WHY"
    return f"taskq runs resume {run['resume']} --reason WHY"


def _instead(run: dict[str, Any]) -> str:
    """What to do about a run of which nothing waits for a grant."""
    if run["finished_at"] is not None:
        return f"it has {run['status']}" if run["status"] != "cancelled" else "it was cancelled"
    if run["status"] == "paused":
        return f"it is {_status(run)}, and goes on with: {_resuming(run)}"
    return f"taskq runs tree {run['id']} shows what it does, or waits for"


def _incident(node: dict[str, Any]) -> str | None:
    """What holds a node up that waits for a grant, with the command that goes on."""
    if node["held_reason"] != "incident" or node["incident"] is None:
        return None
    of = node["incident"]
    return f"{of['code']}: {of['message']}; taskq incidents grant {of['id']} --reason WHY"


def _budget(run: dict[str, Any]) -> str:
    """How far the work budget of a run is spent, and the command that raises it."""
    of = "" if run["work_budget_of"] == run["id"] else f", of run {run['work_budget_of']}"
    said = f"{run['work_begun']:,} of {run['work_budget']:,} bodies have begun{of}"
    if run["work_begun"] < run["work_budget"] or run["finished_at"] is not None:
        return said
    return f"{said}; for more: taskq runs budget {run['work_budget_of']} NUMBER --reason WHY"


def _about(node: dict[str, Any]) -> str | None:
    """Why a node stands where it stands."""
    if node["ready_for"] == "budget":
        return f"ready, and waits for the work budget of run {node['ready_of']}, which is spent"
    if node["status"] == "waiting":
        return f"waits for {', '.join(node['waits_for'] or ['nothing'])}"
    if node["status"] == "blocked":
        return f"blocked by {node['blocked_by']}"
    if node["ready_for"] is not None:
        return "; ".join(filter(None, (_child(node), _ready(node))))
    if node["status"] == "held":
        return _child(node) or _incident(node) or f"held: {node['held_reason']}"
    if node["incident"] is not None:
        return f"{node['incident']['code']}: {node['incident']['message']}"
    if node["status"] == "unknown":
        return "its outcome is to be decided: taskq jobs unknown"
    if node["map"] is not None or node["loop"] is not None:
        return "; ".join(filter(None, (_said(node["error"]), _child(node))))
    return _said(node["error"]) or _child(node)


def _ready(node: dict[str, Any]) -> str:
    """What a node with a job waits for, and its place there."""
    of, place = node["ready_of"], node["place"]
    if node["ready_for"] == "paused":
        return f"queue {of} is paused"
    if node["ready_for"] == "time":
        return f"not before {of}"
    where = {"capacity": "for a worker of", "cohort": "for a slot of cohort"}
    return f"{where[node['ready_for']]} {of}, place {place if place < MOST_PLACES else f'{place} or later'}"


def _signal(signal: dict[str, Any]) -> dict[str, Any]:
    """A signal as tables show it."""
    from taskq.cli.jobs import shortened

    word = {"kept": "kept", "given": "given to", "taken": "taken by", "refused": "refused by"}[signal["state"]]
    became = word if signal["job_id"] is None else f"{word} {signal['node'] or signal['job_id']}"
    if signal["refused_why"]:
        became = f"{became}: {signal['refused_why']}"
    return {**signal, "became": became, "payload": shortened(signal["payload"])}


def _child(node: dict[str, Any]) -> str | None:
    if (counts := node["map"]) is not None:
        words = ("succeeded", "failed", "cancelled", "active", "waiting")
        said = [f"{counts[word]:,} {word}" for word in words if counts[word]]
        of = f"map of {counts['items']:,}"
        if counts["pages"] is not None:
            how = {"asked": ", the last is asked for", "again": ", and there are more", "refused": ", the last refused"}
            of = f"emit of {counts['items']:,} in {counts['pages']:,} pages{how.get(counts['source'], '')}"
        return f"{of}: {', '.join(said) or 'nothing to do'}; run {node['child_run']}"
    if (rounds := node["loop"]) is not None:
        time = "" if rounds["within"] is None else f", {rounds['counted']:,.0f} of {rounds['within']:,g} s"
        if node["status"] in ("succeeded", "failed", "cancelled"):
            many = "round" if rounds["rounds"] == 1 else "rounds"
            return f"loop of {rounds['rounds']:,} {many}{time}; run {node['child_run']}"
        return f"loop in round {rounds['rounds']:,} of at most {rounds['most_rounds']:,}{time}; run {node['child_run']}"
    return None if node["child_run"] is None else f"run {node['child_run']} is {node['child_status']}"


def _said(error: Any) -> str | None:
    return None if error is None else f"{error.get('type')}: {error.get('message')}"
