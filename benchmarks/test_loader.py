"""How long do the same training steps take over the plain loader, and over ours?

    make bench            (= pytest benchmarks --benchmark-only --benchmark-enable)

One round is a pass of ``_NUM_BATCHES`` training steps, start of the pass and end of its
workers included, with the device synchronized at its end. Compare within a group only.
On a CPU there is nothing to overlap: expect ours to be a little slower there.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import pipelines
from benchmarks.loops import Step
from benchmarks.measure import synchronize
from benchmarks.pipelines import Pair, Transform
from gpuprefetch import workloads

pytestmark = [
    pytest.mark.timeout(300),
    # Python 3.12 warns at every fork of a process with threads, as CUDA's are.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

_DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device(
    "cpu"
)
_IS_SMALL = _DEVICE.type == "cpu"
_IMAGE_SIZE, _BATCH_SIZE, _NUM_BATCHES = (32, 4, 20) if _IS_SMALL else (256, 32, 50)
_NUM_WORKERS = 2 if _IS_SMALL else 8
_ROUNDS = 5

Pipeline = Callable[[Iterable[Pair], torch.device, Transform], Iterator[Pair]]

_PIPELINES: dict[str, Pipeline] = {
    "plain": pipelines.plain,
    "ours": pipelines.stream_prefetch,
}


@pytest.fixture(scope="module")
def step() -> Step:
    """A step that does the work of training and changes no weight."""
    model = workloads.build_model(_IMAGE_SIZE, pipelines.NUM_CLASSES).to(_DEVICE)
    return workloads.TrainingStep(model.train(), learning_rate=0.0)


def _train(batches: Iterator[Pair], step: Step) -> int:
    num_steps = 0
    for images, labels in batches:
        step(images, labels)
        num_steps += 1
        if num_steps == _NUM_BATCHES:
            break
    batches.close()  # type: ignore[attr-defined]
    synchronize(_DEVICE)
    return num_steps


def _compare(
    benchmark: BenchmarkFixture,
    step: Step,
    start: Callable[[], Iterator[Pair]],
) -> None:
    benchmark.extra_info |= {
        "device": torch.cuda.get_device_name() if not _IS_SMALL else "cpu",
        "torch": torch.__version__,
        "batches": _NUM_BATCHES,
        "batch_size": _BATCH_SIZE,
        "image_size": _IMAGE_SIZE,
    }
    num_steps = benchmark.pedantic(
        lambda: _train(start(), step), rounds=_ROUNDS, warmup_rounds=1
    )
    assert num_steps == _NUM_BATCHES


@pytest.mark.benchmark(group="batches in memory, copy + float")
@pytest.mark.parametrize("name", _PIPELINES)
def test_copy_and_float(benchmark: BenchmarkFixture, step: Step, name: str) -> None:
    source = pipelines.InMemory(_BATCH_SIZE, _IMAGE_SIZE, pin=True)
    to_float = pipelines.to_float
    _compare(benchmark, step, lambda: _PIPELINES[name](source, _DEVICE, to_float))


@pytest.mark.benchmark(group="batches in memory, Kornia chain")
@pytest.mark.parametrize("name", _PIPELINES)
def test_kornia_chain(benchmark: BenchmarkFixture, step: Step, name: str) -> None:
    source = pipelines.InMemory(_BATCH_SIZE, _IMAGE_SIZE, pin=True)
    chain = workloads.kornia_chain(_IMAGE_SIZE)
    if name == "plain":

        def transform(images: torch.Tensor) -> torch.Tensor:
            augmented: torch.Tensor = chain(workloads.to_unit_float(images))
            return augmented

    else:
        transform = chain
    _compare(benchmark, step, lambda: _PIPELINES[name](source, _DEVICE, transform))


@pytest.mark.benchmark(group=f"DataLoader with {_NUM_WORKERS} workers, unpinned")
@pytest.mark.parametrize("name", _PIPELINES)
def test_data_loader_with_workers(
    benchmark: BenchmarkFixture, step: Step, name: str
) -> None:
    source = pipelines.data_loader(
        _BATCH_SIZE, _IMAGE_SIZE, num_workers=_NUM_WORKERS, pin=False
    )
    to_float = pipelines.to_float
    _compare(benchmark, step, lambda: _PIPELINES[name](source, _DEVICE, to_float))
