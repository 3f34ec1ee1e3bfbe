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
            pixels = _mask_of(upright, path) if is_mask else _colours_of(upright)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CommandError(f"{path} is no picture that can be read: {error}") from error
    return torch.from_numpy(pixels.astype(numpy.uint8))


def _colours_of(picture: Image.Image) -> Any:
    """Give (3, H, W), in [0, 255]."""
    if picture.mode[0] not in "IF":
        return numpy.array(picture.convert("RGB")).transpose(2, 0, 1)
    # Pillow would clip at 255 what has more than 8 bits.
    grey = numpy.array(picture, dtype=numpy.float64)
    if picture.mode[0] == "F" or grey.min() < 0 or grey.max() > 0xFFFF:
        grey = numpy.nan_to_num(grey)
        grey -= grey.min()
        grey *= 0xFFFF / max(grey.max(), 1e-30)
    elif grey.max() <= 0xFF and picture.mode == "I":
        grey *= 0x101
    return numpy.broadcast_to(grey / 0x101, (3, *grey.shape))


def _mask_of(picture: Image.Image, path: Path) -> Any:
    """Give (1, H, W): the numbers in the file, a palette's too."""
    keeps_numbers = picture.mode in ("1", "L", "P") or picture.mode[0] == "I"
    numbers = numpy.array(picture if keeps_numbers else picture.convert("L"))
    if numbers.max() > 0xFF:
        raise CommandError(
            f"{path} has the number {numbers.max()}. A mask has numbers up to 255."
        )
    return numbers[None]


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
    if not isinstance(mask, str | None):
        raise CommandError(f"the mask of {name} is {mask!r}, and no name of a file.")
    read = None if mask is None else read_image(folder / mask, is_mask=True)
    return Labels(numbers.get("boxes"), numbers.get("keypoints"), read)
