"""What is noted about a source where a pass begins, or waits to?

From this a later process makes the same order again; see [Note: Resume counts what was
yielded]. All of it is noted once a pass, nothing at a step.
"""

import logging
import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from gpuprefetch.fingerprint import describe_source
from gpuprefetch.generators import PartsOfSource, global_generators, read_states
from gpuprefetch.indices import persistent_iterator
from gpuprefetch.progress import Origin, Progress
from gpuprefetch.source import SourceTraits

__all__ = ["note_beginning", "note_draw", "note_pause", "state_at_start"]

_logger = logging.getLogger(__name__)


def note_beginning(progress: Progress, source: Any, traits: SourceTraits) -> Origin:
    """Say what sets the order of a pass; a loaded one keeps what set it first.

    Called by ``start`` right before ``iter(source)``, which the loader's ``__iter__``
    calls: the warning counts on that to name the user's line.
    """
    parts = PartsOfSource(source)
    progress.source = describe_source(source)
    if progress.is_started and progress.origin is not None:
        saved = progress.set_epochs or {}
        for name in parts.set_epochs(saved):
            warnings.warn(
                f"{name} was given another epoch after load_state_dict(). This pass "
                f"goes on in the middle of the one that was saved, {saved[name]}; to "
                "silence this, call set_epoch() with that number.",
                stacklevel=4,
            )
        return progress.origin
    progress.set_epochs = parts.epochs()
    return _origin_of(source, traits, parts, is_started=True)


def note_draw(progress: Progress) -> None:
    """Take notice that the base seed moved torch's generator on, before the source did.

    A source that draws its order at its first pull does so from there.
    """
    origin = progress.origin
    if origin is not None and "torch" in origin.generators:
        moved = read_states({"torch": torch.default_generator})
        progress.origin = replace(origin, generators={**origin.generators, **moved})


def note_pause(progress: Progress, source: Any) -> None:
    """Between two passes, look where the source's own generators stand."""
    traits, parts = SourceTraits.of(source), PartsOfSource(source)
    progress.source = describe_source(source)
    progress.origin = _origin_of(source, traits, parts, is_started=False)
    progress.set_epochs = parts.epochs()


def _origin_of(
    source: object, traits: SourceTraits, parts: PartsOfSource, *, is_started: bool
) -> Origin:
    """Write down what sets the order of the pass that starts now, or later."""
    if traits.keeps_state:
        return Origin({})
    # Until it starts, the global ones are the user's.
    generators = {**(global_generators() if is_started else {}), **parts.generators}
    return Origin(read_states(generators), persistent_iterator(source) is not None)


def state_at_start(source: Any) -> Any:
    """Give the state of a source that keeps one, before anything is pulled.

    ``None`` if it has none to give yet; an error that stays comes with a batch.
    """
    try:
        return deepcopy(source.state_dict())
    except Exception:
        _logger.debug("the source gave no state before its first batch", exc_info=True)
        return None
