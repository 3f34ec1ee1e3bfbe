"""Which thread pulls which source, where the user leaves it open?"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.assembly import PullPlan
from gpuprefetch.source import SourceTraits


class Moves(DataLoader[Any]):
    """Handles its batches after the workers, as a framework's loader does."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield [leaf + 1 for leaf in batch]


class Stateful(DataLoader[Any]):
    """Offers its state, as torchdata's does."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing from it."""


def loader_of(kind: type = DataLoader, **settings: Any) -> Any:
    data = TensorDataset(torch.arange(8.0))
    return kind(data, batch_size=2, **settings)


@pytest.mark.parametrize(
    ("source", "is_threaded"),
    [
        (loader_of(), False),
        (loader_of(pin_memory=True), False),
        (loader_of(num_workers=1), True),
        (loader_of(num_workers=1, pin_memory=True), False),
        (loader_of(Moves, num_workers=1, pin_memory=True), True),
        (loader_of(Stateful, num_workers=1, pin_memory=True), True),
        ([torch.zeros(2)], False),
    ],
    ids=[
        *("no workers", "no workers, pinned", "workers", "workers, pinned"),
        *("its own iter, pinned", "its own state, pinned", "a list"),
    ],
)
def test_a_thread_pulls_where_nothing_else_pulls_ahead(
    source: Any, is_threaded: bool
) -> None:
    settings = StreamPrefetchLoader(source)._settings
    plan = PullPlan.of(settings, SourceTraits.of(source))
    assert plan.is_threaded is is_threaded


@pytest.mark.parametrize("background", [False, True])
def test_the_user_decides(background: bool) -> None:
    source = loader_of(num_workers=1, pin_memory=True)
    settings = StreamPrefetchLoader(source, background=background)._settings
    plan = PullPlan.of(settings, SourceTraits.of(source))
    assert plan.is_threaded is background
    assert plan.most_pulled == (4 if background else 2), "two more from workers"
