"""Does a batch come back as the same kind of object?"""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchvision import tv_tensors

from gpuprefetch import StreamPrefetchLoader
from tests.fake_device import FakeDevice
from tests.sources import Pair

pytestmark = pytest.mark.timeout(30)


def test_d04_named_tuple_and_tuple_keep_their_types(device: torch.device) -> None:
    """pytorch/pytorch#14613, #48419: both became lists once pinning was on."""
    batch = Pair(torch.ones(2), (torch.zeros(1), [torch.ones(1)]))
    out = next(iter(StreamPrefetchLoader([batch], device=device)))
    assert type(out) is Pair
    assert type(out.y) is tuple
    assert type(out.y[1]) is list
    assert out.x.tolist() == [1, 1]
    assert out.y[1][0].device.type == device.type


@dataclass
class Record:
    ids: list[str]
    x: torch.Tensor


def test_d05_dataclass_is_moved_and_the_source_is_not(
    other_device: torch.device,
) -> None:
    """Lightning-AI/pytorch-lightning#7878: its tensors silently stayed on the CPU."""
    source = Record(["a", "b"], torch.ones(2))
    out = next(iter(StreamPrefetchLoader([source], device=other_device)))
    assert type(out) is Record
    assert out.x.device.type == other_device.type
    assert out.ids == ["a", "b"]
    assert source.x.device.type == "cpu"


class Encoding(UserDict):
    """Knows how to move itself, but not ``non_blocking``."""

    def to(self, device: torch.device) -> "Encoding":
        moved = {k: v.to(device) if v is not None else v for k, v in self.data.items()}
        return type(self)(moved)


class Modern(Encoding):
    """Takes ``non_blocking``, and has a fault of its own."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Modern":
        raise TypeError("my own fault")


class Graph:
    """Wants to know which stream uses it, as PyG's Data does."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.recorded: list[Any] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graph":
        return Graph(self.x.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def test_d06_object_with_a_plain_to_is_moved(other_device: torch.device) -> None:
    """zai-org/GLM-4#248, AutoGPTQ/AutoGPTQ#618: "unexpected keyword non_blocking"."""
    batch = Encoding(ids=torch.arange(4), extra=None)
    out = next(iter(StreamPrefetchLoader([batch], device=other_device)))
    assert type(out) is Encoding
    assert out["extra"] is None
    assert out["ids"].device.type == other_device.type


def test_d06_type_error_inside_a_modern_to_surfaces(
    other_device: torch.device,
) -> None:
    """zai-org/GLM-4#248: a retry without ``non_blocking`` would hide it."""
    batch = Modern(ids=torch.arange(4))
    with pytest.raises(TypeError, match="my own fault"):
        next(iter(StreamPrefetchLoader([batch], device=other_device)))


def test_d06_record_stream_of_an_object_gets_the_consumer_stream(
    fake_device: FakeDevice,
) -> None:
    """pyg-team/pytorch_geometric#2960: a hook made for prefetchers to call."""
    source = [Graph(torch.arange(3))]
    out = next(iter(StreamPrefetchLoader(source, device=fake_device.device)))
    assert fake_device.consumer in out.recorded


@pytest.mark.gpu
def test_d06_record_stream_of_an_object_gets_the_current_stream() -> None:
    """pyg-team/pytorch_geometric#2960: the same on a real device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = next(iter(StreamPrefetchLoader([Graph(torch.arange(3))], device="cuda")))
        assert stream in out.recorded
        assert out.x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("background", [False, True])
def test_d07_bounding_boxes_keep_format_and_canvas(
    device: torch.device, background: bool
) -> None:
    """pytorch/vision#8855: boxes came out of a pinned loader as plain tensors."""
    boxes = tv_tensors.BoundingBoxes(
        [[10, 20, 30, 40]], format="XYWH", canvas_size=(100, 100)
    )
    loader = StreamPrefetchLoader([{"b": boxes}], device=device, background=background)
    out = next(iter(loader))["b"]
    assert type(out) is tv_tensors.BoundingBoxes
    assert out.format.name == "XYWH"
    assert out.canvas_size == (100, 100)
    assert out.tolist() == [[10, 20, 30, 40]]
