"""Does the loader work beside graph capture, a compiled model and kernels?"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.public_cases.chains import crop_rotate_blur
from tests.sources import Images

pytestmark = pytest.mark.timeout(30)


# Capture and compilation #


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_d28_a_graph_can_be_captured_in_mid_epoch(mode: str, num_workers: int) -> None:
    """LibreYOLO/libreyolo#681: a thread's CUDA call broke the capture."""
    source = DataLoader(Images(48), batch_size=4, num_workers=num_workers)
    chain, model = crop_rotate_blur(8), nn.Conv2d(3, 4, 3).cuda()
    loader = StreamPrefetchLoader(source, chain, device="cuda")
    with torch.no_grad():
        model(torch.zeros(4, 3, 8, 8, device="cuda"))  # Choose the kernels first.
        for _ in range(20):
            for i, (x, labels) in enumerate(loader):
                assert labels.tolist() == list(range(4 * i, 4 * i + 4))
                if i == 3:
                    static = x.clone()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode=mode):
                        y = model(static)
                if i >= 3:
                    static.copy_(x)
                    graph.replay()
                    torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_d28_a_compiled_model_beside_a_kornia_transform(device: torch.device) -> None:
    """pytorch/pytorch#118260, #136833: compiled functions used from two threads."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(device)
    compiled = torch.compile(model, backend="eager")
    source = DataLoader(Images(100), batch_size=2, num_workers=1)
    loader = StreamPrefetchLoader(source, crop_rotate_blur(8), device=device)
    steps = 0
    for x, _ in loader:
        torch.testing.assert_close(compiled(x), model(x))
        steps += 1
    assert steps == 50


# Overlap #


def test_d30_the_source_is_read_while_the_loop_works() -> None:
    """pytorch/tutorials#2983, numba/numba#5130: the host's part of the overlap."""
    read = [threading.Event() for _ in range(5)]

    def source() -> Iterator[torch.Tensor]:
        for i in range(5):
            read[i].set()
            yield torch.tensor(i)

    with contextlib.closing(
        iter(StreamPrefetchLoader(source(), device="cpu", depth=2, background=True))
    ) as iterator:
        next(iterator)
        # The loop is inside its body now: nobody asks for batches 1 and 2.
        assert read[1].wait(20)
        assert read[2].wait(20)
        assert not read[4].is_set()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_d30_copies_run_beside_the_model() -> None:
    """discuss.pytorch.org "tensor-to-non-blocking-cuda-streams-optimisation"."""
    weight = torch.rand(4096, 4096, device="cuda")
    batches = [torch.rand(64, 1 << 16) for _ in range(12)]

    def copies_beside_kernels(loader: Any) -> tuple[int, int]:
        with torch.profiler.profile(
            activities=[
                torch.profiler.ProfilerActivity.CPU,
                torch.profiler.ProfilerActivity.CUDA,
            ]
        ) as profile:
            for _ in loader:
                for _ in range(20):
                    weight @ weight
            torch.cuda.synchronize()
        return _overlapping_copies(profile)

    def serial() -> Iterator[torch.Tensor]:
        for batch in batches:
            yield batch.to("cuda")

    wrapped, copies = copies_beside_kernels(
        StreamPrefetchLoader(batches, device="cuda")
    )
    assert copies >= len(batches)
    assert wrapped >= copies // 2
    # The detector detects: the plain loop copies between its steps, not beside them.
    assert copies_beside_kernels(serial())[0] <= 1


def _overlapping_copies(profile: torch.profiler.profile) -> tuple[int, int]:
    """Count the copies to the device that ran beside a kernel, and all of them."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_copy = "Memcpy HtoD" in event.name
            if is_copy or "gemm" in event.name or "cutlass" in event.name:
                spans[is_copy].append((event.time_range.start, event.time_range.end))
    beside = sum(
        any(start < end_k and start_k < end for start_k, end_k in spans[False])
        for start, end in spans[True]
    )
    return beside, len(spans[True])
