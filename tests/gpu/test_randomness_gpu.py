"""Do the same draws give the same pixels on a GPU, in every way of running a loader?

The matrix of ``tests/test_randomness.py``, with pinned sources and with the device's
generator.
"""

from functools import cache
from typing import Any

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.testing import assert_resumes_at_every_step
from tests.gpu.support import CUDA
from tests.randomness import (
    KINDS,
    PINNED_WAYS,
    REFERENCE,
    WAYS,
    Way,
    assert_same_pixels,
    run,
    source,
    states_along,
)


@cache
def expected(kind: str) -> Any:
    return run(kind, CUDA, REFERENCE, seed=11)


@pytest.mark.parametrize("way", [*WAYS, *PINNED_WAYS], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_the_same_in_every_way(kind: str, way: Way) -> None:
    assert_same_pixels(expected(kind), run(kind, CUDA, way, seed=11))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_generators_are_those_of_the_plain_loop_at_every_step(
    kind: str, num_workers: int
) -> None:
    plain = states_along(lambda source: source, CUDA, num_workers)
    wrapped = states_along(
        lambda source: StreamPrefetchLoader(
            source, KINDS[kind](), device=CUDA, background=bool(num_workers), depth=4
        ),
        CUDA,
        num_workers,
    )
    assert plain == wrapped


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_at_every_step(kind: str) -> None:
    assert_resumes_at_every_step(
        lambda: StreamPrefetchLoader(source(), KINDS[kind](), device=CUDA, depth=4),
        fresh_process=False,
    )


@pytest.mark.timeout(120)
def test_it_resumes_in_a_fresh_process() -> None:
    assert_resumes_at_every_step(make_fused)


def make_fused() -> StreamPrefetchLoader[torch.Tensor]:
    return StreamPrefetchLoader(
        source(is_pinned=True), KINDS["fused"](), device=CUDA, seed=1
    )
