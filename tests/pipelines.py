"""Which pipelines are resumed in a fresh process?

All at module level, as ``spawn`` needs; ``functools.partial`` sets what differs.
"""

import random
from collections.abc import Iterator
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
)

from gpuprefetch import StreamPrefetchLoader
from tests.sources import Images

SAMPLES = 11
BATCH = 3


def noise(x: torch.Tensor) -> torch.Tensor:
    """Draw from all generators that the loader sets for a transform."""
    return x + torch.rand(2, device=x.device).sum() + random.random()


def from_numpy(x: torch.Tensor) -> torch.Tensor:
    """Draw from a generator that the loader does not set."""
    return x + np.random.rand()


def kornia_chain() -> nn.Module:
    return nn.Sequential(K.RandomCrop((4, 4)), K.RandomHorizontalFlip())


class DrawsItself(Images):
    """Adds noise from the global generators, as an augmentation on the CPU does."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        return image + torch.rand(()) + random.random() + np.random.rand(), label


class HoldsGenerators(Images):
    """Adds noise from generators of its own."""

    def __init__(self, length: int, shape: tuple[int, int, int]) -> None:
        super().__init__(length, shape)
        self.rng = np.random.default_rng(5)
        self.parts = [random.Random(6), {"mt": np.random.RandomState(7)}]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        python, rest = self.parts
        extra = self.rng.random() + python.random() + rest["mt"].rand()
        return image + extra, label


class CountsLoads(Images):
    """The label says how many samples this process has loaded from it."""

    loads = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.loads += 1
        return super().__getitem__(index)[0], self.loads


class EagerSampler(Sampler[int]):
    """Draws its order in ``iter()``, from Python's, NumPy's and torch's generator."""

    def __init__(self, dataset: Dataset) -> None:
        self.length = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)


class LazySampler(EagerSampler):
    """Draws its order when it is asked for the first sample."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


class UsersLoader(DataLoader):
    """Has an ``iter()`` of its own, which starts nothing before the first batch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class HashSampler(Sampler[int]):
    """Depends on the hash of strings, which Python salts in each process."""

    def __init__(self, dataset: Dataset) -> None:
        self.length = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(self.length), key=lambda i: hash(f"sample {i}")))


class Stream(IterableDataset):
    """Counts; keeps no state."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter([Images(SAMPLES, (1, 6, 6))[i] for i in range(SAMPLES)])


class StatefulStream(Stream):
    """Counts with an iterator that knows where it stands."""

    def __iter__(self) -> "_Place":
        return _Place()


class _Place(Iterator[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> tuple[torch.Tensor, int]:
        if self.place >= SAMPLES:
            raise StopIteration
        self.place += 1
        return Images(SAMPLES, (1, 6, 6))[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def make(
    dataset: Any = Images,
    *,
    sampler: str | None = None,
    num_workers: int = 0,
    persistent_workers: bool = False,
    own_generator: bool = False,
    stateful: bool = False,
    subclass: bool = False,
    transform: Any = noise,
    kornia: bool = False,
    device: str = "cpu",
    **settings: Any,
) -> StreamPrefetchLoader[Any]:
    """Build a pipeline of images with their labels, the same one in every process."""
    is_stream = issubclass(dataset, IterableDataset)
    data = dataset() if is_stream else dataset(SAMPLES, (1, 6, 6))
    generator = torch.Generator().manual_seed(21)
    arguments: dict[str, Any] = {}
    if own_generator:
        arguments["generator"] = generator
    if sampler == "distributed":
        arguments["sampler"] = DistributedSampler(data, num_replicas=2, rank=1)
    elif sampler == "subset":
        arguments["sampler"] = SubsetRandomSampler(range(2, SAMPLES), generator)
    elif sampler in ("eager", "hash"):
        arguments["sampler"] = {"eager": EagerSampler, "hash": HashSampler}[sampler](
            data
        )
    elif not is_stream:
        arguments["shuffle"] = True
    kind: Any = UsersLoader if subclass else DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    source = kind(
        data,
        BATCH,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        **arguments,
    )
    return StreamPrefetchLoader(
        source, kornia_chain() if kornia else transform, device=device, **settings
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Do what a distributed training script does before each epoch."""
    loader.sampler.set_epoch(epoch)


# Faulty on purpose #


class CountsPrefetched:
    """Reads two batches ahead, and passes on a state that counts them."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        for batch in self.source:
            ahead.append(batch)
            if len(ahead) > 2:
                yield ahead.pop(0)
        yield from ahead

    def state_dict(self) -> Any:
        return self.source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.source.load_state_dict(state)


def make_prefetching() -> CountsPrefetched:
    return CountsPrefetched(make(seed=1))
