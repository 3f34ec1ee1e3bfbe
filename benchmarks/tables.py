"""Do the pages show what was measured? ``python -m benchmarks.tables`` makes them.

Reads ``results/*.json`` and rewrites, in the README of this folder and in the
project's, what stands between markers::

    <!-- table: in-memory -->
    ...
    <!-- /table -->

A marker names a table of some suite, its notes (``in-memory-notes``), its picture
(``in-memory-picture``), the figures of an older benchmark (``figures-must_reach``), or
all ``promises``. Needs no GPU. With ``--plots`` the pictures in ``docs/images`` are
drawn first.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.markdown import (
    figures_table,
    machine_line,
    ranks_table,
    ratios_table,
)
from benchmarks.plots import IMAGES, draw_all
from benchmarks.record import Record, read_record
from benchmarks.suite import Suite
from benchmarks.suites import SUITES
from gpuprefetch.errors import DependencyError

__all__ = [
    "PAGES",
    "RESULTS",
    "fill",
    "newest_records",
    "render_all",
    "render_figures",
    "update_pages",
]

_HERE = Path(__file__).resolve().parent
RESULTS = _HERE / "results"
PAGES = (_HERE / "README.md", _HERE.parent / "README.md")

_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
_NOT_YET = "*Not measured yet: `make bench` on a machine with a GPU.*"


def newest_records(
    folder: Path = RESULTS, suites: Iterable[Suite] = SUITES
) -> dict[str, Record]:
    """Read the newest record of each suite; sizes that mean nothing are left out.

    Raises:
        ValueError: A file is no record.
    """
    newest: dict[str, Record] = {}
    for suite in suites:
        for path in sorted(folder.glob(f"{suite.name}--*.json")):
            record = read_record(path)
            held = newest.get(suite.name)
            if not record.is_tiny and (held is None or _date(held) < _date(record)):
                newest[suite.name] = record
    return newest


def _date(record: Record) -> str:
    return str(record.machine.get("date"))


def render_all(
    records: Mapping[str, Record], suites: Iterable[Suite] = SUITES
) -> dict[str, str]:
    """Make all tables, by the name of their marker."""
    rendered: dict[str, str] = {}
    for suite in suites:
        record = records.get(suite.name)
        if record is None or suite.tables is None:
            continue
        rendered |= suite.tables(record)
        rendered[f"{suite.name}-notes"] = _notes(record)
        if (IMAGES / f"{suite.name}.png").exists():
            path = f"docs/images/{suite.name}.png"
            rendered[f"{suite.name}-picture"] = f"![{suite.title}]({path})"
    if records:
        rendered["promises"] = ratios_table(records.values())
    return rendered


def render_figures(folder: Path = RESULTS) -> dict[str, str]:
    """Make the tables of the benchmarks that are no suites: promises, and figures."""
    rendered = {}
    for name in ("must_reach", "fused", "stats_cost", "ddp"):
        for path in sorted(folder.glob(f"{name}--*.json")):
            report = json.loads(path.read_text())
            rendered[f"figures-{name}"] = figures_table(report["figures"])
            if name == "ddp":
                rendered["speeds-ddp"] = ranks_table(report["figures"])
    return rendered


def _notes(record: Record) -> str:
    lines = [f"{machine_line(record)} {record.seconds:.0f} s."]
    lines += [f"- Not measured: {one.name}: {one.reason}" for one in record.omitted]
    return "\n".join(lines)


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Put tables between their markers; a marker without a table says so."""
    return _MARKED.sub(
        lambda found: f"{found[1]}\n{tables.get(found[2], _NOT_YET)}\n\n{found[4]}",
        page,
    )


def update_pages(pages: Iterable[Path] = PAGES, results: Path = RESULTS) -> list[Path]:
    """Rewrite the pages from the results.

    Returns:
        Those that changed.
    """
    tables = render_all(newest_records(results)) | render_figures(results)
    changed = []
    for page in pages:
        before = page.read_text()
        after = fill(before, tables)
        if after != before:
            page.write_text(after)
            changed.append(page)
    return changed


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.tables", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read")
    parser.add_argument("--plots", action="store_true", help="draw the pictures, too")
    options = parser.parse_args(arguments)
    if options.plots:
        try:
            draw_all(newest_records(options.results), SUITES, IMAGES)
        except DependencyError as error:
            print(f"no pictures: {error}")
    for page in update_pages(results=options.results):
        print(f"{page.relative_to(_HERE.parent)}: tables renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
