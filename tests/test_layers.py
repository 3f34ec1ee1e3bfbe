"""Do imports point down, and stay out of what they must not load?

The layer table is data here; a test for each rule, and a planted fault for each test.
"""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpuprefetch
from tests.children import run_script

_PACKAGE = Path(gpuprefetch.__file__).parent

# From the top down. A file imports from its own layer and from those below it.
_LAYERS = [
    ["__main__", "cli"],
    ["integrations"],
    ["workloads", "demo", "probe", "testing", "digits", "timeline", "plot"],
    ["gain", "overlap"],
    ["grouping"],
    ["trace"],
    ["__init__"],
    ["loader"],
    ["assembly"],
    ["epoch", "figures"],
    ["resources", "watch"],
    ["starting", "transfer"],
    ["batch_copy", "copies", "feeder", "transform"],
    ["prepare", "puller"],
    ["entry", "augment", "meter"],
    ["beginning", "restore"],
    ["findings", "report"],
    ["diagnose"],
    ["staging", "source", "selection", "settings", "move", "scope", "host_lead"],
    ["fingerprint", "generators", "indices", "progress"],
    ["pinned", "streams", "seeding", "stages", "stats", "syncs", "times"],
    ["given"],
    ["foreign"],
    ["histogram", "kinds", "ranges", "thresholds"],
    ["batch", "cores", "ranks"],
    ["containers"],
    ["errors", "plural", "shapes", "signatures"],
]

# The same within `augment`, from the top down.
_AUGMENT_LAYERS = [
    ["__init__", "seeded"],
    ["fusing", "graphed"],
    ["fused"],
    ["kept_graphs", "whole"],
    ["eligible", "segments"],
    ["ahead", "capture", "labels", "operator", "parameters"],
    ["reference", "plan_kernel", "sample", "convert", "kornia_plan"],
    ["single", "tile", "kernel", "apply_values", "kornia_read"],
    ["reading", "geometry", "lower"],
    ["launches", "lower_geometry"],
    ["variant", "lower_values"],
    ["plan"],
    ["steps", "kornia_adapter"],
    ["host_reads", "shortcuts", "values"],
    ["column", "label_kinds", "unchanged"],
]

# Packages that one file alone may import.
_ONE_FILE_ONLY = {
    "kornia": "augment/kornia_adapter.py",
    "cuda": "augment/kernel.py",
    "matplotlib": "plot.py",
    "lightning": "integrations/lightning.py",
    "accelerate": "integrations/accelerate.py",
    "sklearn": "digits.py",
}

_MOST_LINES = 400


@dataclass(frozen=True)
class Import:
    """One import statement of one file."""

    file: str
    """Path below the package, such as ``augment/plan.py``."""
    module: str
    """Full name of what is imported, such as ``gpuprefetch.batch``."""
    is_lazy: bool
    """Whether it stands inside a function."""


def imports_of(package: Path) -> Iterator[Import]:
    """Read all imports of a package named ``gpuprefetch``, without running it."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        lazy = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
        }
        file = path.relative_to(package).as_posix()
        for node in ast.walk(tree):
            for module in _modules(node, file):
                yield Import(file, module, id(node) in lazy)


def _modules(node: ast.AST, file: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level:
        return [f"gpuprefetch.(relative in {file})"]
    module = node.module or ""
    if module == "gpuprefetch":
        # `from gpuprefetch import streams` means the module, if there is one.
        return [f"gpuprefetch.{alias.name}" for alias in node.names]
    return [module]


def own_imports(package: Path) -> list[Import]:
    return [i for i in imports_of(package) if i.module.split(".")[0] == "gpuprefetch"]


def is_module(package: Path, module: str) -> bool:
    below = package.joinpath(*module.split(".")[1:])
    return below.with_suffix(".py").exists() or (below / "__init__.py").exists()


def layer_of(name: str) -> int:
    """Give the place in the table of a file's or a module's first part."""
    first = name.removesuffix(".py").split("/")[0].split(".")[0]
    for place, layer in enumerate(_LAYERS):
        if first in layer:
            return place
    raise AssertionError(f"{name} is in no layer; add it to the table in {__file__}")


def upward_imports(package: Path) -> list[Import]:
    def target(module: str) -> str:
        below = module.partition(".")[2]
        return below if below and is_module(package, module) else "__init__"

    return [
        i for i in own_imports(package) if layer_of(i.file) > layer_of(target(i.module))
    ]


def augment_layer_of(name: str) -> int:
    for place, layer in enumerate(_AUGMENT_LAYERS):
        if name in layer:
            return place
    raise AssertionError(f"augment/{name}.py is in no layer of {__file__}")


def upward_within_augment(package: Path) -> list[Import]:
    """Find imports within ``augment`` that point up, or sideways."""
    return [
        i
        for i in own_imports(package)
        if i.file.startswith("augment/")
        and i.module.startswith("gpuprefetch.augment.")
        and augment_layer_of(Path(i.file).stem)
        >= augment_layer_of(i.module.rpartition(".")[2])
    ]


def face_imports(package: Path) -> list[Import]:
    """Find imports that take a name from the face and not from its defining file."""
    return [
        i
        for i in own_imports(package)
        if not i.file.startswith(("__init__", "__main__"))
        and not is_module(package, i.module)
    ]


def cycles(package: Path) -> list[str]:
    """Find import cycles among the files, lazy imports included."""
    edges: dict[str, set[str]] = {}
    for one in own_imports(package):
        source = "gpuprefetch." + one.file.removesuffix(".py").replace("/", ".")
        source = source.removesuffix(".__init__")
        edges.setdefault(source, set()).add(one.module)
    found: list[str] = []

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            found.append(" -> ".join((*trail[trail.index(module) :], module)))
            return
        for target in edges.get(module, ()):
            visit(target, (*trail, module))

    for module in edges:
        visit(module, ())
    return found


def importers(package: Path, name: str) -> set[str]:
    return {i.file for i in imports_of(package) if i.module.split(".")[0] == name}


def long_files(package: Path) -> dict[str, int]:
    lines = {
        path.relative_to(package).as_posix(): len(path.read_text().splitlines())
        for path in package.rglob("*.py")
    }
    return {file: count for file, count in lines.items() if count > _MOST_LINES}


# The rules #


def test_every_file_is_in_the_table() -> None:
    for path in _PACKAGE.rglob("*.py"):
        layer_of(path.relative_to(_PACKAGE).as_posix())


def test_imports_point_down() -> None:
    assert upward_imports(_PACKAGE) == []


def test_imports_within_augment_point_down() -> None:
    for path in (_PACKAGE / "augment").glob("*.py"):
        augment_layer_of(path.stem)
    assert upward_within_augment(_PACKAGE) == []


def test_cuda_is_imported_by_the_kernels_file_alone() -> None:
    """It does so by name, so that no import statement tells; the text does."""
    users = {
        path.relative_to(_PACKAGE).as_posix()
        for path in _PACKAGE.rglob("*.py")
        if '"cuda.' in path.read_text()
    }
    assert users == {"augment/kernel.py"}


def test_there_is_no_cycle() -> None:
    assert cycles(_PACKAGE) == []


def test_names_come_from_their_defining_file() -> None:
    assert face_imports(_PACKAGE) == []


def test_the_loader_reaches_augmentation_only_when_it_needs_it() -> None:
    eager = [
        i
        for i in own_imports(_PACKAGE)
        if i.module.startswith("gpuprefetch.augment")
        and not i.file.startswith(("augment/", "cli/"))
        and layer_of(i.file) >= layer_of("__init__")
        and not i.is_lazy
    ]
    assert eager == []


@pytest.mark.parametrize(("name", "file"), _ONE_FILE_ONLY.items())
def test_a_heavy_package_is_imported_in_one_file_only(name: str, file: str) -> None:
    assert importers(_PACKAGE, name) <= {file}


def test_the_only_importer_of_kornia_is_there() -> None:
    assert importers(_PACKAGE, "kornia") == {"augment/kornia_adapter.py"}


@pytest.mark.parametrize("file", sorted(_PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_no_file_is_too_long(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= _MOST_LINES


# What is loaded #

# torch itself loads a part of NVIDIA's `cuda` namespace, but not this one.
_HEAVY = ["accelerate", "cuda.core", "kornia", "lightning", "matplotlib"]


def loaded_by(statements: str) -> list[str]:
    """Run statements in a fresh interpreter and name the heavy packages it loaded."""
    ending = f"print([name for name in {_HEAVY!r} if name in sys.modules])"
    return ast.literal_eval(run_script(f"import sys\n{statements}\n{ending}"))


@pytest.mark.timeout(60)
def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import gpuprefetch") == []


@pytest.mark.timeout(60)
def test_running_a_loader_without_kornia_loads_nothing_heavy() -> None:
    statements = """
import torch
from gpuprefetch import StreamPrefetchLoader
for settings in ({"transform": torch.neg}, {"transform": torch.nn.Flatten()}, {}):
    loader = StreamPrefetchLoader([torch.ones(2, 2)] * 3, **settings)
    assert len(list(loader)) == 3
    loader.report()
"""
    assert loaded_by(statements) == []


# Public names #


def test_all_is_sorted_and_names_what_is_public() -> None:
    assert sorted(gpuprefetch.__all__) == gpuprefetch.__all__
    modules = {path.stem for path in _PACKAGE.glob("*.py")}
    modules |= {path.parent.name for path in _PACKAGE.glob("*/__init__.py")}
    public = {
        name
        for name in vars(gpuprefetch)
        if not name.startswith("_") and name not in modules
    }
    assert public == set(gpuprefetch.__all__)


@pytest.mark.timeout(60)
def test_dir_lists_what_is_public_and_no_module_of_ours() -> None:
    script = "import gpuprefetch{}; print(dir(gpuprefetch))"
    bare = set(ast.literal_eval(run_script(script.format(""))))
    assert bare == {*gpuprefetch.__all__, "__version__", "ranges"}
    more = set(ast.literal_eval(run_script(script.format(".testing"))))
    assert more == {*bare, "testing"}


@pytest.mark.parametrize(
    "module",
    [
        f"gpuprefetch.{path.relative_to(_PACKAGE).with_suffix('').as_posix()}".replace(
            "/", "."
        )
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.stem not in ("__init__", "__main__", "kernel")
        and "cli" not in path.parts
    ],
)
def test_all_of_each_file_names_what_it_defines(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__doc__, "the first line of a file says which question it answers"
    names = getattr(loaded, "__all__", None)
    assert names is not None  # Ruff keeps them in order: constants, classes, functions.
    assert all(hasattr(loaded, name) for name in names)


def test_every_public_name_has_a_docstring() -> None:
    for name in gpuprefetch.__all__:
        value = getattr(gpuprefetch, name)
        assert value.__doc__, name
        for member, function in vars(value).items():
            if not member.startswith("_") and callable(function):
                assert function.__doc__, f"{name}.{member}"


def test_the_package_says_that_it_is_typed() -> None:
    assert (_PACKAGE / "py.typed").exists()


# The detectors detect #


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A package in which every rule is broken once."""
    files = {
        "__init__.py": "from gpuprefetch.loader import x",
        "errors.py": "from gpuprefetch.batch import walk",
        "batch.py": "import gpuprefetch.errors\nimport kornia.augmentation",
        "loader.py": "from gpuprefetch import x\nimport matplotlib\n" + "#\n" * 400,
        "plot.py": "def f():\n    import matplotlib.pyplot",
        "cli/demo.py": "from gpuprefetch.loader import y",
        "augment/plan.py": "import gpuprefetch.augment.fused",
        "augment/fused.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_meta_each_planted_fault_is_seen(planted: Path) -> None:
    assert [i.file for i in upward_imports(planted)] == ["errors.py", "loader.py"]
    assert cycles(planted) != []
    assert [i.file for i in upward_within_augment(planted)] == ["augment/plan.py"]
    assert [i.file for i in face_imports(planted)] == ["loader.py"]
    assert importers(planted, "kornia") == {"batch.py"}
    assert importers(planted, "matplotlib") == {"loader.py", "plot.py"}
    assert long_files(planted) == {"loader.py": 402}
    lazy = [i for i in imports_of(planted) if i.is_lazy]
    assert [i.file for i in lazy] == ["plot.py"]


@pytest.mark.timeout(60)
def test_meta_a_heavy_import_is_seen() -> None:
    assert loaded_by("import gpuprefetch, kornia, matplotlib") == [
        "kornia",
        "matplotlib",
    ]
    assert loaded_by("import gpuprefetch.augment.kornia_adapter") == ["kornia"]


def test_meta_a_file_in_no_layer_is_seen() -> None:
    with pytest.raises(AssertionError, match="in no layer"):
        layer_of("surprise.py")
