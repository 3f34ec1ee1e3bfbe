"""What do value steps make of an image, in plain torch operations?

Images are (B, C, H, W), float32. The formulas are Kornia's, without its detours through
HSV: with the greatest and the least channel of a pixel as ``top`` and ``low``,

- a shift of the hue keeps both and moves the channels along the edges of the hexagon
  between them, so that a grey pixel stays as it is, whatever its hue is said to be;
- the saturation of HSV times ``f`` makes ``top - (top - value) * share`` of each
  channel, with ``share = min(f, top / (top - low))``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuprefetch.augment.geometry import is_changed
from gpuprefetch.augment.values import (
    Blur,
    Erase,
    Grayscale,
    Jitter,
    Pointwise,
    ValueStep,
    luma_of,
    per_channel,
)

__all__ = ["change_values", "erase"]


def change_values(
    step: ValueStep, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """One step, on those samples that it does not skip.

    Raises:
        TransformError: The number of channels does not fit the step.
    """
    match step:
        case Blur():
            mapped = _blur(step, columns, pack, image)
        case Pointwise():
            mapped = _pointwise(step, image)
        case Jitter():
            mapped = _jitter(step, columns, pack, image)
        case Grayscale():
            weights = step.weights_for(image.shape[1])
            mapped = _weigh(image, weights).expand_as(image)
        case Erase():
            value = pack[:, columns["value"], None, None, None]
            return erase(columns, pack, image, value=value)
    changed = is_changed(columns, pack)
    if changed is None:
        return mapped
    return torch.where(changed[:, None, None, None], mapped, image)


def erase(
    columns: Mapping[str, int], pack: Tensor, image: Tensor, *, value: Tensor
) -> Tensor:
    """Put ``value`` into each sample's rectangle; an image or mask of any dtype."""
    left, top, width, height = (
        pack[:, columns[name], None, None]
        for name in ("left", "top", "width", "height")
    )
    x = torch.arange(image.shape[-1], device=image.device)
    y = torch.arange(image.shape[-2], device=image.device)[:, None]
    inside = (x >= left) & (x < left + width) & (y >= top) & (y < top + height)
    changed = is_changed(columns, pack)
    if changed is not None:
        inside = inside & changed[:, None, None]
    return torch.where(inside[:, None], value, image)


def _blur(
    step: Blur, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """Rows, then columns; ``exp(-d^2 / (2 sigma^2))`` normalized to sum 1."""
    sigma = pack[:, columns["sigma"], None]
    blurred = image
    for axis, taps in ((-1, step.kernel_size[1]), (-2, step.kernel_size[0])):
        radius = taps // 2
        offsets = torch.arange(-radius, radius + 1, device=image.device)
        weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
        weights = weights / weights.sum(1, keepdim=True)
        margins = (radius, radius, 0, 0) if axis == -1 else (0, 0, radius, radius)
        padded = F.pad(blurred, margins, mode=step.border) if radius else blurred
        length = blurred.shape[axis]
        blurred = sum(
            (
                padded.narrow(axis, tap, length) * weights[:, tap, None, None, None]
                for tap in range(taps)
            ),
            start=torch.zeros_like(blurred),
        )
    return blurred


def _pointwise(step: Pointwise, image: Tensor) -> Tensor:
    channels = image.shape[1]
    scale = image.new_tensor(per_channel(step.scale, channels)).view(1, -1, 1, 1)
    bias = image.new_tensor(per_channel(step.bias, channels)).view(1, -1, 1, 1)
    return image * scale + bias


# Colors #


def _jitter(
    step: Jitter, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """The adjustments one after the other, in the order that the pack says.

    The order is the same for the whole batch, but reading it would wait for the device.
    So all orders are gone through place by place: at each, every adjustment is made,
    and the one that is due is taken.
    """
    adjustments = step.adjustments_for(image.shape[1])
    image = image.clamp(0, 1)
    if not step.is_order_drawn:
        for index in adjustments:
            image = _adjust(step, index, columns, pack, image)
        return image.clamp(0, 1)
    orders = torch.tensor(step.ORDERS, device=pack.device)[
        pack[:, columns["order"]].long()
    ]
    for place in range(4):
        due, before = orders[:, place, None, None, None], image
        for index in adjustments:
            adjusted = _adjust(step, index, columns, pack, before)
            image = torch.where(due == index, adjusted, image)
    return image.clamp(0, 1)


def _adjust(
    step: Jitter, index: int, columns: Mapping[str, int], pack: Tensor, image: Tensor
) -> Tensor:
    """Brightness (0), contrast, saturation or hue (3) of an image in [0, 1]."""
    name = ("brightness", "contrast", "saturation", "hue")[index]
    factor = pack[:, columns[name], None, None, None]
    if name == "hue":
        return _shift_hue(image, factor)
    if name == "brightness":
        mapped = image + (factor - 1) if step.is_jiggle else image * factor
    elif name == "contrast":
        mapped = image * factor
        if not step.is_jiggle:
            mean = _grey(image).mean((-2, -1), keepdim=True)
            mapped = mapped + mean * (1 - factor)
    elif step.is_jiggle:
        return _scale_saturation(image, factor)
    else:
        mapped = _grey(image) * (1 - factor) + image * factor
    return mapped.clamp(0, 1)


def _grey(image: Tensor) -> Tensor:
    return _weigh(image, luma_of(image.shape[1]))


def _weigh(image: Tensor, weights: tuple[float, ...]) -> Tensor:
    """The weighted sum of the channels, (B, 1, H, W)."""
    column = image.new_tensor(weights).view(1, -1, 1, 1)
    return (image * column).sum(1, keepdim=True)


def _scale_saturation(image: Tensor, factor: Tensor) -> Tensor:
    top, spread = _top_and_spread(image)
    most = top / spread.clamp_min(torch.finfo(torch.float32).tiny)
    return top - (top - image) * torch.minimum(factor, most)


def _shift_hue(image: Tensor, turns: Tensor) -> Tensor:
    """The hue in sixths of a turn: 0 is red, 2 green, 4 blue."""
    top, spread = _top_and_spread(image)
    red, green, blue = torch.split(image, 1, 1)
    safe = torch.where(spread > 0, spread, torch.ones_like(spread))
    from_red = (green - blue) / safe
    from_green = (blue - red) / safe + 2
    from_blue = (red - green) / safe + 4
    is_red = (red >= green) & (red >= blue)
    hue = torch.where(
        is_red, from_red, torch.where(green >= blue, from_green, from_blue)
    )
    start = image.new_tensor([5.0, 3.0, 1.0]).view(1, -1, 1, 1)
    place = (start + hue + 6 * turns) % 6
    share = torch.minimum(place, 4 - place).clamp(0, 1)
    return top - spread * share


def _top_and_spread(image: Tensor) -> tuple[Tensor, Tensor]:
    top = image.amax(1, keepdim=True)
    return top, top - image.amin(1, keepdim=True)
