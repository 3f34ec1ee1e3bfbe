"""What do the readings of the clock amount to?

[Note: Readings]
Code that runs once a step finds the processor's caches full of the model's. To count
seven figures of one batch there takes longer than to count those of fifty batches
afterwards. So ``next`` leaves a *reading*: what the clock and its counters showed when
it returned. The figures are the differences between one reading and the one before.
"""

from collections import deque

from gpuprefetch.histogram import Histogram, Spread

__all__ = ["Reading", "Times"]

Reading = tuple[float, float, float, float, float, float, int]
"""When ``next`` was called and when it returned; then the totals of the pass so far:
waiting for the source, waiting for the device, the transform on the host, pinning; then
how many batches were in hand at the call. Times in seconds."""


class Times:
    """The figures of one pass; names as in ``LoaderStats``.

    One thread at a time writes; another may read meanwhile and misses the newest.
    """

    def __init__(self) -> None:
        self.first_s = 0.0
        """How long the first ``next`` took."""
        self.queue_depth = Histogram()
        self._before: Reading | None = None
        self._num_read = 0
        # In ms #
        self.period_ms = Histogram()
        self.between_ms = Histogram()
        self.source_wait_ms = Histogram()
        self.device_wait_ms = Histogram()
        self.loader_ms = Histogram()
        self.transform_host_ms = Histogram()
        self.pull_ms = Histogram()
        self.pin_ms = Histogram()
        self.copy_ms = Histogram()
        self.copy_gb_per_s = Histogram()
        self.transform_ms = Histogram()
        self.stall_ms = Histogram()

    def spreads(self) -> dict[str, Spread]:
        """How each figure is distributed, by its name."""
        spreads = {
            name: value.spread()
            for name, value in vars(self).items()
            if isinstance(value, Histogram)
        }
        spreads["queue_depth"] = self.queue_depth.spread(is_whole=True)
        return spreads

    def take(self, readings: deque[Reading], *, is_threaded: bool) -> None:
        """Count readings and drop them, oldest first; see [Note: Readings].

        Args:
            readings: May grow meanwhile.
            is_threaded: A thread pulls the source and packs batches; else the loop's
                own does while it asks the source.
        """
        while readings:
            reading = readings.popleft()
            if self._before is None:
                self.first_s = reading[1] - reading[0]
            else:
                self._add(reading, self._before, is_threaded=is_threaded)
            self._before = reading
            self._num_read += 1

    def end(self, called_s: float) -> None:
        """``next`` was called for a batch that there is not; all readings are counted.

        Args:
            called_s: When.
        """
        if self._before is not None and self._num_read > 1:
            self._add_step(called_s, self._before)

    def _add_step(self, called_s: float, before: Reading) -> None:
        """Count the loop's step between two calls."""
        called_before_s, returned_before_s, *_ = before
        self.between_ms.add((called_s - returned_before_s) * 1e3)
        self.period_ms.add((called_s - called_before_s) * 1e3)

    def _add(self, reading: Reading, before: Reading, *, is_threaded: bool) -> None:
        called_s, returned_s, *totals_s, queued = reading
        _, _, *totals_before_s, _ = before
        source_s, device_s, transform_s, pin_s = (
            total_s - total_before_s
            for total_s, total_before_s in zip(totals_s, totals_before_s, strict=True)
        )
        has_transform, has_pinned = totals_s[2] > 0, totals_s[3] > 0
        if is_threaded:
            pin_s = 0.0
        source_s -= pin_s
        self.queue_depth.add(queued)
        if self._num_read > 1:
            self._add_step(called_s, before)
        self.source_wait_ms.add(source_s * 1e3)
        self.device_wait_ms.add(device_s * 1e3)
        self.loader_ms.add((returned_s - called_s - source_s - device_s) * 1e3)
        # Parts of that, of the same batches; not measured where there is none.
        if has_pinned and not is_threaded:
            self.pin_ms.add(pin_s * 1e3)
        if has_transform:
            self.transform_host_ms.add(transform_s * 1e3)
