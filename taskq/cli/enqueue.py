"""``taskq enqueue TASK PAYLOAD``: one job from the shell, with the app or without."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from taskq.cli.options import DsnOption, JsonOption, SchemaOption

__all__ = ["command"]


def command(
    task: Annotated[str, typer.Argument(help="The task's name.", metavar="TASK", show_default=False)],
    payload: Annotated[
        str, typer.Argument(help="Its arguments by name, a JSON object.", metavar="JSON", show_default=False)
    ] = "{}",
    queue: Annotated[str | None, typer.Option("--queue", "-q", help="The task's own by default.")] = None,
    run_in: Annotated[str | None, typer.Option("--run-in", help="Not before this, such as 10m.", metavar="T")] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", help="Not before this instant, in ISO 8601.", metavar="TIME")
    ] = None,
    priority: Annotated[int | None, typer.Option("--priority", min=0, max=9, help="Higher goes first.")] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", help="At most one job of the task with it is in the queue.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The same request again gives the same job.")
    ] = None,
    app: Annotated[
        str | None,
        typer.Option("--app", help="Check the arguments against the task of this app, module:attribute."),
    ] = None,
    as_json: JsonOption = False,
    dsn: DsnOption = None,
    schema: SchemaOption = None,
) -> None:
    """Enqueue one job and print its id.

    Without --app the database does it, by what a worker has published about the task, and checks that the payload is a
    JSON object; with --app the arguments are checked against the task's signature first.

    Exit codes: 0 enqueued, or a key answered with the job that is there; 1 refused; 2 usage or settings; 3 cannot
    connect.
    """
    from taskq.cli.database import instant, open_database
    from taskq.cli.jobs import check_json
    from taskq.cli.output import print_json
    from taskq.durations import parse_duration
    from taskq.errors import InvalidDuration

    if not isinstance(check_json(payload, "the payload"), dict):
        raise typer.BadParameter("the payload must be a JSON object of arguments by name, such as '{\"order_id\": 7}'")
    if run_in is not None and run_at is not None:
        raise typer.BadParameter("give --run-in or --run-at, not both")
    try:
        seconds = None if run_in is None else parse_duration(run_in)
    except InvalidDuration as exc:
        raise typer.BadParameter(f"--run-in: {exc}") from None
    at = None if run_at is None else instant(run_at)
    if app is None:
        with open_database(dsn, schema) as database:
            found = database.value("enqueue", task, payload, queue, priority, at, seconds, unique_key, idempotency_key)
    else:
        options: dict[str, Any] = {
            "queue": queue,
            "priority": priority,
            "run_in": seconds,
            "run_at": at,
            "unique_key": unique_key,
            "idempotency_key": idempotency_key,
        }
        given = {k: v for k, v in options.items() if v is not None}
        found = _through_app(app, task, payload, given, dsn=dsn, schema=schema)
    if as_json:
        print_json({"id": found})
    else:
        print(found)


def _through_app(reference: str, name: str, payload: str, options: Any, *, dsn: str | None, schema: str | None) -> str:
    from taskq.cli.apps import load_app
    from taskq.cli.serve import choose_database
    from taskq.errors import PayloadError
    from taskq.settings import load

    settings = load(require_dsn=False, app=reference, dsn=dsn, schema=schema)
    app = load_app(reference)
    task = app.get_task(name)
    try:
        arguments = task.codec.decode(payload)
    except PayloadError as exc:
        raise typer.BadParameter(str(exc)) from None
    choose_database(app, settings)
    try:
        return str(task.using(**options).enqueue_sync(**arguments).id)
    finally:
        app.close_sync()
