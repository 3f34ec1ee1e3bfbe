"""How are the two experiments of the seed written down?

The *seed* is an article, "Pipelining AI/ML Training Workloads with CUDA Streams". Its
loops and data sets are made here after its description, with its order of calls and its
streams, so that its figures can be had on this machine. Where that is not safe it is
kept, and said: only the speed of these loops is read.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

from benchmarks.loops import Step
from benchmarks.pipelines import NUM_CLASSES, Pair, Transform, side_stream

__all__ = [
    "EncoderDecoderLoop",
    "ImagesAndLabels",
    "ImagesAndMasks",
    "TwoStreamLoop",
    "build_decoder",
    "build_encoder",
    "make_loader",
]


# Data #


class ImagesAndLabels(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noise images, each drawn when asked for, with a label of shape (1,).

    Args:
        image_size: Height and width, in pixels.
        transform: Called on the (3, H, W) uint8 image, in the worker.
    """

    def __init__(self, image_size: int, transform: nn.Module | None = None) -> None:
        self._shape = (3, image_size, image_size)
        self._transform = transform

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.randint(0, 256, self._shape, dtype=torch.uint8)
        label = torch.randint(0, NUM_CLASSES, (1,))
        return image if self._transform is None else self._transform(image), label


class ImagesAndMasks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noise images, each with a class for every pixel: (H, W), int64."""

    def __init__(self, image_size: int) -> None:
        self._size = (image_size, image_size)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.randint(0, 256, (3, *self._size), dtype=torch.uint8)
        return image, torch.randint(0, NUM_CLASSES, self._size)


def make_loader(
    dataset: Dataset[Pair],
    batch_size: int,
    *,
    num_workers: int,
    prefetch_factor: int,
    pin: bool,
) -> DataLoader[Any]:
    """Build a DataLoader; nothing is pinned where there is no CUDA."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin and torch.cuda.is_available(),
    )


# Models of the first experiment, which the seed leaves out #


def build_encoder() -> nn.Module:
    """Build a frozen ResNet-18 without its head, with random weights.

    Returns:
        A module from (B, 3, H, W), float, to (B, 512, H / 32, W / 32).
    """
    layers = list(resnet18(weights=None).children())[:-2]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def build_decoder() -> nn.Module:
    """Build five transposed convolutions that each double height and width.

    Channels: 512, 128, 64, 32, 16, 10; 2x2 kernels with stride 2, ReLU between them.

    Returns:
        A module from (B, 512, h, w) to (B, 10, 32 h, 32 w): a score for each class.
    """
    widths = (512, 128, 64, 32, 16, NUM_CLASSES)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.ConvTranspose2d(before, after, 2, stride=2), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Loops #


class TwoStreamLoop:
    """Trains on batch n on one stream, while batch n+1 is transformed on another.

    The transformed images are recorded on the stream that made them, not on the one
    that reads them, so that their memory may be used again too early.

    Args:
        source: Batches on the host.
        transform: From uint8 images on the device to what the model takes.
        step: Called within the model's stream.
        device: Off CUDA there is one stream, and all is done in order.
    """

    pinned_bytes = 0

    def __init__(
        self,
        source: Iterable[Pair],
        transform: Transform,
        step: Step,
        device: torch.device,
    ) -> None:
        self._batches = iter(source)
        self._transform = transform
        self._step = step
        self._device = device
        self._transform_stream = side_stream(device)
        self._model_stream = side_stream(device)
        # Of the batch before, and not yet trained on.
        self._waiting: Pair | None = None

    def advance(self) -> None:
        """Train on the batch before, and issue the transform of this one."""
        images, labels = next(self._batches)
        if self._waiting is not None:
            transformed, labels_before = self._waiting
            with torch.cuda.stream(self._model_stream):
                labels_before = labels_before.to(self._device, non_blocking=True)
                wait(self._model_stream, self._transform_stream)
                self._step(transformed, labels_before)
        with torch.cuda.stream(self._transform_stream):
            images = images.to(self._device, non_blocking=True)
            transformed = self._transform(images)
            if self._transform_stream is not None:
                transformed.record_stream(self._transform_stream)
        self._waiting = transformed, labels

    def close(self) -> None:
        """Drop the source's iterator, which ends its workers."""
        del self._batches, self._waiting


class EncoderDecoderLoop:
    """Trains the decoder on batch n on one stream, and encodes n+1 on another.

    The copies are issued on the loop's own stream, and the encoder's stream does not
    wait for them.

    Args:
        source: Batches on the host.
        encode: From float images on the device to features.
        step: Called with features and masks within the decoder's stream.
        device: Off CUDA there is one stream, and all is done in order.
    """

    pinned_bytes = 0

    def __init__(
        self,
        source: Iterable[Pair],
        encode: Transform,
        step: Step,
        device: torch.device,
    ) -> None:
        self._batches = iter(source)
        self._encode = encode
        self._step = step
        self._device = device
        self._encoder_stream = side_stream(device)
        self._decoder_stream = side_stream(device)
        self._waiting: Pair | None = None

    def advance(self) -> None:
        """Train on the features before, and issue the encoding of this batch."""
        images, masks = next(self._batches)
        images = images.to(self._device, non_blocking=True).float()
        masks = masks.to(self._device, non_blocking=True)
        if self._waiting is not None:
            with torch.cuda.stream(self._decoder_stream):
                wait(self._decoder_stream, self._encoder_stream)
                self._step(*self._waiting)
        with torch.cuda.stream(self._encoder_stream):
            with torch.no_grad():
                features = self._encode(images)
            if self._encoder_stream is not None:
                features.record_stream(self._encoder_stream)
        self._waiting = features, masks

    def close(self) -> None:
        """Drop the source's iterator, which ends its workers."""
        del self._batches, self._waiting


def wait(waiting: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
    """Let one stream wait for all that was issued on another."""
    if waiting is not None and other is not None:
        waiting.wait_stream(other)
