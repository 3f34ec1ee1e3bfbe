"""The kernel compiles for the GPUs it is meant for; the operator is a good citizen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kornia.augmentation as K
import pytest
import torch
from chains import CHAINS, MEMBERS, chain_of, image_of, plan_of

from gpuprefetch.augment import kernel, operator
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.kernel import compile_cubin
from gpuprefetch.augment.launches import mean_launch, split_launches
from gpuprefetch.augment.lower import write_header
from gpuprefetch.augment.operator import register
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.tile import choose_tile, shared_bytes
from gpuprefetch.augment.variant import Variant

VARIANTS = [
    Variant(3, "u8", "f32"),
    Variant(3, "u8", "f32", resampling="single"),
    Variant(3, "u8", "f32", resampling="single", outside="extend"),
    Variant(4, "f16", "bf16", is_channels_last=True),
    Variant(12, "u16", "f16"),
    Variant(1, "bf16", "f32", is_ragged=True),
]


def compile_all(plan: Plan, variant: Variant, arch: str) -> list[bytes]:
    """Every launch of a plan, those for means included."""
    launches = split_launches(plan)
    whole = [(launch, variant) for launch in launches]
    of_means = replace(variant, output="f32", is_channels_last=False)
    means = [(mean_launch(plan, launch), of_means) for launch in launches]
    return [
        compile_cubin(
            write_header(plan, launch, how, choose_tile(plan, launch, how, (60, 90))),
            arch,
            is_cached=False,
        )
        for launch, how in [*means, *whole]
        if launch is not None
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_seed_chain_compiles(variant: Variant, arch: str) -> None:
    pytest.importorskip("cuda.core")
    chain = plan_of(
        K.RandomCrop((20, 30), padding=2),
        K.Resize((40, 40)),
        K.RandomRotation(9.0),
        K.RandomGaussianBlur((7, 7), (0.1, 2.0)),
        K.Normalize(0.5, 0.2),
    )
    assert all(compile_all(chain, variant, arch))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_chain_with_colors_compiles(variant: Variant, arch: str) -> None:
    pytest.importorskip("cuda.core")
    hue = 0.1 if variant.channels == 3 else 0.0
    gray = [K.RandomGrayscale()] if variant.channels <= 4 else []
    chain = plan_of(
        K.RandomResizedCrop((40, 40)),
        K.ColorJitter(0.2, 0.2, hue, hue),
        *gray,
        K.RandomGaussianBlur((7, 7), (0.1, 2.0)),
        K.RandomErasing(),
        K.Normalize(0.5, 0.2),
        K.ColorJiggle(0.2, 0.2, hue, hue, order=(3, 1, 0, 2)),
    )
    assert len(compile_all(chain, variant, arch)) == 3


@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_compiles(name: str) -> None:
    pytest.importorskip("cuda.core")
    plan = plan_of(*chain_of(CHAINS[name]))
    assert all(compile_all(plan, Variant(3, "u8", "f32"), "sm_90"))


def seed_chain(size: int) -> Plan:
    return plan_of(
        K.RandomCrop((size // 2, size // 2)),
        K.Resize((size, size)),
        K.RandomRotation(45.0),
        K.RandomGaussianBlur((7, 7), (0.1, 2.0)),
        K.Normalize(0.5, 0.2),
    )


@pytest.mark.parametrize(
    ("plan", "variant", "expected"),
    [
        (seed_chain(256), Variant(3, "u8", "f32"), (64, 64, 512, 2)),
        # 64 does not divide 224: a quarter of the pixels would be made for nothing.
        (seed_chain(224), Variant(3, "u8", "f32"), (32, 32, 128, 8)),
        (seed_chain(256), VARIANTS[1], (64, 32, 256, 4)),
        (
            plan_of(K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip()),
            Variant(3, "u8", "bf16", is_channels_last=True),
            (32, 64, 256, 4),
        ),
    ],
    ids=["chained", "chained 224", "single", "imagenet"],
)
def test_tiles_are_those_that_were_fastest(
    plan: Plan, variant: Variant, expected: tuple[int, ...]
) -> None:
    pytest.importorskip("cuda.core")
    (launch,) = split_launches(plan)
    tile = choose_tile(plan, launch, variant, (256, 256))
    assert (tile.x, tile.y, tile.threads, tile.min_blocks) == expected
    header = write_header(plan, launch, variant, tile)
    assert compile_cubin(header, "sm_90", is_cached=False)


def test_a_large_image_is_staged_as_far_as_the_memory_goes() -> None:
    plan = plan_of(K.RandomResizedCrop((224, 224)))
    (launch,) = split_launches(plan)
    variant = Variant(3, "f32", "f32")
    tile = choose_tile(plan, launch, variant, (1200, 1600))
    assert 60 * 1024 < shared_bytes(plan, launch, variant, tile) <= 72 * 1024


@pytest.mark.parametrize("name", MEMBERS)
def test_blocks_fit_into_shared_memory(name: str) -> None:
    """A block fits into the 99 KiB that every supported GPU has for one."""
    plan = plan_of(MEMBERS[name]())
    for variant in (Variant(3, "u8", "f32"), Variant(3, "f32", "f32")):
        for launch in split_launches(plan):
            tile = choose_tile(plan, launch, variant, (600, 900))
            assert shared_bytes(plan, launch, variant, tile) <= 99 * 1024


def test_the_second_compilation_reads_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_of(K.RandomHorizontalFlip())
    variant = Variant(3, "u8", "f32")
    launch = split_launches(plan)[0]
    header = write_header(
        plan, launch, variant, choose_tile(plan, launch, variant, (60, 90))
    )
    first = compile_cubin(header, "sm_90")
    assert len(list((tmp_path / "gpuprefetch/cubin").glob("*.cubin"))) == 1
    monkeypatch.setattr(kernel, "_core", lambda: pytest.fail("compiled again"))
    assert compile_cubin(header, "sm_90") == first


def test_the_operator_passes_torchs_own_checks() -> None:
    plan = plan_of(*chain_of(CHAINS["seed"]))
    image = image_of((2, 3, 37, 53), torch.uint8)
    pack = Sampler(plan)(2, (37, 53), None)
    arguments = (image, pack, register(plan), torch.float16, True, "chained", "zeros")
    torch.library.opcheck(torch.ops.gpuprefetch.augment.default, arguments)


def test_torch_compile_sees_one_node() -> None:
    fused = fuse(chain_of(CHAINS["imagenet"]))
    plan = plan_of(*chain_of(CHAINS["imagenet"]))
    key = register(plan)
    image = image_of((2, 3, 37, 53), torch.uint8)
    pack = fused.sample(image.shape).flat.view(2, -1)

    def transform(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return torch.ops.gpuprefetch.augment(
            x, numbers, key, torch.float32, False, "chained", "zeros"
        )

    compiled = torch.compile(transform, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(image, pack), transform(image, pack))


def test_the_kernel_says_why_it_cannot_run() -> None:
    assert "needs a CUDA device, not cpu" in kernel.why_not(torch.device("cpu"))


def test_images_of_many_sizes_share_a_few_kernels() -> None:
    """Compiling takes as long as many batches."""
    plan, variant = plan_of(K.RandomResizedCrop((224, 224))), Variant(3, "u8", "f32")
    (launch,) = split_launches(plan)
    headers = {
        write_header(plan, launch, variant, choose_tile(plan, launch, variant, size))
        for size in ((200 + 7 * step, 600 - 5 * step) for step in range(60))
    }
    assert len(headers) <= 8


# The cache on disk #


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder of its own, and a compiler that only counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    class Core:
        ProgramOptions = staticmethod(lambda **options: options)

        class Program:
            def __init__(self, source: str, kind: str, options: object) -> None:
                calls.append(source)

            def compile(self, kind: str) -> Core.Program:
                self.code = b"machine code"
                return self

    class Nvrtc:
        nvrtcVersion = staticmethod(lambda: (0, 13, 0))

    monkeypatch.setattr(kernel, "_core", lambda: Core)
    monkeypatch.setattr(kernel, "_nvrtc", lambda: Nvrtc)
    return calls


@pytest.mark.parametrize("damage", [b"", b"mach", b"\0" * 44, b"x" * 44])
def test_a_damaged_file_is_compiled_again(
    compiled: list[str], tmp_path: Path, damage: bytes
) -> None:
    compile_cubin("", "sm_90")
    (file,) = tmp_path.rglob("*.cubin")
    file.write_bytes(damage)
    assert compile_cubin("", "sm_90") == b"machine code"
    assert compile_cubin("", "sm_90") == b"machine code"
    assert len(compiled) == 2


@pytest.mark.usefixtures("compiled")
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert compile_cubin("", "sm_90") == b"machine code"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("compiled")
def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cubin("", "sm_90") == b"machine code"


@pytest.mark.usefixtures("compiled")
def test_a_user_without_a_home_gets_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert compile_cubin("", "sm_90") == b"machine code"
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_cannot_be_loaded_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        @staticmethod
        def nvrtcGetSupportedArchs() -> object:
            raise RuntimeError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(kernel, "_nvrtc", lambda: Broken)
    assert "cannot be loaded (libnvrtc.so" in kernel._why_no_compiler((9, 0))


def test_a_gpu_that_the_compiler_does_not_know_is_a_reason() -> None:
    pytest.importorskip("cuda.core")
    assert kernel._why_no_compiler((9, 0)) == ""
    assert "does not know sm_990" in kernel._why_no_compiler((99, 0))


def test_the_way_without_the_kernel_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operator, "_warned", set())
    monkeypatch.setattr(operator, "why_not", lambda device: "it is too old")
    for index in (0, 1, 0):
        image = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        operator._announce(cast(Any, image), "plan")
    operator._announce(torch.zeros(1), "plan")
    assert [record.getMessage().count("too old") for record in caplog.records] == [1]
