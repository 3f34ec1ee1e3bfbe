"""Are the times on the device what happened there, and is nothing waited for?

Pauses of known length are queued on either stream; what the loader says of them is held
against the same pause, timed by hand in the same test.
"""

import gc
from collections.abc import Callable, Iterator

import kornia.augmentation as K
import pytest
import torch
from torch import nn

from gpuprefetch import LoaderStats, StreamPrefetchLoader
from gpuprefetch.diagnose import diagnose
from tests.gpu.support import CUDA, pause_device, settle

_LENGTH = 40
_CYCLES = 10_000_000  # Some 5 ms: long beside all that the host does.

Transform = Callable[[torch.Tensor], torch.Tensor]


def _pinned(length: int = _LENGTH, side: int = 64) -> list[torch.Tensor]:
    return [torch.rand(side, side).pin_memory() for _ in range(length)]


def _pausing(image: torch.Tensor) -> torch.Tensor:
    pause_device(_CYCLES)
    return image + 1


def _brief(image: torch.Tensor) -> torch.Tensor:
    return image + 1


@pytest.fixture(scope="module")
def pause_ms() -> float:
    """How long the pause is on this device."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        settle()
        begun.record()
        pause_device(_CYCLES)
        ended.record()
        settle()
    return begun.elapsed_time(ended)


def _run(
    transform: Transform | None,
    step: Callable[[torch.Tensor], object],
    source: list[torch.Tensor] | None = None,
) -> LoaderStats:
    loader = StreamPrefetchLoader(source or _pinned(), transform, device=CUDA)
    for batch in loader:
        step(batch)
    settle()
    return loader.stats()


def test_a_late_transform_is_time_in_which_the_loop_stood_still(
    pause_ms: float,
) -> None:
    stats = _run(_pausing, torch.sum)
    assert stats.stall_ms.p50 == pytest.approx(pause_ms, rel=0.2)
    assert stats.transform_ms.p50 == pytest.approx(pause_ms, rel=0.2)
    assert stats.transform_host_ms.p50 < 1
    assert diagnose(stats).verdict == "transform-bound (device)"


def test_a_transform_that_hides_behind_the_step_costs_nothing(pause_ms: float) -> None:
    stats = _run(_brief, lambda batch: pause_device(_CYCLES))
    assert stats.stall_ms.p50 < 0.05 * pause_ms
    assert stats.period_ms.mean == pytest.approx(pause_ms, rel=0.2)
    assert stats.dry_share < 0.2
    assert diagnose(stats).verdict == "step-bound"


def test_half_of_a_late_transform_hides_behind_a_step_of_half_its_length(
    pause_ms: float,
) -> None:
    """Kernels that only spin run side by side."""
    stats = _run(_pausing, lambda batch: pause_device(_CYCLES // 2))
    assert stats.stall_ms.p50 == pytest.approx(pause_ms / 2, rel=0.3)


def test_a_step_that_reads_a_result_finds_the_device_dry() -> None:
    def step(batch: torch.Tensor) -> None:
        pause_device(_CYCLES)
        batch.sum().item()

    stats = _run(_brief, step)
    assert stats.dry_share == 1.0
    assert diagnose(stats).verdict == "host-bound"


def test_the_rate_of_copies_is_that_of_a_copy_by_hand() -> None:
    side = 4096
    ready = _pinned(1, side) * _LENGTH
    target = torch.empty(side, side, device=CUDA)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    settle()
    begun.record()
    for _ in range(10):
        target.copy_(ready[0], non_blocking=True)
    ended.record()
    settle()
    by_hand = 10 * target.nbytes / begun.elapsed_time(ended) / 1e6
    stats = _run(None, torch.sum, ready)
    assert stats.copy_gb_per_s.p50 == pytest.approx(by_hand, rel=0.3)
    assert stats.copied_bytes == _LENGTH * target.nbytes
    assert stats.device_bytes == 2 * target.nbytes
    assert stats.depth == 2


@pytest.mark.parametrize("background", [False, True])
def test_pageable_batches_show_as_packing(background: bool) -> None:
    source = [torch.rand(1024, 1024)] * _LENGTH
    loader = StreamPrefetchLoader(source, device=CUDA, background=background)
    list(loader)
    stats = loader.stats()
    # Not what was packed before the loop had its first batch.
    assert 0 < stats.pin_ms.count < _LENGTH
    assert stats.pin_ms.mean > 0.05
    assert stats.pinned_bytes > 0


def test_nothing_is_waited_for() -> None:
    """Figures included: they are read while the device is far behind."""
    loader = StreamPrefetchLoader(_pinned(200), _brief, device=CUDA)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            next(batches)
            pause_device()
            loader.stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loader.stats().stall_ms.count > 30
    del batches
    gc.collect()


# What costs time in silence #


def _waiting(image: torch.Tensor) -> torch.Tensor:
    return image / image.max().item()


def test_a_transform_that_waits_is_named_by_its_place() -> None:
    stats = _run(_waiting, torch.sum)
    (note,) = (note for note in stats.notes if "wait for the device" in note)
    assert f"{__file__}:" in note
    assert "1 times a batch" in note
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("transform", [_brief, nn.ReLU(), torch.neg])
def test_a_transform_that_does_not_wait_is_left_in_peace(transform: Transform) -> None:
    stats = _run(transform, lambda batch: pause_device(_CYCLES))
    assert stats.notes == ()


def _images() -> list[torch.Tensor]:
    return [torch.rand(4, 3, 32, 32).pin_memory() for _ in range(_LENGTH)]


def test_a_kornia_module_on_the_gpu_is_found_where_it_hurts() -> None:
    moved = K.RandomRotation(30.0, p=1.0).to(CUDA)
    hidden = _run(lambda images: moved(images), torch.sum, _images())
    assert any("moved to cuda" in note for note in hidden.notes)
    taken_over = _run(moved, lambda batch: pause_device(_CYCLES), _images())
    # A slow host may be told that its batches are small.
    assert not any("moved to" in note for note in taken_over.notes)


def test_a_fused_chain_says_so() -> None:
    chain = nn.Sequential(K.RandomRotation(30.0, p=1.0), K.RandomHorizontalFlip())
    stats = _run(chain, lambda batch: pause_device(_CYCLES), _images())
    assert stats.is_fused
    assert stats.notes == ()


# Ranges #


def _names(loader: StreamPrefetchLoader[torch.Tensor]) -> Iterator[str]:
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    ]
    with torch.profiler.profile(activities=activities) as profile:
        list(loader)
        torch.cuda.synchronize()
    return (event.name for event in profile.events() or [])


def test_a_profiler_sees_the_stages_on_this_device() -> None:
    source = [torch.rand(64, 64) for _ in range(8)]
    names = set(_names(StreamPrefetchLoader(source, _brief, device=CUDA)))
    stages = ("wait", "pin", "copy", "transform", "hand-off")
    assert {f"gpuprefetch::{stage}" for stage in stages} <= names


def test_nvtx_ranges_can_be_asked_for() -> None:
    from gpuprefetch import ranges

    ranges.enable_nvtx()
    try:
        list(StreamPrefetchLoader(_pinned(8), _brief, device=CUDA))
    finally:
        ranges.enable_nvtx(False)
    with torch.autograd.profiler.emit_nvtx():
        list(StreamPrefetchLoader(_pinned(8), _brief, device=CUDA))
