"""What did a loader do, in numbers?

:class:`Counters` are added to while a pass runs; :class:`LoaderStats` is the frozen
record that the user gets. Times are host times, read without synchronizing the device.
"""

from dataclasses import dataclass

__all__ = ["Counters", "LoaderStats", "snapshot"]


@dataclass(slots=True)
class Counters:
    """Running sums of one pass; written by the loop's thread alone."""

    epoch: int = 0
    """Number of the pass, counted from 0."""
    yielded: int = 0
    """Batches that the loop got."""
    copied_bytes: int = 0
    """Bytes of dense tensors issued to the device."""
    source_wait_s: float = 0.0
    """Time in which the source was pulled or waited for."""
    device_wait_s: float = 0.0
    """Time in which the loop's thread waited for the device."""
    next_s: float = 0.0
    """Time spent in ``next`` in all, these waits included."""


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What the newest pass of a loader did so far."""

    epoch: int
    """Number of the pass, counted from 0."""
    batches: int
    """Batches that the loop got."""
    copied_bytes: int
    """Bytes of dense tensors issued to the device; 0 when every leaf was there already.
    Sparse tensors and objects that move themselves are not counted."""
    source_wait_ms: float
    """Mean time per batch in which the loop waited for the source. Near the step time:
    the source is too slow, and no prefetching helps; add workers."""
    device_wait_ms: float
    """Mean time per batch in which the loop waited for the device: because it was more
    than ``depth`` steps ahead (good: the device is the limit) or, where no thread pulls
    the source, until copies had left the source's memory or a slot."""
    loader_ms: float
    """Mean time per batch that the loop spent in the loader beside these waits: issuing
    the copies and the transform. A transform with many launches shows here."""
    pinned_bytes: int
    """Page-locked host memory held by the loader's own slots."""
    transform: str
    """What runs on the device: the transform's name and how it is run."""

    def report(self) -> str:
        """Say the same in a few lines of text."""
        gib = self.copied_bytes / 2**30
        return (
            f"epoch {self.epoch}: {self.batches} batches, {gib:.3f} GiB copied\n"
            f"per batch: source {self.source_wait_ms:.3f} ms, "
            f"device {self.device_wait_ms:.3f} ms, "
            f"loader {self.loader_ms:.3f} ms on the loop's thread\n"
            f"transform: {self.transform}; "
            f"pinned: {self.pinned_bytes / 2**20:.1f} MiB"
        )


def snapshot(counters: Counters, *, pinned_bytes: int, transform: str) -> LoaderStats:
    """Freeze the running sums into a record with means per batch, in ms."""
    per_batch = 1e3 / max(counters.yielded, 1)
    loader_s = counters.next_s - counters.source_wait_s - counters.device_wait_s
    return LoaderStats(
        epoch=counters.epoch,
        batches=counters.yielded,
        copied_bytes=counters.copied_bytes,
        source_wait_ms=counters.source_wait_s * per_batch,
        device_wait_ms=counters.device_wait_s * per_batch,
        loader_ms=loader_s * per_batch,
        pinned_bytes=pinned_bytes,
        transform=transform,
    )
