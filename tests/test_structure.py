"""Does a batch of any structure come back as what the plain loop would give?

The oracle is ``batch.to(device)``, leaf by leaf, in :mod:`tests.compare`. On the
``meta`` device it is seen without a GPU what was moved and what was not.
"""

import contextlib
import copy
import dataclasses
import warnings
from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprefetch import BatchError, BatchWarning, StreamPrefetchLoader
from gpuprefetch.batch import leaves_of, map_leaves
from gpuprefetch.staging import Slot, fill_slot, tensor_in
from tests.batches import (
    DTYPES,
    Frozen,
    Point,
    Sample,
    Wrapping,
    batches,
    containers,
    dense_tensors,
    odd_tensors,
)
from tests.compare import assert_moved, bits, dense_parts, tensor_leaves
from tests.fake_device import FakeDevice

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

depths = st.integers(1, 4)
few_batches = st.lists(batches(), max_size=4)


def assert_yields(
    source: list[Any], device: torch.device, *, depth: int, background: bool
) -> None:
    """Assert that the loader gives what the plain loop gives, in its order."""
    tensors = [id(leaf) for batch in source for leaf in tensor_leaves(batch)]
    loader = StreamPrefetchLoader(
        source, device=device, depth=depth, background=background
    )
    out = list(loader)
    assert len(out) == len(source)
    for index, (actual, expected) in enumerate(zip(out, source, strict=True)):
        assert_moved(actual, expected, device, f"batches[{index}]")
    # Nobody wrote into the source's own containers.
    assert [id(leaf) for b in source for leaf in tensor_leaves(b)] == tensors


# Any structure #


@given(source=few_batches, depth=depths, background=st.booleans())
def test_any_batches_equal_the_plain_loop(
    device: torch.device, source: list[Any], depth: int, background: bool
) -> None:
    assert_yields(source, device, depth=depth, background=background)


@given(source=few_batches, depth=depths, background=st.booleans())
def test_any_batches_are_moved_in_every_tensor(
    other_device: torch.device, source: list[Any], depth: int, background: bool
) -> None:
    assert_yields(source, other_device, depth=depth, background=background)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=few_batches, depth=depths, background=st.booleans())
def test_any_batches_pass_the_staging_and_the_side_stream(
    fake_device: FakeDevice, source: list[Any], depth: int, background: bool
) -> None:
    assert_yields(source, fake_device.device, depth=depth, background=background)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_order_is_that_of_the_source(
    device: torch.device, depth: int, background: bool
) -> None:
    source = [{"i": torch.tensor(i)} for i in range(25)]
    assert_yields(source, device, depth=depth, background=background)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", containers())
def test_each_container_keeps_its_type(
    other_device: torch.device, name: str, background: bool
) -> None:
    make = containers()[name]
    inner = make(torch.ones(2), "text")
    source = [make(torch.zeros(1), [inner, None]), make(inner, inner)]
    assert_yields(source, other_device, depth=2, background=background)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", odd_tensors())
def test_each_kind_of_tensor_keeps_its_type(
    device: torch.device, name: str, background: bool
) -> None:
    source = [odd_tensors()[name]()] * 2
    assert_yields(source, device, depth=2, background=background)


# torch has no nested tensors of the older layout on the meta device.
on_meta_too = pytest.mark.parametrize("name", sorted({*odd_tensors()} - {"nested"}))


@on_meta_too
def test_each_kind_of_tensor_is_moved(other_device: torch.device, name: str) -> None:
    assert_yields([odd_tensors()[name]()], other_device, depth=2, background=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_keeps_its_bits(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.arange(dtype.itemsize * 6, dtype=torch.uint8) % 2
    source = [x.view(dtype).reshape(2, 3), x.view(dtype)[0]]
    assert_yields(source, device, depth=2, background=True)


@pytest.mark.parametrize("background", [False, True])
def test_torch_return_types_keep_their_type(
    other_device: torch.device, background: bool
) -> None:
    batch = torch.max(torch.arange(6.0).reshape(2, 3), dim=1)
    loader = StreamPrefetchLoader([batch], device=other_device, background=background)
    out = next(iter(loader))
    assert type(out) is torch.return_types.max
    assert out.values.device.type == out.indices.device.type == other_device.type


# Hand-off #


@on_meta_too
def test_each_tensor_of_any_leaf_is_recorded_on_the_consumer(
    fake_device: FakeDevice, name: str
) -> None:
    """Also inside objects with a ``to`` of their own: their memory is recycled too."""
    source = [{"deep": [odd_tensors()[name]()]}]
    out = next(iter(StreamPrefetchLoader(source, device=fake_device.device)))
    recorded = fake_device.recorded_storages(fake_device.consumer)
    parts = [part for leaf in tensor_leaves(out) for part in dense_parts(leaf)]
    assert parts
    for part in parts:
        is_recorded = part.untyped_storage()._cdata in recorded
        assert is_recorded or part.device.type == "cpu"


# What is not walked, and what cannot be #


def test_a_batch_that_is_there_already_is_the_same_object(device: torch.device) -> None:
    batch = {"x": [torch.ones(2, device=device)], "y": Point(1, None)}
    assert next(iter(StreamPrefetchLoader([batch], device=device))) is batch


def test_a_container_without_tensors_is_the_same_object(
    other_device: torch.device,
) -> None:
    names, empty = ["a", "b"], {}
    batch = (torch.ones(1), names, empty)
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert out[1] is names
    assert out[2] is empty


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", [list, dict, deque, SimpleNamespace])
def test_a_batch_that_contains_itself_is_refused(
    device: torch.device, kind: type, background: bool
) -> None:
    batch: Any = kind()
    if kind is dict:
        batch["self"] = batch
    elif kind is SimpleNamespace:
        batch = Sample(x=torch.ones(1))
        batch.y = [batch]
    else:
        batch.append(batch)
    loader = StreamPrefetchLoader([batch], device=device, background=background)
    with pytest.raises(BatchError, match=r"batch.* may not contain itself"):
        next(iter(loader))


def test_a_set_of_tensors_is_not_left_behind(other_device: torch.device) -> None:
    loader = StreamPrefetchLoader([{torch.ones(1)}], device=other_device)
    with pytest.raises(BatchError, match=r"set.*list or a tuple"):
        next(iter(loader))


def test_an_object_that_hides_a_tensor_is_named_once(
    other_device: torch.device,
) -> None:
    class Hides:
        def __init__(self) -> None:
            self.secret = torch.ones(1)

    source = [{"a": [Hides()]}, {"a": [Hides()]}]
    loader = StreamPrefetchLoader(source, device=other_device)
    with pytest.warns(BatchWarning, match=r"batch\['a'\]\[0\].*secret") as caught:
        out = list(loader)
    assert len([w for w in caught if w.category is BatchWarning]) == 1
    assert out[0]["a"][0] is source[0]["a"][0]


@pytest.mark.parametrize("kind", ["dict subclass", "tuple subclass"])
def test_a_tensor_in_an_attribute_of_a_container_is_not_left_behind_silently(
    other_device: torch.device, kind: str
) -> None:
    batch = containers()[kind](torch.ones(1), torch.ones(1))
    batch.extra = torch.ones(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    is_moved = out.extra.device.type == other_device.type
    assert is_moved or any(w.category is BatchWarning for w in caught)


def test_a_mapping_over_its_own_dict_is_moved_without_writing_to_the_source(
    other_device: torch.device,
) -> None:
    """``copy.copy`` of it shares the dict: writing would reach the source."""
    batch = Wrapping({"x": torch.ones(2)})
    loader = StreamPrefetchLoader([batch], device=other_device)
    with contextlib.suppress(BatchError):
        out = next(iter(loader))
        assert type(out) is Wrapping
        assert out["x"].device.type == other_device.type
    assert batch["x"].device.type == "cpu"


def test_an_object_with_a_class_attribute_to_is_no_mover(
    other_device: torch.device,
) -> None:
    batch = {"x": torch.ones(1), "mail": SimpleNamespace(to="someone@example.org")}
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert out["mail"].to == "someone@example.org"
    assert out["x"].device.type == other_device.type


class _KeysAsAttributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_a_dict_that_raises_key_errors_for_attributes_is_moved(
    other_device: torch.device,
) -> None:
    batch = _KeysAsAttributes(x=torch.ones(1))
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert type(out) is _KeysAsAttributes
    assert out.x.device.type == other_device.type


class _ItsOwnDict(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def test_a_dict_that_is_its_own_attributes_has_the_transforms_result_in_both() -> None:
    batch = _ItsOwnDict(x=torch.ones(2), y=[torch.ones(1)])
    loader = StreamPrefetchLoader([batch], lambda x: x * 2, inputs="x", device="cpu")
    out = next(iter(loader))
    assert out["x"].tolist() == [2.0, 2.0]
    assert out.x is out["x"]
    assert out.y is batch.y
    out["x"] = out.z = 3
    assert (out.x, out["z"]) == (3, 3)
    assert batch.x.tolist() == [1.0, 1.0]
    assert batch.keys() == {"x", "y"}


def test_a_type_in_a_batch_is_a_leaf(other_device: torch.device) -> None:
    batch = (torch.ones(1), torch.Tensor, Sample, dict)
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert out[1:] == (torch.Tensor, Sample, dict)


def test_a_field_that_was_never_set_stays_unset(other_device: torch.device) -> None:
    @dataclasses.dataclass
    class Lazy:
        x: torch.Tensor
        cache: Any = dataclasses.field(init=False)

    out = next(iter(StreamPrefetchLoader([Lazy(torch.ones(1))], device=other_device)))
    assert out.x.device.type == other_device.type
    assert not hasattr(out, "cache")


def test_rebuilding_runs_no_constructor(other_device: torch.device) -> None:
    @dataclasses.dataclass
    class Counts:
        x: torch.Tensor
        made: int = 0

        def __post_init__(self) -> None:
            self.made += 1

    batch = Counts(torch.ones(1))
    assert next(iter(StreamPrefetchLoader([batch], device=other_device))).made == 1


def test_frozen_fields_set_after_construction_are_kept(
    other_device: torch.device,
) -> None:
    batch = Frozen(torch.ones(1), "y")
    object.__setattr__(batch, "later", torch.zeros(2))
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert out.later.device.type == other_device.type
    assert out.y == "y"


def test_a_missing_key_is_not_invented(other_device: torch.device) -> None:
    batch = containers()["defaultdict"](torch.ones(1), 2)
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert list(out) == ["x", "y"]
    assert list(batch) == ["x", "y"]


# Staging: the bytes of every dense tensor, on any machine #


class _Pages:
    """Has the face of a pinned buffer."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.bytes = torch.full((num_bytes,), 255, dtype=torch.uint8)

    def release(self) -> None:
        """There is nothing to unlock."""


@given(leaves=st.lists(dense_tensors(), min_size=1, max_size=5))
def test_a_slot_holds_the_same_values_and_strides(leaves: list[torch.Tensor]) -> None:
    assert_staged(leaves)


def assert_staged(leaves: list[torch.Tensor]) -> None:
    slot = Slot()
    places = fill_slot(slot, leaves, _Pages)
    for leaf, place in zip(leaves, places, strict=True):
        staged = tensor_in(slot.bytes_host, place, place.offset)
        assert staged.shape == leaf.shape
        assert staged.dtype == leaf.dtype
        assert staged.stride() == leaf.to("meta").stride()
        assert torch.equal(bits(staged), bits(leaf))


# Walking #


@given(batch=batches())
def test_walk_and_rebuild_visit_the_same_leaves(batch: Any) -> None:
    seen: list[Any] = []
    same = map_leaves(batch, lambda leaf: (seen.append(leaf), leaf)[1])
    assert same is batch
    assert all(a is b for a, b in zip(leaves_of(batch), seen, strict=True))


# The detector detects #


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ((torch.ones(1),), [torch.ones(1)]),
        (Point(torch.ones(1), 2), (torch.ones(1), 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [torch.ones(1)]}, {"a": [torch.zeros(1)]}),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
        (torch.ones(2, 3), torch.ones(3, 2).mT),
        (torch.ones(1), None),
        (odd_tensors()["boxes"](), torch.tensor([[1, 2, 3, 4]])),
        (
            odd_tensors()["boxes"](),
            type(odd_tensors()["boxes"]())(
                [[1, 2, 3, 4]], format="XYXY", canvas_size=(10, 12)
            ),
        ),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (torch.tensor([1j]).conj(), torch.tensor([1j])),
        (Sample(torch.ones(1), "y"), Sample(torch.ones(1), "z")),
        (containers()["defaultdict"](1, 2), UserDict(x=1, y=2)),
        (deque([1], maxlen=3), deque([1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_meta_a_wrong_batch_is_seen(right: Any, wrong: Any) -> None:
    cpu = torch.device("cpu")
    assert_moved(copy.copy(right), right, cpu)
    with pytest.raises(AssertionError):
        assert_moved(wrong, right, cpu)


def test_meta_a_tensor_left_behind_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"batch\['a'\].device"):
        assert_moved({"a": torch.ones(1)}, {"a": torch.ones(1)}, torch.device("meta"))
