"""Jitter, grayscale and erasing: every order, odd pixels, channels, and launches."""

from __future__ import annotations

from collections.abc import Callable

import kornia.augmentation as K
import pytest
import torch
from chains import MEAN, STD, image_of, plan_of
from cpu_kernel import run_plan
from torch import Tensor, nn

from gpuprefetch.augment.fusing import fuse
from gpuprefetch.augment.operator import to_unit_range
from gpuprefetch.augment.plan import Plan
from gpuprefetch.augment.plan_kernel import PlanKernel
from gpuprefetch.augment.reference import apply_plan
from gpuprefetch.augment.sample import Sampler
from gpuprefetch.augment.values import Jitter
from gpuprefetch.augment.variant import Tile
from gpuprefetch.errors import TransformError

JITTERS: dict[str, Callable[[], nn.Module]] = {
    "jitter": lambda: K.ColorJitter(0.5, (0.4, 2.0), (0.0, 2.0), 0.5),
    "jiggle": lambda: K.ColorJiggle(0.5, (0.4, 2.0), (0.0, 2.0), 0.5),
}
jitters = pytest.mark.parametrize("make", JITTERS.values(), ids=JITTERS)


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def three_ways(module: nn.Module, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kornia, the plan in torch operations, the kernel; the same numbers for all."""
    fused = fuse(module)
    params = fused.sample(image.shape)
    drawn = fused.to_kornia(params)
    plan = plan_of(module)
    pack = params.flat.view(image.shape[0], plan.width)
    return (
        module(to_unit_range(image), params=drawn),
        fused(image, params=params),
        run_plan(plan, image, pack),
    )


def odd_pixels() -> Tensor:
    """Black, white, grey, almost grey, almost black, pure colors, and ties of two.

    The hue of a grey pixel is arbitrary, and that of an almost grey one is decided by
    rounding. Neither may show: a pixel moves by no more than its channels differ.
    """
    levels = torch.tensor([0.0, 1e-8, 1e-6, 1e-3, 0.25, 0.5, 1.0 - 1e-6, 1.0])
    grid = torch.stack(torch.meshgrid(levels, levels, levels, indexing="ij"))
    noise = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    grey = torch.linspace(0, 1, 64).expand(3, 8, 64)
    almost = (grey + noise * 1e-7).clamp(0, 1)
    return torch.cat((grid.view(3, 8, 64), grey, almost), 1)[None]


@jitters
def test_every_order_is_kornias(make: Callable[[], nn.Module]) -> None:
    """Most of the 24 are different functions, so that a wrong one would be seen."""
    module, image = make(), image_of((1, 3, 9, 14), torch.float32)
    fused, plan = fuse(module), plan_of(module)
    params = fused.sample(image.shape)
    pack = params.flat.view(1, -1).repeat(24, 1)
    pack[:, plan.layout[0]["order"]] = torch.arange(24.0)
    images = image.repeat(24, 1, 1, 1)
    ours, kernel = apply_plan(plan, images, pack), run_plan(plan, images, pack)
    drawn = fused.to_kornia(params)
    for index, order in enumerate(Jitter.ORDERS):
        expected = module(image, params={**drawn, "order": torch.tensor(order)})
        assert_close(ours[index : index + 1], expected)
        assert_close(kernel[index : index + 1], expected)
    differences = torch.cdist(ours.flatten(1), ours.flatten(1)) + torch.eye(24)
    assert (differences > 1e-3).float().mean() > 0.5


@jitters
def test_grey_and_almost_grey_pixels_do_not_flip(make: Callable[[], nn.Module]) -> None:
    image = odd_pixels()
    for _ in range(6):
        expected, ours, kernel = three_ways(make(), image)
        assert_close(ours, expected)
        assert_close(kernel, expected)


@pytest.mark.parametrize("turns", [-0.5, -1 / 3, -1e-7, 0.0, 1e-7, 1 / 6, 0.5])
def test_hues_at_the_corners_of_the_hexagon(turns: float) -> None:
    module = K.ColorJitter(hue=(turns, turns + 1e-8), order=(3,))
    expected, ours, kernel = three_ways(module, odd_pixels())
    assert_close(ours, expected)
    assert_close(kernel, expected)


@jitters
def test_values_out_of_range_are_limited_as_kornia_does(
    make: Callable[[], nn.Module],
) -> None:
    image = image_of((4, 3, 9, 14), torch.float32) * 3 - 1
    expected, ours, kernel = three_ways(make(), image)
    assert_close(ours, expected)
    assert_close(kernel, expected)
    gray = K.RandomGrayscale(p=0.5)
    expected, ours, kernel = three_ways(gray, image)
    assert expected.min() < -0.5
    assert_close(ours, expected)
    assert_close(kernel, expected)


@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12])
def test_other_numbers_of_channels(channels: int) -> None:
    """Brightness, contrast and erasing take any; a saturation leaves grey alone."""
    image = image_of((3, channels, 37, 70), torch.uint8)
    saturation = 0.5 if channels == 1 else 0.0
    for module in (
        K.ColorJitter(0.3, 0.5, saturation),
        K.ColorJiggle(0.3, 0.5),
        K.RandomErasing(p=1.0),
    ):
        expected, ours, kernel = three_ways(module, image)
        assert_close(ours, expected)
        assert_close(kernel, expected)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_grayscale_takes_other_channels(channels: int) -> None:
    image = image_of((3, channels, 37, 70), torch.uint8)
    for weights in (None, torch.rand(channels)):
        expected, ours, kernel = three_ways(K.RandomGrayscale(weights, p=0.5), image)
        assert_close(ours, expected)
        assert_close(kernel, expected)


def test_grayscale_of_many_channels_is_left_to_torch() -> None:
    module, image = K.RandomGrayscale(p=1.0), image_of((2, 5, 9, 9), torch.float32)
    assert "at most 4 of the 5 channels" in PlanKernel(plan_of(module)).why_not(image)
    fused = fuse(module)
    params = fused.sample(image.shape)
    expected = module(image, params=fused.to_kornia(params))
    assert_close(fused(image, params=params), expected)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (K.ColorJitter(hue=0.1), r"ColorJitter changes saturation or hue.* 4 channels"),
        (K.ColorJiggle(saturation=0.1), r"ColorJiggle changes .* 4 channels"),
        (K.RandomGrayscale(torch.ones(3), p=1.0), r"3 rgb_weights .* 4 channels"),
    ],
)
def test_channels_that_do_not_fit_are_named(module: nn.Module, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        fuse(module)(torch.rand(2, 4, 8, 8))
    with pytest.raises(TransformError, match=message):
        run_plan(plan_of(module), torch.rand(2, 4, 8, 8), torch.zeros(2, 9))


@pytest.mark.parametrize(
    "tile", [Tile(x=32, y=32, threads=96), Tile(x=64, y=64, threads=512)], ids=str
)
def test_the_mean_does_not_depend_on_tiles(tile: Tile) -> None:
    """Many tiles, and tiles that hang over the edge."""
    plan = plan_of(K.Resize((150, 213)), K.ColorJitter(contrast=(0.0, 0.1)))
    image = image_of((2, 3, 37, 53), torch.uint8)
    pack = Sampler(plan)(2, (37, 53), None)
    expected = apply_plan(plan, to_unit_range(image), pack)
    assert_close(run_plan(plan, image, pack, tile=tile), expected)


def test_a_contrast_of_0_is_the_mean() -> None:
    """Of the image as it is there: cropped, and black where it was turned away."""
    plan = plan_of(
        K.RandomCrop((20, 30)),
        K.RandomRotation((40.0, 50.0), p=1.0),
        K.ColorJitter(contrast=(0.0, 1e-9)),
        K.RandomGaussianBlur((3, 3), (1.0, 2.0), p=1.0),
    )
    image = image_of((3, 3, 37, 53), torch.uint8)
    pack = Sampler(plan)(3, (37, 53), None)
    kernel = run_plan(plan, image, pack)
    assert kernel.flatten(1).std(1).max() < 1e-4
    warped = apply_plan(Plan(plan.steps[:2]), to_unit_range(image), pack)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    assert_close(kernel[:, 0, 0, 0], (warped * weights).sum(1).mean((1, 2)))


# How it is run #


def launches_of(*modules: nn.Module) -> int:
    fused = fuse(nn.Sequential(*modules))
    assert fused.is_fused
    return fused.num_launches


def test_launches_are_as_few_as_promised() -> None:
    crop, resize = K.RandomCrop((20, 30)), K.Resize((40, 40))
    turn, blur = K.RandomRotation(9.0), K.RandomGaussianBlur((3, 3), (0.1, 2.0))
    jitter, normalize = K.ColorJitter(0.2, 0.2, 0.2, 0.1), K.Normalize(MEAN, STD)
    gray, erasing = K.RandomGrayscale(), K.RandomErasing()
    assert launches_of(crop, resize, turn, jitter, blur, normalize) == 2
    assert launches_of(crop, resize, turn, blur, jitter, normalize) == 3
    assert launches_of(jitter, crop, resize, turn, blur, normalize) == 3
    assert launches_of(crop, resize, jitter, turn, blur, normalize) == 3
    assert launches_of(crop, jitter, gray, blur, erasing, normalize) == 2
    jiggle = K.ColorJiggle(0.2, 0.2, 0.2, 0.1)
    assert launches_of(crop, resize, turn, jiggle, gray, blur, normalize, erasing) == 1
    assert launches_of(crop, K.ColorJitter(0.2, 0.0, 0.2, 0.1), normalize) == 1


def test_the_repr_says_why_there_are_more_launches() -> None:
    chain = nn.Sequential(
        K.RandomGaussianBlur((3, 3), (0.1, 2.0)),
        K.ColorJitter(contrast=0.2),
        K.ColorJitter(contrast=0.2),
        K.RandomHorizontalFlip(),
        K.RandomGrayscale(),
    )
    text = repr(fuse(chain))
    assert "launches=6" in text
    assert "(1) ColorJitter: fused, in a new launch, since it needs all chan" in text
    assert "of a blurred pixel, after a launch for the mean of each image" in text
    assert "(2) ColorJitter: fused, in a new launch, since its contrast needs a" in text
    assert "(3) RandomHorizontalFlip: fused, in a new launch, since it moves" in text
    assert "(4) RandomGrayscale: fused\n" in text


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            K.ColorJiggle(contrast=torch.tensor([0.5, 1.5]).half()),
            "contrast is a tensor of float16, not of float32",
        ),
        (
            K.RandomGrayscale(torch.ones(3, requires_grad=True)),
            "rgb_weights is learnt",
        ),
        # p was meant; Kornia says so when it is called.
        (K.RandomGrayscale(0.2), "rgb_weights is a float, not a tensor"),
        (
            K.RandomErasing(torch.tensor([0.1, 0.2]).bfloat16()),
            "scale is a tensor of bfloat16",
        ),
    ],
)
def test_odd_tensors_stay_with_kornia(module: nn.Module, reason: str) -> None:
    assert f"as it is: {reason}" in repr(fuse(module))


def test_ranges_may_be_tensors() -> None:
    image = image_of((4, 3, 9, 14), torch.float32)
    for module in (
        K.ColorJitter(torch.tensor(0.4), torch.tensor([0.5, 1.5])),
        K.RandomErasing(torch.tensor([0.1, 0.2]), torch.tensor([0.5, 2.0]), p=1.0),
    ):
        expected, ours, kernel = three_ways(module, image)
        assert_close(ours, expected)
        assert_close(kernel, expected)


# Numbers #


def test_orders_are_drawn_alike_and_once_per_batch() -> None:
    plan = plan_of(K.ColorJitter(0.2, 0.2))
    draw, column = Sampler(plan), plan.layout[0]["order"]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([draw(2, (8, 8), generator)[:, column] for _ in range(4800)])
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    counts = torch.bincount(drawn[:, 0].long(), minlength=24)
    assert len(counts) == 24
    # 200 each, give or take 5 standard deviations.
    assert (counts - 200).abs().max() < 70


@pytest.mark.parametrize("ratio", [(0.3, 3.3), (0.2, 0.8), (0.0, 0.0), (1.0, 4.0)])
def test_rectangles_lie_within_the_image(ratio: tuple[float, float]) -> None:
    plan = plan_of(K.RandomErasing((0.0, 3.0), ratio, p=1.0))
    pack = Sampler(plan)(4000, (21, 40), torch.Generator().manual_seed(0))
    left, top, width, height = (
        pack[:, plan.layout[0][name]] for name in ("left", "top", "width", "height")
    )
    assert (torch.minimum(left, top) >= 0).all()
    assert (torch.minimum(width, height) >= 1).all()
    assert (left + width <= 40).all()
    assert (top + height <= 21).all()


def test_kornias_own_draw_of_colors_can_be_replayed() -> None:
    chain = K.AugmentationSequential(
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.3, 0.3, 0.3, 0.2, p=0.7),
        K.ColorJiggle(0.3, 0.3, 0.3, 0.2, p=0.7),
        K.RandomGrayscale(p=0.4),
        K.RandomErasing(value=0.3),
    )
    image = image_of((6, 3, 20, 30), torch.float32)
    for _ in range(4):
        expected = chain(image)
        assert_close(fuse(chain)(image, params=chain._params), expected)


def test_an_order_that_is_none_is_refused() -> None:
    fused = fuse(K.ColorJitter(0.3, 0.3))
    params = fused.to_kornia(fused.sample((2, 3, 8, 8)))
    params["order"] = torch.tensor([0, 0, 1, 2])
    with pytest.raises(TransformError, match="ColorJitter's own"):
        fused(torch.rand(2, 3, 8, 8), params=params)
