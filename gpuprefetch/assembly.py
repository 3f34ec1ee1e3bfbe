"""How are the parts of one pass put together?

    source -> feeder: pull, pin -> [queue] -> side stream: copy, transform -> hand-off

Which part of each kind is taken depends on the device (may copies run beside the
loop?), on the source (may it refill its batches?) and on the settings; the choice is
made here, once, and no part asks again.
"""

from collections.abc import Callable
from typing import Any

import torch

from gpuprefetch.epoch import Epoch
from gpuprefetch.feeder import Feeder, InlineFeeder, Prepared, Puller, ThreadFeeder
from gpuprefetch.prepare import StagingPreparer, prepare_as_is, prepare_by_cloning
from gpuprefetch.progress import Progress, StartedSource
from gpuprefetch.resources import Resources
from gpuprefetch.settings import Settings, SourceTraits
from gpuprefetch.staging import SlotRing
from gpuprefetch.stats import Counters
from gpuprefetch.streams import is_asynchronous
from gpuprefetch.transfer import InlineTransfer, StreamTransfer, Transfer
from gpuprefetch.transforming import DeviceStep

__all__ = ["open_pass"]

# Batches that a thread may pull beyond `depth` from worker processes. They come in
# bursts, since they are served in order: with none, 15 workers fed 139 to 145 batches/s
# into a loop that ran at 147 to 158 with two, and no better with six (H200, 16 cores).
_EXTRA_FROM_WORKERS = 2


def open_pass(
    source: Any,
    started: StartedSource,
    *,
    # What was asked for
    settings: Settings,
    traits: SourceTraits,
    device: torch.device,
    step: DeviceStep | None,
    # What outlives the pass
    resources: Resources,
    progress: Progress,
    counters: Counters,
) -> Epoch[Any]:
    """Start a pass over a source whose iterator has been made."""
    is_threaded = settings.background
    if is_threaded is None:
        is_threaded = traits.has_workers
    # Worker processes give each batch memory of its own. Any other source may write
    # into the batch before, once it is asked for the next.
    may_refill = not traits.has_workers
    most_pulled = settings.depth
    if is_threaded and traits.has_workers:
        most_pulled += _EXTRA_FROM_WORKERS
    ring: SlotRing | None = None
    transfer: Transfer
    prepare: Callable[[Any], Prepared]
    if is_asynchronous(device):
        ring = resources.take_ring(most_pulled + 1)
        prepare = StagingPreparer(
            ring, device=device, may_refill=may_refill, is_threaded=is_threaded
        )
        transfer = StreamTransfer(
            resources.side_stream(device),
            step=step,
            ring=ring,
            depth=settings.depth,
            may_refill=may_refill,
        )
    else:
        prepare = prepare_by_cloning if is_threaded and may_refill else prepare_as_is
        transfer = InlineTransfer(device, step)
    puller = Puller(
        started.iterator,
        pulled=started.pulled,
        prepare=prepare,
        read_state=source.state_dict if traits.keeps_state else None,
        ends_workers=traits.has_workers and not traits.shares_iterator,
    )
    feeder: Feeder = InlineFeeder(puller)
    if is_threaded:
        feeder = ThreadFeeder(puller, num_credits=most_pulled, ring=ring, device=device)
    return Epoch(
        feeder=feeder,
        transfer=transfer,
        progress=progress,
        counters=counters,
        release=resources.returner(ring, feeder),
    )
