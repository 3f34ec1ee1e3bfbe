"""Off CUDA the function runs as it is; on CUDA a replay equals an eager call."""

from __future__ import annotations

import os

import pytest
import torch

from gpuprefetch.augment.graphed import GraphedTransform
from gpuprefetch.errors import SettingError

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() and not os.environ.get("GPUPREFETCH_REQUIRE_CUDA"),
    reason="needs a CUDA device",
)


def test_on_the_cpu_the_function_runs_as_it_is() -> None:
    graphed = GraphedTransform(lambda x, *, scale: {"y": x * scale})
    x = torch.rand(3)
    torch.testing.assert_close(graphed(x, scale=2)["y"], x * 2)
    assert "captured=0 of 4" in repr(graphed)


def test_at_least_one_signature() -> None:
    with pytest.raises(SettingError, match="max_signatures must be at least 1, got 0"):
        GraphedTransform(torch.sin, max_signatures=0)


@pytest.mark.gpu
@needs_cuda
def test_replays_equal_eager_calls_and_belong_to_the_caller() -> None:
    weight = torch.rand(8, 8, device="cuda")
    graphed = GraphedTransform(lambda x: (torch.relu(x @ weight), x.sum()))
    inputs = [torch.rand(4, 8, device="cuda") for _ in range(3)]
    results = [graphed(x) for x in inputs]
    for x, (product, total) in zip(inputs, results, strict=True):
        torch.testing.assert_close(product, torch.relu(x @ weight))
        torch.testing.assert_close(total, x.sum())


@pytest.mark.gpu
@needs_cuda
def test_random_numbers_are_those_of_eager_calls() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    x = torch.zeros(1000, device="cuda")
    torch.cuda.manual_seed(5)
    expected = [fn(x) for _ in range(3)]
    graphed = GraphedTransform(fn)
    torch.cuda.manual_seed(5)
    for one in expected:
        torch.testing.assert_close(graphed(x), one)


@pytest.mark.gpu
@needs_cuda
def test_further_signatures_run_eagerly_and_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphed = GraphedTransform(torch.sin, max_signatures=1)
    for size in (4, 5, 6):
        x = torch.rand(size, device="cuda")
        torch.testing.assert_close(graphed(x), torch.sin(x))
    assert len([r for r in caplog.records if "max_signatures" in r.message]) == 1
