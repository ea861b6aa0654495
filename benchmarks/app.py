"""The application that the benchmark's workers run."""

from taskq import TaskQ

app = TaskQ()


@app.task(queue="bench")
async def noop(number: int, text: str) -> None:
    """Do nothing."""
