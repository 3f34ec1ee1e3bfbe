"""Is the current device left alone, and no context opened on it, by the side stream?

With a stand-in for ``torch.cuda`` of two devices; ``make gpu2`` looks at real ones.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpuprefetch import streams
from gpuprefetch.streams import SideStream, current_stream
from tests.children import run_script


class TwoDevices:
    """Notes what makes a device current, and how."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.streams: dict[int, Any] = {0: "default-0", 1: "default-1"}
        self.visits = 0

    def Stream(self, device: torch.device) -> str:
        return f"side-{device.index}"

    def current_device(self) -> int:
        return self.current

    def current_stream(self, index: int) -> Any:
        return self.streams[index]

    def set_stream(self, stream: str) -> None:
        """Makes the stream's device current too, as torch does."""
        self.current = int(stream[-1])
        self.streams[self.current] = stream

    def set_device(self, device: Any) -> None:
        raise AssertionError("opens a context on a device that has none")

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Goes back without opening a context, as torch's does."""
        before, self.current = self.current, device.index
        self.visits += 1
        try:
            yield
        finally:
            self.current = before


@pytest.mark.parametrize(("current", "visits"), [(0, 1), (1, 0)])
def test_a_block_on_the_side_stream_leaves_the_current_device(
    current: int, visits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = TwoDevices(current)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    side = SideStream(torch.device("cuda", 1))
    for _ in range(2):
        with side.entered() as outer:
            assert outer == "default-1"
            assert module.current == 1
            assert module.streams[1] == "side-1"
        assert module.current == current
        assert module.streams == {0: "default-0", 1: "default-1"}
    assert module.visits == 2 * visits


def test_the_current_device_comes_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = TwoDevices(0)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    side = SideStream(torch.device("cuda", 1))
    with pytest.raises(ValueError, match="in the block"), side.entered():
        raise ValueError("in the block")
    assert module.current == 0
    assert module.streams == {0: "default-0", 1: "default-1"}


class NamedStream:
    """A stream of torch's on CUDA: what tells it from others is its name."""

    def __init__(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.stream_id = stream_id
        self.device_index = device_index
        self.device_type = device_type

    def __str__(self) -> str:
        return f"stream {(self.stream_id, self.device_index, self.device_type)}"


class Cuda:
    """What torch's functions on CUDA call in the end; counts the objects made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = (0, 0, 1)
        self.made = 0

        def set_stream(*name: int) -> None:
            self.current = name  # type: ignore[assignment]

        for name, stand_in in {
            "_cuda_getCurrentStream": lambda index: self.current,
            "_cuda_setStream": set_stream,
            "_cuda_getDevice": lambda: 0,
        }.items():
            monkeypatch.setattr(torch._C, name, stand_in, raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(streams, "_cuda_streams", {})
        monkeypatch.setattr(streams, "_MOST_CUDA_STREAMS", 3)

    def _make(self, device: torch.device | None = None, **name: int) -> NamedStream:
        self.made += 1
        return NamedStream(**name) if name else NamedStream(99, 0, 1)


def test_the_current_stream_is_looked_up_each_time_and_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played, device = Cuda(monkeypatch), torch.device("cuda", 0)
    for number in (0, 7, 0, 7, 7, 0):
        played.current = (number, 0, 1)
        assert str(current_stream(device)) == f"stream {(number, 0, 1)}"
    assert played.made == 2
    # Many streams of the user's own are not kept for ever.
    for number in range(50):
        played.current = (number, 0, 1)
        assert str(current_stream(device)) == f"stream {(number, 0, 1)}"
        assert len(streams._cuda_streams) <= 3


def test_a_block_is_given_the_stream_before_it_and_goes_back_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Cuda(monkeypatch)
    side = SideStream(torch.device("cuda", 0))
    block = side.entered()
    for number in (7, 0, 7):
        played.current = (number, 0, 1)
        with block as outer:
            # Also where it was never looked up before this block had begun.
            assert str(outer) == f"stream {(number, 0, 1)}"
            assert played.current == (99, 0, 1)
            with block as inner:
                assert str(inner) == "stream (99, 0, 1)"
            assert played.current == (99, 0, 1)
        assert played.current == (number, 0, 1)
    with pytest.raises(ValueError, match="in the block"), block:
        raise ValueError("in the block")
    assert played.current == (7, 0, 1)


def test_an_interrupt_while_a_block_begins_leaves_the_loops_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Cuda(monkeypatch)
    block = SideStream(torch.device("cuda", 0)).entered()
    played.current = (7, 0, 1)

    def interrupt(*name: int, **names: int) -> None:
        assert played.current == (99, 0, 1)
        raise KeyboardInterrupt

    # Looks up the stream before, as the last thing that is done.
    monkeypatch.setattr(torch.cuda, "Stream", interrupt)
    with pytest.raises(KeyboardInterrupt), block:
        pass
    assert played.current == (7, 0, 1)
    assert not block._outer  # type: ignore[attr-defined]


def test_an_interrupt_while_a_block_begins_leaves_the_loops_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = TwoDevices(0)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    block = SideStream(torch.device("cuda", 1)).entered()
    set_stream, calls = module.set_stream, iter([KeyboardInterrupt])

    def set_and_interrupt(stream: str) -> None:
        set_stream(stream)
        for interrupt in calls:
            raise interrupt

    monkeypatch.setattr(module, "set_stream", set_and_interrupt)
    with pytest.raises(KeyboardInterrupt), block:
        pass
    assert module.current == 0
    assert module.streams == {0: "default-0", 1: "default-1"}


# Forked children #

_FORKED = """
import gc, os, sys
from gpuprefetch import streams

class Garbage:
    def __init__(self):
        self.cycle = self
        self.process = os.getpid()

    def __del__(self):
        print("gone in the parent:", os.getpid() == self.process, flush=True)

streams._has_side_stream = {has_side_stream}
gc.disable()  # So that none goes before the fork.
Garbage()
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
gc.collect()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot fork here")
@pytest.mark.parametrize("has_side_stream", [True, False])
def test_a_forked_child_leaves_its_parents_garbage_alone(
    has_side_stream: bool,
) -> None:
    out = run_script(_FORKED.format(has_side_stream=has_side_stream))
    in_parent, in_child = "gone in the parent: True", "gone in the parent: False"
    expected = [in_parent] if has_side_stream else [in_child, in_parent]
    assert out.splitlines() == expected
