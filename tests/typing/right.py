"""Code that a type checker must accept: the batch's type survives the loader."""

from collections.abc import Iterator
from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.testing import assert_resumes_at_every_step


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def from_a_data_loader(source: DataLoader[tuple[Tensor, int]]) -> None:
    # A DataLoader names the type of one *sample*; what its collate function makes of
    # them, torch does not say: an iterator over Any. The user says what it gives.
    assert_type(StreamPrefetchLoader(source), StreamPrefetchLoader[Any])
    for batch in StreamPrefetchLoader[tuple[Tensor, Tensor]](source, depth=3):
        assert_type(batch, tuple[Tensor, Tensor])
    loader: StreamPrefetchLoader[tuple[Tensor, Tensor]] = StreamPrefetchLoader(source)
    for x, y in loader:
        assert_type(x, Tensor)
        assert_type(y, Tensor)


def from_a_list(source: list[tuple[Tensor, Tensor]]) -> None:
    loader = StreamPrefetchLoader(source, transform=lambda x: x * 2)
    assert_type(loader, StreamPrefetchLoader[tuple[Tensor, Tensor]])
    for batch in loader:
        assert_type(batch, tuple[Tensor, Tensor])
    with loader as entered:
        assert_type(next(iter(entered)), tuple[Tensor, Tensor])
    assert_type(iter(loader), Iterator[tuple[Tensor, Tensor]])
    assert_type(len(loader), int)
    assert_type(loader.state_dict(), dict[str, Any])


class Reader:
    """A source of the user's own, typed."""

    def __iter__(self) -> Iterator[Pair]:
        yield Pair(torch.ones(1), torch.ones(1))


def from_a_typed_source() -> None:
    for batch in StreamPrefetchLoader(Reader(), torch.neg, inputs="x", seed=1):
        assert_type(batch, Pair)
        assert_type(batch.y, Tensor)
    # Of one loader around another, too.
    outer = StreamPrefetchLoader(StreamPrefetchLoader(Reader()))
    assert_type(outer, StreamPrefetchLoader[Pair])


def to_dict(batch: Pair) -> dict[str, Tensor]:
    return {"x": batch.x}


def what_a_batch_transform_returns(source: DataLoader[int]) -> None:
    for batch in StreamPrefetchLoader(Reader(), batch_transform=to_dict):
        assert_type(batch, dict[str, Tensor])
    mapped = StreamPrefetchLoader(source, batch_transform=to_dict, depth=1)
    assert_type(mapped, StreamPrefetchLoader[dict[str, Tensor]])


def named(source: list[dict[str, Tensor]]) -> StreamPrefetchLoader[dict[str, Tensor]]:
    return StreamPrefetchLoader(source, inputs=("x", "y"), transform=max, seed=1)


def settings_may_be_open(
    source: Dataset[Tensor], device: torch.device | str | None, seed: int | None
) -> None:
    loader = StreamPrefetchLoader[Tensor](
        DataLoader(source), None, device=device, seed=seed, background=None, replay=None
    )
    assert_type(list(loader), list[Tensor])


def check(source: list[Tensor]) -> None:
    assert_resumes_at_every_step(lambda: StreamPrefetchLoader(source))
