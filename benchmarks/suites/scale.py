"""How does the cost of a batch grow with its size, with its leaves and with the depth?

The loader runs alone, with no training step, so that what is seen is its own cost: the
larger of the host's time and the device's. Beside it runs the bare minimum, ``to`` with
``non_blocking`` on each leaf, which is the bound here. Depth is the exception: its cost
shows beside a step. First of all comes the soak: 100,000 small batches in flat memory.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import pipelines
from benchmarks.loops import Trainer, no_step
from benchmarks.markdown import table
from benchmarks.record import Case, Record, Value, spread
from benchmarks.soak import Limits, Sample, Served, growth, soak
from benchmarks.suite import Group, Place, Run, Suite
from benchmarks.suites.shared import CHAINED, ClassificationStep, over
from gpuprefetch import StreamPrefetchLoader, workloads
from gpuprefetch.plot import save_lines

__all__ = ["SUITE", "groups"]

_BARE = "each leaf by to(), no loader"
_COPY = "ours, copy only"
_STAGED = "ours, copy only, pageable source"

# Axis, and the steps of a round at each of its values: about 0.2 s on an H200.
_BATCH_SIZES = {1: 600, 8: 600, 32: 400, 128: 160, 1024: 30}
_IMAGE_SIZES = {64: 600, 128: 600, 512: 120, 1024: 40}  # 256 is there already.
_LEAVES = {1: 600, 10: 300, 50: 100, 200: 40}
_DEPTHS = (1, 2, 4, 8)
_USUAL_BATCH, _USUAL_SIZE = 32, 256

_TINY_AXIS = {1: 2, 2: 2}
_TINY_SIZES = {16: 2, 32: 2}

_LEAF_SHAPE = (32, 64)  # float32: 8 KB, so that the number of leaves is what counts.

_SOAKS = {"copy and float, pageable": 100_000, "fused, pinned": 20_000}
_SOAK_LIMIT_S = {"copy and float, pageable": 30.0, "fused, pinned": 9.0}


# Growth #


def groups(place: Place) -> Iterator[Group]:
    """Give a group for each value of each axis."""
    tiny, size = place.is_tiny, 16 if place.is_tiny else _USUAL_SIZE
    for batch_size, steps in (_TINY_AXIS if tiny else _BATCH_SIZES).items():
        yield _image_group(place, "batch size", batch_size, size, steps)
    usual = 2 if tiny else _USUAL_BATCH
    for side, steps in (_TINY_SIZES if tiny else _IMAGE_SIZES).items():
        yield _image_group(place, f"images of {side} px", usual, side, steps)
    for count, steps in (_TINY_AXIS if tiny else _LEAVES).items():
        yield _leaf_group(place, count, steps)
    yield _depth_group(place, usual, size)


def _group(
    place: Place,
    name: str,
    batch_size: int,
    variants: dict[str, Trainer],
    steps: int,
    extra: dict[str, Value],
) -> Group:
    return Group(
        name=name,
        batch_size=batch_size,
        step=no_step,
        variants=variants,
        bound=_BARE,
        steps=steps,
        warmup=1 if place.is_tiny else 12,
        rounds=1 if place.is_tiny else 3,
        is_probed=False,
        extra=extra,
    )


def _image_group(
    place: Place, name: str, batch_size: int, side: int, steps: int
) -> Group:
    device = place.device
    source = _ready_images(batch_size, side, is_pinned=device.type == "cuda")
    chain = workloads.kornia_chain(side)
    variants = {
        _BARE: over(lambda: _bare(source, device)),
        _COPY: over(lambda: pipelines.stream_prefetch(source, device, None)),
        CHAINED: over(lambda: pipelines.stream_prefetch(source, device, chain)),
    }
    extra: dict[str, Value] = {"image_size": side, "leaves": 2}
    return _group(place, name, batch_size, variants, steps, extra)


def _leaf_group(place: Place, count: int, steps: int) -> Group:
    device = place.device
    pinned = _ready_leaves(count, is_pinned=device.type == "cuda")
    pageable = _ready_leaves(count, is_pinned=False)
    variants = {
        _BARE: over(lambda: _bare(pinned, device)),
        _COPY: over(lambda: pipelines.stream_prefetch(pinned, device, None)),
        _STAGED: over(lambda: pipelines.stream_prefetch(pageable, device, None)),
    }
    extra: dict[str, Value] = {"leaves": count + 1}
    return _group(place, f"{count} leaves", _LEAF_SHAPE[0], variants, steps, extra)


def _depth_group(place: Place, batch_size: int, side: int) -> Group:
    """Compare depths beside the training step: what they cost is memory."""
    device = place.device
    source = _ready_images(batch_size, side, is_pinned=device.type == "cuda")
    chain = workloads.kornia_chain(side)
    bound = "bound: step alone, batch on the device"
    variants: dict[str, Trainer] = {
        bound: over(lambda: pipelines.resident(batch_size, side, device))
    }
    for depth in _DEPTHS[:2] if place.is_tiny else _DEPTHS:
        variants[f"depth {depth}"] = over(
            partial(pipelines.stream_prefetch, source, device, chain, depth=depth)
        )
    return Group(
        name="depth",
        batch_size=batch_size,
        step=ClassificationStep(side, device),
        variants=variants,
        bound=bound,
        steps=2 if place.is_tiny else 80,
        warmup=1 if place.is_tiny else 20,
        rounds=1 if place.is_tiny else 3,
        is_probed=False,
    )


def _ready_images(batch_size: int, side: int, *, is_pinned: bool) -> Any:
    """Serve two batches in turn, without end; what is in them costs nothing here."""
    image = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
    images = image.expand(batch_size, -1, -1, -1).contiguous()
    labels = torch.zeros(batch_size, dtype=torch.int64)
    return _endless([(images.clone(), labels.clone()) for _ in range(2)], is_pinned)


def _ready_leaves(count: int, *, is_pinned: bool) -> Any:
    labels = torch.zeros(_LEAF_SHAPE[0], dtype=torch.int64)
    leaves = [torch.zeros(_LEAF_SHAPE) for _ in range(count)]
    return _endless([(leaves, labels)], is_pinned)


def _endless(ready: Sequence[Any], is_pinned: bool) -> Served:
    if is_pinned:
        ready = [(_pinned(inputs), labels.pin_memory()) for inputs, labels in ready]
    return Served(ready, per_pass=1 << 40)


def _pinned(inputs: Any) -> Any:
    if isinstance(inputs, list):
        return [leaf.pin_memory() for leaf in inputs]
    return inputs.pin_memory()


def _bare(source: Any, device: torch.device) -> Iterator[Any]:
    """Copy each leaf, in the loop, and nothing else."""
    for inputs, labels in source:
        leaves = inputs if isinstance(inputs, list) else [inputs]
        copied = [leaf.to(device, non_blocking=True) for leaf in leaves]
        yield copied, labels.to(device, non_blocking=True)


# Soak #


def _small_batches(device: torch.device, *, is_pinned: bool) -> list[Any]:
    images = [torch.full((4, 3, 16, 16), n, dtype=torch.uint8) for n in range(8)]
    if is_pinned and device.type == "cuda":
        images = [image.pin_memory() for image in images]
    return [(image, n) for n, image in enumerate(images)]


def _soak(run: Run, name: str) -> None:
    tiny, device = run.place.is_tiny, run.place.device
    num_batches = 20 if tiny else _SOAKS[name]
    is_fused = name.startswith("fused")
    loader = StreamPrefetchLoader(
        Served(_small_batches(device, is_pinned=is_fused), num_batches // 10),
        workloads.kornia_chain(16) if is_fused else pipelines.to_float,
        device=device,
    )
    with loader:
        samples = soak(
            loader,
            device=device,
            num_batches=num_batches,
            every=num_batches // (5 if tiny else 40),
            limit_s=_SOAK_LIMIT_S[name],
        )
    run.add(_soak_case(name, samples, asked=num_batches))
    if not tiny:
        Limits().check(samples)


def _soak_case(name: str, samples: Sequence[Sample], *, asked: int) -> Case:
    rates = [
        (later.batches - earlier.batches) / (later.seconds - earlier.seconds)
        for earlier, later in pairwise(samples)
    ]
    median, quartiles = spread(rates)
    last = samples[-1]
    return Case(
        name=name,
        group="soak",
        batch_size=4,
        steps_per_s=median,
        quartiles=quartiles,
        repeats=len(rates),
        samples=tuple(rates),
        pinned_bytes=last.pinned_bytes,
        extra={
            "batches": last.batches,
            "batches_asked_for": asked,
            "passes": 10,
            "seconds": last.seconds,
            "device_growth_bytes": growth(samples, "device_bytes"),
            "pinned_growth_bytes": growth(samples, "pinned_bytes"),
            "rss_growth_bytes": growth(samples, "rss_bytes"),
            "rss_bytes": last.rss_bytes,
        },
    )


def _run(run: Run) -> None:
    for name in _SOAKS:
        run.attempt(f"soak: {name}", partial(_soak, run, name))
    for group in groups(run.place):
        if not run.has_time:  # Each refuses by itself, but building it takes time.
            run.omit("further groups", f"{run.suite.budget_s:.0f} s were over")
            break
        run.compare(group)


# Shown #


def _us(case: Case | None) -> str:
    return "" if case is None else f"{1e6 / case.steps_per_s:.0f}"


def _axis(record: Record, axis: str) -> dict[str, dict[int, Case]]:
    """Give the cases of each variant by their values on an axis, in order."""
    found: dict[str, dict[int, Case]] = {}
    for case in record.cases:
        value = _value_on(case, axis)
        if value is not None:
            found.setdefault(case.name, {})[value] = case
    return {name: dict(sorted(cases.items())) for name, cases in found.items()}


def _value_on(case: Case, axis: str) -> int | None:
    """Where a case stands on an axis, if it does."""
    if case.group == "batch size":
        if axis == "images in a batch":
            return case.batch_size
        is_usual = axis == "pixels" and case.batch_size == _USUAL_BATCH
        return _USUAL_SIZE if is_usual else None
    for marker, name in (("images of ", "pixels"), (" leaves", "leaves")):
        if axis == name and marker in case.group:
            return int(case.group.replace(marker, "").removesuffix(" px"))
    return None


_AXES = {
    "images in a batch": "scale-batch",
    "pixels": "scale-image",
    "leaves": "scale-leaves",
}


def _axis_table(record: Record, axis: str) -> str:
    variants = _axis(record, axis)
    values = sorted({value for cases in variants.values() for value in cases})
    rows = [
        [f"{name}, us", *(_us(cases.get(value)) for value in values)]
        for name, cases in variants.items()
    ]
    return table([axis, *map(str, values)], rows)


def _depth_table(record: Record) -> str:
    rows = [
        [
            case.name,
            f"{case.steps_per_s:.1f}",
            "" if case.of_bound is None else f"{case.of_bound:.1%}",
            ""
            if case.peak_device_bytes is None
            else f"{case.peak_device_bytes / 1e6:.0f}",
        ]
        for case in record.cases
        if case.group == "depth"
    ]
    return table(["", "steps/s", "of the bound", "device MB"], rows)


def _soak_table(record: Record) -> str:
    rows = [
        [
            case.name,
            _length(case),
            f"{1e6 / case.steps_per_s:.0f}",
            *(
                f"{float(case.extra[f'{kind}_growth_bytes'] or 0) / 1e3:.0f}"
                for kind in ("device", "pinned", "rss")
            ),
        ]
        for case in record.cases
        if case.group == "soak"
    ]
    head = ["", "batches", "us each", "device, kB", "pinned, kB", "process, kB"]
    return table(head, rows)


def _length(case: Case) -> str:
    """How many batches a soak had, and was to have if its time was over before."""
    batches, asked = case.extra["batches"], case.extra["batches_asked_for"]
    if batches == asked:
        return f"{batches:,}"
    return f"{batches:,} of {asked:,}: {case.extra['seconds']:.0f} s were over"


def _tables(record: Record) -> dict[str, str]:
    shown = {name: _axis_table(record, axis) for axis, name in _AXES.items()}
    shown["scale-depth"] = _depth_table(record)
    shown["scale-soak"] = _soak_table(record)
    return shown


def _plots(record: Record, folder: Path) -> None:
    panels = {
        axis: {
            name: [(value, 1e6 / case.steps_per_s) for value, case in cases.items()]
            for name, cases in _axis(record, axis).items()
        }
        for axis in _AXES
    }
    heading = "What a batch costs, with no training step"
    save_lines(panels, folder / "scale.png", unit="us per batch", heading=heading)


SUITE = Suite(
    name="scale",
    title="how cost grows with batch, image, leaves and depth; and a soak",
    budget_s=90.0,
    run=_run,
    tables=_tables,
    plots=_plots,
)
