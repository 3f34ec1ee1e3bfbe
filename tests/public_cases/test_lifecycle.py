"""How does a pass end, by an error or early, and how does the next one begin?"""

import gc
import itertools
import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.children import run_script
from tests.sources import Numbers, count

pytestmark = pytest.mark.timeout(30)


# Errors #


def two_good_one_bad() -> Iterator[torch.Tensor]:
    yield torch.tensor(0)
    yield torch.tensor(1)
    raise ValueError("bad file 2")


def _assert_fails_at_two(
    iterator: Iterator[torch.Tensor], message: str, function: str
) -> None:
    """Assert two good batches, then the error of a user's function, then the end."""
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(ValueError, match=message) as caught:
        next(iterator)
    # The traceback shows the user's own line, and it is the original object.
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert function in [frame.name for frame in frames]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_d11_source_error_comes_after_the_good_batches_and_ends_the_pass(
    device: torch.device, depth: int, background: bool
) -> None:
    """deepseek-ai/DeepSpec#78, meta-pytorch/torchrec#4270: stale batch, or a hang."""
    iterator = iter(
        StreamPrefetchLoader(
            two_good_one_bad(), device=device, depth=depth, background=background
        )
    )
    _assert_fails_at_two(iterator, r"^bad file 2$", "two_good_one_bad")


@pytest.mark.parametrize("background", [False, True])
def test_d11_transform_error_comes_at_its_own_batch(
    device: torch.device, background: bool
) -> None:
    """deepseek-ai/DeepSpec#78: the same for a failing transform."""

    def fails_at_two(x: torch.Tensor) -> torch.Tensor:
        if int(x) == 2:
            raise ValueError("cannot augment 2")
        return x

    loader = StreamPrefetchLoader(
        count(5), fails_at_two, device=device, depth=4, background=background
    )
    _assert_fails_at_two(iter(loader), "cannot augment 2", "fails_at_two")


# Stopping early, cleaning up, starting again #


@pytest.mark.parametrize("background", [False, True])
def test_d12_a_broken_off_loop_leaves_nothing_for_the_next(
    device: torch.device, background: bool
) -> None:
    """NVIDIA/recsys-examples#314: evaluation batches became training batches."""
    loader = StreamPrefetchLoader(count(10), device=device, background=background)
    for _ in range(3):
        assert [int(x) for x in itertools.islice(loader, 3)] == [0, 1, 2]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_d12_a_one_shot_iterator_loses_at_most_depth_items(
    device: torch.device, depth: int, background: bool
) -> None:
    """NVIDIA/recsys-examples#314: what may be pulled beyond what was consumed."""
    source = iter(count(20))
    loader = StreamPrefetchLoader(
        source, device=device, depth=depth, background=background
    )
    assert [int(x) for x in itertools.islice(loader, 3)] == [0, 1, 2]
    loader.close()
    assert int(next(source)) <= 3 + depth


def test_d13_leaving_the_loop_ends_workers_and_threads(device: torch.device) -> None:
    """ultralytics/ultralytics#25827, pytorch/pytorch#9655: both lived on."""
    threads = threading.active_count()
    source = DataLoader(Numbers(100), batch_size=1, num_workers=2)
    assert len(list(itertools.islice(StreamPrefetchLoader(source, device=device), 1)))
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and (
        threading.active_count() > threads or multiprocessing.active_children()
    ):
        time.sleep(0.02)
    assert threading.active_count() == threads
    assert not multiprocessing.active_children()


@pytest.mark.gpu
def test_d13_leaving_the_loop_gives_device_memory_back() -> None:
    """ultralytics/ultralytics#25827: tens of GiB stayed for large images."""
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    source = [torch.zeros(1 << 22) for _ in range(10)]
    loader = StreamPrefetchLoader(source, device="cuda", depth=4)
    assert len(list(itertools.islice(loader, 1))) == 1
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_d13_a_script_that_breaks_and_ends_exits_cleanly(device: torch.device) -> None:
    """pytorch/pytorch#9655: it hung at exit."""
    run_script(
        """
        import sys
        from torch.utils.data import DataLoader
        from gpuprefetch import StreamPrefetchLoader
        from tests.sources import Numbers
        source = DataLoader(Numbers(100), batch_size=1, num_workers=2)
        for x in StreamPrefetchLoader(source, device=sys.argv[1]):
            break
        """,
        device.type,
        limit_s=25,
    )


@pytest.mark.parametrize(
    "pin_memory", [False, pytest.param(True, marks=pytest.mark.gpu)]
)
def test_d14_a_second_pass_over_persistent_workers(pin_memory: bool) -> None:
    """pytorch/pytorch#48370: the pinning thread crashed at the second ``iter``."""
    source = DataLoader(
        Numbers(8),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        pin_memory=pin_memory,
    )
    device = "cuda" if pin_memory else "cpu"
    loader = StreamPrefetchLoader(source, device=device)
    assert next(iter(loader)).tolist() == [0, 1]
    assert next(iter(loader)).tolist() == [0, 1]
    workers = {process.pid for process in multiprocessing.active_children()}
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert epochs == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3
    assert workers == {process.pid for process in multiprocessing.active_children()}
