"""Which of the processes that train together is this one?

Asked when a pass starts and never kept longer: a process group may be set up after the
loader was made.
"""

import os
from dataclasses import dataclass

import torch.distributed

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    """Number of this process, in [0, world_size)."""
    world_size: int
    """How many there are; 1 when it trains alone."""

    @staticmethod
    def current() -> "Ranks":
        """Ask ``torch.distributed``, or what torchrun set before it is initialized.

        Both give the same numbers, so a pass does not depend on which came first.
        """
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return Ranks(distributed.get_rank(), distributed.get_world_size())
        rank, world_size = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
        if rank and world_size and rank.isdecimal() and world_size.isdecimal():
            return Ranks(int(rank), int(world_size))
        return Ranks(0, 1)
