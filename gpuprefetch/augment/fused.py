"""What ``fuse`` returns: a chain that draws once and launches once.

The chain is cut into *segments*: runs of members that have a plan, and members that run
as they are. Sampling and applying are separate. :meth:`FusedAugmentation.sample` draws
the numbers of a batch on the host, :meth:`FusedAugmentation.forward` ships them in one
pinned copy and enqueues the work; neither waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.eligible import data_keys_of, describe_members, why_one_piece
from gpuprefetch.augment.kept_graphs import Kept, KeptGraphs
from gpuprefetch.augment.kornia_plan import Member, read_members
from gpuprefetch.augment.label_kinds import check_labels
from gpuprefetch.augment.labels import move_labels
from gpuprefetch.augment.launches import count_launches
from gpuprefetch.augment.operator import augment, register, to_unit_range
from gpuprefetch.augment.parameters import (
    Parameters,
    join_packs,
    params_from_kornia,
    params_to_kornia,
    refuse_capture,
    ship,
)
from gpuprefetch.augment.plan import Outside, Plan, Resampling
from gpuprefetch.augment.segments import (
    Segment,
    as_batch,
    check_size,
    cut,
    describe_segment,
    draw_for,
    draw_segment,
    in_order,
    run_kept,
)
from gpuprefetch.augment.variant import How
from gpuprefetch.augment.whole import change_images, run_whole
from gpuprefetch.errors import TransformError

if TYPE_CHECKING:
    from gpuprefetch.augment.kornia_adapter import KorniaTransform

__all__ = ["FusedAugmentation"]


class FusedAugmentation(nn.Module):
    """What ``fuse`` returns. Safe to call from several threads and streams.

    Args:
        kornia: The module, made ready.
        dtype: Of the images returned; None: that of float images, else float32.
        memory_format: Of the images returned, as for ``fuse``.
        resampling: How often images are read, as for ``fuse``.
        outside: What lies beyond a crop, as for ``fuse``.
        kept: How members without a fused step run, as for ``fuse``.
    """

    def __init__(
        self,
        kornia: KorniaTransform,
        *,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        resampling: Resampling = "chained",
        outside: Outside = "zeros",
        kept: Kept = "eager",
    ) -> None:
        super().__init__()
        self.dtype = dtype
        # Not the format itself, which torch.save() cannot pickle.
        self.is_channels_last = memory_format is torch.channels_last
        self.resampling: Resampling = resampling
        self.outside: Outside = outside
        # By the images' dtype. Building one anew costs the host half a microsecond.
        self._hows: dict[torch.dtype, How] = {}
        self.members = read_members(kornia.module)
        self.data_keys = data_keys_of(kornia.module)
        reason = why_one_piece(kornia.module, self.members)
        self.runs_as_is = bool(reason)
        if self.runs_as_is:
            self.members = (Member("", kornia.module, None, reason),)
        # Not a submodule: .to(), .train() and state_dict() of a model must not reach
        # the user's chain, whose samplers belong on the CPU.
        object.__setattr__(self, "_kornia", kornia)
        segments = cut(self.members)
        object.__setattr__(self, "_segments", segments)
        is_graphed = kept == "graphed" and not self.runs_as_is
        self.kept: Kept = kept
        self.graphs = KeptGraphs(segments) if is_graphed else None
        is_one = len(segments) == 1 and segments[0].plan is not None
        self.only_segment = segments[0] if is_one else None  # Fuses wholly.

    @property
    def memory_format(self) -> torch.memory_format:
        """Of the images returned."""
        return torch.channels_last if self.is_channels_last else torch.contiguous_format

    # Parameters #

    def sample(
        self, shape: Sequence[int], generator: torch.Generator | None = None
    ) -> Parameters:
        """Draw the numbers of one batch.

        Args:
            shape: (B, C, H, W) or (C, H, W) of the images.
            generator: On the CPU; None: torch's own.

        Returns:
            Numbers in host memory; pass them as ``params=`` any number of times.

        Raises:
            ImageSizeError: A crop is larger than the image.
        """
        batch, channels, height, width = (1, *shape)[-4:] if len(shape) == 3 else shape
        size: Size = (height, width)
        packs: list[Tensor] = []
        kept: list[Any] = []
        sizes: list[Size] = [size]
        for segment in self._pieces():
            shape = (batch, channels, *size)
            drawn, size = draw_segment(segment, shape, generator)
            (kept if segment.plan is None else packs).append(drawn)
            sizes.append(size)
        return Parameters(
            (batch, channels, height, width),
            join_packs(packs),
            tuple(kept),
            tuple(sizes),
        )

    def to_kornia(self, params: Parameters) -> Any:
        """The same parameters as the original module takes them as ``params=``.

        Raises:
            TransformError: The module as a whole cannot draw in advance; ``params``
                holds a seed.
        """
        if not self.runs_as_is:
            return params_to_kornia(self._original(), self._pieces_of_plans(), params)
        if isinstance(params.kept[0], int):
            raise TransformError(
                f"{type(self._original()).__name__} does not draw in advance, so there "
                "are no parameters to convert; pass params= to repeat the draw."
            )
        return params.kept[0]

    def from_kornia(self, params: Any, shape: Sequence[int]) -> Parameters:
        """The original module's ``_params``, for images (B, C, H, W).

        Raises:
            TransformError: They do not fit the module or the images.
        """
        if self.runs_as_is:
            batch, channels, height, width = shape
            whole = (batch, channels, height, width)
            return Parameters(whole, torch.empty(0), (params,), (whole[2:],))
        return params_from_kornia(
            self._original(), self._pieces_of_plans(), params, tuple(shape)
        )

    # Applying #

    def forward(
        self,
        *inputs: Any,
        params: Parameters | Any | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Augment a batch.

        Args:
            *inputs: Images (B, C, H, W) or (C, H, W) of uint8, uint16 (scaled to [0,
                1]), float16, bfloat16 or float32, on any device; then one argument per
                further entry of ``data_keys``.
            params: From :meth:`sample`, or Kornia's own; None: drawn here.
            generator: On the CPU; None: torch's own.

        Returns:
            The images in the rank they came in, dtype and memory format as set; with
            labels a list, in the order of ``data_keys``. No gradients flow through a
            fused member.

        Raises:
            BatchError: Images of another dtype or rank.
            TransformError: The number of arguments or the shape drawn for does not fit.
        """
        if len(inputs) != len(self.data_keys):
            raise TransformError(
                f"{len(inputs)} arguments were passed for the data_keys "
                f"{list(self.data_keys)}; pass one for each."
            )
        image, only = inputs[0], self.only_segment
        if (
            only is not None
            and params is None
            and len(inputs) == 1
            and isinstance(image, Tensor)
            and image.ndim == 4
            and not is_compiling()
        ):
            return self._run_only(only, image, generator)
        if self.runs_as_is:
            results = run_whole(self.__dict__["_kornia"], inputs, params, generator)
            return change_images(results, self.data_keys, self._cast)
        batched = as_batch(image)
        check_labels(self.data_keys, inputs)
        if params is None and len(inputs) == 1:
            result = self._run_images(
                batched, lambda piece, now: draw_for(piece, now, generator)
            )
            return result[(0,) * (4 - image.ndim)]
        if params is None:
            params = self.sample(batched.shape, generator)
        elif not isinstance(params, Parameters):
            params = self.from_kornia(params, batched.shape)
        result, labels = self._run_drawn(batched, list(inputs[1:]), params)
        result = result[(0,) * (4 - image.ndim)]
        return [result, *labels] if labels else result

    def _run_only(
        self, piece: Segment, image: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """The short way for a chain that fuses wholly: draw, ship, launch."""
        batch, _, height, width = image.shape
        assert piece.sampler is not None
        if image.is_cuda:
            refuse_capture()
            pack = piece.sampler(batch, (height, width), generator, is_pinned=True)
            pack = pack.to(image.device, non_blocking=True)
        else:
            pack = piece.sampler(batch, (height, width), generator).to(image.device)
        return self.apply_pack(piece, image, pack)

    def apply_pack(self, piece: Segment, image: Tensor, pack: Tensor) -> Tensor:
        """Run a chain that fuses wholly with numbers that lie on the device.

        Args:
            piece: The chain's only segment.
            image: (B, C, H, W).
            pack: (B, n), float32, on the same device.
        """
        how = self._hows.get(image.dtype)
        if how is None:
            how = self._hows[image.dtype] = self._how(self._dtype_for(image))
        return augment(image, pack, piece.key, how)

    def _how(self, dtype: torch.dtype, *, is_last: bool = True) -> How:
        is_channels_last = self.is_channels_last and is_last
        return How(dtype, is_channels_last, self.resampling, self.outside)

    def _dtype_for(self, image: Tensor) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return image.dtype if image.is_floating_point() else torch.float32

    def _cast(self, image: Tensor) -> Tensor:
        """Images that Kornia returned, in the dtype and memory format set."""
        batched = as_batch(image).to(self._dtype_for(image))
        batched = batched.contiguous(memory_format=self.memory_format)
        return batched[(0,) * (4 - image.ndim)]

    def _run_drawn(
        self, image: Tensor, labels: list[Any], params: Parameters
    ) -> tuple[Tensor, list[Any]]:
        """Images and labels with numbers that were drawn in advance."""
        shape = tuple(image.shape)
        if params.shape[0] != shape[0] or params.shape[2:] != shape[2:]:
            raise TransformError(
                f"the parameters were drawn for images {tuple(params.shape)}, but "
                f"these are {shape}; draw them with sample(images.shape)."
            )
        widths = [piece.plan.width for piece in self._pieces() if piece.plan]
        packs = params.packs(widths, ship(params.flat, image.device))
        drawn, sizes = in_order(self._pieces(), packs, params.kept), iter(params.sizes)

        def give(piece: Segment, now: Tensor) -> Any:
            check_size(piece, now, next(sizes))
            return next(drawn)

        result = self._run_images(image, give)
        remaining = iter(packs)
        for piece, size in zip(self._pieces(), params.sizes, strict=False):
            if labels and piece.plan is not None:  # Kept members move no pixels here.
                labels = move_labels(
                    piece.plan,
                    next(remaining),
                    size,
                    keys=self.data_keys[1:],
                    labels=labels,
                )
        return result, labels

    def _run_images(
        self, image: Tensor, give: Callable[[Segment, Tensor], Any]
    ) -> Tensor:
        """Segment by segment; ``give`` has the numbers of one for what reaches it."""
        dtype, segments = self._dtype_for(image), self._pieces()
        for index, segment in enumerate(segments):
            drawn = give(segment, image)
            is_last = index == len(segments) - 1
            if segment.plan is None:
                floats = to_unit_range(image)
                run = run_kept if self.graphs is None else self.graphs.run
                image = run(segment.members[0].module, floats, drawn)
            else:
                how = self._how(dtype if is_last else torch.float32, is_last=is_last)
                image = augment(image, drawn, segment.key, how)
        if segments[-1].plan is None:
            image = image.to(dtype, memory_format=self.memory_format)
        return image

    # Description #

    @property
    def is_fused(self) -> bool:
        """Whether every member has a fused step."""
        return all(member.step is not None for member in self.members)

    @property
    def summary(self) -> str:
        """``"fused"``, or that and which members are not, and why."""
        text = describe_members(self.members)
        if self.graphs is not None:
            return f"{text}; {self.graphs}"
        if self.kept == "graphed":
            return f"{text}; without graphs: Kornia runs the module as a whole"
        return text

    @property
    def num_launches(self) -> int:
        """Kernel launches per batch; members that are kept come on top."""
        return sum(count_launches(piece.plan) for piece in self._pieces() if piece.plan)

    def extra_repr(self) -> str:
        """One line per member."""
        lines = [
            f"resampling={self.resampling!r}, dtype={self.dtype}, "
            f"launches={self.num_launches}"
        ]
        for piece in self._pieces():
            lines += describe_segment(piece)
        if self.graphs is not None:
            lines.append(str(self.graphs))
        return "\n".join(lines)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # The operator knows plans by key, in the process where they were registered.
        for piece in self._pieces():
            if piece.plan is not None:
                register(piece.plan)

    def _original(self) -> nn.Module:
        return cast(nn.Module, self.__dict__["_kornia"].module)

    def _pieces(self) -> tuple[Segment, ...]:
        return cast("tuple[Segment, ...]", self.__dict__["_segments"])

    def _pieces_of_plans(self) -> tuple[tuple[Plan | None, int], ...]:
        return tuple((piece.plan, len(piece.members)) for piece in self._pieces())
