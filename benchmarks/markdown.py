"""How does a record look as a table in Markdown?

Suites put their tables together from these. A cell without a figure stays empty:
nothing is filled in that was not measured.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record import Case, Ratio, Record

__all__ = [
    "SCALING",
    "costs_table",
    "figures_table",
    "machine_line",
    "names_of",
    "ranks_table",
    "ratios_table",
    "speed_cell",
    "speeds_table",
    "table",
]

Cell = Callable[[Case], str]

SCALING = "scaling, 2 GPUs over 2 x 1: "
"""Begin of the names of ``ddp``'s figures that compare a rank of two with one alone."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine_line(record: Record) -> str:
    """Say in one line where and of what a record was measured."""
    machine = record.machine
    commit = str(machine.get("commit") or machine.get("package_sha256"))[:10]
    return (
        f"{machine.get('gpu') or 'CPU'}, driver {machine.get('driver')}, "
        f"{machine.get('num_cpus')} CPU cores, torch {machine.get('torch')}, "
        f"commit {commit}, {str(machine.get('date'))[:10]}."
    )


def names_of(record: Record, group: str | None = None) -> list[str]:
    """Names of the variants, in the order in which they were measured."""
    cases = (case for case in record.cases if group in (None, case.group))
    return list(dict.fromkeys(case.name for case in cases))


def speed_cell(case: Case) -> str:
    """Give steps/s and the fraction of the bound."""
    speed = (
        f"{case.steps_per_s:.1f}"
        if case.steps_per_s < 1000
        else f"{case.steps_per_s:.0f}"
    )
    return speed if case.of_bound is None else f"{speed} ({case.of_bound:.1%})"


def speeds_table(
    record: Record,
    group: str,
    *,
    labels: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    cell: Cell = speed_cell,
) -> str:
    """Variants as rows, batch sizes as columns.

    Args:
        record: Of any suite.
        group: Whose cases.
        labels: What a row is called, where not by the variant's name.
        names: Which variants; all of them if empty.
        cell: What is shown of a case.
    """
    sizes = sorted({case.batch_size for case in record.cases if case.group == group})
    rows = []
    for name in names or names_of(record, group):
        found = [record.case(name, group=group, batch_size=size) for size in sizes]
        if any(found):
            label = (labels or {}).get(name, name)
            rows.append(
                [label, *("" if case is None else cell(case) for case in found)]
            )
    return table(["variant", *(f"B={size}" for size in sizes)], rows)


def costs_table(record: Record, group: str, batch_size: int) -> str:
    """What the pipeline of each variant costs per batch, at one batch size."""
    head = ["variant", "host ms", "GPU ms", "launches", "host waits"]
    head += ["device MB", "pinned MB"]
    rows = []
    for name in names_of(record, group):
        case = record.case(name, group=group, batch_size=batch_size)
        if case is not None and case.host_ms is not None:
            numbers = [
                _number(case.host_ms, 2),
                _number(case.gpu_ms, 3),
                _number(case.launches, 0),
                _number(case.host_syncs, 0),
                _megabytes(case.peak_device_bytes),
                _megabytes(case.pinned_bytes),
            ]
            rows.append([name, *numbers])
    return table(head, rows)


def ratios_table(records: Iterable[Record], *, only_promised: bool = True) -> str:
    """Ratios with their targets."""
    rows = [
        _ratio_row(record, ratio)
        for record in records
        for ratio in record.ratios
        if ratio.at_least is not None or not only_promised
    ]
    head = ["suite", "figure", "B", "measured", "quartiles", "at least", "aim", ""]
    lines = table(head, rows)
    return lines.replace("| --- | ---: |", "| --- | --- |", 1)


def figures_table(figures: Iterable[Mapping[str, Any]]) -> str:
    """The figures of a benchmark of promises that have a target."""
    rows = []
    for one in figures:
        if one["passed"] is None:
            continue
        least, most = one["at_least"], one["at_most"]
        target = f"at least {least:g}" if least is not None else f"at most {most:g}"
        digits = 4 if one["unit"] == "x" else 3  # A ratio may miss by a thousandth.
        value = f"{one['value']:.{digits}g} {one['unit']}".strip()
        rows.append([one["name"], value, target, "ok" if one["passed"] else "missed"])
    return table(["figure", "measured", "target", ""], rows)


def ranks_table(figures: Iterable[Mapping[str, Any]]) -> str:
    """The speeds of ``ddp``: of a rank alone, of one of two, and how they compare."""
    values = {one["name"]: one["value"] for one in figures}

    def speed(title: str, name: str) -> str:
        share = values.get(f"{title}: {name}, of bound", 1.0)
        return f"{values[f'{title}: {name}']:.1f} ({share:.1%})"

    rows = []
    for title in values:
        if title.startswith(SCALING):
            name, scaling = title.removeprefix(SCALING), f"{values[title]:.1%}"
            rows.append([name, speed("1 GPU", name), speed("2 GPUs", name), scaling])
    if not rows:
        raise ValueError(f"no figure begins with {SCALING!r}")
    head = ["steps/s of a rank (of the bound)", "1 GPU", "2 GPUs", "scaling"]
    return table(head, rows)


def _ratio_row(record: Record, ratio: Ratio) -> list[str]:
    name = f"{ratio.name}, {ratio.group}" if ratio.group else ratio.name
    low, high = ratio.quartiles
    verdict = {None: "", True: "ok", False: "missed"}[ratio.passed]
    return [
        record.suite,
        name,
        str(ratio.batch_size),
        f"{ratio.value:.3g}",
        f"{low:.3g} to {high:.3g}",
        _number(ratio.at_least, 2),
        _number(ratio.aim, 2),
        verdict,
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.0f}"
