"""What does every test on a GPU get: a mark, a time limit, a clean device after it."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_LIMIT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))
        # Python 3.12 warns at every fork of a process with threads. CUDA starts some of
        # its own, so each DataLoader with workers would warn.
        item.add_marker(
            pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
        )


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """Let no test inherit queued work, cached memory or a debug mode from another."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
