"""May this state be loaded here?

A state that would give other samples or other pixels than the run that saved it is
refused, with the reason.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gpuprefetch.errors import StateError
from gpuprefetch.fingerprint import describe_source, refuse_another_source
from gpuprefetch.generators import PartsOfSource
from gpuprefetch.progress import Progress
from gpuprefetch.settings import Settings
from gpuprefetch.source import SourceTraits

__all__ = ["check_loadable"]


def check_loadable(
    progress: Progress,
    source: Any,
    *,
    traits: SourceTraits,
    parts: PartsOfSource,
    settings: Settings,
) -> None:
    """Compare a state with the loader that is to go on from it.

    Raises:
        StateError: It cannot, or the samples or pixels would be others.
    """
    _check_kind(progress, source, traits)
    if settings.function is not None and progress.seed != settings.seed:
        raise StateError(
            f"the state was saved with seed={progress.seed}, and this loader has "
            f"seed={settings.seed}: the pixels would differ. Give this one the same "
            "seed."
        )
    is_seeded = settings.function is None or settings.seed is not None
    refuse_another_source(
        progress.source or {},
        describe_source(source),
        any_rank=is_seeded and _order_is_shared(progress),
    )
    if not traits.keeps_state:
        _check_generators(progress, parts)
        if progress.yielded:
            _check_repeatable(source, traits, settings.replay)


def _check_kind(progress: Progress, source: Any, traits: SourceTraits) -> None:
    if traits.is_one_shot and not traits.keeps_state:
        raise StateError(
            f"the source is a {type(source).__name__}, an iterator that cannot be "
            "started again. Pass the iterable that it came from."
        )
    has_state = progress.source_state is not None
    if (has_state and not traits.keeps_state) or (
        traits.keeps_state and not has_state and progress.yielded > 0
    ):
        raise StateError(
            f"the state was saved over a source {'with' if has_state else 'without'} a "
            f"state_dict, and {type(source).__name__} has "
            f"{'one' if traits.keeps_state else 'none'}. Use the same kind."
        )


def _order_is_shared(progress: Progress) -> bool:
    """Whether every rank finds its own samples from this state: the sampler's part."""
    own: Mapping[str, Any] = (
        {} if progress.origin is None else progress.origin.generators
    )
    return (
        (progress.source or {}).get("shard") is not None
        and progress.source_state is None
        and not any(name.startswith("source.") for name in own)
    )


def _check_repeatable(source: Any, traits: SourceTraits, replay: bool | None) -> None:
    """Refuse a place in what cannot be found again."""
    if traits.is_stream and replay is not True:
        raise StateError(
            f"the place in a {type(source.dataset).__name__}, an IterableDataset, is "
            "not known: it has no indices, and a torch DataLoader asks it for no "
            "state. Give it state_dict() and load_state_dict(), and use torchdata's "
            "StatefulDataLoader; or, if it gives the same samples whenever it is read "
            "from its start, pass replay=True to read those again and drop them."
        )
    if traits.has_workers and getattr(source, "in_order", True) is False:
        raise StateError(
            "the source is a DataLoader with in_order=False: which batches it gave "
            "before the state was saved is a matter of timing. Use in_order=True."
        )


def _check_generators(progress: Progress, parts: PartsOfSource) -> None:
    if progress.origin is None:
        return
    saved = _of_samplers(progress.origin.generators)
    current = _of_samplers(parts.generators)
    for name in sorted(saved - current):
        raise StateError(
            f"the state holds a random generator {name}, and this source has none "
            "there: its order would be another. Build the source in the same way."
        )
    for name in sorted(current - saved):
        raise StateError(
            f"this source has a random generator {name}, and the one over which the "
            "state was saved had none there: its order was another. Build the source "
            "in the same way."
        )


def _of_samplers(names: Iterable[str]) -> set[str]:
    """Choose the generators that set the order; others move as samples are loaded."""
    return {
        name
        for name in names
        if name.startswith("source.") and not name.startswith("source.dataset")
    }
