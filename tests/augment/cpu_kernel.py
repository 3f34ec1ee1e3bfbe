"""kernel.cu compiled by g++, called like the kernel on the device."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpuprefetch.augment.kernel import kernel_source
from gpuprefetch.augment.launches import Launch, mean_launch, split_launches
from gpuprefetch.augment.lower import write_header
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.tile import choose_tile
from gpuprefetch.augment.variant import Tile, Variant, chunk_of

_HERE = Path(__file__).parent
_SHIM = (_HERE / "kernel_cpu.h").read_text()
_LOOP = """
extern "C" void run(int tiles_x, int tiles_y, int samples, const void* source, void*
                    out, const float* pack, const void* images, const long long* n,
                    const float* sums, long long num_sums) {
  for (blockIdx.z = 0; blockIdx.z < samples; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < tiles_y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < tiles_x; ++blockIdx.x)
        augment(static_cast<const Source*>(source), static_cast<Output*>(out), pack,
                static_cast<const Image*>(images), n[0], n[1], n[2], n[3], n[4], n[5],
                n[6], n[7] MEAN_ARGUMENTS);
}

extern "C" int count_staged(int tiles_x, int tiles_y, int samples, const float* pack,
                            const long long* n) {
  Arguments a = {nullptr, nullptr, pack, nullptr, n[0], n[1], 0, 0, 0, 0, n[6], n[7]};
  int staged = 0;
  for (int z = 0; z < samples; ++z)
    for (int y = 0; y < tiles_y; ++y)
      for (int x = 0; x < tiles_x; ++x) {
        Geometry g;
        prepare(g, a, z, x * TILE_X, y * TILE_Y);
        staged += g.is_staged;
      }
  return staged;
}
"""
_PIXELS = {
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
}


def build(header: str) -> ctypes.CDLL:
    """Compile one variant; kept in the temporary folder between runs."""
    text = header + _SHIM + kernel_source() + _LOOP
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / "gpuprefetch-cpu-kernels"
    folder.mkdir(exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        source = folder / f"{key}.cpp"
        source.write_text(text)
        partial = folder / f"{key}.partial"
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w"]
        subprocess.run([*command, str(source), "-o", str(partial)], check=True)
        partial.rename(library)
    return ctypes.CDLL(str(library))


def run_plan(
    plan: Plan,
    image: Tensor,
    pack: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    is_channels_last: bool = False,
    tile: Tile | None = None,
    **variant: str,
) -> Tensor:
    """All launches of a plan, one after the other."""
    tile = tile or Tile()
    launches = split_launches(plan)
    pack = pack.contiguous()
    size = tuple(image.shape[-2:])
    for launch in launches:
        is_last = launch is launches[-1]
        out_dtype = dtype if is_last else torch.float32
        last = is_channels_last and is_last
        how = Variant(
            image.shape[1], _PIXELS[image.dtype], _PIXELS[out_dtype], last, **variant
        )
        for step in plan.steps[launch.first : launch.last]:
            size = step.output_size(size)
        sums = None
        before = mean_launch(plan, launch)
        if before is not None:
            tiles_x, tiles_y = _grid(size, how, tile)
            sums = torch.full((image.shape[0], tiles_x * tiles_y), float("nan"))
            of_means = replace(how, output="f32", is_channels_last=False)
            _run(plan, before, of_means, tile, image, sums, size, pack)
        out = torch.full(
            (image.shape[0], image.shape[1], *size), float("nan"), dtype=out_dtype
        )
        if last:
            out = out.to(memory_format=torch.channels_last)
        _run(plan, launch, how, tile, image, out, size, pack, sums)
        image = out
    return image


def _grid(size: tuple[int, ...], how: Variant, tile: Tile) -> tuple[int, int]:
    chunks = -(-how.channels // chunk_of(how.channels))
    return -(-size[1] // tile.x), -(-size[0] // tile.y) * chunks


def _run(
    plan: Plan,
    launch: Launch,
    how: Variant,
    tile: Tile,
    image: Tensor,
    out: Tensor,
    size: tuple[int, ...],
    pack: Tensor,
    sums: Tensor | None = None,
) -> None:
    """One launch from ``image`` to ``out``, whose frame has this size."""
    numbers = [*image.shape[-2:], *image.stride(), *size]
    build(write_header(plan, launch, how, tile)).run(
        *_grid(size, how, tile),
        image.shape[0],
        ctypes.c_void_p(image.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(pack.data_ptr()),
        None,
        (ctypes.c_longlong * 8)(*numbers),
        None if sums is None else ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_longlong(0 if sums is None else sums.shape[1]),
    )


class _Image(ctypes.Structure):
    """``Image`` of kernel.cu."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("width", "height", "c", "y", "x")),
    )


def run_ragged(plan: Plan, images: list[Tensor], pack: Tensor, tile: Tile) -> Tensor:
    """One launch over images (C, H, W) of different sizes."""
    (launch,) = split_launches(plan)
    channels = images[0].shape[0]
    variant = Variant(channels, _PIXELS[images[0].dtype], "f32", is_ragged=True)
    size = plan.output_size((1, 1))
    out = torch.full((len(images), channels, *size), float("nan"))
    table = (_Image * len(images))(
        *(
            (image.data_ptr(), image.shape[2], image.shape[1], *image.stride())
            for image in images
        )
    )
    rows = -(-size[0] // tile.y) * (-(-channels // chunk_of(channels)))
    pack = pack.contiguous()
    build(write_header(plan, launch, variant, tile)).run(
        -(-size[1] // tile.x),
        rows,
        len(images),
        None,
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(pack.data_ptr()),
        table,
        (ctypes.c_longlong * 8)(0, 0, 0, 0, 0, 0, *size),
        None,
        ctypes.c_longlong(0),
    )
    return out


def share_staged(plan: Plan, batch: int, size: tuple[int, int]) -> float:
    """Share of the tiles whose source fits into shared memory."""
    (launch,) = split_launches(plan)
    variant = Variant(3, "u8", "f32")
    tile = choose_tile(plan, launch, variant, size)
    pack = Sampler(plan)(batch, size, torch.Generator().manual_seed(0))
    out = plan.output_size(size)
    tiles_x, tiles_y = -(-out[1] // tile.x), -(-out[0] // tile.y)
    staged = build(write_header(plan, launch, variant, tile)).count_staged(
        tiles_x,
        tiles_y,
        batch,
        ctypes.c_void_p(pack.data_ptr()),
        (ctypes.c_longlong * 8)(*size, 0, 0, 0, 0, *out),
    )
    return staged / (tiles_x * tiles_y * batch)
