"""What did a loader do in one pass, in numbers?

:class:`LoaderStats` is the frozen record that the user gets. Its figures are for a
batch, in ms where the name says so, and each is a :class:`Spread`: mean, p50 and p99.

[Note: Which batches count]
The first ``next`` of a pass starts workers and fills the pipeline: it is ``first_ms``
and in no other time. Those on the loop's thread are of every ``next`` after it, so that
its parts add up; those of a thread that pulls, of every batch that it pulls from then
on. Times *on the device* need timing events, 2 to 5 us each. Of what is issued from
then on, the first 32 batches of a pass and every eighth after them have some; they are
read at a later one of those, or when figures are asked for, once they are done, and
nothing waits for them.
"""

from dataclasses import dataclass, fields

from gpuprefetch.histogram import Spread

__all__ = ["LoaderStats"]

_NONE = Spread()  # What was not measured.


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What one pass of a loader did, so far or in all."""

    # How much #
    epoch: int = 0
    """Number of the pass, counted from 0."""
    batches: int = 0
    """Batches that the loop got."""
    copied_bytes: int = 0
    """Bytes of dense tensors issued to the device; 0 when every leaf was there already.
    Sparse tensors and objects that move themselves are not counted."""
    first_ms: float = 0.0
    """Time of the first ``next``: workers start, the pipeline fills. High: long to
    start an epoch; ``persistent_workers=True`` helps."""

    # Host times, per batch #
    period_ms: Spread = _NONE
    """From one ``next`` to the one after it: what a step takes in all."""
    between_ms: Spread = _NONE
    """Time outside ``next``: the loop's own. Near the period: the loader hardly shows.
    Includes whatever the loop waits for, as in ``.item()``."""
    source_wait_ms: Spread = _NONE
    """The loop waited for the source: in its code or, where a thread pulls, for a batch
    that was not ready. Near the period: the source is too slow, and no prefetching
    helps; add workers."""
    device_wait_ms: Spread = _NONE
    """The loop waited for the device: because it was more than ``depth`` steps ahead
    (good: the device is the limit) or, where no thread pulls the source, until copies
    had left the source's memory or a slot. 0 where the device had come that far."""
    loader_ms: Spread = _NONE
    """The loader's own work on the loop's thread, beside these waits: issuing copies
    and the transform, and where no thread pulls, looking through the batch and packing.
    High: many launches."""
    transform_host_ms: Spread = _NONE
    """The part of ``loader_ms`` in which the transform issues its work; on a CPU, does
    it. High on a GPU: many small launches. 0 at a ``next`` that issues no batch."""
    pull_ms: Spread = _NONE
    """The source took this long for a batch, in whichever thread pulls it. With
    workers: what was left to wait for. Above the period: it is the limit."""
    pin_ms: Spread = _NONE
    """Packing pageable leaves into pinned memory, in the thread that pulls; a part of
    ``loader_ms`` where that is the loop's. 0 when the source pins. High: send smaller
    data, or let the source pin."""

    # On the device, per batch that was sampled #
    copy_ms: Spread = _NONE
    """From the first copy of a batch to the end of its last. Includes what the host
    takes between two copies: many small leaves show here."""
    copy_gb_per_s: Spread = _NONE
    """Bytes of the batch over that, in 1e9 bytes a second. Low with large batches: the
    memory is pageable, or the bus is shared. Low with small ones: no matter."""
    transform_ms: Spread = _NONE
    """From the end of the copies to the end of the transform. Near
    ``transform_host_ms``: the device waits for the host to issue it."""
    stall_ms: Spread = _NONE
    """The device stood still for the batch: from the end of all that the loop had
    queued, or from the call of ``next`` where that was later, until the batch was
    ready. What a better loader could gain at most; near 0 there is nothing to gain."""
    dry_share: float = 0.0
    """Share of those batches at whose ``next`` the device had finished everything. Near
    1: the host is the limit, or the step waits for a result (``.item()``)."""

    # Queues and memory #
    queue_depth: Spread = _NONE
    """Batches in hand when the loop asked for one, pulled or in flight. Near 0: the
    source or the transform is late. Near ``depth``: the loop is."""
    pinned_bytes: int = 0
    """Page-locked host memory held by the loader's own slots, now."""
    device_bytes: int = 0
    """Most bytes seen in batches issued and not yet yielded, among those sampled. High:
    reduce ``depth``."""

    # What ran, and how #
    transform: str = "none"
    """What runs on the device: the transform's name and how it is run."""
    fusion: str = ""
    """For a Kornia module: ``fused``, or which members are not, and why. For a module
    that only holds some: why it is called as it is. Else empty."""
    is_graphed: bool = False
    """``fuse(kept="graphed")`` made it: what does not fuse runs as CUDA graphs, where
    that can be."""
    device: str = ""
    """Where batches went; empty before the first pass."""
    depth: int = 0
    """Of the loader: most batches pulled or issued and not yet yielded."""
    is_overlapped: bool = False
    """Copies and the transform run beside the loop; not so on a CPU, where only a
    thread that pulls does."""
    num_workers: int | None = None
    """Of the source, if it is a DataLoader."""
    is_threaded: bool = False
    """A thread pulls the source."""
    notes: tuple[str, ...] = ()
    """What the first batches showed that costs time and raises no error."""

    @property
    def own_ms(self) -> float:
        """Mean of what ``loader_ms`` holds beside the transform and the packing."""
        packing_ms = 0.0 if self.is_threaded else self.pin_ms.mean
        own_ms = self.loader_ms.mean - self.transform_host_ms.mean - packing_ms
        return max(own_ms, 0.0)

    @property
    def is_fused(self) -> bool | None:
        """Whether Kornia augmentations run fused, or some; ``None`` without any."""
        return self.fusion.startswith("fused") if self.fusion else None

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Give all numbers as a flat dict, for a logger of metrics.

        Args:
            prefix: Put before each name, such as ``"loader/"``.

        Returns:
            ``{"epoch": 3, "stall_ms_mean": 0.02, "stall_ms_p50": ...}``. What was not
            measured is left out; texts are, too.
        """
        flat: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Spread):
                if value.count:
                    for part in ("mean", "p50", "p99"):
                        flat[f"{prefix}{field.name}_{part}"] = getattr(value, part)
            elif isinstance(value, int | float):
                flat[prefix + field.name] = value
        if self.is_fused is not None:
            flat[f"{prefix}is_fused"] = self.is_fused
        return flat

    def brief(self) -> dict[str, str]:
        """Give a few means for a progress bar: ``bar.set_postfix(stats.brief())``."""
        shown = {
            "step": self.period_ms,
            "source": self.source_wait_ms,
            "loader": self.loader_ms,
            "stall": self.stall_ms,
        }
        return {
            name: f"{spread.mean:.1f} ms"
            for name, spread in shown.items()
            if spread.count
        }
