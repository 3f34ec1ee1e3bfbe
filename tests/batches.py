"""Which batches may a source yield? Types and hypothesis strategies for all of them."""

import warnings
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torchvision import tv_tensors

try:
    import attr
except ImportError:
    attr = None

__all__ = [
    "DTYPES",
    "batches",
    "containers",
    "dense_tensors",
    "odd_tensors",
]

# Every dtype of which a dense tensor can be filled and compared.
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


# Containers #

Point = namedtuple("Point", "x y")


class Labelled(tuple):
    """A tuple with an attribute."""

    label = "none"


class Named(dict):
    """A dict whose constructor wants a name, with attributes beside its items."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(**items)
        self.name = name


@dataclass
class Sample:
    x: Any
    y: Any = None
    made: Any = field(init=False, default="in __post_init__")


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any
    later: Any = field(init=False, default=None)


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlotted:
    x: Any
    y: Any = None


class Wrapping(MutableMapping):
    """A mapping that keeps its items in a dict of its own, as TypedDict-likes do."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Pairlike(tuple):
    """A tuple whose constructor takes its items one by one."""

    def __new__(cls, first: Any, second: Any) -> "Pairlike":
        return super().__new__(cls, (first, second))


if attr is not None:

    @attr.s(auto_attribs=True)
    class AttrsSample:
        x: Any
        y: Any = None

    @attr.s(auto_attribs=True, frozen=True, slots=True)
    class FrozenAttrs:
        x: Any
        y: Any = None


def _default_dict(items: dict[str, Any]) -> defaultdict[str, Any]:
    return defaultdict(list, items)


def _named(items: dict[str, Any]) -> Named:
    named = Named("batch", **items)
    named.origin = "the second epoch"
    return named


def _labelled(items: list[Any]) -> Labelled:
    labelled = Labelled(items)
    labelled.label = "train"
    return labelled


def containers() -> dict[str, Callable[[Any, Any], Any]]:
    """Name a builder, from two children, for every kind of container."""
    makers: dict[str, Callable[[Any, Any], Any]] = {
        "tuple": lambda x, y: (x, y),
        "list": lambda x, y: [x, y],
        "deque": lambda x, y: deque([x, y], maxlen=5),
        "UserList": lambda x, y: UserList([x, y]),
        "namedtuple": Point,
        "tuple subclass": lambda x, y: _labelled([x, y]),
        "tuple with its own constructor": Pairlike,
        "dict": lambda x, y: {"x": x, 3: y},
        "OrderedDict": lambda x, y: OrderedDict(y=y, x=x),
        "defaultdict": lambda x, y: _default_dict({"x": x, "y": y}),
        "UserDict": lambda x, y: UserDict(x=x, y=y),
        "dict subclass": lambda x, y: _named({"x": x, "y": y}),
        "mappingproxy": lambda x, y: MappingProxyType({"x": x, "y": y}),
        "dataclass": Sample,
        "frozen dataclass": Frozen,
        "slots dataclass": Slotted,
        "frozen slots dataclass": lambda x, y: FrozenSlotted(x=x, y=y),
    }
    if attr is not None:
        makers["attrs"] = AttrsSample
        makers["frozen attrs"] = FrozenAttrs
    return makers


# Leaves #


class Movable:
    """Moves itself, and takes ``non_blocking``."""

    def __init__(self, x: torch.Tensor, note: str = "") -> None:
        self.x, self.note = x, note

    def to(self, device: torch.device, non_blocking: bool = False) -> "Movable":
        return Movable(self.x.to(device, non_blocking=non_blocking), self.note)


class PlainMovable(Movable):
    """Moves itself, and does not know ``non_blocking``."""

    def to(self, device: torch.device) -> "PlainMovable":  # type: ignore[override]
        return PlainMovable(self.x.to(device), self.note)


class Encoding(UserDict):
    """What a tokenizer gives: a mapping that moves itself."""

    def to(self, device: torch.device) -> "Encoding":
        return Encoding(
            {k: v if v is None else v.to(device) for k, v in self.data.items()}
        )


@dataclass
class MovingSample:
    """A dataclass that moves itself."""

    x: Any
    more: Any = None

    def to(self, device: torch.device, **settings: Any) -> "MovingSample":
        return MovingSample(
            self.x.to(device, **settings),
            [child.to(device, **settings) for child in self.more],
        )


@st.composite
def dense_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a strided tensor: any dtype, 0 to 4 dimensions, any order in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    layout = draw(st.sampled_from(_LAYOUTS))
    return layout(_filled(tuple(shape), dtype, draw(st.integers(0, 99))))


def _filled(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Fill a tensor with bytes that follow from ``start``; no NaN is told apart."""
    num_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    values = (torch.arange(num_bytes) * 37 + start) % 256
    if dtype is torch.bool:
        values = values % 2
    return values.to(torch.uint8).view(dtype).reshape(shape)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0).expand(3, *x.shape)


def _every_other(x: torch.Tensor) -> torch.Tensor:
    return x[..., ::2] if x.dim() else x


def _tail(x: torch.Tensor) -> torch.Tensor:
    return x[1:] if x.dim() else x


def _conjugated(x: torch.Tensor) -> torch.Tensor:
    return x.conj() if x.is_complex() else x


def _negative_view(x: torch.Tensor) -> torch.Tensor:
    return x.conj().imag if x.is_complex() and x.dtype != torch.complex32 else x


_LAYOUTS = [
    lambda x: x,
    lambda x: x.mT if x.dim() > 1 else x,
    _channels_last,
    _expanded,
    _every_other,
    _tail,
    _conjugated,
    _negative_view,
]


def odd_tensors() -> dict[str, Callable[[], Any]]:
    """Name a maker for every tensor that is no plain dense one."""
    with warnings.catch_warnings():
        # Layouts that torch calls beta; the loader has to carry them all the same.
        warnings.simplefilter("ignore")
        csr = torch.eye(3).to_sparse_csr()
        csc = torch.eye(3).to_sparse_csc()
        bsr = torch.eye(4).to_sparse_bsr((2, 2))
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)])
    jagged = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged
    )
    return {
        "COO": lambda: torch.eye(3).to_sparse(),
        "empty COO": lambda: torch.zeros(3, 2).to_sparse(),
        "hybrid COO": lambda: torch.ones(2, 3, 4).to_sparse(1),
        "CSR": lambda: csr,
        "CSC": lambda: csc,
        "BSR": lambda: bsr,
        "nested": lambda: nested,
        "jagged": lambda: jagged,
        "boxes": lambda: tv_tensors.BoundingBoxes(
            [[1, 2, 3, 4]], format="XYWH", canvas_size=(10, 12)
        ),
        "mask": lambda: tv_tensors.Mask(torch.ones(1, 4, 4, dtype=torch.uint8)),
        "image": lambda: tv_tensors.Image(torch.rand(3, 4, 4)),
        "packed": lambda: pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)]),
        "movable": lambda: Movable(torch.arange(3.0), "kept"),
        "plainly movable": lambda: PlainMovable(torch.arange(3.0), "kept"),
        "movable mapping": lambda: Encoding(ids=torch.arange(3), none=None),
        "movable dataclass": lambda: MovingSample(torch.arange(3), [torch.ones(1)]),
    }


def _leaves() -> st.SearchStrategy[Any]:
    makers = [
        make for name, make in odd_tensors().items() if name not in ("nested", "CSC")
    ]
    return st.one_of(
        dense_tensors(),
        dense_tensors(),
        st.sampled_from(makers).map(lambda make: make()),
        st.sampled_from([None, "text", b"bytes", 7, 2.5, True, 1 + 2j]),
        st.sampled_from([np.arange(3), np.ones((2, 2), dtype=np.float16)]),
        st.sampled_from([range(3), SimpleNamespace(note="no tensor"), print, int]),
    )


def batches() -> st.SearchStrategy[Any]:
    """Draw a batch: leaves, or any containers of any containers of leaves."""
    makers = list(containers().values())

    def contain(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.builds(
                lambda make, x, y: make(x, y),
                st.sampled_from(makers),
                children,
                children,
            ),
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abcd"), children, max_size=3),
        )

    return st.recursive(_leaves(), contain, max_leaves=6)
