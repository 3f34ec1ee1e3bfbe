"""Does each kind of leaf reach the GPU as ``leaf.to(device)`` would bring it there?

From pageable and from pinned memory, which take different ways; and from a source that
writes into its buffers again as soon as it is asked for the next batch.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torchvision import tv_tensors

from gpuprefetch import StreamPrefetchLoader
from tests.batches import containers
from tests.compare import assert_moved
from tests.gpu.support import CUDA, HostMemory, pause_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

_IN_EVERY_WAY = [
    pytest.param("pinned", False, id="pinned-inline"),
    pytest.param("pinned", True, id="pinned-thread"),
    pytest.param("pageable", False, id="pageable-inline"),
    pytest.param("pageable", True, id="pageable-thread"),
]


def _boxes() -> torch.Tensor:
    return tv_tensors.BoundingBoxes(
        torch.arange(12).reshape(3, 4), format="XYWH", canvas_size=(100, 120)
    )


# One maker for each kind of leaf that could be packed, laid out or read wrongly.
_LEAVES: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "empty": lambda: torch.empty(0, 5),
    "bool": lambda: torch.arange(7) % 2 == 0,
    "bfloat16": lambda: torch.randn(33).bfloat16(),
    "complex": lambda: torch.randn(9, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(9, dtype=torch.complex64).conj(),
    "odd bytes": lambda: torch.arange(513, dtype=torch.uint8),
    "large": lambda: torch.randint(0, 256, (32, 3, 512, 512), dtype=torch.uint8),
    "channels_last": lambda: torch.randn(4, 3, 32, 32).to(
        memory_format=torch.channels_last
    ),
    "large channels_last": lambda: torch.randn(8, 3, 256, 256).to(
        memory_format=torch.channels_last
    ),
    "transposed": lambda: torch.randn(64, 48).t(),
    "sliced": lambda: torch.randn(64, 64)[3:40, 5:50],
    "every other": lambda: torch.arange(1000)[::2],
    "expanded": lambda: torch.randn(5, 1).expand(5, 100),
    "tail of a storage": lambda: torch.arange(100_000)[70_000:],
    "boxes": _boxes,
    "image": lambda: tv_tensors.Image(torch.randn(3, 200, 200)),
    "mask": lambda: tv_tensors.Mask(torch.ones(1, 64, 64, dtype=torch.uint8)),
}

# Leaves that stay in ordinary memory, for which torch knows no pinned form.
_SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "COO": lambda: torch.randn(20, 20).relu().to_sparse(),
    "hybrid COO": lambda: torch.randn(6, 5, 4).to_sparse(1),
    "CSR": lambda: torch.randn(20, 20).relu().to_sparse_csr(),
    "CSC": lambda: torch.randn(20, 20).relu().to_sparse_csc(),
    "BSR": lambda: torch.randn(20, 20).to_sparse_bsr((5, 5)),
}


def _in_memory(leaf: torch.Tensor, memory: HostMemory) -> torch.Tensor:
    """Bring a leaf into the kind of memory wanted, with its type and strides."""
    if memory == "pageable":
        return leaf
    plain = leaf.as_subclass(torch.Tensor)
    if plain.untyped_storage().nbytes() == 0:
        return leaf
    as_bytes = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    pinned_storage = as_bytes.pin_memory().untyped_storage()
    pinned = torch.empty(0, dtype=plain.dtype).set_(
        pinned_storage, plain.storage_offset(), plain.shape, plain.stride()
    )
    assert pinned.is_pinned()
    if plain.is_conj():
        pinned = pinned.conj()
    if isinstance(leaf, tv_tensors.TVTensor):
        return tv_tensors.wrap(pinned, like=leaf)
    return pinned


def _assert_yields(source: list[object], background: bool) -> None:
    with StreamPrefetchLoader(source, device="cuda", background=background) as loader:
        yielded = list(loader)
    assert len(yielded) == len(source)
    for index, (batch, expected) in enumerate(zip(yielded, source, strict=True)):
        assert_moved(batch, expected, CUDA, f"batches[{index}]")


# Structures #


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
@pytest.mark.parametrize("name", _LEAVES)
def test_each_kind_of_leaf_equals_its_plain_copy(
    name: str, memory: HostMemory, background: bool
) -> None:
    source = [_in_memory(_LEAVES[name](), memory) for _ in range(3)]
    _assert_yields(source, background)


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_all_kinds_of_leaves_in_one_batch_keep_apart(
    memory: HostMemory, background: bool
) -> None:
    """Small leaves share a block; none may spill over into another."""
    source = [
        {name: _in_memory(make(), memory) for name, make in _LEAVES.items()}
        for _ in range(4)
    ]
    _assert_yields(source, background)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", _SPARSE)
def test_each_sparse_layout_equals_its_plain_copy(name: str, background: bool) -> None:
    _assert_yields([{"x": _SPARSE[name](), "y": torch.ones(3)}] * 3, background)


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_each_container_keeps_its_type(memory: HostMemory, background: bool) -> None:
    source = []
    for make in containers().values():
        inner = make(_in_memory(torch.randn(70_000), memory), "text")
        source.append(make(_in_memory(torch.arange(5), memory), [inner, None]))
    _assert_yields(source, background)


@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_many_small_leaves_arrive_in_order(
    memory: HostMemory, background: bool
) -> None:
    source = [
        [
            _in_memory(torch.full((leaf % 7,), 1000 * batch + leaf), memory)
            for leaf in range(300)
        ]
        for batch in range(5)
    ]
    _assert_yields(source, background)


def test_pinned_and_pageable_leaves_may_be_mixed() -> None:
    source = [
        {
            "pinned": torch.randn(1000).pin_memory(),
            "pageable": torch.randn(100_000),
            "there": torch.full((10,), float(index), device=CUDA),
            "name": f"batch {index}",
            "nothing": None,
        }
        for index in range(20)
    ]
    _assert_yields(source, background=False)
    _assert_yields(source, background=True)


def test_leaves_on_the_device_stay_the_same_objects() -> None:
    source = [{"x": torch.ones(5, device=CUDA), "y": torch.ones(5)} for _ in range(3)]
    with StreamPrefetchLoader(source, device="cuda") as loader:
        for batch, expected in zip(loader, source, strict=True):
            assert batch["x"] is expected["x"]


@pytest.mark.parametrize("background", [False, True])
def test_batch_sizes_may_change_from_batch_to_batch(background: bool) -> None:
    """A slot that grows must not be taken away from a copy that still reads it."""
    sizes = [10, 1_000_000, 3, 2_000_000, 500, 4_000_000, 1, 8_000_000] * 3
    source = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]

    def late(batch: torch.Tensor) -> torch.Tensor:
        pause_device()
        return batch.clone()

    with StreamPrefetchLoader(
        source, transform=late, device="cuda", background=background
    ) as loader:
        for batch, expected in zip(loader, source, strict=True):
            assert torch.equal(batch.cpu(), expected)


# A source that refills its buffers #

_NUM_REFILLS = 300


class _Refilling:
    """Writes every batch into the same memory, as fast readers do."""

    def __init__(self, memory: HostMemory) -> None:
        self._image = torch.zeros(4 << 20, dtype=torch.uint8)
        self._labels = torch.zeros(16, dtype=torch.int64)
        if memory == "pinned":
            self._image = self._image.pin_memory()
            self._labels = self._labels.pin_memory()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(_NUM_REFILLS):
            self._image.fill_(index % 251)
            self._labels.fill_(index)
            yield self._image, self._labels


def _late(image: torch.Tensor) -> torch.Tensor:
    """Keep the side stream busy, so that the next copy has to queue."""
    pause_device(1_000_000)
    return image.clone()


def _count_torn(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Count batches that hold anything but what the source gave for them."""
    torn = torch.zeros((), dtype=torch.int64, device=CUDA)
    num_batches = 0
    for index, (image, labels) in enumerate(batches):
        torn += (image != index % 251).any() | (labels != index).any()
        num_batches += 1
    assert num_batches == _NUM_REFILLS
    return int(torn)


@pytest.mark.parametrize("transform", [None, _late])
@pytest.mark.parametrize(("memory", "background"), _IN_EVERY_WAY)
def test_refilled_buffers_are_never_seen_torn(
    memory: HostMemory,
    background: bool,
    transform: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    with StreamPrefetchLoader(
        _Refilling(memory), transform=transform, device="cuda", background=background
    ) as loader:
        assert _count_torn(loader) == 0


def test_check_sees_a_source_that_is_asked_too_early() -> None:
    def naive() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Copy on a side stream and ask for the next batch at once."""
        side = torch.cuda.Stream()
        for image, labels in _Refilling("pinned"):
            with torch.cuda.stream(side):
                pair = (
                    _late(image.to(CUDA, non_blocking=True)),
                    labels.to(CUDA, non_blocking=True),
                )
            torch.cuda.current_stream().wait_stream(side)
            for leaf in pair:
                leaf.record_stream(torch.cuda.current_stream())
            yield pair

    assert _count_torn(naive()) > 0
