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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from gpuprefetch.augment.capture import Captured, capture, is_capturing, replay
from gpuprefetch.augment.host_reads import skip_host_reads
from gpuprefetch.augment.parameters import ship
from gpuprefetch.augment.segments import Segment, draw_kept, run_kept
from gpuprefetch.errors import TransformError
from gpuprefetch.seeding import generators_seeded, no_other_thread_seeds

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


class _Place(NamedTuple):
    """Where a tensor lies in a buffer."""

    name: str
    """Of the number, as Kornia calls it."""
    shape: tuple[int, ...]
    """Of the tensor."""
    dtype: torch.dtype
    """Of the tensor."""
    start: int
    """Its first byte."""
    end: int
    """The byte behind its last."""


class KeptGraphs:
    """The members of a chain that run as graphs; see [Note: What a graph freezes].

    Args:
        segments: Of the chain; those without a plan hold one member each.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        kept = [piece.members[0].module for piece in segments if piece.plan is None]
        self._members = {module: GraphedMember(module) for module in kept}

    def run(self, module: nn.Module, image: Tensor, drawn: Any) -> Tensor:
        """Run a member with its numbers, as ``run_kept`` does.

        Args:
            module: One of the chain's members without a plan.
            image: (B, C, H, W), of floats.
            drawn: What ``draw_kept`` gave for it, in host memory.

        Returns:
            Images (B, C, h, w). They belong to the caller: no replay writes to them.
        """
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
        return "; ".join(["kept members as graphs on CUDA", *reasons])


class GraphedMember:
    """One member; safe to call from several threads and streams.

    Args:
        module: Without a fused step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.why_eager = ""
        """Why nothing more is captured: what has no graph by now runs as it is."""
        self._start()

    def _start(self) -> None:
        """Begin without graphs."""
        self._graphs: dict[object, _Graph] = {}
        self._lock = threading.Lock()  # One thread at a time captures.

    def __call__(self, image: Tensor, drawn: Any) -> Tensor:
        """Run with numbers that ``draw_kept`` gave, for images (B, C, H, W)."""
        if _fits_a_graph(image, drawn):
            graph = self._find(image, drawn)
            if graph is not None:
                return graph(image, drawn)
        return run_kept(self._module, image, drawn)

    def _find(self, image: Tensor, drawn: dict[str, Tensor]) -> _Graph | None:
        """The graph for these arguments, captured now if need be."""
        key = _signature(image, drawn)
        graph = self._graphs.get(key)
        if graph is not None or self.why_eager:
            return graph
        # Comparing seeds the generators, and a loader calls this with them seeded.
        with no_other_thread_seeds(), self._lock:
            if key in self._graphs:  # Another thread was faster.
                return self._graphs[key]
            if any(graph.is_for_more(image) for graph in self._graphs.values()):
                return None  # The last batch of an epoch is not worth a graph.
            if len(self._graphs) < _MOST_GRAPHS:
                graph = self._capture(image, drawn)
            else:
                self._give_up(f"{_MOST_GRAPHS} kinds of images are captured already")
            if graph is not None:
                self._graphs[key] = graph
            return graph

    def _capture(self, image: Tensor, drawn: dict[str, Tensor]) -> _Graph | None:
        """Capture and compare; None: it cannot be, and nothing more is captured."""
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
        self._give_up(why)
        return None

    def _give_up(self, why: str) -> None:
        """Capture no more, and say so."""
        self.why_eager = why
        name = type(self._module).__name__
        _logger.warning(
            "%s runs without a CUDA graph: %s. "
            "logging.getLogger('gpuprefetch').setLevel(logging.ERROR) silences this.",
            name,
            why,
        )

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
        self._shape, self._dtype = image.shape, image.dtype
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = _Buffer(drawn)
            self._module = _on_device(module, image.device)
            flat = ship(self._buffer.filled(drawn), image.device)
            leaves, spec = pytree.tree_flatten(((image, flat), {}))
            self._captured: Captured = capture(self._apply, leaves, spec)

    def is_for_more(self, image: Tensor) -> bool:
        """Whether it takes such images, but a larger batch of them."""
        is_alike = self._shape[1:] == image.shape[1:] and self._dtype is image.dtype
        return is_alike and self._shape[0] > image.shape[0]

    def _apply(self, image: Tensor, flat: Tensor) -> Tensor:
        """Run the member with numbers in device memory, (num_bytes,), uint8."""
        result: Tensor = self._module(image, params=dict(self._buffer.read(flat)))
        return result

    def __call__(self, image: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        with self._lock, torch.no_grad():
            flat = ship(self._buffer.filled(drawn), image.device)
            result: Tensor = replay(self._captured, (image, flat))
            return result


class _Buffer:
    """The numbers of a member in one piece of host memory."""

    def __init__(self, drawn: dict[str, Tensor]) -> None:
        self._places = tuple(_places(drawn))
        num_bytes = self._places[-1].end if self._places else 0
        self._flat = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device="cpu")
        self._views = dict(self.read(self._flat))

    def filled(self, drawn: dict[str, Tensor]) -> Tensor:
        """Write the numbers; valid until the next call."""
        for name, view in self._views.items():
            view.copy_(drawn[name])
        return self._flat

    def read(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Give each number by its name, as a view of such a buffer."""
        for place in self._places:
            own = flat[place.start : place.end]
            yield place.name, own.view(place.dtype).view(place.shape)


def _places(drawn: dict[str, Tensor]) -> Iterator[_Place]:
    """Lay tensors out one behind the other."""
    end = 0
    for name, value in drawn.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + value.numel() * value.element_size()
        yield _Place(name, tuple(value.shape), value.dtype, start, end)


def _on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy that neither copies constants from the host nor reads numbers there."""
    applying = copy.deepcopy(module).to(device)
    skip_host_reads(applying)
    flags = getattr(applying, "flags", None)
    if isinstance(flags, dict):
        for name, value in flags.items():
            if isinstance(value, Tensor):
                flags[name] = value.to(device)
    return applying


# What can be captured #


def _fits_a_graph(image: Tensor, drawn: Any) -> bool:
    """Whether images and numbers are of the usual kind, and no gradient is wanted."""
    if not image.is_cuda or not isinstance(drawn, dict) or image.numel() == 0:
        return False
    if is_capturing():
        return False
    tensors = drawn.values()
    if not all(isinstance(value, Tensor) and value.is_cpu for value in tensors):
        return False
    has_gradient = any(value.requires_grad for value in (image, *tensors))
    return not (has_gradient and torch.is_grad_enabled())


def _signature(image: Tensor, drawn: dict[str, Tensor]) -> object:
    """What has to be equal for a graph to fit."""
    is_cast = torch.is_autocast_enabled("cuda")
    return (
        *(image.shape, image.stride(), image.dtype, image.device),
        is_cast and torch.get_autocast_dtype("cuda"),
        _kinds(drawn),
    )


def _kinds(drawn: dict[str, Tensor]) -> frozenset[object]:
    """Names, shapes and types of a member's numbers, in whatever order they come."""
    return frozenset((name, value.shape, value.dtype) for name, value in drawn.items())


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
    module: nn.Module, graph: _Graph, image: Tensor, kinds: frozenset[object]
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
    """Whether images are the same but for a few pixels; waits for the device."""
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
