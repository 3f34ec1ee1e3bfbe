"""The pack's numbers as Kornia's parameters, and back.

Kornia's dictionaries are those of its random generators; what Kornia derives from the
image (``forward_input_shape``, ``padding_size``) is filled in, so that a dictionary can
be passed to the member as ``params=``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.steps import (
    Affine,
    CenterCrop,
    Crop,
    Resize,
    ResizedCrop,
    Rotation,
    Step,
)
from gpuprefetch.augment.values import Blur, Erase, Jitter
from gpuprefetch.errors import TransformError

__all__ = ["from_kornia", "to_kornia"]


def to_kornia(
    step: Step, columns: Mapping[str, int], pack: Tensor, size: Size, channels: int
) -> dict[str, Tensor]:
    """Parameters of one member for images (channels, *size), in host memory."""
    batch = pack.shape[0]
    canvas = step.canvas(size) if isinstance(step, Crop) and batch else size

    def number(name: str, otherwise: float = 0.0) -> Tensor:
        if name in columns:
            return pack[:, columns[name]].clone()
        return torch.full((batch,), otherwise)

    params = {
        "batch_prob": 1.0 - number("skip"),
        "forward_input_shape": torch.tensor([batch, channels, *canvas]),
    }
    match step:
        case Crop():
            left, right, top, bottom = step.margins(size)
            margins = torch.tensor([left, right, top, bottom])
            params["padding_size"] = margins.expand(batch, -1)
            params |= _boxes(number("left"), number("top"), step.size, step.size)
        case CenterCrop():
            origin_x, origin_y = step.origin(size)
            left_, top_ = number("", origin_x), number("", origin_y)
            params |= _boxes(left_, top_, step.size, step.size)
        case ResizedCrop():
            window = number("height"), number("width")
            params |= _boxes(number("left"), number("top"), window, step.size)
        case Resize():
            zero = number("")
            params |= _boxes(zero, zero, size, step.output_size(size))
        case Rotation():
            params["degrees"] = number("degrees")
        case Affine():
            scale_x = number("scale_x", 1.0)
            scale_y = number("scale_y") if "scale_y" in columns else scale_x
            centre = torch.tensor([(size[1] - 1) / 2, (size[0] - 1) / 2])
            params |= {
                "translations": torch.stack((number("shift_x"), number("shift_y")), -1),
                "center": centre.expand(batch, -1),
                "scale": torch.stack((scale_x, scale_y), -1),
                "angle": number("degrees"),
                "shear_x": number("shear_x"),
                "shear_y": number("shear_y"),
            }
        case Blur():
            params["sigma"] = number("sigma")
        case Jitter():
            for name in ("brightness", "contrast", "saturation"):
                params[f"{name}_factor"] = number(name, 1.0)
            params["hue_factor"] = number("hue")
            # One order for the batch; which one does not matter for an empty one.
            index = int(number("order")[0]) if batch else 0
            params["order"] = torch.tensor(step.ORDERS[index])
        case Erase():
            for name, ours in _ERASE:
                params[name] = number(ours)
    return params


_ERASE = (
    ("xs", "left"),
    ("ys", "top"),
    ("widths", "width"),
    ("heights", "height"),
    ("values", "value"),
)


def _boxes(
    left: Tensor,
    top: Tensor,
    window: tuple[Tensor | float, Tensor | float],
    output: Size,
) -> dict[str, Tensor]:
    """``src`` and ``dst``: inclusive corners, clockwise from top left, (B, 4, 2)."""
    zero = torch.zeros_like(left)
    sizes = torch.tensor(output).expand(left.shape[0], -1)
    return {
        "src": _corners(left, top, window),
        "dst": _corners(zero, zero, output),
        "output_size": sizes,
    }


def _corners(
    left: Tensor, top: Tensor, size: tuple[Tensor | float, Tensor | float]
) -> Tensor:
    right, bottom = left + size[1] - 1, top + size[0] - 1
    flat = (left, top, right, top, right, bottom, left, bottom)
    return torch.stack(flat, -1).view(-1, 4, 2)


def from_kornia(
    step: Step,
    columns: Mapping[str, int],
    params: Mapping[str, Tensor],
    pack: Tensor,
    size: Size,
) -> None:
    """Write one member's parameters into its columns of the pack.

    Raises:
        TransformError: They are for another number of images, or a window lies outside
            the image, which is of this size.
    """

    def put(name: str, values: Tensor) -> None:
        if name not in columns:
            return
        if len(values) != len(pack):
            raise TransformError(
                f"the parameters of {step.name} are for {len(values)} images, these "
                f"are {len(pack)}."
            )
        pack[:, columns[name]] = values.to(pack)

    if "batch_prob" in params:
        put("skip", (params["batch_prob"].cpu() <= 0.5).to(torch.float32))
    match step:
        case Crop() | ResizedCrop():
            box = params["src"].cpu()
            put("left", box[:, 0, 0])
            put("top", box[:, 0, 1])
            put("width", box[:, 2, 0] - box[:, 0, 0] + 1)
            put("height", box[:, 2, 1] - box[:, 0, 1] + 1)
            _require_inside(
                step, box, step.canvas(size) if isinstance(step, Crop) else size
            )
        case Rotation():
            put("degrees", params["degrees"])
        case Affine():
            put("degrees", params["angle"])
            for index, axis in enumerate("xy"):
                put(f"shift_{axis}", params["translations"][:, index])
                put(f"scale_{axis}", params["scale"][:, index])
                put(f"shear_{axis}", params[f"shear_{axis}"])
        case Blur():
            put("sigma", params["sigma"])
        case Jitter():
            for name in ("brightness", "contrast", "saturation", "hue"):
                put(name, params[f"{name}_factor"])
            if step.is_order_drawn:
                order = tuple(params["order"].tolist())
                one = torch.tensor(step.ORDERS.index(order))
                put("order", one.expand(len(pack)))
        case Erase():
            for name, ours in _ERASE:
                put(ours, params[name])


def _require_inside(step: Crop | ResizedCrop, box: Tensor, size: Size) -> None:
    """The kernel reads what a window covers, without looking where the image ends."""
    low, high = box[:, 0], box[:, 2]
    if isinstance(step, Crop):  # Its window has a fixed size, whatever the box says.
        high = low + low.new_tensor([step.size[1] - 1, step.size[0] - 1])
    if bool((low < 0).any()) or bool((high >= high.new_tensor(size[::-1])).any()):
        raise TransformError(
            f"a window in the parameters of {step.name} lies outside the image, which "
            f"is {size[0]} x {size[1]} (height x width) there."
        )
