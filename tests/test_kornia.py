"""Does any Kornia module passed as ``transform`` just work, and as Kornia itself would?

The oracle is Kornia called directly on the scaled images, with the numbers that the
loader draws for that batch. What fuses draws from a generator of its own: those numbers
are handed to Kornia as ``params``. For anything else torch's generator is put where the
loader has it: a plain function as ``transform`` tells that state.
"""

import copy
import itertools
from typing import Any

import kornia
import kornia.augmentation as K
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpuprefetch import (
    BatchError,
    DependencyError,
    ImageSizeError,
    StreamPrefetchLoader,
    TransformError,
)
from gpuprefetch.augment.eligible import why_whole
from gpuprefetch.augment.fused import fuse
from gpuprefetch.seeding import BatchSeeds, generators_seeded
from tests.children import run_script
from tests.sources import Images, images

pytestmark = pytest.mark.timeout(60)

crop = K.RandomCrop((12, 10))
rotation = K.RandomRotation(45.0, p=1.0)
# Below a sigma of about 0.2 the kernel is a single one: equal for any such draw.
blur = K.RandomGaussianBlur((5, 5), (0.5, 2.0), p=1.0)


def chain() -> nn.Sequential:
    return nn.Sequential(
        K.RandomCrop((12, 10)),
        K.Resize((16, 16)),
        K.RandomRotation(45.0, p=0.5),
        K.RandomGaussianBlur((5, 5), (0.1, 2.0), p=0.5),
        K.Normalize(torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])),
    )


def sequential(*keys: str, **settings: Any) -> K.AugmentationSequential:
    return K.AugmentationSequential(
        K.RandomCrop((12, 10)),
        K.RandomHorizontalFlip(p=0.5),
        K.RandomRotation(30.0, p=1.0),
        data_keys=list(keys),
        **settings,
    )


def first(batch: Any, transform: Any, **settings: Any) -> Any:
    """Give the first batch of a loader over one batch, with its seed fixed."""
    settings = {"device": "cpu", "seed": 5} | settings
    return next(iter(StreamPrefetchLoader([batch], transform, **settings)))


# Fused members resample in another order of operations; a Normalize multiplies that.
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 5e-4}


def as_kornia(module: nn.Module, *inputs: Any, device: torch.device) -> Any:
    """Call a copy of a module with the numbers of the loader's first batch."""
    if why_whole(module):
        return with_generator_states(module, *inputs, device=device)
    seed = BatchSeeds.for_epoch(5, 0).of_batch(0)
    fused, shape = fuse(module), inputs[0].shape
    with generators_seeded(seed, device):
        generator = torch.Generator().manual_seed(seed) if fused.is_fused else None
        params = fused.to_kornia(fused.sample(shape, generator))
    return replay(copy.deepcopy(module), params, *to_device(inputs, device))


def replay(module: nn.Module, params: Any, *inputs: Any) -> Any:
    """Call Kornia with parameters; a plain Sequential does not take them."""
    if type(module) is not nn.Sequential:
        return module(*inputs, params=params)
    (x,) = inputs
    for member, one in zip(module, params, strict=True):
        x = replay(member, one, x)
    return x


def with_generator_states(module: nn.Module, *inputs: Any, device: torch.device) -> Any:
    """Call a copy of a module directly, with torch's generators as a loader has them.

    Some members draw on the device, so its generator is set as well.
    """
    states: list[torch.Tensor] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        states.extend(generator.get_state() for generator in generators)
        return x

    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[0])
    first(torch.zeros(1), spy, device=device)
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    try:
        return copy.deepcopy(module)(*to_device(inputs, device))
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def to_device(values: Any, device: torch.device) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to(device)
    return [to_device(value, device) for value in values]


# As Kornia itself #


@pytest.mark.parametrize(
    "module",
    [
        crop,
        rotation,
        blur,
        K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2), p=1.0),
        K.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=1.0),
        K.RandomErasing(p=1.0),
        K.RandomResizedCrop((9, 9)),
        chain(),
        nn.Sequential(nn.Sequential(crop, rotation), blur),
        K.ImageSequential(crop, blur),
        K.ImageSequential(crop, blur, random_apply=1),
        sequential("input"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_values_are_those_of_kornia_with_the_same_numbers(
    device: torch.device, module: nn.Module
) -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    expected = as_kornia(module, batch, device=device)
    torch.testing.assert_close(first(batch, module, device=device), expected, **CLOSE)


def test_image_mask_boxes_and_keypoints_are_those_of_kornia(
    device: torch.device,
) -> None:
    batch = labelled_batch(6)
    module = sequential("input", "mask", "bbox", "keypoints")
    expected = as_kornia(module, *batch[:4], device=device)
    out = first((*batch, "rest"), module, inputs=(0, 1, 2, 3), device=device)
    assert out[4:] == (*batch[4:], "rest")
    for came, wanted in zip(out[:4], expected, strict=True):
        torch.testing.assert_close(came, wanted, **CLOSE)


def labelled_batch(size: int) -> tuple[torch.Tensor, ...]:
    """Build images, masks, boxes and keypoints that mark the same spot."""
    image, mask = torch.zeros(size, 3, 16, 16), torch.zeros(size, 1, 16, 16)
    image[..., 6:10, 7:11] = 1
    mask[..., 6:10, 7:11] = 1
    corners = torch.tensor([[7.0, 6.0], [10.0, 6.0], [10.0, 9.0], [7.0, 9.0]])
    boxes = corners.repeat(size, 1, 1, 1)
    points = torch.tensor([[[8.5, 7.5]]]).repeat(size, 1, 1)
    return image, mask, boxes, points


def test_labels_follow_their_own_sample(device: torch.device) -> None:
    """Keypoint, middle of the box and middle of the mask mark one spot, per sample."""
    module = sequential("input", "mask", "bbox", "keypoints")
    out = first(labelled_batch(8), module, inputs=(0, 1, 2, 3), device=device)
    image, mask, boxes, points = (part.cpu() for part in out)
    assert len({tuple(point.flatten().tolist()) for point in points}) > 1
    torch.testing.assert_close(boxes.mean(2), points, atol=0.01, rtol=0)
    seen = 0
    for sample in range(8):
        rows, columns = mask[sample, 0].nonzero(as_tuple=True)
        on_border = not len(rows) or any(
            edge in (rows.min(), rows.max()) for edge in (0, 11)
        )
        if on_border or columns.min() == 0 or columns.max() == 9:
            continue
        seen += 1
        middle = torch.stack([columns.float().mean(), rows.float().mean()])
        torch.testing.assert_close(middle, points[sample, 0], atol=0.75, rtol=0)
        assert float(image[sample, 0, rows, columns].mean()) > 0.6
    assert seen


def test_a_dict_batch_takes_its_keys_through_inputs(device: torch.device) -> None:
    image, mask, *_ = labelled_batch(4)
    batch = {"name": ["a"] * 4, "seg": mask, "img": image}
    out = first(
        batch, sequential("input", "mask"), inputs=("img", "seg"), device=device
    )
    assert list(out) == ["name", "seg", "img"]
    assert out["name"] == ["a"] * 4
    assert out["img"].shape == (4, 3, 12, 10)
    assert out["seg"].shape == (4, 1, 12, 10)
    left, right = first(
        (image, mask), sequential("input", "mask"), inputs=(0, 1), device=device
    )
    assert torch.equal(out["img"], left)
    assert torch.equal(out["seg"], right)


# One draw per sample #


@pytest.mark.parametrize("module", [crop, rotation, blur], ids=["crop", "turn", "blur"])
def test_each_sample_has_its_own_draw_and_each_batch_its_own(
    device: torch.device, module: nn.Module
) -> None:
    image = torch.rand(1, 3, 20, 24).repeat(8, 1, 1, 1)
    loader = StreamPrefetchLoader([image] * 3, module, device=device, seed=1)
    batches = list(loader)
    for batch in batches:
        assert len(torch.unique(batch, dim=0)) == 8
    for left, right in itertools.combinations(batches, 2):
        assert not torch.equal(left, right)


def test_same_on_batch_is_one_draw_for_the_batch(device: torch.device) -> None:
    image = torch.rand(1, 3, 16, 16).repeat(4, 1, 1, 1)
    turn = K.RandomRotation(45.0, p=1.0, same_on_batch=True)
    assert len(torch.unique(first(image, turn, device=device), dim=0)) == 1


# Types #


@pytest.mark.parametrize(
    ("dtype", "full"), [(torch.uint8, 255), (torch.uint16, 65535)], ids=str
)
def test_integer_images_are_scaled_to_one(
    device: torch.device, dtype: torch.dtype, full: int
) -> None:
    x = torch.tensor([0, full // 3, full]).view(1, 1, 1, 3).expand(2, 3, 6, 3)
    out = first(x.to(dtype), K.RandomHorizontalFlip(p=0.0), device=device)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), (x / full).float())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_float_images_keep_type_and_range(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.full((2, 3, 8, 8), 200.0, dtype=dtype)
    out = first(x, K.RandomHorizontalFlip(p=1.0), device=device)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {200.0}
    chained = first(torch.rand(2, 3, 20, 20).to(dtype), nn.Sequential(crop, rotation))
    assert chained.dtype == dtype


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.int32, torch.int64, torch.bool, torch.int8], ids=str
)
def test_other_image_types_are_refused_by_name(
    device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 3, 20, 20, dtype=dtype)
    with pytest.raises(
        BatchError, match=rf"{dtype}.*Accepted are uint8.*uint16.*float"
    ):
        first(x, crop, device=device)


def test_masks_and_labels_are_not_scaled(device: torch.device) -> None:
    x = torch.full((2, 3, 16, 16), 255, dtype=torch.uint8)
    mask = torch.full((2, 1, 16, 16), 200, dtype=torch.uint8)
    batch = (x, mask, torch.tensor([7, 8]))
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"]
    )
    image, labels, classes = first(batch, module, inputs=(0, 1), device=device)
    assert set(image.unique().tolist()) == {1.0}
    assert labels.dtype == torch.uint8
    assert set(labels.unique().tolist()) == {200}
    assert classes.tolist() == [7, 8]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32], ids=str
)
@pytest.mark.parametrize("shape", [(4, 16, 16), (4, 1, 16, 16)])
def test_masks_keep_rank_type_and_values(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mask = torch.zeros(shape, dtype=dtype)
    mask[..., 4:12, 4:12] = 1
    module = sequential("input", "mask")
    _, out = first(
        (torch.rand(4, 3, 16, 16), mask), module, inputs=(0, 1), device=device
    )
    assert out.shape == (*shape[:-2], 12, 10)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {0, 1}


def test_masks_of_large_labels_keep_every_value(device: torch.device) -> None:
    """The largest odd label that Kornia takes: half floats would round it."""
    label = 2**24 - 1
    mask = torch.full((2, 16, 16), label, dtype=torch.int64)
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"]
    )
    _, out = first(
        (torch.rand(2, 3, 16, 16), mask), module, inputs=(0, 1), device=device
    )
    assert out.unique().tolist() == [label]


# Ranks, channels, sizes #


@pytest.mark.parametrize("module", [crop, chain()], ids=["one", "chain"])
def test_an_image_without_batch_comes_back_without_one(
    device: torch.device, module: nn.Module
) -> None:
    out = first(torch.rand(3, 20, 24), module, device=device)
    assert out.shape == (3, *((12, 10) if module is crop else (16, 16)))


def test_image_and_mask_without_batch_come_back_without_one(
    device: torch.device,
) -> None:
    batch = (torch.rand(3, 16, 16), torch.ones(16, 16, dtype=torch.int64))
    image, mask = first(
        batch, sequential("input", "mask"), inputs=(0, 1), device=device
    )
    assert image.shape == (3, 12, 10)
    assert mask.shape == (12, 10)
    assert mask.dtype == torch.int64


@pytest.mark.parametrize("channels", [1, 3, 4, 12])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_channels_and_batch_sizes(
    device: torch.device, channels: int, size: int
) -> None:
    x = torch.rand(size, channels, 20, 20)
    module = nn.Sequential(crop, rotation, blur)
    assert first(x, module, device=device).shape == (size, channels, 12, 10)


def test_an_empty_batch_is_as_kornia_has_it(device: torch.device) -> None:
    x = torch.rand(0, 3, 20, 20)
    try:
        expected = copy.deepcopy(rotation)(x)
    except Exception as error:
        with pytest.raises(type(error)):
            first(x, rotation, device=device)
    else:
        assert first(x, rotation, device=device).shape == expected.shape


def test_channels_last_is_accepted(device: torch.device) -> None:
    x = torch.rand(4, 3, 20, 20)
    expected = first(x, chain(), device=device)
    out = first(x.to(memory_format=torch.channels_last), chain(), device=device)
    torch.testing.assert_close(out, expected)


def test_a_last_smaller_batch_and_other_sizes_pass(device: torch.device) -> None:
    source = [torch.rand(n, 3, s, s) for n, s in ((4, 20), (4, 31), (1, 12), (3, 20))]
    loader = StreamPrefetchLoader(source, chain(), device=device)
    assert [len(x) for x in loader] == [4, 4, 1, 3]


@pytest.mark.parametrize(
    "module",
    [
        K.RandomCrop((24, 10)),
        K.RandomCrop((10, 24)),
        nn.Sequential(blur, K.RandomCrop((24, 24))),
        K.AugmentationSequential(K.RandomCrop((24, 24)), data_keys=["input"]),
        K.CenterCrop(24),
    ],
    ids=["high", "wide", "chain", "container", "center"],
)
def test_a_crop_beyond_the_image_names_both_sizes(
    device: torch.device, module: nn.Module
) -> None:
    with pytest.raises(ImageSizeError, match=r"24.*larger than.*20.*16.*smaller crop"):
        first(torch.rand(2, 3, 20, 16), module, device=device)


def test_a_crop_after_enlarging_fits(device: torch.device) -> None:
    module = nn.Sequential(K.Resize((40, 40)), K.RandomCrop((24, 24)))
    assert first(torch.rand(2, 3, 9, 9), module, device=device).shape[-1] == 24
    padded = K.RandomCrop((12, 12), padding=4)
    assert first(torch.rand(2, 3, 8, 8), padded, device=device).shape[-1] == 12


def test_a_crop_that_was_larger_than_one_batch_serves_the_next(
    device: torch.device,
) -> None:
    module = K.RandomCrop((12, 12))
    with pytest.raises(ImageSizeError):
        first(torch.rand(1, 3, 8, 8), module, device=device)
    assert first(torch.rand(1, 3, 16, 16), module, device=device).shape[-1] == 12


# Taken over or not #


class MyFlip(K.RandomHorizontalFlip):
    """A user's own augmentation in Kornia style."""


class MyChain(nn.Sequential):
    """A user's own container that happens to hold Kornia modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.uint8, "this class wants the batch as it is"
        return super().forward(x / 255)


def test_a_subclass_of_a_kornia_class_is_taken_over(device: torch.device) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    assert first(x, MyFlip(p=1.0), device=device).unique().tolist() == [1.0]
    chained = nn.Sequential(MyFlip(p=1.0), K.RandomVerticalFlip())
    assert first(x, chained, device=device).unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Identity()),
        nn.Sequential(K.RandomHorizontalFlip(p=0.0), nn.Identity()),
        nn.Sequential(),
        nn.Identity(),
        lambda x: x,
    ],
    ids=["identity", "mixed", "empty", "module", "function"],
)
def test_other_callables_get_the_batch_as_it_is(
    device: torch.device, module: Any
) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    if isinstance(module, nn.Sequential) and len(module) == 2:
        # Not a chain of Kornia modules alone, so nothing is scaled for it.
        with pytest.raises(TypeError, match="uint8"):
            first(x, module, device=device)
    else:
        out = first(x, module, device=device)
        assert out.dtype == torch.uint8
        assert torch.equal(out.cpu(), x)


def test_the_users_own_container_gets_the_batch_as_it_is(device: torch.device) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    out = first(x, MyChain(K.RandomHorizontalFlip(p=1.0)), device=device)
    assert out.unique().tolist() == [1.0]


def test_a_function_around_kornia_is_not_taken_over(device: torch.device) -> None:
    x = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8"):
        first(x, lambda image: rotation(image), device=device)


def test_torchvision_transforms_work(device: torch.device) -> None:
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomCrop(8), v2.ToDtype(torch.float32, scale=True), v2.RandomGrayscale()]
    )
    x = torch.full((2, 3, 16, 16), 255, dtype=torch.uint8)
    out = first(x, transform, device=device)
    assert out.shape == (2, 3, 8, 8)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), torch.ones(2, 3, 8, 8))


# The user's module #


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Note where a module's tensors are and what it remembers."""
    state: dict[str, Any] = {}
    for name, member in module.named_modules():
        for key, value in vars(member).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            if isinstance(value, torch.Tensor):
                value = (value.device, value.clone())
            state[f"{name}.{key}"] = repr(value)
    return state


@pytest.mark.parametrize("module", [crop, chain(), sequential("input")])
def test_the_users_module_is_neither_changed_nor_moved(
    device: torch.device, module: nn.Module
) -> None:
    module = copy.deepcopy(module)
    before = tensors_of(module)
    list(StreamPrefetchLoader(images(2, (2, 3, 20, 20)), module, device=device))
    assert tensors_of(module) == before


def test_a_change_of_the_module_counts_from_the_next_epoch_on() -> None:
    module = K.RandomHorizontalFlip(p=0.0)
    x = torch.rand(2, 3, 4, 4)
    loader = StreamPrefetchLoader([x], module, device="cpu")
    assert torch.equal(next(iter(loader)), x)
    module.p = module.p_batch = 1.0
    module.flip_only = True
    replaced = nn.Sequential(K.RandomHorizontalFlip(p=0.0))
    loader = StreamPrefetchLoader([x], replaced, device="cpu")
    assert torch.equal(next(iter(loader)), x)
    replaced[0] = K.RandomHorizontalFlip(p=1.0)
    assert torch.equal(next(iter(loader)), x.flip(-1))


def test_one_module_may_serve_the_loop_and_two_loaders_at_once(
    device: torch.device,
) -> None:
    module = chain()
    expected = first(torch.rand(4, 3, 20, 20), module, device=device)
    torch.manual_seed(0)
    x = torch.rand(4, 3, 20, 20)
    expected = first(x, module, device=device)
    passes = [
        iter(StreamPrefetchLoader([x] * 3, module, device=device, seed=5, depth=n))
        for n in (1, 3)
    ]
    for one in passes:
        got = next(one)
        module(torch.rand(2, 3, 30, 30))
        assert torch.equal(got, expected)
        next(one)


def test_a_module_with_parameters_gives_no_graph(device: torch.device) -> None:
    learnt = K.Normalize(
        torch.full((3,), 0.5, requires_grad=True), torch.full((3,), 0.5)
    )
    out = first(torch.rand(2, 3, 4, 4), learnt, device=device)
    assert not out.requires_grad


@pytest.mark.gpu
def test_a_module_that_was_moved_to_the_gpu_works_and_stays_there() -> None:
    module = chain().cuda()
    x = torch.rand(4, 3, 20, 20)
    expected = first(x, chain(), device="cuda")
    torch.testing.assert_close(first(x, module, device="cuda"), expected)
    assert all(value.device.type == "cuda" for value in module.buffers())


# The number of inputs #


def test_too_few_inputs_for_the_data_keys_are_refused(device: torch.device) -> None:
    batch = (torch.rand(2, 3, 16, 16), torch.zeros(2, 1, 16, 16))
    with pytest.raises(TransformError, match=r"takes 2 inputs .*mask.*got 1.*inputs="):
        first(batch, sequential("input", "mask"), device=device)


def test_two_inputs_for_one_image_are_refused(device: torch.device) -> None:
    batch = (torch.rand(2, 3, 20, 20), torch.rand(2, 3, 20, 20))
    with pytest.raises(TransformError, match=r"takes 1 inputs .*got 2.*data_keys"):
        first(batch, crop, inputs=(0, 1), device=device)


def test_one_data_key_named_by_a_tuple_gives_one_result(device: torch.device) -> None:
    batch = (torch.rand(2, 3, 20, 20), "label")
    out = first(batch, crop, inputs=(0,), device=device)
    assert out[0].shape == (2, 3, 12, 10)
    assert out[1] == "label"


def test_a_whole_batch_for_several_data_keys_is_refused(device: torch.device) -> None:
    batch = labelled_batch(3)[:2]
    loader = StreamPrefetchLoader(
        [batch], batch_transform=sequential("input", "mask"), device=device, seed=5
    )
    with pytest.raises(TransformError, match=r"takes 2 inputs.*inputs="):
        next(iter(loader))


def test_a_dict_with_suffixes_works_without_data_keys(device: torch.device) -> None:
    image, mask, *_ = labelled_batch(3)
    module = K.AugmentationSequential(K.RandomCrop((12, 10)), data_keys=None)
    batch = {"image": (image * 255).to(torch.uint8), "mask": mask, "mask_2": mask}
    loader = StreamPrefetchLoader([batch], batch_transform=module, device=device)
    out = next(iter(loader))
    assert {key: value.shape[-2:] for key, value in out.items()} == dict.fromkeys(
        batch, (12, 10)
    )
    assert out["image"].dtype == torch.float32
    assert float(out["image"].max()) == 1.0
    assert torch.equal(out["mask"], out["mask_2"])


# Versions #


@pytest.mark.parametrize("version", ["0.8.3", "0.7.0", "0.8.3.dev1"])
def test_an_old_kornia_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(kornia, "__version__", version)
    loader = StreamPrefetchLoader(images(1), K.RandomHorizontalFlip(), device="cpu")
    with pytest.raises(
        DependencyError, match=rf"kornia {version}.* 0\.9 or newer.*pip install"
    ):
        iter(loader)


@pytest.mark.parametrize("version", ["0.9.0", "0.10.1", "1.0", "1.0.0rc1", "0.9.0rc1"])
def test_a_newer_kornia_is_accepted(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(kornia, "__version__", version)
    (x,) = images(1)
    assert first(x, K.RandomHorizontalFlip(p=0.0)).shape == x.shape


def test_a_missing_kornia_says_what_to_install() -> None:
    out = run_script(
        """
        import sys
        sys.modules["kornia"] = None
        from gpuprefetch import DependencyError
        try:
            from gpuprefetch.augment.kornia_adapter import import_kornia
            import_kornia()
        except DependencyError as error:
            print(error)
        """
    )
    assert "kornia" in out
    assert "pip install" in out


# With a DataLoader #


def test_uint8_photographs_from_workers_are_augmented(device: torch.device) -> None:
    source = DataLoader(Images(10, (3, 24, 24)), batch_size=4, num_workers=2)
    loader = StreamPrefetchLoader(source, chain(), device=device, seed=1)
    batches = list(loader)
    assert [tuple(x.shape) for x, _ in batches] == [(4, 3, 16, 16)] * 2 + [
        (2, 3, 16, 16)
    ]
    assert torch.cat([y for _, y in batches]).tolist() == list(range(10))
    again = StreamPrefetchLoader(source, chain(), device=device, seed=1)
    for (left, _), (right, _) in zip(batches, again, strict=True):
        assert torch.equal(left, right)


# Fused or not #


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (chain(), "Sequential (fused)"),
        (sequential("input", "mask"), "AugmentationSequential (fused)"),
        (
            nn.Sequential(crop, K.RandomInvert()),
            "Sequential (fused, except RandomInvert: there is no fused step for this "
            "class)",
        ),
        (
            nn.Sequential(MyFlip(), crop),
            "(fused, except MyFlip: it is not one of Kornia's own classes)",
        ),
        (
            K.ImageSequential(crop, blur, random_apply=1),
            "(not fused, Kornia: ImageSequential: random_apply draws",
        ),
        (
            nn.Sequential(crop, K.RandomMixUpV2()),
            "(not fused, Kornia: RandomMixUpV2 does not run between fused members)",
        ),
        (
            K.AugmentationSequential(
                crop,
                K.RandomErasing(torch.tensor([0.1, 0.2]).half()),
                data_keys=["input", "mask"],
            ),
            "(not fused, Kornia: labels follow it; RandomErasing: scale is a tensor",
        ),
        (
            K.AugmentationSequential(crop, data_keys=None),
            "(not fused, Kornia: data_keys=None takes dictionaries)",
        ),
        (
            fuse(nn.Sequential(crop, K.RandomInvert())),
            "FusedAugmentation (fused, except RandomInvert: there is no",
        ),
        (torch.neg, "neg"),
    ],
)
def test_the_loader_says_what_runs_fused_and_why_the_rest_does_not(
    module: Any, text: str
) -> None:
    loader = StreamPrefetchLoader(images(1), module, device="cpu", inputs=0)
    assert text in repr(loader)
    assert text in loader.stats().transform
    assert text in loader.report()


def test_a_fused_chain_leaves_every_global_generator_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Setting and restoring them would cost the loop's thread time at each batch."""
    monkeypatch.setattr(
        "gpuprefetch.augment.seeded.generators_seeded", lambda *_: pytest.fail("set")
    )
    (batch,) = images(1, (6, 3, 20, 24))
    before = torch.get_rng_state()
    first(batch, chain())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fuse_returned_is_a_transform_too(device: torch.device) -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    explicit = fuse(chain(), dtype=torch.float16)
    out = first(batch, explicit, device=device)
    assert out.dtype == torch.float16
    torch.testing.assert_close(
        out.float(), first(batch, chain(), device=device), rtol=0, atol=5e-3
    )


def test_fused_segments_and_kornia_between_them_share_one_seed(
    device: torch.device,
) -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    mixed = nn.Sequential(rotation, K.RandomGamma((0.5, 1.5), p=1.0), crop)
    one, two = (first(batch, mixed, device=device) for _ in range(2))
    assert torch.equal(one, two)
    other = first(batch, mixed, device=device, seed=6)
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, as_kornia(mixed, batch, device=device), **CLOSE)


# The detector detects #


def test_meta_other_numbers_are_seen() -> None:
    (batch,) = images(1, (6, 3, 20, 24))
    wrong = copy.deepcopy(rotation)(batch)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(first(batch, rotation), wrong, **CLOSE)


def test_meta_a_changed_module_is_seen() -> None:
    module = copy.deepcopy(crop)
    before = tensors_of(module)
    module(torch.rand(2, 3, 20, 20))
    assert tensors_of(module) != before
