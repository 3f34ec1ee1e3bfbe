"""Which suites are there? In the order in which they run."""

from benchmarks.suite import Suite
from benchmarks.suites import (
    in_memory,
    overlap,
    scale,
    seed_classification,
    seed_encoder_decoder,
    transform,
)

__all__ = ["SUITES"]

SUITES: tuple[Suite, ...] = (
    seed_classification.SUITE,
    seed_encoder_decoder.SUITE,
    in_memory.SUITE,
    transform.SUITE,
    overlap.SUITE,
    scale.SUITE,
)
