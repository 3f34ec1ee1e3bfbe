"""What is kept as it is: altered members, odd containers, members that tell no size.

The oracle is Kornia, or what the caller put in Kornia's place.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import kornia.augmentation as K
import pytest
import torch
from chains import image_of
from torch import Tensor, nn

from gpuprefetch import StreamPrefetchLoader
from gpuprefetch.augment.fusing import fuse
from gpuprefetch.errors import BatchError, ImageSizeError, TransformError

IMAGE = image_of((4, 3, 20, 24), torch.float32)


def sevens(image: Tensor, *rest: object, **more: object) -> Tensor:
    return torch.full_like(image, 7.0)


def in_loader(module: nn.Module) -> Tensor:
    (out,) = StreamPrefetchLoader([IMAGE], transform=module, seed=1)
    return out


@pytest.mark.parametrize("name", ["apply_transform", "forward"])
def test_a_method_replaced_on_the_module_is_used(name: str) -> None:
    flip = K.RandomHorizontalFlip(p=1.0)
    setattr(flip, name, sevens)
    assert f"its {name} was replaced" in repr(fuse(flip))
    assert (fuse(flip)(IMAGE) == 7).all()
    assert (in_loader(nn.Sequential(K.RandomVerticalFlip(), flip)) == 7).all()


@pytest.mark.parametrize("is_on_container", [False, True])
def test_hooks_are_called(is_on_container: bool) -> None:
    chain = nn.Sequential(K.RandomHorizontalFlip(p=1.0), K.RandomRotation(3.0))
    hooked = chain if is_on_container else chain[1]
    hooked.register_forward_hook(lambda module, inputs, out: sevens(out))
    assert "it has hooks" in repr(fuse(chain))
    assert (fuse(chain)(IMAGE) == 7).all()
    assert (in_loader(chain) == 7).all()


def test_a_container_named_like_kornias_keeps_its_own_parameters() -> None:
    named = type("ImageSequential", (K.ImageSequential,), {})
    chain = nn.Sequential(named(K.RandomRotation(40.0)), K.Normalize(0.5, 0.2))
    fused = fuse(chain)
    params = fused.sample(IMAGE.shape)
    first, second = fused.to_kornia(params)
    expected = chain[1](chain[0](IMAGE, params=first), params=second)
    torch.testing.assert_close(fused(IMAGE, params=params), expected)


def test_a_sequential_in_kornias_container_runs_as_kornia_runs_it() -> None:
    """To Kornia it is no augmentation: it takes no parameters."""
    chain = K.AugmentationSequential(
        nn.Sequential(K.RandomHorizontalFlip(p=1.0)), K.RandomRotation(0.0, p=1.0)
    )
    expected = IMAGE.flip(-1)
    torch.testing.assert_close(fuse(chain)(IMAGE), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(in_loader(chain), expected, rtol=0, atol=1e-4)


class Half(K.IntensityAugmentationBase2D):  # type: ignore[misc]
    """Changes the size, and does not say so."""

    def apply_transform(self, input: Tensor, *rest: object, **more: object) -> Tensor:
        return input[..., ::2, ::2]


@pytest.mark.parametrize("before", [Half(p=1.0), nn.AvgPool2d(2)])
def test_the_next_crop_lies_inside_the_image_that_reaches_it(before: nn.Module) -> None:
    """A window drawn for the size of before would read memory of others."""
    chain = K.ImageSequential(K.RandomHorizontalFlip(), before, K.RandomCrop((8, 8)))
    fused = fuse(chain)
    image = torch.ones(64, 3, 20, 24)
    generator = torch.Generator().manual_seed(3)
    out = fused(image, generator=generator)
    assert out.shape == (64, 3, 8, 8)
    assert (out == 1).all()
    assert in_loader(chain).shape == (4, 3, 8, 8)
    with pytest.raises(TransformError, match=r"\(10, 12\).* drawn for \(20, 24\)"):
        fused(image, params=fused.sample(image.shape))


def test_padding_by_kornia_makes_room_for_the_next_crop() -> None:
    chain = nn.Sequential(K.PadTo((30, 30)), K.RandomCrop((28, 28)))
    assert fuse(chain)(IMAGE).shape == (4, 3, 28, 28)


def test_a_member_that_cannot_draw_in_advance_repeats_its_draw() -> None:
    chain = K.ImageSequential(K.RandomHorizontalFlip(), nn.Dropout(0.5))
    fused = fuse(chain)
    one, two = (fused(IMAGE, generator=torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(one, two)
    params = fused.sample(IMAGE.shape)
    assert torch.equal(fused(IMAGE, params=params), fused(IMAGE, params=params))


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0), data_keys=None), 0),
        (
            K.AugmentationSequential(
                K.RandomHorizontalFlip(p=1.0), data_keys=["input", "input"]
            ),
            2,
        ),
    ],
)
def test_what_kornia_takes_besides_one_image_is_taken(
    module: nn.Module, inputs: int
) -> None:
    fused = fuse(module, dtype=torch.float16)
    if inputs:
        first, second = fused(IMAGE, IMAGE + 1)
        assert torch.equal(second, (IMAGE + 1).flip(-1).half())
    else:
        first = fused({"image": IMAGE})["image"]
    assert torch.equal(first, IMAGE.flip(-1).half())


def test_videos_are_kornias() -> None:
    chain = K.VideoSequential(K.RandomHorizontalFlip(p=1.0), data_format="BCTHW")
    video = torch.rand(2, 3, 4, 8, 8)
    assert torch.equal(fuse(chain)(video), video.flip(-1))


def test_ranks_of_images() -> None:
    fused = fuse(nn.Sequential(K.RandomHorizontalFlip(p=1.0)))
    assert torch.equal(fused(IMAGE[0, 0]), IMAGE[0, 0].flip(-1))
    for wrong in (IMAGE[None], IMAGE[0, 0, 0], [IMAGE], IMAGE.numpy(), None):
        with pytest.raises(BatchError, match=r"pass a tensor \(B, C, H, W\)"):
            fused(wrong)


def test_a_module_that_has_seen_gradients_can_be_fused() -> None:
    chain = K.AugmentationSequential(K.RandomRotation(30.0, p=1.0), K.ColorJitter(0.1))
    chain(IMAGE.clone().requires_grad_())
    assert fuse(chain)(IMAGE).shape == IMAGE.shape


def test_no_gradients_on_any_device() -> None:
    fused = fuse(K.RandomRotation(30.0, p=1.0))
    assert not fused(IMAGE.clone().requires_grad_()).requires_grad


def test_a_model_that_holds_a_fused_chain_can_be_saved() -> None:
    """Torch saves in a protocol of pickle's that cannot name a memory format."""
    model = nn.ModuleDict({"a": fuse(K.CenterCrop((8, 8))), "b": nn.Linear(2, 2)})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded["a"](IMAGE), model["a"](IMAGE))
    assert set(model.state_dict()) == {"b.weight", "b.bias"}


def test_a_model_that_holds_a_fused_chain_can_be_compiled() -> None:
    fused = fuse(nn.Sequential(K.RandomCrop((8, 8)), K.Normalize(0.5, 0.2)))
    compiled = torch.compile(lambda x: fused(x) * 2, backend="eager")
    for batch in (4, 3):
        assert compiled(IMAGE[:batch]).shape == (batch, 3, 8, 8)


@pytest.mark.parametrize(
    "normalize",
    [
        K.Normalize(0.5, 0.0),
        K.Normalize(torch.tensor([0.1, 0.2, 0.3]), 0.5),
    ],
)
def test_odd_statistics_give_what_kornia_gives(normalize: nn.Module) -> None:
    torch.testing.assert_close(fuse(normalize)(IMAGE), normalize(IMAGE), equal_nan=True)


def test_parameters_for_other_images_are_refused() -> None:
    chain = K.AugmentationSequential(K.RandomCrop((8, 8)), K.RandomRotation(3.0))
    for batch in (1, 2):
        params = chain.forward_parameters(torch.Size((batch, 3, 20, 24)))
        with pytest.raises(TransformError, match=f"for {batch} images, these are 4"):
            fuse(chain)(IMAGE, params=params)


@pytest.mark.parametrize("make", [K.RandomCrop, K.RandomResizedCrop])
def test_windows_beyond_the_image_are_refused(make: type[nn.Module]) -> None:
    crop = make((8, 8))
    params = crop.forward_parameters(torch.Size((4, 3, 20, 24)))
    params["src"] = params["src"] + 40
    with pytest.raises(TransformError, match="outside the image, which is 20 x 24"):
        fuse(crop)(IMAGE, params=params)


@pytest.mark.parametrize(
    "member",
    [
        K.RandomCrop((30, 44), padding=30, padding_mode="reflect"),
        K.RandomGaussianBlur((15, 15), (1.0, 2.0), "reflect"),
        K.RandomGaussianBlur((3, 15), (1.0, 2.0), "circular"),
    ],
)
def test_a_margin_that_would_be_folded_twice_is_refused(member: nn.Module) -> None:
    """As torch does; the kernel would make up something."""
    image = torch.rand(2, 3, 6, 6)
    with pytest.raises((RuntimeError, ValueError)):
        member(image)
    with pytest.raises(ImageSizeError, match=r"pixels .* around an image"):
        fuse(member)(image)
    largest = K.RandomGaussianBlur((15, 15), (1.0, 2.0), "circular", p=1.0)
    assert fuse(largest)(torch.rand(2, 3, 7, 7)).shape == (2, 3, 7, 7)


def test_threads_do_not_mix_up_what_kornia_moves() -> None:
    fused = fuse(
        K.AugmentationSequential(
            K.RandomPerspective(0.5, p=1.0), data_keys=["input", "keypoints"]
        )
    )
    points = torch.rand(4, 3, 2) * 10
    draws = [fused.sample(IMAGE.shape) for _ in range(4)]
    expected = [fused(IMAGE, points, params=draw)[1] for draw in draws]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(60):
            if not torch.equal(
                fused(IMAGE, points, params=draws[index])[1], expected[index]
            ):
                wrong.append(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []


def test_a_function_of_a_loader_may_call_what_another_loaders_transform_is() -> None:
    """One seeds and then runs Kornia, the other runs Kornia, which then seeds."""
    videos = [torch.rand(1, 2, 3, 4, 4) for _ in range(200)]
    module = K.VideoSequential(K.ColorJiggle(p=1.0), data_format="BTCHW")
    assert fuse(module).runs_as_is
    inner = StreamPrefetchLoader(videos, fuse(module), device="cpu")
    other = fuse(module)
    outer = StreamPrefetchLoader(
        inner, lambda x: other(x), device="cpu", background=True
    )
    # A daemon: threads that wait for each other never end.
    counts: list[int] = []
    thread = Thread(target=lambda: counts.append(len(list(outer))), daemon=True)
    thread.start()
    thread.join(30.0)
    assert counts == [200], "the two threads wait for each other"


def test_the_summary_does_not_claim_what_does_not_run_fused() -> None:
    labelled = K.AugmentationSequential(
        K.RandomPerspective(), K.RandomHorizontalFlip(), data_keys=["input", "mask"]
    )
    for module in (labelled, K.RandomPerspective(), K.Resize(9, antialias=True)):
        for transform in (module, fuse(module)):
            loader = StreamPrefetchLoader([IMAGE], transform=transform)
            for text in (loader.stats().transform, loader.report(), repr(loader)):
                assert "(not fused, Kornia: " in text, text


def test_the_report_names_members_between_fused_ones() -> None:
    chain = nn.Sequential(K.RandomHorizontalFlip(), K.RandomPerspective())
    for transform in (chain, fuse(chain)):
        loader = StreamPrefetchLoader([IMAGE], transform=transform)
        for text in (loader.stats().transform, loader.report(), repr(loader)):
            assert "fused, except RandomPerspective: there is no fused step" in text
