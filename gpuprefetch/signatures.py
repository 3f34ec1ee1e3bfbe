"""How many values can a function be called with?"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Arity", "arity_of"]


@dataclass(frozen=True, slots=True)
class Arity:
    """What a function can be given.

    Attributes:
        least: Values that it needs by position.
        most: Values that it takes by position; ``inf`` for any number.
        needs_by_name: Arguments that it cannot do without, and takes by name alone.
    """

    least: int
    most: float
    needs_by_name: tuple[str, ...] = ()


def arity_of(function: Callable[..., Any]) -> Arity | None:
    """Read it from the signature; ``None`` where there is none, as in some C code."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    by_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    placed = [one for one in parameters if one.kind in by_place]
    is_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return Arity(
        least=sum(one.default is one.empty for one in placed),
        most=math.inf if is_any else len(placed),
        needs_by_name=tuple(
            one.name
            for one in parameters
            if one.kind is one.KEYWORD_ONLY and one.default is one.empty
        ),
    )
