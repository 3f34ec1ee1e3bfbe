"""Where do the tests for two GPUs run?

On two CUDA devices. With ``GPUPREFETCH_GPU2_DEVICE=cpu`` those that can run with gloo
on the CPU, so that their own logic can be tried without GPUs; the others skip.
"""

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 150


def _device() -> str:
    return os.environ.get("GPUPREFETCH_GPU2_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu2)
            item.add_marker(pytest.mark.timeout(_LIMIT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    runs_on_cpu = "ranks_device" in getattr(item, "fixturenames", ())
    if _device() == "cpu" and runs_on_cpu:
        return
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: runs in `make gpu2`")


@pytest.fixture(scope="session")
def ranks_device() -> str:
    """``"cuda"`` with NCCL, or ``"cpu"`` with gloo."""
    return _device()
