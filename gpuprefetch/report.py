"""How is a pass told in a few lines, in a log file and in a notebook?"""

import html

from gpuprefetch.diagnose import diagnose
from gpuprefetch.histogram import Spread
from gpuprefetch.plural import counted
from gpuprefetch.stats import LoaderStats

__all__ = ["Report", "report_on"]


class Report(str):
    """Lines of text; a notebook shows them as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = (line.partition(": ") for line in self.splitlines())
        cells = (
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, _, text in rows
        )
        return f"<table>{''.join(cells)}</table>"


def report_on(stats: LoaderStats) -> Report:
    """Say what holds a loop back, the figures, and what to change next.

    Returns:
        Lines of the form ``name: text``, without a newline at the end.
    """
    diagnosis = diagnose(stats)
    lines = [
        f"epoch {stats.epoch}: {counted(stats.batches, 'batch')}, {_volume(stats)}",
        f"verdict: {diagnosis.verdict}. {diagnosis.figure}",
        f"next: {diagnosis.advice}",
        *_host_lines(stats),
        *_device_lines(stats),
        f"transform: {stats.transform}",
    ]
    if stats.batches:
        lines.append(f"memory: {_memory(stats)}")
    lines += [f"note: {note}" for note in stats.notes]
    # A class or a key may have any name, even one of two lines.
    return Report("\n".join(" ".join(line.split()) for line in lines))


def _volume(stats: LoaderStats) -> str:
    first = (
        f"the first after {stats.first_ms:.0f} ms" if stats.batches else "no figures"
    )
    if not stats.copied_bytes:
        return first
    return f"{stats.copied_bytes / 2**30:.3f} GiB copied, {first}"


def _write(name: str, spread: Spread) -> str:
    return f"{name} {spread.mean:.2f} ({spread.p99:.2f}) ms"


def _host_lines(stats: LoaderStats) -> list[str]:
    """Give one line, or none before a step was measured."""
    if not stats.period_ms.count:
        return []
    figures = ", ".join(
        _write(name, spread)
        for name, spread in (
            ("step", stats.period_ms),
            ("of which source", stats.source_wait_ms),
            ("device", stats.device_wait_ms),
            ("loader", stats.loader_ms),
        )
    )
    return [f"per batch, mean (p99): {figures}"]


def _device_lines(stats: LoaderStats) -> list[str]:
    """Give one line, or none where nothing ran beside the loop."""
    if not stats.stall_ms.count:
        return []
    parts = [_write("stood still", stats.stall_ms)]
    if stats.copy_ms.count:
        rate = f"at {stats.copy_gb_per_s.p50:.1f} GB/s"
        parts.append(f"{_write('copy', stats.copy_ms)} {rate}")
    if stats.transform_ms.count:
        parts.append(_write("transform", stats.transform_ms))
    parts.append(f"{stats.stall_ms.count} batches sampled")
    return [f"on the device: {', '.join(parts)}"]


def _memory(stats: LoaderStats) -> str:
    text = (
        f"{stats.pinned_bytes / 2**20:.1f} MiB pinned, "
        f"{stats.device_bytes / 2**20:.1f} MiB in flight"
    )
    if not stats.queue_depth.count:
        return text
    return f"{text}, {stats.queue_depth.mean:.1f} batches in hand"
