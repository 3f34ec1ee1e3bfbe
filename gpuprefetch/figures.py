"""What does a loader remember of its passes, for ``stats()`` and ``report()``?

The meters of the passes that run and of the last one that ended, and what the first
batches of any pass showed.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuprefetch.meter import Meter
from gpuprefetch.resources import Resources
from gpuprefetch.settings import Settings
from gpuprefetch.stats import LoaderStats
from gpuprefetch.streams import is_asynchronous
from gpuprefetch.transform import describe_transform, fusion_of, is_graphed
from gpuprefetch.watch import Watch

__all__ = ["Figures"]


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs on the device, as the statistics name it."""

    transform: str
    fusion: str
    is_graphed: bool

    @classmethod
    def read(cls, function: Callable[..., Any] | None) -> "_Running":
        return cls(
            describe_transform(function), fusion_of(function), is_graphed(function)
        )


class Figures:
    """The figures of one loader.

    Args:
        source: The loader's.
        settings: The loader's.
        resources: The loader's; asked how much memory they hold.
    """

    def __init__(self, source: object, settings: Settings, resources: Resources):
        self._source = source
        self._settings = settings
        self._resources = resources
        nothing = Meter()
        nothing.is_over = True
        # In the order of their starts: the newest that has ended, and all that run.
        self._meters = [nothing]
        self.watch = Watch()
        # Read once a pass: a module's settings may lie on the device, and reading
        # those waits for it.
        self._running: _Running | None = None

    def begin_pass(self, epoch: int, device: torch.device, source: object) -> Meter:
        """Give the meter of a pass that is about to start.

        Args:
            epoch: Its number.
            device: Where batches go.
            source: The loader's now; it may be another one than before.
        """
        self._source = source
        # Weakly: the feeder's thread knows the meter, and must not keep the user's
        # transform alive, which may refer to the pass.
        look = weakref.WeakMethod(self._look_at_first_batches)
        newest = Meter(epoch, device, look)
        ended = self._newest_ended()
        kept = [m for m in self._meters if m is ended or not m.is_over]
        self._meters = [*kept, newest]
        self._running = _Running.read(self._settings.function)
        self.watch.look_at_function(self._settings.function, device)
        return newest

    def _newest_ended(self) -> Meter:
        return [meter for meter in self._meters if meter.is_over][-1]

    def _look_at_first_batches(self, meter: Meter) -> None:
        self.watch.look_at_figures(self._freeze(meter))

    def stats(self, *, finished: bool) -> LoaderStats:
        """Freeze the figures of the newest pass, or of the last one that has ended."""
        return self._freeze(self._newest_ended() if finished else self._meters[-1])

    def _freeze(self, meter: Meter) -> LoaderStats:
        runs_beside = meter.device is not None and is_asynchronous(meter.device)
        workers: Any = getattr(self._source, "num_workers", None)
        running = self._now_running()
        return replace(
            meter.snapshot(),
            pinned_bytes=self._resources.pinned_bytes,
            depth=self._settings.depth,
            is_overlapped=runs_beside,
            num_workers=workers if isinstance(self._source, DataLoader) else None,
            notes=self.watch.notes,
            transform=running.transform,
            fusion=running.fusion,
            is_graphed=running.is_graphed,
        )

    def describe_transform(self) -> str:
        """Name what runs on the device, as it was when the newest pass began."""
        return self._now_running().transform

    def _now_running(self) -> _Running:
        return self._running or _Running.read(self._settings.function)
