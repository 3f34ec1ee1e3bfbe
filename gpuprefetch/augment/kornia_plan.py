"""Which steps does a Kornia module stand for?

Kornia's classes are recognised by their qualified names; Kornia itself is not imported
here. A member that has no step is kept as it is, with the reason. Only Kornia's own
classes become steps: a subclass may have changed what they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from gpuprefetch.augment.kornia_read import READERS, Unfusable
from gpuprefetch.augment.steps import Step
from gpuprefetch.augment.unchanged import what_changed

__all__ = ["Member", "is_chain", "read_members"]


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the chain: the user's module, and the step it stands for."""

    name: str
    """The name Kornia gives it in ``params``, such as ``RandomCrop_0``."""
    module: nn.Module
    step: Step | None
    """None where the member runs as it is."""
    reason: str = ""
    """Why there is no step."""


def _is_from_kornia(module: nn.Module) -> bool:
    return type(module).__module__.startswith("kornia.augmentation.")


def is_chain(module: nn.Module) -> bool:
    """Whether the members of a container are read, and parameterised, one by one."""
    if what_changed(module) or getattr(module, "random_apply", False):
        return False
    if type(module) is nn.Sequential:
        return True
    return _is_from_kornia(module) and type(module).__name__ in _CONTAINERS


_CONTAINERS = ("ImageSequential", "AugmentationSequential")


def read_members(module: nn.Module) -> tuple[Member, ...]:
    """Flatten a chain into its members, each with its step or the reason for none."""
    return tuple(_walk("", module))


def _walk(
    name: str, module: nn.Module, *, is_in_kornias: bool = False
) -> Iterator[Member]:
    if is_in_kornias and type(module) is nn.Sequential:
        # To Kornia's containers it is no augmentation: it gets no parameters there, and
        # labels pass it by.
        yield Member(name, module, None, "it is an nn.Sequential in Kornia's container")
    elif is_chain(module):
        is_in_kornias = type(module) is not nn.Sequential
        for child_name, child in module.named_children():
            yield from _walk(child_name, child, is_in_kornias=is_in_kornias)
    else:
        yield _read(name, module)


def _read(name: str, module: nn.Module) -> Member:
    kind = type(module).__name__
    reader = READERS.get(kind)
    if change := what_changed(module):
        return Member(name, module, None, change)
    if getattr(module, "random_apply", False):
        return Member(name, module, None, "random_apply draws a new chain each time")
    if not _is_from_kornia(module):
        return Member(name, module, None, "it is not one of Kornia's own classes")
    if reader is None:
        return Member(name, module, None, "there is no fused step for this class")
    if any(parameter.requires_grad for parameter in module.parameters()):
        return Member(name, module, None, "its ranges are learnt")
    try:
        return Member(name, module, reader(kind, module))
    except Unfusable as reason:
        return Member(name, module, None, str(reason))
