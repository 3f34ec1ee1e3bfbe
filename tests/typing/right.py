"""Code that a type checker must accept: the batch's type survives the loader."""

from typing import assert_type

from torch import Tensor
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader


def from_a_data_loader(source: DataLoader[Tensor]) -> None:
    # A DataLoader's iterator is typed Any in torch; the user says what it gives.
    loader: StreamPrefetchLoader[tuple[Tensor, Tensor]] = StreamPrefetchLoader(source)
    for batch in loader:
        assert_type(batch, tuple[Tensor, Tensor])


def from_a_list(source: list[tuple[Tensor, Tensor]]) -> None:
    loader = StreamPrefetchLoader(source, transform=lambda x: x * 2)
    assert_type(loader, StreamPrefetchLoader[tuple[Tensor, Tensor]])
    for batch in loader:
        assert_type(batch, tuple[Tensor, Tensor])
    with loader as entered:
        assert_type(next(iter(entered)), tuple[Tensor, Tensor])
    assert_type(len(loader), int)


def named(source: list[dict[str, Tensor]]) -> StreamPrefetchLoader[dict[str, Tensor]]:
    return StreamPrefetchLoader(source, inputs=("x", "y"), transform=max, seed=1)
