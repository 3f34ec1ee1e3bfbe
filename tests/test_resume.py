"""Does a loader in a fresh process go on exactly, whatever the source?

The public checker saves at every step and resumes each state; here it runs over the
sources that decide their order in different ways. ``test_state`` holds the settings of
the loader itself, and what is refused.
"""

from functools import partial
from typing import Any

import pytest
import torch

from gpuprefetch.testing import assert_resumes_at_every_step
from tests.pipelines import (
    CountsLoads,
    DrawsItself,
    HoldsGenerators,
    StatefulStream,
    Stream,
    make,
    make_faulty,
    set_epoch,
)

pytestmark = [
    pytest.mark.timeout(150),
    # torchdata 0.11 calls a function that torch has deprecated since.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

PIPELINES: dict[str, dict[str, Any]] = {
    "shuffled, threaded": {"depth": 4, "background": True, "kornia": True},
    "two workers": {"num_workers": 2, "depth": 4},
    "workers that draw": {"dataset": DrawsItself, "num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True, "seed": 3},
    "a generator of its own": {"own_generator": True, "seed": 3},
    "a sampler with a generator": {"sampler": "subset", "num_workers": 1},
    "a sampler that draws at once": {"sampler": "eager"},
    "the same with workers": {"sampler": "eager", "num_workers": 1},
    "a data set with generators": {"dataset": HoldsGenerators},
    "a stream read again": {"dataset": Stream, "replay": True, "seed": 3},
    "torchdata": {"stateful": True, "seed": 3},
    "torchdata with workers": {"stateful": True, "num_workers": 2, "kornia": True},
    "torchdata over a stateful stream": {"stateful": True, "dataset": StatefulStream},
}


@pytest.mark.parametrize("name", PIPELINES)
def test_it_goes_on_in_a_fresh_process(name: str) -> None:
    assert_resumes_at_every_step(partial(make, **PIPELINES[name]))
