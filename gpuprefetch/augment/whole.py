"""How does Kornia run a module that cannot be cut into segments?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpuprefetch.augment.parameters import Parameters
from gpuprefetch.augment.segments import as_batch, draw_kept
from gpuprefetch.seeding import no_other_thread_seeds

if TYPE_CHECKING:
    from gpuprefetch.augment.kornia_adapter import KorniaTransform

__all__ = ["change_images", "run_whole"]


def run_whole(
    kornia: KorniaTransform,
    inputs: tuple[Any, ...],
    params: Any | None,
    generator: torch.Generator | None,
) -> Any:
    """Run the whole module.

    Args:
        kornia: The module, made ready.
        inputs: As ``KorniaTransform.apply_seeded`` takes them.
        params: Our :class:`Parameters`, or Kornia's; None: drawn here.
        generator: On the CPU; None: torch's own.

    Returns:
        As ``KorniaTransform.apply_seeded`` does.
    """
    drawn = params.kept[0] if isinstance(params, Parameters) else params
    if drawn is None:
        drawn = _draw(kornia.module, inputs[0], generator)
    run = kornia.apply_seeded if isinstance(drawn, int) else kornia.apply_drawn
    # One thread at a time: a container keeps the matrices of a call on itself.
    with no_other_thread_seeds():
        return run(inputs, drawn)


def _draw(module: nn.Module, image: Any, generator: torch.Generator | None) -> Any:
    """Kornia's parameters of the module; where it cannot tell them, a seed."""
    if isinstance(image, Tensor) and image.ndim in (3, 4):
        return draw_kept(module, as_batch(image).shape, generator)[0]
    return draw_kept(nn.Identity(), (1, 1), generator)[0]


def change_images(
    results: Any, keys: Sequence[str], change: Callable[[Tensor], Tensor]
) -> Any:
    """Change the images among what :func:`run_whole` returned; several become a list.

    Volumes and videos stay as they are.
    """

    def one(key: str, value: Any) -> Any:
        is_image = key.lower().startswith(("image", "input")) and value.ndim <= 4
        return change(value) if is_image else value

    if isinstance(results, dict):
        return {key: one(key, value) for key, value in results.items()}
    return one(keys[0], results) if len(keys) == 1 else list(map(one, keys, results))
