"""Of which kind is an object, told without loading the package that its class is from?

An object of such a class can exist only if that package has been imported already. So
the loader pays for none that its user does not have.
"""

import sys
from typing import Any

from torch import nn

__all__ = [
    "is_array",
    "is_fused_module",
    "is_hashable",
    "is_kornia_augmentation",
    "is_kornia_module",
]


def is_array(value: Any) -> bool:
    """Tell whether this is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_kornia_augmentation(value: object) -> bool:
    """Tell whether this is one of Kornia's augmentations or containers of them.

    True for a user's subclass too.
    """
    return isinstance(value, nn.Module) and any(
        base.__module__.startswith("kornia.augmentation.")
        for base in type(value).__mro__
    )


def is_kornia_module(value: object) -> bool:
    """Tell whether this is a Kornia augmentation, or an ``nn.Sequential`` of those."""
    if type(value) is nn.Sequential:
        return len(value) > 0 and all(map(is_kornia_module, value))
    return is_kornia_augmentation(value)


def is_fused_module(value: object) -> bool:
    """Tell whether this is what ``augment.fuse`` returned."""
    return type(value).__module__ == "gpuprefetch.augment.fused"


def is_hashable(value: object) -> bool:
    """Tell by trying: a tuple says that it is hashable, and may hold a list."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
