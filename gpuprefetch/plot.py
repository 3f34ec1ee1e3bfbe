"""How do pictures get into a file, images above all?

The only file that imports matplotlib, and only when a picture is drawn. It uses no
window and no global state, so it works on a machine without a display.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpuprefetch.errors import DependencyError, SettingError

__all__ = [
    "COLOURS",
    "Overlay",
    "import_figure",
    "save_bars",
    "save_figure",
    "save_grid",
    "save_lines",
]

# Told apart also by those who see few colours (Okabe and Ito's palette).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY = "#B4B4B4"  # What is there to compare with.

# Of a grid of images #

_CELL_INCHES = 2.0
_HEADING_INCHES = 0.5
_DOTS_PER_INCH = 110

# Of a chart #

# A page is as wide, so that text is shown in the size that is given here.
_PAGE_INCHES = 9.0
_TEXT_POINTS = 10
_HEADING_POINTS = 12
_CHART_DOTS_PER_INCH = 160
_BAR_INCHES = 0.27
_LINES_INCHES = 3.7
_MOST_ACROSS = 3


@dataclass(frozen=True, slots=True)
class Overlay:
    """What is drawn on top of one image; in its pixels, on any device."""

    corners: torch.Tensor | None = None
    """Boxes, (N, 4, 2): x and y of four corners in turn."""
    keypoints: torch.Tensor | None = None
    """(N, 2): x and y."""
    mask: torch.Tensor | None = None
    """(1, H, W) or (H, W), whole numbers; 0 is left clear."""


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
    overlays: Sequence[Overlay] = (),
    heading: str = "",
) -> None:
    """Write images in rows, each with a caption above it, to one picture file.

    Args:
        images: Each (3, H, W) or (1, H, W): uint8, or float in [0, 1] (values outside
            are clipped); on any device.
        captions: As many as there are images.
        path: Its suffix names the format (``.png``). Replaced if it exists.
        columns: Images in a row.
        overlays: What is drawn on each image; as many as there are, or none.
        heading: A line above all; none if empty.

    Raises:
        DependencyError: matplotlib is not installed.
        SettingError: matplotlib does not know the format.
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
    for cell, image, overlay in zip(cells, images, overlays, strict=False):
        _draw_overlay(cell, overlay)
        # Boxes beyond the image's border must not shrink it.
        cell.set_xlim(-0.5, image.shape[-1] - 0.5)
        cell.set_ylim(image.shape[-2] - 0.5, -0.5)
    save_figure(figure, path, dots_per_inch=_DOTS_PER_INCH)


def save_figure(figure: Any, path: Path, *, dots_per_inch: int) -> None:
    """Write a figure to one file.

    Args:
        figure: Of the class that :func:`import_figure` gives.
        path: Its suffix names the format. Replaced if it exists.
        dots_per_inch: Of formats that have pixels.

    Raises:
        SettingError: There is no suffix, or matplotlib does not know the format.
        OSError: The file cannot be written.
    """
    known = figure.canvas.get_supported_filetypes()
    # Without one, matplotlib would write a file of another name.
    if path.suffix[1:].lower() not in known:
        raise SettingError(
            f"{path}: pictures cannot be written as {path.suffix!r}. Name a file such "
            f"as picture.png; its suffix is one of "
            f"{', '.join(sorted(known))}."
        )
    figure.savefig(path, dpi=dots_per_inch)


def save_bars(
    bars: Mapping[str, Sequence[float | None]],
    clusters: Sequence[str],
    path: Path,
    *,
    unit: str,
    heading: str = "",
    highlighted: Collection[str] = (),
) -> None:
    """Write a chart of horizontal bars to a picture file, one panel for each cluster.

    At most three panels stand side by side, with the same bars in the same order.

    Args:
        bars: Name of a bar, and its length in each cluster; ``None``: not measured.
        clusters: What the panels are called, as many as each bar has lengths.
        path: Its suffix names the format (``.png``). Replaced if it exists.
        unit: Of the lengths, shown below the panels.
        heading: A line above all; none if empty.
        highlighted: Names that are written bold, with bars in a colour of their own.

    Raises:
        DependencyError: matplotlib is not installed.
        SettingError: The suffix names no format that matplotlib knows.
        OSError: The file cannot be written.
    """
    names = list(bars)
    rows, columns = _rows_and_columns(len(clusters))
    height = rows * (_BAR_INCHES * len(names) + _HEADING_INCHES) + _HEADING_INCHES
    figure = import_figure()(figsize=(_PAGE_INCHES, height), layout="constrained")
    if heading:
        figure.suptitle(heading, fontsize=_HEADING_POINTS)
    figure.get_layout_engine().set(w_pad=0.1)  # Inches between panels' figures.
    cells = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels = cells.flat[: len(clusters)]
    for place, (panel, cluster) in enumerate(zip(panels, clusters, strict=True)):
        lengths = {name: values[place] for name, values in bars.items()}
        _draw_bars(panel, lengths, highlighted)
        panel.set_title(cluster, fontsize=_TEXT_POINTS)
    for panel in cells[-1]:
        panel.set_xlabel(unit, fontsize=_TEXT_POINTS)
    for panel in cells[:, 0]:
        for label, name in zip(panel.get_yticklabels(), names, strict=True):
            label.set_fontweight("bold" if name in highlighted else "normal")
    for empty in cells.flat[len(clusters) :]:
        empty.remove()
    panels[0].invert_yaxis()  # The first bar on top, as in a table; of all panels.
    save_figure(figure, path, dots_per_inch=_CHART_DOTS_PER_INCH)


def _rows_and_columns(count: int) -> tuple[int, int]:
    """Place some things in as few rows as a page is wide enough for."""
    rows = -(-count // _MOST_ACROSS)
    return rows, -(-count // rows)


def _draw_bars(
    panel: Any, lengths: Mapping[str, float | None], highlighted: Collection[str]
) -> None:
    colours = [COLOURS[0] if name in highlighted else _GREY for name in lengths]
    widths = [length or 0.0 for length in lengths.values()]
    drawn = panel.barh(list(lengths), widths, color=colours)
    labels = [
        "not measured" if one is None else f"{one:.3g}" for one in lengths.values()
    ]
    panel.bar_label(drawn, labels, padding=3, fontsize=_TEXT_POINTS)
    panel.tick_params(labelsize=_TEXT_POINTS)
    panel.tick_params(axis="y", length=0)
    panel.locator_params(axis="x", nbins=4)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.28)  # Room for the figure behind the longest bar.


def save_lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: Path,
    *,
    unit: str,
    heading: str = "",
) -> None:
    """Write a chart of lines on logarithmic axes to a picture file.

    Args:
        panels: For each quantity on the horizontal axis, the lines over it by name:
            points with both coordinates above 0. A name has one colour everywhere.
        path: Its suffix names the format (``.png``). Replaced if it exists.
        unit: Of the vertical axis, which the panels share.
        heading: A line above all; none if empty.

    Raises:
        DependencyError: matplotlib is not installed.
        SettingError: matplotlib does not know the format.
        OSError: The file cannot be written.
    """
    figure = import_figure()(
        figsize=(_PAGE_INCHES, _LINES_INCHES), layout="constrained"
    )
    if heading:
        figure.suptitle(heading, fontsize=_HEADING_POINTS)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    drawn: dict[str, Any] = {}
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (quantity, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            (drawn[name],) = axis.loglog(
                *zip(*points, strict=True), color=colour, marker="o", markersize=4
            )
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.tick_params(labelsize=_TEXT_POINTS)
        axis.minorticks_off()
        axis.set_xlabel(quantity, fontsize=_TEXT_POINTS)
        axis.grid(color="0.9")
    axes[0].set_ylabel(unit, fontsize=_TEXT_POINTS)
    axes[0].yaxis.set_major_formatter("{x:g}")
    figure.legend(
        [drawn[name] for name in names],
        names,
        loc="outside lower center",
        ncols=_rows_and_columns(len(names))[1],
        frameon=False,
        fontsize=_TEXT_POINTS,
    )
    save_figure(figure, path, dots_per_inch=_CHART_DOTS_PER_INCH)


def _draw_overlay(cell: Any, overlay: Overlay) -> None:
    if overlay.mask is not None:
        mask = overlay.mask.reshape(overlay.mask.shape[-2:]).float().cpu()
        # Not-a-number is drawn as nothing.
        cell.imshow(
            mask.where(mask != 0, torch.nan).numpy(),
            alpha=0.45,
            cmap="autumn",
            interpolation="nearest",
        )
    if overlay.corners is not None:
        for box in overlay.corners.cpu():
            x, y = torch.cat((box, box[:1])).unbind(-1)
            cell.plot(x.numpy(), y.numpy(), color="lime", linewidth=1.2)
    if overlay.keypoints is not None:
        x, y = overlay.keypoints.cpu().unbind(-1)
        cell.plot(x.numpy(), y.numpy(), "o", color="cyan", markersize=3)


def _to_pixels(image: torch.Tensor) -> Any:
    """Turn (C, H, W) into a NumPy array of (H, W, 3) or (H, W), in [0, 1]."""
    unit = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    return unit.clamp(0, 1).movedim(0, -1).squeeze(-1).cpu().numpy()
