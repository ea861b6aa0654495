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
    ordering_key: Annotated[
        str | None, typer.Option("--ordering-key", help="Jobs with it run one at a time, in order.")
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

    With --json it says whether the job is new. A note on standard error tells if no live worker serves its queue.

    Exit codes: 0 enqueued, or a key answered with the job that is there; 1 refused; 2 usage or settings; 3 cannot
    connect.
    """
    from taskq.cli.database import instant, queue_name
    from taskq.cli.jobs import check_json
    from taskq.cli.output import note, print_json
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
    options: dict[str, Any] = {
        "queue": None if queue is None else queue_name(queue),
        "priority": priority,
        "run_in": seconds,
        "run_at": None if run_at is None else instant(run_at),
        "unique_key": unique_key,
        "idempotency_key": idempotency_key,
        "ordering_key": ordering_key,
    }
    if app is None:
        found, is_new, unserved = _by_name(task, payload, options, dsn=dsn, schema=schema)
    else:
        given = {k: v for k, v in options.items() if v is not None}
        found, is_new, unserved = _through_app(app, task, payload, given, dsn=dsn, schema=schema)
    if as_json:
        print_json({"id": found, "new": is_new})
    else:
        print(found)
        if not is_new:
            note("this job was there already, with the same key; nothing was enqueued")
    if unserved is not None:
        note(f"no live worker serves the queue {unserved} now, so the job waits until one does")


def _by_name(
    task: str, payload: str, options: dict[str, Any], *, dsn: str | None, schema: str | None
) -> tuple[str, bool, str | None]:
    """Enqueue by what is published; the job's id, whether it is new, and its queue if no live worker serves that."""
    from taskq.cli.database import open_database
    from taskq.errors import TaskNotPublished, TaskQError

    with open_database(dsn, schema) as database:
        try:
            with database.transaction():
                found = database.value("enqueue", task, payload, *options.values())
                is_new = True
                if options["unique_key"] is not None or options["idempotency_key"] is not None:
                    # Until this transaction commits, only a job that was there before is seen from elsewhere.
                    with open_database(dsn, schema) as elsewhere:
                        is_new = not elsewhere.rows("has_job", found)
        except TaskNotPublished:
            raise TaskQError(
                f"no worker has published a task {task!r} in this database; check the name, start a worker whose app "
                "has it, or pass --app module:attribute"
            ) from None
        return found, is_new, database.unserved_queue(found)


def _through_app(
    reference: str, name: str, payload: str, options: Any, *, dsn: str | None, schema: str | None
) -> tuple[str, bool, str | None]:
    from taskq.cli.apps import load_app
    from taskq.cli.database import in_words, open_database
    from taskq.cli.serve import choose_database
    from taskq.errors import PayloadError, PayloadMisfit
    from taskq.settings import load

    settings = load(require_dsn=False, app=reference, dsn=dsn, schema=schema)
    app = load_app(reference)
    task = app.get_task(name)
    try:
        arguments = task.codec.decode(payload)
    except PayloadMisfit as exc:
        raise typer.BadParameter(f"the payload does not fit the parameters of {name}: {exc.reason}") from None
    except PayloadError as exc:
        raise typer.BadParameter(str(exc)) from None
    chosen = choose_database(app, settings)
    try:
        with in_words(app.schema, "producer"):
            job = task.using(**options).enqueue_sync(**arguments)
        with open_database(chosen, app.schema) as database:
            return str(job.id), job.inserted, database.unserved_queue(str(job.id))
    finally:
        app.close_sync()
