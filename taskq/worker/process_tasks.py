"""Finding in a child process the tasks that the worker knows: the child imports what the worker imported.

With an app named as ``module:attribute`` (``taskq worker`` has one) the child imports that, and finds all its tasks.
Otherwise it imports the module of the task's function and looks for the task under the function's name, then in the
applications that the module holds. A function of the main script is found by running that script as
``__mp_main__``, as multiprocessing does: what must not run again stands under ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from taskq.app import TaskQ
from taskq.errors import ConfigurationError, ProcessNotStarted
from taskq.tasks import Task

MAIN: Final = "__mp_main__"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task is found."""

    name: str
    module: str
    qualname: str


def place_of(task: Task[..., Any]) -> Place:
    """Where the function of a task is defined."""
    return Place(task.name, task.fn.__module__, task.fn.__qualname__)


def main_script() -> tuple[str, str] | None:
    """How a child gets the worker's main module: ``("module", name)``, ``("path", file)``, or not at all."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return "module", spec.name
    file = getattr(main, "__file__", None)
    return ("path", os.path.abspath(file)) if isinstance(file, str) and os.path.exists(file) else None


def check_findable(tasks: Iterable[Task[..., Any]], app: str | None) -> None:
    """Refuse tasks that no child could find.

    Raises:
        ConfigurationError: One is defined inside a function, or in a main module that is no file.
    """
    if app is not None:
        return
    for task in tasks:
        where = place_of(task)
        cure = "give the worker its app as module:attribute, or define the task at the top of a module"
        if "<locals>" in where.qualname:
            raise ConfigurationError(
                f"the task {task.name} has process=True and is defined inside a function ({where.qualname}), where a "
                f"child process cannot find it; {cure}"
            )
        if where.module == "__main__" and main_script() is None:
            raise ConfigurationError(
                f"the task {task.name} has process=True and is defined in a main module that is no file, which a child "
                f"process cannot import; {cure}"
            )


class Tasks:
    """The tasks of a child process.

    Args:
        app: The application as ``module:attribute``, or None.
        main: What ``main_script`` gave in the worker.
    """

    def __init__(self, app: str | None, main: tuple[str, str] | None) -> None:
        self._app = app
        self._main = main
        self._found: dict[str, Task[..., Any]] = {}
        self._names: Mapping[str, Any] | None = None

    def find(self, where: Place) -> Task[..., Any]:
        """The task.

        Raises:
            ProcessNotStarted: It is not where it should be.
            Exception: What an import raised.
        """
        task = self._found.get(where.name)
        if task is None:
            task = self._found[where.name] = self._look(where)
        return task

    def _look(self, where: Place) -> Task[..., Any]:
        if self._app is not None:
            app = _attribute(*self._app.split(":", 1))
            found = app.tasks.get(where.name) if isinstance(app, TaskQ) else None
            source = f"the app {self._app}"
        else:
            names = self._module(where.module)
            found = _by_qualname(names, where.qualname)
            if not isinstance(found, Task) or found.name != where.name:
                apps = [value for value in names.values() if isinstance(value, TaskQ)]
                found = next((app.tasks[where.name] for app in apps if where.name in app.tasks), None)
            source = f"the module {where.module}"
        if not isinstance(found, Task):
            raise ProcessNotStarted(
                f"the child process imported {source} and found no task {where.name!r} there; register it when its "
                "module is imported, in every process alike"
            )
        return found

    def _module(self, name: str) -> Mapping[str, Any]:
        if name != "__main__":
            return vars(importlib.import_module(name))
        if self._names is None:
            kind, source = self._main or ("", "")
            run = runpy.run_path if kind == "path" else runpy.run_module
            module = sys.modules[MAIN] = ModuleType(MAIN)
            module.__dict__.update(run(source, run_name=MAIN))
            self._names = vars(module)
        return self._names


def _attribute(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _by_qualname(names: Mapping[str, Any], qualname: str) -> Any:
    first, *rest = qualname.split(".")
    found = names.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found
