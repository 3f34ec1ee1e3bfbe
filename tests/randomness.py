"""What is run to compare pixels and generators, on the CPU and on a GPU?

Kinds of transforms, by the way in which they get their random numbers, and ways to run
one and the same loader that must not change a single bit.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment import GraphedTransform

NUM_BATCHES = 6


def noise(x: Tensor) -> Tensor:
    """Draw from all generators that the loader sets."""
    host = torch.rand(3, device="cpu").sum() + random.random()
    return x + host.to(x.device) + torch.rand(x.shape, device=x.device)


def device_noise(x: Tensor) -> Tensor:
    """Draw on the device alone, as a captured graph must."""
    return x * torch.rand(x.shape, device=x.device)


def from_numpy(x: Tensor) -> Tensor:
    """Draw from a generator that the loader does not set."""
    return x + np.random.rand()


def fused() -> nn.Module:
    return nn.Sequential(
        K.RandomCrop((8, 8)), K.RandomRotation(30.0, p=0.5), K.RandomHorizontalFlip()
    )


def fused_in_parts() -> nn.Module:
    return nn.Sequential(
        K.RandomCrop((8, 8)), K.ColorJiggle(0.2, 0.2, 0.2, 0.1), K.RandomVerticalFlip()
    )


def whole_kornia() -> nn.Module:
    return nn.Sequential(K.RandomErasing(p=1.0), K.RandomGaussianNoise(p=1.0))


def torchvision() -> nn.Module:
    return v2.Compose([v2.RandomCrop(8), v2.RandomRotation(30), v2.RandomErasing(p=1)])


KINDS: dict[str, Callable[[], Any]] = {
    "function": lambda: noise,
    "fused": fused,
    "fused in parts": fused_in_parts,
    "whole Kornia": whole_kornia,
    "torchvision": torchvision,
    "graphed": lambda: GraphedTransform(device_noise),
}


@dataclass(frozen=True)
class Way:
    """How a loader is run."""

    depth: int = 1
    background: bool = False
    is_pinned: bool = False
    draws_between: bool = True
    has_another_beside: bool = False
    breaks_first_epoch: bool = False

    def __str__(self) -> str:
        """Name a test."""
        set_ = [name for name, value in vars(self).items() if value is True]
        return f"{self.depth} {' '.join(set_)}"


REFERENCE = Way(draws_between=False)
WAYS = [
    *(Way(depth, background) for depth in (1, 2, 4, 8) for background in (False, True)),
    Way(4, True, has_another_beside=True),
    Way(8, False, breaks_first_epoch=True),
    Way(4, True, breaks_first_epoch=True),
]
PINNED_WAYS = [
    Way(depth, background, is_pinned=True)
    for depth in (1, 4)
    for background in (False, True)
]


def source(*, is_pinned: bool = False, num_workers: int = 0) -> DataLoader[Any]:
    """Build a shuffled source of (2, 3, 12, 12) float images, the same ones always."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2 * NUM_BATCHES, 3, 12, 12, generator=generator)
    return DataLoader(
        images,  # type: ignore[arg-type]
        2,
        shuffle=True,
        pin_memory=is_pinned,
        num_workers=num_workers,
    )


def draw_everywhere(device: torch.device) -> None:
    torch.rand(7)
    torch.rand(7, device=device)
    random.random()
    np.random.rand()


def run(
    kind: str, device: torch.device, way: Way, *, seed: int | None
) -> list[list[Tensor]]:
    """Run two epochs, each after ``torch.manual_seed``; give their batches."""
    loader = StreamPrefetchLoader(
        source(is_pinned=way.is_pinned),
        KINDS[kind](),
        device=device,
        depth=way.depth,
        background=way.background,
        seed=seed,
    )
    epochs: list[list[Tensor]] = []
    for epoch in range(2):
        # Made first: what it draws from torch's generator is not in question here.
        another = iter(_another(kind, device)) if way.has_another_beside else None
        torch.manual_seed(epoch)
        batches: list[Tensor] = []
        for batch in loader:
            if way.draws_between:
                draw_everywhere(device)
            if another is not None:
                next(another)
            batches.append(batch.cpu())
            if way.breaks_first_epoch and epoch == 0 and len(batches) == 2:
                break
        epochs.append(batches)
    return epochs


def _another(kind: str, device: torch.device) -> StreamPrefetchLoader[Any]:
    return StreamPrefetchLoader(
        source(), KINDS[kind](), device=device, depth=3, background=True
    )


def assert_same_pixels(expected: list[list[Tensor]], got: list[list[Tensor]]) -> None:
    """Compare bit by bit; epochs that were broken off, as far as they went."""
    assert len(expected) == len(got) == 2
    assert len(got[0]) in (2, NUM_BATCHES)
    assert len(got[1]) == NUM_BATCHES
    for epoch, (left, right) in enumerate(zip(expected, got, strict=True)):
        for number, (a, b) in enumerate(zip(left, right, strict=False)):
            assert torch.equal(a, b), f"batch {number} of epoch {epoch}"
    assert not torch.equal(expected[0][0], expected[1][0])


# The user's generators #


def all_states(device: torch.device) -> list[Any]:
    """Give the states of all global generators, comparable with ``==``."""
    states: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    _, key, *place = np.random.get_state()
    states.append([key.tolist(), place])
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    return states


def states_along(
    wrap: Callable[[Any], Any], device: torch.device, num_workers: int
) -> list[Any]:
    """Run a loop that draws itself; give all generators' states at every step."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states: list[Any] = []
    loop = wrap(source(num_workers=num_workers))
    for epoch in range(2):
        for step, _ in enumerate(loop):
            states.append(all_states(device))
            draw_everywhere(device)
            if epoch == 0 and step == 2:
                break
        states.append(all_states(device))
    return states
