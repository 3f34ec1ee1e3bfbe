"""How do steps that change values become calls of ``values.cu``?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuprefetch.augment.steps import Geometric, Step
from gpuprefetch.augment.values import (
    Blur,
    Erase,
    Grayscale,
    Jitter,
    Pointwise,
    per_channel,
)

__all__ = ["ValueLowering", "channel_values", "table"]

_Row = tuple[float, ...]
_Steps = Sequence[tuple[Step, Mapping[str, int]]]


@dataclass(slots=True)
class ValueLowering:
    """Calls, and the tables that they refer to."""

    channels: int
    scales: list[_Row] = field(default_factory=list)
    """Factors per channel: a row per call of ``scale``."""
    biases: list[_Row] = field(default_factory=list)

    def lower(
        self, steps: Sequence[Step], layout: Sequence[Mapping[str, int]], unit: float
    ) -> tuple[str, str]:
        """The calls for whole pixels, and for one value at a time before the store.

        Args:
            steps: Of one launch; geometry is passed over.
            layout: Their columns.
            unit: What 1 of the source is in the range [0, 1].

        Raises:
            TransformError: The number of channels does not fit a step.
        """
        pairs = list(zip(steps, layout, strict=True))
        # Behind the last step that is in the way of taking one channel alone.
        behind = 0
        for index, step in enumerate(steps):
            if not isinstance(step, Pointwise | Erase):
                behind = index + 1
        pixels = [
            pair for pair in pairs[:behind] if not isinstance(pair[0], Geometric | Blur)
        ]
        # The source's units go with the first values that are changed.
        if pixels:
            return self._calls(pixels, unit), self._calls(pairs[behind:], 1.0)
        return "", self._calls(pairs[behind:], unit)

    def _calls(self, steps: _Steps, unit: float) -> str:
        """Neighbours that always multiply are made one, and so is the unit."""
        calls: list[str] = []
        scale, bias = (unit,) * self.channels, (0.0,) * self.channels
        for step, columns in steps:
            if isinstance(step, Pointwise) and "skip" not in columns:
                factors, offsets = self._rows(step)
                bias = tuple(
                    old * factor + offset
                    for old, factor, offset in zip(bias, factors, offsets, strict=True)
                )
                scale = tuple(a * b for a, b in zip(scale, factors, strict=True))
                continue
            calls += self._scale(scale, bias)
            scale, bias = (1.0,) * self.channels, (0.0,) * self.channels
            skip = f"if (pack[{columns['skip']}] == 0.0f) " if "skip" in columns else ""
            calls += [f"{skip}{{ {call} }}" for call in self._call(step, columns)]
        return " ".join(calls + self._scale(scale, bias))

    def _rows(self, step: Pointwise) -> tuple[_Row, _Row]:
        return (
            channel_values(step.scale, self.channels),
            channel_values(step.bias, self.channels),
        )

    def _scale(self, scale: _Row, bias: _Row) -> list[str]:
        if all(factor == 1.0 for factor in scale) and not any(bias):
            return []
        self.scales.append(scale)
        self.biases.append(bias)
        return [f"v.scale<{len(self.scales) - 1}>();"]

    def _call(self, step: Step, columns: Mapping[str, int]) -> list[str]:
        match step:
            case Pointwise():
                return self._scale(*self._rows(step))
            case Jitter():
                return [_jitter(step, columns, self.channels)]
            case Grayscale():
                weights = step.weights_for(self.channels)
                return [f"v.weigh({{{', '.join(f'{w!r}f' for w in weights)}}});"]
            case Erase():
                names = ("left", "top", "width", "height", "value")
                numbers = ", ".join(f"pack[{columns[name]}]" for name in names)
                return [f"v.erase({numbers});"]
            case _:
                raise AssertionError(step)


def _jitter(step: Jitter, columns: Mapping[str, int], channels: int) -> str:
    """Adjustments are the digits 1 to 4 of a number, the first in its lowest digit."""
    adjustments = step.adjustments_for(channels)
    if step.is_order_drawn:
        order = f"order_of(pack[{columns['order']}])"
    else:
        digits = (index + 1 << 4 * place for place, index in enumerate(adjustments))
        order = f"{sum(digits):#x}"
    factors = (
        f"pack[{columns[name]}]" if name in columns else "0.0f"
        for name in ("brightness", "contrast", "saturation", "hue")
    )
    is_jiggle = "true" if step.is_jiggle else "false"
    made = sum(1 << index + 1 for index in adjustments)
    return f"v.jitter<{is_jiggle}, {made}>({order}, {{{', '.join(factors)}}});"


def channel_values(values: Sequence[float], channels: int, unit: float = 1.0) -> _Row:
    """Numbers for each channel, in other units."""
    return tuple(value * unit for value in per_channel(values, channels))


def table(rows: Sequence[Sequence[float]], channels: int) -> str:
    """Rows as an initializer; never empty."""
    full = rows or [(0.0,) * channels]
    return ", ".join(
        "{" + ", ".join(f"{value!r}f" for value in row) + "}" for row in full
    )
