"""What does the chain alone cost, on images that lie on the device already?

No loader, no copy from the host, no training. The bound is a copy of the result on the
device, which no way of making that result can beat by much. Two figures tell different
things: images per second include the host, which is the limit wherever there are many
launches; GPU time does not, and is what a full GPU has to pay.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from unittest import mock

import torch

from benchmarks.chains import (
    AsFunction,
    imagenet_chain,
    jitter_chain,
    per_sample,
    torchvision_imagenet_chain,
)
from benchmarks.dali import dali_prefetch, has_dali
from benchmarks.loops import Loop, Over, Repeat, Step, Trainer, no_step
from benchmarks.markdown import table
from benchmarks.record import Case, Omission, Record, spread
from benchmarks.suite import Group, Place, Promise, Run, Suite
from benchmarks.suites.shared import CHAINED, SINGLE, VISION, VISION_SINGLE
from gpuprefetch import workloads
from gpuprefetch.augment import operator
from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.augment.fusing import fuse

__all__ = ["SUITE", "groups"]

Transform = Callable[[torch.Tensor], torch.Tensor]

_COMPILE_LIMIT_S = 35.0  # Its start included.

KORNIA = "Kornia"
COPY = "bound: copy of the result"
COMPILED = "Kornia under torch.compile"
DALI = "DALI, whole pipeline with the copy to the device"
TORCH = "ours in torch operations"

DEMO = "crop, resize, rotate, blur, normalize"
JITTER = "the same with ColorJitter"
IMAGENET = "ImageNet: resized crop 224, flip, normalize, bfloat16 channels_last"


def groups(place: Place) -> Iterator[Group]:
    """Give a group for each chain and batch size."""
    size = 16 if place.is_tiny else 256
    for batch_size in (2,) if place.is_tiny else (32, 128, 512):
        yield _demo(place, size, batch_size)
    yield _jitter(place, size, 2 if place.is_tiny else 32)
    yield _imagenet(place, size, 2 if place.is_tiny else 256)


def in_torch_operations(fused: FusedAugmentation) -> Transform:
    """Run a fused chain as it runs where the kernel cannot be compiled."""

    def run(images: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(operator, "why_not", return_value="left out here"):
            augmented: torch.Tensor = fused(images)
        return augmented

    return run


def _demo(place: Place, size: int, batch_size: int) -> Group:
    chain = workloads.kornia_chain(size)
    vision = workloads.worker_chain(size)
    chained = fuse(chain)
    transforms: dict[str, Transform] = {
        KORNIA: AsFunction(chain),
        VISION: vision,
        TORCH: in_torch_operations(chained),
        CHAINED: chained,
        SINGLE: fuse(chain, resampling="single"),
    }
    if batch_size <= 32:
        transforms[VISION_SINGLE] = partial(per_sample, vision)
    peers: dict[str, Trainer] = {}
    if has_dali():
        start = partial(dali_prefetch, batch_size, size, place.device)
        peers[DALI] = lambda step: Over(start(), no_step)
    return _group(place, DEMO, transforms, size, batch_size, peers)


def _jitter(place: Place, size: int, batch_size: int) -> Group:
    chain = jitter_chain(size)
    fused = fuse(chain)
    transforms: dict[str, Transform] = {
        KORNIA: AsFunction(chain),
        TORCH: in_torch_operations(fused),
        CHAINED: fused,
    }
    return _group(place, JITTER, transforms, size, batch_size)


def _imagenet(place: Place, size: int, batch_size: int) -> Group:
    result = size * 7 // 8
    fused = fuse(
        imagenet_chain(result),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
    )

    def converted(transform: Transform) -> Transform:
        return lambda images: transform(images).to(
            torch.bfloat16, memory_format=torch.channels_last
        )

    transforms: dict[str, Transform] = {
        KORNIA: converted(AsFunction(imagenet_chain(result))),
        VISION: converted(torchvision_imagenet_chain(result)),
        TORCH: in_torch_operations(fused),
        CHAINED: fused,
    }
    return _group(place, IMAGENET, transforms, size, batch_size)


def _group(
    place: Place,
    name: str,
    transforms: dict[str, Transform],
    size: int,
    batch_size: int,
    peers: Mapping[str, Trainer] = MappingProxyType({}),
) -> Group:
    # So many sets of images that none is found in the GPU's cache of 50 MB.
    count = 2 if place.is_tiny else max(2, 256 // batch_size)
    shape = (batch_size, 3, size, size)
    images = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=place.device)
        for _ in range(count)
    ]
    result = transforms[CHAINED](images[0])
    results = [result.clone() for _ in range(count)]
    variants: dict[str, Trainer] = {COPY: _repeating(torch.clone, results)}
    variants |= {key: _repeating(work, images) for key, work in transforms.items()}
    variants |= peers
    other_steps = dict.fromkeys((COPY, CHAINED, SINGLE), 400) | {VISION_SINGLE: 5}
    return Group(
        name=name,
        batch_size=batch_size,
        step=no_step,
        variants=variants,
        bound=COPY,
        steps=2 if place.is_tiny else 20,
        other_steps={} if place.is_tiny else other_steps,
        warmup=1 if place.is_tiny else 5,
        rounds=1 if place.is_tiny else 3,
        promises=[Promise("ours fused / Kornia", CHAINED, KORNIA)],
    )


def _repeating(work: Transform, images: Sequence[torch.Tensor]) -> Trainer:
    """Make a loop that transforms a few batches in turn, and trains nothing."""

    def start(step: Step) -> Loop:
        turns = itertools.cycle(images)

        def call() -> None:
            with torch.no_grad():
                work(next(turns))

        return Repeat(call)

    return start


# torch.compile, in a process of its own #


def _measure_compiled(run: Run) -> None:
    batch_size, size = (2, 16) if run.place.is_tiny else (32, 256)
    command = [sys.executable, "-m", "benchmarks.compiled"]
    command += ["--batch-size", str(batch_size), "--image-size", str(size)]
    command += ["--device", str(run.place.device)]
    command += ["--tiny"] if run.place.is_tiny else []
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        # What takes longer than this is a finding, not a gap.
        reason = f"its first calls did not end within {_COMPILE_LIMIT_S:g} s"
        run.omit(COMPILED, reason, is_a_gap=False)
        return
    if finished.returncode != 0:
        reason = finished.stderr or "it ended without a word"
        run.omit(COMPILED, reason, is_a_gap=False)
        return
    found = json.loads(finished.stdout.splitlines()[-1])
    bound = run.record().case(COPY, group=DEMO, batch_size=batch_size)
    median, quartiles = spread(found["speeds"])
    run.add(
        Case(
            name=COMPILED,
            group=DEMO,
            batch_size=batch_size,
            steps_per_s=median,
            quartiles=quartiles,
            repeats=len(found["speeds"]),
            samples=tuple(found["speeds"]),
            bound_steps_per_s=bound.steps_per_s if bound else None,
            of_bound=median / bound.steps_per_s if bound else None,
            extra={"compile_s": found["compile_s"]},
        )
    )


# Pages #


def _omissions() -> list[Omission]:
    return [] if has_dali() else [Omission(DALI, "DALI is not installed")]


def _tables(record: Record) -> dict[str, str]:
    keys = dict.fromkeys((case.group, case.batch_size) for case in record.cases)
    parts = [
        f"**{group}, B={batch_size}**\n\n{_table(record, group, batch_size)}"
        for group, batch_size in keys
    ]
    return {"transform": "\n\n".join(parts)}


def _table(record: Record, group: str, batch_size: int) -> str:
    cases = [
        case
        for case in record.cases
        if (case.group, case.batch_size) == (group, batch_size)
    ]
    copy = record.case(COPY, group=group, batch_size=batch_size)
    head = ["variant", "images/s", "us per batch", "GPU us", "copies", "launches"]
    return table(head, [_row(case, copy) for case in cases])


def _row(case: Case, copy: Case | None) -> list[str]:
    copies = gpu_us = launches = ""
    if case.gpu_ms is not None:
        gpu_us = f"{1e3 * case.gpu_ms:.1f}"
        if copy is not None and copy.gpu_ms:
            copies = f"{case.gpu_ms / copy.gpu_ms:.1f}"
    if case.launches is not None:
        launches = f"{case.launches:.0f}"
    images_per_s = f"{case.steps_per_s * case.batch_size:,.0f}"
    return [
        case.name,
        images_per_s,
        f"{1e6 / case.steps_per_s:.0f}",
        gpu_us,
        copies,
        launches,
    ]


SUITE = Suite(
    name="transform",
    title="the chain alone, on images on the device",
    budget_s=50.0,
    groups=groups,
    run=_measure_compiled,
    omissions=_omissions,
    tables=_tables,
)
