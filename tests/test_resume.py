"""Does a loader in a fresh process go on exactly, whatever the source?

The public checker saves at every step and resumes each state; here it runs over the
sources that decide their order in different ways. ``test_state`` holds the settings of
the loader itself, and what is refused.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from gpuprefetch import (
    SettingError,
    SettingTypeError,
    StateError,
    StreamPrefetchLoader,
    generators,
)
from gpuprefetch.testing import assert_resumes_at_every_step
from tests.children import run_script
from tests.pipelines import (
    BATCH,
    SAMPLES,
    CountsLoads,
    DrawsItself,
    HoldsGenerators,
    StatefulStream,
    Stream,
    from_numpy,
    make,
    make_prefetching,
    noise,
    set_epoch,
)

pytestmark = [
    pytest.mark.timeout(150),
    # torchdata 0.11 calls a function that torch has deprecated since.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

IN_A_FRESH_PROCESS: dict[str, dict[str, Any]] = {
    "shuffled, threaded": {"depth": 4, "background": True, "kornia": True},
    "workers that draw": {"dataset": DrawsItself, "num_workers": 2},
    "persistent workers": {
        "num_workers": 2,
        "persistent_workers": True,
        "own_generator": True,
        "epochs": 3,
    },
    "a data set with generators": {"dataset": HoldsGenerators, "own_generator": True},
    "ranks": {"sampler": "distributed", "before_epoch": set_epoch, "num_workers": 1},
    "torchdata": {"stateful": True, "num_workers": 2, "kornia": True, "depth": 3},
}

QUICKLY: dict[str, dict[str, Any]] = IN_A_FRESH_PROCESS | {
    "two workers": {"num_workers": 2, "depth": 4, "seed": 3},
    "persistent workers, shared generator": {
        "num_workers": 1,
        "persistent_workers": True,
        "epochs": 3,
    },
    "workers and a generator": {"own_generator": True, "num_workers": 1},
    "indices only": {"num_workers": 1, "replay": False, "seed": 3},
    "a sampler with a generator": {"sampler": "subset"},
    "the same with workers": {"sampler": "subset", "num_workers": 1},
    "a sampler that draws at once": {"sampler": "eager"},
    "the same, loaded again": {"sampler": "eager", "num_workers": 1},
    "a sampler that draws late": {"sampler": "lazy", "own_generator": True},
    "a loader of the user's": {"subclass": True},
    "the same with workers, threaded": {"subclass": True, "num_workers": 1},
    "ranks without set_epoch": {"sampler": "distributed"},
    "a stream read again": {"dataset": Stream, "replay": True, "seed": 3},
    "torchdata inline": {"stateful": True, "seed": 3},
    "torchdata over a stateful stream": {"stateful": True, "dataset": StatefulStream},
    "torchdata, stream and workers": {
        "stateful": True,
        "dataset": StatefulStream,
        "num_workers": 2,
        "depth": 4,
    },
    "torchdata, persistent workers": {
        "stateful": True,
        "num_workers": 1,
        "persistent_workers": True,
    },
}


def check(
    *, epochs: int = 2, before_epoch: Any = None, fresh: bool = False, **pipeline: Any
) -> None:
    assert_resumes_at_every_step(
        partial(make, **pipeline),
        epochs=epochs,
        before_epoch=before_epoch,
        fresh_process=fresh,
    )


@pytest.mark.parametrize("name", IN_A_FRESH_PROCESS)
def test_it_goes_on_in_a_fresh_process(name: str) -> None:
    check(**IN_A_FRESH_PROCESS[name], fresh=True)


@pytest.mark.parametrize("name", QUICKLY)
def test_it_goes_on(name: str) -> None:
    check(**QUICKLY[name])


# What is not done again #


def interrupted(yielded: int = 2, **pipeline: Any) -> Any:
    """Give the state after some batches of a pipeline."""
    loader = make(**pipeline)
    iterator = iter(loader)
    for _ in range(yielded):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    return state


def resumed(state: Any, **pipeline: Any) -> StreamPrefetchLoader[Any]:
    loader = make(**pipeline)
    loader.load_state_dict(state)
    return loader


def loads(batches: list[Any]) -> int:
    """How many samples a :class:`CountsLoads` had loaded for these batches."""
    return int(batches[-1][1].max())


COUNTED: dict[str, Any] = {"dataset": CountsLoads, "seed": 1}


def test_inline_only_what_follows_is_loaded_and_augmented() -> None:
    calls = []
    state = interrupted(**COUNTED)
    loader = resumed(state, **COUNTED, transform=lambda x: calls.append(1) or x)
    assert loads(list(loader)) == SAMPLES - 2 * BATCH
    assert len(calls) == 2


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize(("replay", "dropped"), [(False, 0), (None, 2), (True, 2)])
def test_workers_load_again_what_was_yielded_unless_told_not_to(
    replay: bool | None, dropped: int, persistent_workers: bool
) -> None:
    """Whether the data set draws is not known; in workers nothing else is exact."""
    pipeline = COUNTED | {"num_workers": 1, "persistent_workers": persistent_workers}
    loader = resumed(interrupted(**pipeline), **pipeline, replay=replay)
    rest = list(loader)
    assert len(rest) == 2
    assert loads(rest) == SAMPLES - (2 - dropped) * BATCH
    loader.source._iterator = None


def test_a_data_set_with_a_generator_is_loaded_again() -> None:
    class Counted(HoldsGenerators, CountsLoads):
        pass

    pipeline: dict[str, Any] = {"dataset": Counted}
    assert loads(list(resumed(interrupted(**pipeline), **pipeline))) == SAMPLES


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_users_loader_is_as_before(num_workers: int) -> None:
    """Only the start of one pass skips; the sampler is the user's at every moment."""
    pipeline: dict[str, Any] = {"num_workers": num_workers, "replay": False}
    loader = make(**pipeline)
    source = loader.source
    settings = dict(vars(source))
    loader.load_state_dict(interrupted(**pipeline))
    for _ in loader:
        assert vars(source) == settings
    assert [len(list(source)), len(list(loader)), len(list(loader))] == [4, 4, 4]


def test_generators_are_not_read_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a state costs is paid once a pass."""
    reads = []
    read = generators._read
    monkeypatch.setattr(generators, "_read", lambda g: reads.append(g) or read(g))
    counts = []
    for length in (3, 30):
        loader = StreamPrefetchLoader([torch.zeros(2)] * length, device="cpu")
        for _ in loader:
            loader.state_dict()
        counts.append(len(reads))
        reads.clear()
    assert counts[0] == counts[1] == 3


@pytest.mark.parametrize(
    ("num_workers", "persistent_workers"), [(0, False), (1, False), (1, True)]
)
def test_one_and_the_same_loader_can_be_wound_back(
    num_workers: int, persistent_workers: bool
) -> None:
    """Twice, and into the epoch after: with workers that are running, too."""
    loader = make(
        DrawsItself if num_workers else HoldsGenerators,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        own_generator=True,
        seed=2,
    )
    states, batches = [], []
    for _ in range(2):
        for x, _label in loader:
            batches.append(x)
            states.append(loader.state_dict())
    for _ in range(2):
        loader.load_state_dict(states[1])
        again = [x for _ in range(2) for x, _label in loader]
        assert len(again) == 6
        assert all(map(torch.equal, batches[2:], again))
    loader.source._iterator = None


@pytest.mark.parametrize("replay", [False, True])
def test_resuming_leaves_all_global_generators_alone(replay: bool) -> None:
    pipeline: dict[str, Any] = {"dataset": DrawsItself, "replay": replay}
    loader = resumed(interrupted(**pipeline), **pipeline)
    before = generators.read_states(generators.global_generators())
    iterator = iter(loader)
    assert generators.read_states(generators.global_generators()) == before
    assert len(list(iterator)) == 2


def test_inline_draws_go_on_where_the_user_restores_the_generators() -> None:
    pipeline: dict[str, Any] = {"dataset": DrawsItself, "seed": 1}
    loader, everything = make(**pipeline), generators.global_generators()
    batches = []
    for step, (x, _label) in enumerate(loader):
        if step == 1:
            state, world = loader.state_dict(), generators.read_states(everything)
        torch.rand(3)
        batches.append(x)
    again = resumed(state, **pipeline)
    generators.write_states(everything, world)
    torch.rand(3)
    for step, (x, _label) in enumerate(again, start=2):
        torch.rand(3)
        assert torch.equal(x, batches[step])
    assert step == 3


# set_epoch #


def test_a_state_brings_the_epoch_of_the_sampler_along() -> None:
    loader = make(sampler="distributed")
    loader.sampler.set_epoch(4)
    expected = [batch[1].tolist() for batch in loader]
    iterator = iter(loader)
    next(iterator)
    other = resumed(loader.state_dict(), sampler="distributed")
    assert other.sampler.epoch == 4
    assert [batch[1].tolist() for batch in other] == expected[1:]


def test_in_mid_epoch_another_number_does_not_change_the_order() -> None:
    """Frameworks call set_epoch() with a number that starts at 0 after a restart."""
    loader = make(sampler="distributed")
    loader.sampler.set_epoch(4)
    expected = [batch[1].tolist() for batch in loader]
    iterator = iter(loader)
    next(iterator)
    other = resumed(loader.state_dict(), sampler="distributed")
    other.sampler.set_epoch(0)
    with pytest.warns(UserWarning, match=r"source\.sampler was given another epoch.*4"):
        rest = [batch[1].tolist() for batch in other]
    assert rest == expected[1:]
    other.sampler.set_epoch(5)
    loader.sampler.set_epoch(5)
    assert [b[1].tolist() for b in other] == [b[1].tolist() for b in loader]


# What is refused #


@pytest.mark.parametrize(
    ("saving", "loading", "reason"),
    [
        ({}, {"dataset": Stream}, "kind 'DataLoader', and this one is of the kind"),
        ({}, {"sampler": "subset"}, "number of batches: 4, and this one has 3"),
        (
            {},
            {"sampler": "eager"},
            "class RandomSampler, and this one has Eager",
        ),
        ({"own_generator": True}, {}, "random generator source.generator"),
        ({}, {"own_generator": True}, "saved had none there: its order was another"),
        ({}, {"stateful": True}, "without a state_dict"),
        ({"stateful": True}, {}, "with a state_dict"),
        ({"seed": 1}, {"seed": 2}, "seed=1, and this loader has seed=2"),
    ],
)
def test_a_state_of_another_source_is_refused(
    saving: dict[str, Any], loading: dict[str, Any], reason: str
) -> None:
    state = interrupted(**saving)
    loader = make(**loading)
    with pytest.raises(StateError, match=reason):
        loader.load_state_dict(state)
    assert len(list(loader)) > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": 12}, "a data set of length 12, and this one has 11"),
        ({"batch_size": 4}, "batch_size 4, and this one has 3"),
        ({"world_size": 4}, "by one of 4 processes, and there are 1 now"),
        ({"rank": 1}, "by rank 1, and this is rank 0"),
    ],
)
def test_each_mark_is_compared(change: dict[str, Any], reason: str) -> None:
    state = interrupted()
    state["source"] |= change
    with pytest.raises(StateError, match=reason):
        make().load_state_dict(state)


def test_a_stream_without_a_state_is_refused_and_says_what_is_missing() -> None:
    state = interrupted(dataset=Stream)
    with pytest.raises(
        StateError, match=r"Stream, an IterableDataset.*state_dict\(\).*replay=True"
    ):
        make(Stream).load_state_dict(state)


def test_batches_in_any_order_are_refused() -> None:
    def loader() -> StreamPrefetchLoader[Any]:
        source = DataLoader(range(8), num_workers=1, in_order=False)
        return StreamPrefetchLoader(source, device="cpu")

    saving = loader()
    next(iter(saving))
    with pytest.raises(StateError, match=r"in_order=False.*Use in_order=True"):
        loader().load_state_dict(saving.state_dict())


def test_a_state_of_version_1_goes_on() -> None:
    """It held torch's generator as a tensor, and nothing about the source."""
    torch.manual_seed(5)
    state = {
        "version": 1,
        "epoch": 0,
        "yielded": 2,
        "base_seed": None,
        "source_state": None,
        "generator_state": torch.get_rng_state(),
        "seed": 3,
    }
    expected = list(make(seed=3))
    random.seed(1)
    torch.manual_seed(6)
    rest = list(resumed(state, seed=3))
    assert len(rest) == 2
    for (x, y), (x_again, y_again) in zip(expected[2:], rest, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)


# Ranks #


@pytest.fixture
def as_rank() -> Iterator[Callable[..., None]]:
    """Pretend to be one rank; no other process takes part."""

    def become(rank: int, world_size: int = 2) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=world_size
        )

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def ranked(seed: int | None, sampler: bool = True) -> StreamPrefetchLoader[Any]:
    data = CountsLoads(SAMPLES, (1, 6, 6))
    how: dict[str, Any] = {"shuffle": True}
    if sampler:
        how = {"sampler": DistributedSampler(data)}
    return StreamPrefetchLoader(
        DataLoader(data, BATCH, **how), noise, device="cpu", seed=seed
    )


def test_another_world_size_is_refused(as_rank: Callable[..., None]) -> None:
    as_rank(0, world_size=4)
    state = ranked(1).state_dict()
    as_rank(0, world_size=2)
    with pytest.raises(StateError, match="one of 4 processes, and there are 2"):
        ranked(1).load_state_dict(state)


def test_one_state_serves_all_ranks_of_a_seeded_loader(
    as_rank: Callable[..., None],
) -> None:
    """Some frameworks keep the state of rank 0 alone."""
    as_rank(1)
    expected = list(ranked(1))
    as_rank(0)
    saving = ranked(1)
    next(iter(saving))
    state = saving.state_dict()
    as_rank(1)
    loader = ranked(1)
    loader.load_state_dict(state)
    for (x, _), (x_again, _) in zip(expected[1:], loader, strict=True):
        assert torch.equal(x, x_again)


@pytest.mark.parametrize(("seed", "sampler"), [(None, True), (1, False)])
def test_elsewhere_the_state_of_another_rank_is_refused(
    as_rank: Callable[..., None], seed: int | None, sampler: bool
) -> None:
    as_rank(0)
    state = ranked(seed, sampler).state_dict()
    as_rank(1)
    with pytest.raises(StateError, match="by rank 0, and this is rank 1"):
        ranked(seed, sampler).load_state_dict(state)


# The checker checks #


@pytest.mark.parametrize(
    "faulty",
    [
        make_prefetching,
        partial(make, DrawsItself, num_workers=1, replay=False),
        partial(make, transform=from_numpy),
    ],
    ids=["counts prefetched", "draws in workers that skip", "draws from NumPy"],
)
def test_meta_a_fault_is_seen(faulty: Any) -> None:
    with pytest.raises(AssertionError, match="resumed in epoch 0 after step"):
        assert_resumes_at_every_step(faulty, fresh_process=False)


def test_meta_a_fresh_process_shows_what_this_one_hides() -> None:
    faulty = partial(make, sampler="hash")
    assert_resumes_at_every_step(faulty, epochs=1, fresh_process=False)
    with pytest.raises(AssertionError, match="batch 0 of epoch 0 differs"):
        assert_resumes_at_every_step(faulty, epochs=1)


def test_meta_a_refused_state_is_a_failure() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)it failed.*StateError.*IterableDataset"
    ):
        assert_resumes_at_every_step(partial(make, Stream), fresh_process=False)


def test_meta_a_loader_without_batches_proves_nothing() -> None:
    def empty() -> StreamPrefetchLoader[Any]:
        return StreamPrefetchLoader([], device="cpu")

    with pytest.raises(AssertionError, match="yields no batch"):
        assert_resumes_at_every_step(empty, fresh_process=False)


def test_meta_a_fault_is_seen_where_python_leaves_assert_statements_out() -> None:
    printed = run_script(
        """
        from gpuprefetch.testing import assert_resumes_at_every_step
        from tests.pipelines import make_prefetching

        try:
            assert_resumes_at_every_step(make_prefetching, fresh_process=False)
        except AssertionError as error:
            print(error)
    """,
        options=["-O"],
    )
    assert "resumed in epoch 0 after step" in printed


def test_at_least_one_epoch_is_checked() -> None:
    with pytest.raises(SettingError, match="epochs must be at least 1, got 0"):
        assert_resumes_at_every_step(make, epochs=0)


def test_what_cannot_travel_to_a_fresh_process_is_named() -> None:
    with pytest.raises(SettingTypeError, match="functions at module level"):
        assert_resumes_at_every_step(lambda: make(), epochs=1)


def test_the_checker_leaves_the_global_generators_alone() -> None:
    before = generators.read_states(generators.global_generators())
    assert_resumes_at_every_step(make, epochs=1, fresh_process=False)
    assert generators.read_states(generators.global_generators()) == before
