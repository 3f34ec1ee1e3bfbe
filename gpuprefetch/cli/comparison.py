"""How fast does the same training step run behind different input pipelines?

Each pipeline trains its own copy of the same model on the same photographs in the same
order. They take turns in short rounds, so that whatever else the machine does meanwhile
hits all of them alike, and the median round counts. In each round the clock starts
after the warm-up batches and, on an asynchronous device, stops only when the device has
done all its work.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch.cli.bar import Bar, progress_bar
from gpuprefetch.cores import count_cores
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
    "PipelineResult",
    "compare",
    "default_sizes",
]

_FEWEST_WARMUP_BATCHES = 3
_PREFETCHED_PER_WORKER = 2  # What a DataLoader does if nothing else is asked for.
_SEED = 0

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class DemoSizes:
    """How much work each pipeline does."""

    batch_size: int
    """Images in a batch."""
    image_size: int
    """Height and width of an image in pixels."""
    num_batches: int
    """Batches on the clock, in each round."""
    num_workers: int
    """Worker processes of the DataLoader; 0 loads in the training process."""
    num_rounds: int = 5
    """How often each pipeline gets its turn."""

    @property
    def num_warmup(self) -> int:
        """Batches of a round before the clock starts: those that the workers have begun
        while nobody asked for them, and some in which the device warms up."""
        queued = _PREFETCHED_PER_WORKER * self.num_workers
        return min(max(queued, _FEWEST_WARMUP_BATCHES), self.num_batches)

    @property
    def num_per_round(self) -> int:
        """Batches of one round, warm-up included."""
        return self.num_warmup + self.num_batches


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What one pipeline reached."""

    label: str
    """Which input pipeline it was."""
    steps_per_s: float
    """Training steps a second in the median round, warm-up excluded. High is good."""
    losses: tuple[float, float] | None
    """Mean loss of the first round, near ln(8) = 2.08 as the model knows nothing, and
    of the last round: lower, since the model learns. None if it saw no photographs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all pipelines reached."""

    results: tuple[PipelineResult, ...]
    """The training step alone, then the pipelines (a), (b) and (c)."""
    report: str
    """Lines in which the loader of (c) says what it saw in its last round."""


def default_sizes(device: torch.device) -> DemoSizes:
    """Choose sizes with which the whole comparison ends in about a minute."""
    num_cores = count_cores()
    num_workers = max(1, min(8, num_cores - 1))
    if device.type in ("cuda", "xpu"):
        return DemoSizes(32, 256, 80, num_workers)
    if num_cores >= 8 or device.type == "mps":
        return DemoSizes(16, 128, 16, num_workers, num_rounds=3)
    return DemoSizes(16, 64, 10, num_workers)


def compare(sizes: DemoSizes, device: torch.device) -> Comparison:
    """Run the upper bound and the three input pipelines, in turns.

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

    def pipeline(label: str, start: Callable[[], Pairs]) -> _Pipeline:
        return _Pipeline(label, start, sizes, device)

    with StreamPrefetchLoader(plain, transform=chain, device=device) as prefetching:
        bound = pipeline(
            "training step alone, no input", lambda: _repeat(sizes, device)
        )
        compared = (
            pipeline(
                "(a) plain loop, augmentation in the workers",
                lambda: _move(augmenting, device),
            ),
            pipeline(
                "(b) plain loop, Kornia on the device",
                lambda: _move(plain, device, augment),
            ),
            pipeline("(c) StreamPrefetchLoader", lambda: prefetching),
        )
        _take_turns((bound, *compared), sizes)
        return Comparison(
            (bound.result(has_losses=False), *(each.result() for each in compared)),
            prefetching.report(),
        )


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
            length=sizes.batch_size * sizes.num_per_round,
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
    for _ in range(sizes.num_per_round):
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


class _Pipeline:
    """One source of batches and the model that trains on it, from round to round."""

    def __init__(
        self,
        label: str,
        start: Callable[[], Pairs],
        sizes: DemoSizes,
        device: torch.device,
    ) -> None:
        torch.manual_seed(_SEED)
        model = build_model(sizes.image_size, len(PHOTOGRAPHS))
        self.label = label
        self._start = start
        self._sizes = sizes
        self._device = device
        self._step = TrainingStep(model.to(device))
        self._steps_per_s: list[float] = []
        self._mean_losses: list[float] = []

    def run_round(self, bar: Bar) -> None:
        """Train for one round and keep its speed and mean loss."""
        # Round n shows the same photographs in the same order in each pipeline.
        torch.manual_seed(_SEED + len(self._steps_per_s))
        sizes = self._sizes
        # Kept on the device: reading a loss in the loop would make the host wait.
        losses: list[torch.Tensor] = []
        started_s = ended_s = 0.0
        for images, labels in self._start():
            losses.append(self._step(images, labels))
            if len(losses) == sizes.num_warmup:
                started_s = _time_when_done(self._device)
            elif len(losses) == sizes.num_per_round:
                # Here and not after the loop: ending the workers is not training.
                ended_s = _time_when_done(self._device)
            bar.update(1)
        self._steps_per_s.append(sizes.num_batches / (ended_s - started_s))
        self._mean_losses.append(float(torch.stack(losses).mean()))

    def result(self, *, has_losses: bool = True) -> PipelineResult:
        """Take the median of the rounds."""
        return PipelineResult(
            label=self.label,
            steps_per_s=statistics.median(self._steps_per_s),
            losses=(self._mean_losses[0], self._mean_losses[-1])
            if has_losses
            else None,
        )


def _take_turns(pipelines: Sequence[_Pipeline], sizes: DemoSizes) -> None:
    num_batches = sizes.num_rounds * len(pipelines) * sizes.num_per_round
    with progress_bar("training", num_batches, "batches") as bar:
        for _ in range(sizes.num_rounds):
            for pipeline in pipelines:
                pipeline.run_round(bar)


def _time_when_done(device: torch.device) -> float:
    """Wait until the device has done all its work, and give the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
