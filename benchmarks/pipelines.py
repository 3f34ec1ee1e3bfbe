"""Through which input pipelines does the same training step get its batches?

Each pipeline is built by a function from a source of (uint8 images, int64 labels) on
the host and gives (float32 images, labels) on the device. None of them is tuned beyond
what its own documentation says.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import StreamPrefetchLoader

__all__ = [
    "InMemory",
    "Ours",
    "Pair",
    "RandomImages",
    "Transform",
    "data_loader",
    "has_timm",
    "one_ahead",
    "plain",
    "resident",
    "stream_prefetch",
    "threaded",
    "timm_prefetch",
    "to_float",
]

Pair = tuple[torch.Tensor, torch.Tensor]
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
    side, batches = side_stream(device), iter(source)
    ahead = issue(next(batches), device, transform, side)
    while True:
        ready = ahead
        ahead = issue(next(batches), device, transform, side)
        yield hand_off(*ready)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Make a stream; off CUDA there is none, and work is done in order."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def issue(
    pair: Pair,
    device: torch.device,
    transform: Transform,
    side: torch.cuda.Stream | None,
) -> tuple[Pair, torch.cuda.Event | None]:
    """Copy and transform one batch on a stream."""
    images, labels = pair
    with torch.cuda.stream(side), torch.no_grad():
        images = transform(images.to(device, non_blocking=True))
        labels = labels.to(device, non_blocking=True)
        return (images, labels), None if side is None else side.record_event()


def hand_off(pair: Pair, ready: torch.cuda.Event | None) -> Pair:
    """Let the loop's stream wait for a batch of another stream, and own it."""
    if ready is not None:
        consumer = torch.cuda.current_stream()
        consumer.wait_event(ready)
        for leaf in pair:
            leaf.record_stream(consumer)
    return pair


def threaded(
    source: Iterable[Pair],
    device: torch.device,
    transform: Transform = to_float,
    *,
    depth: int = 2,
) -> Iterator[Pair]:
    """Copy and transform in a thread, on a side stream: hides time on the host, too."""
    # Batches that are issued and wait for the loop, or the error that ended it.
    ahead: queue.Queue[Any] = queue.Queue(depth)
    is_over = threading.Event()  # Set by the loop; the thread looks at every batch.

    def offer(item: Any) -> bool:
        while not is_over.is_set():
            try:
                ahead.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        side = side_stream(device)
        try:
            for pair in source:
                if not offer(issue(pair, device, transform, side)):
                    return
        except BaseException as error:
            offer(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        while True:
            item = ahead.get()
            if isinstance(item, BaseException):
                raise item
            yield hand_off(*item)
    finally:
        is_over.set()
        worker.join()


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


class Ours:
    """The loader of this package, as an iterator that can be closed."""

    def __init__(self, loader: StreamPrefetchLoader[Any]) -> None:
        self._loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Pair]:
        return self

    def __next__(self) -> Pair:
        pair: Pair = next(self._batches)
        return pair

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory of the loader's own slots."""
        return self._loader.stats().pinned_bytes

    def close(self) -> None:
        """Give back threads, streams and slots."""
        self._loader.close()


def stream_prefetch(
    source: Iterable[Pair],
    device: torch.device,
    transform: Transform | None = to_float,
    *,
    depth: int = 2,
    background: bool | None = None,
) -> Ours:
    """Use the loader of this package."""
    return Ours(
        StreamPrefetchLoader(
            source, transform, device=device, depth=depth, background=background
        )
    )
