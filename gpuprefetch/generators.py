"""Which random generators set the order of the samples, and where do they stand?

The global ones: torch's CPU generator, Python's ``random`` and NumPy's. And those that
a source holds itself: ``DataLoader(generator=...)``, a sampler's, a data set's. A
source is searched for these by its attributes, a few levels deep, nearest first; so the
same pipeline built again gives the same names.

States are written down as plain values that JSON takes.
"""

import base64
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

__all__ = [
    "PartsOfSource",
    "global_generators",
    "put_back",
    "read_states",
    "write_states",
]

# How far a source is searched. Samplers lie one to three levels down, a transform's
# generator two or three below its data set. Long containers hold samples, not parts.
_DEEPEST = 6
_LONGEST = 32
_MOST_OBJECTS = 2000


def global_generators() -> dict[str, Any]:
    """Give the generators that every part of a program may draw from, by name."""
    generators: dict[str, Any] = {"torch": torch.default_generator, "random": random}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        generators["numpy.random"] = numpy.random.mtrand._rand
    return generators


@contextmanager
def put_back(generators: Mapping[str, Any]) -> Iterator[None]:
    """Run a block that may set and use these generators; undo that afterwards."""
    before = read_states(generators)
    try:
        yield
    finally:
        write_states(generators, before)


class PartsOfSource:
    """What a source holds that sets the order of its samples.

    Args:
        source: Searched once, here; not started.
    """

    def __init__(self, source: object) -> None:
        self.generators: dict[str, Any] = {}
        """By path, such as ``source.sampler.generator``; each object once."""
        self._with_epoch: dict[str, Any] = {}
        for path, part in _walk(source):
            if _is_generator(part):
                self.generators[path] = part
            elif _counts_epochs(part):
                self._with_epoch[path] = part

    def epochs(self) -> dict[str, int]:
        """Give the number that ``set_epoch`` gave each part that has it, by path."""
        return {path: int(part.epoch) for path, part in self._with_epoch.items()}

    def set_epochs(self, epochs: Mapping[str, int]) -> list[str]:
        """Set those that differ from ``epochs``, and name them."""
        changed = []
        for path, part in self._with_epoch.items():
            if path in epochs and part.epoch != epochs[path]:
                part.set_epoch(epochs[path])
                changed.append(path)
        return changed


def _walk(source: object) -> Iterator[tuple[str, Any]]:
    """Visit the objects below a source, each once, nearest first."""
    seen: set[int] = set()
    queue: deque[tuple[str, Any, int]] = deque([("source", source, 0)])
    while queue and len(seen) < _MOST_OBJECTS:
        path, part, level = queue.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        if level < _DEEPEST and not _is_generator(part):
            queue.extend(
                (path + step, child, level + 1) for step, child in _below(part)
            )


def _below(part: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(part, (torch.Tensor, type, ModuleType)):
        return
    if isinstance(part, dict):
        entries = part.items() if len(part) <= _LONGEST else ()
        children = [(f"[{key!r}]", child) for key, child in entries]
    elif isinstance(part, (list, tuple)):
        items = part if len(part) <= _LONGEST else ()
        children = [(f"[{place}]", child) for place, child in enumerate(items)]
    else:
        # A running iterator of persistent workers is no setting of the source.
        children = [
            (f".{name}", child)
            for name, child in _attributes_of(part).items()
            if name != "_iterator"
        ]
    for step, child in children:
        if not isinstance(child, (str, bytes, int, float, torch.Tensor, type(None))):
            yield step, child


def _attributes_of(part: Any) -> dict[str, Any]:
    """Copy the attributes of an object, without running code of its class."""
    try:
        return dict(object.__getattribute__(part, "__dict__"))
    except AttributeError:
        return {}


def _is_generator(part: Any) -> bool:
    if isinstance(part, (torch.Generator, random.Random)):
        return not isinstance(part, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        part, (numpy.random.Generator, numpy.random.RandomState)
    )


def _counts_epochs(part: Any) -> bool:
    return callable(getattr(type(part), "set_epoch", None)) and isinstance(
        getattr(part, "epoch", None), int
    )


# Their states #


def read_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Give the states, by name, as values that JSON takes."""
    return {name: _read(generator) for name, generator in generators.items()}


def write_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set the generators that ``states`` names; leave the others alone."""
    for name, generator in generators.items():
        if name in states:
            _write(generator, states[name])


def _read(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    if hasattr(generator, "getstate"):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if hasattr(generator, "bit_generator"):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        data = bytearray(base64.b64decode(state))
        generator.set_state(torch.frombuffer(data, dtype=torch.uint8))
    elif hasattr(generator, "getstate"):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _arrays(state)
    else:
        generator.set_state(_arrays(state))


def _plain(value: Any) -> Any:
    """Write the arrays in a NumPy state as lists, its numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        plain = value.tolist()
        is_array = isinstance(plain, list)
        return {"dtype": str(value.dtype), "values": plain} if is_array else plain
    return value


def _arrays(value: Any) -> Any:
    """Undo :func:`_plain`."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return sys.modules["numpy"].array(value["values"], dtype=value["dtype"])
    return {key: _arrays(item) for key, item in value.items()}
