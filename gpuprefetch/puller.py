"""How does one batch come out of the source?"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from time import perf_counter

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from gpuprefetch.entry import Entry, Prepared, as_batch_error
from gpuprefetch.meter import Meter

__all__ = ["Puller"]

# What `next` gives at the end of the source; never leaves this file.
_END = object()


class Puller:
    """Takes one batch after the other from the source and prepares it.

    Args:
        iterator: The source's iterator.
        pulled: The first batch, where it was taken already; else empty.
        prepare: Brings a batch into the host memory from which it will be copied.
        read_state: Gives the source's state, or ``None`` where it keeps none.
        ends_workers: The iterator is a DataLoader's and has worker processes that are
            to end with it.
        meter: Told how long the source takes.
    """

    def __init__(
        self,
        iterator: Iterator[object],
        *,
        pulled: list[object],
        prepare: Callable[[object], Prepared],
        read_state: Callable[[], object] | None,
        ends_workers: bool,
        meter: Meter,
    ) -> None:
        self._iterator: Iterator[object] | None = iterator
        self._pulled = pulled
        self._prepare = prepare
        self._read_state = read_state
        self._ends_workers = ends_workers
        self._meter = meter

    def pull(self) -> Entry:
        """Get the next entry; never raises what is an ``Exception``."""
        if self._iterator is None:
            return Entry()
        try:
            if not self._pulled:
                started_s = perf_counter()
                try:
                    self._pulled.append(next(self._iterator, _END))
                finally:
                    is_batch = bool(self._pulled) and self._pulled[0] is not _END
                    taken_s = perf_counter() - started_s
                    self._meter.note_pull(taken_s, is_batch=is_batch)
            entry = self._prepare_entry(self._pulled[0])
        except Exception as error:
            entry = Entry(error=as_batch_error(error, "the source"))
        # Only now: after Ctrl-C in the middle, the same batch is prepared again.
        self._pulled.clear()
        return entry

    def _prepare_entry(self, batch: object) -> Entry:
        # Read before the batch is prepared, which may have to wait. Copied, since a
        # source may give the very dict that it goes on to change.
        state = None if self._read_state is None else deepcopy(self._read_state())
        return Entry(None if batch is _END else self._prepare(batch), state)

    @property
    def has_lost_workers(self) -> bool:
        """Tell whether all worker processes of the source have ended."""
        if not isinstance(self._iterator, _MultiProcessingDataLoaderIter):
            return False
        workers = self._iterator._workers
        return bool(workers) and not any(worker.is_alive() for worker in workers)

    def drop_iterator(self) -> None:
        """Let go of the source's iterator, and end its workers.

        Done by hand: the traceback of an error may keep this object alive, and that of
        an error from a worker process keeps the iterator itself alive.
        """
        iterator, self._iterator = self._iterator, None
        if self._ends_workers:
            # What the iterator itself calls when it is collected.
            end_workers = getattr(iterator, "_shutdown_workers", None)
            if callable(end_workers):
                end_workers()
