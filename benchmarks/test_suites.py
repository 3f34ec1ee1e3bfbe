"""How long do the same steps take over some variants of each workload?

    pytest benchmarks --benchmark-only

On any device; on a CPU in sizes in which nothing but the code's own cost shows. One
round is a few steps of a loop in its steady state, with the device synchronized at its
end. Compare within a group only. The full comparison is ``make bench``.
"""

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measure import synchronize
from benchmarks.suite import Group, Place
from benchmarks.suites import (
    in_memory,
    seed_classification,
    seed_encoder_decoder,
    shared,
    transform,
)

pytestmark = [
    pytest.mark.timeout(300),
    # Python 3.12 warns at every fork of a process with threads, as CUDA's are.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

_DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device(
    "cpu"
)
_IS_TINY = _DEVICE.type == "cpu"
_STEPS = 5 if _IS_TINY else 20
_WARMUP = 2 if _IS_TINY else 20
_ROUNDS = 5

_GROUPS = {
    suite.SUITE.name: suite.groups
    for suite in (seed_classification, seed_encoder_decoder, in_memory, transform)
}
_COMPARED = [
    ("seed-classification", seed_classification.BOUND),
    ("seed-classification", seed_classification.IN_WORKERS),
    ("seed-classification", shared.SEED_PIPELINED),
    ("seed-classification", shared.CHAINED),
    ("seed-encoder-decoder", seed_encoder_decoder.SERIAL),
    ("seed-encoder-decoder", seed_encoder_decoder.PIPELINED),
    ("seed-encoder-decoder", seed_encoder_decoder.GRAPHED),
    ("in-memory", in_memory.PLAIN),
    ("in-memory", in_memory.OURS_COPY),
    ("in-memory", shared.KORNIA),
    ("in-memory", shared.CHAINED),
    ("transform", transform.KORNIA),
    ("transform", shared.CHAINED),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Keep tiny tensors off the thread pool, which costs more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if _IS_TINY else before)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def groups() -> dict[str, Group]:
    """The first group of each suite, made when it is first asked for."""
    return {}


def _first_group(groups: dict[str, Group], suite: str) -> Group:
    if suite not in groups:
        groups[suite] = next(_GROUPS[suite](Place(_DEVICE, is_tiny=_IS_TINY)))
    return groups[suite]


@pytest.mark.parametrize(("suite", "variant"), _COMPARED)
def test_variant(
    benchmark: BenchmarkFixture, groups: dict[str, Group], suite: str, variant: str
) -> None:
    group = _first_group(groups, suite)
    benchmark.group = suite
    benchmark.extra_info |= {
        "device": torch.cuda.get_device_name() if _DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "batch_size": group.batch_size,
        "steps": _STEPS,
    }
    loop = group.variants[variant](group.step)

    def advance() -> int:
        for _ in range(_STEPS):
            loop.advance()
        synchronize(_DEVICE)
        return _STEPS

    try:
        for _ in range(_WARMUP):
            loop.advance()
        assert benchmark.pedantic(advance, rounds=_ROUNDS, warmup_rounds=1) == _STEPS
    finally:
        loop.close()
