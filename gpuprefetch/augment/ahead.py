"""Where do the numbers of the next batches lie already?

Drawing for one batch and copying its numbers costs the host more than launching the
kernel does, and nearly all of it is the same for sixteen batches. Their seeds are known
in advance. So packs are drawn for several batches at once, and travel in one copy.

Invariants: a batch gets the numbers that its own seed gives, however many were drawn
with it; batches whose shape changes all the time are drawn for one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.seeding import BatchSeeds

__all__ = ["PacksAhead"]

_MOST_BATCHES = 16
_MOST_NUMBERS = 1 << 18  # In one block: a megabyte.


class PacksAhead:
    """The packs of the coming batches of one pass, on the device.

    Used by the loop's thread alone, with the side stream current: the blocks belong to
    that stream.

    Args:
        sampler: Draws them.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._generator = torch.Generator(device="cpu")
        # What the block holds: equal for batches that may share one.
        self._kind: object = None
        self._first_index = 0
        self._packs: tuple[Tensor, ...] = ()
        # Doubled for each block of the same kind that was used up.
        self._num_batches = 1

    def pack_of(
        self,
        seeds: BatchSeeds,
        batch_index: int,
        *,
        batch: int,
        size: Size,
        device: torch.device,
    ) -> Tensor:
        """Give the pack of one batch: (B, n), float32, on ``device``.

        Not readable on another stream than the current one. At times it is drawn here,
        with those of the batches behind it; nobody waits for the device.

        Args:
            seeds: Of the pass.
            batch_index: Of the batch in its epoch.
            batch: How many images it has.
            size: Their height and width.
            device: Where the images are.

        Raises:
            ImageSizeError: A crop is larger than the image that reaches it.
        """
        kind = (seeds, batch, size, device)
        place = batch_index - self._first_index
        if kind != self._kind or not 0 <= place < len(self._packs):
            is_next = kind == self._kind and place == len(self._packs)
            self._draw(kind, batch_index, is_next=is_next)
            place = 0
        return self._packs[place]

    def _draw(
        self,
        kind: tuple[BatchSeeds, int, Size, torch.device],
        first_index: int,
        *,
        is_next: bool,
    ) -> None:
        seeds, batch, size, device = kind
        room = _MOST_NUMBERS // max(batch * self._sampler.plan.width, 1)
        most = max(min(_MOST_BATCHES, room), 1)
        self._num_batches = min(2 * self._num_batches, most) if is_next else 1
        indices = range(first_index, first_index + self._num_batches)
        block = self._sampler.draw_many(
            [seeds.of_batch(index) for index in indices],
            batch,
            size,
            self._generator,
            is_pinned=device.type == "cuda",
        )
        self._packs = block.to(device, non_blocking=True).unbind()
        self._kind, self._first_index = kind, first_index
