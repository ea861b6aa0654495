"""Finding the application object that a command line names, with complaints that name what is missing and the cure."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from taskq.app import TaskQ
from taskq.cli.output import note
from taskq.errors import ConfigurationError

__all__ = ["load_app"]


def load_app(reference: str) -> TaskQ:
    """Import ``module:attribute`` with the current folder first on the path, and give the ``TaskQ`` found there.

    If the module itself raises, its traceback, from the module on, goes to standard error.

    Raises:
        ConfigurationError: There is no such module or attribute, it is no ``TaskQ``, or the module raised.
    """
    name, _, attribute = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(name, reference)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"the module {name} has no {attribute!r}; {_instead(module)}")
        found = getattr(found, part)
    if not isinstance(found, TaskQ):
        raise ConfigurationError(f"{reference} is of type {type(found).__name__}, not a TaskQ; {_instead(module)}")
    return found


def _import(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        # Only if what was asked for is missing: a missing import of the module's own is an error in that module.
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            cure = f"write {name.removesuffix('.py')}:..., without '.py'" if name.endswith(".py") else ""
            raise ConfigurationError(
                f"there is no module {exc.name!r}, so the app {reference!r} cannot be loaded; "
                f"{cure or 'run taskq in the folder that holds it, or set PYTHONPATH to that folder'} "
                f"(the current folder is {Path.cwd()})"
            ) from None
        _show(exc)
        raise ConfigurationError(f"the module {name} could not be imported: it needs {exc.name!r}") from None
    except SystemExit as exc:
        raise ConfigurationError(
            f"the module {name} ended the process while it was imported (exit {exc.code}); "
            "put what it runs under if __name__ == '__main__'"
        ) from None
    except Exception as exc:
        _show(exc)
        raise ConfigurationError(f"the module {name} raised {type(exc).__name__} while it was imported") from None


def _show(exc: BaseException) -> None:
    """Print the traceback without the frames of taskq's command and of the import system."""
    frame: TracebackType | None = exc.__traceback__
    while frame is not None and _is_machinery(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    note("".join(traceback.format_exception(type(exc), exc, frame)).rstrip())


def _is_machinery(filename: str) -> bool:
    return filename in {__file__, importlib.__file__} or filename.startswith("<frozen importlib")


def _instead(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, TaskQ)]
    if names:
        return f"it has a TaskQ named {' and '.join(names)}: write {module.__name__}:{names[0]}"
    return f"it has no TaskQ at all: put app = TaskQ() into {module.__name__}, and name it {module.__name__}:app"
