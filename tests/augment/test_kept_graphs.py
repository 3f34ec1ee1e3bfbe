"""When does a kept member get a graph? ``tests/gpu/test_kept_graphs.py`` replays.

Here a played capture stands in for the device's: a replay runs the member again.
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment import kept_graphs
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.host_reads import blur_unchecked, skip_host_reads
from gpuprefetch.augment.kept_graphs import GraphedMember
from gpuprefetch.errors import SettingError, TransformError
from gpuprefetch.seeding import generators_seeded

SHAPE = (4, 3, 8, 8)


class Graphs:
    """What was captured and replayed."""

    def __init__(self) -> None:
        self.captured: list[Callable[..., Any]] = []
        self.replays = 0
        self.error: Exception | None = None

    def capture(self, fn: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
        if self.error is not None:
            raise self.error
        args, _ = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        fn(*args)
        self.captured.append(fn)
        return fn

    def replay(self, captured: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        self.replays += 1
        return captured(*(tensor.clone() for tensor in tensors))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    played = Graphs()
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kept_graphs, "capture", played.capture)
    monkeypatch.setattr(kept_graphs, "replay", played.replay)
    return played


def drawn(module: Any, shape: Sequence[int] = SHAPE) -> Any:
    return module.forward_parameters(torch.Size(shape))


def gamma() -> K.RandomGamma:
    return K.RandomGamma((0.5, 2.0), p=0.5)


def test_the_setting_is_checked() -> None:
    with pytest.raises(SettingError, match="kept must be one of 'eager', 'graphed'"):
        fuse(gamma(), kept="graph")  # type: ignore[arg-type]


def test_on_the_cpu_members_run_as_they_are() -> None:
    eager, graphed = fuse(gamma()), fuse(gamma(), kept="graphed")
    images = torch.rand(SHAPE)
    results = []
    for fused in (eager, graphed):
        torch.manual_seed(3)
        results.append(fused(images))
    assert torch.equal(*results)


def test_each_batch_has_its_own_numbers(graphs: Graphs) -> None:
    module = gamma()
    member, images = GraphedMember(module), torch.rand(SHAPE)
    for _ in range(3):
        numbers = drawn(module)
        expected = module(images, params=numbers)
        assert torch.equal(member(images, numbers), expected)
    assert len(graphs.captured) == 1
    assert graphs.replays == 3 + 2, "three batches, and two to compare the graph"


def test_numbers_may_come_in_any_order(graphs: Graphs) -> None:
    """A user's own ``params`` may be sorted otherwise than Kornia's."""
    module = K.RandomPerspective(0.5, p=0.5)
    member, images = GraphedMember(module), torch.rand(SHAPE)
    numbers = drawn(module)
    assert len(numbers) > 1
    expected = module(images, params=numbers)
    for given in (dict(reversed(numbers.items())), numbers):
        assert torch.equal(member(images, given), expected)
    assert not member.why_eager
    assert len(graphs.captured) == 1


def test_numbers_of_all_types_find_their_places(graphs: Graphs) -> None:
    module = K.RandomCrop((5, 7), padding=1)
    numbers = drawn(module) | {"a flag": torch.tensor([True, False, True])}
    buffer = kept_graphs._Buffer(numbers)
    for values in (numbers, {name: value.flip(0) for name, value in numbers.items()}):
        read = dict(buffer.read(buffer.filled(values)))
        assert read.keys() == values.keys()
        assert all(torch.equal(read[name], values[name]) for name in values)
        assert all(read[name].dtype is values[name].dtype for name in values)


def test_one_graph_for_each_kind_of_images_and_at_most_four(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    module = gamma()
    member = GraphedMember(module)
    with caplog.at_level(logging.WARNING, logger="gpuprefetch"):
        for size in (3, 4, 3, 5, 6, 7, 8, 6):
            shape = (size, *SHAPE[1:])
            member(torch.rand(shape), drawn(module, shape))
    assert len(graphs.captured) == 4
    assert len(caplog.records) == 1
    assert "4 kinds of images are captured already" in member.why_eager


def test_a_shorter_batch_runs_as_it_is(graphs: Graphs) -> None:
    module = gamma()
    member, images = GraphedMember(module), torch.rand(SHAPE)
    for batch in (images, images[:2], images):
        numbers = drawn(module, batch.shape)
        assert torch.equal(member(batch, numbers), module(batch, params=numbers))
    assert len(graphs.captured) == 1
    assert not member.why_eager


def test_graphs_are_kept_where_another_kind_cannot_be_captured(graphs: Graphs) -> None:
    module = gamma()
    member, images = GraphedMember(module), torch.rand(SHAPE)
    member(images, drawn(module))
    graphs.error = TransformError("it waits for the device.")
    larger = torch.rand(SHAPE[0] + 1, *SHAPE[1:])
    member(larger, drawn(module, larger.shape))
    before = graphs.replays
    member(images, drawn(module))
    assert member.why_eager
    assert graphs.replays == before + 1


def test_a_capture_that_fails_leaves_the_member_as_it_is(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    graphs.error = TransformError("it waits for the device. It must not.\nMore.")
    module = gamma()
    member, images = GraphedMember(module), torch.rand(SHAPE)
    with caplog.at_level(logging.WARNING, logger="gpuprefetch"):
        for _ in range(3):
            numbers = drawn(module)
            expected = module(images, params=numbers)
            assert torch.equal(member(images, numbers), expected)
    assert member.why_eager == "it cannot be captured (it waits for the device)"
    assert len(caplog.records) == 1
    assert "RandomGamma runs without a CUDA graph: it cannot be" in caplog.text
    assert "setLevel(logging.ERROR) silences this." in caplog.text


class DrawsWhileApplied(K.RandomGamma):
    def apply_transform(self, *args: Any, **settings: Any) -> Tensor:
        return super().apply_transform(*args, **settings) * random.random()


class DrawsOfTorch(K.RandomGamma):
    def apply_transform(self, *args: Any, **settings: Any) -> Tensor:
        return super().apply_transform(*args, **settings) * torch.rand(())


@pytest.mark.parametrize("kind", [DrawsWhileApplied, DrawsOfTorch])
def test_a_member_that_draws_while_it_is_applied_gets_no_graph(
    graphs: Graphs, kind: Any
) -> None:
    module = kind((0.5, 2.0), p=1.0)
    member = GraphedMember(module)
    member(torch.rand(SHAPE), drawn(module))
    assert "draws numbers on the host while it is applied" in member.why_eager
    assert not graphs.captured


def test_a_graph_whose_numbers_are_frozen_is_not_used(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gamma()
    images, numbers = torch.rand(SHAPE), drawn(module)

    def replay_frozen(captured: Any, tensors: Sequence[Tensor]) -> Any:
        return module(images, params=numbers)

    monkeypatch.setattr(kept_graphs, "replay", replay_frozen)
    member = GraphedMember(module)
    assert torch.equal(member(images, numbers), module(images, params=numbers))
    assert "other images than the member for other numbers" in member.why_eager


@pytest.mark.parametrize("is_separable", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_blur_does_not_look_at_its_sigmas_and_is_kornias(
    is_separable: bool, dtype: torch.dtype
) -> None:
    module = K.RandomGaussianBlur((3, 5), (0.3, 2.0), separable=is_separable, p=1.0)
    images, numbers = torch.rand(4, 3, 9, 8).to(dtype), drawn(module, (4, 3, 9, 8))
    expected = module(images, params=numbers)
    applying: Any = copy.deepcopy(module)
    skip_host_reads(applying)
    assert applying._gaussian_blur2d_fn is blur_unchecked
    result = applying(images, params=numbers)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_the_users_generators_do_not_notice_a_capture(graphs: Graphs) -> None:
    module = gamma()
    images, numbers = torch.rand(SHAPE), drawn(module)
    before = torch.get_rng_state(), random.getstate()
    GraphedMember(module)(images, numbers)
    assert graphs.captured
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_member_that_is_given_a_seed_runs_as_it_is(graphs: Graphs) -> None:
    images = torch.rand(SHAPE)
    assert torch.equal(GraphedMember(nn.Identity())(images, 5), images)
    assert not graphs.captured


def test_images_with_gradients_keep_them(graphs: Graphs) -> None:
    module = gamma()
    images = torch.rand(SHAPE).requires_grad_()
    assert GraphedMember(module)(images, drawn(module)).requires_grad
    assert not graphs.captured


def test_a_copy_captures_its_own_graphs(graphs: Graphs) -> None:
    fused = fuse(nn.Sequential(gamma(), K.RandomPerspective(p=1.0)), kept="graphed")
    images = torch.rand(SHAPE)
    fused(images)
    assert len(graphs.captured) == 2
    copy.deepcopy(fused)(images)
    assert len(graphs.captured) == 4
    pickle.loads(pickle.dumps(fused))(images)
    assert len(graphs.captured) == 6


def test_it_is_said_which_members_have_graphs(graphs: Graphs) -> None:
    fused = fuse(
        nn.Sequential(K.RandomHorizontalFlip(), DrawsWhileApplied(p=1.0), gamma()),
        kept="graphed",
    )
    assert fused.summary.endswith("; kept members as graphs on CUDA")
    assert StreamPrefetchLoader([], fused).stats().is_graphed
    assert not StreamPrefetchLoader([], fuse(gamma())).stats().is_graphed
    with generators_seeded(0, torch.device("cpu")):
        member = next(one for one in fused.members if one.step is None).module
        numbers = drawn(member)
    fused.graphs.run(member, torch.rand(SHAPE), numbers)  # type: ignore[union-attr]
    for text in (fused.summary, repr(fused)):
        assert "DrawsWhileApplied without a graph: it draws" in text


# What a capture must not do #


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("tensors on two devices. Move one."), "tensors on two devices"),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (TypeError("no numpy of a cuda tensor"), "no numpy of a cuda tensor"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_any_error_of_a_capture_leaves_the_member_as_it_is(
    graphs: Graphs, error: Exception, told: str
) -> None:
    graphs.error = error
    module = gamma()
    member, images, numbers = GraphedMember(module), torch.rand(SHAPE), drawn(module)
    expected = module(images, params=numbers)
    assert torch.equal(member(images, numbers), expected)
    assert member.why_eager == f"it cannot be captured ({told})"


def test_a_cause_without_a_text_is_told_by_its_kind(graphs: Graphs) -> None:
    graphs.error = TransformError("it cannot be captured")
    graphs.error.__cause__ = NotImplementedError()
    module = gamma()
    member = GraphedMember(module)
    member(torch.rand(SHAPE), drawn(module))
    assert member.why_eager == "it cannot be captured (NotImplementedError)"


def test_the_members_own_error_is_raised_and_is_none_of_its_graph(
    graphs: Graphs,
) -> None:
    module = gamma()
    member = GraphedMember(module)
    with pytest.raises(Exception, match="must match the size"):
        member(torch.rand(SHAPE), drawn(module, (7, *SHAPE[1:])))
    assert not member.why_eager
    assert not graphs.captured


def test_a_graph_of_inference_mode_serves_outside_of_it(graphs: Graphs) -> None:
    module = gamma()
    member, images = GraphedMember(module), torch.rand(SHAPE)
    with torch.inference_mode():
        member(images, drawn(module))
    numbers = drawn(module)
    assert torch.equal(member(images, numbers), module(images, params=numbers))
    assert len(graphs.captured) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_graph_that_gives_no_numbers_is_not_used(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    replay = graphs.replay
    monkeypatch.setattr(
        kept_graphs, "replay", lambda *given: torch.full_like(replay(*given), value)
    )
    module = gamma()
    member, images, numbers = GraphedMember(module), torch.rand(SHAPE), drawn(module)
    assert torch.equal(member(images, numbers), module(images, params=numbers))
    assert "other images than the member" in member.why_eager


def test_images_that_hold_no_numbers_have_graphs_too(graphs: Graphs) -> None:
    module = K.RandomInvert(p=0.5)
    member, images, numbers = GraphedMember(module), torch.rand(SHAPE), drawn(module)
    images[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    member(images, numbers)
    assert not member.why_eager


class WritesToItsImages(K.RandomGamma):
    def apply_transform(self, input: Tensor, params: Any, *_: Any, **__: Any) -> Tensor:
        return input.mul_(params["gamma_factor"].to(input).view(-1, 1, 1, 1))


class BlackensColumns(K.RandomGamma):
    """In place, and twice the same is once: a comparison would not see it."""

    def apply_transform(self, input: Tensor, params: Any, *_: Any, **__: Any) -> Tensor:
        column = (params["gamma_factor"].to(input) * 4).long().view(-1, 1, 1, 1)
        return input.masked_fill_(torch.arange(8).view(1, 1, 1, -1) == column, 0.0)


class WritesToItsNumbers(K.RandomGamma):
    def apply_transform(self, input: Tensor, params: Any, *_: Any, **__: Any) -> Tensor:
        factor = params["gamma_factor"].mul_(2.0)
        params["seen"] = torch.ones(1)
        return input * factor.to(input).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    "kind", [WritesToItsImages, BlackensColumns, WritesToItsNumbers]
)
def test_the_first_batch_is_transformed_once(graphs: Graphs, kind: Any) -> None:
    module = kind((0.5, 1.5), p=1.0)
    member, images, numbers = GraphedMember(module), torch.rand(SHAPE), drawn(module)
    expected = module(images.clone(), params=copy.deepcopy(numbers))
    assert torch.equal(member(images, numbers), expected)
    assert graphs.captured
    assert not member.why_eager


class BesideAnotherThread(K.RandomGamma):
    """Somebody else draws meanwhile, more or less."""

    num_calls = 0

    def apply_transform(self, *args: Any, **settings: Any) -> Tensor:
        self.num_calls += 1
        torch.rand(self.num_calls)
        return super().apply_transform(*args, **settings)

    def generate_parameters(self, *args: Any, **settings: Any) -> Any:
        torch.rand(self.num_calls)
        return super().generate_parameters(*args, **settings)


def test_a_member_is_not_blamed_for_what_another_thread_draws(graphs: Graphs) -> None:
    module = BesideAnotherThread((0.5, 2.0), p=1.0)
    member = GraphedMember(module)
    member(torch.rand(SHAPE), drawn(module))
    assert not member.why_eager
    assert graphs.captured


def test_a_capture_and_a_loader_do_not_wait_for_each_other(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread captures and compares; a loader's has the generators seeded."""
    module = gamma()
    member, images, numbers = GraphedMember(module), torch.rand(SHAPE), drawn(module)
    captures, is_seeded = threading.Event(), threading.Event()

    def capture(*given: Any) -> Any:
        captures.set()
        is_seeded.wait(0.5)  # In vain, where the other thread has to wait.
        return graphs.capture(*given)

    def run_as_a_loader() -> None:
        captures.wait()
        with generators_seeded(1, images.device):
            is_seeded.set()
            member(images, numbers)

    monkeypatch.setattr(kept_graphs, "capture", capture)
    first = threading.Thread(target=member, args=(images, numbers), daemon=True)
    second = threading.Thread(target=run_as_a_loader, daemon=True)
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join(10.0)
    assert not first.is_alive()
    assert not second.is_alive()
    assert len(graphs.captured) == 1


def test_torchs_compiler_does_not_follow_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played, was_compiling = Graphs(), []

    def capture(*given: Any) -> Any:
        was_compiling.append(torch.compiler.is_compiling())
        return played.capture(*given)

    # Without the fixture: the compiler asks whether tensors are the device's.
    fits = lambda _, numbers: isinstance(numbers, dict)  # noqa: E731
    monkeypatch.setattr(kept_graphs, "_fits_a_graph", fits)
    monkeypatch.setattr(kept_graphs, "capture", capture)
    monkeypatch.setattr(kept_graphs, "replay", played.replay)
    fused = fuse(nn.Sequential(K.RandomHorizontalFlip(), gamma()), kept="graphed")
    compiled: Any = torch.compile(fused, backend="eager")
    images = torch.rand(SHAPE)
    results = []
    for run in (compiled, fused):
        torch.manual_seed(3)
        results.append(run(images))
    torch.testing.assert_close(*results)
    assert was_compiling == [False]
