"""What of Kornia's own work for a batch can be left out, bit for bit?

Where a chain does not fuse, Kornia runs it on the loop's thread, and its time is the
host's. On the host of an H200 a chain of crop, resize, rotation, blur and normalize
took 4.8 ms a batch, 1.7 of them in the crop and 0.3 in the resize:

* a crop's boxes are made by some 60 operations on a few numbers each, where 10 do;
* a crop that slices never reads its matrix, which takes 30 launches;
* a crop that does not pad looks for what it has padded;
* a resize draws nothing: its boxes are the same for equal shapes.

Every shortcut is taken on the loader's own copy of a member, and only where its class
has kept the methods of Kornia that are cut short: a subclass may have others. For boxes
these are the drawing; for the matrix and the padding all of them. They were compared
with Kornia 0.9, so another version runs without them. Kornia is not imported here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpuprefetch.augment.unchanged import (
    keeps_all_methods_of,
    keeps_method_of,
    what_changed,
)

__all__ = ["BoxesOfCrop", "shorten_crop", "shorten_resize"]

Params = dict[str, Tensor]


def shorten_crop(crop: Any, kind: type) -> "BoxesOfCrop | None":
    """Let a crop that slices build no matrix and look for no padding.

    Args:
        crop: Of Kornia's class ``RandomCrop``; changed in place.
        kind: That class.

    Returns:
        What draws its boxes; None: Kornia does.
    """
    # Asked in this order: a class with methods of its own may have other flags too.
    if keeps_all_methods_of(kind, crop) and crop.flags["cropping_mode"] == "slice":
        crop.compute_transformation = _MatrixWithoutPixels(crop)
        crop._compute_matrix_lazily = True
        if not crop.flags["padding"] and not crop.flags["pad_if_needed"]:
            crop.apply_transform = _SliceWithoutPadding(crop)
    can_draw = _draws_as(kind, crop) and BoxesOfCrop.can_draw_for(crop)
    return BoxesOfCrop(crop) if can_draw else None


def shorten_resize(resize: Any, kind: type) -> None:
    """Let a resize build its boxes once for all batches of one shape.

    Args:
        resize: Of Kornia's class ``Resize``; changed in place.
        kind: That class.
    """
    generator = resize._param_generator
    if _draws_as(kind, resize) and _is_kornias(generator, "ResizeGenerator"):
        resize.generate_parameters = _SameBoxes(resize)


def _draws_as(kind: type, member: Any) -> bool:
    """Whether a subclass, which may do anything else to images, draws as its parent."""
    name = "generate_parameters"
    return name not in vars(member) and keeps_method_of(kind, member, name)


def _is_kornias(generator: Any, name: str) -> bool:
    kind = type(generator)
    is_kornias = kind.__module__.startswith("kornia.augmentation.")
    return is_kornias and kind.__name__ == name and not what_changed(generator)


class BoxesOfCrop:
    """Draws the boxes of a crop: the numbers that Kornia draws, and all it returns.

    Args:
        crop: For which :meth:`can_draw_for` holds.
    """

    def __init__(self, crop: Any) -> None:
        self._crop = crop
        generator = crop._param_generator
        self._generator, self._sampler = generator, generator.rand_sampler
        self._size = tuple(generator.size)
        # A shape, and what all batches of it have in common: one object, since threads
        # may draw at the same time.
        self._known: tuple[tuple[int, ...], Params] = ((), {})

    @staticmethod
    def can_draw_for(crop: Any) -> bool:
        """Whether its numbers are Kornia's usual ones: float32, on the host."""
        generator = crop._param_generator
        if not _is_kornias(generator, "CropGenerator"):
            return False
        sampler, size = generator.rand_sampler, generator.size
        is_usual = type(sampler) is torch.distributions.Uniform
        return (
            is_usual
            and generator.resize_to is None
            and sampler.low.dtype is torch.float32
            and sampler.low.device.type == "cpu"
            and isinstance(size, (tuple, list))
            and all(type(side) is int and side > 0 for side in size)
        )

    def __call__(self, batch_shape: tuple[int, ...]) -> Params:
        """Draw for images (B, C, H, W).

        Returns:
            ``src`` and ``dst``: corners (x, y) of a box in the image and in the result,
            (B, 4, 2), float32. ``input_size`` and ``output_size``: (height, width),
            (B, 2), int64.
        """
        crop, count = self._crop, batch_shape[0]
        if count == 0 or not self._is_usual():
            drawn: Params = type(crop).generate_parameters(crop, batch_shape)
            return drawn
        height, width = batch_shape[-2:]
        crop_height, crop_width = self._size
        # Kornia draws all columns first, then all rows.
        left = self._draw(count, max(width - crop_width + 1, 0))
        top = self._draw(count, max(height - crop_height + 1, 0))
        shape, common = self._known
        if tuple(batch_shape) != shape:
            common = _common(count, (height, width), (crop_height, crop_width))
            self._known = (tuple(batch_shape), common)
        same = {name: value.clone() for name, value in common.items()}
        start = torch.stack((left, top), dim=1)
        return {"src": start[:, None] + same["dst"], **same}

    def _is_usual(self) -> bool:
        """Whether it is as it was: a subclass may give each batch another size."""
        generator = self._crop._param_generator
        return (
            generator is self._generator
            and generator.rand_sampler is self._sampler
            and isinstance(generator.size, (tuple, list))
            and tuple(generator.size) == self._size
            and torch.get_default_dtype() is torch.float32
        )

    def _draw(self, count: int, extent: int) -> Tensor:
        """First pixels in [0, extent), (B,), float32."""
        if self._crop.same_on_batch:
            drawn: Tensor = self._sampler.rsample(torch.Size((1,))).repeat(count)
        else:
            drawn = self._sampler.rsample(torch.Size((count,)))
        return drawn.mul_(extent).floor_()


def _common(
    count: int, input_size: tuple[int, int], output_size: tuple[int, int]
) -> Params:
    """What every batch of that many images has; shapes as a crop's call returns."""
    bottom, right = (side - 1.0 for side in output_size)
    corners = [[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]]
    return {
        "dst": torch.tensor(corners, device="cpu").repeat(count, 1, 1),
        "input_size": torch.tensor(input_size, device="cpu").repeat(count, 1),
        "output_size": torch.tensor(output_size, device="cpu").repeat(count, 1),
    }


class _SameBoxes:
    """Keeps what a resize draws: nothing random, so the same for equal shapes."""

    def __init__(self, resize: Any) -> None:
        self._resize = resize
        self._generator = resize._param_generator
        # What was asked for and what was drawn: one object, as above.
        self._known: tuple[object, Params] = (None, {})

    def __call__(self, batch_shape: tuple[int, ...]) -> Params:
        resize, generator = self._resize, self._generator
        size, side = generator.output_size, generator.side
        fixed = size if isinstance(size, int) else tuple(size)
        asked_for = (tuple(batch_shape), fixed, side, generator.device, generator.dtype)
        known_for, drawn = self._known
        # A subclass may give each batch another size, or another generator.
        is_known = asked_for == known_for and resize._param_generator is generator
        if not is_known:
            drawn = type(resize).generate_parameters(resize, batch_shape)
            if resize._param_generator is generator:
                self._known = (asked_for, drawn)
        # Copies: whoever gets them may write to them.
        return {name: value.clone() for name, value in drawn.items()}


class _MatrixWithoutPixels:
    """Tells Kornia that a crop's matrix needs no pixels.

    Kornia then keeps none until somebody asks for the matrix.
    """

    def __init__(self, crop: Any) -> None:
        self._crop = crop
        self._kornia_input_metadata_only = self

    def __call__(self, input: Tensor, params: Params, flags: dict[str, Any]) -> Tensor:
        crop = self._crop
        compute: Callable[..., Tensor] = type(crop).compute_transformation
        return compute(crop, input, params=params, flags=flags)


class _SliceWithoutPadding:
    """Slices the image: what was padded, which is nothing, need not be looked for."""

    def __init__(self, crop: Any) -> None:
        self._crop = crop

    def __call__(
        self,
        input: Tensor,
        params: Params,
        flags: dict[str, Any],
        transform: Tensor | None = None,
    ) -> Tensor:
        crop = self._crop
        fewer = {name: params[name] for name in params if name != "padding_size"}
        apply: Callable[..., Tensor] = type(crop).apply_transform
        return apply(crop, input, fewer, flags, transform=transform)
