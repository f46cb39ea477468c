"""The sample programs of trainings, run as users run them, and their loaders, stopped and resumed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import effort
import numpy as np
import pytest
from notebooks import run as run_notebook
from programs import SAMPLES, run_python

import spdl_media as sm

# Expected messages about the images that the samples damage.
LOGGED = re.compile(
    r"first failure of stage '((ImageRecipe|load)': DecodeError|download': ClientResponseError): |"
    r"failures of this epoch|\[[^]]*\] core_worker.cc"  # Ray warns about restarting actors
)


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a sample; the module is removed after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(SAMPLES))
    yield importlib.import_module
    for name in {path.stem for path in SAMPLES.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


def run_apart(script: Path) -> tuple[str, str]:
    """Run a program in a process of its own, and return what it printed and what it logged."""
    # Ray warns about its own settings.
    strict = [] if script.stem == "ray_data" else ["-W", "error"]
    done = run_python(*strict, script)
    return done.stdout, done.stderr


@pytest.fixture
def run_here(
    sample: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Callable[[Path], tuple[str, str]]:
    """Return a function like :func:`run_apart` for this process, which has imported PyTorch already."""

    def run(script: Path) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [str(script)])
        status = None
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code
        printed = capfd.readouterr()
        assert not status, printed
        return printed.out, "\n".join([*printed.err.splitlines(), *caplog.messages])

    return run


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("decode_plot", "matplotlib"),
        ("filters", None),
        ("tune", None),
        ("image_server", None),
        ("speech", None),
        ("captions", None),
        ("video_clips", None),
        ("caption_shards", None),
        ("torch_dataset", "torch"),
    ],
)
def test_prints_what_its_docstring_shows(
    name: str,
    package: str | None,
    run_here: Callable[[Path], tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    check_program(name, package, run_here)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        # They set up logging, count the threads and measure the memory of their process.
        ("failures", None),
        ("interrupted", None),
        pytest.param("long_video", None, marks=pytest.mark.long),  # of ten minutes
        pytest.param("async_downloads", "aiohttp", marks=pytest.mark.long),  # one takes 5 s to fail
        pytest.param("spdl_steps", "torch", marks=pytest.mark.long),
        # Slow: many processes, or imports of many packages besides PyTorch.
        pytest.param("elsewhere", "datasets", marks=pytest.mark.long),
        pytest.param("lightning_classifier", "lightning", marks=pytest.mark.long),
        pytest.param("dask_cluster", "distributed", marks=pytest.mark.long),
        pytest.param("ray_data", "ray", marks=pytest.mark.long),
        # Five processes with PyTorch, in two rounds.
        pytest.param("train_ddp", "torch", marks=pytest.mark.long),
    ],
)
def test_prints_it_in_a_process_of_its_own(
    name: str, package: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_program(name, package, run_apart)


def check_program(name: str, package: str | None, run: Callable[[Path], tuple[str, str]]) -> None:
    """Assert that a sample prints the output of its docstring, and leaves nothing in the current folder."""
    if package is not None:
        pytest.importorskip(package)
    script = SAMPLES / f"{name}.py"
    printed, logged = run(script)
    assert all(LOGGED.match(line) for line in logged.splitlines()), logged
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert docstring is not None
    shown = re.search(r"Output::\n\n(.*?)(?:\n\n|\Z)", docstring, re.DOTALL)
    assert shown is not None
    assert [line.strip() for line in shown[1].splitlines()] == printed.splitlines()
    assert list(Path().iterdir()) == []


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
    last = len(whole) - 1
    for number in range(1, len(whole)) if effort.LONG else sorted({1, last // 2 + 1, last}):
        resumed = make_loader(module, media)
        resumed.load_state_dict(json.loads(states[number - 1]))
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
