"""Does memory stay bounded in a pass, flat over epochs, and come back at the end?"""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from tests.gpu.support import (
    CUDA,
    HostMemory,
    active_bytes_peak,
    allocated_bytes,
    pause_device,
    settle,
)

_MIB = 1 << 20

_IN_EVERY_WAY = [
    pytest.param("pinned", False, id="pinned-inline"),
    pytest.param("pageable", False, id="pageable-inline"),
    pytest.param("pageable", True, id="pageable-thread"),
]


class _Repeated:
    """Serves one image and its labels again and again.

    Args:
        num_batches: In one pass.
        memory: Kind of host memory.
        num_bytes: Size of the image.
    """

    def __init__(self, num_batches: int, *, memory: HostMemory, num_bytes: int) -> None:
        image = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        labels = torch.arange(32)
        if memory == "pinned":
            image, labels = image.pin_memory(), labels.pin_memory()
        self._batch = image, labels
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self._num_batches):
            yield self._batch


def _to_float(image: torch.Tensor) -> torch.Tensor:
    return image.float()


# Over epochs #


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_reserved_memory_is_flat_from_epoch_3_to_50(
    memory: HostMemory, background: bool
) -> None:
    """The device is kept busy, so that each epoch sees the host's full lead."""
    source = _Repeated(10, memory=memory, num_bytes=_MIB)
    total = torch.zeros((), device=CUDA)
    reserved = []
    with StreamPrefetchLoader(
        source, transform=_to_float, device="cuda", background=background
    ) as loader:
        for _epoch in range(51):
            for image, labels in loader:
                pause_device()
                total += image.amax() + labels.sum()
            del image, labels
            settle()
            reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[3:]) == min(reserved[3:]), reserved


def test_allocated_memory_returns_to_the_baseline_after_every_epoch() -> None:
    source = _Repeated(5, memory="pinned", num_bytes=_MIB)
    baseline = allocated_bytes()
    with StreamPrefetchLoader(source, transform=_to_float, device="cuda") as loader:
        for _epoch in range(5):
            for _batch in loader:
                pause_device()
            del _batch
            assert allocated_bytes() == baseline


def test_all_copies_and_transforms_use_one_stream_for_life() -> None:
    seen: list[int] = []

    def note_stream(image: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_stream().cuda_stream)
        return image

    loader = StreamPrefetchLoader(
        _Repeated(3, memory="pinned", num_bytes=1024),
        transform=note_stream,
        device="cuda",
    )
    for _epoch in range(40):
        for _batch in loader:
            pass
    loader.close()
    list(loader)  # A closed loader may be used again, on the stream that it has.
    loader.close()
    assert len(seen) == 41 * 3
    assert len(set(seen)) == 1
    assert seen[0] != torch.cuda.current_stream().cuda_stream


# During a pass #


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_at_most_depth_plus_one_batches_are_live(
    memory: HostMemory, background: bool, depth: int
) -> None:
    """In flight up to ``depth``, and the one that the loop still holds."""
    num_bytes = 8 * _MIB
    source = _Repeated(20, memory=memory, num_bytes=num_bytes)
    total = torch.zeros((), device=CUDA)
    baseline = allocated_bytes()
    torch.cuda.reset_peak_memory_stats()
    with StreamPrefetchLoader(
        source, device="cuda", depth=depth, background=background
    ) as loader:
        for image, labels in loader:
            total += image.amax() + labels.sum()
        del image, labels
    most_batches = (torch.cuda.max_memory_allocated() - baseline) / num_bytes
    assert most_batches < depth + 1.5
    # A thread may be too slow to be ahead at all; the loop's own thread cannot.
    assert most_batches >= (1 if background else depth + 1)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_at_most_depth_plus_one_results_of_the_transform_are_live(depth: int) -> None:
    results: list[weakref.ref[torch.Tensor]] = []
    most_live = 0

    def note_result(image: torch.Tensor) -> torch.Tensor:
        nonlocal most_live
        result = image.float()
        results.append(weakref.ref(result))
        most_live = max(most_live, sum(ref() is not None for ref in results))
        return result

    source = _Repeated(20, memory="pinned", num_bytes=1024)
    with StreamPrefetchLoader(
        source, transform=note_result, device="cuda", depth=depth
    ) as loader:
        for _image, _labels in loader:
            pass
    assert len(results) == 20
    assert most_live == depth + 1


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_host_far_ahead_of_the_device_does_not_pile_up_batches(
    memory: HostMemory, background: bool
) -> None:
    """Dropped batches that the device still reads are bounded as well.

    A step takes milliseconds on the device and microseconds on the host. Bounded are:
    ``depth`` batches in flight, one in the loop, and one for each step of the lead.
    """
    num_bytes, depth = 4 * _MIB, 2
    source = _Repeated(60, memory=memory, num_bytes=num_bytes)
    total = torch.zeros((), device=CUDA)
    settle()
    torch.cuda.empty_cache()
    baseline = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with StreamPrefetchLoader(
        source, device="cuda", depth=depth, background=background
    ) as loader:
        for image, labels in loader:
            pause_device(3 * 2_000_000)
            total += image.amax() + labels.sum()
            del image, labels
    most_batches = (active_bytes_peak() - baseline) / num_bytes
    assert most_batches < 2 * depth + 3


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_kept_labels_do_not_keep_the_images(
    memory: HostMemory, background: bool
) -> None:
    source = _Repeated(50, memory=memory, num_bytes=4 * _MIB)
    baseline = allocated_bytes()
    with StreamPrefetchLoader(source, device="cuda", background=background) as loader:
        kept = [labels for _image, labels in loader]
    assert len(kept) == 50
    assert allocated_bytes() - baseline < _MIB
    assert all(torch.equal(labels.cpu(), torch.arange(32)) for labels in kept)


# At the end #


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_all_memory_is_back_after_the_end(
    memory: HostMemory, background: bool, how: str
) -> None:
    source = _Repeated(20, memory=memory, num_bytes=4 * _MIB)
    baseline = allocated_bytes()
    host_before = _torch_pinned_bytes()
    loader = StreamPrefetchLoader(
        source, transform=_to_float, device="cuda", background=background
    )
    batches = iter(loader)
    held = [next(batches), next(batches)]
    expected_pinned = 0 if memory == "pinned" else 4 * _MIB
    assert loader.stats().pinned_bytes >= expected_pinned
    del held
    if how == "close":
        loader.close()
        assert loader.stats().pinned_bytes == 0
        del batches
    else:
        del batches, loader
    assert allocated_bytes() == baseline
    assert _torch_pinned_bytes() == host_before


def test_close_unlocks_the_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every registration with the CUDA runtime is taken back, address by address."""
    registered: list[int] = []
    unregistered: list[int] = []

    class Runtime:
        def __init__(self, runtime: object) -> None:
            self._runtime = runtime

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            registered.append(address)
            return self._runtime.cudaHostRegister(address, num_bytes, flags)

        def cudaHostUnregister(self, address: int) -> int:
            unregistered.append(address)
            return self._runtime.cudaHostUnregister(address)

        def __getattr__(self, name: str) -> object:
            return getattr(self._runtime, name)

    runtime = Runtime(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    source = _Repeated(20, memory="pageable", num_bytes=_MIB)
    with StreamPrefetchLoader(source, device="cuda", depth=2) as loader:
        for batch in loader:
            del batch
        assert 1 <= len(registered) <= 3
        assert unregistered == []
    assert sorted(unregistered) == sorted(registered)


def _torch_pinned_bytes() -> int:
    """Bytes of pinned memory that torch's own allocator has handed out."""
    gc.collect()
    stats = torch.cuda.host_memory_stats()
    # Older releases of torch know one figure only.
    return int(stats.get("active_bytes.current", stats["allocated_bytes.current"]))
