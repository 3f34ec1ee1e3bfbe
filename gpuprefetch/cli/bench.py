"""What does ``python -m gpuprefetch bench`` show?

The same as ``probe``, of a loop that needs no data: noise images in memory, a chain of
Kornia augmentations, and a convolutional model.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from gpuprefetch.cli.probe import add_effort, effort_of, show_probe
from gpuprefetch.probe import probe
from gpuprefetch.settings import resolve_device
from gpuprefetch.workloads import TrainingStep, build_model, kornia_chain

__all__ = ["add_to"]

_DESCRIPTION = """\
Trains a convolutional model on noise images from memory: crop, resize, rotate, blur and
normalize by Kornia in the plain loop, and the same behind StreamPrefetchLoader, in
turns. About a minute. There is no dataset, so what is left is the pipeline itself."""

_EXAMPLES = """\
examples:
  python -m gpuprefetch bench
      everything chosen for this machine
  python -m gpuprefetch bench --device cuda:1 --json > bench.json
      a second GPU, for a program to read
"""

_NUM_READY = 8
_NUM_CLASSES = 8


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is trained on."""

    batch_size: int
    image_size: int


def add_to(commands: Any) -> None:
    """Add the command and its options to argparse's sub-parsers."""
    parser = commands.add_parser(
        "bench",
        help="a short benchmark that needs no data",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_effort(parser)
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    device = resolve_device(options.device)
    sizes = _Sizes(32, 256) if device.type != "cpu" else _Sizes(8, 64)
    torch.manual_seed(0)
    model = build_model(sizes.image_size, _NUM_CLASSES).to(device).train()
    # A rate of 0 does the same work, and numbers stay as they are: how fast arithmetic
    # is, and what power it takes, depends on them.
    train = TrainingStep(model, learning_rate=0.0)
    result = probe(
        _ready_batches(sizes, pin=device.type == "cuda"),
        lambda batch: train(*batch),
        kornia_chain(sizes.image_size),
        device=device,
        effort=effort_of(options),
    )
    show_probe(result, as_json=options.json)
    return 0


def _ready_batches(sizes: _Sizes, *, pin: bool) -> list[Any]:
    """Make a pass of 32 batches out of a few in memory: (images, labels)."""
    shape = (sizes.batch_size, 3, sizes.image_size, sizes.image_size)
    ready = []
    for _ in range(_NUM_READY):
        images = torch.randint(0, 256, shape, dtype=torch.uint8)
        labels = torch.arange(sizes.batch_size) % _NUM_CLASSES
        pair = (images, labels)
        ready.append(tuple(t.pin_memory() for t in pair) if pin else pair)
    return ready * 4
