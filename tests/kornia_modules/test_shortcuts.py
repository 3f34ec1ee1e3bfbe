"""Do the shortcuts leave every number and pixel as Kornia has it?"""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import kornia
import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import random_generator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpuprefetch.augment import shortcuts
from gpuprefetch.augment.kornia_adapter import KorniaTransform
from gpuprefetch.augment.unchanged import keeps_all_methods_of
from gpuprefetch.seeding import generators_seeded
from tests.kornia_modules.oracle import labelled_batch, sequential

pytestmark = pytest.mark.timeout(60)


def own_kind(kind: type) -> type:
    """A user's subclass that changes nothing."""
    return type(f"Own{kind.__name__}", (kind,), {})


OwnCrop, OwnResize = own_kind(K.RandomCrop), own_kind(K.Resize)


class Mirrored(K.RandomCrop):
    def apply_transform(self, *args: Any, **settings: Any) -> Tensor:
        return super().apply_transform(*args, **settings).flip(-1)


class InTheCorner(K.RandomCrop):
    def generate_parameters(self, batch_shape: Any) -> Any:
        params = super().generate_parameters(batch_shape)
        return params | {"src": params["dst"].clone()}


class Mixin(K.GeometricAugmentationBase2D):
    def transform_inputs(self, *args: Any, **settings: Any) -> Tensor:
        return super().transform_inputs(*args, **settings) + 1


class BehindItsParent(K.RandomCrop, Mixin):
    pass


class Renamed(K.RandomCrop):
    """A size of its own, and a name."""

    def __init__(self) -> None:
        super().__init__((7, 9))

    def __repr__(self) -> str:
        return "Renamed()"


_MODULES: dict[str, Callable[[], nn.Module]] = {
    "crop": lambda: K.RandomCrop((7, 9)),
    "a user's crop": lambda: OwnCrop((7, 9)),
    "the same for all": lambda: K.RandomCrop((7, 9), same_on_batch=True),
    "padded": lambda: K.RandomCrop((7, 9), padding=(1, 2, 3, 4)),
    "padded by zero": lambda: K.RandomCrop((7, 9), padding=0),
    "padded if needed": lambda: K.RandomCrop((20, 9), pad_if_needed=True),
    "resampled": lambda: K.RandomCrop((7, 9), cropping_mode="resample"),
    "the whole image": lambda: K.RandomCrop((12, 16)),
    "rank kept": lambda: K.RandomCrop((7, 9), keepdim=True),
    "never": lambda: K.RandomCrop((7, 9), p=0.0),
    "mirrored": lambda: Mirrored((7, 9), same_on_batch=True),
    "resize": lambda: K.Resize((20, 6)),
    "by one side": lambda: K.Resize(8, side="long"),
    "a user's resize": lambda: OwnResize((20, 6), resample="nearest"),
    "of Kornia's own subclass": lambda: K.LongestMaxSize(10),
    "both": lambda: nn.Sequential(OwnCrop((7, 9)), OwnResize((12, 16)), crop()),
}


def crop() -> nn.Module:
    return K.RandomCrop((5, 5))


def shapes() -> list[Tensor]:
    """Batches of changing shapes, and two of equal shape in a row."""
    sizes = [(4, 3, 12, 16), (4, 3, 12, 16), (2, 1, 13, 17), (4, 3, 12, 16)]
    return [torch.rand(size) for size in sizes]


def state_after(draw: Callable[[], Any]) -> tuple[Any, Tensor]:
    """What was drawn with a seed of its own, and where torch's generator then stood."""
    with generators_seeded(3, torch.device("cpu")):
        return draw(), torch.default_generator.get_state()


@pytest.mark.parametrize("name", _MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_and_generators_are_kornias_bit_for_bit(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    module = _MODULES[name]()
    ours = KorniaTransform(module).module
    for image in shapes():
        image = image.to(device, dtype)
        expected, after = state_after(lambda image=image: module(image))
        got, ours_after = state_after(lambda image=image: ours(image))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert torch.equal(ours_after, after)


@pytest.mark.parametrize("name", sorted(set(_MODULES) - {"both"}))
def test_parameters_are_kornias_with_their_types(name: str) -> None:
    module: Any = _MODULES[name]()
    ours: Any = KorniaTransform(module).module
    for image in [*shapes(), torch.rand(0, 3, 12, 16)]:
        expected, _ = state_after(lambda x=image: module.forward_parameters(x.shape))
        got, _ = state_after(lambda x=image: ours.forward_parameters(x.shape))
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("kind", [OwnCrop, OwnResize])
def test_boxes_handed_out_may_be_written_to(kind: Any) -> None:
    ours: Any = KorniaTransform(kind((7, 9))).module
    drawn, _ = state_after(lambda: ours.generate_parameters((2, 3, 12, 16)))
    kept = copy.deepcopy(drawn)
    for value in drawn.values():
        value.zero_()
    again, _ = state_after(lambda: ours.generate_parameters((2, 3, 12, 16)))
    assert all(torch.equal(again[key], kept[key]) for key in kept)


def test_a_default_dtype_set_later_is_kornias() -> None:
    module = OwnCrop((7, 9))
    ours: Any = KorniaTransform(module).module
    torch.set_default_dtype(torch.float64)
    try:
        expected, _ = state_after(lambda: module.forward_parameters((2, 3, 12, 16)))
        got, _ = state_after(lambda: ours.forward_parameters((2, 3, 12, 16)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert got["src"].dtype is torch.float64
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.parametrize("mode", ["slice", "resample"])
def test_a_matrix_that_is_asked_for_is_kornias(mode: str) -> None:
    module = K.RandomCrop((7, 9), padding=2, cropping_mode=mode)
    ours: Any = KorniaTransform(module).module
    image = torch.rand(3, 3, 12, 16)
    state_after(lambda: module(image))
    state_after(lambda: ours(image))
    assert torch.equal(ours.transform_matrix, module.transform_matrix)


def test_labels_follow_as_kornia_moves_them() -> None:
    keys = ("input", "mask", "bbox", "keypoints")
    module, batch = sequential(*keys), labelled_batch(3)
    ours = KorniaTransform(module).module
    expected, _ = state_after(lambda: module(*batch))
    got, _ = state_after(lambda: ours(*batch))
    for value, kornias in zip(got, expected, strict=True):
        assert torch.equal(value, kornias)


# What they spare #


class Counted(TorchDispatchMode):
    """Counts the operations that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(module: nn.Module) -> int:
    """How many one batch takes, after a first one."""
    image = torch.rand(4, 3, 12, 16)
    module(image)
    with Counted() as counted:
        module(image)
    return counted.count


@pytest.mark.parametrize(
    ("kind", "at_most"),
    [(K.RandomCrop, 0.6), (OwnCrop, 0.6), (Mirrored, 0.85), (OwnResize, 0.5)],
)
def test_a_batch_takes_fewer_operations(kind: Any, at_most: float) -> None:
    module = kind((7, 9))
    ours = KorniaTransform(module).module
    assert operations(ours) <= at_most * operations(module)


def test_no_batch_is_kept_for_a_matrix_that_nobody_asked_for() -> None:
    ours = KorniaTransform(nn.Sequential(OwnCrop((7, 9)))).module
    image = torch.rand(2, 3, 12, 16)
    gone = weakref.ref(image)
    ours(image)
    del image
    gc.collect()
    assert gone() is None


# Whom they leave alone #


@pytest.mark.parametrize("kind", [Mirrored, InTheCorner, BehindItsParent])
def test_a_subclass_that_changes_a_method_keeps_its_change(kind: Any) -> None:
    module, image = kind((7, 9)), torch.rand(3, 3, 12, 16)
    assert not keeps_all_methods_of(K.RandomCrop, module)
    expected, _ = state_after(lambda: module(image))
    got, _ = state_after(lambda: KorniaTransform(module).module(image))
    assert torch.equal(got, expected)


class Growing(K.RandomCrop):
    """A crop of another size for each batch."""

    def forward_parameters(self, batch_shape: Any) -> Any:
        generator: Any = self._param_generator
        generator.size = self.flags["size"] = tuple(n + 1 for n in generator.size)
        return super().forward_parameters(batch_shape)


class NewGenerator(K.RandomCrop):
    """The same, with a generator of its own for each."""

    def forward_parameters(self, batch_shape: Any) -> Any:
        size = self.flags["size"] = tuple(n + 1 for n in self.flags["size"])
        self._param_generator = random_generator.CropGenerator(size)
        return super().forward_parameters(batch_shape)


class OfManySizes(K.Resize):
    def forward_parameters(self, batch_shape: Any) -> Any:
        generator: Any = self._param_generator
        generator.output_size = self.flags["size"] = self.flags["size"] + 1
        return super().forward_parameters(batch_shape)


class NewResizeGenerator(K.Resize):
    def forward_parameters(self, batch_shape: Any) -> Any:
        size = self.flags["size"] = self.flags["size"] + 1
        self._param_generator = random_generator.ResizeGenerator(size)
        return super().forward_parameters(batch_shape)


class ToAnotherSize(K.RandomCrop):
    """Says that its boxes are enlarged, which its pixels are not."""

    def __init__(self) -> None:
        super().__init__((6, 6))
        self._param_generator = random_generator.CropGenerator((6, 6), (4, 5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Growing((4, 5)),
        lambda: NewGenerator((4, 5)),
        lambda: OfManySizes(5),
        lambda: NewResizeGenerator(5),
        ToAnotherSize,
    ],
    ids=["growing", "generator", "sizes", "resize generator", "another size"],
)
def test_a_size_that_changes_between_batches_is_followed(make: Any) -> None:
    module, image = make(), torch.rand(3, 3, 12, 16)
    ours: Any = KorniaTransform(module).module
    for _ in range(3):
        expected, _ = state_after(lambda: module(image))
        got, _ = state_after(lambda: ours(image))
        assert torch.equal(got, expected)
        for key, value in module._params.items():
            assert torch.equal(ours._params[key], value), key
        assert torch.equal(ours.transform_matrix, module.transform_matrix)


class OwnFlags(K.RandomCrop):
    """With pixels, padding and flags of its own."""

    def __init__(self) -> None:
        super().__init__((6, 6))
        self.flags = {"size": (6, 6)}

    def compute_padding(self, *args: Any, **settings: Any) -> list[int]:
        return [0, 0, 0, 0]

    def compute_transformation(self, input: Tensor, *args: Any, **_: Any) -> Tensor:
        return self.identity_matrix(input)

    def apply_transform(self, input: Tensor, *args: Any, **_: Any) -> Tensor:
        return input[..., :6, :6]


def test_flags_of_a_subclass_are_not_asked_for() -> None:
    image = torch.rand(3, 3, 12, 16)
    got = KorniaTransform(OwnFlags()).module(image)
    assert torch.equal(got, image[..., :6, :6])


def test_a_subclass_that_only_sets_its_parents_settings_is_spared() -> None:
    assert keeps_all_methods_of(K.RandomCrop, Renamed())
    assert operations(KorniaTransform(Renamed()).module) < operations(Renamed())


def test_a_method_or_hook_of_the_users_own_module_is_called() -> None:
    image, calls = torch.rand(3, 3, 12, 16), []

    def drawn(batch_shape: Any) -> Any:
        calls.append("method")
        return K.RandomCrop.generate_parameters(replaced, batch_shape)

    replaced = K.RandomCrop((7, 9))
    replaced.generate_parameters = drawn  # type: ignore[method-assign]
    hooked = K.RandomCrop((7, 9))
    hooked.register_forward_hook(lambda *_: calls.append("hook"))
    on_generator: Any = K.RandomCrop((7, 9))
    on_generator._param_generator.register_forward_hook(
        lambda *_: calls.append("generator")
    )
    for module in (replaced, hooked, on_generator):
        KorniaTransform(module).module(image)
    assert calls == ["method", "hook", "generator"]


def test_another_version_of_kornia_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kornia, "__version__", "0.10.0")
    ours = KorniaTransform(OwnResize((20, 6))).module
    assert "generate_parameters" not in vars(ours)


class _CrossedCrop(shortcuts.BoxesOfCrop):
    """Another thread draws for larger images whenever this one stores something."""

    other: tuple[int, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        other, self.__dict__["other"] = self.other, ()
        if other:
            self(other)


class _CrossedResize(shortcuts._SameBoxes):
    other: tuple[int, ...] = ()
    __setattr__ = _CrossedCrop.__setattr__


@pytest.mark.parametrize(
    "draw", [_CrossedCrop(K.RandomCrop((7, 9))), _CrossedResize(K.Resize((7, 9)))]
)
def test_threads_do_not_get_each_others_boxes(draw: Any) -> None:
    draw.__dict__["other"] = (5, 3, 20, 30)
    drawn = draw((2, 3, 10, 12))
    assert {name: len(value) for name, value in drawn.items()} == dict.fromkeys(
        drawn, 2
    )
    assert drawn["input_size"].tolist() == [[10, 12]] * 2
    assert draw.other == ()  # It did cross.
