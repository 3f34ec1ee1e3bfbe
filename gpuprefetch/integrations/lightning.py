"""What does Lightning's Trainer need of a loader, so that it resumes exactly?

The Trainer calls ``iter()`` on a loader when it sets its data up, and a second time
when the first epoch starts; on resuming, it uses the first of them, and tells the
sampler the epoch's number only after it. A pass that began at ``iter()`` would count
one epoch too many, or read the order of epoch 0. So here a pass begins at its first
``next()``.

The Trainer also reads one batch ahead, to see the end coming, of loaders that have no
length. What it writes into a checkpoint must not count that batch.

Nothing of Lightning is imported: it asks for methods only.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from gpuprefetch.loader import StreamPrefetchLoader

__all__ = ["LightningLoader"]

Batch = TypeVar("Batch")


class LightningLoader(StreamPrefetchLoader[Batch]):
    """A :class:`StreamPrefetchLoader` to be returned from ``train_dataloader()``.

    Takes the same arguments. Pass ``device=self.trainer.strategy.root_device``.
    """

    # As of the batch before the newest, where Lightning is one batch ahead.
    _state_behind: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Give a pass that starts with its first batch, since this is a generator."""
        batches = super().__iter__()
        while True:
            behind = None if self._has_length() else super().state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                self._state_behind = None
                return
            self._state_behind = behind
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Describe what the training step got so far."""
        return self._state_behind or super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on after the last batch that ``state`` counts.

        Raises:
            StateError: As in :class:`StreamPrefetchLoader`.
        """
        super().load_state_dict(state)
        self._state_behind = None

    def _has_length(self) -> bool:
        try:
            len(self)
        except TypeError:
            return False
        return True
