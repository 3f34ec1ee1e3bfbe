"""How does the user see that work goes on?

tqdm draws the bar where it is installed, else a plain one of ours. Both write to
standard error, so that a table on standard output can be piped. If that is no terminal,
nothing is drawn: a bar in a file or a log is a heap of frames.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

__all__ = ["Bar", "progress_bar"]

_SECONDS_BETWEEN_DRAWINGS = 0.1
_PLAIN_BAR_WIDTH = 30


class Bar(Protocol):
    """A bar that can be moved on."""

    def update(self, n: int = 1, /) -> object:
        """Say that ``n`` more units are done."""


@contextmanager
def progress_bar(label: str, total: int, unit: str) -> Iterator[Bar]:
    """Show a bar from 0 to ``total`` while the block runs, if somebody looks."""
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    try:
        from tqdm import tqdm
    except ImportError:
        with _PlainBar(label, total, unit, sys.stderr) as plain:
            yield plain
        return
    with tqdm(
        desc=label,
        total=total,
        unit=unit,
        file=sys.stderr,
        mininterval=_SECONDS_BETWEEN_DRAWINGS,
        dynamic_ncols=True,
    ) as bar:
        yield bar


class _NoBar:
    """A bar that nobody would see."""

    def update(self, n: int = 1, /) -> None:
        """Do nothing."""


class _PlainBar:
    """``label [#####.....] 12/40 batches``, redrawn in place on one line."""

    def __init__(self, label: str, total: int, unit: str, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._stream = stream
        self._num_done = 0
        self._drawn_at_s = 0.0

    def __enter__(self) -> "_PlainBar":
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        self._stream.write("\n")

    def update(self, n: int = 1, /) -> None:
        """Redraw if the last drawing is long enough ago."""
        self._num_done += n
        if time.monotonic() - self._drawn_at_s >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw()

    def _draw(self) -> None:
        num_full = _PLAIN_BAR_WIDTH * self._num_done // max(self._total, 1)
        bar = "#" * num_full + "." * (_PLAIN_BAR_WIDTH - num_full)
        count = f"{self._num_done}/{self._total} {self._unit}"
        self._stream.write(f"\r{self._label} [{bar}] {count}")
        self._stream.flush()
        self._drawn_at_s = time.monotonic()
