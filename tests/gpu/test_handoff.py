"""Is every batch complete when the loop gets it, and untouched while the loop reads it?

The two halves of the hand-off are switched off in turn, each with the same check, so
that it is known to see the fault that it guards against.
"""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader, streams
from tests.children import start_script
from tests.gpu.support import (
    CUDA,
    PAUSE_CYCLES,
    Bank,
    HostMemory,
    count_differing,
    pause_device,
    settle,
)

_NUM_BATCHES = 1000

# More would hide a missing wait: before a loader without a thread takes the next pinned
# batch from its source, it waits for the copy of the last one, and so for transforms.
_DEPTH = 2

# Batches come in runs of this many: with a slow side stream, then with a slow consumer.
_RUN_LENGTH = 20

_IN_EVERY_WAY = [
    pytest.param("pinned", False, id="pinned-inline"),
    pytest.param("pinned", True, id="pinned-thread"),
    pytest.param("pageable", False, id="pageable-inline"),
    pytest.param("pageable", True, id="pageable-thread"),
]


def _is_consumer_slow(index: int) -> bool:
    return (index // _RUN_LENGTH) % 2 == 1


class _LateClone:
    """A transform that copies its input, late for every other run of batches."""

    def __init__(self, pause_cycles: int = PAUSE_CYCLES) -> None:
        self._pause_cycles = pause_cycles
        self.num_calls = 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if not _is_consumer_slow(self.num_calls):
            pause_device(self._pause_cycles)
        self.num_calls += 1
        return image.clone()


def count_wrong_batches(
    memory: HostMemory,
    background: bool,
    *,
    num_batches: int = _NUM_BATCHES,
    consumer_streams: list[torch.cuda.Stream] | None = None,
    in_step: Callable[[], None] = lambda: None,
    pause_cycles: int = PAUSE_CYCLES,
) -> int:
    """Read every batch late, drop it at once, and count those that were not intact.

    A slow side stream shows a consumer that does not wait. A slow consumer shows memory
    that is reused too early: the host drops the batch while the kernel that reads it is
    still queued behind the pause, and the next copy needs a block of the same size.

    Args:
        memory: Kind of host memory in which the source's batches lie.
        background: Whether a thread pulls the source.
        num_batches: How many to read.
        consumer_streams: Streams on which the loop works in turn, one for each batch;
            by default the one that is current.
        in_step: What else the loop does in each step.
        pause_cycles: How late the side stream is when it is late, in GPU clocks: longer
            than the host takes from there to the reading.
    """
    bank = Bank(num_batches, memory=memory)
    turns = consumer_streams or [torch.cuda.current_stream()]
    wrong = []  # A counter for each stream, so that the check itself cannot race.
    for stream in turns:
        with torch.cuda.stream(stream):
            wrong.append(torch.zeros((), dtype=torch.int64, device=CUDA))
    loader = StreamPrefetchLoader(
        bank,
        transform=_LateClone(pause_cycles),
        inputs="image",
        device="cuda",
        depth=_DEPTH,
        background=background,
    )
    num_seen = 0
    with loader:
        batches = iter(loader)
        for index in range(num_batches):
            turn = index % len(turns)
            with torch.cuda.stream(turns[turn]):
                batch = next(batches)
                if _is_consumer_slow(index):
                    pause_device()
                wrong[turn] += count_differing(batch, bank.expected(index))
                num_seen += batch["target"][1] == index
                in_step()
                del batch
        with pytest.raises(StopIteration):
            next(batches)
    settle()
    assert num_seen == num_batches
    return sum(int(count) for count in wrong)


# Values #


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_thousand_batches_are_bitwise_equal_to_the_source(
    memory: HostMemory, background: bool
) -> None:
    assert count_wrong_batches(memory, background) == 0


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_without_the_wait_the_check_fails(
    memory: HostMemory, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        streams, "enqueue_wait", lambda event, device: torch.cuda.current_stream(device)
    )
    assert count_wrong_batches(memory, background) > 0


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_without_record_stream_the_check_fails(
    memory: HostMemory, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "record_use", lambda leaf, stream: None)
    assert count_wrong_batches(memory, background) > 0


# The consumer's stream #


def _three_streams() -> list[torch.cuda.Stream]:
    return [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]


def test_consumer_may_change_its_stream_in_mid_epoch() -> None:
    wrong = count_wrong_batches(
        "pinned", False, num_batches=300, consumer_streams=_three_streams()
    )
    assert wrong == 0


def test_hand_off_to_a_fixed_stream_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_on_default(event: torch.cuda.Event, device: torch.device) -> object:
        default = torch.cuda.default_stream(device)
        default.wait_event(event)
        return default

    monkeypatch.setattr(streams, "enqueue_wait", wait_on_default)
    wrong = count_wrong_batches(
        "pinned", False, num_batches=300, consumer_streams=_three_streams()
    )
    assert wrong > 0


def test_whole_loop_may_run_on_another_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert count_wrong_batches("pageable", True, num_batches=300) == 0


@pytest.mark.parametrize("made_in_thread", [True, False])
def test_consumer_may_be_another_thread(made_in_thread: bool) -> None:
    bank = Bank(300, memory="pinned")
    loader = StreamPrefetchLoader(
        bank, transform=_LateClone(), inputs="image", device="cuda", depth=3
    )
    batches = None if made_in_thread else iter(loader)
    wrong: list[int] = []

    def consume() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            count = torch.zeros((), dtype=torch.int64, device=CUDA)
            walk: Iterator[dict[str, object]] = batches or iter(loader)
            for index, batch in enumerate(walk):
                if _is_consumer_slow(index):
                    pause_device()
                count += count_differing(batch, bank.expected(index))
                del batch
            wrong.append(int(count))

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(timeout=30)
    loader.close()
    assert wrong == [0]


# Memory pressure #


def test_batches_stay_intact_while_the_allocator_reclaims_memory() -> None:
    """The loop fills what memory is left, so cached blocks go back to the driver."""
    bank = Bank(300, memory="pinned", side=2048)
    settle()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    budget = torch.cuda.memory_reserved() + (256 << 20)
    retries_before = torch.cuda.memory_stats()["num_alloc_retries"]
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    # Each larger than any cached block, so that the cache piles up until it is full.
    sizes = itertools.cycle(mebibytes << 20 for mebibytes in range(21, 64, 3))
    torch.cuda.set_per_process_memory_fraction(budget / total)
    try:
        with StreamPrefetchLoader(
            bank, transform=_LateClone(), inputs="image", device="cuda", depth=3
        ) as loader:
            for index, batch in enumerate(loader):
                scratch = torch.empty(next(sizes), dtype=torch.uint8, device=CUDA)
                scratch.fill_(255)
                del scratch
                if index % 15 == 14:
                    torch.cuda.empty_cache()
                same_size = torch.full_like(batch["image"], 255)
                wrong += count_differing(batch, bank.expected(index))
                del batch, same_size
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert int(wrong) == 0
    assert torch.cuda.memory_stats()["num_alloc_retries"] > retries_before


# Order #


class _SlowClone:
    """A transform that takes milliseconds and notes when each batch is ready."""

    def __init__(self) -> None:
        self.ready: list[torch.cuda.Event] = []
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        pause_device(10_000_000)
        image = image.clone()
        self.ready.append(_record_time())
        self.stream = torch.cuda.current_stream()
        return image


def _record_time() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _count_steps_before_next_batch(transform: _SlowClone) -> int:
    """Count steps that the device began before the batch behind theirs was ready.

    Twelve batches are read, so all but the last have one behind them.
    """
    loader = StreamPrefetchLoader(
        Bank(12, memory="pageable", side=64),
        transform=transform,
        inputs="image",
        device="cuda",
        depth=3,
    )
    with loader:
        begun = [_record_time() for _batch in loader]
    settle()
    for own, step in zip(transform.ready, begun, strict=True):
        assert own.elapsed_time(step) >= 0, "a step began before its batch was ready"
    pairs = zip(begun[:-1], transform.ready[1:], strict=True)
    return sum(step.elapsed_time(following) > 0 for step, following in pairs)


def test_step_waits_for_its_own_batch_and_not_for_those_behind_it() -> None:
    assert _count_steps_before_next_batch(_SlowClone()) == 11


def test_waiting_for_the_whole_side_stream_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transform = _SlowClone()

    def wait_for_all(event: torch.cuda.Event, device: torch.device) -> object:
        consumer = torch.cuda.current_stream(device)
        assert transform.stream is not None
        consumer.wait_stream(transform.stream)
        return consumer

    monkeypatch.setattr(streams, "enqueue_wait", wait_for_all)
    assert _count_steps_before_next_batch(transform) <= 3


# Torch's own detector #


_SANITIZED = """
    import os
    os.environ["TORCH_CUDA_SANITIZER"] = "1"  # Read when torch is imported.
    from tests.gpu import sanitized
    sanitized.{function}()
"""


@pytest.fixture(scope="module")
def sanitizer_report() -> str:
    """What torch's stream sanitizer saw, in a process of its own."""
    with start_script(_SANITIZED.format(function="main")) as child:
        status, out, err = child.finish(limit_s=60)
    assert status == 0, f"{out}\n{err}"
    return f"{out}\n{err[-6000:]}"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "case", ["pinned", "pageable", "transform", "thread", "other-stream"]
)
def test_stream_sanitizer_finds_nothing_in_the_loader(
    case: str, sanitizer_report: str
) -> None:
    assert f"{case}: clean" in sanitizer_report, sanitizer_report


@pytest.mark.timeout(90)
def test_stream_sanitizer_finds_the_planted_race() -> None:
    with start_script(_SANITIZED.format(function="plant_race")) as child:
        _, out, err = child.finish(limit_s=60)
    assert "CSAN detected a possible data race" in err, f"{out}\n{err}"


# A consumer that changes the batch #


@pytest.mark.parametrize("change", [torch.Tensor.zero_, torch.Tensor.bitwise_not_])
def test_consumer_may_write_into_its_batch(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Neither the source nor a later batch shares memory with a yielded one."""
    bank = Bank(64, memory="pinned")
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with StreamPrefetchLoader(bank, device="cuda") as loader:
        for index, batch in enumerate(loader):
            wrong += count_differing(batch, bank.expected(index))
            change(batch["image"])
            change(batch["target"][0][0])
    assert int(wrong) == 0
