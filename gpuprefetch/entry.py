"""What travels from the source to the loop?

Entries carry the batch, the source's state after it, and the error if there was one. No
value stands for "the end": ``None`` is a legal batch.
"""

from dataclasses import dataclass

from gpuprefetch.staging import Slot
from gpuprefetch.streams import Event

__all__ = ["Entry", "InFlight", "Prepared", "as_batch_error"]


# Nobody writes to it. Made once a batch, and a frozen one takes longer to make.
@dataclass(slots=True)
class Prepared:
    """A batch in host memory, ready for the device."""

    batch_host: object
    """The batch; ``StagedLeaf`` stands for each leaf whose bytes lie in ``slot``."""
    slot: Slot | None = None
    """Pinned memory in use until its copies have finished."""


@dataclass(slots=True)
class Entry:
    """One item on its way from the source to the loop."""

    prepared: Prepared | None = None
    """The batch; ``None`` when there is none because of an error or the end."""
    source_state: object = None
    """What ``source.state_dict()`` gave after this batch, where the source has one."""
    error: BaseException | None = None
    """What the source raised, with its traceback; raised again at this batch's turn."""

    @property
    def is_last(self) -> bool:
        """Tell whether nothing comes after this entry."""
        return self.prepared is None


@dataclass(slots=True)
class InFlight:
    """A batch that was issued to the device and not yielded yet."""

    batch_device: object = None
    """Not to be read by the loop before the hand-off."""
    ready: Event | None = None
    """Recorded on the side stream after the transform; the hand-off waits for it."""
    source_state: object = None
    """State of the source after this batch, where the source has one."""
    error: BaseException | None = None
    """What the source, the copy or the transform raised for this batch. Taken out when
    it is raised: its traceback refers to frames that refer to this."""
    holds_source: bool = False
    """A part of the batch lies in memory into which the source may write when it is
    pulled again; so it is not, until this is yielded."""
    is_last: bool = False
    """The source ended or failed here: this is no batch, and none comes after it."""


def as_batch_error(error: Exception, origin: str) -> Exception:
    """Make an error fit to be raised by ``next``.

    A ``StopIteration`` from the user's code would end the loop as if all batches had
    been served; as in a generator, it becomes a ``RuntimeError``. Any other error stays
    what it is.
    """
    if not isinstance(error, StopIteration):
        return error
    replacement = RuntimeError(
        f"{origin} raised StopIteration inside a batch. Catch it there, or return "
        "instead."
    )
    replacement.__cause__ = error
    return replacement
