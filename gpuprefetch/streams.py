"""Where do streams and events come from, and how does a batch cross between them?

The only maker of streams and events in the package. Works through torch's device
modules (``torch.cuda``, ``torch.xpu``); what only CUDA offers is asked for by name.

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

Which stream is the consumer's is looked up at each hand-off and never kept: a loop may
change its stream at any time.

[Note: Forked children]
A tensor that ``record_use`` was called for needs the device when it goes: the allocator
records an event. In a forked child, such as a worker of a DataLoader, that ends the
process ("terminate called", "CUDA error: initialization error"). A tensor in a cycle of
garbage goes when Python collects it, which may be in the child. So children leave what
was there at the fork to their parent: ``gc.freeze``.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from gpuprefetch.containers import has_own_to, tensors_within

__all__ = [
    "Event",
    "SideStream",
    "Stream",
    "TimingEvent",
    "current_stream",
    "default_stream",
    "enqueue_wait",
    "is_asynchronous",
    "make_current",
    "make_sleeping_event",
    "record_timing",
    "record_use",
]

# Device types on which copies and transforms may run beside the loop. MPS is not among
# them: its non-blocking copies have been seen to hand over unfinished data.
_ASYNC_DEVICE_TYPES = ("cuda", "xpu")

# Whether this process has a side stream; see [Note: Forked children].
_has_side_stream = False

# What torch calls a stream: its id, and the index and the type of its device.
_Name = tuple[int, int, int]


class Event(Protocol):
    """What this package needs of ``torch.cuda.Event`` and its relatives."""

    def record(self, stream: "Stream") -> None:
        """Mark the point that the stream's queue has reached."""

    def wait(self, stream: "Stream") -> None:
        """Let later work of the stream wait for this; returns at once."""

    def query(self) -> bool:
        """Tell whether the device is past this point."""

    def synchronize(self) -> None:
        """Block the host until it is."""


class TimingEvent(Event, Protocol):
    """An event that knows when it fired."""

    def elapsed_time(self, later: "TimingEvent") -> float:
        """Give the ms from this to ``later``; both have fired, so nothing waits."""


class Stream(Protocol):
    """What this package needs of ``torch.cuda.Stream`` and its relatives."""

    def wait_stream(self, stream: "Stream") -> None:
        """Let later work wait for all that the other stream has queued."""

    def query(self) -> bool:
        """Tell whether the device has finished all that was queued."""


def _device_module(device: torch.device) -> Any:
    """Give ``torch.cuda`` or ``torch.xpu``, which torch leaves untyped."""
    return torch.get_device_module(device)


def make_current(device: torch.device) -> None:
    """Make a device the current one of the calling thread."""
    _device_module(device).set_device(device)


def make_sleeping_event(device: torch.device) -> Event:
    """Make an event whose ``synchronize`` sleeps, where the device offers that."""
    sleeps = {"blocking": True} if device.type == "cuda" else {}
    event: Event = _device_module(device).Event(**sleeps)
    return event


def is_asynchronous(device: torch.device) -> bool:
    """Tell whether batches can be prepared on ``device`` beside the loop's own work."""
    return device.type in _ASYNC_DEVICE_TYPES


def _leave_garbage_to_the_parent() -> None:
    """Keep a forked child from collecting it; see [Note: Forked children]."""
    if _has_side_stream:
        gc.freeze()


if hasattr(os, "register_at_fork"):  # Not where processes cannot fork.
    os.register_at_fork(after_in_child=_leave_garbage_to_the_parent)


class SideStream:
    """The stream on which one loader copies and transforms, made once and for life.

    A stream per epoch would leave a pool of reserved memory behind each time, since
    torch's allocator keeps free blocks per stream.

    Args:
        device: Accelerator with an index.
    """

    def __init__(self, device: torch.device) -> None:
        global _has_side_stream
        _has_side_stream = True
        self.device = device
        self._module = _device_module(device)
        self._stream: Stream = self._module.Stream(device)
        # Nobody asks for them any more: to be recorded again, since making an event
        # takes twice as long as recording it.
        self._spare: list[Event] = []

    def entered(self) -> AbstractContextManager[Stream]:
        """Make this the current stream, and its device the current one, in a block.

        The same as ``torch.cuda.stream`` at a fraction of its cost, if it is made once
        and used for every batch. Blocks may nest, in one thread. Each is given the
        stream that was current before.
        """
        kind = _EnteredOnCuda if self._module is torch.cuda else _Entered
        return kind(self.device, self._stream)

    def record_event(self) -> Event:
        """Mark the point that this stream's queue has now reached."""
        try:
            event = self._spare.pop()
        except IndexError:  # Not asked before: another pass may take the last one.
            event = self._module.Event()
        event.record(self._stream)
        return event

    def take_back(self, event: Event) -> None:
        """Let an event of this stream be recorded again.

        The caller neither asks for it nor waits for it any more. What was told to wait
        for it before goes on to wait for the point that it marked then.
        """
        self._spare.append(event)

    def record_timing(self, spare: list[TimingEvent]) -> TimingEvent:
        """Mark that point with an event that tells the time."""
        return record_timing(self._stream, self.device, spare)

    def enqueue_wait_for(self, stream: Stream) -> None:
        """Let this stream wait for all that ``stream`` has queued so far.

        Needed once before a pass, since the transform may read weights that the loop's
        stream still writes, and before batches that already lie on the device.
        """
        self._stream.wait_stream(stream)

    def record_use(self, leaf: object) -> None:
        """Keep a leaf made on another stream alive until this stream has read it."""
        record_use(leaf, self._stream)


class _Entered:
    """Blocks in which a side stream is current; see ``SideStream.entered``."""

    def __init__(self, device: torch.device, stream: Stream) -> None:
        self._device = device
        self._module = _device_module(device)
        self._stream = stream
        # What each open block goes back to: a stream, and torch's block that made the
        # device current, if there had to be one. The newest last.
        self._outer: list[tuple[Any, Any]] = []

    def __enter__(self) -> Stream:
        switch = None
        if self._device.index not in (None, self._module.current_device()):
            switch = self._enter_device()
        outer: Stream = self._module.current_stream(self._device.index)
        self._outer.append((outer, switch))
        try:
            self._module.set_stream(self._stream)
        except BaseException:
            # Ctrl-C too: the block has not begun, so nobody else would go back.
            self.__exit__()
            raise
        return outer

    def __exit__(self, *exception: object) -> None:
        outer, switch = self._outer.pop()
        self._module.set_stream(outer)
        if switch is not None:
            switch.__exit__(None, None, None)

    def _enter_device(self) -> Any:
        # Torch's own, since it goes back without making a context: to set a device
        # that has none yet would open one there.
        switch = self._module.device(self._device)
        switch.__enter__()
        return switch


class _EnteredOnCuda(_Entered):
    """The same, by what torch's functions in Python call in the end."""

    def __init__(self, device: torch.device, stream: Stream) -> None:
        super().__init__(device, stream)
        self._index = device.index
        named: Any = stream
        self._name: _Name = (named.stream_id, named.device_index, named.device_type)

    def __enter__(self) -> Stream:
        switch = None
        if torch._C._cuda_getDevice() != self._index:
            switch = self._enter_device()
        outer = torch._C._cuda_getCurrentStream(self._index)
        self._outer.append((outer, switch))
        try:
            torch._C._cuda_setStream(*self._name)
            return _cuda_stream(outer)
        except BaseException:  # As above.
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        outer, switch = self._outer.pop()
        torch._C._cuda_setStream(*outer)
        if switch is not None:
            switch.__exit__(None, None, None)


def current_stream(device: torch.device) -> Stream:
    """Look up the stream on which the calling thread issues work now."""
    cuda: Any = torch.cuda
    if device.type == "cuda" and cuda.is_initialized():
        return _cuda_stream(torch._C._cuda_getCurrentStream(device.index))
    # By index: looking up a torch.device takes three times as long.
    stream: Stream = _device_module(device).current_stream(device.index)
    return stream


# Kept, since to make a new Python object takes longer than the lookup.
_cuda_streams: dict[_Name, Stream] = {}
_MOST_CUDA_STREAMS = 256  # Those that torch makes are fewer; a user may bring others.


def _cuda_stream(name: _Name) -> Stream:
    """Give the stream of that name, whichever is the current one by now."""
    try:
        return _cuda_streams[name]
    except KeyError:
        pass
    if len(_cuda_streams) >= _MOST_CUDA_STREAMS:
        _cuda_streams.clear()
    kind: Any = torch.cuda.Stream  # Torch leaves its constructor untyped.
    stream: Stream = kind(stream_id=name[0], device_index=name[1], device_type=name[2])
    _cuda_streams[name] = stream
    return stream


def default_stream(device: torch.device) -> Stream:
    """Give the stream on which a thread issues work that has chosen none."""
    module = _device_module(device)
    default = getattr(module, "default_stream", None)
    stream: Stream = (
        current_stream(device) if default is None else default(device.index)
    )
    return stream


def record_timing(
    stream: Stream, device: torch.device, spare: list[TimingEvent]
) -> TimingEvent:
    """Mark the point that a stream's queue has reached, to measure times.

    Args:
        stream: Where.
        device: Whose stream it is.
        spare: Events to record again, the last of which is taken; may be empty.
    """
    event: TimingEvent = (
        spare.pop() if spare else _device_module(device).Event(enable_timing=True)
    )
    event.record(stream)
    return event


def enqueue_wait(event: Event, device: torch.device) -> Stream:
    """Let the stream that is current now wait for ``event``; see [Note: Hand-off].

    Returns:
        That stream: the one on which the batch is about to be used.
    """
    consumer = current_stream(device)
    event.wait(consumer)
    return consumer


def record_use(leaf: object, stream: Stream) -> None:
    """Note that ``stream`` reads ``leaf``; see [Note: Hand-off].

    Args:
        leaf: A tensor of any layout, an object that moves itself, with or without a
            ``record_stream`` of its own, or anything else, which is passed over.
        stream: The reading stream.
    """
    if isinstance(leaf, torch.Tensor):
        is_plain = leaf.layout is torch.strided and not leaf.is_nested
        parts = (leaf,) if is_plain else _storage_tensors(leaf)
        for part in parts:
            # To ask a device for its type takes longer than all else here.
            if part.is_cuda or is_asynchronous(part.device):
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
    elif leaf.is_nested:
        # Its tensors are parts of one buffer.
        yield from leaf.unbind()
    else:
        yield leaf
