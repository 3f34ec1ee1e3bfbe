"""How is the streams' part of the loader played through without a GPU?

:class:`FakeDevice` makes torch's ``meta`` device look like one with streams: copies to
it are real (shape and type without values), while streams and events only note what was
asked of them. So it can be counted who waited for what and which leaf was recorded
where. Whether the waiting suffices is a question for a real device.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpuprefetch import prepare, streams

__all__ = ["FakeDevice", "FakeEvent", "FakeStream", "fake_device_from"]


class FakeMark:
    """A point in the queue of a stream, marked by one recording of an event."""

    def __init__(self) -> None:
        self.was_synchronized = False


class FakeEvent:
    """Has fired at once, or when it was waited for. May be recorded again.

    Args:
        fires_at_once: Whether ``query`` says so before anybody has waited; asked
            whenever it is recorded.
        tells_time: Whether it was made to measure times.
    """

    def __init__(
        self,
        fires_at_once: Callable[[], bool] = lambda: True,
        tells_time: bool = False,
    ) -> None:
        self.tells_time = tells_time
        self.mark = FakeMark()
        """The point at which it was recorded last."""
        self._fires_at_once = fires_at_once
        self._has_fired = fires_at_once()

    def record(self, stream: "FakeStream") -> None:
        self.mark = FakeMark()
        self._has_fired = self._fires_at_once()
        if self.tells_time:
            stream.timing_events.append(self)
        else:
            stream.marks.append(self.mark)

    def wait(self, stream: "FakeStream") -> None:
        stream.waited_for.append(self.mark)

    @property
    def was_synchronized(self) -> bool:
        """Whether the host has waited for it since."""
        return self.mark.was_synchronized

    def query(self) -> bool:
        return self._has_fired or self.was_synchronized

    def synchronize(self) -> None:
        """Nothing runs, so nothing is to be waited for."""
        self.mark.was_synchronized = True

    def elapsed_time(self, later: "FakeEvent") -> float:
        """Nothing runs, so nothing takes time."""
        assert self.query()
        assert later.query()
        return 0.0


class FakeStream:
    """Notes what it was told to wait for."""

    def __init__(self) -> None:
        self.waited_for: list[FakeMark | FakeStream] = []
        self.marks: list[FakeMark] = []
        """Those that others wait for; not those that tell the time."""
        self.timing_events: list[FakeEvent] = []

    def wait_stream(self, stream: "FakeStream") -> None:
        self.waited_for.append(stream)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = FakeEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class FakeDevice:
    """Stands in for ``torch.cuda``, with the ``meta`` device in the place of a GPU."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.consumer = FakeStream()
        self._current = self.consumer
        self._side_streams: list[FakeStream] = []
        self._recorded: list[tuple[int, Any]] = []
        # Ids are told apart only while their tensors live.
        self._alive: list[torch.Tensor] = []
        self.events_have_fired = True
        """Whether events that are recorded from now on fire at once."""

    # What the loader calls #

    def Event(self, blocking: bool = False, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(lambda: self.events_have_fired, enable_timing)

    def Stream(self, device: torch.device) -> FakeStream:
        self._side_streams.append(FakeStream())
        return self._side_streams[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def set_stream(self, stream: FakeStream) -> None:
        self._current = stream

    def set_device(self, device: torch.device) -> None:
        """There is one."""

    def current_device(self) -> int:
        return 0

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self._recorded.append((id(tensor), stream))
        self._alive.append(tensor)

    # What the tests ask #

    def current(self, stream: FakeStream) -> contextlib.AbstractContextManager[None]:
        """Make a stream the current one, as the loop would."""
        return self.stream(stream)

    def new_stream(self) -> FakeStream:
        """Make a stream of the loop's own."""
        return FakeStream()

    @property
    def made_streams(self) -> int:
        """How many streams the loader has made."""
        return len(self._side_streams)

    @property
    def side_stream(self) -> FakeStream:
        """Give the first stream that the loader has made."""
        return self._side_streams[0]

    def recorded_on(self, stream: FakeStream) -> set[int]:
        """Give the ids of the tensors that were recorded on a stream."""
        return {tensor for tensor, on in self._recorded if on is stream}

    def recorded_storages(self, stream: FakeStream) -> set[int]:
        """Name the storages of the tensors that were recorded on a stream."""
        return {
            tensor.untyped_storage()._cdata
            for (_, on), tensor in zip(self._recorded, self._alive, strict=True)
            if on is stream
        }

    def batch_marks(self) -> list[FakeMark]:
        """Give the point after each batch on the first side stream."""
        return self.side_stream.marks[1::2]

    def copy_marks(self) -> list[FakeMark]:
        """Give the point after the copies of each batch, before its transform."""
        return self.side_stream.marks[::2]

    def last_wait(self, stream: FakeStream) -> FakeMark | FakeStream:
        """Give what a stream was last told to wait for."""
        return stream.waited_for[-1]


class _PageableBuffer:
    """Has the face of a pinned buffer; locking pages needs a device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def pin(self) -> None:
        """There is nothing to lock."""

    def unpin(self) -> None:
        """There is nothing to unlock."""


def fake_device_from(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Put a fake device in the place of torch's device module."""
    fake = FakeDevice()
    real = torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda device=None: (
            fake if torch.device(device or "cpu").type == "meta" else real(device)
        ),
    )
    types = (*streams._ASYNC_DEVICE_TYPES, "meta")
    monkeypatch.setattr(streams, "_ASYNC_DEVICE_TYPES", types)
    monkeypatch.setattr(prepare, "PinnedBuffer", _PageableBuffer)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, s: fake.record_stream(tensor, s)
    )
    return fake
