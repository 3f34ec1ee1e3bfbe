"""Does every refusal say what came, what is accepted and what to do?

Each message is matched in all three parts. Errors are of this package's own kind and of
the built-in kind that a caller would expect.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import gpuprefetch
from gpuprefetch import (
    BatchError,
    DependencyError,
    ForkedError,
    GpuPrefetchError,
    ImageSizeError,
    SelectionError,
    SettingError,
    SettingTypeError,
    StateError,
    StreamPrefetchLoader,
    SupersededError,
    TraceError,
    TransformError,
)
from tests.sources import Numbers, Pair, count

pytestmark = pytest.mark.timeout(30)

both_feeders = pytest.mark.parametrize("background", [False, True])


def same(x: torch.Tensor) -> torch.Tensor:
    return x


# Kinds #


_KINDS: list[tuple[type[Exception], type[Exception]]] = [
    (SettingError, ValueError),
    (SettingTypeError, TypeError),
    (BatchError, TypeError),
    (SelectionError, LookupError),
    (TransformError, ValueError),
    (ImageSizeError, ValueError),
    (StateError, ValueError),
    (TraceError, ValueError),
    (SupersededError, RuntimeError),
    (ForkedError, RuntimeError),
    (DependencyError, ImportError),
]


@pytest.mark.parametrize(("kind", "built_in"), _KINDS)
def test_each_kind_is_ours_and_the_built_in_one(
    kind: type[Exception], built_in: type[Exception]
) -> None:
    assert issubclass(kind, GpuPrefetchError)
    assert issubclass(kind, built_in)


def test_no_public_kind_of_error_is_missing_above() -> None:
    public = {
        value
        for name in gpuprefetch.__all__
        if isinstance(value := getattr(gpuprefetch, name), type)
        and issubclass(value, GpuPrefetchError)
    }
    assert public == {GpuPrefetchError, *(kind for kind, _ in _KINDS)}


# Wrong arguments #


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"depth": 0}, SettingError, r"depth must be at least 1, got 0\. .*iterate"),
        ({"depth": -3}, SettingError, r"at least 1, got -3"),
        ({"depth": 2.0}, SettingTypeError, r"depth must be an int, got float \(2\.0\)"),
        ({"depth": True}, SettingTypeError, r"depth must be an int, got bool"),
        ({"depth": "2"}, SettingTypeError, r"depth must be an int, got str"),
        ({"depth": None}, SettingTypeError, r"depth must be an int, got NoneType"),
        ({"seed": 1.5}, SettingTypeError, r"seed must be an int, got float \(1\.5\)"),
        ({"seed": "x"}, SettingTypeError, r"seed must be an int, got str"),
        ({"seed": True}, SettingTypeError, r"seed must be an int, got bool \(True\)"),
        ({"seed": np.bool_(True)}, SettingTypeError, r"seed must be an int, got bool"),
        (
            {"seed": torch.tensor(True)},
            SettingTypeError,
            r"seed must be an int, got Tensor",
        ),
        (
            {"background": "yes"},
            SettingTypeError,
            r"background must be True, False or None .*got 'yes'",
        ),
        (
            {"replay": 1},
            SettingTypeError,
            r"replay must be True, False or None .*got 1",
        ),
        (
            {"device": "gpu"},
            SettingError,
            r"device='gpu' is not a device that torch knows\. Pass 'cuda', .*or None",
        ),
        (
            {"device": 1.5},
            SettingTypeError,
            r"device must be a torch\.device, a string .*'cuda:1'.*got float",
        ),
        (
            {"transform": "blur"},
            SettingTypeError,
            r"transform must be callable, got str\. Pass a function or .*Module",
        ),
        (
            {"transform": [same]},
            SettingTypeError,
            r"transform must be callable, got list\. .*nn\.Sequential",
        ),
        (
            {"transform": nn.Identity},
            SettingTypeError,
            r"transform is the class Identity, not an instance\. Pass Identity\(",
        ),
        (
            {"batch_transform": 7},
            SettingTypeError,
            r"batch_transform must be callable, got int",
        ),
        (
            {"transform": same, "batch_transform": same},
            SettingError,
            r"transform and batch_transform were both given\. Pass transform .* or",
        ),
        (
            {"inputs": "x"},
            SettingError,
            r"inputs='x' .*no transform\. Pass transform=.*, or leave inputs out",
        ),
        (
            {"inputs": 0, "batch_transform": same},
            SettingError,
            r"inputs=0 .*batch_transform always gets the whole batch",
        ),
        (
            {"inputs": (), "transform": same},
            SettingError,
            r"inputs is an empty tuple\. Name at least one",
        ),
        (
            {"inputs": ["x", "y"], "transform": same},
            SettingTypeError,
            r"inputs must be an index, a key, .*tuple of those, got \['x', 'y'\]\. "
            r"Pass inputs=\('x', 'y'\)\.",
        ),
        (
            {"inputs": [0], "transform": same},
            SettingTypeError,
            r"got \[0\]\. Pass inputs=\(0,\)\.",
        ),
        (
            {"inputs": [["x"]], "transform": same},
            SettingTypeError,
            r"got \[\['x'\]\]\. Pass inputs=0 or inputs='image', for example",
        ),
        (
            {"inputs": True, "transform": same},
            SettingTypeError,
            r"inputs must be an index, .*got True\. Pass inputs=0 or",
        ),
        (
            {"inputs": ("x", False), "transform": same},
            SettingTypeError,
            r"inputs must be an index, .*got \('x', False\)",
        ),
        (
            {"inputs": ((0, [1]),), "transform": same},
            SettingTypeError,
            r"inputs must be an index, .*got \(\(0, \[1\]\),\)",
        ),
        (
            {"depth": np.array(3)},
            SettingTypeError,
            r"depth must be an int, got ndarray",
        ),
        (
            {"inputs": ("x", "y", "x"), "transform": same},
            SettingError,
            r"inputs=\('x', 'y', 'x'\) names the same input twice.*each input once",
        ),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(
    settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        StreamPrefetchLoader(count(3), **settings)


LOADER = DataLoader(Numbers(4))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"x": torch.ones(4, 3)}, r"got a dict with the keys \['x'\].*gives its keys"),
        (
            {"train": LOADER, "val": LOADER},
            r"\['train', 'val'\].*one of its values",
        ),
        (
            [LOADER, LOADER],
            r"got a list of 2 DataLoaders.*over ConcatDataset",
        ),
        ((LOADER, LOADER), r"got a tuple of 2 DataLoaders.*Pass one of them"),
        (torch.ones(4, 3), r"got a Tensor.*gives its rows.*TensorDataset"),
        (np.ones((4, 3)), r"got an ndarray.*gives its rows.*TensorDataset"),
        (
            nn.Sequential(nn.Identity()),
            r"got the module Sequential.*first, and the module as transform=",
        ),
        (nn.ModuleList([nn.Identity()]), r"got the module ModuleList"),
    ],
    ids=["dict", "dict of loaders", "list", "tuple", "tensor", "array", "module", "ml"],
)
def test_what_would_give_no_batches_when_iterated_is_refused(
    source: Any, message: str
) -> None:
    with pytest.raises(
        SettingTypeError, match=f"source must be a DataLoader or another .*{message}"
    ):
        StreamPrefetchLoader(source)


def test_lists_of_batches_stay_sources() -> None:
    for source in ([], [LOADER, torch.ones(2)], [{"x": torch.ones(2)}], [[LOADER]]):
        StreamPrefetchLoader(source)


@pytest.mark.parametrize("source", [None, 7, lambda: iter([1])])
def test_a_source_that_cannot_be_iterated_is_refused(source: Any) -> None:
    name = type(source).__name__
    with pytest.raises(
        SettingTypeError, match=f"source must be a DataLoader or .*iterable.*got {name}"
    ):
        StreamPrefetchLoader(source)


@pytest.mark.parametrize("source", ["abc", b"abc", bytearray(b"abc"), ""])
def test_text_is_no_source_though_it_can_be_iterated(source: Any) -> None:
    with pytest.raises(
        SettingTypeError,
        match=r"iterable of batches, got the \w+ .*Pass the DataLoader",
    ):
        StreamPrefetchLoader(source)


def test_an_unknown_argument_is_named_by_python() -> None:
    with pytest.raises(TypeError, match="num_workers"):
        StreamPrefetchLoader(count(3), num_workers=2)  # type: ignore[call-arg]


def test_arguments_after_transform_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        StreamPrefetchLoader(count(3), same, "x")  # type: ignore[misc]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_device_that_is_not_here_is_refused_at_iter(device: Any) -> None:
    loader = StreamPrefetchLoader(count(3), device=device)
    with pytest.raises(
        SettingError, match=r"device='cuda.*not available here.*Pass device='cpu'"
    ):
        iter(loader)


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_any_absent_accelerator_is_refused_alike(device: str) -> None:
    module = getattr(torch, device, None)
    if module is not None and module.is_available():
        pytest.skip(f"there is an {device} device here")
    loader = StreamPrefetchLoader(count(3), device=device)
    with pytest.raises(SettingError, match=f"device='{device}' is not available here"):
        iter(loader)


@pytest.mark.gpu
def test_a_device_index_beyond_the_last_is_refused() -> None:
    loader = StreamPrefetchLoader(count(3), device="cuda:99")
    with pytest.raises(SettingError, match=r"'cuda:99' does not exist: there are \d"):
        iter(loader)


# inputs that do not fit the batch #


@dataclass
class Record:
    image: torch.Tensor
    label: int = 0


@both_feeders
@pytest.mark.parametrize(
    ("batch", "inputs", "message"),
    [
        (
            {"image": 1, "label": 2},
            None,
            r"dict with the keys \['image', 'label'\].*inputs=.*batch_transform=",
        ),
        (
            Record(torch.ones(1)),
            None,
            r"Record with the fields \['image', 'label'\].*Pass inputs=",
        ),
        (SimpleNamespace(a=1), None, r"SimpleNamespace.*Pass inputs="),
        ((), None, r"tuple of 0 items.*Pass inputs="),
        ("text", None, r"str.*Pass inputs="),
        ({"image": 1}, "img", r"inputs names 'img'.*dict with the keys \['image'\]"),
        ({"image": 1}, 0, r"inputs names 0, .*dict with the keys \['image'\]"),
        (Record(torch.ones(1)), "x", r"inputs names 'x'.*\['image', 'label'\]"),
        ((torch.ones(1), 2), 2, r"names 2, .*tuple of 2 items \(0: Tensor, 1: int\)"),
        ((torch.ones(1), 2), -3, r"inputs names -3, .*tuple of 2 items .*Name"),
        (deque((1,) * 12), 12, r"deque of 12 items \(0: int, .*9: int, \.\.\.\)"),
        ([torch.ones(1)], "x", r"names 'x', .*list of 1 item \(0: Tensor\)"),
        (Pair(1, 2), "z", r"inputs names 'z', .*Pair with the fields \['x', 'y'\]"),
        ({"a": 1, "b": 2}, ("a", "c"), r"inputs names 'c'.*keys \['a', 'b'\]"),
        (torch.ones(2), "x", r"inputs names 'x', which a Tensor does not have"),
    ],
)
def test_inputs_that_do_not_fit_list_what_there_is(
    batch: Any, inputs: Any, message: str, background: bool
) -> None:
    loader = StreamPrefetchLoader(
        [batch],
        lambda *parts: parts if isinstance(inputs, tuple) else parts[0],
        inputs=inputs,
        device="cpu",
        background=background,
    )
    with pytest.raises(SelectionError, match=message):
        next(iter(loader))


def test_a_selection_error_comes_at_its_own_batch() -> None:
    source = [{"x": torch.ones(1)}, {"y": torch.ones(1)}]
    iterator = iter(StreamPrefetchLoader(source, same, inputs="x", device="cpu"))
    assert next(iterator)["x"].tolist() == [1]
    with pytest.raises(SelectionError, match="'y'"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


# Results that do not fit #


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x, y: x, r"inputs=\('x', 'y'\).*return 2 values.*one Tensor"),
        (lambda x, y: (x,), r"return 2 values.*returned 1 value\..*tuple of 2"),
        (lambda x, y: (x, y, x), r"return 2 values.*returned 3 values"),
        (lambda x, y: None, r"return 2 values.*one NoneType"),
        (lambda x, y: {"x": x, "y": y}, r"return 2 values.*one dict"),
    ],
)
def test_a_wrong_number_of_results_is_refused(
    result: Callable[..., Any], message: str
) -> None:
    batch = {"x": torch.ones(1), "y": torch.ones(1)}
    loader = StreamPrefetchLoader([batch], result, inputs=("x", "y"), device="cpu")
    with pytest.raises(TransformError, match=message):
        next(iter(loader))


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"transform": lambda x: x.new_zeros(1, device="cpu")}, r"batch\[0\]"),
        (
            {"transform": lambda x: {"deep": [torch.zeros(1)]}},
            r"batch\[0\]\['deep'\]\[0\]",
        ),
        ({"batch_transform": lambda b: [b, torch.zeros(1)]}, r"batch\[1\]"),
    ],
)
def test_a_result_on_another_device_is_named(
    other_device: torch.device, settings: dict[str, Any], place: str
) -> None:
    batch = (torch.ones(1), torch.ones(1))
    loader = StreamPrefetchLoader([batch], device=other_device, **settings)
    with pytest.raises(
        TransformError,
        match=rf"{place} is on cpu, not on {other_device.type}.*must return",
    ):
        next(iter(loader))


# Errors of the user's own code #


@both_feeders
def test_the_users_error_is_the_original_object(background: bool) -> None:
    mine = KeyError("mine")

    class Source:
        def __iter__(self) -> Any:
            yield torch.tensor(0)
            raise mine

    iterator = iter(StreamPrefetchLoader(Source(), device="cpu", background=background))
    next(iterator)
    with pytest.raises(KeyError) as caught:
        next(iterator)
    assert caught.value is mine
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@both_feeders
def test_a_stop_iteration_inside_the_transform_does_not_end_the_epoch_silently(
    background: bool,
) -> None:
    """``next()`` of an empty iterator in it: a classic way to lose an epoch."""

    def transform(x: torch.Tensor) -> torch.Tensor:
        if int(x) == 1:
            next(iter(()))
        return x

    loader = StreamPrefetchLoader(
        count(4), transform, device="cpu", background=background
    )
    iterator = iter(loader)
    assert int(next(iterator)) == 0
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)


def test_a_missing_attribute_names_loader_source_and_attribute() -> None:
    loader = StreamPrefetchLoader(DataLoader(Numbers(3)))
    with pytest.raises(
        AttributeError, match=r"StreamPrefetchLoader.*DataLoader.*'smapler'"
    ):
        _ = loader.smapler
