"""Which sources do the tests iterate, and what does each of them reveal?

All datasets are at module level, so that workers started by ``spawn`` can load them.
"""

import os
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

Pair = namedtuple("Pair", "x y")


class Numbers(Dataset):
    """Item i is the tensor i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class FailsAt(Numbers):
    """Item i is the tensor i, but one item cannot be read."""

    def __init__(self, length: int, bad: int) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise ValueError(f"bad file {index}")
        return super().__getitem__(index)


class WorkerPids(Numbers):
    """Every item is the id of the process that read it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(os.getpid())


class SlowNumbers(Numbers):
    """Each item takes a while, so that a loop can be left while one is being read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        return super().__getitem__(index)


class Images(Dataset):
    """Item i is a pair: a (C, H, W) uint8 image drawn from i alone, and the label i."""

    def __init__(self, length: int, shape: tuple[int, int, int] = (3, 16, 16)) -> None:
        self.length, self.shape = length, shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(
            256, self.shape, dtype=torch.uint8, generator=generator
        ), index


class NoSamples(IterableDataset):
    """A shard in which nothing is left."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


class WrongLength(IterableDataset):
    """Claims another number of samples than it gives."""

    def __init__(self, claimed: int, given: int) -> None:
        self.claimed, self.given = claimed, given

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.given))


class CountingSource:
    """A re-iterable of given batches that counts what is asked of it."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.opened = 0  # Calls of iter().
        self.pulled = 0  # Batches handed out, over all passes.
        self.closed = 0  # Passes that ended, by exhaustion or by being dropped.

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        try:
            for batch in self.batches:
                self.pulled += 1
                yield batch
        finally:
            self.closed += 1


class RefillingSource:
    """Fills one and the same tensor anew for every batch, as fast readers do."""

    def __init__(self, length: int, shape: tuple[int, ...] = (64,)) -> None:
        self.length, self.buffer = length, torch.zeros(shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for value in range(self.length):
            self.buffer.fill_(value)
            yield self.buffer


class StatefulSource:
    """Counts from 0 and can say and be told where it stands."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < self.length:
            self.place += 1
            yield torch.tensor(self.place - 1)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class OwnIterator:
    """Is its own iterator, as an open file is: all passes share one position."""

    def __init__(self, length: int) -> None:
        self.length, self.place = length, 0

    def __iter__(self) -> "OwnIterator":
        return self

    def __next__(self) -> torch.Tensor:
        if self.place >= self.length:
            raise StopIteration
        self.place += 1
        return torch.tensor(self.place - 1)


def count(length: int) -> list[torch.Tensor]:
    """Make a list of batches: the tensors 0, 1, 2, ..."""
    return [torch.tensor(value) for value in range(length)]


def images(
    batches: int = 3, shape: tuple[int, ...] = (4, 3, 16, 16)
) -> list[torch.Tensor]:
    """Make batches of float32 images in [0, 1], the same ones in every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator) for _ in range(batches)]
