"""In which order do the source and the transform of a pass start?

Both look at the user's generators, or move them on. The order here is such that the
source draws what it would draw in the bare loop.
"""

from typing import Any

import torch

from gpuprefetch.beginning import note_beginning, note_draw, state_at_start
from gpuprefetch.progress import Progress
from gpuprefetch.seeding import BatchSeeds, draw_base_seed
from gpuprefetch.selection import Selection
from gpuprefetch.settings import Settings
from gpuprefetch.source import SourceTraits, StartedSource, start_source
from gpuprefetch.transform import DeviceTransform, adapt_transform

__all__ = ["start"]


def start(
    source: Any,
    settings: Settings,
    traits: SourceTraits,
    *,
    progress: Progress,
    device: torch.device,
) -> tuple[StartedSource, DeviceTransform | None]:
    """Start the source, and make what is done to its batches.

    Args:
        source: The user's.
        settings: What the user asked for.
        traits: What kind of source it is.
        progress: Of the new pass: fresh, or loaded. Where it began is noted there.
        device: Where batches go.

    Returns:
        The started source, and ``None`` where nothing is done to its batches.

    Raises:
        StateError: The source ended before the batches that were yielded.
    """
    # Before iter(source), which advances it: the base seed and a later resume need to
    # know; see [Note: Base seed].
    generator_before = torch.default_generator.get_state()
    origin = note_beginning(progress, source, traits)
    # Workers start here; with a loaded state, under the generators that it holds.
    started = start_source(
        source,
        traits,
        progress,
        replay=settings.replay,
        is_threaded=settings.background is True,
    )
    goes_on, progress.is_started = progress.is_started, True
    progress.origin = origin
    # After that, so that the sample order is that of the bare loader.
    transform = None
    if settings.function is not None:
        seeds = _seeds_for(progress, settings.seed, generator_before)
        transform = _device_transform(settings, traits, seeds, device)
    if traits.keeps_state and (not goes_on or progress.source_state is None):
        # Not that of the end of the last pass: starting may have drawn an order.
        progress.source_state = state_at_start(source)
    return started, transform


def _seeds_for(
    progress: Progress, seed: int | None, generator_before: torch.Tensor
) -> BatchSeeds:
    """Give the seeds of a pass; draws its base seed if it has none."""
    if seed is not None:
        return BatchSeeds.for_epoch(seed, progress.epoch)
    if progress.base_seed is None:
        generator_now = torch.default_generator.get_state()
        progress.base_seed = draw_base_seed(generator_before)
        if torch.equal(generator_now, generator_before):
            note_draw(progress)
    return BatchSeeds.for_epoch(progress.base_seed, None)


def _device_transform(
    settings: Settings, traits: SourceTraits, seeds: BatchSeeds, device: torch.device
) -> DeviceTransform:
    assert settings.function is not None
    return DeviceTransform(
        adapt_transform(settings.function),
        selection=None if settings.transform is None else Selection(settings.inputs),
        seeds=seeds,
        device=device,
        # Elsewhere the inputs are copies on the device.
        copies_inputs=device.type == "cpu" and not traits.makes_private_batches,
    )
