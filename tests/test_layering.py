"""Imports go one way: each module may import those before it in the table, and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "spdl_media"

# Read from left to right, top to bottom; a folder is one module. A new module is one word here.
ORDER = [
    ["errors", "config", "timing", "layouts", "color_tags", "one_thread"],
    ["_backends"],
    ["_still_parts", "orientation", "completeness", "stills"],
    ["memory", "readers", "remote", "formats", "endings", "inputs"],
    ["codec", "packets", "sample_clock"],
    ["container", "window", "streaming", "demux", "probe"],
    ["bitstream"],
    ["graph_syntax", "filter_stages", "filter_desc"],
    ["frames"],
    ["plain_chain", "graph_wiring", "graph_ends", "filter_graph"],
    ["sei", "picture_decoding", "sample_decoding", "decode_path", "decode"],
    ["storage"],
    ["buffer"],
    ["convert"],
    ["transfer"],
    ["arrays"],
    ["cuda", "array_formats"],
    ["load"],
    ["encode", "mux"],
    ["source"],
    ["dataloader"],
    ["cli", "__main__"],
]
FLAT = [module for row in ORDER for module in row]

# Beside all: reached by users, imported by no module of the table.
BESIDE = {"testing", "pipeline"}
JOINS_PIPELINE = {"dataloader", "cli"}

# Pure Python over bytes and text; the rest up to "decode" may use FFmpeg.
PURE = {*ORDER[0], *ORDER[2], "filter_desc", "filter_stages", "graph_syntax", "endings", "memory", "readers", "remote"}
MAY_IMPORT: dict[str, set[str]] = {
    "av": {*FLAT[: FLAT.index("decode") + 1], "encode", "mux", "cuda", "testing"} - PURE,
    "asyncio": {"pipeline", "dataloader", "load"},
    # Through the table in _backends alone, which imports them by name.
    **{name: set() for name in ("torch", "cupy", "jax", "numba", "nvidia", "fsspec")},
}


def _module_of(path: Path) -> str:
    """The word that stands for a file in the table."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _modules() -> list[str]:
    return sorted({_module_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"})


def _imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in the file."""
    package = ["spdl_media", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            # `from package import name` may import a module; the longer name says which.
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _files(module: str) -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if _module_of(path) == module]


def _own_imports(module: str) -> set[str]:
    """Modules of the package that a module imports."""
    names = {name for path in _files(module) for name in _imports(path)}
    own = {name.split(".")[1] for name in names if name.startswith("spdl_media.")}
    assert "spdl_media" not in names, f"{module} imports the package as a whole"
    return own - {module}


def test_order_names_each_module_once() -> None:
    assert len(FLAT) == len(set(FLAT))
    assert not BESIDE & set(FLAT)


def test_every_module_has_its_place() -> None:
    unknown = set(_modules()) - set(FLAT) - BESIDE
    assert not unknown, f"not in the table of {Path(__file__).name}: {sorted(unknown)}"


@pytest.mark.parametrize("module", [module for module in _modules() if module in FLAT])
def test_imports_only_modules_before_it(module: str) -> None:
    allowed = set(FLAT[: FLAT.index(module)])
    if module in JOINS_PIPELINE:
        allowed.add("pipeline")
    later = _own_imports(module) - allowed
    assert not later, f"{module} imports {sorted(later)}, which do not stand before it"


def test_pipeline_knows_nothing_of_media() -> None:
    assert _own_imports("pipeline") == set()


def test_package_imports_neither_testing_nor_cli() -> None:
    names = {name.split(".")[1] for name in _imports(PACKAGE / "__init__.py") if "." in name}
    assert not names & {"testing", "cli", "__main__"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_outside_packages_come_in_by_their_own_door(package: str) -> None:
    importers = {
        module
        for module in [*_modules(), "__init__"]
        for path in _files(module)
        if any(name.split(".")[0] == package for name in _imports(path))
    }
    strangers = importers - MAY_IMPORT[package]
    assert not strangers, f"{sorted(strangers)} must not import {package}"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import av.filter", {"av.filter"}),
        ("from spdl_media import _backends", {"spdl_media._backends"}),
        ("from . import errors", {"spdl_media.errors"}),
        ("from .errors import MediaError", {"spdl_media.errors.MediaError"}),
        ("def f():\n    import torch", {"torch"}),
    ],
)
def test_reader_sees_every_form_of_import(
    line: str, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "module.py").write_text(line)
    assert set(_imports(tmp_path / "module.py")) == names
