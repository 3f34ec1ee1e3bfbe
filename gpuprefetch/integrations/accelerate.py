"""How does Accelerate shard the source of a loader and still see the end of the epoch?

``Accelerator.prepare`` shards DataLoaders and passes over everything else, so over this
package's loader too. Around a prepared one, the loader would hide where the loop is:
Accelerate reads "this was the last batch" from what it iterates itself, and the loader
is batches ahead of the loop. Gradients would then be synchronized, and the padding of
the last batch dropped, too early.

:func:`prepare` lets Accelerate shard the source and then stands outside: it tells
Accelerate about the batch that the *loop* has. All collective calls (the shuffle's
generator is made the same on all ranks) are made by the loop's own thread.

The only file that imports accelerate.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    DataLoaderShard,
    DataLoaderStateMixin,
    SeedableRandomSampler,
)
from accelerate.state import GradientState
from accelerate.utils import synchronize_rng_states
from torch.utils.data import DataLoader

from gpuprefetch.errors import SettingError, SettingTypeError, StateError
from gpuprefetch.loader import StreamPrefetchLoader

__all__ = ["AcceleratedLoader", "prepare"]

Batch = TypeVar("Batch")

# What Accelerate made of sources: sharded again, samples would be left out, unnoticed.
_prepared: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()

_STATE_KEYS = {"loader", "iteration", "sampler_seed"}


def prepare(
    accelerator: Accelerator, loader: StreamPrefetchLoader[Batch]
) -> "AcceleratedLoader[Batch]":
    """Shard the source of a loader over the processes of ``accelerator``.

    Call it in the place of ``accelerator.prepare(loader)``; prepare model, optimizer
    and schedule as always. So that ``accelerator.save_state`` keeps the loader's place
    in the epoch, give the result to ``accelerator.register_for_checkpointing``.

    Args:
        accelerator: Of this process.
        loader: Over a bare DataLoader with a length. Build it with
            ``device=accelerator.device``. It is changed: its source becomes the shard.

    Returns:
        What the loop iterates, in the place of ``loader``.

    Raises:
        SettingTypeError: The source is no bare DataLoader, or an argument is no
            Accelerator or no StreamPrefetchLoader.
        SettingError: It was prepared before; or Accelerate would dispatch the batches
            of this source from one process, as it does for iterable data sets.
    """
    _check_types(accelerator, loader)
    source: Any = loader.source
    if not isinstance(source, DataLoader) or hasattr(source, "base_dataloader"):
        raise SettingTypeError(
            f"prepare() shards a torch DataLoader, and the source of this loader is a "
            f"{type(source).__name__}. Wrap a DataLoader that is not prepared yet."
        )
    if source in _prepared:
        raise SettingError(
            "this loader is prepared already: each process would read a part of its "
            "part. Call prepare() once, and iterate what it returns."
        )
    try:
        len(source)
        shard = accelerator.prepare_data_loader(source, device_placement=False)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"Accelerate cannot give each process its own batches of this source: "
            f"{error}. Use a map-style data set, or shard the data by hand and iterate "
            "StreamPrefetchLoader itself."
        ) from error
    if not hasattr(shard, "synchronized_generator"):
        raise SettingError(
            f"Accelerate made a {type(shard).__qualname__} of the source, which serves "
            "all processes from one. Pass Accelerator(dataloader_config="
            "DataLoaderConfiguration(dispatch_batches=False))."
        )
    loader.source = part = shard.base_dataloader
    _prepared.add(part)
    return AcceleratedLoader(loader, shard)


def _check_types(accelerator: object, loader: object) -> None:
    # One that is prepared already gets its own answer.
    is_loader = isinstance(loader, (StreamPrefetchLoader, AcceleratedLoader))
    if isinstance(accelerator, Accelerator) and is_loader:
        return
    raise SettingTypeError(
        "prepare() takes an Accelerator and a StreamPrefetchLoader, in this order, got "
        f"{type(accelerator).__name__} and {type(loader).__name__}. Write "
        "prepare(accelerator, StreamPrefetchLoader(DataLoader(...), "
        "device=accelerator.device))."
    )


class AcceleratedLoader(DataLoaderStateMixin, Generic[Batch]):  # type: ignore[misc]
    """The batches of a loader, with Accelerate told where the loop is.

    Other attributes are the loader's, and so its source's.

    Args:
        loader: Over the bare DataLoader inside ``shard``.
        shard: What Accelerate made of the source; never iterated.
    """

    def __init__(
        self, loader: StreamPrefetchLoader[Batch], shard: DataLoaderShard
    ) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._shard = shard
        self._sampler: Any = shard.get_sampler()
        # Its first pass would make one: a state that holds it fits a fresh source too.
        if getattr(self._sampler, "generator", self) is None and self._is_seeded:
            generator = torch.Generator().manual_seed(self._sampler.initial_seed)
            self._sampler.generator = generator

    @property
    def _is_seeded(self) -> bool:
        """Whether Accelerate's own sampler sets the order, by a seed and the epoch."""
        return isinstance(self._sampler, SeedableRandomSampler)

    @property
    def total_batch_size(self) -> int:
        """Images in a step, over all processes; Accelerate asks for it."""
        return int(self._shard.total_batch_size)

    @property
    def _drop_last(self) -> bool:
        return bool(self._shard._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Start a pass at its first batch, since this is a generator."""
        shard = self._shard
        if shard.rng_types is not None:
            synchronize_rng_states(shard.rng_types, shard.synchronized_generator)
        shard.set_epoch(shard.iteration)
        batches = iter(self.loader)
        num_left = len(self.loader) - int(self.loader.state_dict()["yielded"])
        self.begin()
        try:
            for batch in batches:
                num_left -= 1
                self.end_of_dataloader = num_left == 0
                yield batch
            shard.iteration += 1
        finally:
            # After a `break` as well: Accelerate must not go on looking at this pass.
            self.end()

    def __len__(self) -> int:
        """Give the number of batches of this process."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; by itself it follows a count of passes."""
        self._shard.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Describe what the loop got so far, the number of the pass, and its order.

        Accelerate saves the sampler's seed for iterable data sets only.
        """
        return {
            "loader": self.loader.state_dict(),
            "iteration": self._shard.iteration,
            "sampler_seed": self._sampler.initial_seed if self._is_seeded else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on after the last batch that ``state`` counts.

        Raises:
            StateError: It is no state of this class, or the loader refuses its own.
        """
        if not isinstance(state, Mapping) or set(state) != _STATE_KEYS:
            is_mapping = isinstance(state, Mapping)
            has = sorted(map(str, state)) if is_mapping else type(state).__name__
            raise StateError(
                "expected what state_dict() of an AcceleratedLoader gives, with the "
                f"entries {sorted(_STATE_KEYS)}, got {has}. Pass it unchanged; the "
                "state of the loader inside goes to prepared.loader.load_state_dict()."
            )
        if self._is_seeded != (state["sampler_seed"] is not None):
            raise StateError(
                "the state was saved with another kind of sampler. Give Accelerator "
                "the same DataLoaderConfiguration(use_seedable_sampler=...)."
            )
        self.loader.load_state_dict(state["loader"])
        if self._is_seeded:
            self._sampler.initial_seed = state["sampler_seed"]
        self._shard.iteration = state["iteration"]

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_sampler", "_shard"):
            raise AttributeError(name)
        return getattr(self.loader, name)
