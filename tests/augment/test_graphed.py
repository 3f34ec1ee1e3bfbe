"""When a graph is captured, shared or left out; ``tests/gpu/test_graphed.py`` replays.

Here a played capture stands in for the device's: it counts, and runs the function.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Thread
from typing import Any

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment import capture as capturing
from gpuprefetch.augment import graphed as module
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.graphed import GraphedTransform
from gpuprefetch.errors import SettingError


def double(x: Tensor, *rest: object) -> Tensor:
    return x * 2


def look(tensor: Tensor) -> tuple[object, ...]:
    """What a graph depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The arguments of each capture, flat; CPU tensors count as CUDA's."""
    calls: list[list[Any]] = []

    def capture(fn: object, leaves: list[Any], spec: object) -> list[Any]:
        calls.append(leaves)
        return leaves

    def replay(captured: list[Any], tensors: Sequence[Tensor]) -> str:
        expected = [leaf for leaf in captured if isinstance(leaf, Tensor)]
        assert list(map(look, tensors)) == list(map(look, expected)), "another graph"
        return "replayed"

    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(module, "is_capturing", lambda: False)
    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "replay", replay)
    return calls


def test_on_the_cpu_the_function_runs_as_it_is() -> None:
    graphed = GraphedTransform(lambda x, *, scale: {"y": x * scale})
    x = torch.rand(3, requires_grad=True)
    y = graphed(x, scale=2)["y"]
    torch.testing.assert_close(y, x.detach() * 2)
    assert not y.requires_grad, "without gradients, as on CUDA"
    assert "captured=0 of 4" in repr(graphed)


def test_at_least_one_signature() -> None:
    with pytest.raises(SettingError, match="max_signatures must be at least 1, got 0"):
        GraphedTransform(torch.sin, max_signatures=0)


@pytest.mark.parametrize(
    "fn",
    [
        K.RandomRotation(9.0),
        nn.Sequential(nn.Identity(), K.ColorJitter(0.1)),
        fuse(K.RandomHorizontalFlip()),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_augmentations_that_draw_on_the_host_are_refused(fn: nn.Module) -> None:
    with pytest.raises(SettingError, match="would repeat the numbers"):
        GraphedTransform(fn)


def test_one_capture_for_each_signature(captures: list[list[Any]]) -> None:
    graphed = GraphedTransform(double, max_signatures=9)
    x = torch.rand(4, 6)
    kinds = [(x,), (x.half(),), (x.t(),), (x, 1), (x, True), (x, 1.0), ([x], "a")]
    kinds.append((x[:, :3], x))
    for _ in range(3):
        for args in kinds:
            assert graphed(*args) == "replayed"
    assert len(captures) == 8


def test_a_loader_is_told_of_graphs_that_draw_nothing(
    captures: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Captured(list[Any]):
        draws_numbers = False

    capture = module.capture
    monkeypatch.setattr(module, "capture", lambda *args: Captured(capture(*args)))
    graphed, x = GraphedTransform(double), torch.rand(4, 6)
    for inputs in [(x,), (x, x[:2]), ((x, 1),), ({"image": x},)]:
        assert graphed.without_draws(inputs) is None, "not captured yet"
        graphed(*inputs)
        replay = graphed.without_draws(inputs)
        assert replay is not None
        assert replay() == "replayed"
    monkeypatch.setattr(Captured, "draws_numbers", True)
    assert graphed.without_draws((x,)) is None


def test_autocast_and_training_are_part_of_the_signature(
    captures: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = nn.Dropout()
    graphed, x = GraphedTransform(dropout), torch.rand(4)
    for autocast in (False, True):
        for is_training in (False, True):
            dropout.train(is_training)
            # The context manager refuses where there is no device.
            monkeypatch.setattr(
                torch, "is_autocast_enabled", lambda kind, is_on=autocast: is_on
            )
            graphed(x)
            graphed(x)
    assert len(captures) == 4


def test_shorter_batches_run_as_they_are(
    captures: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    graphed = GraphedTransform(double)
    for length in (8, 3, 8, 3, 0):
        x, y = torch.rand(length, 2), torch.rand(length)
        result = graphed(x, y, torch.rand(5))
        assert (result == "replayed") if length == 8 else torch.equal(result, x * 2)
    assert len(captures) == 1
    graphed(torch.rand(9, 2), torch.rand(9), torch.rand(5))
    assert len(captures) == 2, "longer ones are captured"
    assert not caplog.records, "a short last batch is nothing to report"


def test_further_signatures_run_as_they_are_and_say_so_once(
    captures: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    graphed = GraphedTransform(double, max_signatures=1)
    for width in (4, 5, 6):
        x = torch.rand(2, width)
        result = graphed(x)
        assert (result == "replayed") if width == 4 else torch.equal(result, x * 2)
    assert len(captures) == 1
    assert ["max_signatures" in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize(
    "odd", [np.zeros(2), [torch.eye(2).to_sparse()], {"a": {1, 2}}], ids=type
)
def test_what_may_change_unseen_is_not_captured(
    captures: list[list[Any]], caplog: pytest.LogCaptureFixture, odd: object
) -> None:
    graphed, x = GraphedTransform(double), torch.rand(4)
    for _ in range(2):
        assert torch.equal(graphed(x, odd), x * 2)
    assert captures == []
    assert len(caplog.records) == 1


def test_inside_another_capture_the_function_runs_as_it_is(
    captures: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_capturing", lambda: True)
    x = torch.rand(4)
    assert torch.equal(GraphedTransform(double)(x), x * 2)
    assert captures == []


def test_one_inside_another_becomes_part_of_it_from_the_warm_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to wait there for the capture that it was a part of."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    for name in ("current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: False)
    monkeypatch.setattr(capturing, "_draws_undone", nullcontext)
    monkeypatch.setattr(capturing, "_generator_offset", lambda: 0)
    monkeypatch.setattr(capturing, "_record", lambda work: (work(), work()))
    monkeypatch.setattr(capturing, "_make", lambda kind: None)
    monkeypatch.setattr(capturing, "current_stream", lambda device: None)
    monkeypatch.setattr(module, "replay", lambda captured, _: captured.outputs[0])
    inner = GraphedTransform(double)
    outer = GraphedTransform(lambda x: inner(x) + 1)
    results: list[Tensor] = []
    thread = Thread(target=lambda: results.append(outer(torch.ones(2))), daemon=True)
    thread.start()
    thread.join(10.0)
    assert [result.tolist() for result in results] == [[3.0, 3.0]]
    assert "captured=0" in repr(inner)
    assert inner(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "captured=1" in repr(inner), "the turn was given back"


def test_a_failed_capture_is_tried_again(
    captures: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    graphed, x = GraphedTransform(double), torch.rand(4)
    with monkeypatch.context() as patched:
        patched.setattr(module, "capture", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            graphed(x)
    assert graphed(x) == "replayed"


def test_copies_capture_their_own(captures: list[list[Any]]) -> None:
    graphed, x = GraphedTransform(double, max_signatures=2), torch.rand(4)
    graphed(x)
    for other in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
        assert "captured=0 of 2" in repr(other)
        assert other(x) == "replayed"
    assert len(captures) == 3


def test_it_serves_as_a_loaders_transform() -> None:
    batches = [(torch.ones(2, 3), torch.arange(2)) for _ in range(3)]
    loader = StreamPrefetchLoader(batches, transform=GraphedTransform(double))
    for x, y in copy.deepcopy(loader):
        assert torch.equal(x, torch.full((2, 3), 2.0))
        assert torch.equal(y, torch.arange(2))
