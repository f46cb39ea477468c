"""Public names: the modules' ``__all__``, the package's re-exports and the reference agree."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import numpy as np
from effort import each

import spdl_media
import spdl_media as sm
import spdl_media.pipeline
from spdl_media._optional import is_available
from spdl_media.epochs import Mapped
from spdl_media.pipeline import PipelineBuilder
from spdl_media.source import MapIterator
from spdl_media.testing import index_planes, make_video

ROOT = Path(__file__).resolve().parent.parent


# Modules with an underscore whose ``__all__`` is public; most share the name of a function.
PUBLIC_WITH_UNDERSCORE = {"_collate", "_ffmpeg", "_probe"}


def _module_names(text: str) -> list[str]:
    """Return the full names of all modules with this text, without importing them."""
    names = []
    for path in sorted((ROOT / "spdl_media").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        private = any(
            part.startswith("_") for part in {*parts} - {"__init__", *PUBLIC_WITH_UNDERSCORE}
        )
        if path.stem == "torch" and not is_available("torch"):
            continue
        if not private and text in path.read_text(encoding="utf-8"):
            names.append(".".join(part for part in parts if part != "__init__"))
    return [name for name in names if name != "spdl_media"]


MODULES = _module_names("\n__all__ = ")
# Most modules of the pipeline have no public name, so that they need no __all__.
OF_PIPELINE = [name for name in _module_names("") if name.startswith("spdl_media.pipeline.")]

# Modules whose names are for other modules or for tests and are not re-exported, and such names of modules
# that are re-exported.
NOT_REEXPORTED = {
    "cuda.dali",
    "dataloader.sample_rng",
    "filter_desc.FilterDesc",
    "inputs.Input",
    "inputs.open_input",
    "loader_ends",
    "operations",
    "ray",
    "readers",
    "ring",
    *(f"samplers.Distributed{kind}Sampler" for kind in ("Deterministic", "Random")),
    "samplers.Uneven",
    "source",
    "testing",
    "timing.Seconds",
    "timing.parse_window",
    "torch",
}

# Names that a module imports from elsewhere, so that programs written for SPDL find them.
FROM_ELSEWHERE = {
    "dataloader": {"MapIterator", "Pipeline", "PipelineBuilder", "Replaced", "sample_rng"},
    "source": {
        *("DistributedDeterministicSampler", "DistributedRandomSampler", "HasEpochs"),
        *("IterableWithShuffle", "Stateful", "Uneven"),
    },
}


def _defined_names(module: ModuleType) -> set[str]:
    """Return the public names that a module's own source defines at top level, without imports."""
    assert module.__file__
    names: set[str] = set()
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


@cache
def _imported_names() -> dict[str, set[str]]:
    """Return the names that other files of the package import, by module."""
    names: dict[str, set[str]] = {}
    for path in (ROOT / "spdl_media").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return names


@cache
def _attributes() -> set[tuple[str, str]]:
    """Return all pairs ``(name, attribute)`` of expressions ``name.attribute`` in the package."""
    return {
        pair
        for path in (ROOT / "spdl_media").rglob("*.py")
        for pair in re.findall(r"\b(\w+)\.(?=(\w+))", path.read_text(encoding="utf-8"))
    }


def _names_imported_by_siblings(module: ModuleType) -> set[str]:
    """Return the names that other files of the package use from a module, by either form of import."""
    short = module.__name__.rpartition(".")[2]
    through_module = {attribute for name, attribute in _attributes() if name == short}
    return _imported_names().get(module.__name__, set()) | through_module


@each("name", MODULES)
def test_all_is_a_sorted_tuple_of_own_names(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert isinstance(names, tuple)
    assert len(names) == len(set(names))
    # A package has the names of its modules, each sorted.
    if not hasattr(module, "__path__"):
        assert list(names) == sorted(names)
        from_elsewhere = FROM_ELSEWHERE.get(name.removeprefix("spdl_media."), set())
        assert set(names) - from_elsewhere <= _defined_names(module)
        assert from_elsewhere <= set(names) - _defined_names(module)


@each("name", sorted({*MODULES, *OF_PIPELINE}))
def test_public_functions_outside_all_are_shared_inside_the_package(name: str) -> None:
    """A function without underscore is public, or another module of the package needs it."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        return
    functions = {
        name
        for name in _defined_names(module)
        if inspect.isfunction(getattr(module, name)) or inspect.isclass(getattr(module, name))
    }
    idle = functions - {*getattr(module, "__all__", ())} - _names_imported_by_siblings(module)
    assert not idle, f"{sorted(idle)}: in no __all__ and used by no other module; add or underscore"


def test_package_reexports_the_modules_names() -> None:
    expected = {
        name
        for module in map(importlib.import_module, MODULES)
        for short in [module.__name__.removeprefix("spdl_media.")]
        if not {short, short.split(".")[0]} & NOT_REEXPORTED and not short.startswith("pipeline")
        for name in module.__all__
        if f"{short}.{name}" not in NOT_REEXPORTED and name not in FROM_ELSEWHERE.get(short, set())
    }
    given = set(spdl_media.__all__) - {"__version__"}
    assert given == expected, f"missing {expected - given}, too many {given - expected}"


@each("package", [spdl_media, spdl_media.pipeline])
def test_packages_hold_no_names_but_public_ones(package: ModuleType) -> None:
    """A star import of a module whose __all__ has internal names offers these to users, too."""
    names = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("spdl_media.")
    }
    assert names <= {*package.__all__}


def test_package_all_names_each_thing_once() -> None:
    names = spdl_media.__all__
    assert len(names) == len(set(names))
    for name in names:
        getattr(spdl_media, name)


def test_reference_documents_every_name() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(?:spdl_media\.|sm\.)?(\w+)", reference))
    missing = set(spdl_media.__all__) - {"__version__"} - documented
    assert not missing, f"docs/reference.md does not mention {sorted(missing)}"


def test_functions_and_classes_have_docstrings() -> None:
    without = []
    for name in spdl_media.__all__:
        value = getattr(spdl_media, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            # A dataclass without a docstring gets its signature as the docstring.
            doc = inspect.getdoc(value) or ""
            if not doc or doc.startswith(f"{name}("):
                without.append(name)
    assert not without


def test_objects_show_what_they_hold() -> None:
    """Python's own text, a class and an address, says nothing in a notebook or a log."""
    data = make_video(index_planes(3, 64, 48), format="mp4", codec="libx264")
    codec = sm.demux_video(data).codec
    folders = sm.Mix([range(3), [1]], seed=1)
    pairs = Mapped(lambda name: (name, 0), ["a", "b", "c"])
    loader = sm.DataLoader(
        range(10), preprocessor=sm.ImageRecipe(8), batch_size=4, aggregator=sm.collate, to="numpy"
    )
    shown = {
        loader: "<DataLoader: range of 10 -> ImageRecipe -> batches of 4 -> collate -> numpy>",
        sm.DataLoader([1]): "<DataLoader: list of 1>",
        PipelineBuilder().add_source([1]).pipe(len).build(): "<Pipeline: list of 1 -> len>",
        sm.VideoCache(4): "<VideoCache: 0 open, at most 4>",
        sm.VideoDecoder(codec): "<VideoDecoder: h264>",
        folders: "Mix(4 items, counts=[3, 1])",
        MapIterator({}, range(10**6)): "MapIterator(dict, range)",
        type("Clips", (MapIterator,), {})({}): "Clips(dict, NoneType)",
        type("Loader", (sm.DataLoader,), {})([1]): "<Loader: list of 1>",
        pairs: "<3 items: ('a', 0), ('b', 0), ...>",
        pairs[:1]: "<1 items: ('a', 0)>",
    }
    assert [repr(one) for one in shown] == list(shown.values())


def test_types_can_be_looked_up() -> None:
    """Frameworks look up types, also of users' functions that are annotated with those of this package."""
    hints = get_type_hints(sm.ImageRecipe.__call__)
    assert hints["rng"] == np.random.Generator | int | None
    for name in sm.__all__:
        public = getattr(sm, name)
        for one in (public, getattr(public, "__init__", None)):
            if inspect.isfunction(one):
                get_type_hints(one)

    def load(src: sm.Source | None, window: sm.Timestamp | sm.Window | None = None) -> None: ...

    assert str in get_args(get_type_hints(load)["src"])
