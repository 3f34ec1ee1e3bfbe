"""Part 1 of the seed: a frozen encoder and a trained decoder, for segmentation.

The seed leaves the architecture out. Here the encoder is torchvision's ResNet-18
without its head, with random weights, in evaluation mode: (B, 3, 256, 256) to (B, 512,
8, 8). The decoder doubles height and width five times by transposed convolutions with
2x2 kernels (512, 128, 64, 32, 16, 10 channels), ReLU between them; cross-entropy over
ten classes for each pixel, SGD.

The bound is the decoder alone on features that lie on the device: as if encoding were
free, which it is not, so no pipeline reaches it once the GPU is full.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import pipelines
from benchmarks.loops import Trainer, no_step
from benchmarks.markdown import costs_table, speeds_table
from benchmarks.pipelines import Pair
from benchmarks.plots import draw_speeds
from benchmarks.record import Record
from benchmarks.seed import (
    EncoderDecoderLoop,
    ImagesAndMasks,
    build_decoder,
    build_encoder,
    make_loader,
)
from benchmarks.suite import Group, Place, Promise, Suite
from benchmarks.suites.shared import LastingStep, over
from gpuprefetch.augment.graphed import GraphedTransform

__all__ = ["SUITE", "groups"]

IN_MEMORY = "in memory"
_PROMISED_SIZE = 8

BOUND = "bound: decoder alone, features on the device"
ENCODER = "encoder alone"
SERIAL = "serial"
PIPELINED = "seed, pipelined"
OURS = "ours, transform=encoder"
GRAPHED_SERIAL = "encoder as a CUDA graph, serial"
GRAPHED_BY_HAND = "encoder as a CUDA graph, one ahead by hand"
GRAPHED = "ours, transform=GraphedTransform(encoder)"


class _Encode:
    """The encoder as a transform of uint8 images, and of float images.

    Args:
        encoder: On its device.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder = encoder

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W), uint8 or float, to features."""
        features: torch.Tensor = self._encoder(images.float())
        return features


def groups(place: Place) -> Iterator[Group]:
    """Give a group for each batch size in memory, and one behind a DataLoader."""
    device = place.device
    encode = _Encode(build_encoder().to(device))
    step = LastingStep(build_decoder().to(device))
    sizes = (2,) if place.is_tiny else (_PROMISED_SIZE, 2, 4, 16, 32, 64)
    for batch_size in sizes:
        yield _in_memory(place, step, encode, batch_size)
    yield _behind_workers(place, step, encode, 2 if place.is_tiny else _PROMISED_SIZE)


def _image_size(place: Place) -> int:
    return 32 if place.is_tiny else 256


class _ImagesInMemory:
    """Serves a few ready batches of images and masks, pinned where there is CUDA."""

    def __init__(self, batch_size: int, image_size: int) -> None:
        items = ImagesAndMasks(image_size)
        self._ready = []
        for _ in range(8):
            drawn = [items[0] for _ in range(batch_size)]
            leaves = [torch.stack(leaf) for leaf in zip(*drawn, strict=True)]
            if torch.cuda.is_available():
                leaves = [leaf.pin_memory() for leaf in leaves]
            self._ready.append((leaves[0], leaves[1]))

    def __iter__(self) -> Iterator[Pair]:
        return itertools.cycle(self._ready)


def _in_memory(
    place: Place, step: LastingStep, encode: _Encode, batch_size: int
) -> Group:
    device = place.device
    source = _ImagesInMemory(batch_size, _image_size(place))
    is_promised = batch_size == _PROMISED_SIZE
    images, masks = (leaf.to(device) for leaf in next(iter(source)))
    images = images.float()
    with torch.no_grad():
        features = encode(images)
    graphed = GraphedTransform(encode)

    def encoder_alone() -> Iterator[Pair]:
        while True:
            with torch.no_grad():
                encode(images)
            yield features, masks

    variants: dict[str, Trainer] = {
        BOUND: over(lambda: itertools.repeat((features, masks))),
        # Its steps train nothing.
        ENCODER: lambda step: over(encoder_alone)(no_step),
        SERIAL: over(lambda: pipelines.plain(source, device, encode)),
        PIPELINED: lambda step: EncoderDecoderLoop(source, encode, step, device),
        OURS: over(lambda: pipelines.stream_prefetch(source, device, encode)),
        GRAPHED_SERIAL: over(lambda: pipelines.plain(source, device, graphed)),
        GRAPHED_BY_HAND: over(lambda: pipelines.one_ahead(source, device, graphed)),
        GRAPHED: over(lambda: pipelines.stream_prefetch(source, device, graphed)),
    }
    return Group(
        name=IN_MEMORY,
        batch_size=batch_size,
        step=step,
        reset=step.reset,
        variants=variants,
        bound=BOUND,
        steps=2 if place.is_tiny else 60,
        warmup=1 if place.is_tiny else 6,
        rounds=1 if place.is_tiny else 3,
        fewer_rounds={} if is_promised else dict.fromkeys(variants, 2),
        promises=_promises(is_promised=is_promised),
        is_probed=is_promised or place.is_tiny,
    )


def _behind_workers(
    place: Place, step: LastingStep, encode: _Encode, batch_size: int
) -> Group:
    device = place.device
    num_workers, prefetch_factor = (1, 1) if place.is_tiny else (8, 2)
    graphed = GraphedTransform(encode)

    def load(*, pin: bool = False) -> Any:
        return make_loader(
            ImagesAndMasks(_image_size(place)),
            batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin=pin,
        )

    variants: dict[str, Trainer] = {
        SERIAL: over(lambda: pipelines.plain(load(), device, encode)),
        PIPELINED: lambda step: EncoderDecoderLoop(load(), encode, step, device),
        OURS: over(lambda: pipelines.stream_prefetch(load(), device, encode)),
        GRAPHED: over(lambda: pipelines.stream_prefetch(load(), device, graphed)),
        "plain loop, encoder left out": over(
            lambda: _without_encoder(load(pin=True), device, encode)
        ),
    }
    prefetched = num_workers * prefetch_factor + 2
    return Group(
        name=f"{num_workers} workers",
        batch_size=batch_size,
        step=step,
        reset=step.reset,
        variants=variants,
        bound="plain loop, encoder left out",
        steps=2 if place.is_tiny else 10 * prefetched,
        warmup=1 if place.is_tiny else prefetched,
        rounds=1,
        promises=[Promise("graphed encoder / seed pipelined", GRAPHED, PIPELINED)],
        is_probed=False,
        extra={
            "workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "prefetched_batches": prefetched,
        },
    )


def _without_encoder(
    source: Any, device: torch.device, encode: _Encode
) -> Iterator[Pair]:
    """Copy each batch, and give the features of the first instead of encoding."""
    features: torch.Tensor | None = None
    for images, masks in pipelines.plain(source, device):
        if features is None:
            with torch.no_grad():
                features = encode(images)
        yield features, masks


def _promises(*, is_promised: bool) -> list[Promise]:
    target = {"at_least": 2.0, "aim": 2.3} if is_promised else {}
    return [
        Promise("graphed encoder / seed pipelined", GRAPHED, PIPELINED, **target),
        Promise("graphed by hand / seed pipelined", GRAPHED_BY_HAND, PIPELINED),
        Promise("ours, encoder as it is / seed pipelined", OURS, PIPELINED),
        Promise("seed pipelined / serial", PIPELINED, SERIAL),
    ]


def _tables(record: Record) -> dict[str, str]:
    names = dict.fromkeys(case.group for case in record.cases)
    probed = [case for case in record.cases if case.host_ms is not None]
    tables = {
        "seed-encoder-decoder": "\n\n".join(
            f"**{name}**\n\n{speeds_table(record, name)}" for name in names
        ),
        "readme-encoder": speeds_table(record, IN_MEMORY, names=_SHOWN),
    }
    if probed:
        size = probed[0].batch_size
        tables["seed-encoder-decoder-costs"] = costs_table(record, IN_MEMORY, size)
    return tables


_SHOWN = (SERIAL, PIPELINED, OURS, GRAPHED_SERIAL, GRAPHED_BY_HAND, GRAPHED, BOUND)


def _plots(record: Record, folder: Path) -> None:
    draw_speeds(
        record,
        folder / "seed-encoder-decoder.png",
        group=IN_MEMORY,
        names=_SHOWN,
        heading="A frozen encoder before a decoder that is trained, steps/s",
    )


SUITE = Suite(
    name="seed-encoder-decoder",
    title="the seed's part 1: a frozen encoder before a trained decoder",
    budget_s=60.0,
    groups=groups,
    tables=_tables,
    plots=_plots,
)
