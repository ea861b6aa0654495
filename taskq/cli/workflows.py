"""``taskq workflows list | show``: the workflows of an app and the plans that they come to. Needs no database."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskq.cli.options import JsonOption

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.workflow.plan import Plan

__all__ = ["app"]

AppOption = Annotated[
    str | None,
    typer.Option(
        "--app", help="The application object as module:attribute [TASKQ_APP].", metavar="APP", show_default=False
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at the workflows of an app and their plans.\n\n"
    "Exit codes: 0 done; 1 there is no such workflow, or it cannot run; 2 usage or settings.",
)


@app.command("list")
def list_(reference: AppOption = None, as_json: JsonOption = False) -> int:
    """List the workflows of an app; what is wrong with the wiring of one is told, and the exit code is 1."""
    from taskq.cli.output import ExitCode, note, show
    from taskq.errors import TaskQError

    loaded = _load(reference)
    rows: list[dict[str, Any]] = []
    for name in sorted(loaded.workflows):
        try:
            plan = _plan(loaded, name)
        except TaskQError as exc:
            rows.append({"workflow": name, "nodes": None, "edges": None, "plan": None, "fault": str(exc)})
        else:
            spec = plan.spec
            rows.append(
                {
                    "workflow": name,
                    "nodes": len(spec["nodes"]),
                    "edges": len(spec["edges"]),
                    "plan": plan.hash,
                    "fault": None,
                }
            )
    broken = [row for row in rows if row["fault"] is not None]
    show(rows, ["workflow", "nodes", "edges", "plan"], as_json=as_json, empty="the app has no workflows")
    for row in broken if not as_json else ():
        note(f"error: {' '.join(str(row['fault']).split())}")
    return ExitCode.FAILED if broken else ExitCode.OK


@app.command("show")
def show_(
    name: Annotated[str, typer.Argument(help="The workflow's name.", metavar="NAME", show_default=False)],
    reference: AppOption = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the plan of a workflow: its nodes, how each is run, edges with their policies, effects; or what is wrong.

    With --json the plan as it is stored, its hash, and the policies that its jobs point to.
    """
    from taskq.cli.output import print_json
    from taskq.workflow import show

    if mermaid and as_json:
        raise typer.BadParameter("give --mermaid or --json, not both")
    plan = _plan(_load(reference), name)
    if as_json:
        policies = {policy_id: policy.spec() for policy_id, policy in plan.policies.items()}
        print_json({"hash": plan.hash, "plan": plan.spec, "policies": policies})
    else:
        print(show.mermaid(plan) if mermaid else show.text(plan))


def _load(reference: str | None) -> TaskQ:
    from taskq.cli.apps import load_app
    from taskq.errors import ConfigurationError
    from taskq.settings import load

    settings = load(require_dsn=False, app=reference)
    if settings.app is None:
        raise ConfigurationError(
            "no app is named; give --app module:attribute, such as shop.tasks:app, or set TASKQ_APP"
        )
    return load_app(settings.app)


def _plan(loaded: TaskQ, name: str) -> Plan:
    """The plan of a workflow.

    Raises:
        TaskQError: There is no such workflow, its wiring is wrong, or its function raised.
    """
    from taskq.errors import TaskQError

    workflow = loaded.get_workflow(name)
    try:
        return workflow.plan
    except TaskQError:
        raise
    except Exception as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        raise TaskQError(
            f"workflow {name} raised {type(exc).__name__} while it was wired, at {last.filename}:{last.lineno}: {exc}"
        ) from None
