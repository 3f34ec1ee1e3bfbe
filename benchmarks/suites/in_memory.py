"""What does each input pipeline itself cost, over batches that are ready in memory?

Eight uint8 batches in pinned memory are served in turn, so there is no dataset cost.
The bound is the same training step on one batch that lies on the device already.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import pipelines
from benchmarks.chains import kornia_function, own_subclasses_chain, per_sample
from benchmarks.loops import Over, Step, Trainer
from benchmarks.markdown import costs_table, speeds_table
from benchmarks.pipelines import Pair
from benchmarks.record import Omission, Record
from benchmarks.seed import TwoStreamLoop
from benchmarks.suite import Group, Place, Promise, Suite
from gpuprefetch import workloads
from gpuprefetch.augment.fused import fuse

__all__ = ["SUITE", "classification_step", "groups", "over"]

_KORNIA_SIDE = "Kornia, one batch ahead on a side stream"
_KORNIA_THREAD = "Kornia on a background thread, side stream"
_OURS = "ours, fused (chained)"
_UNFUSED = "ours, Kornia chain that does not fuse"


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


def groups(place: Place) -> Iterator[Group]:
    """Give the groups: batches of 32 and of 128."""
    size = 16 if place.is_tiny else 256
    step = classification_step(size, place.device)
    steps_of = {2: 2} if place.is_tiny else {32: 90, 128: 40}
    for batch_size, steps in steps_of.items():
        yield _group(place, step, size, batch_size, steps)


def _group(place: Place, step: Step, size: int, batch_size: int, steps: int) -> Group:
    device = place.device
    source = pipelines.InMemory(batch_size, size, pin=True)
    chain = workloads.kornia_chain(size)
    variants: dict[str, Trainer] = {
        "bound: step alone, batch on the device": over(
            lambda: pipelines.resident(batch_size, size, device)
        ),
        "plain copy, no augmentation": over(lambda: pipelines.plain(source, device)),
        "ours, copy only": over(lambda: pipelines.stream_prefetch(source, device)),
    }
    bound = next(iter(variants))
    if pipelines.has_timm():
        variants["timm PrefetchLoader (copy and normalize only)"] = over(
            lambda: pipelines.timm_prefetch(source, device)
        )
    by_hand = workloads.batch_chain(size)
    kornia = kornia_function(size)
    vision = workloads.worker_chain(size)
    variants |= {
        "seed, serial": over(lambda: pipelines.plain(source, device, by_hand)),
        "seed, pipelined": lambda step: TwoStreamLoop(source, by_hand, step, device),
        "seed, pipelined, Kornia": lambda step: TwoStreamLoop(
            source, kornia, step, device
        ),
        "Kornia, serial": over(lambda: pipelines.plain(source, device, kornia)),
        _KORNIA_SIDE: over(lambda: pipelines.one_ahead(source, device, kornia)),
        _KORNIA_THREAD: over(lambda: pipelines.threaded(source, device, kornia)),
        "torchvision v2, one draw per batch": over(
            lambda: pipelines.plain(source, device, vision)
        ),
        "torchvision v2, image by image": over(
            lambda: pipelines.plain(source, device, partial(per_sample, vision))
        ),
        "ours, Kornia in a function": over(
            lambda: pipelines.stream_prefetch(source, device, kornia)
        ),
        _UNFUSED: over(
            lambda: pipelines.stream_prefetch(
                source, device, own_subclasses_chain(size)
            )
        ),
        _OURS: over(lambda: pipelines.stream_prefetch(source, device, chain)),
        "ours, fused (single)": over(
            lambda: pipelines.stream_prefetch(
                source, device, fuse(chain, resampling="single")
            )
        ),
    }
    slow = ["torchvision v2, image by image", "seed, serial", "seed, pipelined"]
    return Group(
        name="",
        batch_size=batch_size,
        step=step,
        variants=variants,
        bound=bound,
        steps=steps,
        warmup=1 if place.is_tiny else 12,
        rounds=1 if place.is_tiny else 3,
        other_steps=dict.fromkeys(slow, steps if place.is_tiny else 20),
        promises=_promises(batch_size, bound),
        is_probed=batch_size != 128,
    )


def _promises(batch_size: int, bound: str) -> list[Promise]:
    promises = [
        Promise(
            "ours fused / Kornia on a background thread",
            *(_OURS, _KORNIA_THREAD),
            at_least=1.1 if batch_size == 128 else 1.6,
        )
    ]
    if batch_size != 128:
        name = "a Kornia chain that does not fuse / bound"
        promises.append(Promise(name, _UNFUSED, bound, at_least=0.46, aim=0.75))
    return promises


def _omissions() -> list[Omission]:
    missing = []
    if not pipelines.has_timm():
        missing.append(Omission("timm PrefetchLoader", "timm is not installed"))
    return missing


def _tables(record: Record) -> dict[str, str]:
    smallest = min(case.batch_size for case in record.cases)
    return {
        "in-memory": speeds_table(record, ""),
        "in-memory-costs": costs_table(record, "", smallest),
    }


SUITE = Suite(
    name="in-memory",
    title="the pipeline alone, over batches ready in pinned memory",
    budget_s=110.0,
    groups=groups,
    omissions=_omissions,
    tables=_tables,
)
