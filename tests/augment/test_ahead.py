"""Numbers drawn for several batches at once are those that each would get alone."""

from __future__ import annotations

import pytest
import torch
from chains import CHAINS, chain_of, plan_of
from torch import Tensor

from gpuprefetch.augment.ahead import PacksAhead
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.seeding import BatchSeeds

SEEDS = BatchSeeds(base=7, epoch=None, rank=0)
CPU = torch.device("cpu")
SIZE = (90, 120)


def sampler_of(name: str) -> Sampler:
    return Sampler(plan_of(*chain_of(CHAINS[name])))


def drawn_alone(sampler: Sampler, index: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEEDS.of_batch(index))
    return sampler(batch, SIZE, generator)


@pytest.mark.parametrize("name", CHAINS)
def test_every_batch_gets_the_numbers_of_its_own_seed(name: str) -> None:
    sampler = sampler_of(name)
    ahead = PacksAhead(sampler)
    for index in range(40):
        # A smaller batch in between, as at the end of an epoch.
        batch = 3 if index == 35 else 8
        pack = ahead.pack_of(SEEDS, index, batch=batch, size=SIZE, device=CPU)
        assert torch.equal(pack, drawn_alone(sampler, index, batch))
        assert pack.is_contiguous()


def test_batches_may_come_in_any_order_and_from_other_seeds() -> None:
    sampler = sampler_of("imagenet")
    ahead = PacksAhead(sampler)
    for index in (5, 6, 7, 8, 6, 2, 100, 101, 0):
        pack = ahead.pack_of(SEEDS, index, batch=4, size=SIZE, device=CPU)
        assert torch.equal(pack, drawn_alone(sampler, index, 4))
    other = BatchSeeds(base=8, epoch=None, rank=0)
    mine = ahead.pack_of(SEEDS, 1, batch=4, size=SIZE, device=CPU)
    assert not torch.equal(
        ahead.pack_of(other, 1, batch=4, size=SIZE, device=CPU), mine
    )


class CountingSampler(Sampler):
    """Counts the batches that were drawn for."""

    draws = 0
    calls = 0

    def draw_many(self, seeds: list[int], *args: object, **how: object) -> Tensor:  # type: ignore[override]
        self.calls += 1
        self.draws += len(seeds)
        return super().draw_many(seeds, *args, **how)  # type: ignore[arg-type]


def test_blocks_grow_while_shapes_stay_and_start_anew_where_they_change() -> None:
    sampler = CountingSampler(plan_of(*chain_of(CHAINS["seed"])))
    ahead = PacksAhead(sampler)
    for index in range(100):
        ahead.pack_of(SEEDS, index, batch=4, size=SIZE, device=CPU)
    assert sampler.calls <= 5 + 100 // 16
    sampler.calls = sampler.draws = 0
    for index in range(100, 200):
        ahead.pack_of(SEEDS, index, batch=1 + index % 2, size=SIZE, device=CPU)
    assert sampler.calls == sampler.draws == 100
