"""Do the figures say what happened, in bounded memory and without waiting?

What the times on the device are worth is shown on one, in ``tests/gpu``; here it is
counted what was recorded, asked and reused.
"""

import dataclasses
import gc
import math
import pickle
import random
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from gpuprefetch import LoaderStats, StreamPrefetchLoader, ranges
from gpuprefetch.histogram import Histogram, Spread
from gpuprefetch.meter import Meter
from gpuprefetch.stages import Stage
from tests.fake_clock import FakeClock
from tests.fake_device import FakeDevice, FakeEvent, FakeStream
from tests.sources import Images, count

pytestmark = pytest.mark.timeout(30)

META = torch.device("meta")
both_feeders = pytest.mark.parametrize("background", [False, True])

_SPREADS = [
    field.name for field in dataclasses.fields(LoaderStats) if field.type is Spread
]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Slow:
    """A source that works on each batch."""

    def __init__(self, length: int, work: Callable[[], object]) -> None:
        self.length, self.work = length, work

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.length):
            self.work()
            yield torch.full((4,), float(i))


# Distributions #


@pytest.mark.parametrize("sigma", [0.05, 1.0, 3.0])
def test_percentiles_are_within_three_percent_and_the_mean_is_exact(
    sigma: float,
) -> None:
    values = [random.lognormvariate(0.5, sigma) for _ in range(20_000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    spread = histogram.spread()
    cuts = statistics.quantiles(values, n=100)
    assert spread.count == len(values)
    assert spread.mean == pytest.approx(statistics.fmean(values))
    assert spread.p50 == pytest.approx(cuts[49], rel=0.03)
    assert spread.p99 == pytest.approx(cuts[98], rel=0.06)


def test_many_values_at_once_count_as_each_on_its_own() -> None:
    values = [0.0, -1.0, 1e12, *(1.1**place for place in range(-90, 90))]
    at_once, one_by_one = Histogram(), Histogram()
    at_once.add_all(values[:50])
    at_once.add_all([])
    at_once.add_all(values[50:])
    for value in values:
        one_by_one.add(value)
    spread, expected = at_once.spread(), one_by_one.spread()
    assert dataclasses.replace(spread, mean=0) == dataclasses.replace(expected, mean=0)
    assert spread.mean == pytest.approx(expected.mean)


def test_a_mean_that_is_asked_for_while_values_are_added_is_one_of_some_of_them() -> (
    None
):
    histogram = Histogram()
    asked: list[Spread] = []

    class Asking(list[float]):
        def __iter__(self) -> Iterator[float]:
            for value in super().__iter__():
                asked.append(histogram.spread())
                yield value

    histogram.add_all([2.0] * 5)
    histogram.add_all(Asking([2.0] * 60))
    asked.append(histogram.spread())
    assert {spread.mean for spread in asked} == {2.0}
    assert {spread.count for spread in asked} == {5, 65}


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e-4, 1e9, 1e15, math.inf])
def test_a_value_beyond_all_bins_is_counted(value: float) -> None:
    histogram = Histogram()
    histogram.add(value)
    assert histogram.spread().count == 1
    assert histogram.spread().p50 == (0.0 if value <= 1e-4 else pytest.approx(1e9, 0.1))


@pytest.mark.parametrize("whole", range(21))
def test_whole_numbers_come_back_whole(whole: int) -> None:
    histogram = Histogram()
    histogram.add(whole)
    assert histogram.spread(is_whole=True).p50 == whole


def test_what_was_not_measured_says_so() -> None:
    assert Histogram().spread() == Spread(0.0, 0.0, 0.0, 0)


def test_memory_does_not_grow_over_100_000_batches() -> None:
    meter = Meter()

    def run(num_batches: int) -> int:
        for place in range(num_batches):
            meter.begin_next(place % 3)
            with meter.waiting_for_source:
                meter.note_pull(1e-3)
            meter.end_next()
        return len(pickle.dumps(vars(vars(meter)["_times"])["period_ms"]._bins))

    before = run(1000)
    after = run(99_000)
    assert meter.yielded == 100_000
    # The same bins with larger numbers in them.
    assert after < 2 * before
    assert not meter._pending
    assert not meter._spare


def test_memory_does_not_grow_where_ctrl_c_has_kept_a_lock() -> None:
    meter = Meter()
    meter._counting.acquire()
    for _ in range(10_000):
        meter.begin_next(1)
        meter.end_next()
    assert len(meter._readings) <= 2048


# Counts #


def three_then_an_error() -> Iterator[torch.Tensor]:
    yield from count(3)
    raise ValueError("the fourth")


def test_a_next_that_gives_no_batch_counts_as_a_step(
    other_device: torch.device,
) -> None:
    ended = StreamPrefetchLoader(count(3), device=other_device)
    assert len(list(ended)) == 3
    failed = StreamPrefetchLoader(three_then_an_error(), device=other_device)
    with pytest.raises(ValueError, match="the fourth"):
        list(failed)
    for stats in (ended.stats(), failed.stats(finished=True)):
        assert stats.batches == 3
        # Of every `next` after the first; a step lies between two that are counted.
        assert stats.queue_depth.count == 3
        assert stats.period_ms.count == stats.between_ms.count == 2
        # Its parts are those of a batch.
        assert stats.loader_ms.count == 2


@both_feeders
def test_stats_count_what_was_yielded(device: torch.device, background: bool) -> None:
    loader = StreamPrefetchLoader(
        count(5), double, device=device, background=background
    )
    before = loader.stats()
    assert isinstance(before, LoaderStats)
    assert before.batches == 0
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert loader.stats().batches == 2
    list(iterator)
    stats = loader.stats()
    assert stats.batches == 5
    assert "double" in stats.transform
    # The first `next` fills the pipeline: it counts for itself.
    assert stats.first_ms > 0
    for name in ("source_wait_ms", "device_wait_ms", "loader_ms"):
        assert getattr(stats, name).count == 4, name
        assert getattr(stats, name).mean >= 0, name


def test_stats_count_copied_bytes(other_device: torch.device) -> None:
    source = [torch.zeros(100, dtype=torch.uint8)] * 4
    loader = StreamPrefetchLoader(source, device=other_device)
    list(loader)
    assert loader.stats().copied_bytes == 400


def test_stats_are_a_frozen_record_of_documented_fields() -> None:
    stats = StreamPrefetchLoader(count(1)).stats()
    with pytest.raises(AttributeError):
        stats.batches = 3  # type: ignore[misc]
    assert len(_SPREADS) == 13


def test_the_finished_pass_is_kept_while_the_next_one_runs() -> None:
    loader = StreamPrefetchLoader(count(6))
    assert loader.stats(finished=True).batches == 0
    running = iter(loader)
    next(running)
    assert loader.stats(finished=True).batches == 0
    list(running)
    assert loader.stats(finished=True) == loader.stats()
    for _ in zip(range(2), loader, strict=False):
        assert loader.stats(finished=True).batches == 6
        assert loader.stats(finished=True).epoch == 0
        assert loader.stats().epoch == 1
    # Left by `break`: over, too.
    assert loader.stats(finished=True).epoch == 1


def test_the_finished_pass_is_the_last_one_that_ended_among_several() -> None:
    loader = StreamPrefetchLoader(count(6))
    list(loader)
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    assert loader.stats(finished=True).epoch == 0
    list(first)
    assert loader.stats(finished=True).epoch == 1
    assert loader.stats(finished=True).batches == 6
    assert loader.stats().epoch == 2
    assert loader.stats().batches == 1
    list(second)
    assert loader.stats(finished=True).epoch == 2


def test_figures_follow_a_source_that_was_replaced() -> None:
    loader = StreamPrefetchLoader(DataLoader(Images(8), 2))
    assert loader.stats().num_workers == 0
    replaced = weakref.ref(loader.source)
    loader.source = count(3)
    list(loader)
    assert loader.stats().num_workers is None
    gc.collect()
    assert replaced() is None


# Times on the host #


def test_a_slow_source_shows_as_waiting_for_it(fake_clock: FakeClock) -> None:
    loader = StreamPrefetchLoader(Slow(12, lambda: fake_clock.pass_ms(10)), double)
    for _ in loader:
        fake_clock.pass_ms(5)
    stats = loader.stats()
    assert stats.pull_ms.mean == pytest.approx(10, abs=0.1)
    assert stats.source_wait_ms.mean == pytest.approx(10, abs=0.1)
    assert stats.between_ms.mean == pytest.approx(5, abs=0.1)
    assert stats.period_ms.mean == pytest.approx(15, abs=0.3)
    assert stats.loader_ms.mean < 0.2


@pytest.mark.parametrize("fails", [False, True])
def test_a_source_that_takes_long_to_end_or_fail_was_waited_for(
    fake_clock: FakeClock, fake_device: FakeDevice, fails: bool
) -> None:
    def three() -> Iterator[torch.Tensor]:
        yield from count(3)
        fake_clock.pass_ms(300)
        if fails:
            raise ValueError("the fourth")

    loader = StreamPrefetchLoader(three(), device=META, depth=2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    # The last two: the source was asked for a fourth while the third was in flight.
    stats = loader.stats()
    assert stats.source_wait_ms.mean == pytest.approx(150, abs=1)
    assert stats.pull_ms.p99 < 1
    assert stats.loader_ms.p99 < 1
    with pytest.raises(ValueError if fails else StopIteration):
        next(batches)


def test_what_the_thread_has_ready_is_not_waited_for() -> None:
    loader = StreamPrefetchLoader(count(12), double, background=True)
    for _ in loader:
        time.sleep(0.01)
    # A thread pulls at most `depth` batches ahead, and had 10 ms to do so.
    assert loader.stats().source_wait_ms.p50 == 0


def test_the_device_was_waited_for_only_where_it_had_not_come_that_far(
    fake_clock: FakeClock, fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = StreamPrefetchLoader(count(12), device=META)
    list(ready)
    assert ready.stats().device_wait_ms == Spread(0.0, 0.0, 0.0, 11)

    def wait(event: FakeEvent) -> None:
        fake_clock.pass_ms(20)
        synchronize(event)

    synchronize = FakeEvent.synchronize
    monkeypatch.setattr(FakeEvent, "synchronize", wait)
    fake_device.events_have_fired = False
    late = StreamPrefetchLoader(count(12), device=META)
    list(late)
    assert late.stats().device_wait_ms.count == 11
    assert late.stats().device_wait_ms.p50 >= 20 * 0.978


def test_the_clock_is_read_four_times_a_batch_where_nothing_is_waited_for(
    fake_clock: FakeClock, fake_device: FakeDevice
) -> None:
    """When `next` begins and ends, and before and after the source's own code."""
    source = [torch.zeros(8, device=META) for _ in range(80)]
    batches = iter(StreamPrefetchLoader(source, device=META))
    next(batches)
    before = fake_clock.num_looks
    for _ in range(70):
        next(batches)
    assert fake_clock.num_looks - before == 4 * 70


def test_a_slow_source_in_a_thread_shows_as_waiting_for_it() -> None:
    source = Slow(12, lambda: time.sleep(0.01))
    loader = StreamPrefetchLoader(source, double, background=True)
    list(loader)
    stats = loader.stats()
    assert stats.pull_ms.mean >= 10
    assert stats.source_wait_ms.p50 > 0.5 * stats.pull_ms.p50
    assert stats.source_wait_ms.mean <= stats.period_ms.mean
    assert stats.loader_ms.p50 < 0.5 * stats.pull_ms.p50


def test_a_slow_loop_hides_the_source() -> None:
    loader = StreamPrefetchLoader(Slow(12, lambda: time.sleep(0.005)), background=True)
    for _ in loader:
        time.sleep(0.02)
    stats = loader.stats()
    assert stats.source_wait_ms.p50 < 0.2 * stats.pull_ms.p50
    assert stats.between_ms.mean >= 20
    assert stats.between_ms.count == stats.period_ms.count == 11
    assert stats.queue_depth.mean > 0.5


def test_a_slow_transform_shows_as_the_loaders_own_time(fake_clock: FakeClock) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        fake_clock.pass_ms(10)
        return x

    loader = StreamPrefetchLoader(count(10), slow)
    list(loader)
    stats = loader.stats()
    assert stats.transform_host_ms.mean == pytest.approx(10, abs=0.1)
    assert stats.transform_host_ms.count == 9
    assert stats.loader_ms.mean == pytest.approx(10, abs=0.2)
    assert stats.own_ms < 0.2
    assert stats.source_wait_ms.mean < 0.2


def test_what_the_first_next_does_is_in_no_other_figure(
    fake_clock: FakeClock, fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transform compiles a kernel, its packing pins memory, its source starts."""
    from gpuprefetch import prepare

    works = {"pull": 1000.0, "pack": 2000.0, "transform": 4000.0}
    fill = prepare.fill_slot

    def slow_fill(*arguments: Any) -> Any:
        fake_clock.pass_ms(works["pack"])
        return fill(*arguments)

    def slow(x: torch.Tensor) -> torch.Tensor:
        fake_clock.pass_ms(works["transform"])
        return x

    monkeypatch.setattr(prepare, "fill_slot", slow_fill)
    source = Slow(12, lambda: fake_clock.pass_ms(works["pull"]))
    loader = StreamPrefetchLoader(source, slow, device=META)
    for _ in loader:
        works.update(pull=1.0, pack=2.0, transform=4.0)
        fake_clock.pass_ms(8)
    stats = loader.stats()
    assert stats.first_ms > 7000
    # All are of the 11 batches after it, and so are parts of one another.
    for name in ("pin_ms", "transform_host_ms", "loader_ms", "period_ms"):
        assert getattr(stats, name).count == 11, name
        assert getattr(stats, name).p99 < 30, name
    assert stats.pull_ms.p99 < 30
    parts_ms = stats.pin_ms.mean + stats.transform_host_ms.mean
    assert parts_ms <= stats.loader_ms.mean <= stats.period_ms.mean


def test_a_thread_counts_what_it_packs_once_the_loop_has_a_batch(
    fake_device: FakeDevice,
) -> None:
    loader = StreamPrefetchLoader(count(40), device=META, background=True)
    batches = iter(loader)
    assert loader.stats().pin_ms.count == 0
    next(batches)
    list(batches)
    assert 0 < loader.stats().pin_ms.count < 40


@both_feeders
def test_packing_counts_as_the_loaders_work_where_its_thread_packs(
    fake_device: FakeDevice, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprefetch import prepare

    def slow_fill(*arguments: Any) -> Any:
        time.sleep(0.01)
        return fill(*arguments)

    fill = prepare.fill_slot
    monkeypatch.setattr(prepare, "fill_slot", slow_fill)
    loader = StreamPrefetchLoader(count(12), device=META, background=background)
    list(loader)
    stats = loader.stats()
    assert stats.pin_ms.p50 > 9.7  # Half of the batches, within 2.2 %.
    assert stats.is_threaded is background
    waited, worked = stats.source_wait_ms.p50, stats.loader_ms.p50
    assert (waited > 2 * worked) if background else (worked > 2 * waited)


# Times on the device #


@both_feeders
@pytest.mark.parametrize("length", [10, 200])
def test_timing_events_are_recorded_for_a_sample_and_reused(
    fake_device: FakeDevice, background: bool, length: int
) -> None:
    loader = StreamPrefetchLoader(
        count(length), double, device=META, background=background
    )
    list(loader)
    sampled = sum(place < 32 or place % 8 == 0 for place in range(length))
    recorded = fake_device.side_stream.timing_events
    # Not of those that are issued before the first is yielded: by then one or two.
    assert loader.stats().copy_ms.count in (sampled - 2, sampled - 1)
    assert loader.stats().transform_ms.count == loader.stats().copy_ms.count
    # Begin of the copy, its end, end of the transform.
    assert len(recorded) == 3 * loader.stats().copy_ms.count
    # Begin and end of the hand-off; not of the first batch, which fills the pipeline,
    # and the begin once more where no batch comes.
    assert loader.stats().stall_ms.count == sampled - 1
    assert len({id(event) for event in recorded}) < 12


def test_timing_events_are_asked_for_at_one_batch_in_eight(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_at: set[int] = set()
    query = FakeEvent.query

    def note(event: FakeEvent) -> bool:
        if event.tells_time:
            asked_at.add(place)
        return query(event)

    monkeypatch.setattr(FakeEvent, "query", note)
    batches = iter(StreamPrefetchLoader(count(100), double, device=META))
    for place in range(100):  # noqa: B007 - `note` reads it.
        next(batches)
    assert {place for place in asked_at if place >= 32} == set(range(32, 100, 8))


def test_no_timing_event_is_ever_waited_for(fake_device: FakeDevice) -> None:
    fake_device.events_have_fired = False
    loader = StreamPrefetchLoader(count(2000), double, device=META)
    list(loader)
    streams = (fake_device.side_stream, fake_device.consumer)
    recorded = [event for stream in streams for event in stream.timing_events]
    assert recorded
    assert not any(event.was_synchronized for event in recorded)
    # None of them has fired, so nothing was measured, and recording has ceased.
    assert loader.stats().stall_ms.count == 0
    assert len(recorded) < 500


def test_the_stall_begins_before_the_loader_waits_and_ends_after_the_batchs_event(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def record(event: FakeEvent, stream: FakeStream) -> None:
        if stream is fake_device.consumer:
            order.append("time" if event.tells_time else "event")

    monkeypatch.setattr(FakeEvent, "record", record)
    monkeypatch.setattr(FakeEvent, "wait", lambda event, stream: order.append("wait"))
    batches = iter(StreamPrefetchLoader(count(3), device=META))
    next(batches)
    order.clear()
    next(batches)
    assert order[:3] == ["time", "wait", "time"]
    batches.close()  # type: ignore[attr-defined]


def test_without_a_device_beside_the_loop_nothing_is_measured_on_it() -> None:
    loader = StreamPrefetchLoader(count(9), double)
    list(loader)
    stats = loader.stats()
    assert stats.stall_ms.count == stats.copy_ms.count == stats.transform_ms.count == 0
    assert not stats.is_overlapped


@pytest.mark.parametrize("depth", [1, 3])
def test_the_depth_is_the_one_that_was_given(device: torch.device, depth: int) -> None:
    loader = StreamPrefetchLoader(count(9), double, device=device, depth=depth)
    assert loader.stats().depth == depth
    list(loader)
    assert loader.stats().depth == depth
    assert loader.stats().is_overlapped == (device.type != "cpu")


def test_batches_in_flight_are_measured(fake_device: FakeDevice) -> None:
    source = [torch.zeros(1000, dtype=torch.uint8) for _ in range(12)]
    loader = StreamPrefetchLoader(source, device=META, depth=3)
    list(loader)
    assert loader.stats().device_bytes == 3 * 1000


@pytest.mark.parametrize("num_batches", [1, 2])
def test_batches_in_flight_are_measured_in_a_short_pass_too(
    fake_device: FakeDevice, num_batches: int
) -> None:
    source = [torch.zeros(1000, dtype=torch.uint8) for _ in range(num_batches)]
    loader = StreamPrefetchLoader(source, device=META)
    batches = iter(loader)
    next(batches)
    assert loader.stats().device_bytes == num_batches * 1000
    list(batches)
    assert loader.stats().device_bytes == num_batches * 1000


def test_figures_asked_for_while_the_loop_reads_events_miss_no_batch(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = StreamPrefetchLoader(count(40), double, device=META)
    query, asked = FakeEvent.query, []

    def query_and_be_asked(event: FakeEvent) -> bool:
        asked.append(loader.stats())
        return query(event)

    batches = iter(loader)
    for _ in range(30):
        next(batches)
    monkeypatch.setattr(FakeEvent, "query", query_and_be_asked)
    next(batches)
    assert asked
    assert {stats.loader_ms.count for stats in asked} == {29}
    assert {stats.first_ms > 0 for stats in asked} == {True}


def test_another_thread_may_ask_for_figures_at_any_moment(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = StreamPrefetchLoader(count(40), double, device=META)
    query, asked = FakeEvent.query, []

    def query_and_be_asked(event: FakeEvent) -> bool:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: asked.append(loader.stats()))
            thread.start()
            thread.join()
        return query(event)

    monkeypatch.setattr(FakeEvent, "query", query_and_be_asked)
    assert len(list(loader)) == 40
    monkeypatch.undo()
    assert asked
    assert loader.stats().stall_ms.count == 32


# For loggers #


def test_a_flat_dict_of_numbers_leaves_out_what_was_not_measured(
    device: torch.device,
) -> None:
    loader = StreamPrefetchLoader(count(12), double, device=device)
    list(loader)
    flat = loader.stats().as_dict("loader/")
    assert all(isinstance(value, int | float) for value in flat.values())
    assert flat["loader/batches"] == 12
    assert flat["loader/period_ms_p99"] > 0
    is_measured = "loader/stall_ms_mean" in flat
    assert is_measured == (device.type == "cuda")
    assert "loader/pin_ms_mean" not in flat or is_measured


def test_fusion_is_a_number_too() -> None:
    assert LoaderStats(fusion="fused").as_dict()["is_fused"] == 1
    assert LoaderStats(fusion="not fused, Kornia: x").as_dict()["is_fused"] == 0
    assert "is_fused" not in LoaderStats().as_dict()


def test_a_bar_shows_totals_and_takes_the_brief_figures() -> None:
    loader = StreamPrefetchLoader(DataLoader(Images(12), batch_size=2))
    with tqdm(loader, disable=None) as bar:
        for _ in bar:
            bar.set_postfix(loader.stats().brief())
        assert bar.total == 6
    brief = loader.stats().brief()
    assert set(brief) == {"step", "source", "loader"}
    assert all(text.endswith(" ms") for text in brief.values())


# Ranges #


def _names_seen(profile: torch.profiler.profile) -> set[str]:
    return {
        event.name
        for event in profile.events() or []
        if event.name.startswith("gpuprefetch::")
    }


def test_a_profiler_sees_the_stages(fake_device: FakeDevice) -> None:
    loader = StreamPrefetchLoader(count(4), double, device=META)
    with torch.profiler.profile() as profile:
        list(loader)
    assert _names_seen(profile) == {
        "gpuprefetch::wait",
        "gpuprefetch::pin",
        "gpuprefetch::copy",
        "gpuprefetch::transform",
        "gpuprefetch::hand-off",
    }


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"a range {name} nobody looks at")

    monkeypatch.setattr(ranges.profiler, "record_function", refuse)
    list(StreamPrefetchLoader(count(4), double))
    with pytest.raises(AssertionError, match="nobody looks at"), Stage("x"):
        ranges._ProfilerRange("x")


def test_nsight_gets_ranges_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: list[str] = []
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", open_now.append)
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_pop", lambda: seen.append(open_now.pop())
    )
    ranges.enable_nvtx()
    try:
        list(StreamPrefetchLoader(count(3), double))
    finally:
        ranges.enable_nvtx(False)
    assert not open_now
    assert set(seen) == {
        "gpuprefetch::wait",
        "gpuprefetch::transform",
        "gpuprefetch::hand-off",
    }
    list(StreamPrefetchLoader(count(3), double))
    assert len(seen) == 4 + 3 + 3
