"""What does a benchmark write down, and is a file on disk such a record?

One file holds one suite on one machine: ``results/<suite>--<gpu>.json``. Times are
medians over rounds; what could not be measured is listed too, with the reason.

[Note: Compare within a round] A speed depends on the machine's mood of that minute. So
a fraction or a ratio is taken between runs of the same round, and the median of these
is kept: it is not the quotient of two medians.
"""

import dataclasses
import json
import math
import statistics
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

__all__ = [
    "SCHEMA_VERSION",
    "Case",
    "Omission",
    "Ratio",
    "Record",
    "ratio_of",
    "read_record",
    "spread",
    "write_record",
]

SCHEMA_VERSION = 1

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of one group: how fast it was, and what it cost."""

    name: str
    """The variant, as tables show it. The same name means the same thing everywhere."""
    group: str
    """What it is compared within, such as ``"8 workers"``; empty: the only one."""
    batch_size: int
    """Samples in a batch."""
    steps_per_s: float
    """Batches in a second, median of the rounds."""
    quartiles: tuple[float, float]
    """First and third quartile of the same. Differences smaller than their distance are
    noise."""
    repeats: int
    """Rounds."""
    samples: tuple[float, ...]
    """Batches in a second of each round, in order."""
    bound_steps_per_s: float | None = None
    """The bound of the same run: median of what cannot be beaten here."""
    of_bound: float | None = None
    """Fraction of the bound: see [Note: Compare within a round]. 1 is the aim."""
    gpu_ms: float | None = None
    """Work on the GPU per batch, the step left out: kernels, copies and fills."""
    host_ms: float | None = None
    """Processor time of the loop's thread per batch, the step left out; waiting is not
    counted, except where it spins."""
    launches: float | None = None
    """Kernels per batch, the step left out."""
    host_syncs: float | None = None
    """Times per batch that the host waits for the device, the step left out."""
    peak_device_bytes: int | None = None
    """Most memory of the device that torch's allocator had handed out, the model's
    included, and what earlier suites of the process have left there not."""
    pinned_bytes: int | None = None
    """Page-locked host memory beyond that of the source, at most."""
    extra: Mapping[str, Value] = field(default_factory=dict)
    """What else this suite has to say; names carry the unit."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster one variant was than another, and what was promised."""

    name: str
    group: str
    batch_size: int
    value: float
    """Median over rounds; see [Note: Compare within a round]."""
    quartiles: tuple[float, float]
    repeats: int
    at_least: float | None = None
    """What is promised."""
    aim: float | None = None
    """What is hoped for."""

    @property
    def passed(self) -> bool | None:
        """Tell whether the promise was kept; ``None`` without one."""
        return None if self.at_least is None else self.value >= self.at_least


@dataclass(frozen=True, slots=True)
class Omission:
    """Something that was not measured."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """One suite on one machine."""

    suite: str
    device: str
    """``"cuda"``, ``"cpu"``, ..."""
    is_tiny: bool
    """Sizes that only show that the code runs: no figure in it means anything."""
    is_complete: bool
    """Whether the suite came to its end within its time."""
    seconds: float
    machine: Mapping[str, Value]
    """See ``machine.describe_machine``."""
    cases: tuple[Case, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    omitted: tuple[Omission, ...] = ()
    """What is missing: a package is not installed, time was up, or it failed."""
    extra: Mapping[str, Value] = field(default_factory=dict)
    """Facts of the whole suite."""
    schema: int = SCHEMA_VERSION

    def case(self, name: str, *, group: str, batch_size: int) -> Case | None:
        """Find a case."""
        for case in self.cases:
            if (case.name, case.group, case.batch_size) == (name, group, batch_size):
                return case
        return None

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read a record from what JSON gave.

        Raises:
            ValueError: Something is missing, unknown, or of another type.
        """
        record: Self = _read(cls, value, "record")
        if record.schema != SCHEMA_VERSION:
            raise ValueError(
                f"record.schema is {record.schema}; this code reads {SCHEMA_VERSION}. "
                "Measure again."
            )
        return record

    def to_json(self) -> dict[str, Any]:
        """Give values that JSON knows, rounded to what was measured."""
        rounded: dict[str, Any] = _round(dataclasses.asdict(self))
        return rounded


# Numbers #


def spread(samples: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median, and first and third quartile, of at least one number."""
    median = statistics.median(samples)
    if len(samples) < 2:
        return median, (median, median)
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return median, (first, third)


def ratio_of(over: Sequence[float], under: Sequence[float]) -> tuple[float, ...]:
    """Ratios of the single rounds, as many as both variants have."""
    return tuple(a / b for a, b in zip(over, under, strict=False))


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return value


# Files #


def write_record(record: Record, path: Path) -> None:
    """Write one record; the file is replaced as a whole, never left half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(record.to_json(), indent=1) + "\n")
    unfinished.replace(path)


def read_record(path: Path) -> Record:
    """Read one record.

    Raises:
        ValueError: The file does not hold one; the message names it.
        OSError: It cannot be read.
    """
    try:
        return Record.from_json(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error


def _read(kind: Any, value: Any, path: str) -> Any:
    """Check ``value`` against a type and build it; mappings become dataclasses."""
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(arguments, value, path)
    if origin is tuple:
        return _read_tuple(arguments, value, path)
    if origin is Mapping:
        _require(isinstance(value, Mapping), path, "an object", value)
        return {
            _read(str, key, path): _read(arguments[1], item, f"{path}.{key}")
            for key, item in value.items()
        }
    is_number = kind is float and type(value) is int
    _require(type(value) is kind or is_number, path, kind.__name__, value)
    return float(value) if is_number else value


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    _require(isinstance(value, Mapping), path, "an object", value)
    known = {one.name: one for one in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(known))
    # A record is written whole, so a field with a default is there too.
    missing = sorted(set(known) - set(value))
    if unknown or missing:
        raise ValueError(f"{path} lacks {missing} and has unknown {unknown}")
    return kind(
        **{
            name: _read(hints[name], item, f"{path}.{name}")
            for name, item in value.items()
        }
    )


def _read_union(kinds: Sequence[Any], value: Any, path: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    for kind in kinds:
        if kind is not types.NoneType and type(value) is kind:
            return value
    rest = [kind for kind in kinds if kind is not types.NoneType]
    return _read(rest[0] if len(rest) == 1 else types.NoneType, value, path)


def _read_tuple(kinds: Sequence[Any], value: Any, path: str) -> Any:
    _require(isinstance(value, list | tuple), path, "a list", value)
    if kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(value)
    _require(len(value) == len(kinds), path, f"{len(kinds)} values", value)
    return tuple(
        _read(kind, item, f"{path}[{place}]")
        for place, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _require(is_right: bool, path: str, expected: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"{path} must be {expected}, got {value!r}")
