"""Does a resumed epoch give exactly what was missing: samples and pixels?

The public checker saves at every step, loads each state into a new loader in a changed
random world, and compares all that follows; here in this process, over each setting of
the loader. ``test_resume`` does it in fresh processes, over the kinds of sources.
"""

import io
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StateError, StreamPrefetchLoader, SupersededError, testing
from tests.sources import Images, Numbers, StatefulSource, count, images

pytestmark = pytest.mark.timeout(60)


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(2, device=x.device) + random.random()


def shuffled(num_workers: int = 0) -> DataLoader:
    return DataLoader(
        Numbers(8), batch_size=None, shuffle=True, num_workers=num_workers
    )


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else [*map(plain, value)]


def assert_resumes_at_every_step(make: Callable[[], Any], *, epochs: int = 2) -> None:
    testing.assert_resumes_at_every_step(make, epochs=epochs, fresh_process=False)


def saved(loader: StreamPrefetchLoader[Any]) -> Any:
    """Send a state through ``torch.save``, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def disturb(value: int) -> None:
    torch.manual_seed(1000 + value)
    random.seed(value)


# Every setting #


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_each_depth_and_feeder_resumes(
    device: torch.device, depth: int, background: bool
) -> None:
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(
            shuffled(), noise, device=device, depth=depth, background=background
        )
    )


@pytest.mark.parametrize("seed", [None, 9])
@pytest.mark.parametrize("inputs", [None, 0, (0,)])
def test_each_seed_and_inputs_resumes(
    device: torch.device, inputs: Any, seed: int | None
) -> None:
    transform = (lambda x: (noise(x),)) if isinstance(inputs, tuple) else noise
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(
            [(torch.tensor(i), torch.tensor(-i)) for i in range(5)],
            transform,
            inputs=inputs,
            device=device,
            seed=seed,
        )
    )


def test_a_batch_transform_resumes(device: torch.device) -> None:
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(
            shuffled(), batch_transform=noise, device=device, seed=1
        )
    )


@pytest.mark.parametrize("seed", [None, 9])
def test_a_kornia_transform_resumes(device: torch.device, seed: int | None) -> None:
    def make() -> StreamPrefetchLoader[Any]:
        source = DataLoader(Images(8, (1, 6, 6)), batch_size=2, shuffle=True)
        return StreamPrefetchLoader(
            source, K.RandomCrop((4, 4)), device=device, seed=seed
        )

    assert_resumes_at_every_step(make)


def test_no_transform_resumes(device: torch.device) -> None:
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(shuffled(), device=device, depth=3)
    )


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_source_with_a_state_resumes(
    device: torch.device, depth: int, background: bool
) -> None:
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(
            StatefulSource(6), noise, device=device, depth=depth, background=background
        )
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("background", [False, True])
def test_a_loader_over_a_loader_resumes(device: torch.device, background: bool) -> None:
    # In a thread, draws from the global generators mix with those of the loop.
    inner = None if background else noise
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(
            StreamPrefetchLoader(shuffled(), inner, device="cpu"),
            noise,
            device=device,
            background=background,
        ),
        epochs=3,
    )


def test_a_loader_with_workers_resumes(device: torch.device) -> None:
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(shuffled(1), noise, device=device), epochs=1
    )


# Between the steps #


def test_a_state_of_a_new_loader_is_that_of_the_first_epoch() -> None:
    loader = StreamPrefetchLoader(images(3), noise_image, seed=4, device="cpu")
    state = loader.state_dict()
    assert state["epoch"] == 0
    assert state["yielded"] == 0
    resumed = StreamPrefetchLoader(images(3), noise_image, seed=4, device="cpu")
    resumed.load_state_dict(state)
    assert list(map(plain, loader)) == list(map(plain, resumed))


def noise_image(x: torch.Tensor) -> torch.Tensor:
    return x[0, 0, 0] + torch.rand(1)


def test_a_state_between_epochs_goes_on_with_the_next_epoch() -> None:
    def make() -> StreamPrefetchLoader[Any]:
        return StreamPrefetchLoader(count(3), noise, seed=4, device="cpu")

    loader = make()
    list(loader)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict()["epoch"] == 1
    for _ in range(2):
        assert list(map(plain, loader)) == list(map(plain, resumed))


def test_a_state_before_the_first_batch_repeats_order_and_pixels() -> None:
    """The epoch has begun and nothing was yielded: all of it is still to come."""

    def make() -> StreamPrefetchLoader[Any]:
        return StreamPrefetchLoader(shuffled(), noise, device="cpu")

    torch.manual_seed(0)
    expected = [plain(x) for x in make()]
    torch.manual_seed(0)
    loader = make()
    iterator = iter(loader)
    state = loader.state_dict()
    del iterator
    disturb(1)
    resumed = make()
    resumed.load_state_dict(state)
    assert [plain(x) for x in resumed] == expected


def test_the_state_counts_what_was_yielded_not_what_was_pulled() -> None:
    loader = StreamPrefetchLoader(
        StatefulSource(10), device="cpu", depth=4, background=True
    )
    iterator = iter(loader)
    for yielded in range(1, 4):
        next(iterator)
        state = loader.state_dict()
        assert state["yielded"] == yielded
        assert state["source_state"] == {"place": yielded}


def test_resuming_leaves_the_users_generators_alone() -> None:
    loader = StreamPrefetchLoader(shuffled(), noise, device="cpu")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = StreamPrefetchLoader(shuffled(), noise, device="cpu")
    resumed.load_state_dict(state)
    before = torch.get_rng_state()
    list(resumed)
    assert torch.equal(before, torch.get_rng_state())


def test_the_epoch_after_a_resumed_one_is_whole() -> None:
    loader = StreamPrefetchLoader(count(4), device="cpu")
    iterator = iter(loader)
    next(iterator)
    resumed = StreamPrefetchLoader(count(4), device="cpu")
    resumed.load_state_dict(loader.state_dict())
    assert [int(x) for x in resumed] == [1, 2, 3]
    assert [int(x) for x in resumed] == [0, 1, 2, 3]


def test_loading_a_state_ends_no_pass_of_another_loader() -> None:
    loader = StreamPrefetchLoader(count(4), device="cpu")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = StreamPrefetchLoader(count(4), device="cpu")
    other.load_state_dict(state)
    assert [int(x) for x in iterator] == [1, 2, 3]
    assert state["yielded"] == 1


class PausesAtFour(StatefulSource):
    """Is busy with item 4 until it is told to go on."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.is_busy, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < self.length:
            if self.place == 4:
                self.is_busy.set()
                self.go_on.wait(20)
            self.place += 1
            yield torch.tensor(self.place - 1)
        self.place = 0


def test_loading_a_state_ends_the_pass_that_is_under_way() -> None:
    """Its thread would go on to advance the source that was just wound back."""
    source = PausesAtFour(10)
    loader = StreamPrefetchLoader(source, device="cpu", background=True, depth=3)
    iterator = iter(loader)
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    state = loader.state_dict()
    assert source.is_busy.wait(10)
    later = threading.Timer(0.2, source.go_on.set)
    later.start()
    loader.load_state_dict(state)
    later.join()
    assert [int(x) for x in loader] == list(range(2, 10))
    with pytest.raises(SupersededError):
        next(iterator)


def test_a_state_holds_plain_values_only() -> None:
    loader = StreamPrefetchLoader(shuffled(), noise, device="cpu")
    next(iter(loader))
    saved(loader)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    resumed = StreamPrefetchLoader(shuffled(), noise, device="cpu")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert len(list(resumed)) == 7


# What is refused #


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 0}, {"version": 3, "epoch": 1}, {"place": 3}],
)
def test_a_state_of_another_kind_is_refused(state: Any) -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    with pytest.raises(StateError, match=r"expected a state of version 2.*got version"):
        loader.load_state_dict(state)
    assert [int(x) for x in loader] == [0, 1, 2]


@pytest.mark.parametrize(("state", "name"), [(None, "None"), (7, "int")])
def test_what_is_no_dict_is_no_state(state: Any, name: str) -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    with pytest.raises(
        StateError,
        match=rf"state_dict\(\).*got {name}\..*leave load_state_dict\(\) out",
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "other", [{}, {"version": 1}, {"version": 2}, {"version": "2"}]
)
def test_a_whole_checkpoint_is_told_its_entry(other: dict[str, Any]) -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    checkpoint = {"model": {"weight": 1}, "data": loader.state_dict(), "step": 7}
    with pytest.raises(
        StateError,
        match=r"got .*Did you mean load_state_dict\(checkpoint\['data'\]\)\?",
    ):
        loader.load_state_dict(checkpoint | other)


def test_a_models_own_state_is_not_listed_in_full() -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    with pytest.raises(
        StateError, match=r"'w019', '\.\.\.'\]\. Save it again"
    ) as caught:
        loader.load_state_dict({f"w{i:03}": i for i in range(999)})
    assert "w020" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("yielded", "2"),
        ("yielded", -1),
        ("epoch", None),
        ("base_seed", 0.5),
        ("origin", {}),
        ("origin", {"generators": None, "continues_workers": False}),
        ("source", [1]),
    ],
)
def test_a_state_with_another_kind_of_value_is_refused(entry: str, value: Any) -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    next(iter(loader))
    state = loader.state_dict() | {entry: value}
    fresh = StreamPrefetchLoader(count(3), device="cpu")
    with pytest.raises(StateError, match="not what state_dict"):
        fresh.load_state_dict(state)
    assert [int(x) for x in fresh] == [0, 1, 2]


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_a_state_with_other_entries_is_refused(change: str) -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    next(iter(loader))
    state = loader.state_dict()
    if change == "surplus":
        state["surprise"] = 1
    else:
        del state["yielded"]
    fresh = StreamPrefetchLoader(count(3), device="cpu")
    with pytest.raises(StateError, match="entries"):
        fresh.load_state_dict(state)


def test_a_one_shot_source_is_refused() -> None:
    loader = StreamPrefetchLoader(count(3), device="cpu")
    next(iter(loader))
    one_shot = StreamPrefetchLoader(iter(count(3)), device="cpu")
    with pytest.raises(StateError, match=r"list_iterator.*cannot be started again"):
        one_shot.load_state_dict(loader.state_dict())


def test_a_source_that_ends_before_the_saved_place_is_refused() -> None:
    """Its length is not known beforehand."""
    loader = StreamPrefetchLoader(Unsized(5), device="cpu")
    assert len(list(itertools.islice(iter(loader), 4))) == 4
    shorter = StreamPrefetchLoader(Unsized(2), device="cpu")
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(
        StateError, match=r"4 batches were yielded.*only 2.*same source"
    ):
        iter(shorter)


class Unsized:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(count(self.length))


@pytest.mark.parametrize("saved_with_state", [True, False])
def test_a_source_of_another_kind_is_refused(saved_with_state: bool) -> None:
    kinds = [StatefulSource(4), count(4)]
    saving, loading = kinds if saved_with_state else kinds[::-1]
    loader = StreamPrefetchLoader(saving, device="cpu")
    next(iter(loader))
    other = StreamPrefetchLoader(loading, device="cpu")
    with pytest.raises(StateError, match=r"state_dict.*Use the same kind"):
        other.load_state_dict(loader.state_dict())


# The detector detects #


class _ForgetsTheOrder(StreamPrefetchLoader[Any]):
    """Loads a state without what set the order of the samples."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "origin": None, "is_started": False})


class _CountsOneTooMany(StreamPrefetchLoader[Any]):
    """Saves a state that is one batch ahead."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "yielded": min(state["yielded"] + 1, 8)}


@pytest.mark.parametrize("faulty", [_ForgetsTheOrder, _CountsOneTooMany])
def test_meta_a_faulty_state_is_seen(faulty: type[StreamPrefetchLoader[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"resumed in epoch 0 after step"):
        assert_resumes_at_every_step(
            lambda: faulty(shuffled(), noise, device="cpu"), epochs=1
        )


def test_another_transform_is_not_noticed() -> None:
    """As documented: it is not compared. The samples are right all the same."""
    left = StreamPrefetchLoader(count(3), noise, device="cpu", seed=1)
    next(iter(left))
    right = StreamPrefetchLoader(count(3), torch.neg, device="cpu", seed=1)
    right.load_state_dict(left.state_dict())
    assert [int(batch) for batch in right] == [-1, -2]
