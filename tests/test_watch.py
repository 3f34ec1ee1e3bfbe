"""Is what costs time in silence found, told once, and silenced as the message says?

Each check has its counterpart: a loop without the fault, in which nothing is found.
"""

import functools
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader, findings, syncs, watch
from gpuprefetch.augment import fuse
from gpuprefetch.histogram import Spread
from gpuprefetch.stats import LoaderStats
from tests.fake_clock import FakeClock
from tests.fake_device import FakeDevice, FakeEvent
from tests.sources import Numbers, count

pytestmark = pytest.mark.timeout(30)

CUDA = torch.device("cuda", 0)
META = torch.device("meta")


def texts(found: Any) -> list[str]:
    return [finding.text for finding in found]


# The transform #


def _moved(device: str = "cuda") -> nn.Module:
    """A Kornia augmentation whose samplers lie on a device, as `.to` leaves them."""
    rotation = K.RandomRotation(30.0, p=1.0)
    rotation._param_generator.device = torch.device(device)
    return rotation


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Plain:
    """Augments by one of its attributes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def augment(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _closure(inner: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: inner(x)


def _apply(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner(x)


WAYS = [
    Wrapper,
    _closure,
    Plain,
    lambda inner: Plain(inner).augment,
    lambda inner: functools.partial(_apply, inner),
    lambda inner: nn.Sequential(nn.Identity(), inner),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_kornia_module_that_was_moved_is_found_inside_a_transform(way: Any) -> None:
    (text,) = texts(findings.in_function(way(_moved()), CUDA))
    assert "RandomRotation" in text
    assert "on the CPU" in text
    assert texts(findings.in_function(way(_moved("cpu")), CUDA)) == []


@pytest.mark.parametrize(
    "transform", [_moved(), nn.Sequential(_moved(), _moved()), fuse(_moved())]
)
def test_a_kornia_module_that_is_the_transform_is_taken_over_and_no_fault(
    transform: nn.Module,
) -> None:
    assert texts(findings.in_function(transform, CUDA)) == []


@pytest.mark.parametrize("way", WAYS[1:5])
def test_a_generator_on_another_device_is_found(way: Any) -> None:
    (text,) = texts(findings.in_function(way(torch.Generator()), CUDA))
    assert "torch.Generator on cpu" in text
    assert texts(findings.in_function(way(torch.Generator()), META)) != []
    assert texts(findings.in_function(way(3), CUDA)) == []


@pytest.mark.parametrize("function", [torch.neg, abs, nn.ReLU(), len, print])
def test_ordinary_transforms_hide_nothing(function: Any) -> None:
    assert texts(findings.in_function(function, CUDA)) == []


def test_a_variable_that_is_not_assigned_yet_is_no_error() -> None:
    def augment(x: torch.Tensor) -> torch.Tensor:
        return x if late is None else x + late

    assert texts(findings.in_function(augment, CUDA)) == []
    late = None
    assert texts(findings.in_function(augment, CUDA)) == []


# The first batch #


class Graph:
    """Moves itself, as batches of graphs do."""

    def __init__(self) -> None:
        self.x = torch.ones(3)

    def to(self, device: Any, non_blocking: bool = False) -> "Graph":
        return self


@dataclass
class Sample:
    image: torch.Tensor
    name: str = ""


def test_an_object_that_moves_itself_out_of_pageable_memory_is_named() -> None:
    batch = {"graph": Graph(), "y": torch.ones(3)}
    (text,) = texts(findings.in_batch(batch, is_source_pinning=False))
    assert text.startswith("batch['graph'] is a Graph in pageable memory")
    assert "pin_memory()" in text


LAST = torch.zeros(2, 24, 20, 3)  # (B, H, W, C), as most readers give them.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("wrap", [lambda module: module, fuse])
@pytest.mark.parametrize(
    ("batch", "inputs"), [(LAST, None), ([0, LAST], 1), ({"x": LAST}, ("x",))]
)
def test_channels_last_images_before_kornia_are_told_once(
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    batch: Any,
    inputs: Any,
    wrap: Callable[[nn.Module], nn.Module],
    background: bool,
) -> None:
    loader = StreamPrefetchLoader(
        [batch] * 3,
        wrap(K.RandomHorizontalFlip()),
        inputs=inputs,
        device=device,
        background=background,
    )
    for _ in range(2):
        assert len(list(loader)) == 3
    (text,) = [note for note in loader.stats().notes if "(B, H, W, C)" in note]
    assert "(2, 24, 20, 3)" in text
    assert "here 24 channels of 20 x 3 pixels" in text
    assert "images.permute(0, 3, 1, 2)" in text
    assert [text in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(
    ("images", "transform"),
    [
        (LAST.permute(0, 3, 1, 2), K.RandomHorizontalFlip()),
        (LAST, torch.neg),
        (torch.zeros(2, 12, 24, 3), K.RandomHorizontalFlip()),  # Twelve channels.
        (torch.zeros(2, 24, 20, 1), nn.Flatten()),
    ],
    ids=["first", "function", "few", "module"],
)
def test_what_may_be_meant_is_not_told_as_channels_last(
    device: torch.device, images: torch.Tensor, transform: Callable[..., Any]
) -> None:
    loader = StreamPrefetchLoader([images], transform, device=device)
    list(loader)
    assert not any("(B, H, W, C)" in note for note in loader.stats().notes)


GRAY = torch.zeros(6, 24, 20)  # (B, H, W), which Kornia takes for (C, H, W).
LABELS = torch.arange(6)


@pytest.mark.parametrize("wrap", [lambda module: module, fuse])
@pytest.mark.parametrize(
    ("batch", "inputs"),
    [([GRAY, LABELS], None), ({"x": GRAY, "y": LABELS[:, None].expand(6, 3)}, "x")],
)
def test_gray_images_without_channels_before_kornia_are_told_once(
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    batch: Any,
    inputs: Any,
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    loader = StreamPrefetchLoader(
        [batch] * 3, wrap(K.RandomHorizontalFlip()), inputs=inputs, device=device
    )
    for _ in range(2):
        assert len(list(loader)) == 3
    (text,) = [note for note in loader.stats().notes if "(6, 24, 20)" in note]
    assert "a 3-d tensor is one image (C, H, W)" in text
    assert "images.unsqueeze(1), in the collate function" in text
    assert [text in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(
    ("batch", "transform"),
    [
        ([GRAY[:, None], LABELS], K.RandomHorizontalFlip()),
        ([GRAY, torch.tensor(3)], K.RandomHorizontalFlip()),
        ([GRAY, LABELS[:4]], K.RandomHorizontalFlip()),
        ([GRAY[:3], LABELS[:3]], K.RandomHorizontalFlip()),
        (GRAY, K.RandomHorizontalFlip()),
        ([GRAY, LABELS], torch.neg),
    ],
    ids=["channel", "scalar", "other length", "rgb", "no labels", "function"],
)
def test_what_may_be_one_image_is_not_told_as_gray_images(
    device: torch.device, batch: Any, transform: Callable[..., Any]
) -> None:
    loader = StreamPrefetchLoader([batch], transform, device=device)
    list(loader)
    assert not any("unsqueeze" in note for note in loader.stats().notes)


def test_a_dataclass_that_torch_left_unpinned_is_named() -> None:
    batch = [Sample(torch.ones(3))]
    (text,) = texts(findings.in_batch(batch, is_source_pinning=True))
    assert text.startswith("batch[0].image is not pinned")
    # Whoever did not ask for it gets it from the loader.
    assert texts(findings.in_batch(batch, is_source_pinning=False)) == []


def test_what_is_pinned_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    batch = [Sample(torch.ones(3)), Graph()]
    assert texts(findings.in_batch(batch, is_source_pinning=True)) == []
    assert findings.pageable_leaf(batch) is None


def test_the_largest_pageable_leaf_stands_for_the_batch() -> None:
    large = torch.ones(9)
    assert findings.pageable_leaf([torch.ones(3), {"x": large}, "name"]) is large


# Figures #


def _figures(**given: Any) -> LoaderStats:
    spreads = {
        name: Spread(value, value, value, 32)
        for name, value in given.items()
        if isinstance(value, float)
    }
    return LoaderStats(batches=32, is_overlapped=True, **{**given, **spreads})


PAGEABLE = _figures(period_ms=10.0, pin_ms=3.0, loader_ms=3.1, copy_ms=1.0)
HEAVY = _figures(period_ms=10.0, source_wait_ms=5.0, pull_ms=5.0, num_workers=0)
SMALL = _figures(period_ms=0.5, loader_ms=0.1, copy_ms=0.01)


@pytest.mark.parametrize(
    ("stats", "pattern"),
    [
        (PAGEABLE, r"^batch\['x'\] arrives in pageable memory.*3\.00 of 10\.00 ms"),
        (HEAVY, r"^DataLoader\(num_workers=0\).*5\.0 of 10\.0 ms"),
        (SMALL, r"^handling a batch takes.*0\.10 of 0\.50 ms.*larger batches"),
    ],
)
def test_first_figures_show_a_fault_and_what_to_do(
    stats: LoaderStats, pattern: str
) -> None:
    (text,) = texts(findings.in_figures(stats, "batch['x']"))
    assert re.search(pattern, text)


@pytest.mark.parametrize(
    "stats",
    [
        replace(PAGEABLE, is_threaded=True, loader_ms=Spread(0.1, 0.1, 0.1, 32)),
        replace(PAGEABLE, period_ms=Spread(100.0, 100.0, 100.0, 32)),
        replace(PAGEABLE, stall_ms=Spread(0.1, 0.1, 0.1, 32)),  # Hidden by the step.
        replace(HEAVY, num_workers=2),
        replace(HEAVY, num_workers=None),
        replace(HEAVY, source_wait_ms=Spread(1.0, 1.0, 1.0, 32)),
        replace(SMALL, copy_ms=Spread(0.2, 0.2, 0.2, 32)),  # Hides more than it takes.
        replace(SMALL, transform_host_ms=Spread(0.09, 0.09, 0.09, 32)),
        replace(PAGEABLE, batches=3),
    ],
)
def test_figures_without_a_fault_show_none(stats: LoaderStats) -> None:
    assert texts(findings.in_figures(stats, "")) == []


# Waits of the transform #


def test_waits_are_counted_and_named_by_their_place() -> None:
    places = ["aug.py:3", "aug.py:7", "aug.py:3"]
    (text,) = texts(findings.in_syncs(places))
    assert "3 times a batch, at aug.py:3 and at 1 other places" in text
    assert texts(findings.in_syncs([])) == []


def _waits(x: torch.Tensor) -> torch.Tensor:
    # What torch says where its debug mode is on and a call waits.
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)
    return x


@pytest.fixture
def debug_modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for CUDA's debug mode, which needs CUDA; notes how it is set."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_waits_are_taken_and_other_warnings_go_their_way(
    debug_modes: list[Any],
) -> None:
    x = torch.ones(1)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with syncs.syncs_noted(CUDA) as places:
            _waits(x)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            _waits(x)
    assert [place.rpartition(":")[0] for place in places] == [__file__] * 2
    assert [str(warning.message) for warning in others] == ["old"]
    assert debug_modes == ["warn", "default"]
    with pytest.raises(UserWarning, match="synchronizing"):
        _waits(x)


def test_a_warning_that_is_an_error_stays_one(debug_modes: list[Any]) -> None:
    with pytest.raises(RuntimeWarning, match="mine"), syncs.syncs_noted(CUDA):
        warnings.warn("mine", RuntimeWarning, stacklevel=1)
    assert debug_modes == ["warn", "default"]


@pytest.mark.parametrize("device", [torch.device("cpu"), META])
def test_other_devices_are_left_alone(
    device: torch.device, debug_modes: list[Any]
) -> None:
    with syncs.syncs_noted(device) as places:
        pass
    assert places == []
    assert debug_modes == []


def test_a_mode_that_the_user_has_set_is_left_alone(
    debug_modes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    with syncs.syncs_noted(CUDA):
        pass
    assert debug_modes == []


# Told once #


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "gpuprefetch.advice"]


def test_a_finding_is_told_once_in_the_life_of_a_loader(
    fake_device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    source = [{"graph": Graph(), "y": torch.ones(3)} for _ in range(4)]
    loader = StreamPrefetchLoader(source, device=META)
    list(loader)
    list(loader)
    (message,) = _messages(caplog)
    assert message.startswith("batch['graph'] is a Graph in pageable memory")
    assert "logging.getLogger('gpuprefetch.advice').setLevel" in message
    assert loader.stats().notes == (message.partition(" (logging")[0],)
    assert f"note: {loader.stats().notes[0]}" in loader.report()


def test_the_message_can_be_silenced_as_it_says(
    fake_device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("gpuprefetch.advice")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        loader = StreamPrefetchLoader([Graph()], device=META)
        list(loader)
    finally:
        logger.setLevel(level)
    assert _messages(caplog) == []
    assert len(loader.stats().notes) == 1


def test_a_heavy_dataset_without_workers_is_told(
    fake_clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Heavy(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            fake_clock.pass_ms(4)
            return super().__getitem__(index)

    list(StreamPrefetchLoader(DataLoader(Heavy(12))))
    (message,) = _messages(caplog)
    assert message.startswith("DataLoader(num_workers=0) makes its batches")


def test_a_pageable_batch_is_told_by_its_path(
    fake_device: FakeDevice,
    fake_clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpuprefetch import prepare

    def slow_fill(*arguments: Any) -> Any:
        fake_clock.pass_ms(4)
        return fill(*arguments)

    fill = prepare.fill_slot
    monkeypatch.setattr(prepare, "fill_slot", slow_fill)
    # Meanwhile the device stands still.
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda event, later: 3.0)
    list(StreamPrefetchLoader([{"x": t} for t in count(40)], device=META))
    (message,) = _messages(caplog)
    assert message.startswith("batch['x'] arrives in pageable memory")


def test_waits_of_the_transform_are_looked_for_in_two_early_calls(
    fake_device: FakeDevice,
    caplog: pytest.LogCaptureFixture,
    debug_modes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "syncs_noted", lambda device: syncs.syncs_noted(CUDA))
    calls = []

    def transform(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(debug_modes) % 2 == 1)
        return _waits(x) if calls[-1] else x

    loader = StreamPrefetchLoader(count(6), transform, device=META)
    for _ in range(2):
        list(loader)
    assert calls == [False, True, True] + [False] * 9
    (message,) = _messages(caplog)
    assert message.startswith("the transform makes the host wait for the device 1 time")
    assert "test_watch.py:" in message


def test_an_ordinary_loop_is_told_nothing(
    fake_device: FakeDevice, fake_clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in StreamPrefetchLoader(count(40), torch.neg, device=META):
        fake_clock.pass_ms(5)
    assert _messages(caplog) == []
