"""How are images drawn into a picture file?

The only file that imports matplotlib, and only when a picture is drawn. It uses no
window and no global state, so it works on a machine without a display.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpuprefetch.errors import DependencyError

__all__ = ["import_figure", "save_grid"]

_CELL_INCHES = 2.0
_HEADING_INCHES = 0.5
_DOTS_PER_INCH = 110


def import_figure() -> Any:
    """Return matplotlib's ``Figure`` class.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(
            "matplotlib is not installed, and pictures are drawn with it. "
            "Run: pip install 'gpuprefetch-torch[plot]'"
        ) from error
    return Figure


def save_grid(
    images: Sequence[torch.Tensor],
    captions: Sequence[str],
    path: Path,
    *,
    columns: int = 4,
    heading: str = "",
) -> None:
    """Write images in rows, each with a caption above it, to one picture file.

    Args:
        images: Each (3, H, W) or (1, H, W): uint8, or float in [0, 1] (values outside
            are clipped); on any device.
        captions: As many as there are images.
        path: Its suffix names the format (``.png``). Replaced if it exists.
        columns: Images in a row.
        heading: A line above all; none if empty.

    Raises:
        DependencyError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    rows = -(-len(images) // columns)
    height = rows * _CELL_INCHES + _HEADING_INCHES * bool(heading)
    figure = import_figure()(
        figsize=(columns * _CELL_INCHES, height), layout="constrained"
    )
    if heading:
        figure.suptitle(heading, fontsize=11)
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for cell in cells:
        cell.set_axis_off()
    for cell, image, caption in zip(cells, images, captions, strict=False):
        cell.imshow(_to_pixels(image), vmin=0, vmax=1, cmap="gray")
        cell.set_title(caption, fontsize=9)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _to_pixels(image: torch.Tensor) -> Any:
    """Turn (C, H, W) into a NumPy array of (H, W, 3) or (H, W), in [0, 1]."""
    unit = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    return unit.clamp(0, 1).movedim(0, -1).squeeze(-1).cpu().numpy()
