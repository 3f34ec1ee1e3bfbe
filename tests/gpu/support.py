"""What do the GPU tests share: batches of known contents, pauses, memory figures.

Contents are compared on the device and counted there, so that a check never makes the
host wait: a host that waits hides the very faults that these tests look for.
"""

import gc
from collections.abc import Iterator
from typing import Literal

import torch

__all__ = [
    "CUDA",
    "PAUSE_CYCLES",
    "Bank",
    "HostMemory",
    "active_bytes_peak",
    "allocated_bytes",
    "count_differing",
    "pause_device",
    "settle",
]

CUDA = torch.device("cuda")

HostMemory = Literal["pageable", "pinned"]

# About one millisecond at 2 GHz: ten times what the host needs for a step of these
# tests, and enough for some 50 MB of copies to land meanwhile.
PAUSE_CYCLES = 2_000_000


def pause_device(cycles: int = PAUSE_CYCLES) -> None:
    """Queue a kernel that only spins on the current stream; the host goes on."""
    torch.cuda._sleep(cycles)


class Bank:
    """A source that serves a few ready batches in turn, each with its own contents.

    A batch is ``{"image": (side, side) uint8, "target": [((32,) int64,), index]}``:
    a large leaf, a small one two levels deeper, and one that is no tensor.

    Args:
        num_batches: How many batches one pass serves.
        memory: Kind of host memory in which the batches lie.
        side: Height and width of the image, in pixels.
    """

    _NUM_READY = 8

    def __init__(
        self, num_batches: int, *, memory: HostMemory, side: int = 1024
    ) -> None:
        self.num_batches = num_batches
        generator = torch.Generator().manual_seed(num_batches + side)
        self._ready_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place in range(self._NUM_READY):
            image = torch.randint(
                0, 256, (side, side), dtype=torch.uint8, generator=generator
            )
            labels = torch.arange(32) + 1000 * place
            if memory == "pinned":
                image, labels = image.pin_memory(), labels.pin_memory()
            self._ready_host.append((image, labels))
        self._ready_device = [
            (image.to(CUDA), labels.to(CUDA)) for image, labels in self._ready_host
        ]
        torch.cuda.synchronize()

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[dict[str, object]]:
        for index in range(self.num_batches):
            image, labels = self._ready_host[index % self._NUM_READY]
            yield {"image": image, "target": [(labels,), index]}

    def expected(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give image and labels of batch ``index``, on the device from the start."""
        return self._ready_device[index % self._NUM_READY]


def count_differing(
    found: dict[str, object], expected: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Queue the comparison of one :class:`Bank` batch.

    Returns:
        (), int64, on the device: 1 when any bit differs, else 0.
    """
    (labels,), _index = found["target"]  # type: ignore[misc]
    image_differs = (found["image"] != expected[0]).any()
    labels_differ = (labels != expected[1]).any()
    return (image_differs | labels_differ).long()


# Memory #


def settle() -> None:
    """Wait until nothing is queued and all that can be dropped has been dropped."""
    gc.collect()
    torch.cuda.synchronize()


def allocated_bytes() -> int:
    """Bytes of device memory in live tensors, after :func:`settle`."""
    settle()
    return torch.cuda.memory_allocated()


def active_bytes_peak() -> int:
    """Most bytes in live tensors or in dropped ones that a stream still reads."""
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"])
