"""Does the loader ever make the host wait for the device where it need not?

Two detectors, each shown to detect: torch's sync debug mode, which refuses calls of
torch that synchronize, and the profiler, which lists what reached the CUDA runtime. The
one wait that the loader has on purpose, for a host more than ``depth`` steps ahead, is
a wait for an event and not for a stream.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from tests.gpu.support import CUDA, Bank, HostMemory, pause_device, settle

_NUM_WARMUP = 20
_NUM_STEADY = 100

Transform = Callable[[torch.Tensor], torch.Tensor]

_IN_EVERY_WAY = [
    pytest.param("pinned", False, id="pinned-inline"),
    pytest.param("pinned", True, id="pinned-thread"),
    pytest.param("pageable", False, id="pageable-inline"),
    pytest.param("pageable", True, id="pageable-thread"),
]

# Runtime calls that stop the host until a whole stream or device is idle.
_STREAM_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")

# Runtime calls that a steady loop has no business to make: they are slow, and some of
# them wait for the device.
_MEMORY_CALLS = (
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cudaHostRegister",
    "cudaHostUnregister",
)


def _to_float(image: torch.Tensor) -> torch.Tensor:
    return image.float().mul_(1 / 255)


def _synchronizing(image: torch.Tensor) -> torch.Tensor:
    assert image.sum().item() > 0
    return image


def _batches(
    loader: StreamPrefetchLoader[dict[str, object]], total: torch.Tensor
) -> Iterator[int]:
    """Consume batches without a synchronization of our own; count them.

    The first ones are slow on the device, so that the host gets as far ahead as it may:
    from then on the allocator has all the blocks that it will need.
    """
    for index, batch in enumerate(loader):
        if index < _NUM_WARMUP:
            pause_device()
        image = batch["image"]
        assert isinstance(image, torch.Tensor)
        total += image.sum()
        del batch, image
        yield index


def _run_steady(
    memory: HostMemory, background: bool, transform: Transform | None
) -> None:
    """Warm up, then forbid synchronization through 100 batches of the same pass."""
    bank = Bank(_NUM_WARMUP + _NUM_STEADY + 10, memory=memory, side=256)
    total = torch.zeros((), device=CUDA)
    inputs = None if transform is None else "image"
    loader = StreamPrefetchLoader(
        bank, transform=transform, inputs=inputs, device="cuda", background=background
    )
    with loader:
        batches = _batches(loader, total)
        assert len(list(islice(batches, _NUM_WARMUP))) == _NUM_WARMUP
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert len(list(islice(batches, _NUM_STEADY))) == _NUM_STEADY
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
@pytest.mark.parametrize("transform", [None, _to_float])
def test_hundred_steady_batches_do_not_synchronize(
    transform: Transform | None, memory: HostMemory, background: bool
) -> None:
    _run_steady(memory, background, transform)


def test_whole_pass_does_not_synchronize_from_its_first_batch() -> None:
    bank = Bank(30, memory="pinned", side=256)
    total = torch.zeros((), device=CUDA)
    with StreamPrefetchLoader(
        bank, transform=_to_float, inputs="image", device="cuda"
    ) as loader:
        list(_batches(loader, total))
        torch.cuda.set_sync_debug_mode("error")
        try:
            list(_batches(loader, total))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_transform_that_synchronizes_is_caught() -> None:
    loader = StreamPrefetchLoader(
        Bank(4, memory="pinned", side=64),
        transform=_synchronizing,
        inputs="image",
        device="cuda",
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        with loader, pytest.raises(RuntimeError, match="synchronizing"):
            next(iter(loader))
    finally:
        torch.cuda.set_sync_debug_mode("default")


# What reaches the CUDA runtime #


def _runtime_calls(
    memory: HostMemory, background: bool, transform: Transform | None
) -> Counter[str]:
    """Count CUDA runtime calls through 50 steady batches.

    The profiler synchronizes when it starts and stops, so only calls between the start
    of the first of these batches and the end of the last one count.
    """
    bank = Bank(_NUM_WARMUP + 60, memory=memory, side=256)
    total = torch.zeros((), device=CUDA)
    inputs = None if transform is None else "image"
    loader = StreamPrefetchLoader(
        bank, transform=transform, inputs=inputs, device="cuda", background=background
    )
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    ]
    with loader:
        batches = _batches(loader, total)
        list(islice(batches, _NUM_WARMUP))
        settle()
        with torch.profiler.profile(activities=activities) as profile:
            with torch.profiler.record_function("steady batches"):
                list(islice(batches, 50))
            settle()
    events = profile.events()
    (span,) = [
        event.time_range
        for event in events
        if event.name == "steady batches"
        and event.device_type == torch.autograd.DeviceType.CPU
    ]
    return Counter(
        event.name
        for event in events
        if span.start <= event.time_range.start <= span.end
        and event.name.startswith("cuda")
    )


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_loader_makes_no_waiting_and_no_memory_calls(
    memory: HostMemory, background: bool
) -> None:
    calls = _runtime_calls(memory, background, _to_float)
    print(dict(calls))
    assert calls["cudaMemcpyAsync"] >= 50, f"the profiler saw no copies: {calls}"
    unwanted = {
        name: count
        for name, count in calls.items()
        if name in _STREAM_WAITS or name in _MEMORY_CALLS
    }
    assert unwanted == {}


def test_profiler_sees_the_waits_of_a_synchronizing_transform() -> None:
    calls = _runtime_calls("pinned", False, _synchronizing)
    assert sum(calls[name] for name in _STREAM_WAITS) >= 50, calls
