"""What do several suites need to put their groups together?"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks import pipelines
from benchmarks.loops import Over, Trainer
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
    "ClassificationStep",
    "LastingStep",
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


class LastingStep:
    """A training step that does all the work, and leaves the weights as they are.

    Its learning rate is 0, since the speed and the power of a GPU depend on the numbers
    that it computes with. A loop whose streams do not wait for each other may still
    train on memory that holds no number, and leave weights that are none.

    Args:
        model: On its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._step = workloads.TrainingStep(model.train(), learning_rate=0.0)
        self._weights: list[torch.Tensor] = list(model.parameters())
        self._first = [weight.detach().clone() for weight in self._weights]

    def __call__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch."""
        self._step(inputs, labels)

    def reset(self) -> None:
        """Make the weights what they were at first."""
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._first)


class ClassificationStep(LastingStep):
    """The nine-layer model's step.

    Args:
        image_size: Height and width, in pixels.
        device: Where it trains.
    """

    def __init__(self, image_size: int, device: torch.device) -> None:
        model = workloads.build_model(image_size, pipelines.NUM_CLASSES)
        super().__init__(model.to(device))

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch; labels are (B,) or (B, 1)."""
        super().__call__(images, labels.flatten())
