"""What does ``python -m gpuprefetch show`` draw?

What a transform does to pictures: each original, and several samples of it beside it,
with masks, boxes and keypoints where they are given.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpuprefetch.cli.arguments import at_least, available_device
from gpuprefetch.cli.labels import Labels, read_image, read_labels
from gpuprefetch.cli.objects import CommandError, load_transform, running_user_code
from gpuprefetch.loader import StreamPrefetchLoader
from gpuprefetch.plot import Overlay, import_figure, save_grid
from gpuprefetch.plural import counted

__all__ = ["add_to"]

_DESCRIPTION = """\
Draws what a transform does: each image, and beside it several samples that come out of
StreamPrefetchLoader(..., transform=T). Masks, boxes and keypoints follow if T is an
AugmentationSequential of Kornia's with data_keys, and are drawn."""

_EXAMPLES = """\
examples:
  python -m gpuprefetch show train:augment cat.jpg dog.jpg --out grid.png
      with train.py in this folder
  python -m gpuprefetch show aug.py:chain cat.jpg --labels labels.json --samples 6
      where labels.json holds, in pixels:
      {"cat.jpg": {"boxes": [[left, top, right, bottom]], "keypoints": [[x, y]],
                   "mask": "cat-mask.png"}}

exit codes: 0 drawn; 2 it could not be drawn; 130 Ctrl-C
"""


def add_to(commands: Any) -> None:
    """Add the command and its options to argparse's sub-parsers."""
    parser = commands.add_parser(
        "show",
        help="draw what a transform does to pictures",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("transform", metavar="MODULE:T", help="what to draw")
    parser.add_argument(
        "images", nargs="+", type=Path, metavar="IMAGE", help="JPEG, PNG or the like"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("grid.png"),
        metavar="FILE",
        help="the picture to write; its suffix is the format (default: %(default)s)",
    )
    parser.add_argument(
        "--labels", type=Path, metavar="JSON", help="masks, boxes and keypoints"
    )
    parser.add_argument(
        "--samples",
        type=at_least(1),
        default=4,
        metavar="N",
        help="samples of each image (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another one draws others (default: 0)"
    )
    parser.add_argument(
        "--device",
        type=available_device,
        help="where to run it (default: the accelerator if there is one)",
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    # What the last step needs is asked for first.
    import_figure()
    transform = load_transform(options.transform)
    all_labels = read_labels(options.labels)
    drawn: list[torch.Tensor] = []
    captions: list[str] = []
    overlays: list[Overlay] = []
    for path in options.images:
        image = read_image(path)
        labels = all_labels.get(str(path), all_labels.get(path.name, Labels()))
        samples, sample_overlays = _draw_samples(transform, image, labels, options)
        drawn += [image, *map(_visible, samples)]
        captions += [path.name, *(f"sample {i + 1}" for i in range(options.samples))]
        overlays += [labels.overlay(), *sample_overlays]
    save_grid(
        drawn,
        captions,
        options.out,
        columns=1 + options.samples,
        overlays=overlays,
        heading=options.transform,
    )
    images, samples = len(options.images), options.samples
    print(f"{counted(images, 'image')}, {counted(samples, 'sample')} each: ", end="")
    print(options.out)
    return 0


def _draw_samples(
    transform: Callable[..., Any],
    image: torch.Tensor,
    labels: Labels,
    options: argparse.Namespace,
) -> tuple[torch.Tensor, list[Overlay]]:
    """Run copies of one image through the loader.

    Returns:
        (samples, C, h, w), on the CPU, and what belongs to each.
    """
    keys = _label_keys(transform, labels)
    parts = [image, *(_label_for(key, labels) for key in keys)]
    batch = tuple(
        part.expand(options.samples, *part.shape).contiguous() for part in parts
    )
    with running_user_code(f"{options.transform} failed"):
        (result,) = StreamPrefetchLoader(
            [batch],
            transform,
            inputs=tuple(range(len(batch))) if keys else 0,
            device=options.device,
            seed=options.seed,
        )
    samples, *moved = (_to_cpu(part) for part in result)
    if not _are_images(samples, options.samples):
        raise CommandError(
            f"{options.transform} gives no batch of images of (N, C, H, W), with "
            f"N = {options.samples} and C of 1, 3 or 4, but {_describe(samples)}."
        )
    overlays = [
        Labels.overlay_of(keys, [label[place] for label in moved])
        for place in range(len(samples))
    ]
    return samples, overlays


def _label_keys(transform: Callable[..., Any], labels: Labels) -> list[str]:
    """Name the labels that a transform takes after the image.

    Raises:
        CommandError: Labels are given that it does not take.
    """
    data_keys = getattr(transform, "data_keys", None) or ()
    keys = [str(getattr(key, "name", key)).lower() for key in data_keys][1:]
    taken = {"boxes" if key.startswith("bbox") else key for key in keys}
    left = [name for name in labels.names() if name not in taken]
    if left:
        wanted = {"boxes": "bbox_xyxy", "keypoints": "keypoints", "mask": "mask"}
        example = ["input", *(wanted[name] for name in left)]
        raise CommandError(
            f"the transform would leave the {left[0]} where they are. Make it Kornia's "
            f"AugmentationSequential(..., data_keys={example})."
        )
    return keys


def _label_for(key: str, labels: Labels) -> torch.Tensor:
    label = labels.for_key(key)
    if label is None:
        raise CommandError(
            f"the transform takes {key!r} with each image. Give it in --labels, for "
            "every image."
        )
    return label


def _are_images(samples: Any, num_samples: int) -> bool:
    if not isinstance(samples, torch.Tensor) or samples.ndim != 4:
        return False
    is_one_each = len(samples) == num_samples and samples.numel() > 0
    return is_one_each and samples.shape[1] in (1, 3, 4) and not samples.is_complex()


def _to_cpu(part: Any) -> Any:
    return part.detach().cpu() if isinstance(part, torch.Tensor) else part


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}, {value.dtype}"
    return f"a {type(value).__name__}"


def _visible(image: torch.Tensor) -> torch.Tensor:
    """Stretch a normalized image to [0, 1], so that it can be seen."""
    if not image.is_floating_point():
        return image
    low, high = image.min(), image.max()
    if low >= -0.01 and high <= 1.01:
        return image
    return (image - low) / (high - low).clamp(min=1e-6)
