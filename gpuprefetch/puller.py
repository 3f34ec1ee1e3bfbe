"""How does one batch come out of the source?"""

from collections.abc import Callable, Iterator

from gpuprefetch.entry import Entry, Prepared, as_batch_error

__all__ = ["Puller"]

# What `next` gives at the end of the source; never leaves this file.
_END = object()


class Puller:
    """Takes one batch after the other from the source and prepares it.

    Args:
        iterator: The source's iterator.
        pulled: Batches that were taken from it already, oldest first.
        prepare: Brings a batch into the host memory from which it will be copied.
        read_state: Gives the source's state, or ``None`` where it keeps none.
        ends_workers: The iterator is a DataLoader's and has worker processes that are
            to end with it.
    """

    def __init__(
        self,
        iterator: Iterator[object],
        *,
        pulled: list[object],
        prepare: Callable[[object], Prepared],
        read_state: Callable[[], object] | None,
        ends_workers: bool,
    ) -> None:
        self._iterator: Iterator[object] | None = iterator
        self._pulled = pulled
        self._prepare = prepare
        self._read_state = read_state
        self._ends_workers = ends_workers

    def pull(self) -> Entry:
        """Get the next entry; never raises what is an ``Exception``."""
        if self._iterator is None:
            return Entry()
        try:
            batch = self._pulled.pop(0) if self._pulled else next(self._iterator, _END)
            # Read before the batch is prepared, which may have to wait.
            state = None if self._read_state is None else self._read_state()
            prepared = None if batch is _END else self._prepare(batch)
        except Exception as error:
            return Entry(error=as_batch_error(error, "the source"))
        return Entry(prepared, state)

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
