"""Which pictures show the results? They are drawn by ``gpuprefetch.plot``.

A suite says what is drawn of its record; here is what suites share.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.record import Record
from benchmarks.suite import Suite
from gpuprefetch.plot import save_bars

__all__ = ["IMAGES", "draw_all", "draw_speeds"]

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def draw_speeds(
    record: Record,
    path: Path,
    *,
    group: str,
    names: Sequence[str],
    heading: str,
    of_bound: bool = False,
) -> None:
    """Draw variants as bars, one cluster for each batch size.

    Args:
        record: Whose cases.
        path: Of the picture.
        group: Of the cases.
        names: Variants, in order; those without a figure are left out.
        heading: Above the picture.
        of_bound: Show fractions of the bound in percent, instead of steps/s.
    """
    sizes = sorted({case.batch_size for case in record.cases if case.group == group})
    bars: dict[str, list[float | None]] = {}
    for name in names:
        cases = [record.case(name, group=group, batch_size=size) for size in sizes]
        if of_bound:
            heights = [
                None if case is None or case.of_bound is None else 100 * case.of_bound
                for case in cases
            ]
        else:
            heights = [None if case is None else case.steps_per_s for case in cases]
        if any(height is not None for height in heights):
            bars[name] = heights
    save_bars(
        bars,
        [f"B={size}" for size in sizes],
        path,
        unit="% of the bound" if of_bound else "steps/s",
        heading=heading,
        highlighted=[name for name in bars if name.startswith("ours")],
    )


def draw_all(
    records: Mapping[str, Record], suites: Iterable[Suite], folder: Path
) -> None:
    """Draw the pictures of all suites that have a record.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for suite in suites:
        if suite.plots is not None and suite.name in records:
            suite.plots(records[suite.name], folder)
