"""How fast does the same training step run behind different input pipelines?

Every run trains a fresh copy of the same model on the same photographs in the same
order. The clock starts after the warm-up batches and, on an asynchronous device, stops
only when the device has done all its work.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch.cli.bar import progress_bar
from gpuprefetch.loader import StreamPrefetchLoader
from gpuprefetch.workloads import (
    PHOTOGRAPHS,
    PhotographDataset,
    TrainingStep,
    build_model,
    kornia_chain,
    to_unit_float,
    worker_chain,
)

__all__ = [
    "Comparison",
    "DemoSizes",
    "RunResult",
    "compare",
    "count_cores",
    "default_sizes",
]

_MOST_WARMUP_BATCHES = 10
_SEED = 0

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class DemoSizes:
    """How much work one run does."""

    batch_size: int
    """Images in a batch."""
    image_size: int
    """Height and width of an image in pixels."""
    num_batches: int
    """Batches on the clock, in each run."""
    num_workers: int
    """Worker processes of the DataLoader; 0 loads in the training process."""

    @property
    def num_warmup(self) -> int:
        """Batches before the clock starts."""
        return min(_MOST_WARMUP_BATCHES, self.num_batches)

    @property
    def num_total(self) -> int:
        """Batches of one run, warm-up included."""
        return self.num_warmup + self.num_batches


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run measured."""

    label: str
    """Which input pipeline it was."""
    steps_per_s: float
    """Training steps a second, warm-up excluded. Higher is better."""
    first_loss: float
    """Mean loss of the warm-up batches, near ln(8) = 2.08: the model knows nothing."""
    last_loss: float
    """Mean loss of the last batches, as many. Below the first: the model learns."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all runs measured."""

    runs: tuple[RunResult, ...]
    """The training step alone, then the pipelines (a), (b) and (c)."""
    report: str
    """Lines in which the loader of (c) says what it saw."""


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_sizes(device: torch.device) -> DemoSizes:
    """Choose sizes with which the whole comparison ends in about a minute."""
    num_cores = count_cores()
    num_workers = max(1, min(8, num_cores - 1))
    if device.type in ("cuda", "xpu"):
        return DemoSizes(32, 256, 160, num_workers)
    if num_cores >= 8 or device.type == "mps":
        return DemoSizes(16, 128, 30, num_workers)
    return DemoSizes(16, 64, 30, num_workers)


def compare(sizes: DemoSizes, device: torch.device) -> Comparison:
    """Run the upper bound and the three input pipelines, one after the other.

    Raises:
        DependencyError: scikit-image or Kornia is missing.
    """
    if device.type == "cpu":
        _leave_cores_to_workers(sizes.num_workers)
    plain, augmenting = _build_sources(sizes, device)
    chain = kornia_chain(sizes.image_size)

    def augment(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            augmented: torch.Tensor = chain(to_unit_float(images))
        return augmented

    def run(label: str, pairs: Callable[[], Pairs]) -> RunResult:
        return _time_training(label, pairs, sizes, device)

    with StreamPrefetchLoader(plain, transform=chain, device=device) as prefetching:
        runs = (
            run("training step alone, no input", lambda: _repeat(sizes, device)),
            run("(a) augmentation in the workers", lambda: _move(augmenting, device)),
            run(
                "(b) Kornia on the device, serial",
                lambda: _move(plain, device, augment),
            ),
            run("(c) StreamPrefetchLoader", lambda: prefetching),
        )
        return Comparison(runs, prefetching.report())


def _leave_cores_to_workers(num_workers: int) -> None:
    """Train on the other cores only.

    Threads of one operation wait for each other. On a core that a worker has just taken
    that wait is long: two threads have been seen to take five times as long as one.
    """
    torch.set_num_threads(max(1, count_cores() - num_workers))


def _build_sources(
    sizes: DemoSizes, device: torch.device
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Build one DataLoader of raw photographs and one that augments in its workers."""

    def build(transform: nn.Module | None) -> DataLoader[Any]:
        dataset = PhotographDataset(
            sizes.image_size,
            transform=transform,
            length=sizes.batch_size * sizes.num_total,
        )
        return DataLoader(
            dataset,
            sizes.batch_size,
            shuffle=True,
            num_workers=sizes.num_workers,
            pin_memory=device.type == "cuda",
        )

    return build(None), build(worker_chain(sizes.image_size))


def _repeat(
    sizes: DemoSizes, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one augmented-looking batch, already on the device, again and again."""
    shape = (sizes.batch_size, 3, sizes.image_size, sizes.image_size)
    images = torch.rand(shape, device=device)
    labels = torch.arange(sizes.batch_size, device=device) % len(PHOTOGRAPHS)
    for _ in range(sizes.num_total):
        yield images, labels


def _move(
    source: DataLoader[Any],
    device: torch.device,
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what a plain training loop makes of the source, one after the other."""
    for images, labels in source:
        images_device = images.to(device, non_blocking=True)
        labels_device = labels.to(device, non_blocking=True)
        yield (augment(images_device) if augment else images_device), labels_device


def _time_training(
    label: str, pairs: Callable[[], Pairs], sizes: DemoSizes, device: torch.device
) -> RunResult:
    torch.manual_seed(_SEED)
    model = build_model(sizes.image_size, len(PHOTOGRAPHS))
    step = TrainingStep(model.to(device))
    # Kept on the device: reading a loss in the loop would make the host wait for it.
    losses: list[torch.Tensor] = []
    started_s = ended_s = 0.0
    with progress_bar(label, sizes.num_total, "batches") as bar:
        for images, labels in pairs():
            losses.append(step(images, labels))
            if len(losses) == sizes.num_warmup:
                started_s = _time_when_done(device)
            elif len(losses) == sizes.num_total:
                # Here and not after the loop: ending the workers is not training.
                ended_s = _time_when_done(device)
            bar.update(1)
    return RunResult(
        label=label,
        steps_per_s=sizes.num_batches / (ended_s - started_s),
        first_loss=_mean(losses[: sizes.num_warmup]),
        last_loss=_mean(losses[-sizes.num_warmup :]),
    )


def _mean(losses: list[torch.Tensor]) -> float:
    return float(torch.stack(losses).mean())


def _time_when_done(device: torch.device) -> float:
    """Wait until the device has done all its work, and give the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
