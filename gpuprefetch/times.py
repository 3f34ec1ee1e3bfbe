"""What do the readings of the clock amount to?

[Note: Readings]
Code that runs once a step finds the processor's caches full of the model's. To count
seven figures of one batch there takes longer than to count those of fifty batches
afterwards. So ``next`` leaves two *readings*: one when it is called, one when it gives
a batch. The figures are the differences between them. A call that gives none, since the
source ended or something failed, leaves the first alone. Whoever pulls a batch from the
source leaves how long that took.
"""

from collections import defaultdict, deque

from gpuprefetch.histogram import Histogram, Spread

__all__ = ["Called", "Reading", "Returned", "Times"]

Called = tuple[float, int]
"""When ``next`` was called, in seconds, and how many batches were in hand then."""

Returned = tuple[float, float, float, float, float]
"""When ``next`` gave a batch; then the totals of the pass so far: waiting for the
source, waiting for the device, the transform on the host, packing. In seconds."""

Reading = Called | Returned | float
"""A number is how long the source took for a batch, in seconds."""


class Times:
    """The figures of one pass; names as in ``LoaderStats``.

    One thread at a time writes; another may read meanwhile and misses the newest.
    """

    def __init__(self) -> None:
        self.first_s = 0.0
        """How long the first ``next`` took."""
        self.queue_depth = Histogram()
        # As the newest readings have it.
        self._called_s = 0.0
        self._before: Returned = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._num_returned = 0
        # Taken from readings, and about to be counted, many at a time.
        self._new: defaultdict[Histogram, list[float]] = defaultdict(list)
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
                own does.
        """
        while readings:
            reading = readings.popleft()
            if isinstance(reading, float):
                self._new[self.pull_ms].append(reading * 1e3)
            elif len(reading) == 2:
                self._take_call(*reading)
            else:
                self._take_return(reading, is_threaded=is_threaded)
        for figure, values in self._new.items():
            figure.add_all(values)
            values.clear()

    def _take_call(self, called_s: float, queued: int) -> None:
        new = self._new
        if self._num_returned:
            new[self.queue_depth].append(queued)
        if self._num_returned > 1:
            new[self.between_ms].append((called_s - self._before[0]) * 1e3)
            new[self.period_ms].append((called_s - self._called_s) * 1e3)
        self._called_s = called_s

    def _take_return(self, reading: Returned, *, is_threaded: bool) -> None:
        before, self._before = self._before, reading
        next_s = reading[0] - self._called_s
        self._num_returned += 1
        if self._num_returned == 1:
            self.first_s = next_s
            return
        new = self._new
        _, source_total_s, device_total_s, transform_total_s, pin_total_s = reading
        _, source_before_s, device_before_s, transform_before_s, pin_before_s = before
        source_s = source_total_s - source_before_s
        device_s = device_total_s - device_before_s
        new[self.source_wait_ms].append(source_s * 1e3)
        new[self.device_wait_ms].append(device_s * 1e3)
        new[self.loader_ms].append((next_s - source_s - device_s) * 1e3)
        # Parts of that, of the same batches; not measured where there is none.
        if pin_total_s and not is_threaded:
            new[self.pin_ms].append((pin_total_s - pin_before_s) * 1e3)
        if transform_total_s:
            transform_s = transform_total_s - transform_before_s
            new[self.transform_host_ms].append(transform_s * 1e3)
