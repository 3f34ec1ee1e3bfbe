"""Does a loader in a fresh process go on exactly, whatever the source?

The public checker saves at every step and resumes each state; here it runs over the
sources that decide their order in different ways. ``test_state`` holds the settings of
the loader itself, and what is refused.
"""

from functools import partial
from typing import Any

import pytest

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

IN_A_FRESH_PROCESS: dict[str, dict[str, Any]] = {
    "shuffled, threaded": {"depth": 4, "background": True, "kornia": True},
    "workers that draw": {"dataset": DrawsItself, "num_workers": 2},
    "persistent workers": {
        "num_workers": 2,
        "persistent_workers": True,
        "own_generator": True,
        "epochs": 3,
    },
    "a data set with generators": {"dataset": HoldsGenerators, "own_generator": True},
    "ranks": {"sampler": "distributed", "before_epoch": set_epoch, "num_workers": 1},
    "torchdata": {"stateful": True, "num_workers": 2, "kornia": True, "depth": 3},
}

QUICKLY: dict[str, dict[str, Any]] = IN_A_FRESH_PROCESS | {
    "two workers": {"num_workers": 2, "depth": 4, "seed": 3},
    "persistent workers, shared generator": {
        "num_workers": 1,
        "persistent_workers": True,
        "epochs": 3,
    },
    "workers and a generator": {"own_generator": True, "num_workers": 1},
    "indices only": {"num_workers": 1, "replay": False, "seed": 3},
    "a sampler with a generator": {"sampler": "subset"},
    "the same with workers": {"sampler": "subset", "num_workers": 1},
    "a sampler that draws at once": {"sampler": "eager"},
    "the same, loaded again": {"sampler": "eager", "num_workers": 1},
    "ranks without set_epoch": {"sampler": "distributed"},
    "a stream read again": {"dataset": Stream, "replay": True, "seed": 3},
    "torchdata inline": {"stateful": True, "seed": 3},
    "torchdata over a stateful stream": {"stateful": True, "dataset": StatefulStream},
    "torchdata, stream and workers": {
        "stateful": True,
        "dataset": StatefulStream,
        "num_workers": 2,
        "depth": 4,
    },
    "torchdata, persistent workers": {
        "stateful": True,
        "num_workers": 1,
        "persistent_workers": True,
    },
}


def check(
    *, epochs: int = 2, before_epoch: Any = None, fresh: bool = False, **pipeline: Any
) -> None:
    assert_resumes_at_every_step(
        partial(make, **pipeline),
        epochs=epochs,
        before_epoch=before_epoch,
        fresh_process=fresh,
    )


@pytest.mark.parametrize("name", IN_A_FRESH_PROCESS)
def test_it_goes_on_in_a_fresh_process(name: str) -> None:
    check(**IN_A_FRESH_PROCESS[name], fresh=True)


@pytest.mark.parametrize("name", QUICKLY)
def test_it_goes_on(name: str) -> None:
    check(**QUICKLY[name])
