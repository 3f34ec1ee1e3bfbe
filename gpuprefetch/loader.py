"""What does a user configure, and what does a loader keep?

:class:`StreamPrefetchLoader` holds the settings, and what is kept from pass to pass:
the side streams, the pinned slots and the progress. A pass itself is an
:class:`Epoch`.

Invariant: construction draws no random number, starts no thread and touches no device;
the device, the stream and the rank are looked up when a pass starts.
"""

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import TracebackType
from typing import Any, Generic, SupportsIndex, TypeVar, overload

import torch

from gpuprefetch.assembly import Surroundings, open_pass
from gpuprefetch.beginning import note_pause
from gpuprefetch.epoch import Epoch
from gpuprefetch.figures import Figures
from gpuprefetch.generators import PartsOfSource, write_states
from gpuprefetch.progress import Progress
from gpuprefetch.report import Report, report_on
from gpuprefetch.resources import Resources
from gpuprefetch.restore import check_loadable
from gpuprefetch.settings import (
    Settings,
    check_source,
    parse_device,
    parse_int,
    resolve_device,
)
from gpuprefetch.source import SourceTraits
from gpuprefetch.starting import start
from gpuprefetch.stats import LoaderStats

__all__ = ["StreamPrefetchLoader"]

Batch = TypeVar("Batch")

# Attributes of the loader itself; all others are the source's.
_OWN_ATTRIBUTES = frozenset(
    {
        "source",
        "_settings",
        "_resources",
        "_progress",
        "_figures",
        "_passes",
    }
)

# Given to the constructor; to set one later would change nothing.
_SETTINGS = frozenset(field.name for field in fields(Settings))


class StreamPrefetchLoader(Generic[Batch]):
    """Yields the batches of ``source``, copied to the device and transformed there.

    While the loop works on one batch, the next ones are copied and transformed on a
    side stream. What is yielded is ready on whatever stream is current in the loop.

    Attributes that this class does not have are read from and written to the source:
    ``loader.sampler.set_epoch(3)``, ``loader.dataset``, ``loader.batch_size``.

    Args:
        source: A DataLoader, or any re-iterable of batches. An iterator works for one
            pass; at most ``depth`` items beyond those yielded are taken from it.
        transform: Called with the batch's inputs, on the device, without gradients, and
            with random generators set per batch. What it returns for one input takes
            that place as it is, a tuple of two views too. A Kornia augmentation gets
            uint8 images as float32 in [0, 1] and draws per sample.
        inputs: What ``transform`` gets and replaces: an index, a key or a field, or a
            tuple of them (then that many arguments and results). ``None``: a bare
            tensor itself, or item 0 of a tuple or list.
        batch_transform: Instead of ``transform``: called with the whole batch, returns
            the new one.
        device: Where batches go. ``None``: the accelerator that is current when a pass
            starts, or the CPU where there is none.
        depth: Most batches pulled from the source, or in flight on the device, and not
            yet yielded; at least 1. With 1 a batch is issued when the loop asks for it:
            it overlaps the step only while the device is behind the loop. From a
            DataLoader with workers two more are pulled into host memory.
        background: Pull the source in a thread. ``None``: if it is a DataLoader with
            workers.
        seed: Base of the transform's random numbers. An int: every epoch differs, and a
            new loader with the same seed repeats them. ``None``: follows torch's CPU
            generator, so ``torch.manual_seed`` before an epoch repeats that epoch.
        replay: Whether a pass that goes on from a loaded state loads again what was
            yielded, and drops it. ``False``: only the sampler's indices are passed
            over. ``None``: where it must, so that random numbers which the data set
            itself draws are exact too: with workers, or where it holds a generator.

    Raises:
        SettingError: An argument has a value that is not accepted.
        SettingTypeError: An argument has a type that is not accepted.
    """

    @overload
    def __init__(
        self,
        source: Iterable[Batch],
        transform: Callable[..., Any] | None = None,
        *,
        inputs: Hashable | None = None,
        batch_transform: None = None,
        device: torch.device | str | int | None = None,
        depth: SupportsIndex = 2,
        background: bool | None = None,
        seed: SupportsIndex | None = None,
        replay: bool | None = None,
    ) -> None: ...

    # What `batch_transform` returns is what the loop gets.
    @overload
    def __init__(
        self,
        source: Iterable[Any],
        transform: None = None,
        *,
        inputs: None = None,
        batch_transform: Callable[[Any], Batch],
        device: torch.device | str | int | None = None,
        depth: SupportsIndex = 2,
        background: bool | None = None,
        seed: SupportsIndex | None = None,
        replay: bool | None = None,
    ) -> None: ...

    def __init__(
        self,
        source: Iterable[Any],
        transform: Callable[..., Any] | None = None,
        *,
        # What the transform gets
        inputs: Hashable | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        # Where and how far ahead
        device: torch.device | str | int | None = None,
        depth: SupportsIndex = 2,
        background: bool | None = None,
        # Randomness and resuming
        seed: SupportsIndex | None = None,
        replay: bool | None = None,
    ) -> None:
        check_source(source)
        self.source = source
        self._settings = Settings(
            transform=transform,
            inputs=inputs,
            batch_transform=batch_transform,
            device=parse_device(device),
            depth=parse_int("depth", depth),
            background=background,
            seed=None if seed is None else parse_int("seed", seed),
            replay=replay,
        )
        self._begin_life()

    def _begin_life(self) -> None:
        self._resources = Resources()
        self._progress = Progress(seed=self._settings.seed)
        self._figures = Figures(self.source, self._settings, self._resources)
        self._passes: weakref.WeakSet[Epoch[Batch]] = weakref.WeakSet()

    # Iteration #

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass over the source.

        Passes are independent of each other, unless the source has one iterator for all
        of them; then an unfinished one ends here.
        """
        traits = SourceTraits.of(self.source)
        self._supersede_passes(traits)
        device = resolve_device(self._settings.device)
        if traits.is_one_shot and self._progress.is_between_passes:
            warnings.warn(
                f"the source is a {type(self.source).__name__}, an iterator that an "
                "earlier pass has used up, so this pass may have no batches. Pass the "
                "iterable that it came from.",
                stacklevel=2,
            )
        progress = self._progress.next_pass()
        progress.seed = self._settings.seed
        started, transform = start(
            self.source, self._settings, traits, progress=progress, device=device
        )
        self._progress = progress
        epoch: Epoch[Batch] = open_pass(
            started,
            transform,
            Surroundings(
                source=self.source,
                settings=self._settings,
                traits=traits,
                device=device,
                resources=self._resources,
                progress=progress,
                meter=self._figures.begin_pass(progress.epoch, device, self.source),
                watch=self._figures.watch,
            ),
        )
        self._passes.add(epoch)
        return epoch

    def _supersede_passes(self, traits: SourceTraits) -> None:
        """End unfinished passes, where the source's iterator serves one at a time."""
        if traits.shares_iterator:
            for unfinished in list(self._passes):
                unfinished.supersede()
            self._resources.wait_for_leftover_threads()

    def __len__(self) -> int:
        """Give the number of batches that the source announces.

        Raises:
            TypeError: The source does not know.
        """
        try:
            return len(self.source)  # type: ignore[arg-type]
        except Exception as error:
            raise TypeError(
                f"the source ({type(self.source).__name__}) has no length: {error}"
            ) from error

    # State #

    def state_dict(self) -> dict[str, Any]:
        """Describe what the loop got so far; batches only prefetched do not count.

        Returns:
            Plain values, which JSON takes, and the state of the source where that
            keeps one, as it gave it.
        """
        if not self._progress.is_started and not self._progress.is_loaded:
            note_pause(self._progress, self.source)
        return self._progress.to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on after the last batch that ``state`` counts.

        Raises:
            StateError: The state is of another version, seed, source or rank, or the
                source's place cannot be found again.
        """
        progress = Progress.from_state(state)
        source: Any = self.source
        traits, parts = SourceTraits.of(source), PartsOfSource(source)
        check_loadable(
            progress, source, traits=traits, parts=parts, settings=self._settings
        )
        self._supersede_passes(traits)
        parts.set_epochs(progress.set_epochs or {})
        if progress.origin is not None and not progress.is_started:
            write_states(parts.generators, progress.origin.generators)
        if progress.source_state is not None:
            source.load_state_dict(progress.source_state)
        self._progress = progress

    def stats(self, *, finished: bool = False) -> LoaderStats:
        """Give the figures of the newest pass so far; does not wait for the device.

        Args:
            finished: Of the last pass that ended instead; all 0 if there was none.
        """
        return self._figures.stats(finished=finished)

    def report(self, *, finished: bool = False) -> Report:
        """Say in a few lines what holds the loop back, and what to change next.

        Args:
            finished: As in :meth:`stats`.

        Returns:
            A ``str``, which a notebook shows as a table.
        """
        return report_on(self.stats(finished=finished))

    # Lifetime #

    def close(self) -> None:
        """End unfinished passes and give pinned memory back. Safe to call twice.

        A loop that is still running gets no more batches and ends, without an error.
        ``state_dict()`` goes on saying where that was, in the middle of the epoch. The
        loader can be iterated again afterwards; that is the next epoch.
        """
        for unfinished in list(self._passes):
            unfinished.close()
        self._resources.release()

    def __enter__(self) -> "StreamPrefetchLoader[Batch]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Take along the settings only: no stream, thread, batch or position."""
        return {"source": self.source, "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_life()

    # The source's attributes #

    def __getattr__(self, name: str) -> Any:
        # Reached only for what this object does not have.
        source = self.__dict__.get("source")
        if source is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(source, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor its source "
                f"({type(source).__name__}) has an attribute {name!r}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in _OWN_ATTRIBUTES or hasattr(type(self), name)
        # A subclass may set its own before it calls our constructor.
        source = self.__dict__.get("source")
        if is_own or name.startswith("__") or source is None:
            object.__setattr__(self, name, value)
        elif hasattr(source, name):
            setattr(source, name, value)
        elif name in _SETTINGS and value is not getattr(self._settings, name):
            raise AttributeError(
                f"{name} is a setting of {type(self).__name__} and is read once, when "
                f"it is made. Make another with {name}=...; it may have the same "
                "source."
            )
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        settings = self._settings
        name = self._figures.describe_transform()
        return (
            f"{type(self).__name__}({type(self.source).__name__}, transform={name}, "
            f"device={settings.device}, depth={settings.depth})"
        )
