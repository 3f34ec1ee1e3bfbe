"""Does training through the loader come to the same end as training without it?

Digits are learnt from upright scans and read upright and rotated, by the same small
network, over five seeds: through a plain DataLoader with Kornia in the loop, through
the loader with Kornia as it is, and through the loader with the fused chain.
"""

import functools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment import fuse
from gpuprefetch.digits import (
    DEGREES,
    accuracy,
    build_digit_model,
    load_digits,
    rotate_digits,
)

pytestmark = pytest.mark.timeout(180)

SEEDS = range(5)
NUM_EPOCHS = 6
BATCH_SIZE = 60

# Standard errors by which two means over five seeds may differ. By chance alone they do
# so in about one of 500 comparisons, and the seeds are fixed.
MOST_ERRORS = 4.0
# However much the seeds scatter, a larger difference would be a fault.
MOST_DIFFERENCE = 0.03

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Pipeline = Callable[[DataLoader[Any]], Batches]


digits = functools.cache(load_digits)


def to_unit(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 255


# Pipelines #


class PlainLoop:
    """Kornia in the loop: what one writes without the loader."""

    def __init__(self, source: DataLoader[Any], augment: nn.Module) -> None:
        self.source, self.augment = source, augment

    def __iter__(self) -> Any:
        for images, labels in self.source:
            yield self.augment(to_unit(images)), labels


def rotation() -> nn.Module:
    return K.RandomRotation(DEGREES, p=1.0)


def plain(source: DataLoader[Any]) -> Batches:
    return PlainLoop(source, rotation())


def unfused(source: DataLoader[Any]) -> Batches:
    augment = rotation()
    # Inside a function Kornia is not seen, so it runs as it is.
    return StreamPrefetchLoader(
        source, lambda images: augment(to_unit(images)), device="cpu"
    )


def fused(source: DataLoader[Any]) -> Batches:
    return StreamPrefetchLoader(source, fuse(rotation()), device="cpu")


def without_augmentation(source: DataLoader[Any]) -> Batches:
    return StreamPrefetchLoader(source, to_unit, device="cpu")


# Pipelines with a fault #


class LateLabels:
    """Gives every fourth batch the labels of the batch before it."""

    def __init__(self, source: DataLoader[Any]) -> None:
        self.source = source

    def __iter__(self) -> Any:
        before = None
        for number, (images, labels) in enumerate(self.source):
            is_late = number % 4 == 3
            yield to_unit(images), before if is_late else labels
            before = labels


def late_labels(source: DataLoader[Any]) -> Batches:
    return StreamPrefetchLoader(LateLabels(source), rotation(), device="cpu")


# Training #


@dataclass(frozen=True)
class Learnt:
    """Accuracies of one pipeline, one for each seed, in [0, 1]."""

    upright: tuple[float, ...]
    rotated: tuple[float, ...]


@functools.cache
def learnt(pipeline: Pipeline) -> Learnt:
    """Train through a pipeline, once with each seed."""
    pairs = [train(pipeline, seed) for seed in SEEDS]
    upright, rotated = zip(*pairs, strict=True)
    return Learnt(upright, rotated)


def train(pipeline: Pipeline, seed: int) -> tuple[float, float]:
    """Train with one seed; give the accuracy on upright and on rotated digits."""
    torch.manual_seed(seed)
    model = build_digit_model()
    batches = pipeline(DataLoader(digits("train"), BATCH_SIZE, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=NUM_EPOCHS * 20
    )
    for _ in range(NUM_EPOCHS):
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    scans, labels = digits("test").tensors
    return accuracy(model, scans, labels), accuracy(model, rotate_digits(scans), labels)


def assert_same_end(one: tuple[float, ...], other: tuple[float, ...]) -> None:
    """Tell apart two means over seeds that differ by more than the seeds scatter."""
    difference = abs(statistics.mean(one) - statistics.mean(other))
    variances = statistics.variance(one) + statistics.variance(other)
    error = (variances / len(one)) ** 0.5
    limit = min(MOST_ERRORS * error, MOST_DIFFERENCE)
    assert difference <= limit, f"{one} against {other}: {difference:.4f} > {limit:.4f}"


@pytest.mark.parametrize("pipeline", [unfused, fused])
def test_training_comes_to_the_same_end_as_the_plain_loop(pipeline: Pipeline) -> None:
    assert_same_end(learnt(pipeline).rotated, learnt(plain).rotated)
    assert_same_end(learnt(pipeline).upright, learnt(plain).upright)


@pytest.mark.parametrize("pipeline", [plain, unfused, fused])
def test_augmentation_teaches_to_read_rotated_digits(pipeline: Pipeline) -> None:
    assert min(learnt(pipeline).rotated) > 0.8
    assert max(learnt(without_augmentation).rotated) < 0.72


def test_the_digits_can_be_learnt_upright() -> None:
    assert min(learnt(without_augmentation).upright) > 0.88


@pytest.mark.parametrize("pipeline", [late_labels, without_augmentation])
def test_meta_a_pipeline_with_a_fault_is_seen(pipeline: Pipeline) -> None:
    with pytest.raises(AssertionError, match="against"):
        assert_same_end(learnt(pipeline).rotated, learnt(plain).rotated)
