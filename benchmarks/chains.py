"""Which chains of augmentations are measured, beside the demo's own?

The demo's chain is in ``gpuprefetch.workloads``: crop half, resize back, rotate by up
to 45 degrees, blur of 7 pixels, normalize.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision.transforms import v2

from gpuprefetch import workloads
from gpuprefetch.augment.kornia_adapter import import_kornia

__all__ = [
    "AsFunction",
    "imagenet_chain",
    "jitter_chain",
    "kornia_function",
    "own_methods_chain",
    "own_subclasses_chain",
    "per_sample",
    "torchvision_imagenet_chain",
]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet_chain(size: int) -> nn.Sequential:
    """Build with Kornia what ImageNet training does to a batch."""
    kornia = import_kornia()
    return nn.Sequential(
        kornia.RandomResizedCrop((size, size)),
        kornia.RandomHorizontalFlip(),
        kornia.Normalize(torch.tensor(_MEAN), torch.tensor(_STD)),
    )


def torchvision_imagenet_chain(size: int) -> nn.Module:
    """Build the same with torchvision; it draws once for all that it is given."""
    return nn.Sequential(
        v2.RandomResizedCrop(size, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(_MEAN, _STD),
    )


def jitter_chain(size: int) -> nn.Sequential:
    """Build the demo's chain with a ColorJitter in its middle."""
    members = list(workloads.kornia_chain(size))
    jitter = import_kornia().ColorJitter(0.2, 0.2, 0.2, 0.1, p=1.0)
    return nn.Sequential(*members[:3], jitter, *members[3:])


def own_subclasses_chain(size: int) -> nn.Sequential:
    """Build the demo's chain of subclasses of Kornia's classes, so that none fuses.

    It draws and does what the demo's chain does: only its classes are a user's own.
    """
    return _of_own_classes(size, lambda kind: {})


def own_methods_chain(size: int) -> nn.Sequential:
    """Build the same of subclasses that apply themselves by a method of their own.

    The method calls that of Kornia's class, which nobody but the user can know.
    """

    def with_method(kind: Any) -> dict[str, Any]:
        def apply_transform(self: Any, *args: Any, **settings: Any) -> Any:
            return kind.apply_transform(self, *args, **settings)

        return {"apply_transform": apply_transform}

    return _of_own_classes(size, with_method)


def _of_own_classes(
    size: int, methods_of: Callable[[Any], dict[str, Any]]
) -> nn.Sequential:
    """Build the demo's chain of subclasses with those methods."""
    chain = workloads.kornia_chain(size)
    for member in chain:
        kind = type(member)
        own = {"__module__": __name__} | methods_of(kind)
        member.__class__ = type(f"Own{kind.__name__}", (kind,), own)
    return chain


class AsFunction:
    """A function around a chain: no loader can see that Kornia is in it.

    Args:
        chain: Takes float images.
    """

    def __init__(self, chain: nn.Module) -> None:
        self._chain = chain

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W), uint8, to what the chain makes of float32 in [0, 1]."""
        augmented: torch.Tensor = self._chain(workloads.to_unit_float(images))
        return augmented


def kornia_function(size: int) -> AsFunction:
    """Build the demo's chain as a plain function."""
    return AsFunction(workloads.kornia_chain(size))


def per_sample(chain: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Apply a chain that draws once per call to each image of a batch."""
    return torch.stack([chain(image) for image in images])
