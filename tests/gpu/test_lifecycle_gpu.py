"""Does a pass end cleanly on a GPU, however it ends, and disturb nothing beside it?"""

import copy
import gc
import multiprocessing
import pickle
import signal
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from gpuprefetch import StreamPrefetchLoader
from tests.children import start_script
from tests.gpu.support import (
    CUDA,
    Bank,
    allocated_bytes,
    count_differing,
    pause_device,
)
from tests.leaks import child_pids, leaked, wait_until_gone
from tests.sources import Images

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


def _to_float(images: torch.Tensor) -> torch.Tensor:
    return images.float()


def _image_loader(length: int = 64, **settings: object) -> DataLoader:
    return DataLoader(Images(length), batch_size=4, num_workers=2, **settings)


def _assert_images(images: torch.Tensor, labels: torch.Tensor, index: int) -> None:
    """Compare one batch of :func:`_image_loader` with the dataset itself."""
    dataset = Images(10_000)
    expected = torch.stack([dataset[4 * index + place][0] for place in range(4)])
    assert images.is_cuda
    assert labels.is_cuda
    assert torch.equal(images.cpu(), expected.to(images.dtype))
    assert labels.tolist() == [4 * index + place for place in range(4)]


# Leaving early #


def test_early_break_with_persistent_workers_and_pinning_twenty_times() -> None:
    source = _image_loader(persistent_workers=True, pin_memory=True)
    loader = StreamPrefetchLoader(source, transform=_to_float, device="cuda")
    workers: set[frozenset[int]] = set()
    for _ in range(20):
        for index, (images, labels) in enumerate(islice(loader, 2)):
            _assert_images(images, labels, index)
        workers.add(frozenset(child_pids()))
    assert len(workers) == 1, "workers were started anew"
    for index, (images, labels) in enumerate(loader):
        _assert_images(images, labels, index)
    assert index == 15
    loader.close()


@pytest.mark.parametrize("pin_memory", [False, True])
def test_early_break_with_fresh_workers_leaves_nothing(pin_memory: bool) -> None:
    baseline, running = allocated_bytes(), leaked()
    loader = StreamPrefetchLoader(
        _image_loader(pin_memory=pin_memory), transform=_to_float, device="cuda"
    )
    for _ in range(5):
        for images, labels in loader:
            _assert_images(images, labels, 0)
            break
        del images, labels
        assert wait_until_gone(2.0, known=running) == set()
        assert allocated_bytes() == baseline
    loader.close()


def test_consumer_error_in_mid_epoch_leaves_nothing() -> None:
    baseline, running = allocated_bytes(), leaked()
    loader = StreamPrefetchLoader(_image_loader(), device="cuda")

    def train() -> None:
        for index, _batch in enumerate(loader):
            pause_device()
            if index == 3:
                raise RuntimeError("loss is not finite")

    with pytest.raises(RuntimeError, match="loss is not finite"):
        train()
    gc.collect()
    assert wait_until_gone(2.0, known=running) == set()
    assert allocated_bytes() == baseline
    loader.close()


# Errors in the transform #


@pytest.mark.parametrize("background", [False, True])
def test_transform_error_comes_at_its_own_batch(background: bool) -> None:
    class Broken(Exception):
        pass

    def fail_at_five(image: torch.Tensor) -> torch.Tensor:
        if int(calls) == 5:
            raise Broken("image 5")
        calls.add_(1)
        pause_device()
        return image.clone()

    calls = torch.zeros((), dtype=torch.int64)
    bank = Bank(10, memory="pinned", side=256)
    baseline = allocated_bytes()
    loader = StreamPrefetchLoader(
        bank,
        transform=fail_at_five,
        inputs="image",
        device="cuda",
        background=background,
    )
    batches = iter(loader)
    for index in range(5):
        assert int(count_differing(next(batches), bank.expected(index))) == 0
    with pytest.raises(Broken, match="image 5"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert allocated_bytes() == baseline
    loader.close()


def test_loader_survives_a_device_out_of_memory_in_the_transform() -> None:
    is_greedy = True

    def allocate(image: torch.Tensor) -> torch.Tensor:
        if is_greedy:
            torch.empty(1 << 50, dtype=torch.uint8, device=image.device)
        return image.clone()

    bank = Bank(6, memory="pageable", side=256)
    loader = StreamPrefetchLoader(
        bank, transform=allocate, inputs="image", device="cuda"
    )
    with pytest.raises(torch.OutOfMemoryError):
        next(iter(loader))
    is_greedy = False
    for index, batch in enumerate(loader):
        assert int(count_differing(batch, bank.expected(index))) == 0
    assert index == 5
    loader.close()


# Processes #


def _collect_garbage() -> None:
    gc.collect()


def test_workers_can_be_forked_while_another_pass_is_open() -> None:
    """Validation in mid-epoch: CUDA is in use, a feeder runs, and workers fork."""
    bank = Bank(20, memory="pageable", side=256)
    training = StreamPrefetchLoader(
        bank, transform=torch.clone, inputs="image", device="cuda", background=True
    )
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for index, batch in enumerate(training):
        wrong += count_differing(batch, bank.expected(index))
        if index in (2, 9):
            validation = StreamPrefetchLoader(
                _image_loader(16, multiprocessing_context="fork", pin_memory=True),
                transform=_to_float,
                device="cuda",
            )
            for place, (images, labels) in enumerate(validation):
                _assert_images(images, labels, place)
            assert place == 3
            validation.close()
    assert int(wrong) == 0
    assert index == 19
    training.close()


def test_forked_child_ends_by_itself_while_a_pass_is_open() -> None:
    bank = Bank(20, memory="pageable", side=256)
    loader = StreamPrefetchLoader(bank, device="cuda", background=True)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for index, batch in enumerate(loader):
        wrong += count_differing(batch, bank.expected(index))
        if index == 3:
            child = multiprocessing.get_context("fork").Process(target=_collect_garbage)
            child.start()
            child.join(timeout=10)
            assert child.exitcode == 0
    assert int(wrong) == 0
    assert index == 19
    loader.close()


_TRAINING = """
    import sys
    import time

    import torch
    from torch.utils.data import DataLoader

    from gpuprefetch import StreamPrefetchLoader
    from tests.leaks import wait_until_gone
    from tests.sources import Images

    loader = StreamPrefetchLoader(
        DataLoader(Images(100_000), batch_size=4, num_workers=2, pin_memory=True),
        transform=lambda images: images.float(),
        device="cuda",
    )

    def train():
        for index, (images, labels) in enumerate(loader):
            total = images.sum()
            if index == 10:
                print("training", flush=True)
            if index >= 10:
                time.sleep(0.002)
"""

_INTERRUPTED = {
    "caught": """
    try:
        train()
    except KeyboardInterrupt:
        pass
    # Ctrl-C ends the workers too. A thread that waits for a batch of theirs learns of
    # it when DataLoader next looks after them: every 5 seconds.
    print("left:", wait_until_gone(7.0), flush=True)
    """,
    "uncaught": """
    train()
    """,
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", _INTERRUPTED)
def test_ctrl_c_in_mid_epoch_ends_everything(how: str) -> None:
    with start_script(_TRAINING + _INTERRUPTED[how]) as child:
        if child.read_line() != "training":
            raise AssertionError(child.finish(limit_s=10))
        child.signal_all(signal.SIGINT)
        status, out, err = child.finish(limit_s=15)
        assert not child.signal_all(signal.SIGKILL), "a worker outlived the script"
    if how == "caught":
        assert out.strip() == "left: set()", err
        assert status == 0, err
    else:
        assert status in (-signal.SIGINT, 128 + signal.SIGINT), err
        assert "KeyboardInterrupt" in err
    assert "Fatal Python error" not in err
    assert "terminate called" not in err


_ENDINGS = {
    "open iterator": """
    batches = iter(loader)
    for _ in range(5):
        batch = next(batches)
    """,
    "sys.exit in the loop": """
    for index, batch in enumerate(loader):
        if index == 5:
            sys.exit(0)
    """,
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", _ENDINGS)
def test_interpreter_can_exit_in_mid_epoch(how: str) -> None:
    with start_script(_TRAINING + _ENDINGS[how]) as child:
        status, _, err = child.finish(limit_s=40)
        assert not child.signal_all(signal.SIGKILL), "a worker outlived the script"
    assert status == 0, err
    for complaint in ("Traceback", "Exception ignored", "Fatal", "terminate called"):
        assert complaint not in err, err


# Copies of the loader, several loaders #


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_starts_anew_and_leaves_the_original_alone(how: str) -> None:
    source = [torch.full((1000,), index).pin_memory() for index in range(8)]
    loader = StreamPrefetchLoader(source, transform=_to_float, device="cuda")
    size_before = len(pickle.dumps(loader))
    batches = iter(loader)
    firsts = [next(batches), next(batches)]
    if how == "deepcopy":
        twin = copy.deepcopy(loader)
    else:
        twin = pickle.loads(pickle.dumps(loader))
    assert [int(batch[0]) for batch in twin] == list(range(8))
    assert [int(batch[0]) for batch in firsts] == [0, 1]
    assert [int(batch[0]) for batch in batches] == list(range(2, 8))
    assert len(pickle.dumps(loader)) <= size_before + 200
    loader.close()
    twin.close()


def _checked(loader: StreamPrefetchLoader, bank: Bank, turn: int) -> Iterator[int]:
    """Read one pass with pauses and count the wrong batches, on the device."""
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for index, batch in enumerate(loader):
        if index % 3 == turn:
            pause_device()
        wrong += count_differing(batch, bank.expected(index))
        del batch
        yield index
    assert int(wrong) == 0


def _late_clone(image: torch.Tensor) -> torch.Tensor:
    pause_device(500_000)
    return image.clone()


@pytest.mark.parametrize("is_same_loader", [False, True])
def test_two_passes_that_alternate_do_not_mix(is_same_loader: bool) -> None:
    banks = [Bank(100, memory="pinned"), Bank(100, memory="pageable", side=1000)]
    loaders = [
        StreamPrefetchLoader(bank, transform=_late_clone, inputs="image", device="cuda")
        for bank in banks
    ]
    if is_same_loader:
        banks[1], loaders[1] = banks[0], loaders[0]
    passes = [
        _checked(loader, bank, turn)
        for turn, (loader, bank) in enumerate(zip(loaders, banks, strict=True))
    ]
    assert sum(first == second for first, second in zip(*passes, strict=True)) == 100
    for loader in loaders:
        loader.close()


@two_gpus
def test_named_second_gpu_gets_everything_and_the_first_nothing() -> None:
    torch.cuda.synchronize(0)
    allocated_before = torch.cuda.memory_allocated(0)
    source = [torch.full((1 << 16,), index).pin_memory() for index in range(20)]
    loader = StreamPrefetchLoader(source, transform=_to_float, device="cuda:1")
    for index, batch in enumerate(loader):
        assert batch.device == torch.device("cuda", 1)
        assert bool((batch == index).all())
        assert torch.cuda.current_device() == 0
    assert index == 19
    assert torch.cuda.memory_allocated(0) == allocated_before
    loader.close()
