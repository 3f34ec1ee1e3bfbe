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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch import nn

from gpuprefetch.errors import GpuPrefetchError
from gpuprefetch.signatures import arity_of

__all__ = [
    "CommandError",
    "load_loader",
    "load_step",
    "load_transform",
    "running_user_code",
]


class CommandError(GpuPrefetchError, RuntimeError):
    """Something that the command line was given cannot be used."""


class running_user_code:
    """Turn an error of the user's code into one line; ours and Ctrl-C pass as they are.

    No generator: contextlib would take what becomes of a ``StopIteration`` for its own.

    Args:
        what: What it is, with the verb: ``the training loop failed``.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, GpuPrefetchError):
            return
        if isinstance(error, SystemExit):
            raise CommandError(
                f"{self._what}: it ends the program (exit code {error.code}, at "
                f"{_place_of(error)}). Put what a script does, such as reading its "
                'arguments, under if __name__ == "__main__":.'
            ) from error
        if isinstance(error, Exception):
            said = f"{type(error).__name__}: {error} (at {_place_of(error)})"
            hints = [f". {note}" for note in getattr(error, "__notes__", ())]
            raise CommandError("".join((f"{self._what}: {said}", *hints))) from error


def _place_of(error: BaseException) -> str:
    """Name the line of the user's code, or the one nearest to it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.filename for frame in frames]
    # argparse and the like end a program from within the standard library, and most
    # errors of a model are raised in torch.
    own = [not (_is_stdlib(n) or _is_library(n) or _is_ours(n)) for n in names]
    foreign = [not _is_stdlib(n) for n in names]
    for fits in (own, foreign):
        places = [f for f, is_fit in zip(frames, fits, strict=True) if is_fit]
        if places:
            return f"{places[-1].filename}:{places[-1].lineno}"
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _is_stdlib(filename: str) -> bool:
    is_inside = Path(filename).is_relative_to(Path(traceback.__file__).parent)
    return filename.startswith("<frozen") or (is_inside and not _is_library(filename))


def _is_library(filename: str) -> bool:
    return "site-packages" in filename


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(__file__).parents[1])


def load_loader(reference: str) -> Iterable[Any]:
    """Load a DataLoader or another iterable; a function or class is called for it.

    Raises:
        CommandError: There is no such object, or it gives no batches.
    """
    value = _load(reference)
    if isinstance(value, nn.Module):
        raise CommandError(
            f"{reference} is a model ({type(value).__name__}). Name a DataLoader, or a "
            "function without arguments that makes one."
        )
    if isinstance(value, type) or not _is_iterable(value):
        if not callable(value):
            raise CommandError(
                f"{reference} is a {type(value).__name__}. Name a DataLoader, or a "
                "function without arguments that makes one."
            )
        _check_takes_nothing(value, reference)
        with running_user_code(f"{reference}() failed"):
            value = value()
    if not _is_iterable(value):
        raise CommandError(
            f"{reference}() returned a {type(value).__name__}. It should return a "
            "DataLoader or another iterable of batches."
        )
    iterable: Iterable[Any] = value
    return iterable


def _check_takes_nothing(make: Callable[..., Any], reference: str) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # Written in C; it may not say what it takes.
    try:
        signature.bind()
    except TypeError as error:
        raise CommandError(
            f"{reference} needs arguments: {error}. Name a DataLoader, or a function "
            "that can be called without any."
        ) from None


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def load_step(reference: str) -> Callable[[Any], object]:
    """Load a training step: a function of a batch, or of the batch's items.

    Raises:
        CommandError: There is no such object, it takes nothing, or it needs what is no
            part of a batch.
    """
    step = _instance(reference)
    arity = arity_of(step)
    if arity is None:
        return step  # Written in C; it may not say what it takes.
    if arity.needs_by_name or not arity.most:
        names = arity.needs_by_name
        takes = f"needs {names[0]}= by name" if names else "takes no argument"
        raise CommandError(
            f"{reference} {takes}. A step is called with each batch, or with its "
            "items: def step(batch), or def step(x, y)."
        )
    return step if arity.least <= 1 else _taking_items(step, reference)


def _taking_items(
    step: Callable[..., object], reference: str
) -> Callable[[Any], object]:
    def call(batch: Any) -> object:
        if isinstance(batch, Mapping):
            raise CommandError(
                f"{reference} takes several arguments, and the batch is a "
                f"{type(batch).__name__} with the keys {list(batch)}. Let it take the "
                "batch: def step(batch)."
            )
        return step(*batch)

    return call


def load_transform(reference: str) -> Callable[..., Any]:
    """Load a function or a module; a class is made into an instance.

    Raises:
        CommandError: There is no such object, or it cannot be called with a batch's
            inputs.
    """
    transform = _instance(reference)
    arity = arity_of(transform)
    if arity is not None and not arity.most:
        raise CommandError(
            f"{reference} takes no argument. A transform is called with a batch's "
            "images; if this is a function that makes one, name what it returns: "
            f"augment = {reference.rpartition(':')[2]}() in that module."
        )
    return transform


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
    if name.endswith(".py"):
        return _import_file(name)
    try:
        with running_user_code(f"cannot import {name}"):
            return importlib.import_module(name)
    except CommandError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if name.startswith(".") or (missing and f"{name}.".startswith(f"{missing}.")):
            raise CommandError(
                f"there is no module {name!r} on the path. Run this where it "
                "lies, or name its file: path/to/file.py:NAME."
            ) from None
        raise


def _import_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if not path.is_file():
        raise CommandError(f"there is no file {name}.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        # Run once, whatever is taken from it: the model has one copy, a class one
        # identity.
        return known
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
