"""How is ``MODULE:NAME`` on the command line turned into the user's own object?

MODULE is what ``import`` takes, or a path to a ``.py`` file; NAME may have dots. What
goes wrong in the user's code is told in one line that names the place.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuprefetch.errors import GpuPrefetchError

__all__ = [
    "CommandError",
    "load_loader",
    "load_step",
    "load_transform",
    "running_user_code",
]


class CommandError(GpuPrefetchError, RuntimeError):
    """Something that the command line was given cannot be used."""


@contextmanager
def running_user_code(what: str) -> Iterator[None]:
    """Turn an error of the user's code into one line; ours pass as they are.

    Raises:
        CommandError: Names ``what`` was done, the error, and its place.
    """
    try:
        yield
    except GpuPrefetchError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise CommandError(
            f"{what}: {type(error).__name__}: {error} (at {place.filename}:"
            f"{place.lineno})"
        ) from error


def load_loader(reference: str) -> Iterable[Any]:
    """Load a DataLoader or another iterable; a function or class is called for it.

    Raises:
        CommandError: There is no such object, or it gives no batches.
    """
    value = _load(reference)
    if isinstance(value, type) or not _is_iterable(value):
        if not callable(value):
            raise CommandError(
                f"{reference} is a {type(value).__name__}. Name a DataLoader, or a "
                "function without arguments that makes one."
            )
        with running_user_code(f"{reference}() failed"):
            value = value()
    if not _is_iterable(value):
        raise CommandError(
            f"{reference}() returned a {type(value).__name__}. It should return a "
            "DataLoader or another iterable of batches."
        )
    iterable: Iterable[Any] = value
    return iterable


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def load_step(reference: str) -> Callable[[Any], object]:
    """Load a training step: a function of a batch, or of the batch's items.

    Raises:
        CommandError: There is no such object, or it cannot be called.
    """
    step = _instance(reference)
    if _count_required(step) <= 1:
        return step
    return lambda batch: step(*batch)


def _count_required(function: Callable[..., Any]) -> int:
    """Count the arguments that a call must have, as far as that can be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def load_transform(reference: str) -> Callable[..., Any]:
    """Load a function or a module; a class is made into an instance.

    Raises:
        CommandError: There is no such object, or it cannot be called.
    """
    return _instance(reference)


def _instance(reference: str) -> Callable[..., Any]:
    value = _load(reference)
    if isinstance(value, type):
        with running_user_code(f"{reference}() failed"):
            value = value()
    if not callable(value):
        raise CommandError(
            f"{reference} is a {type(value).__name__}. Name a function, a module or a "
            "class of such."
        )
    function: Callable[..., Any] = value
    return function


def _load(reference: str) -> Any:
    module_name, colon, name = reference.rpartition(":")
    if not colon or not module_name or not name:
        raise CommandError(
            f"{reference!r} is not of the form MODULE:NAME, such as train:make_loader "
            "or scripts/train.py:make_loader."
        )
    value: Any = _import(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, dir(value), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise CommandError(f"{module_name} has no {part!r}.{hint}")
        value = getattr(value, part)
    return value


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        try:
            with running_user_code(f"cannot import {name}"):
                return importlib.import_module(name)
        except CommandError as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and cause.name == name:
                raise CommandError(
                    f"there is no module {name!r} on the path. Run this where it "
                    "lies, or name its file: path/to/file.py:NAME."
                ) from None
            raise
    path = Path(name).resolve()
    if not path.is_file():
        raise CommandError(f"there is no file {name}.")
    # As when the file itself is run: its neighbours can be imported.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where worker processes look for a dataset's class when it is unpickled.
    sys.modules[path.stem] = module
    with running_user_code(f"cannot import {name}"):
        spec.loader.exec_module(module)
    return module
