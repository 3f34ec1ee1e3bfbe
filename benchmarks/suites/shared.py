"""What do several suites need to put their groups together?"""

from collections.abc import Callable, Iterator

import torch

from benchmarks import pipelines
from benchmarks.loops import Over, Step, Trainer
from benchmarks.pipelines import Pair
from gpuprefetch import workloads

__all__ = [
    "CHAINED",
    "FUNCTION",
    "KORNIA",
    "SEED_PIPELINED",
    "SEED_SERIAL",
    "SINGLE",
    "VISION",
    "VISION_SINGLE",
    "classification_step",
    "over",
]

# Variants that more than one suite has.
SEED_SERIAL = "seed, on the GPU, serial"
SEED_PIPELINED = "seed, on the GPU, pipelined"
KORNIA = "Kornia, serial"
VISION = "torchvision v2, one draw per batch"
VISION_SINGLE = "torchvision v2, image by image"
FUNCTION = "ours, Kornia in a function"
CHAINED = "ours, fused (chained)"
SINGLE = "ours, fused (single)"


def over(start: Callable[[], Iterator[Pair]]) -> Trainer:
    """Make a loop that steps over the batches of a pipeline."""
    return lambda step: Over(start(), step)


def classification_step(image_size: int, device: torch.device) -> Step:
    """Build the model and its training step.

    The learning rate is 0: the same work, and the numbers stay as they are, which the
    speed and the power of a GPU depend on.
    """
    model = workloads.build_model(image_size, pipelines.NUM_CLASSES)
    step = workloads.TrainingStep(model.to(device).train(), learning_rate=0.0)
    # A label may come as (B,) or as (B, 1).
    return lambda images, labels: step(images, labels.flatten())
