"""Imports go one way: each module may import those before it in the table, and no others."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.testing import index_frames, index_planes, make_audio, make_image, make_video

PACKAGE = Path(__file__).resolve().parent.parent / "spdl_media"

LOADER = ["loader_items", "loader_ends", "loader_stages", "dataloader"]
# The order is from left to right and from top to bottom. A new module is one word here. Folders of helpers
# are listed file by file, other folders are one module.
ORDER = [
    ["errors", "_checks", "_threads", "_optional", "config", "timing"],
    ["destination", "shared_memory", "ring"],
    ["_ffmpeg", "formats"],
    ["geometry"],
    ["parts", "still_parts", "still_variants", "stills", "still_headers"],
    ["readers", "_remote"],
    ["inputs"],
    ["array_formats"],
    ["codec", "audio_clock", "coded_units", "packets", "packet_table", "coded_headers"],
    ["packet_corrections"],
    ["frame_scan", "mp4_audio", "ogg_audio", "_container", "window", "demuxer", "demux"],
    ["operations", "filter_desc", "crops"],
    ["image_frames", "frames", "array_frames"],
    ["graph", "fast_images", "filters", "filter_graph"],
    ["pillow_frames", "_picture_decoder", "sample_rows", "_sample_decoder"],
    ["frame_index", "frame_decoder"],
    ["image_decoder", "decode", "decoders"],
    ["cuda_driver", "handover", "devices"],
    ["storage"],
    ["buffer"],
    ["rows", "convert", "audio_arrays"],
    ["arrays", "transfer"],
    ["_collate"],
    ["arguments", "batch", "video_arrays"],
    ["cuda"],
    ["load", "_probe", "clips", "video_file", "video_clips"],
    ["recipes"],
    ["encode", "remux", "mux", "image_files", "save"],
    ["epochs", "samplers", "source", "datasets", "shards"],
    ["_resume", *LOADER],
    ["torch", "ray"],
    ["cli", "__main__"],
]
HELPERS: set[str] = set()
FLAT = [module for row in ORDER for module in row]

# Modules for users, which no other module of the table imports.
BESIDE = {"testing", "pipeline"}
JOINS_PIPELINE = {*LOADER, "torch", "cli"}

# Pure Python on bytes and text; the others up to "decode" may use FFmpeg.
PURE = {
    *("_checks", "_threads", "_optional", "errors", "config", "timing", "geometry"),
    *("parts", "still_parts", "stills", "still_variants", "still_headers"),
    *("_remote", "operations", "filter_desc", "crops"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "av": {
        *FLAT[: FLAT.index("decoders") + 1],
        "_probe",
        "encode",
        "image_files",
        "remux",
        "mux",
        "cuda",
        "testing",
    }
    - PURE,
    "asyncio": {
        "pipeline",
        "loader_stages",
        "loader_items",
        "loader_ends",
        "load",
    },
    "click": {"cli"},
    "rich": {"cli"},
    # Optional packages, which may be imported only by name, by the table in _optional.
    "isal": {"array_formats"},
    **{name: set() for name in ("torch", "cupy", "jax", "numba", "nvidia", "fsspec")},
}


def _module_of(path: Path) -> str:
    """Return the word for a file in the table."""
    return _word(path.relative_to(PACKAGE).with_suffix("").parts)


def _word(parts: Sequence[str]) -> str:
    is_helper = parts[0] in HELPERS and len(parts) > 1 and parts[1] != "__init__"
    return ".".join(parts[:2]) if is_helper else parts[0]


@cache
def _files() -> dict[str, list[Path]]:
    """Return the files of each module."""
    files: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        files.setdefault(_module_of(path), []).append(path)
    return files


def _modules() -> list[str]:
    return sorted(_files().keys() - {"__init__", *HELPERS})


# Cached, because several tests use each file, and parsing all files takes seconds.
@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the full names of all imports of a file, also within functions."""
    package = ["spdl_media", *path.relative_to(PACKAGE).parent.parts]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            # `from package import name` may import a module, so use the longer name.
            names += [f"{source}.{alias.name}" for alias in node.names]
    return tuple(names)


def _own_imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    names = {name for path in _files()[module] for name in _imports(path)}
    own = {_word(name.split(".")[1:]) for name in names if name.startswith("spdl_media.")}
    assert "spdl_media" not in names, f"{module} imports the package as a whole"
    return own - {module}


def test_order_names_each_module_once() -> None:
    assert len(FLAT) == len(set(FLAT))
    assert not BESIDE & set(FLAT)


def test_every_module_has_its_place() -> None:
    unknown = set(_modules()) - set(FLAT) - BESIDE
    assert not unknown, f"not in the table of {Path(__file__).name}: {sorted(unknown)}"


@each("module", [module for module in _modules() if module in FLAT])
def test_imports_only_modules_before_it(module: str) -> None:
    allowed = set(FLAT[: FLAT.index(module)])
    if module in JOINS_PIPELINE:
        allowed.add("pipeline")
    later = _own_imports(module) - allowed
    assert not later, f"{module} imports {sorted(later)}, which do not stand before it"


def test_pipeline_knows_nothing_of_media() -> None:
    known = {"_checks", "_threads", "_optional", "ring", "shared_memory"}
    assert _own_imports("pipeline") <= known


def test_package_imports_neither_testing_nor_cli() -> None:
    names = {name.split(".")[1] for name in _imports(PACKAGE / "__init__.py") if "." in name}
    assert not names & {"testing", "cli", "__main__"}


@each("package", sorted(MAY_IMPORT))
def test_outside_packages_come_in_by_their_own_door(package: str) -> None:
    importers = {
        module
        for module in [*_modules(), "__init__"]
        for path in _files()[module]
        if any(name.split(".")[0] == package for name in _imports(path))
    }
    strangers = importers - MAY_IMPORT[package]
    assert not strangers, f"{sorted(strangers)} must not import {package}"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import av.filter", {"av.filter"}),
        ("from spdl_media import _checks", {"spdl_media._checks"}),
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


SOUND = np.zeros((44100, 1), np.int16)


@pytest.mark.parametrize(
    ("load", "data", "most"),
    [
        (
            lambda src: sm.load_image_batch([src], width=64, height=64),
            make_image(index_frames(1, 128, 96)[0], codec="mjpeg"),
            15,
        ),
        (sm.load_audio, make_audio(SOUND, 44100, codec="libmp3lame", format="mp3"), 15),
        (sm.load_video, make_video(index_planes(9, 128, 96), codec="libx264", format="mp4"), 21),
    ],
)
def test_data_passes_through_few_modules(
    load: Callable[[Any], object], data: bytes, most: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    load(path)  # fills the caches
    called: set[Path] = set()

    def note(frame: Any, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            called.add(file.relative_to(PACKAGE))

    sys.setprofile(note)
    try:
        load(path)
    finally:
        sys.setprofile(None)
    assert 5 < len(called) <= most, sorted(map(str, called))
