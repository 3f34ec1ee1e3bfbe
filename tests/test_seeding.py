"""Where do the pixels come from, and whose random numbers do they leave alone?

``test_randomness`` compares pixels and generators over all ways to run a loader; here
are the seeds themselves, the order of the samples, and the ranks.
"""

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, RandomSampler

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.seeding import BatchSeeds, mix
from tests.randomness import all_states
from tests.sources import Numbers, count

pytestmark = pytest.mark.timeout(60)

both_feeders = pytest.mark.parametrize("background", [False, True])


def noise(x: torch.Tensor) -> torch.Tensor:
    """Draw from all generators that a transform may use."""
    host = torch.rand(3) + random.random()
    device = torch.rand(3, device=x.device)
    return torch.stack([host.to(x.device), device, x.expand(3).float()])


def draws(
    *,
    device: torch.device,
    transform: Callable[..., Any] = noise,
    source: Any = None,
    seed: int | None = None,
    torch_seed: int | None = 0,
    between: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> list[torch.Tensor]:
    """Run one epoch and collect what came, with something drawn in each loop body."""
    if torch_seed is not None:
        torch.manual_seed(torch_seed)
    source = count(6) if source is None else source
    loader = StreamPrefetchLoader(
        source, transform, device=device, seed=seed, **settings
    )
    out = []
    for batch in loader:
        between()
        out.append(batch.cpu())
    return out


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    assert len(left) == len(right) > 0
    return all(map(torch.equal, left, right))


def draw_everywhere() -> None:
    torch.rand(7)
    random.random()
    np.random.rand()


# Same base, same pixels #


def test_batches_of_an_epoch_differ(device: torch.device) -> None:
    first, *others = draws(device=device, source=[torch.tensor(1.0)] * 5)
    assert not any(torch.equal(first, other) for other in others)


def test_the_number_of_loader_workers_does_not_matter(device: torch.device) -> None:
    epochs = [
        draws(
            device=device,
            source=DataLoader(Numbers(6), batch_size=None, num_workers=workers),
        )
        for workers in (0, 1, 2)
    ]
    assert equal(epochs[0], epochs[1])
    assert equal(epochs[0], epochs[2])


def test_manual_seed_before_an_epoch_repeats_its_pixels(device: torch.device) -> None:
    loader = StreamPrefetchLoader(count(4), noise, device=device)
    epochs = []
    for torch_seed in (5, 6, 5):
        torch.manual_seed(torch_seed)
        epochs.append([x.cpu() for x in loader])
    assert equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0][0], epochs[1][0])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("listed", [True, False])
def test_epochs_differ_without_a_seed(listed: bool, num_workers: int) -> None:
    source = (
        count(4)
        if listed
        else DataLoader(Numbers(4), batch_size=None, num_workers=num_workers)
    )
    loader = StreamPrefetchLoader(source, noise, device="cpu")
    firsts = [next(iter(loader)) for _ in range(4)]
    for left, right in itertools.combinations(firsts, 2):
        assert not torch.equal(left, right)


# seed=n #


def test_with_a_seed_epochs_differ_and_a_fresh_loader_repeats_them(
    device: torch.device,
) -> None:
    def epochs(seed: int) -> list[list[torch.Tensor]]:
        loader = StreamPrefetchLoader(count(4), noise, device=device, seed=seed)
        return [[x.cpu() for x in loader] for _ in range(3)]

    first, again, other = epochs(7), epochs(7), epochs(8)
    for left, right in zip(first, again, strict=True):
        assert equal(left, right)
    everything = [x for run in (*first, *other) for x in run]
    for left, right in itertools.combinations(everything, 2):
        assert not torch.equal(left[:2], right[:2])


@both_feeders
def test_with_a_seed_nothing_is_drawn_from_the_users_generators(
    device: torch.device, background: bool
) -> None:
    before = all_states(device)
    list(
        StreamPrefetchLoader(
            count(4), noise, device=device, seed=7, background=background
        )
    )
    assert before == all_states(device)


# The user's generators #


def test_generators_are_restored_after_a_failing_transform(
    device: torch.device,
) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        noise(x)
        raise ValueError("no")

    before = all_states(device)
    with pytest.raises(ValueError, match=r"(?m)^no$"):
        list(StreamPrefetchLoader(count(1), fails, device=device, seed=1))
    assert before == all_states(device)


# The order of the samples #


@both_feeders
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("transform", [None, noise])
def test_sample_order_is_that_of_the_bare_loader(
    transform: Any, own_generator: bool, num_workers: int, background: bool
) -> None:
    def orders(wrap: Callable[[DataLoader], Any]) -> list[list[int]]:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(3) if own_generator else None
        source = DataLoader(
            Numbers(20),
            batch_size=None,
            shuffle=True,
            num_workers=num_workers,
            generator=generator,
        )
        loop = wrap(source)
        return [[int(x.flatten()[-1]) for x in loop] for _ in range(2)]

    wrapped = orders(
        lambda source: StreamPrefetchLoader(
            source, transform, device="cpu", background=background
        )
    )
    plain = orders(lambda source: source)
    if not own_generator or transform is None:
        assert wrapped == plain
    else:
        # The source has its own generator, so the base seed is drawn from torch's.
        assert wrapped == plain
    assert plain[0] != plain[1]


class TellsItsThread(RandomSampler):
    """Notes in which thread it draws its order."""

    def __iter__(self) -> Iterator[int]:
        self.thread = threading.current_thread()
        yield from super().__iter__()


def test_a_sampler_draws_in_the_loops_thread() -> None:
    """In the feeder's, it would draw while others use torch's generator."""
    sampler = TellsItsThread(Numbers(6))
    source = DataLoader(Numbers(6), batch_size=None, sampler=sampler)
    loader = StreamPrefetchLoader(source, device="cpu", background=True)
    assert len(list(loader)) == 6
    assert sampler.thread is threading.current_thread()


# Ranks #


@pytest.fixture
def as_rank() -> Iterator[Callable[[int], None]]:
    """Pretend to be one rank of four; no other process takes part."""

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("seed", [None, 5])
def test_ranks_draw_differently_and_repeatably(
    as_rank: Callable[[int], None], seed: int | None
) -> None:
    cpu = torch.device("cpu")
    alone = draws(device=cpu, seed=seed)
    runs = []
    for rank in (0, 1, 2, 1):
        as_rank(rank)
        runs.append(draws(device=cpu, seed=seed))
    assert equal(runs[0], alone)
    assert equal(runs[1], runs[3])
    for left, right in itertools.combinations(runs[:3], 2):
        assert not any(map(torch.equal, left, right))


# The hash #


def test_seeds_of_near_batches_ranks_and_epochs_do_not_collide() -> None:
    seeds = {
        BatchSeeds(base, epoch, rank).of_batch(batch)
        for base in (0, 1, 2)
        for epoch in (None, 0, 1, 2, 3)
        for rank in range(8)
        for batch in range(50)
    }
    assert len(seeds) == 3 * 5 * 8 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("values", [(0,), (-1,), (2**64,), (2**200, 3)])
def test_any_integer_can_be_mixed(values: tuple[int, ...]) -> None:
    assert 0 <= mix(*values) < 2**63
    assert mix(*values) == mix(*values)
    assert mix(*values) != mix(*values, 0)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_any_integer_type_seeds_as_its_int_does(kind: type[Any]) -> None:
    def make(number: Callable[[int], Any]) -> StreamPrefetchLoader[Any]:
        settings = {"seed": number(3), "depth": number(2)}
        return StreamPrefetchLoader(count(3), noise, device="cpu", **settings)

    plain, other = make(int), make(kind)
    assert equal(list(plain), list(other))
    assert json.dumps(plain.state_dict()) == json.dumps(other.state_dict())
