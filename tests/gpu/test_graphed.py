"""Replays of a CUDA graph: equal to eager calls, and the caller's own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment.graphed import GraphedTransform
from gpuprefetch.errors import TransformError
from tests.gpu.support import CUDA, pause_device, settle


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    ).to(CUDA)


def images(count: int, batch: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (batch, 3, 16, 16)
    return [torch.rand(shape, generator=generator).to(CUDA) for _ in range(count)]


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def test_replays_equal_eager_calls_and_belong_to_the_caller() -> None:
    model = encoder().eval()
    graphed, inputs = GraphedTransform(model), images(5)
    results = [graphed(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(result, model(x))
    assert len({result.data_ptr() for result in results}) == 5
    assert not results[0].requires_grad
    assert "captured=1 of 4" in repr(graphed)


def test_inputs_and_results_nest() -> None:
    graphed = GraphedTransform(
        lambda batch, *, scale: {"y": [batch["x"] * scale, "name"], "n": 3}
    )
    for x in images(3):
        result = graphed({"x": x}, scale=2)
        assert result["n"] == 3
        assert result["y"][1] == "name"
        assert torch.equal(result["y"][0], x * 2)


def test_the_callers_input_is_neither_kept_nor_written_to() -> None:
    graphed = GraphedTransform(lambda x: x.mul_(2))
    for x in images(3):
        before = x.clone()
        assert torch.equal(graphed(x), before * 2)
        assert torch.equal(x, before)


def test_random_numbers_are_those_of_eager_calls() -> None:
    x = torch.zeros(1000, device=CUDA)
    torch.cuda.manual_seed(5)
    expected = [noisy(x) for _ in range(4)]
    graphed = GraphedTransform(noisy)
    torch.cuda.manual_seed(5)
    for one in expected:
        torch.testing.assert_close(graphed(x), one)


def test_a_loaders_seed_decides_what_a_replay_draws() -> None:
    source = [x.cpu() for x in images(4)]
    plain = list(StreamPrefetchLoader(source, noisy, device=CUDA, seed=7))
    graphed = GraphedTransform(noisy)
    for _ in range(2):  # The second pass replays from its first batch on.
        loader = StreamPrefetchLoader(source, graphed, device=CUDA, seed=7)
        for came, expected in zip(loader, plain, strict=True):
            torch.testing.assert_close(came, expected)


def test_in_a_loader_batches_stay_their_own() -> None:
    """Many in flight, a slow consumer, and results that are kept."""
    model = encoder().eval()
    source = [x.cpu().pin_memory() for x in images(12)]
    kept = []
    loader = StreamPrefetchLoader(source, GraphedTransform(model), device=CUDA, depth=4)
    for came in loader:
        pause_device()
        kept.append(came)
    for came, x in zip(kept, source, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(came, model(x.to(CUDA)))


def test_calls_on_different_streams_take_turns() -> None:
    """The second stream must not refill the buffers under the first's replay."""

    def slow(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.relu(x @ x)
            x = x / x.norm()
        return x

    graphed = GraphedTransform(slow)
    inputs = [torch.rand(512, 512, device=CUDA) for _ in range(8)]
    graphed(inputs[0])
    expected = [slow(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for index, x in enumerate(inputs):
        with torch.cuda.stream(streams[index % 4]):
            if index % 2 == 0:
                pause_device()
            results.append(graphed(x))
    torch.cuda.synchronize()
    for came, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(came, wanted)


def test_threads_take_turns() -> None:
    model = encoder().eval()
    graphed, inputs = GraphedTransform(model), images(4)
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                came = graphed(inputs[index])
            torch.cuda.current_stream().synchronize()
            if not torch.allclose(came, expected[index], atol=1e-5):
                wrong.append(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []


def test_short_last_batches_run_as_they_are() -> None:
    model = encoder().eval()
    graphed = GraphedTransform(model)
    for x in [*images(2), *images(1, batch=2)]:
        with torch.no_grad():
            torch.testing.assert_close(graphed(x), model(x))
    assert "captured=1 of 4" in repr(graphed)


def test_autocast_has_graphs_of_its_own() -> None:
    linear = nn.Linear(8, 8).to(CUDA)
    graphed, x = GraphedTransform(linear), torch.rand(4, 8, device=CUDA)
    for _ in range(3):
        for is_enabled in (False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=is_enabled):
                result = graphed(x)
                with torch.no_grad():
                    expected = linear(x)
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected)
    assert "captured=2 of 4" in repr(graphed)


def test_captured_in_inference_mode_it_serves_outside() -> None:
    graphed, (x, y) = GraphedTransform(torch.sin), images(2)
    with torch.inference_mode():
        graphed(x)
    torch.testing.assert_close(graphed(y), torch.sin(y))


def test_weights_may_change_in_place() -> None:
    linear = nn.Linear(8, 8).to(CUDA)
    graphed, x = GraphedTransform(linear), torch.rand(4, 8, device=CUDA)
    graphed(x)
    with torch.no_grad():
        linear.weight.mul_(2)
        torch.testing.assert_close(graphed(x), linear(x))


def test_inside_a_capture_it_becomes_part_of_that_one() -> None:
    graphed = GraphedTransform(torch.sin)
    x = torch.rand(64, device=CUDA)
    graphed(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed(x)
    x.fill_(0.5)
    graph.replay()
    torch.testing.assert_close(out, torch.sin(x))


@pytest.mark.timeout(60)
def test_one_that_calls_another_becomes_one_graph() -> None:
    """At its first call too, when the inner one has no graph yet."""
    inner = GraphedTransform(torch.sin)
    outer = GraphedTransform(lambda x: inner(x) + 1)
    for x in images(3):
        torch.testing.assert_close(outer(x), torch.sin(x) + 1)
        torch.testing.assert_close(inner(x), torch.sin(x))


@pytest.fixture
def _recovers() -> Iterator[None]:
    """After a failed capture the device serves as before."""
    before = torch.cuda.current_stream()
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device=CUDA)
    torch.cuda.manual_seed(5)
    yield
    assert torch.cuda.current_stream() == before
    assert torch.equal(torch.rand(4, device=CUDA), expected)
    x = torch.rand(64, device=CUDA)
    graphed = GraphedTransform(torch.sin)
    for _ in range(2):
        torch.testing.assert_close(graphed(x), torch.sin(x))


@pytest.mark.usefixtures("_recovers")
def test_a_function_that_waits_for_the_device_is_refused() -> None:
    graphed = GraphedTransform(lambda x: x * x.sum().item())
    for _ in range(2):
        with pytest.raises(
            TransformError, match=r"(?s)cannot be captured .*must not wait"
        ):
            graphed(torch.ones(4, device=CUDA))


def test_a_failed_capture_does_not_keep_memory_from_coming_back() -> None:
    with pytest.raises(TransformError):
        GraphedTransform(lambda x: x * x.sum().item())(torch.ones(4, device=CUDA))
    settle()
    before = torch.cuda.memory_allocated()
    x = torch.rand(1 << 22, device=CUDA)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    x.record_stream(other)
    del x
    settle()
    torch.rand(4, device=CUDA)  # The allocator looks at its events when it is called.
    assert torch.cuda.memory_allocated() == before


@pytest.mark.usefixtures("_recovers")
def test_the_functions_own_error_is_passed_on() -> None:
    def broken(x: Tensor) -> Tensor:
        torch.rand_like(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        GraphedTransform(broken)(torch.ones(4, device=CUDA))


def test_draws_on_the_host_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    graphed = GraphedTransform(lambda x: x * float(torch.rand(())))
    graphed(torch.rand(4, device=CUDA))
    assert ["drawn on the host" in r.getMessage() for r in caplog.records] == [True]


def test_memory_comes_back() -> None:
    x = torch.rand(1 << 22, device=CUDA)
    settle()
    before = torch.cuda.memory_allocated()
    graphed = GraphedTransform(lambda x: torch.sin(x) + 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed(x)
    del graphed
    settle()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before


def test_nothing_waits_for_the_device_once_captured() -> None:
    graphed, inputs = GraphedTransform(encoder().eval()), images(4)
    graphed(inputs[0])
    torch.cuda.set_sync_debug_mode("error")
    for x in inputs:
        graphed(x)


def test_the_loader_knows_which_graphs_draw() -> None:
    """Only for those it sets generators at every batch."""
    x = torch.rand(4, 8, device=CUDA)
    for fn, draws in ((torch.sin, False), (torch.rand_like, True)):
        graphed = GraphedTransform(fn)
        assert graphed.without_draws((x,)) is None
        graphed(x)
        replay = graphed.without_draws((x,))
        assert (replay is None) is draws
        if replay is not None:
            assert torch.equal(replay(), torch.sin(x))
        assert graphed.without_draws((x[:2],)) is None


@pytest.mark.parametrize("fn", [torch.sin, torch.rand_like])
def test_a_graph_gives_in_a_loader_what_the_function_gives(
    fn: Callable[[Tensor], Tensor],
) -> None:
    source = [torch.rand(4, 8).pin_memory() for _ in range(10)]
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    plain, graphed = (
        list(StreamPrefetchLoader(source, transform, device=CUDA, seed=1))
        for transform in (fn, GraphedTransform(fn))
    )
    for one, other in zip(plain, graphed, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_ctrl_c_during_a_capture_leaves_nothing_behind() -> None:
    calls = []

    def interrupted(x: Tensor) -> Tensor:
        calls.append(torch.cuda.is_current_stream_capturing())
        y = x * 2
        if calls[-1]:
            raise KeyboardInterrupt
        return y

    (x,) = images(1)
    with pytest.raises(KeyboardInterrupt):
        GraphedTransform(interrupted)(x)
    assert calls[-1]
    before = torch.cuda.get_rng_state()
    again = GraphedTransform(noisy)
    again(x)
    torch.cuda.set_rng_state(before)
    first = again(x)
    torch.cuda.set_rng_state(before)
    torch.testing.assert_close(first, noisy(x))
