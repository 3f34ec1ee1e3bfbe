"""What does ``python -m gpuprefetch demo`` show?

Steps a second of one training job behind three input pipelines, and a picture of what
the augmentation does to one photograph.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpuprefetch.cli.arguments import at_least, available_device
from gpuprefetch.cli.comparison import (
    DemoSizes,
    PipelineResult,
    compare,
    default_sizes,
)
from gpuprefetch.cli.table import format_table
from gpuprefetch.cores import count_cores
from gpuprefetch.loader import StreamPrefetchLoader
from gpuprefetch.plot import import_figure, save_grid
from gpuprefetch.plural import counted
from gpuprefetch.settings import resolve_device
from gpuprefetch.workloads import (
    PHOTOGRAPHS,
    SMALLEST_IMAGE,
    kornia_chain,
    load_photograph,
)

__all__ = ["add_to"]

_PICTURE_NAME = "augmentations.png"
_PICTURE_IMAGE_SIZE = 256  # Pixels; also when the training runs on smaller ones.
_PICTURE_PHOTOGRAPH = "chelsea"
_PICTURE_COUNT = 15

# Wrapped here: the formatter that keeps the examples' lines keeps these, too.
_DESCRIPTION = f"""\
Trains a small model on real photographs behind (a) a plain DataLoader that augments
in its workers, (b) a plain DataLoader with Kornia on the device, one after the other,
and (c) StreamPrefetchLoader. Prints steps a second and writes {_PICTURE_NAME}."""

_EXAMPLES = """\
examples:
  python -m gpuprefetch demo
      everything chosen for this machine
  python -m gpuprefetch demo --device cuda:1 --batch-size 64 --workers 12
      a second GPU, larger batches
  python -m gpuprefetch demo --device cpu --image-size 32 --batches 5
      a quick look
"""

_NO_OVERLAP = """\
No overlap is to be expected here: on this device augmentation and training take turns.
What is left between (b) and (c) is the way in which the augmentation is computed, and
the noise of this machine, easily 10 to 15 %. Run the same command on a machine with a
CUDA GPU to see what overlap gives."""


def add_to(commands: Any) -> None:
    """Add the command and its options to argparse's sub-parsers."""
    parser = commands.add_parser(
        "demo",
        help="train on real photographs behind three input pipelines",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        type=available_device,
        help="where to train, for example cuda:0 or cpu (default: the accelerator if "
        "there is one)",
    )
    _add_number(parser, "--batch-size", 1, "images in a batch")
    _add_number(
        parser,
        "--image-size",
        SMALLEST_IMAGE,
        "height and width of an image in pixels",
    )
    _add_number(parser, "--batches", 1, "batches on the clock in each round")
    _add_number(parser, "--workers", 0, "worker processes of the DataLoader")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder for the picture, made if it is missing (default: %(default)s)",
    )
    parser.set_defaults(command=_run)


def _add_number(
    parser: argparse.ArgumentParser, option: str, smallest: int, help_text: str
) -> None:
    parser.add_argument(
        option,
        type=at_least(smallest),
        metavar="N",
        help=f"{help_text} (default: chosen for this machine)",
    )


def _run(options: argparse.Namespace) -> int:
    # What the last step needs is asked for first, so that nothing is trained in vain.
    import_figure()
    options.out.mkdir(parents=True, exist_ok=True)
    device = resolve_device(options.device)
    sizes = _choose_sizes(options, device)
    print(_describe(sizes, device), flush=True)
    comparison = compare(sizes, device)
    print(_format_results(comparison.results, sizes.num_rounds))
    print(f"\nWhat (c) says of its last round:\n{comparison.report}")
    if device.type not in ("cuda", "xpu"):
        print(f"\n{_NO_OVERLAP}")
    path = options.out / _PICTURE_NAME
    _draw_augmentations(path, device)
    print(f"\nOne photograph and {_PICTURE_COUNT} of its augmentations: {path}")
    return 0


def _choose_sizes(options: argparse.Namespace, device: torch.device) -> DemoSizes:
    chosen = default_sizes(device)

    def pick(given: int | None, default: int) -> int:
        return default if given is None else given

    return DemoSizes(
        batch_size=pick(options.batch_size, chosen.batch_size),
        image_size=pick(options.image_size, chosen.image_size),
        num_batches=pick(options.batches, chosen.num_batches),
        num_workers=pick(options.workers, chosen.num_workers),
    )


def _describe(sizes: DemoSizes, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return (
        f"Training on {name}, {count_cores()} CPU cores, torch "
        f"{torch.__version__}\n"
        f"{len(PHOTOGRAPHS)} photographs cut to {sizes.image_size} x "
        f"{sizes.image_size}, batches of {sizes.batch_size}, "
        f"{counted(sizes.num_workers, 'worker')}, "
        f"{counted(sizes.num_rounds, 'round')} of "
        f"{counted(sizes.num_batches, 'batch')} on the clock\n"
        "crop, resize, rotate, blur, normalize: drawn anew for every image\n"
    )


def _format_results(results: Sequence[PipelineResult], num_rounds: int) -> str:
    bound, base = results[0].steps_per_s, results[1].steps_per_s
    rows = [
        (
            result.label,
            f"{result.steps_per_s:.1f}",
            f"{result.steps_per_s / base:.2f}",
            f"{result.steps_per_s / bound:.0%}",
            "{:.2f} -> {:.2f}".format(*result.losses) if result.losses else "-",
        )
        for result in results
    ]
    header = ("input pipeline", "steps/s", "x of (a)", "of the step alone", "mean loss")
    losses = [loss for result in results for loss in result.losses or ()]
    note = (
        ""
        if all(map(math.isfinite, losses))
        else "\nA loss is not finite: do not trust these numbers."
    )
    rounds = f"Steps a second: the median of {counted(num_rounds, 'round')}, in turns"
    return f"{rounds}\n\n{format_table(header, rows)}{note}"


def _draw_augmentations(path: Path, device: torch.device) -> None:
    """Send copies of one photograph through the loader and draw what comes back."""
    size = _PICTURE_IMAGE_SIZE
    photograph = _middle_square(load_photograph(_PICTURE_PHOTOGRAPH), size)
    copies = photograph.expand(_PICTURE_COUNT, -1, -1, -1).contiguous()
    chain = kornia_chain(size)
    with StreamPrefetchLoader([copies], chain, device=device, seed=0) as loader:
        (augmented,) = loader
    numbers = [f"augmentation {number + 1}" for number in range(_PICTURE_COUNT)]
    save_grid(
        [photograph, *augmented],
        ["the photograph", *numbers],
        path,
        heading="One batch from StreamPrefetchLoader: crop, resize, rotate, blur",
    )


def _middle_square(image: torch.Tensor, size: int) -> torch.Tensor:
    """Cut (3, size, size) from the middle of a larger (3, H, W) image."""
    top, left = ((extent - size) // 2 for extent in image.shape[-2:])
    return image[:, top : top + size, left : left + size]
