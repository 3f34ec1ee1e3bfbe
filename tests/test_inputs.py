"""What does the transform get, where does its result go, and under which modes?"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from tests.sources import Pair

pytestmark = pytest.mark.timeout(30)

both_feeders = pytest.mark.parametrize("background", [False, True])


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@dataclass
class Sample:
    image: torch.Tensor
    label: str = "label"


ONE = torch.ones(2)


@both_feeders
@pytest.mark.parametrize(
    ("batch", "inputs", "read"),
    [
        (ONE, None, lambda b: b),
        ((ONE, "label"), None, lambda b: b[0]),
        ([ONE, "label"], None, lambda b: b[0]),
        (Pair(ONE, "label"), None, lambda b: b.x),
        ((ONE,), 0, lambda b: b[0]),
        (("label", ONE), 1, lambda b: b[1]),
        (("label", ONE), -1, lambda b: b[1]),
        (["label", ONE], -1, lambda b: b[1]),
        ({"image": ONE, "label": 1}, "image", lambda b: b["image"]),
        ({3: ONE, "label": 1}, 3, lambda b: b[3]),
        ({(1, 2): ONE}, ((1, 2),), lambda b: b[(1, 2)]),
        (Pair("label", ONE), "y", lambda b: b.y),
        (Pair("label", ONE), 1, lambda b: b.y),
        (Sample(ONE), "image", lambda b: b.image),
    ],
)
def test_inputs_names_what_is_transformed_and_the_rest_stays(
    device: torch.device,
    batch: Any,
    inputs: Any,
    read: Callable[[Any], Any],
    background: bool,
) -> None:
    transform = (lambda x: (x * 2,)) if isinstance(inputs, tuple) else double
    loader = StreamPrefetchLoader(
        [batch], transform, inputs=inputs, device=device, background=background
    )
    out = next(iter(loader))
    assert type(out) is type(batch)
    assert read(out).tolist() == [2, 2]
    assert read(out).device.type == device.type
    assert "label" not in repr(batch) or "label" in repr(out)
    assert read(batch).tolist() == [1, 1]


@pytest.mark.parametrize("container", [tuple, list])
@pytest.mark.parametrize("inputs", [(0, 2), (2, 0), (-1, 0)])
def test_several_inputs_are_as_many_arguments_and_results(
    device: torch.device, inputs: tuple[int, ...], container: type
) -> None:
    batch = (torch.tensor(1), "kept", torch.tensor(10))

    def transform(a: torch.Tensor, b: torch.Tensor) -> Any:
        return container([a + 1, b + 2])

    out = next(
        iter(StreamPrefetchLoader([batch], transform, inputs=inputs, device=device))
    )
    expected = [1, 10]
    for place, added in zip(inputs, (1, 2), strict=True):
        expected[0 if place == 0 else 1] += added
    assert [int(out[0]), int(out[2])] == expected
    assert out[1] == "kept"


def test_inputs_may_name_an_attribute_of_any_object(device: torch.device) -> None:
    class Graph:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.name = x, "g"

        def to(self, device: torch.device) -> "Graph":
            return Graph(self.x.to(device))

    source = Graph(torch.ones(2))
    out = next(iter(StreamPrefetchLoader([source], double, inputs="x", device=device)))
    assert type(out) is Graph
    assert out.x.tolist() == [2, 2]
    assert source.x.tolist() == [1, 1]


def test_a_transform_may_return_any_structure(device: torch.device) -> None:
    def views(x: torch.Tensor) -> dict[str, Any]:
        return {"views": [x, x + 1]}

    out = next(iter(StreamPrefetchLoader([(ONE, 5)], views, device=device)))
    assert [v.tolist() for v in out[0]["views"]] == [[1, 1], [2, 2]]
    assert out[1] == 5


def test_a_tuple_for_one_input_is_its_one_result(device: torch.device) -> None:
    """Two views of an image."""
    batch = {"x": ONE, "y": 5}
    loader = StreamPrefetchLoader(
        [batch], lambda x: (x, x + 1), inputs="x", device=device
    )
    out = next(iter(loader))
    assert type(out["x"]) is tuple
    assert [view.tolist() for view in out["x"]] == [[1, 1], [2, 2]]
    assert out["y"] == 5


def test_batch_transform_gets_and_gives_the_whole_batch(device: torch.device) -> None:
    seen = []

    def swap(batch: tuple[Any, Any]) -> dict[str, Any]:
        seen.append(type(batch))
        return {"y": batch[1], "x": batch[0] * 2}

    out = next(
        iter(StreamPrefetchLoader([(ONE, "y")], batch_transform=swap, device=device))
    )
    assert seen == [tuple]
    assert out["y"] == "y"
    assert out["x"].tolist() == [2, 2]


def test_the_transform_gets_its_input_on_the_device(other_device: torch.device) -> None:
    seen = []
    list(
        StreamPrefetchLoader(
            [(ONE, ONE)],
            lambda x: (seen.append(x.device.type), x)[1],
            device=other_device,
        )
    )
    assert seen == [other_device.type]


def test_a_transform_that_is_falsy_is_a_transform(device: torch.device) -> None:
    class Doubles:
        def __len__(self) -> int:
            return 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    for settings in ({"transform": Doubles()}, {"batch_transform": Doubles()}):
        loader = StreamPrefetchLoader([ONE], device=device, **settings)
        assert next(iter(loader)).tolist() == [2, 2]


# Modes of the transform #


@both_feeders
@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode]
)
def test_yielded_batches_can_be_trained_on_in_every_mode(
    device: torch.device, mode: Callable[[], Any], background: bool
) -> None:
    seen = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x * 2

    weight = torch.ones(2, requires_grad=True, device=device)
    loader = StreamPrefetchLoader(
        [torch.ones(2)] * 3, transform, device=device, background=background
    )
    with mode():
        out = list(loader)
    assert seen == [(False, False)] * 3
    for x in out:
        assert not x.is_inference()
        (x * weight).sum().backward()
    assert weight.grad.tolist() == [6, 6]


@both_feeders
def test_autocast_is_off_in_the_transform_and_on_in_the_loop(
    device: torch.device, background: bool
) -> None:
    seen = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        kinds = {device.type, "cpu"}
        seen.append({kind: torch.is_autocast_enabled(kind) for kind in kinds})
        return x @ x

    loader = StreamPrefetchLoader(
        [torch.rand(4, 4)] * 3, transform, device=device, background=background
    )
    with torch.autocast(device.type, torch.bfloat16), torch.autocast("cpu"):
        for x in loader:
            assert x.dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
    assert seen == [dict.fromkeys({device.type, "cpu"}, False)] * 3
