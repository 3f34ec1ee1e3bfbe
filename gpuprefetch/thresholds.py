"""Where is the line between what matters to a loop and what does not, and why?"""

__all__ = [
    "CROWDED",
    "CROWDED_MS",
    "FEWEST_BATCHES",
    "HEAVY_SOURCE_MS",
    "HEAVY_SOURCE_SHARE",
    "NOTHING_TO_GAIN",
    "RUN_DRY",
    "SMALL_BATCH_SHARE",
    "TOO_WIDE",
]

CROWDED = 2.0
"""A loop on a CPU that takes this many times as long as its parts take one after the
other: they hinder each other. Two runs differ by far less."""

CROWDED_MS = 1.0
"""A loop must take this much longer than its parts to be called crowded: handling a
batch is in no part, and takes an ordinary loader 0.1 ms."""

FEWEST_BATCHES = 8
"""Below this there is no verdict: the first steps choose kernels and fill caches."""

NOTHING_TO_GAIN = 0.05
"""Share of a step. Two runs of one training loop differ by a few percent; whoever
changes a setting to gain less than that cannot see whether it helped."""

RUN_DRY = 0.9
"""Share of ``next`` calls that found the device without work. A loop that is ahead of
its device is seen near 0, one that reads a result at each step near 1; what lies
between changes from step to step, and is no clear sign."""

HEAVY_SOURCE_MS = 2.0
"""A source that takes less for a batch is not worth a worker: handing a batch from one
process to another takes about a millisecond."""

HEAVY_SOURCE_SHARE = 0.2
"""Share of a step in which the loop itself makes its batch; with less, a worker process
that takes a core from the loop may cost what it gains."""

SMALL_BATCH_SHARE = 0.1
"""Share of a step that handling a batch takes. An ordinary loader takes 0.1 ms a batch;
above this share, the steps are shorter than a millisecond."""

TOO_WIDE = 0.1
"""An interval of a gain that reaches farther than this from 1 leaves room for a loss or
a gain that matters: the runs differ too much to tell. Twice the few percent by which
two runs differ on a quiet machine, since an interval spans all rounds."""
