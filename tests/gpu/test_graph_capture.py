"""Can the loop capture a CUDA graph while the loader works beside it?

While a stream captures in "global" mode, many CUDA calls are forbidden in *every*
thread of the process: one from a feeder would spoil the capture. So the feeder is kept
busy here, with a source that is slower than the loop.
"""

import time
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.gpu.support import CUDA, settle
from tests.sources import Images

_NUM_CAPTURES = 20
_NUM_BATCHES = 20

Mode = Literal["thread_local", "global"]


class _Slow:
    """Makes pageable batches of one value each, about one a millisecond."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(_NUM_BATCHES):
            time.sleep(0.001)
            yield torch.full((128, 1024), float(index))


def _capture_once(
    loader: StreamPrefetchLoader[torch.Tensor], *, at_batch: int, mode: Mode
) -> None:
    """Run one pass, capture in its middle, replay for every later batch."""
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(128, 1024, device=CUDA)
    settle()
    num_seen = 0
    for index, batch in enumerate(loader):
        wrong += (batch != index).any()
        if index == at_batch:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                result = static * 2 + 1
                time.sleep(0.015)  # The feeder prepares some batches meanwhile.
        if index >= at_batch:
            static.copy_(batch)
            graph.replay()
            wrong += (result != index * 2 + 1).any()
        num_seen += 1
    assert num_seen == _NUM_BATCHES
    assert int(wrong) == 0


@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.parametrize("background", [False, True])
def test_capture_in_mid_epoch_works_twenty_times_of_twenty(
    background: bool, mode: Mode
) -> None:
    with StreamPrefetchLoader(
        _Slow(), device="cuda", depth=4, background=background
    ) as loader:
        for _ in range(_NUM_CAPTURES):
            _capture_once(loader, at_batch=12, mode=mode)


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_capture_works_while_the_first_slots_are_made(mode: Mode) -> None:
    """A new loader each time: its feeder may lock memory just then."""
    for _ in range(_NUM_CAPTURES):
        with StreamPrefetchLoader(
            _Slow(), device="cuda", depth=8, background=True
        ) as loader:
            _capture_once(loader, at_batch=2, mode=mode)


@pytest.mark.parametrize(
    ("mode", "pin_memory"),
    [
        ("thread_local", False),
        ("global", False),
        # In global mode the DataLoader's own pinning thread would spoil the capture.
        ("thread_local", True),
    ],
)
def test_capture_works_beside_workers(mode: Mode, pin_memory: bool) -> None:
    source = DataLoader(
        Images(64, (3, 64, 64)),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        pin_memory=pin_memory,
    )
    loader = StreamPrefetchLoader(source, transform=torch.Tensor.float, device="cuda")
    for _ in range(_NUM_CAPTURES):
        graph = torch.cuda.CUDAGraph()
        static = torch.zeros(4, 3, 64, 64, device=CUDA)
        for index, (images, labels) in enumerate(loader):
            if index == 3:
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    result = static * 2 + 1
            if index >= 3:
                static.copy_(images)
                graph.replay()
                assert torch.equal(result, images * 2 + 1)
            assert labels.tolist() == list(range(4 * index, 4 * index + 4))
        assert index == 15
    loader.close()
