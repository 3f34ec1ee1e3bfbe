"""Does torch's stream sanitizer accept the loader, and does it see a planted race?

For a process that set ``TORCH_CUDA_SANITIZER`` before torch was imported. Prints one
line for each case. Batches are an image and a label: the sanitizer knows memory by the
first address of a block, so a second small leaf in a block would look to it like memory
that is never freed.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from gpuprefetch import StreamPrefetchLoader, streams

_NUM_BATCHES = 20


class _Pairs:
    """Serves image and labels, pinned or pageable."""

    def __init__(self, *, pin: bool) -> None:
        image = torch.randint(0, 256, (256, 1024), dtype=torch.uint8)
        labels = torch.arange(32)
        self._pair = (
            (image.pin_memory(), labels.pin_memory()) if pin else (image, labels)
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(_NUM_BATCHES):
            yield self._pair


def _to_float(image: torch.Tensor) -> torch.Tensor:
    return image.float().mul_(1 / 255)


def _consume(
    *,
    pin: bool,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    background: bool = False,
) -> None:
    total = torch.zeros((), device="cuda")
    with StreamPrefetchLoader(
        _Pairs(pin=pin), transform=transform, device="cuda", background=background
    ) as loader:
        for image, labels in loader:
            total += image.sum() + labels.sum()
            del image, labels


def plant_race() -> None:
    """Hand batches over without the wait; the sanitizer writes what it sees.

    It also raises, but torch 2.11 crashes when tensors are freed on the way up. So what
    counts is the text on the error stream.
    """
    streams.enqueue_wait = lambda event, device: torch.cuda.current_stream(device)
    _consume(pin=True, transform=_to_float)


def main() -> None:
    """Run all cases that are right."""
    cases = {
        "pinned": {"pin": True},
        "pageable": {"pin": False},
        "transform": {"pin": True, "transform": _to_float},
        "thread": {"pin": False, "transform": _to_float, "background": True},
        "other-stream": {"pin": True},
    }
    for name, settings in cases.items():
        stream = torch.cuda.Stream() if name == "other-stream" else None
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                _consume(**settings)
        except CUDASanitizerErrors as error:
            print(f"{name}: {error}; see above")
        else:
            print(f"{name}: clean")
        torch.cuda.synchronize()
