"""Who waits for whom when batches travel over a side stream?

Played through on a fake device (see :mod:`tests.fake_device`), so that it is seen on
any machine which stream was current, which event was waited for, and what was recorded.
That the waiting suffices is shown on a real device, in ``tests/gpu``.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from tests.compare import tensor_leaves
from tests.fake_device import FakeDevice, FakeEvent
from tests.leaks import wait_until_gone
from tests.sources import CountingSource, count

pytestmark = pytest.mark.timeout(30)

both_feeders = pytest.mark.parametrize("background", [False, True])
all_depths = pytest.mark.parametrize("depth", [1, 2, 3, 4])

META = torch.device("meta")


def pairs(length: int) -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((4,), float(i)), i) for i in range(length)]


def test_the_transform_runs_while_the_side_stream_is_current(
    fake_device: FakeDevice,
) -> None:
    seen = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        seen.append(fake_device.current_stream(META))
        return x + 1

    for _ in StreamPrefetchLoader(pairs(3), transform, device=META):
        assert fake_device.current_stream(META) is fake_device.consumer
    assert fake_device.made_streams == 1
    assert seen == [fake_device.side_stream] * 3


@both_feeders
def test_the_loops_stream_is_current_again_after_an_error(
    fake_device: FakeDevice, background: bool
) -> None:
    def transform(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    loader = StreamPrefetchLoader(
        pairs(3), transform, device=META, background=background
    )
    with pytest.raises(ValueError, match=r"(?m)^no$"):
        next(iter(loader))
    assert fake_device.current_stream(META) is fake_device.consumer


@both_feeders
@all_depths
def test_each_hand_off_waits_for_its_own_batch_once(
    fake_device: FakeDevice, depth: int, background: bool
) -> None:
    loader = StreamPrefetchLoader(
        pairs(7), device=META, depth=depth, background=background
    )
    for i, _ in enumerate(loader):
        waited = fake_device.consumer.waited_for
        assert waited == fake_device.batch_marks()[: i + 1]
    assert i == 6


def test_the_hand_off_waits_for_the_transform_not_only_for_the_copy(
    fake_device: FakeDevice,
) -> None:
    events_before_transform = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        events_before_transform.append(len(fake_device.batch_marks()))
        return x

    next(iter(StreamPrefetchLoader(pairs(1), transform, device=META)))
    place = fake_device.batch_marks().index(fake_device.last_wait(fake_device.consumer))
    assert place >= events_before_transform[0]


def test_each_batch_is_recorded_on_the_stream_of_its_own_step(
    fake_device: FakeDevice,
) -> None:
    iterator = iter(StreamPrefetchLoader(pairs(6), torch.neg, device=META, depth=3))
    streams = [fake_device.new_stream() for _ in range(6)]
    for stream in streams:
        with fake_device.current(stream):
            batch = next(iterator)
        assert fake_device.recorded_on(stream) >= {id(x) for x in tensor_leaves(batch)}
        assert len(stream.waited_for) == 1


def test_the_side_stream_waits_for_the_loop_before_its_first_batch(
    fake_device: FakeDevice,
) -> None:
    """The transform may use weights that the loop has just queued an update of."""
    seen = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        seen.append(fake_device.consumer in fake_device.side_stream.waited_for)
        return x

    next(iter(StreamPrefetchLoader(pairs(1), transform, device=META)))
    assert seen == [True]


def test_leaves_that_are_on_the_device_are_recorded_on_both_streams(
    fake_device: FakeDevice,
) -> None:
    x = torch.ones(3, device=META)
    source = [(x, torch.ones(3))]
    out = next(iter(StreamPrefetchLoader(source, lambda x: x, device=META)))
    assert out[0] is x
    assert id(x) in fake_device.recorded_on(fake_device.side_stream)
    assert id(x) in fake_device.recorded_on(fake_device.consumer)
    assert fake_device.side_stream.waited_for.count(fake_device.consumer) >= 2


@both_feeders
@all_depths
def test_at_most_depth_batches_are_in_flight(
    fake_device: FakeDevice, depth: int, background: bool
) -> None:
    source = CountingSource(pairs(12))
    loader = StreamPrefetchLoader(
        source, device=META, depth=depth, background=background
    )
    most_in_flight = 0
    for yielded, _ in enumerate(loader, start=1):
        in_flight = len(fake_device.batch_marks()) - yielded
        most_in_flight = max(most_in_flight, in_flight)
        assert in_flight < depth
    assert yielded == 12
    assert most_in_flight > 0 or depth == 1 or background


@both_feeders
@all_depths
@pytest.mark.parametrize("place", ["source", "transform", "to"])
def test_an_error_comes_at_its_own_batch(
    fake_device: FakeDevice, place: str, depth: int, background: bool
) -> None:
    class Immovable:
        def to(self, device: Any, non_blocking: bool = False) -> None:
            raise ValueError("bad 3")

    def source() -> Iterator[Any]:
        for i in range(6):
            if i == 3 and place == "source":
                raise ValueError("bad 3")
            extra = Immovable() if i == 3 and place == "to" else None
            yield torch.ones(2), i, extra

    calls = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 4 and place == "transform":
            raise ValueError("bad 3")
        return x

    iterator = iter(
        StreamPrefetchLoader(
            source(), transform, device=META, depth=depth, background=background
        )
    )
    assert [next(iterator)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"(?m)^bad 3$"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert not wait_until_gone(2)


@both_feeders
def test_close_waits_for_copies_and_gives_pinned_memory_back(
    fake_device: FakeDevice, background: bool
) -> None:
    loader = StreamPrefetchLoader(pairs(9), device=META, depth=3, background=background)
    fake_device.events_have_fired = False
    iterator = iter(loader)
    next(iterator)
    assert loader.stats().pinned_bytes > 0
    loader.close()
    assert all(mark.was_synchronized for mark in fake_device.copy_marks())
    assert loader.stats().pinned_bytes == 0
    fake_device.events_have_fired = True
    assert [i for _, i in loader] == list(range(9))


@both_feeders
def test_a_device_that_lags_blocks_nothing_for_ever(
    fake_device: FakeDevice, background: bool
) -> None:
    """No copy is seen to have fired before somebody waits for it."""
    fake_device.events_have_fired = False
    loader = StreamPrefetchLoader(
        pairs(30), torch.neg, device=META, depth=3, background=background
    )
    assert [i for _, i in loader] == list(range(30))


def test_pinned_memory_is_kept_from_pass_to_pass_and_bounded(
    fake_device: FakeDevice,
) -> None:
    loader = StreamPrefetchLoader(pairs(9), device=META, depth=2)
    sizes = []
    for _ in range(5):
        list(loader)
        sizes.append(loader.stats().pinned_bytes)
    assert len(set(sizes)) == 1
    batch_bytes = 4 * 4
    assert 0 < sizes[0] <= (2 + 1) * max(batch_bytes, 4096)


@both_feeders
def test_breaks_return_their_slots(fake_device: FakeDevice, background: bool) -> None:
    loader = StreamPrefetchLoader(pairs(9), device=META, depth=2, background=background)
    sizes = []
    for _ in range(6):
        for _batch in loader:
            break
        sizes.append(loader.stats().pinned_bytes)
    # A slot for each batch that may be pulled, and one whose copy may still run.
    assert 0 < max(sizes) <= (2 + 1) * 512


def test_two_passes_at_once_have_slots_of_their_own(fake_device: FakeDevice) -> None:
    loader = StreamPrefetchLoader(pairs(5), device=META, background=True)
    seen = [(a[1], b[1]) for a in loader for b in loader]
    assert seen == [(a, b) for a in range(5) for b in range(5)]
    assert fake_device.made_streams == 1


def test_copies_of_a_loader_have_streams_of_their_own(fake_device: FakeDevice) -> None:
    loader = StreamPrefetchLoader(count(2), device=META)
    list(loader)
    list(copy.deepcopy(loader))
    assert fake_device.made_streams == 2


def test_events_are_recorded_again_once_nobody_asks_for_them(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making an event takes twice as long as recording it."""
    made: list[FakeEvent] = []
    make = fake_device.Event

    def note(**settings: bool) -> FakeEvent:
        made.append(make(**settings))
        return made[-1]

    monkeypatch.setattr(fake_device, "Event", note)
    loader = StreamPrefetchLoader(count(50), torch.neg, device=META, depth=3)
    list(loader)
    num_made = sum(not event.tells_time for event in made)
    list(loader)
    # Two for each batch in flight, and one for each step that the host is ahead.
    assert 0 < num_made <= 3 * 3 + 1
    # Those of the next pass are of the side stream, which stays.
    assert sum(not event.tells_time for event in made) <= num_made + 4


# The detector detects #


def test_meta_an_event_that_nobody_waited_for_is_seen(fake_device: FakeDevice) -> None:
    fake_device.events_have_fired = False
    event = fake_device.consumer.record_event(fake_device.Event())
    assert not event.query()
    assert not event.was_synchronized
    event.synchronize()
    assert event.query()
