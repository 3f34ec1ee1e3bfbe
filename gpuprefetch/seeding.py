"""Where do a transform's random numbers come from?

``batch seed = mix(base seed, epoch if a seed was given, rank, batch index)``. The
transform runs with torch's CPU and device generators and Python's ``random`` set from
the batch seed, and all of them are put back afterwards. So pixels do not depend on how
far ahead the loader works, nor on what the loop draws in between, and the user's
generators never see the augmentation.

[Note: Base seed]
With ``seed=None`` the base seed is the number that torch's CPU generator would have
given right before ``iter(source)``. A DataLoader has drawn its own seed there by then;
to look at the same number *without* drawing again leaves the generator, and a sampler
that draws later, exactly as in the plain loop. A source that draws nothing would give
the same value at every epoch; there the value is drawn for real.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpuprefetch.ranks import Ranks

__all__ = [
    "BatchSeeds",
    "draw_base_seed",
    "generators_seeded",
    "mix",
    "no_other_thread_seeds",
]

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Hash integers into one of 63 bits, so that near inputs give unrelated outputs.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014) over a running sum.
    """
    state = 0
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def draw_base_seed(generator_before: torch.Tensor) -> int:
    """Take the base seed of a pass; see [Note: Base seed].

    Args:
        generator_before: State of torch's CPU generator before ``iter(source)``.
    """
    generator = torch.default_generator
    if not torch.equal(generator.get_state(), generator_before):
        generator = torch.Generator(device="cpu")
        generator.set_state(generator_before)
    return int(
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    )


@dataclass(frozen=True, slots=True)
class BatchSeeds:
    """The seeds of one epoch's batches, on one rank."""

    base: int
    """Seed of the epoch, or of all epochs when ``epoch`` is set."""
    epoch: int | None
    """Epoch number, counted from 0, when the user gave a seed; else ``None``."""
    rank: int
    """This process among those that train together; 0 when there is one."""

    @staticmethod
    def for_epoch(base: int, epoch: int | None) -> "BatchSeeds":
        """Build the seeds for this process's rank."""
        return BatchSeeds(base, epoch, Ranks.current().rank)

    def of_batch(self, batch_index: int) -> int:
        """Give the seed of one batch, in [0, 2**63)."""
        epoch = () if self.epoch is None else (self.epoch,)
        return mix(self.base, *epoch, self.rank, batch_index)


# Held while the global generators are set for a transform. Two threads do that at once
# where one loader is the source of another; either would draw from the other's seed.
# Reentrant, since a transform may iterate a loader of its own.
_seeded_block = threading.RLock()


def _renew_after_fork() -> None:
    """Give a forked child a lock of its own: the parent's may be held for ever."""
    global _seeded_block
    _seeded_block = threading.RLock()


if hasattr(os, "register_at_fork"):  # Not where processes cannot fork.
    os.register_at_fork(after_in_child=_renew_after_fork)


@contextmanager
def no_other_thread_seeds() -> Iterator[None]:
    """Run a block while no other thread is in :func:`generators_seeded`.

    For whoever holds a lock of its own around work that may set the generators: two
    threads that took the two locks in different orders would wait for each other.
    """
    with _seeded_block:
        yield


@contextmanager
def generators_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run a block with torch's and Python's generators set from ``seed``.

    Args:
        seed: In [0, 2**63).
        device: Its generator is set too, when it is an accelerator.
    """
    generators = _generators(device)
    with _seeded_block:
        torch_states = [generator.get_state() for generator in generators]
        python_state = random.getstate()
        try:
            for generator in generators:
                generator.manual_seed(seed)
            random.seed(seed)
            yield
        finally:
            random.setstate(python_state)
            for generator, state in zip(generators, torch_states, strict=True):
                generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Give the global generators of the CPU and of the device."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        # The device's generators exist from its first use on.
        module.init()
        return [torch.default_generator, module.default_generators[device.index or 0]]
    if device.type == "mps":
        return [torch.default_generator, torch.mps._get_default_mps_generator()]
    return [torch.default_generator]
