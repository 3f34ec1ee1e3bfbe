"""How are masks, boxes and keypoints read for ``show``, and brought into the form that
each of Kornia's ``data_keys`` wants, and back?

The file is JSON: for each image, by its name or its path as given, an object with some
of ``"boxes": [[left, top, right, bottom], ...]``, ``"keypoints": [[x, y], ...]`` and
``"mask": "file.png"``, in pixels. A box's last pixel belongs to it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageOps

from gpuprefetch.cli.objects import CommandError
from gpuprefetch.plot import Overlay

__all__ = ["Labels", "read_image", "read_labels"]

_BOX_KEYS = ("bbox", "bbox_xyxy", "bbox_xywh")


@dataclass(frozen=True, slots=True)
class Labels:
    """What belongs to one image; on the CPU."""

    boxes: torch.Tensor | None = None
    """(N, 4), float32: left, top, right, bottom."""
    keypoints: torch.Tensor | None = None
    """(N, 2), float32: x, y."""
    mask: torch.Tensor | None = None
    """(1, H, W), uint8."""

    def for_key(self, key: str) -> torch.Tensor | None:
        """Give the label of one sample as a data key wants it; ``None``: not given."""
        if key == "mask":
            return self.mask
        if key == "keypoints":
            return self.keypoints
        if key not in _BOX_KEYS or self.boxes is None:
            return None
        return _boxes_as(key, self.boxes)

    def names(self) -> list[str]:
        """Name what is given."""
        return [
            n for n in ("boxes", "keypoints", "mask") if getattr(self, n) is not None
        ]

    def overlay(self) -> Overlay:
        """Give these as something to draw."""
        corners = None if self.boxes is None else _boxes_as("bbox", self.boxes)
        return Overlay(corners, self.keypoints, self.mask)

    @staticmethod
    def overlay_of(keys: Sequence[str], labels: Sequence[torch.Tensor]) -> Overlay:
        """Give one sample's labels, as the transform returned them, to be drawn."""
        boxes = keypoints = mask = None
        for key, label in zip(keys, labels, strict=True):
            if key == "mask":
                mask = label
            elif key == "keypoints":
                keypoints = label
            else:
                boxes = _corners_from(key, label)
        return Overlay(boxes, keypoints, mask)


def _boxes_as(key: str, boxes: torch.Tensor) -> torch.Tensor:
    left, top, right, bottom = boxes.unbind(-1)
    if key == "bbox_xyxy":
        return boxes
    if key == "bbox_xywh":
        return torch.stack((left, top, right - left + 1, bottom - top + 1), -1)
    corners = ((left, top), (right, top), (right, bottom), (left, bottom))
    return torch.stack([torch.stack(corner, -1) for corner in corners], -2)


def _corners_from(key: str, boxes: torch.Tensor) -> torch.Tensor:
    """Give (N, 4, 2) corners of boxes in the form of a data key."""
    if key == "bbox":
        return boxes
    left, top, third, fourth = boxes.unbind(-1)
    if key == "bbox_xywh":
        third, fourth = left + third - 1, top + fourth - 1
    return _boxes_as("bbox", torch.stack((left, top, third, fourth), -1))


# Files #


def read_image(path: Path, *, is_mask: bool = False) -> torch.Tensor:
    """Read a picture.

    Returns:
        (3, H, W), or (1, H, W) for a mask; uint8.

    Raises:
        CommandError: There is no such file, or it is no picture.
    """
    if not path.is_file():
        raise CommandError(f"there is no file {path}.")
    try:
        with Image.open(path) as opened:
            # As a viewer shows it: cameras note how they were held.
            upright = ImageOps.exif_transpose(opened)
            # The numbers of a palette's colours are what a mask means.
            keeps_numbers = is_mask and upright.mode in ("1", "L", "P")
            wanted = "L" if is_mask else "RGB"
            picture = upright if keeps_numbers else upright.convert(wanted)
            pixels = torch.from_numpy(numpy.array(picture, dtype=numpy.uint8))
    except OSError as error:
        raise CommandError(f"{path} is no picture that can be read.") from error
    return pixels[None] if is_mask else pixels.permute(2, 0, 1).contiguous()


def read_labels(path: Path | None) -> dict[str, Any]:
    """Read the file of labels; without one there are none.

    Raises:
        CommandError: It is not of the form that the module's docstring describes.
    """
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CommandError(
            f"{path} holds a {type(found).__name__}. It should hold an object whose "
            "keys are names of images."
        )
    folder = path.parent
    return {name: _read_entry(name, entry, folder) for name, entry in found.items()}


def _read_entry(name: str, entry: Any, folder: Path) -> Labels:
    known = {"boxes": 4, "keypoints": 2}
    unknown = set(entry) - {*known, "mask"} if isinstance(entry, dict) else {"it"}
    if unknown:
        raise CommandError(
            f"the labels of {name} have {sorted(unknown)}. Known are boxes, keypoints "
            "and mask."
        )
    numbers: dict[str, torch.Tensor] = {}
    for kind, width in known.items():
        if kind not in entry:
            continue
        try:
            rows = torch.tensor(entry[kind], dtype=torch.float32).reshape(-1, width)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CommandError(
                f"the {kind} of {name} are not a list of {width} numbers each."
            ) from error
        numbers[kind] = rows
    mask = entry.get("mask")
    read = None if mask is None else read_image(folder / mask, is_mask=True)
    return Labels(numbers.get("boxes"), numbers.get("keypoints"), read)
