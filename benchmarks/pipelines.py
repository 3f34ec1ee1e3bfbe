"""Through which input pipelines does the same training step get its batches?

Each pipeline is built by a function from a source of (uint8 images, int64 labels) on
the host and gives (float32 images, labels) on the device. None of them is tuned beyond
what its own documentation says.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import StreamPrefetchLoader

__all__ = [
    "InMemory",
    "RandomImages",
    "Step",
    "Transform",
    "data_loader",
    "has_timm",
    "one_ahead",
    "plain",
    "resident",
    "steps_per_s",
    "stream_prefetch",
    "synchronize",
    "timm_prefetch",
    "to_float",
]

Pair = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], object]
Transform = Callable[[torch.Tensor], torch.Tensor]

NUM_CLASSES = 10


def to_float(images: torch.Tensor) -> torch.Tensor:
    """Convert (B, C, H, W) uint8 to float32, in [0, 255]."""
    return images.float()


# Sources #


class InMemory:
    """Serves a few ready batches in turn: no dataset cost, the pipeline alone.

    Args:
        batch_size: Images in a batch.
        image_size: Height and width, in pixels.
        pin: Keep them in pinned memory, as a DataLoader with ``pin_memory`` would.
    """

    _NUM_READY = 8

    def __init__(self, batch_size: int, image_size: int, *, pin: bool) -> None:
        self._ready = [
            _random_batch(batch_size, image_size) for _ in range(self._NUM_READY)
        ]
        if pin and torch.cuda.is_available():
            self._ready = [(x.pin_memory(), y.pin_memory()) for x, y in self._ready]

    def __iter__(self) -> Iterator[Pair]:
        return itertools.cycle(self._ready)


def _random_batch(batch_size: int, image_size: int) -> Pair:
    shape = (batch_size, 3, image_size, image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    return images, torch.randint(0, NUM_CLASSES, (batch_size,))


class RandomImages(Dataset[tuple[torch.Tensor, int]]):
    """Draws (3, H, W) uint8 noise in the worker: as costly as decoding a small file."""

    def __init__(self, image_size: int) -> None:
        self._shape = (3, image_size, image_size)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randint(0, 256, self._shape, dtype=torch.uint8), index % 10


def data_loader(
    batch_size: int, image_size: int, *, num_workers: int, pin: bool
) -> DataLoader[Any]:
    """Build a DataLoader over :class:`RandomImages`."""
    return DataLoader(
        RandomImages(image_size),
        batch_size=batch_size,
        num_workers=num_workers,
        pin_memory=pin and torch.cuda.is_available(),
    )


# Pipelines #


def resident(batch_size: int, image_size: int, device: torch.device) -> Iterator[Pair]:
    """Serve one batch that lies on the device: no input pipeline, hence the bound."""
    images, labels = _random_batch(batch_size, image_size)
    return itertools.repeat((images.to(device).float(), labels.to(device)))


def plain(
    source: Iterable[Pair], device: torch.device, transform: Transform = to_float
) -> Iterator[Pair]:
    """Copy and transform in the loop: what training scripts do without a loader."""
    for images, labels in source:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.no_grad():
            images = transform(images)
        yield images, labels


def one_ahead(
    source: Iterable[Pair], device: torch.device, transform: Transform = to_float
) -> Iterator[Pair]:
    """Copy one batch ahead on a side stream, by hand: the least that is correct."""
    side, batches = torch.cuda.Stream(device), iter(source)

    def issue() -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]:
        images, labels = next(batches)
        with torch.cuda.stream(side), torch.no_grad():
            images = transform(images.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            return images, labels, side.record_event()

    ahead = issue()
    while True:
        images, labels, ready = ahead
        ahead = issue()
        consumer = torch.cuda.current_stream()
        consumer.wait_event(ready)
        images.record_stream(consumer)
        labels.record_stream(consumer)
        yield images, labels


def has_timm() -> bool:
    """Tell whether timm can be imported."""
    try:
        import timm.data.loader  # noqa: F401
    except Exception:  # A broken install, too, only takes one row out of the table.
        return False
    return True


def timm_prefetch(source: Iterable[Pair], device: torch.device) -> Iterator[Pair]:
    """Use timm's PrefetchLoader, which also normalizes."""
    from timm.data.loader import PrefetchLoader

    return iter(PrefetchLoader(source, device=device))


def stream_prefetch(
    source: Iterable[Pair],
    device: torch.device,
    transform: Transform | None = to_float,
    *,
    depth: int = 2,
    background: bool | None = None,
) -> Iterator[Pair]:
    """Use the loader of this package."""
    loader = StreamPrefetchLoader(
        source, transform, device=device, depth=depth, background=background
    )
    try:
        yield from loader
    finally:
        loader.close()


# Timing #


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def steps_per_s(
    batches: Iterator[Pair],
    step: Step,
    device: torch.device,
    *,
    steps: int,
    warmup: int,
) -> float:
    """Train through a pipeline; the device is synchronized inside the timed region.

    Args:
        batches: Gives at least ``steps + warmup`` batches; closed afterwards.
        step: One step of training.
        device: Where it runs.
        steps: How many are timed: at least ten times what the pipeline prefetches.
        warmup: How many come before.
    """
    try:
        for _ in range(warmup):
            step(*next(batches))
        synchronize(device)
        started = time.perf_counter()
        for _ in range(steps):
            step(*next(batches))
        synchronize(device)
        return steps / (time.perf_counter() - started)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
