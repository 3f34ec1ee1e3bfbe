"""How does a member that has no fused step run as a CUDA graph?

Its numbers are drawn on the host, as ever. They are written into one buffer, which
travels to the graph's own memory in one copy; there the member finds each of them at
its place. So the host pays for a few calls, however many kernels the member launches.

[Note: What a graph freezes] A graph repeats the work that was captured. A member whose
work depends on something else than the images and its numbers would go on with what was
there at the capture: a counter, a number drawn while it is applied, a number read back
on the host. Reading back breaks the capture off, drawing on the host is noticed, and
each graph is compared with the member itself for other numbers before it is used. What
changes later cannot be seen: so it is the user who asks for graphs.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from gpuprefetch.augment.capture import Captured, capture, replay
from gpuprefetch.augment.parameters import ship
from gpuprefetch.augment.segments import Segment, draw_kept, run_kept
from gpuprefetch.errors import TransformError
from gpuprefetch.seeding import generators_seeded

__all__ = ["GraphedMember", "Kept", "KeptGraphs"]

_logger = logging.getLogger(__name__)

Kept = Literal["eager", "graphed"]
"""How members without a fused step run."""

_MOST_GRAPHS = 4  # Of one member; each holds its images, results and intermediates.
_ALIGNMENT = 16  # Bytes; of each number's place in the buffer.

# Pixels that may differ more than this, in the range of the images, and how many of
# them: where an interpolation or a threshold flips, one pixel differs, and no more.
_PIXEL_TOLERANCE = 1e-3
_MOST_UNLIKE = 1e-3

Place = tuple[str, tuple[int, ...], torch.dtype, int, int]
"""Name, shape and type of a tensor, and its first and its last byte (exclusive)."""


class KeptGraphs:
    """The members of a chain that run as graphs.

    Args:
        segments: Of the chain; those without a plan hold one member each.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        kept = [piece.members[0].module for piece in segments if piece.plan is None]
        self._members = {module: GraphedMember(module) for module in kept}

    def run(self, module: nn.Module, image: Tensor, drawn: Any) -> Tensor:
        """Run a member with its numbers, as ``run_kept`` does."""
        member = self._members[module]
        # Torch's compiler would follow the capture of a graph, and compile within it.
        call = (
            _call_uncompiled
            if torch.compiler.is_compiling()
            else GraphedMember.__call__
        )
        return call(member, image, drawn)

    def __str__(self) -> str:
        """Whether they run as graphs, and which does not, and why."""
        reasons = [
            f"{type(module).__name__} without a graph: {member.why_eager}"
            for module, member in self._members.items()
            if member.why_eager
        ]
        return "; ".join(["kept members as CUDA graphs", *reasons])


class GraphedMember:
    """One member; safe to call from several threads and streams."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.why_eager = ""
        """Why it runs as it is from now on; empty: it runs as graphs, where it can."""
        self._start()

    def _start(self) -> None:
        self._graphs: dict[object, _Graph] = {}
        self._lock = threading.Lock()  # One thread at a time captures.

    def __call__(self, image: Tensor, drawn: Any) -> Tensor:
        """Run with numbers that ``draw_kept`` gave, for images (B, C, H, W)."""
        if not self.why_eager and _fits_a_graph(image, drawn):
            graph = self._find(image, drawn)
            if graph is not None:
                return graph(image, drawn)
        return run_kept(self._module, image, drawn)

    def _find(self, image: Tensor, drawn: dict[str, Tensor]) -> _Graph | None:
        """The graph for these arguments, captured now if need be."""
        key = _signature(image, drawn)
        graph = self._graphs.get(key)
        if graph is None and len(self._graphs) < _MOST_GRAPHS:
            with self._lock:
                graph = self._graphs.get(key)  # Another thread may have been faster.
                if graph is None and not self.why_eager:
                    graph = self._capture(image, drawn)
                    if graph is not None:
                        self._graphs[key] = graph
        return graph

    def _capture(self, image: Tensor, drawn: dict[str, Tensor]) -> _Graph | None:
        """Capture and compare; None: the member runs as it is from now on."""
        # Here an error is the member's own, and not one of its graph's.
        why = _why_host_draws(self._module, image, drawn)
        if not why:
            try:
                graph = _Graph(self._module, image, drawn)
                why = _why_unlike(self._module, graph, image, _kinds(drawn))
                if not why:
                    return graph
            except Exception as error:
                # Of any kind: a member's code may expect its numbers on the host.
                why = f"it cannot be captured ({_in_short(error)})"
        self.why_eager = why
        self._graphs.clear()
        name = type(self._module).__name__
        _logger.warning("%s runs without a CUDA graph: %s.", name, why)
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Graphs stay behind: a copy captures its own."""
        return {"_module": self._module, "why_eager": self.why_eager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


_call_uncompiled: Callable[..., Tensor] = _disable_dynamo(GraphedMember.__call__)


class _Graph:
    """A member captured for one kind of images and numbers."""

    def __init__(
        self, module: nn.Module, image: Tensor, drawn: dict[str, Tensor]
    ) -> None:
        self._lock = threading.Lock()  # One thread at a time fills the buffers.
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = _Buffer(drawn)
            self._module = _on_device(module, image.device)
            flat = ship(self._buffer.filled(drawn), image.device)
            leaves, spec = pytree.tree_flatten(((image, flat), {}))
            self._captured: Captured = capture(self._apply, leaves, spec)

    def _apply(self, image: Tensor, flat: Tensor) -> Any:
        return self._module(image, params=dict(self._buffer.read(flat)))

    def __call__(self, image: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        with self._lock, torch.no_grad():
            flat = ship(self._buffer.filled(drawn), image.device)
            result: Tensor = replay(self._captured, (image, flat))
            return result


class _Buffer:
    """The numbers of a member in one piece of host memory."""

    def __init__(self, drawn: dict[str, Tensor]) -> None:
        self._places = tuple(_places(drawn))
        num_bytes = self._places[-1][-1] if self._places else 0
        self._flat = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device="cpu")
        self._views = dict(self.read(self._flat))

    def filled(self, drawn: dict[str, Tensor]) -> Tensor:
        """Write the numbers; valid until the next call."""
        for name, view in self._views.items():
            view.copy_(drawn[name])
        return self._flat

    def read(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Give each number by its name, as a view of such a buffer."""
        for name, shape, dtype, start, end in self._places:
            yield name, flat[start:end].view(dtype).view(shape)


def _places(drawn: dict[str, Tensor]) -> Iterator[Place]:
    end = 0
    for name, value in drawn.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + value.numel() * value.element_size()
        yield name, tuple(value.shape), value.dtype, start, end


def _on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy that neither copies constants from the host nor reads numbers there."""
    # Imports Kornia, which whoever has a module of its has imported already.
    from gpuprefetch.augment.kornia_adapter import skip_host_reads

    applying: Any = copy.deepcopy(module).to(device)
    skip_host_reads(applying)
    flags = getattr(applying, "flags", None)
    if isinstance(flags, dict):
        applying.flags = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in flags.items()
        }
    return applying  # type: ignore[no-any-return]


# What can be captured #


def _fits_a_graph(image: Tensor, drawn: Any) -> bool:
    """Whether images and numbers are of the usual kind, and no gradient is wanted."""
    if not image.is_cuda or not isinstance(drawn, dict) or image.numel() == 0:
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    tensors = drawn.values()
    if not all(isinstance(value, Tensor) and value.is_cpu for value in tensors):
        return False
    wants = any(value.requires_grad for value in (image, *tensors))
    return not (wants and torch.is_grad_enabled())


def _signature(image: Tensor, drawn: dict[str, Tensor]) -> object:
    """What has to be equal for a graph to fit."""
    is_cast = torch.is_autocast_enabled("cuda")
    return (
        *(image.shape, image.stride(), image.dtype, image.device),
        is_cast and torch.get_autocast_dtype("cuda"),
        _kinds(drawn),
    )


def _kinds(drawn: dict[str, Tensor]) -> tuple[object, ...]:
    return tuple((name, value.shape, value.dtype) for name, value in drawn.items())


def _why_host_draws(module: nn.Module, image: Tensor, drawn: dict[str, Tensor]) -> str:
    """Apply the member, and see whether it moves a generator of the host.

    So may another thread, such as one that pulls the source: it does not come to the
    same place twice. A member that draws beside it is told by its images.
    """
    before, after = _host_states_around(module, image, drawn)
    if after == before or _host_states_around(module, image, drawn)[1] != after:
        return ""
    return "it draws numbers on the host while it is applied"


def _host_states_around(
    module: nn.Module, image: Tensor, drawn: dict[str, Tensor]
) -> tuple[object, object]:
    """Apply the member from a seed; the host's generators before and after that."""
    with generators_seeded(0, image.device), torch.no_grad():
        before = _host_states()
        _run_on_copies(module, image, drawn)
        return before, _host_states()


def _host_states() -> object:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _why_unlike(
    module: nn.Module, graph: _Graph, image: Tensor, kinds: tuple[object, ...]
) -> str:
    """Compare a graph with its member for other numbers than it was captured with."""
    for seed in (1, 2):
        with generators_seeded(seed, image.device), torch.no_grad():
            drawn, _ = draw_kept(module, image.shape, None)
        if _kinds(drawn) != kinds:
            return "its numbers change their shapes"
        # The device's generator too, from which both may draw.
        with generators_seeded(seed, image.device), torch.no_grad():
            expected = _run_on_copies(module, image, drawn)
        with generators_seeded(seed, image.device):
            if not _is_alike(graph(image, drawn), expected):
                return "its graph gives other images than the member for other numbers"
    return ""


def _run_on_copies(
    module: nn.Module, image: Tensor, drawn: dict[str, Tensor]
) -> Tensor:
    """Run a member that may write to its images and its numbers, which go on."""
    copied = {name: value.clone() for name, value in drawn.items()}
    return run_kept(module, image.clone(), copied)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    scale = other.abs().nan_to_num(0.0, posinf=0.0).max().clamp(min=1.0)
    # Asked so that what is no number, or infinite, in one alone is not alike.
    is_near = (one - other).abs() <= _PIXEL_TOLERANCE * scale
    is_equal = (one == other) | (one.isnan() & other.isnan())
    unlike = ~(is_near | is_equal)
    return bool(unlike.float().mean() <= _MOST_UNLIKE)


def _in_short(error: Exception) -> str:
    """An error's first sentence, or its kind: some say nothing."""
    cause = error.__cause__ if isinstance(error, TransformError) else None
    told = cause or error
    lines = str(told).strip().splitlines() or [type(told).__name__]
    return lines[0].split(". ")[0]
