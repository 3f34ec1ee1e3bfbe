"""Does a loader give the same pixels in every way of running it, and draw nothing else?

One matrix of kinds of transforms and ways to run them; ``tests/gpu`` runs it on a GPU.
"""

from functools import cache
from typing import Any

import pytest
import torch

from gpuprefetch import StreamPrefetchLoader
from tests.randomness import (
    KINDS,
    REFERENCE,
    WAYS,
    Way,
    assert_same_pixels,
    from_numpy,
    run,
    states_along,
)

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


@cache
def expected(kind: str, seed: int | None) -> Any:
    """Run a loader with nothing ahead, nothing beside, and nothing drawn in between."""
    return run(kind, CPU, REFERENCE, seed=seed)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_the_same_in_every_way(kind: str, way: Way) -> None:
    assert_same_pixels(expected(kind, 11), run(kind, CPU, way, seed=11))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_they_follow_torchs_generator_alone(kind: str) -> None:
    way = Way(4, True, has_another_beside=True)
    assert_same_pixels(expected(kind, None), run(kind, CPU, way, seed=None))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_generators_are_those_of_the_plain_loop_at_every_step(
    kind: str, num_workers: int
) -> None:
    """Also after a break, with batches in flight that were augmented already."""
    plain = states_along(lambda source: source, CPU, num_workers)
    wrapped = states_along(
        lambda source: StreamPrefetchLoader(
            source, KINDS[kind](), device=CPU, background=bool(num_workers), depth=4
        ),
        CPU,
        num_workers,
    )
    assert len(plain) == 3 + 1 + 6 + 1
    assert plain == wrapped


def test_meta_a_transform_beyond_the_loaders_control_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NumPy's generator is not set by the loader."""
    monkeypatch.setitem(KINDS, "NumPy", lambda: from_numpy)
    with pytest.raises(AssertionError, match="batch 0 of epoch 0"):
        assert_same_pixels(
            run("NumPy", CPU, REFERENCE, seed=1), run("NumPy", CPU, WAYS[0], seed=1)
        )
    plain = states_along(lambda source: source, CPU, 0)
    assert plain != states_along(
        lambda source: StreamPrefetchLoader(source, from_numpy, device=CPU), CPU, 0
    )
