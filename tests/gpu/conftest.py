"""What does every test on a GPU get: a mark, a time limit, a clean device after it."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_LIMIT_S = 30

_EXPECTED_WARNINGS = (
    # Python 3.12 warns at every fork of a process with threads. CUDA starts some of its
    # own, so each DataLoader with workers would warn.
    ".*multi-threaded.*:DeprecationWarning",
    # Torch's own words on two of its tools.
    "Synchronization debug mode is a prototype:UserWarning",
    ".*Profiler clears events:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))
        for warning in _EXPECTED_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """Let no test inherit queued work, cached memory or a debug mode from another."""
    yield
    if torch.cuda.is_available():
        if torch.cuda.get_sync_debug_mode() != 0:
            torch.cuda.set_sync_debug_mode("default")
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
