"""What would Kornia itself have given for the loader's first batch?

The oracle is Kornia called directly on the scaled images, with the numbers that the
loader draws for that batch. What fuses draws from a generator of its own: those numbers
are handed to Kornia as ``params``. For anything else torch's generator is put where the
loader has it: a plain function as ``transform`` tells that state.
"""

import copy
from typing import Any

import kornia.augmentation as K
import torch
from torch import nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment.eligible import why_whole
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.seeding import BatchSeeds, generators_seeded

crop = K.RandomCrop((12, 10))
rotation = K.RandomRotation(45.0, p=1.0)
# Below a sigma of about 0.2 the kernel is a single one: equal for any such draw.
blur = K.RandomGaussianBlur((5, 5), (0.5, 2.0), p=1.0)


def chain() -> nn.Sequential:
    return nn.Sequential(
        K.RandomCrop((12, 10)),
        K.Resize((16, 16)),
        K.RandomRotation(45.0, p=0.5),
        K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.5),
        K.Normalize(torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])),
    )


def sequential(*keys: str, **settings: Any) -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomCrop((12, 10)),
        K.RandomHorizontalFlip(p=0.5),
        K.RandomRotation(30.0, p=1.0),
        data_keys=list(keys),
        **settings,
    )


def first(batch: Any, transform: Any, **settings: Any) -> Any:
    """Give the first batch of a loader over one batch, with its seed fixed."""
    settings = {"device": "cpu", "seed": 5} | settings
    return next(iter(StreamPrefetchLoader([batch], transform, **settings)))


# Fused members resample in another order of operations; a Normalize multiplies that.
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 5e-4}


def as_kornia(module: nn.Module, *inputs: Any, device: torch.device) -> Any:
    """Call a copy of a module with the numbers of the loader's first batch."""
    if why_whole(module):
        return with_generator_states(module, *inputs, device=device)
    seed = BatchSeeds.for_epoch(5, 0).of_batch(0)
    fused, shape = fuse(module), inputs[0].shape
    with generators_seeded(seed, device):
        generator = torch.Generator().manual_seed(seed) if fused.is_fused else None
        params = fused.to_kornia(fused.sample(shape, generator))
    return replay(copy.deepcopy(module), params, *to_device(inputs, device))


def replay(module: nn.Module, params: Any, *inputs: Any) -> Any:
    """Call Kornia with parameters; a plain Sequential does not take them."""
    if type(module) is not nn.Sequential:
        return module(*inputs, params=params)
    (x,) = inputs
    for member, one in zip(module, params, strict=True):
        x = replay(member, one, x)
    return x


def with_generator_states(module: nn.Module, *inputs: Any, device: torch.device) -> Any:
    """Call a copy of a module directly, with torch's generators as a loader has them.

    Some members draw on the device, so its generator is set as well.
    """
    states: list[torch.Tensor] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        states.extend(generator.get_state() for generator in generators)
        return x

    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[0])
    first(torch.zeros(1), spy, device=device)
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    try:
        return copy.deepcopy(module)(*to_device(inputs, device))
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def to_device(values: Any, device: torch.device) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to(device)
    return [to_device(value, device) for value in values]


def labelled_batch(size: int) -> tuple[torch.Tensor, ...]:
    """Build images, masks, boxes and keypoints that mark the same spot."""
    image, mask = torch.zeros(size, 3, 16, 16), torch.zeros(size, 1, 16, 16)
    image[..., 6:10, 7:11] = 1
    mask[..., 6:10, 7:11] = 1
    corners = torch.tensor([[7.0, 6.0], [10.0, 6.0], [10.0, 9.0], [7.0, 9.0]])
    boxes = corners.repeat(size, 1, 1, 1)
    points = torch.tensor([[[8.5, 7.5]]]).repeat(size, 1, 1)
    return image, mask, boxes, points
