"""What keeps a module that holds Kornia augmentations from being taken over?

Such a module is called like any other function; whoever expected a fused chain and
scaled images is told which member it is. The package that the members come from is not
loaded for that.
"""

from torch import nn

from gpuprefetch.kinds import (
    is_fused_module,
    is_kornia_augmentation,
    is_kornia_module,
)

__all__ = ["find_foreign", "why_not_taken_over"]


def find_foreign(module: object) -> tuple[str, nn.Module] | None:
    """Find the first member of an ``nn.Sequential`` that is no Kornia augmentation.

    Returns:
        Its path, as ``named_modules`` gives it, and the member. ``None`` where there is
        none, or the module is no plain ``nn.Sequential``.
    """
    if type(module) is not nn.Sequential:
        return None
    for name, member in module.named_children():
        if is_kornia_module(member):
            continue
        below = find_foreign(member)
        return (name, member) if below is None else (f"{name}.{below[0]}", below[1])
    return None


def why_not_taken_over(function: object) -> str:
    """Say why a loader calls a module as it is, though it holds Kornia augmentations.

    Returns:
        Two sentences; empty for every other function.
    """
    if not isinstance(function, nn.Module) or is_fused_module(function):
        return ""
    is_taken = is_kornia_module(function)
    if is_taken or not any(map(is_kornia_augmentation, function.modules())):
        return ""
    foreign = find_foreign(function)
    name = type(function if foreign is None else foreign[1]).__qualname__
    what = "the members that it holds" if foreign is None else "the chain"
    cure = (
        "Pass those members themselves, in an nn.Sequential,"
        if foreign is None
        else "Make it a subclass of Kornia's IntensityAugmentationBase2D,"
    )
    return (
        f"{name} is no Kornia augmentation, so the loader does not take {what} over: "
        "it is called as it is, on images as they came (uint8 is not scaled). "
        f"{cure} or scale yourself."
    )
