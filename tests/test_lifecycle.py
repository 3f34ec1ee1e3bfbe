"""Does every way to leave a loop leave nothing behind?

"Nothing" is checked by the autouse fixture after each test here, within two seconds:
no feeder thread, no child process. Every test has a hard limit, since the failure mode
is a hang.
"""

import copy
import gc
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader, SupersededError
from gpuprefetch.meter import Meter
from gpuprefetch.prepare import prepare_as_is
from gpuprefetch.puller import Puller
from tests.leaks import FEEDER_NAME, child_pids, feeder_threads, wait_until_gone
from tests.sources import (
    CountingSource,
    FailsAt,
    Numbers,
    OwnIterator,
    StatefulSource,
    count,
)

pytestmark = pytest.mark.timeout(30)

both_feeders = pytest.mark.parametrize("background", [False, True])


def numbers(batches: Any) -> list[int]:
    return [int(batch) for batch in batches]


def with_workers(length: int = 40, **settings: Any) -> DataLoader:
    return DataLoader(Numbers(length), batch_size=None, num_workers=1, **settings)


# The way in #


def test_nothing_runs_before_the_first_iter() -> None:
    source = CountingSource(count(3))
    loader = StreamPrefetchLoader(source, background=True)
    assert not feeder_threads()
    assert source.opened == source.pulled == 0
    assert numbers(loader) == [0, 1, 2]


def test_nothing_of_the_next_epoch_is_read_before_its_iter() -> None:
    source = CountingSource(count(3))
    loader = StreamPrefetchLoader(source, background=True, depth=4)
    assert numbers(loader) == [0, 1, 2]
    assert source.opened == 1
    assert source.pulled == 3


def test_the_feeder_thread_bears_its_name() -> None:
    iterator = iter(StreamPrefetchLoader(count(9), background=True))
    next(iterator)
    assert [t.name for t in feeder_threads()] == [FEEDER_NAME]
    iterator.close()
    assert not feeder_threads()


@pytest.mark.parametrize(
    ("num_workers", "background", "threads"),
    [(0, None, 0), (1, None, 1), (0, True, 1), (1, False, 0)],
)
def test_a_thread_runs_when_asked_for_or_when_there_are_workers(
    num_workers: int, background: bool | None, threads: int
) -> None:
    source = DataLoader(Numbers(9), num_workers=num_workers)
    iterator = iter(StreamPrefetchLoader(source, background=background))
    next(iterator)
    assert len(feeder_threads()) == threads


# Early break #


@pytest.mark.timeout(120)
def test_a_hundred_early_breaks_with_persistent_workers() -> None:
    loader = StreamPrefetchLoader(with_workers(persistent_workers=True))
    workers = set()
    for i in range(100):
        for x in itertools.islice(loader, i % 3 + 1):
            last = int(x)
        assert last == i % 3
        assert not feeder_threads()
        workers |= child_pids()
    assert len(workers) == 1
    assert numbers(loader) == list(range(40))


@pytest.mark.timeout(120)
@both_feeders
def test_early_breaks_with_fresh_workers_leave_none(background: bool) -> None:
    loader = StreamPrefetchLoader(with_workers(), background=background)
    for _ in range(10):
        for x in loader:
            assert int(x) == 0
            break
        assert not wait_until_gone(2)


def test_breaking_off_closes_the_source_iterator() -> None:
    source = CountingSource(count(100))
    for _ in StreamPrefetchLoader(source, background=True):
        break
    assert not wait_until_gone(2)
    assert source.closed == 1
    assert source.pulled <= 1 + 2


def test_del_of_the_iterator_ends_thread_and_workers() -> None:
    iterator = iter(StreamPrefetchLoader(with_workers(), background=True))
    next(iterator)
    assert feeder_threads()
    assert child_pids()
    del iterator
    assert not wait_until_gone(2)


def test_del_of_the_loader_does_not_end_its_pass() -> None:
    loader = StreamPrefetchLoader(count(9), background=True)
    iterator = iter(loader)
    next(iterator)
    del loader
    gc.collect()
    assert numbers(iterator) == list(range(1, 9))


def test_an_iterator_caught_in_a_cycle_is_collected() -> None:
    cycle: dict[str, Any] = {"self": None}
    cycle["self"] = cycle
    cycle["iterator"] = iter(StreamPrefetchLoader(count(9), background=True))
    next(cycle["iterator"])
    del cycle
    gc.collect()
    assert not wait_until_gone(2)


# Errors #


class _Boom(Exception):
    pass


def bad_collate(items: list[torch.Tensor]) -> torch.Tensor:
    if int(items[0]) == 3:
        raise _Boom("cannot collate 3")
    return items[0]


def bad_transform(x: torch.Tensor) -> torch.Tensor:
    if int(x) == 3:
        raise _Boom("cannot augment 3")
    return x


@both_feeders
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("place", ["dataset", "collate", "transform"])
def test_an_error_surfaces_at_its_batch_and_ends_everything(
    place: str, num_workers: int, background: bool
) -> None:
    dataset = FailsAt(9, bad=3 if place == "dataset" else -1)
    source = DataLoader(
        dataset,
        batch_size=None if place == "dataset" else 1,
        num_workers=num_workers,
        collate_fn=bad_collate if place == "collate" else None,
    )
    loader = StreamPrefetchLoader(
        source, bad_transform if place == "transform" else None, background=background
    )
    iterator = iter(loader)
    assert numbers(itertools.islice(iterator, 3)) == [0, 1, 2]
    with pytest.raises((ValueError, _Boom), match=r"bad file 3|cannot .* 3"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert not wait_until_gone(2)


@both_feeders
def test_an_error_in_the_loop_body_ends_everything(background: bool) -> None:
    loader = StreamPrefetchLoader(with_workers(), background=background)

    def train() -> None:
        for _ in loader:
            raise _Boom("nan loss")

    with pytest.raises(_Boom):
        train()
    assert not wait_until_gone(2)
    assert numbers(loader) == list(range(40))


def test_persistent_workers_serve_the_epoch_after_an_error() -> None:
    source = DataLoader(
        FailsAt(9, bad=3), batch_size=None, num_workers=1, persistent_workers=True
    )
    loader = StreamPrefetchLoader(source)
    for _ in range(2):
        iterator = iter(loader)
        assert numbers(itertools.islice(iterator, 3)) == [0, 1, 2]
        with pytest.raises(ValueError, match="bad file 3"):
            next(iterator)


@both_feeders
def test_the_loop_may_run_in_any_thread(background: bool) -> None:
    loader = StreamPrefetchLoader(with_workers(5), background=background)
    epochs: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: epochs.extend(numbers(loader) for _ in range(2))
    )
    thread.start()
    thread.join(20)
    assert epochs == [[0, 1, 2, 3, 4]] * 2
    iterator = iter(loader)
    assert int(next(iterator)) == 0
    thread = threading.Thread(target=lambda: epochs.append(numbers(iterator)))
    thread.start()
    thread.join(20)
    assert epochs[-1] == [1, 2, 3, 4]


@both_feeders
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exit_raised_by_the_source_surfaces(
    kind: type[BaseException], background: bool
) -> None:
    """None of these is an Exception; no thread may end silently on one."""

    class Exits:
        def __iter__(self) -> "Exits":
            self.left = 1
            return self

        def __next__(self) -> torch.Tensor:
            if self.left == 0:
                raise kind("from the source")
            self.left -= 1
            return torch.tensor(0)

    iterator = iter(StreamPrefetchLoader(Exits(), background=background))
    assert int(next(iterator)) == 0
    with pytest.raises(kind):
        next(iterator)


class StateFails(StatefulSource):
    """Cannot say where it stands at the end."""

    def state_dict(self) -> dict[str, int]:
        if self.place == 0:
            raise _Boom("no state at the end")
        return super().state_dict()


@both_feeders
def test_an_error_in_the_source_state_surfaces(background: bool) -> None:
    iterator = iter(StreamPrefetchLoader(StateFails(3), background=background))
    with pytest.raises(_Boom, match="no state at the end"):
        list(iterator)


@both_feeders
def test_an_error_in_iter_of_the_source_surfaces(background: bool) -> None:
    class CannotOpen:
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise _Boom("no such file")

    loader = StreamPrefetchLoader(CannotOpen(), background=background)
    for _ in range(2):
        with pytest.raises(_Boom, match="no such file"):
            iter(loader)


# Several passes #


@both_feeders
def test_nested_loops_over_one_loader_are_independent(background: bool) -> None:
    loader = StreamPrefetchLoader(count(4), background=background)
    pairs = [(int(a), int(b)) for a in loader for b in loader]
    assert pairs == list(itertools.product(range(4), repeat=2))


@pytest.mark.timeout(60)
def test_nested_loops_over_a_loader_with_workers() -> None:
    loader = StreamPrefetchLoader(with_workers(3))
    pairs = [(int(a), int(b)) for a in loader for b in loader]
    assert pairs == list(itertools.product(range(3), repeat=2))


@both_feeders
def test_two_passes_alive_do_not_disturb_each_other(background: bool) -> None:
    loader = StreamPrefetchLoader(count(6), background=background, depth=3)
    first, second = iter(loader), iter(loader)
    assert [int(next(first)), int(next(first)), int(next(second))] == [0, 1, 0]
    assert numbers(second) == [1, 2, 3, 4, 5]
    assert numbers(first) == [2, 3, 4, 5]


@both_feeders
@pytest.mark.parametrize(
    "make",
    [
        lambda: with_workers(persistent_workers=True),
        lambda: OwnIterator(40),
        lambda: StatefulSource(40),
        lambda: iter(count(40)),
    ],
    ids=["persistent-workers", "own-iterator", "stateful", "one-shot"],
)
def test_a_pass_that_lost_its_source_says_so(
    make: Callable[[], Any], background: bool
) -> None:
    loader = StreamPrefetchLoader(make(), background=background)
    first = iter(loader)
    assert int(next(first)) == 0
    second = iter(loader)
    for _ in range(2):
        with pytest.raises(SupersededError, match="newer pass"):
            next(first)
    # The newer one goes on undisturbed and in order.
    rest = numbers(second)
    assert rest == list(range(rest[0], 40))
    assert rest[0] <= 1 + 2


@pytest.mark.filterwarnings("ignore:the source is a .* used up:UserWarning")
@both_feeders
def test_a_one_shot_iterator_gives_one_epoch(background: bool) -> None:
    loader = StreamPrefetchLoader(iter(count(5)), background=background)
    assert numbers(loader) == [0, 1, 2, 3, 4]
    assert numbers(loader) == []


# close() #


@both_feeders
def test_close_is_idempotent_and_the_loader_can_go_on(background: bool) -> None:
    loader = StreamPrefetchLoader(with_workers(5), background=background)
    loader.close()
    iterator = iter(loader)
    assert int(next(iterator)) == 0
    loader.close()
    loader.close()
    assert not wait_until_gone(2)
    with pytest.raises(StopIteration):
        next(iterator)
    assert numbers(loader) == [0, 1, 2, 3, 4]


def test_close_ends_every_living_pass() -> None:
    loader = StreamPrefetchLoader(count(9), background=True)
    passes = [iter(loader) for _ in range(3)]
    for one in passes:
        next(one)
    loader.close()
    assert not feeder_threads()
    assert [list(one) for one in passes] == [[], [], []]


def test_closing_a_pass_ends_it_for_good() -> None:
    iterator = iter(StreamPrefetchLoader(count(9), background=True))
    next(iterator)
    iterator.close()
    iterator.close()
    assert not feeder_threads()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("background", [False, True])
def test_close_in_a_running_loop_ends_it_and_keeps_its_place(background: bool) -> None:
    def make() -> StreamPrefetchLoader[torch.Tensor]:
        return StreamPrefetchLoader(count(6), device="cpu", background=background)

    loader, seen = make(), []
    for batch in loader:
        seen.append(int(batch))
        if len(seen) == 2:
            loader.close()
    assert seen == [0, 1]
    state = loader.state_dict()
    assert (state["epoch"], state["yielded"]) == (0, 2)
    again = make()
    again.load_state_dict(state)
    assert [int(batch) for batch in again] == [2, 3, 4, 5]
    assert [int(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]
    assert loader.state_dict()["epoch"] == 2


def test_a_transform_that_closes_its_loader_ends_the_loop(
    other_device: torch.device,
) -> None:
    def close_at_three(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        if len(seen) == 3:
            loader.close()
        return batch

    seen: list[torch.Tensor] = []
    loader = StreamPrefetchLoader(count(9), close_at_three, device=other_device)
    yielded = len(list(loader))
    assert yielded in (1, 2)
    assert loader.state_dict()["yielded"] == yielded
    assert len(list(loader)) == 9


def test_leaving_the_context_closes(device: torch.device) -> None:
    with StreamPrefetchLoader(count(9), device=device, background=True) as loader:
        assert isinstance(loader, StreamPrefetchLoader)
        iterator = iter(loader)
        next(iterator)
        assert feeder_threads()
    assert not feeder_threads()
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_passes_through_the_context() -> None:
    def train() -> None:
        with StreamPrefetchLoader(count(9), background=True) as loader:
            next(iter(loader))
            raise _Boom

    with pytest.raises(_Boom):
        train()
    assert not wait_until_gone(2)


def test_close_while_the_source_is_busy_returns_and_the_thread_ends() -> None:
    """The thread is inside the source's code and can be ended only after it."""
    go_on = threading.Event()

    def source() -> Iterator[torch.Tensor]:
        yield torch.tensor(0)
        go_on.wait(20)
        yield torch.tensor(1)

    loader = StreamPrefetchLoader(source(), background=True)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(StopIteration):
        next(iterator)
    go_on.set()
    assert not wait_until_gone(2)


# Copies #


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_copy_starts_anew_and_the_original_goes_on(
    copied: Callable[[Any], Any], when: str
) -> None:
    source = DataLoader(Numbers(6), batch_size=2)
    loader = StreamPrefetchLoader(source, background=True, depth=3, seed=5)
    iterator = iter(loader)
    if when != "before":
        next(iterator)
    if when == "after":
        assert len(list(iterator)) == 2
    twin = copied(loader)
    assert type(twin) is StreamPrefetchLoader
    assert [x.tolist() for x in twin] == [[0, 1], [2, 3], [4, 5]]
    if when == "during":
        assert [x.tolist() for x in iterator] == [[2, 3], [4, 5]]
    assert twin.dataset is not loader.dataset


def test_a_shallow_copy_has_its_own_passes() -> None:
    loader = StreamPrefetchLoader(count(4), background=True)
    iterator = iter(loader)
    next(iterator)
    twin = copy.copy(loader)
    assert numbers(twin) == [0, 1, 2, 3]
    twin.close()
    assert numbers(iterator) == [1, 2, 3]


# Workers that are gone #


class HasCounter:
    """An iterator of the user's, which happens to have an attribute of that name."""

    def __init__(self) -> None:
        self._workers = 4

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 1


def test_only_the_workers_of_a_dataloader_are_told_to_be_gone() -> None:
    def puller_of(iterator: Iterator[Any]) -> Puller:
        return Puller(
            iterator,
            pulled=[],
            prepare=prepare_as_is,
            read_state=None,
            ends_workers=False,
            meter=Meter(),
        )

    assert not puller_of(HasCounter()).has_lost_workers
    assert not puller_of(iter([1])).has_lost_workers
    iterator: Any = iter(DataLoader(Numbers(8), num_workers=2))
    puller = puller_of(iterator)
    assert not puller.has_lost_workers
    first, second = iterator._workers
    first.kill()
    first.join()
    assert not puller.has_lost_workers, "the other one may still give batches"
    second.kill()
    second.join()
    assert puller.has_lost_workers
