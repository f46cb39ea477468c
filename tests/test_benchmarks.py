"""The benchmarks run, in short, on made media, without other libraries. Figures are not checked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from programs import BENCHMARKS, run_python

from spdl_media.testing import index_frames, index_planes, make_audio, make_image, make_video

IMAGES = BENCHMARKS / "images.py"
DOWNSCALE = ["spdl_media, downscale"] if importlib.util.find_spec("simplejpeg") else []
OURS = ["spdl_media", "spdl_media, fast", "spdl_media, float32", *DOWNSCALE, "spdl_media, in steps"]
SPREAD = {"median", "lowest", "highest"}


def run(*args: object, status: int = 0, script: Path = IMAGES) -> CompletedProcess[str]:
    done = run_python(script, *args, status=status)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three smooth images of two sizes, and a file that is not an image."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for index, (width, height) in enumerate([(64, 48), (48, 64), (64, 48)]):
        ramp = np.linspace(0, 200, height * width * 3).reshape(height, width, 3)
        jpeg = make_image(ramp.astype(np.uint8), codec="mjpeg")
        (pictures / f"{index}.jpg").write_bytes(jpeg)
    (pictures / "notes.txt").write_text("no picture")
    return pictures


TINY = ("--peers", "none", "--rounds", "2", "--seconds", "0.02", "--batch", "2", "--size", "32")


def test_images_writes_figures_of_every_way(folder: Path, tmp_path: Path) -> None:
    result, chart = tmp_path / "result.json", tmp_path / "chart.png"
    draws = importlib.util.find_spec("matplotlib") is not None
    options = ("--json", result, *(("--chart", chart) if draws else ()))
    done = run("--images", folder, *TINY, *options)
    assert not draws or chart.read_bytes().startswith(b"\x89PNG")
    document = json.loads(result.read_text())
    assert document["settings"]["images"] == 3
    assert list(document["results"]) == [*OURS, "nothing (C code)"]
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == list(document["results"])
    for row in document["results"].values():
        assert set(row["images_per_second"]) == {"1", "2"}
        gil = [row[name] for name in ("gil_loss", "gil_microseconds", "beside_per_second")]
        for spread in (*row["images_per_second"].values(), row["two_over_one"], *gil):
            assert set(spread) == SPREAD
            assert spread["lowest"] <= spread["median"] <= spread["highest"]
        assert row["images_per_second"]["1"]["lowest"] > 0


def test_images_measures_how_true_the_images_are(folder: Path) -> None:
    done = run("--images", folder, *TINY, "--threads", "1", "--json", "-")
    document = json.loads(done.stdout[done.stdout.index("\n{") :])
    errors = {name: document["results"][name]["mean_error"] for name in OURS}
    assert errors["spdl_media"] == errors["spdl_media, in steps"] <= 0.5
    assert 0 < errors["spdl_media, fast"] < 4


def test_images_says_what_is_wrong(tmp_path: Path) -> None:
    assert "no .jpg" in run("--images", tmp_path, status=2).stderr
    (tmp_path / "a.jpg").touch()
    assert "none of SPDL" in run("--images", tmp_path, "--peers", "SDPL", status=2).stderr


def test_audio_writes_figures_of_every_work(tmp_path: Path) -> None:
    path, result = tmp_path / "a.flac", tmp_path / "audio.json"
    samples = (np.arange(3 * 8000, dtype=np.int16) % 100).reshape(-1, 1)
    path.write_bytes(make_audio(samples, 8000, codec="flac", format="flac"))
    tiny = ("--peers", "none", "--rounds", "2", "--seconds", "0.01", "--json", result)
    done = run(path, *tiny, script=BENCHMARKS / "audio.py")
    works = json.loads(result.read_text())["results"]["a.flac"]
    assert {work: list(routes) for work, routes in works.items()} == {
        "whole": ["spdl_media", "PyAV"],
        "window": ["spdl_media"],
        "16 kHz mono": ["spdl_media"],
    }
    assert set(works["whole"]["spdl_media"]["two_over_one"]) == SPREAD
    assert len(done.stdout.splitlines()) == 5


VIDEO = BENCHMARKS / "video.py"
ROUTES = ["spdl_media", "spdl_media, fresh", "PyAV"]
WORKS = ["native", "square", "square, fast", "planes"]


def test_video_writes_figures_of_every_route(tmp_path: Path) -> None:
    video, result = tmp_path / "made.mp4", tmp_path / "result.json"
    video.write_bytes(make_video(index_frames(5, 64, 48), codec="mpeg4", pix_fmt="yuv420p"))
    options = ("--peers", "none", "--rounds", "2", "--json", result)
    done = run(video, *options, script=VIDEO)
    assert done.stderr == ""  # the lean loop gives equal pixels
    works = json.loads(result.read_text())["results"]["made.mp4"]
    assert list(works) == WORKS
    for routes in works.values():
        assert list(routes) == ROUTES
        for row in routes.values():
            assert set(row["frames_per_second"]) == set(row["ratio_to_pyav"]) == SPREAD
            assert row["frames_per_second"]["lowest"] > 0
            assert row["faults_per_frame"]["lowest"] >= 0
    assert len(done.stdout.splitlines()) == 1 + len(WORKS) * len(ROUTES)


def test_an_unknown_work_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "none.mp4", "--works", "upside down", status=2, script=VIDEO)
    assert "'upside down' is none of native; square; square, fast; planes" in done.stderr


CLIP_ROUTES = {
    "clips": ["spdl_media"],
    "opened": ["spdl_media"],
    "training": ["spdl_media"],
    "long": ["10 s", "10 minutes"],
    "index": ["Matroska, read", "Matroska, loaded", "MPEG-TS, read", "MPEG-TS, loaded"],
}


def test_clips_writes_figures_of_every_route(tmp_path: Path) -> None:
    video, result = tmp_path / "made.mp4", tmp_path / "result.json"
    planes = index_planes(120, 64, 48)
    video.write_bytes(make_video(planes, codec="libx264", format="mp4", gop_size=20))
    works = ",".join(CLIP_ROUTES)
    options = ["--peers", "none", "--rounds", "2", "--works", works, "--json", str(result)]
    done = run(video, *options, script=BENCHMARKS / "clips.py")
    assert done.stderr == ""
    results = json.loads(result.read_text())["results"]
    assert {name: list(routes) for name, routes in results.items()} == CLIP_ROUTES
    for routes in results.values():
        for row in routes.values():
            assert row["ms"]["lowest"] > 0
    assert len(done.stdout.splitlines()) == 1 + sum(map(len, CLIP_ROUTES.values()))
