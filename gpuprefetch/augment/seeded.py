"""How does a Kornia module, or what ``fuse`` made of one, run inside a loader?

All numbers of a batch come from one generator of ours, seeded with the batch's seed;
torch's own generators are not touched. Members that Kornia runs draw from torch's, so
around those the generators are set and put back, as for any other transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpuprefetch.augment.ahead import PacksAhead
from gpuprefetch.augment.eligible import why_whole
from gpuprefetch.augment.fused import FusedAugmentation
from gpuprefetch.augment.kernel import PIXELS
from gpuprefetch.augment.kornia_adapter import (
    KorniaTransform,
    check_image,
    default_device_cpu,
)
from gpuprefetch.seeding import BatchSeeds, generators_seeded

__all__ = ["FusedTransform", "adapt_kornia"]

_FUSED_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def adapt_kornia(module: nn.Module) -> FusedTransform | KorniaTransform:
    """Make a loader's transform of a Kornia module or of a fused one.

    Raises:
        DependencyError: The installed Kornia is older than 0.9.
    """
    if isinstance(module, FusedAugmentation):
        return FusedTransform(module, None)
    kornia = KorniaTransform(module)
    if why_whole(kornia.module):
        return kornia
    fused = FusedAugmentation(kornia)
    return FusedTransform(fused, kornia)


class FusedTransform:
    """A fused augmentation as a transform.

    Args:
        fused: What runs.
        kornia: Takes the batches that the fused one does not; None: an error.
    """

    def __init__(
        self, fused: FusedAugmentation, kornia: KorniaTransform | None
    ) -> None:
        self._fused = fused
        self._kornia = kornia
        # Seeded anew for each batch. Used by the loop's thread alone.
        self._generator = torch.Generator(device="cpu")
        self._only = only = fused.only_segment
        self._ahead = PacksAhead(only.sampler) if only and only.sampler else None

    def apply_batch(
        self, inputs: tuple[Any, ...], seeds: BatchSeeds, batch_index: int
    ) -> Any:
        """Augment one batch, as ``KorniaTransform.apply_seeded`` says."""
        if self._ahead is not None and self._only and self._is_ordinary(inputs):
            image: Tensor = inputs[0]
            pack = self._ahead.pack_of(
                seeds,
                batch_index,
                batch=image.shape[0],
                size=(image.shape[2], image.shape[3]),
                device=image.device,
            )
            return self._fused.apply_pack(self._only, image, pack)
        if self._kornia is not None:
            if self._takes_kornia(self._kornia, inputs):
                return self._kornia.apply_batch(inputs, seeds, batch_index)
        elif not self._fused.runs_as_is:
            check_image(inputs[0])
        seed = seeds.of_batch(batch_index)
        is_fused = self._fused.is_fused
        if not is_fused and not self._fused.runs_as_is:
            with generators_seeded(seed, inputs[0].device), default_device_cpu():
                return self._run(inputs, None)
        self._generator.manual_seed(seed)
        if is_fused and self._kornia is not None and _is_for_cpu(inputs):
            # The same draws; Kornia's own operations take a half to a quarter of the
            # time there that the plan takes in torch's.
            drawn = self._fused.sample(inputs[0].shape, self._generator)
            return self._kornia.apply_drawn(inputs, self._fused.to_kornia(drawn))
        return self._run(inputs, self._generator)

    def _is_ordinary(self, inputs: tuple[Any, ...]) -> bool:
        """Whether a batch is images on a GPU alone, and no hook wants to see them."""
        image, fused = inputs[0], self._fused
        return (
            len(inputs) == len(fused.data_keys) == 1
            and isinstance(image, Tensor)
            and image.is_cuda
            and image.ndim == 4
            and image.dtype in PIXELS
            and not (fused._forward_hooks or fused._forward_pre_hooks)
        )

    def _run(self, inputs: tuple[Any, ...], generator: torch.Generator | None) -> Any:
        results = self._fused(*inputs, generator=generator)
        return tuple(results) if isinstance(results, list) else results

    def _takes_kornia(self, kornia: KorniaTransform, inputs: tuple[Any, ...]) -> bool:
        """Whether a batch is one of those rare ones that Kornia knows and we do not."""
        image = inputs[0]
        if len(inputs) == 1 and isinstance(image, Mapping):
            return True
        kornia.check_count(inputs)
        check_image(image)
        if image.is_floating_point() and image.dtype not in _FUSED_FLOATS:
            return True
        if len(inputs) == 1:
            return image.ndim not in (3, 4)
        return image.ndim != 4 or not all(
            _is_label(key, label, image)
            for key, label in zip(self._fused.data_keys[1:], inputs[1:], strict=True)
        )

    def __repr__(self) -> str:
        return f"FusedTransform({self._fused!r})"


def _is_for_cpu(inputs: tuple[Any, ...]) -> bool:
    """Whether a batch of images, without labels, is augmented on the CPU."""
    image = inputs[0]
    return len(inputs) == 1 and image.is_cpu and image.numel() > 0


def _is_label(key: str, label: Any, image: Tensor) -> bool:
    """Whether a label is a tensor of the usual rank, or a list of such per sample."""
    if key in ("label", "class"):
        return True
    if isinstance(label, list) and key != "mask":
        return len(label) == len(image) and all(type(one) is Tensor for one in label)
    if type(label) is not Tensor or len(label) != len(image):
        return False
    if key == "mask":
        return label.ndim in (3, 4) and label.shape[-2:] == image.shape[-2:]
    return label.ndim == (4 if key == "bbox" else 3)
