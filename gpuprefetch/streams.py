"""Where do streams, events and pinned buffers come from?

The only maker of streams and events in the package. Works through torch's device
modules (``torch.cuda``, ``torch.xpu``), so nothing here names one vendor.

[Note: Hand-off]
A batch is copied and transformed on the *side stream*; the loop works on whatever
stream is current in it. Two things make the crossing safe:

1. *Order.* ``enqueue_wait`` makes the consumer's stream wait for the event recorded
   right after that batch. An event per batch, and not ``wait_stream``: the latter would
   also wait for the batches behind it.
2. *Memory.* The batch lives in blocks that torch's allocator keeps for the side stream.
   When the loop drops the batch, such a block would be free for the next copy at once,
   while kernels of the loop may still have to read it. ``record_use`` tells the
   allocator which other stream reads it, so it is reused only after those kernels.

The consumer's stream is looked up at each hand-off and never stored: a loop may change
its stream at any time.

[Note: Host lead]
Memory noted by ``record_use`` is free for reuse once the *device* is past it. A host
far ahead of the device therefore makes the allocator reserve one more batch for every
step of its lead. :class:`HostLead` bounds that: the loop's thread pauses while it is
more than ``depth`` steps ahead. Work for that many steps is then queued on the device,
so the device does not idle.
"""

import collections
import logging
import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol, cast

import torch

from gpuprefetch.batch import tensors_within
from gpuprefetch.containers import has_own_to

__all__ = [
    "Event",
    "HostLead",
    "PinnedBuffer",
    "SideStream",
    "Stream",
    "current_stream",
    "enqueue_wait",
    "is_asynchronous",
    "record_use",
]

_logger = logging.getLogger(__name__)

# Device types on which copies and transforms may run beside the loop. MPS is not among
# them: its non-blocking copies have been seen to hand over unfinished data.
_ASYNC_DEVICE_TYPES = ("cuda", "xpu")


class Event(Protocol):
    """What this package needs of ``torch.cuda.Event`` and its relatives."""

    def query(self) -> bool:
        """Tell whether the device is past this point."""

    def synchronize(self) -> None:
        """Block the host until it is."""


class Stream(Protocol):
    """What this package needs of ``torch.cuda.Stream`` and its relatives."""

    def wait_event(self, event: Event) -> None:
        """Let later work wait for the event; returns at once."""

    def wait_stream(self, stream: "Stream") -> None:
        """Let later work wait for all that the other stream has queued."""

    def record_event(self, event: Event) -> Event:
        """Mark the point that the queue has reached."""


def _device_module(device: torch.device) -> Any:
    """Give ``torch.cuda`` or ``torch.xpu``, which torch leaves untyped."""
    return torch.get_device_module(device)


def is_asynchronous(device: torch.device) -> bool:
    """Tell whether batches can be prepared on ``device`` beside the loop's own work."""
    return device.type in _ASYNC_DEVICE_TYPES


class SideStream:
    """The stream on which one loader copies and transforms, made once and for life.

    A stream per epoch would leave a pool of reserved memory behind each time, since
    torch's allocator keeps free blocks per stream.

    Args:
        device: Accelerator with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = _device_module(device)
        self._stream: Stream = self._module.Stream(device)

    def __enter__(self) -> "SideStream":
        """Make this the current stream, and its device the current one, in a block.

        The same as ``torch.cuda.stream`` at half its cost. Not to be nested.
        """
        self._outer_device = self._module.current_device()
        self._outer_stream = current_stream(self.device)
        self._module.set_stream(self._stream)
        return self

    def __exit__(self, *exception: object) -> None:
        self._module.set_stream(self._outer_stream)
        if self._outer_device != self.device.index:
            self._module.set_device(self._outer_device)

    def record_event(self) -> Event:
        """Mark the point that this stream's queue has now reached."""
        return self._stream.record_event(self._module.Event())

    def wait_for(self, stream: Stream) -> None:
        """Let this stream wait for all that ``stream`` has queued so far.

        Needed once before a pass, since the transform may read weights that the loop's
        stream still writes, and before batches that already lie on the device.
        """
        self._stream.wait_stream(stream)

    def wait_for_outer(self) -> None:
        """Inside the block: wait for the stream that was current outside it."""
        self._stream.wait_stream(self._outer_stream)

    def record_use(self, leaf: object) -> None:
        """Keep a leaf made on another stream alive until this stream has read it."""
        record_use(leaf, self._stream)


def current_stream(device: torch.device) -> Stream:
    """Look up the stream on which the calling thread issues work now."""
    # By index: looking up a torch.device takes three times as long.
    stream: Stream = _device_module(device).current_stream(device.index)
    return stream


def enqueue_wait(event: Event, device: torch.device) -> Stream:
    """Let the stream that is current now wait for ``event``; see [Note: Hand-off].

    Returns:
        That stream: the one on which the batch is about to be used.
    """
    consumer = current_stream(device)
    consumer.wait_event(event)
    return consumer


def record_use(leaf: object, stream: Stream) -> None:
    """Note that ``stream`` reads ``leaf``; see [Note: Hand-off].

    Args:
        leaf: A tensor of any layout, an object that moves itself, with or without a
            ``record_stream`` of its own, or anything else, which is passed over.
        stream: The reading stream.
    """
    if isinstance(leaf, torch.Tensor):
        parts = (leaf,) if leaf.layout is torch.strided else _storage_tensors(leaf)
        for part in parts:
            if is_asynchronous(part.device):
                part.record_stream(stream)  # type: ignore[arg-type]
    elif has_own_to(leaf):
        record = getattr(leaf, "record_stream", None)
        if callable(record):
            record(stream)
        else:
            for tensor in tensors_within(leaf):
                record_use(tensor, stream)


def _storage_tensors(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """Name the dense tensors that hold the memory of a leaf of another layout."""
    if leaf.layout is torch.sparse_coo:
        yield leaf._indices()
        yield leaf._values()
    elif leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (leaf.crow_indices(), leaf.col_indices(), leaf.values())
    elif leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (leaf.ccol_indices(), leaf.row_indices(), leaf.values())
    elif leaf.layout is torch.jagged:
        yield from (leaf.values(), cast(Any, leaf).offsets())
    else:
        yield leaf


class HostLead:
    """Bounds how many steps the loop's thread is ahead of the device.

    See [Note: Host lead].

    Args:
        most_steps: Steps that may be queued on the device before the thread pauses.
        device: Where the loop's kernels run.
    """

    def __init__(self, most_steps: int, device: torch.device) -> None:
        self._most_steps = most_steps
        self._device = device
        # One event a step, oldest first, recorded on the loop's stream at the hand-off.
        # Only the loop's thread reads and writes these.
        self._steps: collections.deque[Event] = collections.deque()
        # Fired, to be recorded again: making an event takes longer.
        self._spare: list[Event] = []

    def wait_in_bounds(self) -> None:
        """Pause while too many steps are unfinished."""
        while len(self._steps) > self._most_steps:
            step_begun = self._steps.popleft()
            # Asked first: waiting for what has happened costs three times as much.
            if not step_begun.query():
                step_begun.synchronize()
            self._spare.append(step_begun)

    def note_step(self, consumer: Stream) -> None:
        """Note that the loop's next step is about to be queued on ``consumer``."""
        event = self._spare.pop() if self._spare else _sleeping_event(self._device)
        self._steps.append(consumer.record_event(event))


def _sleeping_event(device: torch.device) -> Event:
    """Make an event whose ``synchronize`` sleeps, where the device offers that."""
    module = _device_module(device)
    sleeps = {"blocking": True} if device.type == "cuda" else {}
    event: Event = module.Event(**sleeps)
    return event


class PinnedBuffer:
    """Host memory of exactly the size asked for, page-locked before its first copy.

    torch's own pinned allocator rounds up to a power of two and keeps what it has until
    the process ends. This registers an anonymous mapping instead, where the device
    library can, and takes torch's allocator where it cannot.

    Registering is a call to the device and left to the thread that issues copies
    (:meth:`lock`): from another one it would spoil a graph capture under way.

    Args:
        num_bytes: Size, more than 0.
        device: Accelerator that will read the buffer.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._runtime = _registering_runtime(device)
        self._is_locked = self._runtime is None
        if self._runtime is None:
            self.bytes = torch.empty(
                num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        else:
            # The mapping is this tensor's from here on, and goes with it.
            self.bytes = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)

    def lock(self) -> None:
        """Lock the pages, once; for the thread that issues copies."""
        if self._is_locked or self._runtime is None:
            return
        self._is_locked = True
        address = self.bytes.data_ptr()
        if int(self._runtime.cudaHostRegister(address, self.num_bytes, 0)) != 0:
            self._runtime = None
            _clear_last_error(self._device)
            _logger.warning(
                "cannot lock %d bytes of host memory; copies from them will block",
                self.num_bytes,
            )

    def release(self) -> None:
        """Unlock the pages. No copy may be reading them any more; safe to call twice.

        Also for the thread that issues copies.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is not None and self._is_locked:
            runtime.cudaHostUnregister(self.bytes.data_ptr())

    def __del__(self) -> None:
        self.release()


def _clear_last_error(device: torch.device) -> None:
    """Take back the refusal that the runtime keeps for the next kernel launch."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


class _Runtime(Protocol):
    """The two calls of ``torch.cuda.cudart()`` that are used here."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Lock pages; 0 on success."""

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock them; 0 on success."""


def _registering_runtime(device: torch.device) -> _Runtime | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return cast(_Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
