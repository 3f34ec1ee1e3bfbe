"""Do device, process and thread-local modes stay what the loop has set?"""

import os
from collections.abc import Callable
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.children import run_script
from tests.sources import Numbers, count

pytestmark = pytest.mark.timeout(30)

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


# Devices and processes #


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("name", ["cuda:1", "cuda"])
def test_d16_nothing_touches_the_first_gpu(name: str) -> None:
    """pytorch/pytorch#58626, libffcv/ffcv#190: a context on GPU 0 in every rank."""
    run_script(
        """
        import sys, torch
        import kornia.augmentation as K
        from torch.utils.data import DataLoader
        from gpuprefetch import StreamPrefetchLoader
        from tests.sources import Images
        torch.cuda.set_device(1)
        for pin in (False, True):
            source = DataLoader(Images(8), batch_size=4, num_workers=1, pin_memory=pin)
            aug = K.RandomCrop((8, 8))
            loader = StreamPrefetchLoader(source, aug, device=sys.argv[1])
            for x, y in loader:
                assert x.device.index == y.device.index == 1
            loader.close()
        assert torch.cuda.memory_reserved(0) == 0
        assert torch.cuda.current_device() == 1
        """,
        name,
        limit_s=60,
    )


@pytest.mark.gpu
def test_d16_a_global_cuda_default_device_does_not_disturb() -> None:
    """esa/torchquad#157: loaders stop working under ``set_default_device``."""
    source = DataLoader(count(4), shuffle=False)
    torch.set_default_device("cuda")
    assert [int(x) for x in StreamPrefetchLoader(source, device="cuda")] == [0, 1, 2, 3]


@pytest.mark.parametrize("background", [False, True])
def test_d16_the_transform_sees_the_default_device_of_the_loop(
    background: bool,
) -> None:
    """esa/torchquad#157: with ``meta`` as a default device that has no values."""
    seen = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.empty(1).device.type)
        return x + 1

    batches = count(3)
    torch.set_default_device("meta")
    loader = StreamPrefetchLoader(
        batches, transform, device="cpu", background=background
    )
    assert [int(x) for x in loader] == [1, 2, 3]
    assert seen == ["meta"] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_d17_transform_runs_in_the_main_process_only(
    device: torch.device, context: str
) -> None:
    """pytorch/pytorch#77159, #13775: CUDA in a forked worker."""
    torch.zeros(1, device=device)
    pids = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        pids.append(os.getpid())
        return x

    source = DataLoader(
        Numbers(8), batch_size=4, num_workers=1, multiprocessing_context=context
    )
    loader = StreamPrefetchLoader(source, transform, device=device)
    assert [x.tolist() for x in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pids == [os.getpid()] * 2


# Thread-local modes #


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_d18_batches_carry_no_graph_and_the_mode_stays(
    device: torch.device, mode: Callable[[], Any], background: bool
) -> None:
    """pytorch/pytorch#20528: a thread does not inherit ``no_grad``."""
    linear = nn.Linear(4, 4).to(device)
    with mode():
        before = torch.is_grad_enabled()
        loader = StreamPrefetchLoader(
            [torch.rand(2, 4)] * 6, linear, device=device, background=background
        )
        for out in loader:
            assert out.grad_fn is None
            assert not out.requires_grad
            assert torch.is_grad_enabled() is before
        assert torch.is_grad_enabled() is before


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_d19_autocast_of_the_loop_does_not_reach_the_transform(
    device: torch.device, p: float
) -> None:
    """kornia/kornia#1737: half and float mixed in a blur with 0 < p < 1."""
    blur = K.RandomGaussianBlur((3, 3), (0.1, 3.0), p=p)
    loader = StreamPrefetchLoader([torch.rand(4, 3, 16, 16)] * 51, blur, device=device)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    with torch.autocast(device.type, dtype):
        seen = {(x.dtype, torch.is_autocast_enabled(device.type)) for x in loader}
    assert seen == {(torch.float32, True)}
