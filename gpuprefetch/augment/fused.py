"""``fuse(module)``: a Kornia chain as one module that draws once and launches once.

The chain is cut into *segments*: runs of members that have a plan, and members that run
as they are. Sampling and applying are separate. :meth:`FusedAugmentation.sample` draws
the numbers of a batch on the host, :meth:`FusedAugmentation.forward` ships them in one
pinned copy and enqueues the work; neither waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpuprefetch.augment.column import Size
from gpuprefetch.augment.eligible import describe_members
from gpuprefetch.augment.kornia_plan import Member, is_kornia_module, read_members
from gpuprefetch.augment.labels import (
    LABELS,
    changes_labels,
    mask_settings_reason,
    move_labels,
)
from gpuprefetch.augment.launches import count_launches, explain_steps
from gpuprefetch.augment.operator import augment, register, to_unit_range
from gpuprefetch.augment.parameters import (
    Parameters,
    join_packs,
    params_from_kornia,
    params_to_kornia,
    ship,
)
from gpuprefetch.augment.plan import Outside, Plan, Resampling
from gpuprefetch.augment.segments import Segment, cut, draw_kept, run_kept, split_packs
from gpuprefetch.errors import SettingError, SettingTypeError, TransformError

__all__ = ["FusedAugmentation", "fuse"]


def fuse(
    module: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    resampling: Resampling = "chained",
    outside: Outside = "zeros",
) -> FusedAugmentation:
    """Turn a Kornia augmentation into one kernel, as far as it goes.

    Args:
        module: A Kornia augmentation, container, or ``nn.Sequential`` of those. It is
            copied: later changes to it have no effect, and it never sees a batch.
        dtype: Of the images returned: float32, float16 or bfloat16.
        memory_format: ``torch.contiguous_format`` or ``torch.channels_last``.
        resampling: ``"chained"`` resamples as often as Kornia does and equals it to
            1e-4; ``"single"`` resamples once, which is sharper and faster.
        outside: For ``"single"``, what a rotation after a crop shows beyond the crop:
            black (``"zeros"``), or the image there (``"extend"``).

    Returns:
        A module: ``fused(images, *labels, params=None, generator=None)``. Its ``repr``
        says which members run fused and why any does not.

    Raises:
        SettingError: A setting has another value than those above.
        SettingTypeError: ``module`` is not a Kornia module.
    """
    if not is_kornia_module(module):
        raise SettingTypeError(
            "fuse() takes a Kornia augmentation, a Kornia container or an "
            f"nn.Sequential of those, got {type(module).__name__}."
        )
    _require("dtype", dtype, (torch.float32, torch.float16, torch.bfloat16))
    _require(
        "memory_format", memory_format, (torch.contiguous_format, torch.channels_last)
    )
    _require("resampling", resampling, ("chained", "single"))
    _require("outside", outside, ("zeros", "extend"))
    return FusedAugmentation(
        copy.deepcopy(module), dtype, memory_format, resampling, outside
    )


def _require(name: str, value: object, accepted: Sequence[object]) -> None:
    if value not in accepted:
        choices = ", ".join(repr(choice) for choice in accepted)
        raise SettingError(f"{name} must be one of {choices}, got {value!r}.")


class FusedAugmentation(nn.Module):
    """What :func:`fuse` returns. Safe to call from several threads and streams."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        memory_format: torch.memory_format,
        resampling: Resampling,
        outside: Outside,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.memory_format = memory_format
        self.resampling: Resampling = resampling
        self.outside: Outside = outside
        self.members = read_members(module)
        self.data_keys = _read_data_keys(module)
        reason = ""
        if len(self.data_keys) > 1:
            reason = mask_settings_reason(module)
            if any(m.step is None and changes_labels(m.module) for m in self.members):
                reason = "labels follow it through members that have no fused step"
        self.runs_as_is = bool(reason)
        if self.runs_as_is:
            self.members = (Member("", module, None, reason),)
        # Not a submodule: .to(), .train() and state_dict() of a model must not reach
        # the user's chain, whose samplers belong on the CPU.
        object.__setattr__(self, "_chain", module)
        segments = cut(self.members)
        object.__setattr__(self, "_segments", segments)
        is_one = len(segments) == 1 and segments[0].plan is not None
        object.__setattr__(self, "_only", segments[0] if is_one else None)

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
        return self._sample(shape, generator)

    def _sample(
        self,
        shape: Sequence[int],
        generator: torch.Generator | None,
        *,
        is_pinned: bool = False,
    ) -> Parameters:
        batch, channels, height, width = (1, *shape)[-4:] if len(shape) == 3 else shape
        size: Size = (height, width)
        packs: list[Tensor] = []
        kept: list[Any] = []
        sizes: list[Size] = [size]
        segments = self._pieces()
        for segment in segments:
            if segment.sampler is not None and segment.plan is not None:
                draw_pinned = is_pinned and len(segments) == 1
                packs.append(
                    segment.sampler(batch, size, generator, is_pinned=draw_pinned)
                )
                size = segment.plan.output_size(size)
            else:
                draw, size = draw_kept(
                    segment.members[0].module, (batch, channels, *size), generator
                )
                kept.append(draw)
            sizes.append(size)
        flat = packs[0].view(-1) if len(packs) == 1 else join_packs(packs)
        return Parameters(
            (batch, channels, height, width), flat, tuple(kept), tuple(sizes)
        )

    def to_kornia(self, params: Parameters) -> Any:
        """The same parameters as the original module takes them as ``params=``."""
        if self.runs_as_is:
            return params.kept[0]
        return params_to_kornia(self._original(), self._pieces_of_plans(), params)

    def from_kornia(self, params: Any, shape: Sequence[int]) -> Parameters:
        """The original module's ``_params``, for images (B, C, H, W)."""
        if self.runs_as_is:
            batch, channels, height, width = shape
            sizes = ((height, width),)
            whole = (batch, channels, height, width)
            return Parameters(whole, torch.empty(0), (params,), sizes)
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
            labels a list, in the order of ``data_keys``.

        Raises:
            BatchError: Images of another dtype.
            TransformError: The number of arguments or the shape drawn for does not fit.
        """
        if len(inputs) != len(self.data_keys):
            raise TransformError(
                f"{len(inputs)} arguments were passed for the data_keys "
                f"{list(self.data_keys)}; pass one for each."
            )
        image: Tensor = inputs[0]
        only = self.__dict__["_only"]
        if only is not None and params is None and len(inputs) == 1 and image.ndim == 4:
            return self._run_only(only, image, generator)
        batched = image if image.ndim == 4 else image[None]
        shape = tuple(batched.shape)
        if params is None:
            params = self._sample(shape, generator, is_pinned=batched.is_cuda)
        elif not isinstance(params, Parameters):
            params = self.from_kornia(params, shape)
        if params.shape[0] != shape[0] or params.shape[2:] != shape[2:]:
            raise TransformError(
                f"the parameters were drawn for images {tuple(params.shape)}, but "
                f"these are {shape}; draw them with sample(images.shape)."
            )
        packs = split_packs(ship(params.flat, batched.device), params, self._pieces())
        labels = list(inputs[1:])
        if self.runs_as_is:
            return self._run_kornia(batched, labels, params.kept[0], image.ndim)
        result = self._run_images(batched, packs, params.kept)
        result = result if image.ndim == 4 else result[0]
        if not labels:
            return result
        remaining = iter(packs)
        for piece, size in zip(self._pieces(), params.sizes, strict=False):
            if piece.plan is not None:  # Kept members move no pixels here.
                labels = move_labels(
                    piece.plan,
                    next(remaining),
                    size,
                    keys=self.data_keys[1:],
                    labels=labels,
                )
        return [result, *labels]

    def _run_only(
        self, piece: Segment, image: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """The short way for a chain that fuses wholly: draw, ship, launch."""
        batch, _, height, width = image.shape
        assert piece.sampler is not None
        if image.is_cuda:
            pack = piece.sampler(batch, (height, width), generator, is_pinned=True)
            pack = pack.to(image.device, non_blocking=True)
        else:
            pack = piece.sampler(batch, (height, width), generator).to(image.device)
        return augment(
            image,
            pack,
            piece.key,
            dtype=self._dtype_for(image),
            is_channels_last=self.memory_format is torch.channels_last,
            resampling=self.resampling,
            outside=self.outside,
        )

    def _dtype_for(self, image: Tensor) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return image.dtype if image.is_floating_point() else torch.float32

    def _run_images(
        self, image: Tensor, packs: list[Tensor], kept: tuple[Any, ...]
    ) -> Tensor:
        is_channels_last = self.memory_format is torch.channels_last
        dtype = self._dtype_for(image)
        remaining_packs, remaining_kept = iter(packs), iter(kept)
        segments = self._pieces()
        for index, segment in enumerate(segments):
            is_last = index == len(segments) - 1
            if segment.plan is None:
                floats = to_unit_range(image)
                image = run_kept(
                    segment.members[0].module, floats, next(remaining_kept)
                )
            else:
                image = augment(
                    image,
                    next(remaining_packs),
                    segment.key,
                    dtype=dtype if is_last else torch.float32,
                    is_channels_last=is_channels_last and is_last,
                    resampling=self.resampling,
                    outside=self.outside,
                )
        if segments[-1].plan is None:
            image = image.to(dtype, memory_format=self.memory_format)
        return image

    def _run_kornia(
        self, image: Tensor, labels: list[Any], drawn: Any, rank: int
    ) -> list[Any]:
        results = list(self._original()(to_unit_range(image), *labels, params=drawn))
        first = results[0].to(self._dtype_for(image), memory_format=self.memory_format)
        return [first if rank == 4 else first[0], *results[1:]]

    # Description #

    @property
    def is_fused(self) -> bool:
        """Whether every member has a fused step."""
        return all(member.step is not None for member in self.members)

    @property
    def summary(self) -> str:
        """``"fused"``, or that and which members are not, and why."""
        return describe_members(self.members)

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
            reasons = explain_steps(piece.plan) if piece.plan else ()
            for member, why in zip_longest(piece.members, reasons, fillvalue=""):
                assert isinstance(member, Member)
                name = type(member.module).__name__
                how = f"fused, {why}" if why else "fused"
                if member.step is None:
                    how = f"as it is: {member.reason}"
                lines.append(f"({member.name}) {name}: {how}")
        return "\n".join(lines)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # The operator knows plans by key, in the process where they were registered.
        for piece in self._pieces():
            if piece.plan is not None:
                register(piece.plan)

    def _original(self) -> nn.Module:
        return cast(nn.Module, self.__dict__["_chain"])

    def _pieces(self) -> tuple[Segment, ...]:
        return cast("tuple[Segment, ...]", self.__dict__["_segments"])

    def _pieces_of_plans(self) -> tuple[tuple[Plan | None, int], ...]:
        return tuple((piece.plan, len(piece.members)) for piece in self._pieces())


def _read_data_keys(module: nn.Module) -> tuple[str, ...]:
    keys = getattr(module, "data_keys", None)
    if not keys:
        return ("image",)
    names = tuple(str(getattr(key, "name", key)).lower() for key in keys)
    unknown = [name for name in names[1:] if name not in LABELS]
    if unknown:
        raise SettingError(f"data_keys {unknown} are not among {list(LABELS)}.")
    return names
