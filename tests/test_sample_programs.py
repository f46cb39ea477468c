"""The sample programs of trainings, run as users run them, and their loaders, stopped and resumed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notebooks import run as run_notebook

import spdl_media as sm

CHECKOUT = Path(__file__).resolve().parent.parent
SAMPLES = CHECKOUT / "samples"
# Expected messages about the images that the samples damage.
LOGGED = re.compile(
    r"first failure of stage '((ImageRecipe|load)': DecodeError|download': ClientResponseError): |"
    r"failures of this epoch|\[[^]]*\] core_worker.cc"  # Ray warns about restarting actors
)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("decode_plot", "matplotlib"),
        ("filters", None),
        ("failures", None),
        ("long_video", None),
        ("tune", None),
        ("image_server", None),
        pytest.param("async_downloads", "aiohttp", marks=pytest.mark.long),  # one takes 5 s to fail
        pytest.param("spdl_steps", "torch", marks=pytest.mark.long),
        # Slow: many processes, or imports of many packages besides PyTorch.
        pytest.param("elsewhere", "datasets", marks=pytest.mark.long),
        pytest.param("lightning_classifier", "lightning", marks=pytest.mark.long),
        pytest.param("dask_cluster", "distributed", marks=pytest.mark.long),
        pytest.param("ray_data", "ray", marks=pytest.mark.long),
        ("speech", None),
        ("captions", None),
        ("video_clips", None),
        ("caption_shards", None),
        ("interrupted", None),
        ("torch_dataset", "torch"),
        # Five processes with PyTorch, in two rounds.
        pytest.param("train_ddp", "torch", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_prints_what_its_docstring_shows(name: str, package: str | None, tmp_path: Path) -> None:
    if package is not None:
        pytest.importorskip(package)
    script = SAMPLES / f"{name}.py"
    # Ray warns about its own settings.
    strict = [] if name == "ray_data" else ["-W", "error"]
    done = subprocess.run(
        [sys.executable, *strict, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=500 if name == "train_ddp" else 100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(LOGGED.match(line) for line in done.stderr.splitlines()), done.stderr
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert docstring is not None
    shown = re.search(r"Output::\n\n(.*?)(?:\n\n|\Z)", docstring, re.DOTALL)
    assert shown is not None
    assert [line.strip() for line in shown[1].splitlines()] == done.stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a sample; the module is removed after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(SAMPLES))
    yield importlib.import_module
    for name in {path.stem for path in SAMPLES.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


def plain(batch: Any) -> Any:
    """Convert a batch to values that ``==`` compares bit for bit."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch):
        return [plain(getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    if isinstance(batch, str):
        return batch
    array = np.asarray(batch)
    return str(array.dtype), array.shape, array.tobytes()


def photos(made: Any, folder: Path) -> Path:
    made.cut_short(made.make_photos(folder / "train", 100)[7])
    return folder


def shards(made: Any, folder: Path) -> Path:
    importlib.import_module("caption_shards").make_shards(folder)
    return folder


# For each sample: how its media are made, and its loader.
LOADERS: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any, Any], sm.DataLoader]]] = {
    "train_images": (photos, lambda sample, folder: sample.train_loader(folder)),
    "train_ddp": (
        photos,
        lambda sample, folder: sample.loader(folder / "train", rank=1, world_size=2),
    ),
    "speech": (
        lambda made, folder: made.make_sounds(folder, [3.5, 1, 4] * 6),
        lambda sample, paths: sample.loader(paths),
    ),
    "captions": (
        lambda made, folder: importlib.import_module("captions").make_items(folder),
        lambda sample, items: sample.loader(items),
    ),
    "video_clips": (
        lambda made, folder: made.make_movies(folder, 9),
        lambda sample, paths: sample.loader(paths),
    ),
    "caption_shards": (shards, lambda sample, folder: sample.loader(folder, 0, 1)),
    "interrupted": (
        lambda made, folder: [str(path) for path in made.make_photos(folder, 40)],
        lambda sample, paths: sample.loader(paths),
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_resumed_after_any_batch_gives_the_same_bits(
    name: str, sample: Callable[[str], Any], tmp_path: Path
) -> None:
    if name == "train_ddp":
        pytest.importorskip("torch")
    make_media, make_loader = LOADERS[name]
    module = sample(name)
    media = make_media(sample("made_media"), tmp_path)
    loader = make_loader(module, media)
    loader.set_epoch(1)
    whole, states = [], []
    for batch in loader:
        whole.append(plain(batch))
        states.append(json.dumps(loader.state_dict()))
    assert len(whole) > 2
    for number, state in enumerate(states[:-1], 1):
        resumed = make_loader(module, media)
        resumed.load_state_dict(json.loads(state))
        assert resumed.epoch == 1
        assert [plain(batch) for batch in resumed] == whole[number:]


def test_every_sample_with_a_loader_is_among_those(sample: Callable[[str], Any]) -> None:
    found = {
        path.stem for path in SAMPLES.glob("*.py") if "sm.DataLoader(" in path.read_text("utf-8")
    }
    # The other samples are not trainings.
    assert found - {"elsewhere", "failures", "lightning_classifier"} == set(LOADERS)


def test_the_notebook_gives_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES)
    path = Path("notebook.ipynb")
    stored = json.loads(path.read_text("utf-8"))
    for old, new in zip(stored["cells"], run_notebook(path)["cells"], strict=True):
        for before, after in zip(old.get("outputs", []), new.get("outputs", []), strict=True):
            text, now = (one.get("text") or one["data"]["text/plain"] for one in (before, after))
            if "PipelineStatistics" not in text[0]:
                assert now == text
            # Pixels depend on the version of FFmpeg, so only the number of images is compared.
            images = [
                "".join(one.get("data", {}).get("text/html", "")).count("<img")
                for one in (before, after)
            ]
            assert images[0] == images[1]


def test_a_notebook_that_gives_something_else_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    cell = {"cell_type": "code", "source": ["print(1)\n", "1 + 1"], "outputs": []}
    path.write_text(json.dumps({"cells": [cell]}))
    printed, value = run_notebook(path)["cells"][0]["outputs"]
    assert printed["text"] == ["1\n"]
    assert value["data"]["text/plain"] == ["2"]
