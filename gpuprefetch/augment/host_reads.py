"""How is a member of Kornia's applied without the host reading its numbers?

A graph cannot be captured where the host waits for the device. Kornia itself is not
imported here: whoever has a module of its has imported it already.
"""

import sys
from typing import Any

import torch

__all__ = ["blur_unchecked", "skip_host_reads"]


def skip_host_reads(member: Any) -> None:
    """Let a blur not look at its sigmas, where they lie on the device.

    Kornia refuses those that are not positive, and waits for the device to see them.

    Args:
        member: Changed in place; any of Kornia's modules.
    """
    blur = getattr(member, "_gaussian_blur2d_fn", None)
    if blur is not None and blur is _filters().gaussian_blur2d:
        member._gaussian_blur2d_fn = blur_unchecked


def _filters() -> Any:
    return sys.modules["kornia.filters"]


def blur_unchecked(
    image: torch.Tensor,
    kernel_size: tuple[int, int] | int,
    sigma: torch.Tensor,
    border_type: str = "reflect",
    separable: bool = True,
) -> torch.Tensor:
    """Do what ``kornia.filters.gaussian_blur2d`` does with sigmas that are positive.

    Args:
        image: (B, C, H, W), of floats.
        kernel_size: (height, width) in pixels, odd, or one number for both.
        sigma: (B, 2) or (1, 2), in pixels: along the height, along the width.
        border_type: As Kornia names it.
        separable: One pass along each side, instead of one with a whole kernel.

    Returns:
        (B, C, H, W), of the image's type; computed in float32 at least.
    """
    filters, is_half = _filters(), image.dtype in (torch.float16, torch.bfloat16)
    size = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    with torch.autocast(image.device.type, enabled=False):
        floats = image.float() if is_half else image
        sigma = sigma.to(floats)
        if separable:
            down, across = (
                filters.get_gaussian_kernel1d(length, sigma[:, axis, None])
                for axis, length in enumerate(size)
            )
            blurred = filters.filter2d_separable(floats, across, down, border_type)
        else:
            kernel = filters.get_gaussian_kernel2d(size, sigma)
            blurred = filters.filter2d(floats, kernel, border_type)
        result: torch.Tensor = blurred.to(image.dtype)
        return result
