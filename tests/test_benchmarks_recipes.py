"""The benchmark of recipes runs, in short, on made media, without other libraries. Figures are not
checked."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from programs import BENCHMARKS, run_python

from spdl_media.testing import make_audio, make_image

SCRIPT = BENCHMARKS / "recipes.py"
AUGMENTATION = SCRIPT.with_name("augmentation.py")


def run(*args: object, status: int = 0, script: Path = SCRIPT) -> CompletedProcess[str]:
    return run_python(script, *args, status=status)


@pytest.mark.long
def test_writes_figures_of_recipes(tmp_path: Path) -> None:
    folder, result = tmp_path / "photos", tmp_path / "result.json"
    folder.mkdir()
    for index in range(3):
        ramp = np.linspace(0, 200, 64 * 48 * 3).reshape(48, 64, 3)
        data = make_image(ramp.astype(np.uint8), codec="mjpeg")
        (folder / f"{index}.jpg").write_bytes(data)
    sound = tmp_path / "sound.flac"
    samples = (np.arange(2 * 8000, dtype=np.int16) % 100).reshape(-1, 1)
    sound.write_bytes(make_audio(samples, 8000, codec="flac", format="flac"))
    media = ("--photos", folder, "--audio", sound)
    tiny = ("--peers", "none", "--count", "16", "--rounds", "1", "--batch", "4", "--size", "16")
    done = run(*media, *tiny, "--recipes", "photos", "MP3", "shards", "--json", result)
    recipes = json.loads(result.read_text())["results"]
    assert list(recipes) == ["photos", "MP3", "shards"]
    for loaders in recipes.values():
        row = loaders["spdl_media"]
        assert row["cpu_ms"]["lowest"] > 0
        assert row["items_per_second"]["lowest"] > 0
    assert done.stdout.count("\nspdl_media ") == 3


@pytest.mark.long
def test_writes_figures_of_augmentation(tmp_path: Path) -> None:
    ramp = np.linspace(0, 200, 64 * 48 * 3).reshape(48, 64, 3)
    (tmp_path / "0.jpg").write_bytes(make_image(ramp.astype(np.uint8), codec="mjpeg"))
    result = tmp_path / "result.json"
    tiny = ("--ways", "nothing", "--count", "12", "--batch", "4", "--rounds", "1", "--json", result)
    run("--images", tmp_path, *tiny, script=AUGMENTATION)
    rows = json.loads(result.read_text())["results"]
    assert [row["own"] for row in rows] == ["default", "1"]
    assert all(row[key]["lowest"] > 0 for row in rows for key in ("ms", "rate"))


def test_says_what_is_wrong(tmp_path: Path) -> None:
    assert "nothing to measure: pass --photos" in run(status=2).stderr
    assert "no .jpg" in run("--photos", tmp_path, status=2).stderr
    assert "no .jpg" in run("--images", tmp_path, status=2, script=AUGMENTATION).stderr
