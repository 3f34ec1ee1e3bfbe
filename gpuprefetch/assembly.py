"""How are the parts of one pass put together?

    source -> puller: pull, pack -> feeder: queue -> transfer: copy, transform, hand-off

Which part of each kind is taken depends on the device (may copies run beside the
loop?), on the source (may it refill its batches?) and on the settings; the choice is
made here, once, and no part asks again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpuprefetch.entry import Prepared
from gpuprefetch.epoch import Epoch
from gpuprefetch.feeder import Feeder, InlineFeeder, ThreadFeeder
from gpuprefetch.kinds import is_fused_module, is_kornia_module
from gpuprefetch.meter import Meter
from gpuprefetch.prepare import StagingPreparer, prepare_as_is, prepare_by_cloning
from gpuprefetch.progress import Progress
from gpuprefetch.puller import Puller
from gpuprefetch.resources import Resources
from gpuprefetch.selection import Selection
from gpuprefetch.settings import Settings
from gpuprefetch.source import SourceTraits, StartedSource
from gpuprefetch.staging import SlotRing
from gpuprefetch.streams import is_asynchronous
from gpuprefetch.transfer import InlineTransfer, StreamTransfer, Transfer
from gpuprefetch.transform import Applies, DeviceTransform
from gpuprefetch.watch import Watch

__all__ = ["Surroundings", "open_pass"]

# Batches that a thread may pull beyond `depth` from worker processes. They come in
# bursts, since they are served in order: with none, 15 workers fed 139 to 145 batches/s
# into a loop that ran at 147 to 158 with two, and no better with six (H200, 16 cores).
_EXTRA_FROM_WORKERS = 2


@dataclass(frozen=True, slots=True)
class PullPlan:
    """How the source is pulled in one pass; decided once."""

    is_threaded: bool
    """A feeder thread pulls it, not the loop's thread."""
    may_refill: bool
    """It may write into the batch before, once it is asked for the next."""
    most_pulled: int
    """Batches that may be pulled and not yet yielded; see [Note: Credits]."""

    @staticmethod
    def of(settings: Settings, traits: SourceTraits) -> "PullPlan":
        """Decide by the settings, and by the source where they leave it open."""
        is_threaded = settings.background
        if is_threaded is None:
            is_threaded = traits.has_workers
        extra = _EXTRA_FROM_WORKERS if is_threaded and traits.has_workers else 0
        may_refill = not traits.makes_private_batches
        return PullPlan(is_threaded, may_refill, settings.depth + extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a pass finds when it starts, and what outlives it."""

    source: Any
    """The user's source, for its state."""
    settings: Settings
    """What the user asked for."""
    traits: SourceTraits
    """What kind of source it is."""
    device: torch.device
    """Where batches go, with an index."""
    resources: Resources
    """Streams and slots."""
    progress: Progress
    """Told of each yielded batch."""
    meter: Meter
    """Told what happens, and when."""
    watch: Watch
    """Looks at the first batches."""


def open_pass(
    started: StartedSource, transform: DeviceTransform | None, around: Surroundings
) -> Epoch[Any]:
    """Start a pass over a source whose iterator has been made."""
    plan = PullPlan.of(around.settings, around.traits)
    around.meter.is_threaded = plan.is_threaded
    if not is_asynchronous(around.device):
        is_copied = plan.is_threaded and plan.may_refill
        as_it_comes = prepare_by_cloning if is_copied else prepare_as_is
        prepare = _looking_at_images(as_it_comes, around)
        transfer = InlineTransfer(around.device, transform, around.meter)
        return _begin(started, plan, around, prepare, transfer, ring=None)
    # One slot more than batches pulled: see [Note: Slot reuse].
    ring = around.resources.take_ring(plan.most_pulled + 1)
    try:
        pack = _packing(plan, around, ring)
        stream = _stream_transfer(plan, around, ring, transform)
        return _begin(started, plan, around, pack, stream, ring=ring)
    except BaseException:
        _end_pass(around.meter, around.resources, ring, None)
        raise


def _packing(
    plan: PullPlan, around: Surroundings, ring: SlotRing
) -> Callable[[Any], Prepared]:
    """Say what is done to each batch in host memory."""
    prepare = StagingPreparer(
        ring,
        device=around.device,
        may_refill=plan.may_refill,
        is_threaded=plan.is_threaded,
        meter=around.meter,
    )
    is_source_pinning = getattr(around.source, "pin_memory", None) is True
    return around.watch.looking_at_the_first(
        _looking_at_images(prepare, around), is_source_pinning=is_source_pinning
    )


def _looking_at_images(
    prepare: Callable[[Any], Prepared], around: Surroundings
) -> Callable[[Any], Prepared]:
    """Let the first images be looked at, if it is Kornia that gets them."""
    transform = around.settings.transform
    if not is_kornia_module(transform) and not is_fused_module(transform):
        return prepare
    # Not the transform: the feeder's thread knows it, and must not keep it alive.
    return around.watch.looking_at_images(prepare, Selection(around.settings.inputs))


def _stream_transfer(
    plan: PullPlan,
    around: Surroundings,
    ring: SlotRing,
    transform: DeviceTransform | None,
) -> StreamTransfer:
    applied: Applies | None = None
    if transform is not None:
        applied = around.watch.looking_at(transform, around.device)
    return StreamTransfer(
        around.resources.side_stream(around.device),
        transform=applied,
        ring=ring,
        depth=around.settings.depth,
        waits_for_source=plan.may_refill and not plan.is_threaded,
        meter=around.meter,
    )


def _begin(
    started: StartedSource,
    plan: PullPlan,
    around: Surroundings,
    prepare: Callable[[Any], Prepared],
    transfer: Transfer,
    *,
    ring: SlotRing | None,
) -> Epoch[Any]:
    traits = around.traits
    puller = Puller(
        started.iterator,
        pulled=started.pulled,
        prepare=prepare,
        read_state=around.source.state_dict if traits.keeps_state else None,
        ends_workers=traits.has_workers and not traits.shares_iterator,
        meter=around.meter,
    )
    feeder: Feeder = InlineFeeder(puller)
    thread: ThreadFeeder | None = None
    if plan.is_threaded:
        feeder = thread = ThreadFeeder(
            puller, num_credits=plan.most_pulled, ring=ring, device=around.device
        )
    return Epoch(
        feeder=feeder,
        transfer=transfer,
        progress=around.progress,
        meter=around.meter,
        on_end=partial(_end_pass, around.meter, around.resources, ring, thread),
    )


def _end_pass(
    meter: Meter,
    resources: Resources,
    ring: SlotRing | None,
    thread: ThreadFeeder | None,
) -> None:
    """Take back what a pass had, once nothing of it runs any more."""
    meter.is_over = True
    resources.give_back(ring, thread)
