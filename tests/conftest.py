"""What does every test get: devices, a clean process around it, restored randomness.

A test that leaves a feeder thread or a child process behind fails, whatever else it
proved. Tests marked ``gpu`` run where CUDA is; elsewhere they skip, or fail when
``GPUPREFETCH_REQUIRE_CUDA=1`` says that this machine was meant to have it.
"""

import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.fake_clock import FakeClock
from tests.fake_device import FakeDevice, fake_device_from
from tests.leaks import leaked, wait_until_gone

# The same examples in every run: a failure in CI is the failure on your machine.
settings.register_profile("gpuprefetch", deadline=None, derandomize=True)
settings.load_profile("gpuprefetch")

_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)

# What a pass has started must have ended by then.
_JOIN_LIMIT_S = 2.0


def pytest_configure(config: pytest.Config) -> None:
    # Python 3.12 warns at every fork of a process with threads, and torch has some:
    # each DataLoader with workers would warn.
    config.addinivalue_line(
        "filterwarnings", "ignore:.*multi-threaded.*:DeprecationWarning"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if os.environ.get("GPUPREFETCH_REQUIRE_CUDA") == "1":
            pytest.fail("GPUPREFETCH_REQUIRE_CUDA=1, but torch sees no CUDA device")
        pytest.skip("needs a CUDA device: runs in the GPU suite (make gpu)")


@pytest.fixture(params=["cpu", _CUDA], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The devices on which values can be compared."""
    return torch.device(request.param)


@pytest.fixture(params=["meta", _CUDA], scope="session")
def other_device(request: pytest.FixtureRequest) -> torch.device:
    """A device that is not the CPU: on ``meta``, "moved" can be seen without a GPU."""
    return torch.device(request.param)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device whose streams and events only note what they were told."""
    return fake_device_from(monkeypatch)


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock for the loader's figures that goes only when it is told to."""
    return FakeClock(monkeypatch)


@pytest.fixture(autouse=True)
def _restored_state() -> Iterator[None]:
    """Start each test from the same random state and give back the one before it."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # Small tensors everywhere: a pool of threads costs more than it saves, and on two
    # cores it takes them from the workers.
    torch.set_num_threads(1)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    # Sparse tensors that a test copied wait in a list of torch's for the next
    # torch.load, which would warn of them in another test.
    torch._utils._sparse_tensors_to_validate.clear()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fail the test that leaks a feeder thread or a child process."""
    before = leaked()
    yield
    if not leaked() - before:
        return
    # An expected error's traceback keeps the frames of the loop, hence its iterator.
    gc.collect()
    left = wait_until_gone(_JOIN_LIMIT_S, known=before)
    if left:
        pytest.fail(f"left behind after {_JOIN_LIMIT_S} s: {left}", pytrace=False)
