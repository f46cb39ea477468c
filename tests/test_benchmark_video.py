"""The benchmark of videos runs, in short, on a made video, without other libraries. Figures are not
checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from spdl_media.testing import index_frames, make_video

CHECKOUT = Path(__file__).resolve().parent.parent
SCRIPT = CHECKOUT / "samples" / "benchmarks" / "video.py"
ROUTES = ["spdl_media", "spdl_media, fresh", "PyAV"]
WORKS = ["native", "square", "square, fast", "planes"]
SPREAD = {"median", "lowest", "highest"}


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_video_writes_figures_of_every_route(tmp_path: Path) -> None:
    video, result = tmp_path / "made.mp4", tmp_path / "result.json"
    video.write_bytes(make_video(index_frames(5, 64, 48), codec="mpeg4", pix_fmt="yuv420p"))
    done = run(video, "--peers", "none", "--rounds", "2", "--json", result)
    assert (done.returncode, done.stderr) == (0, "")  # also: the lean loop gives equal pixels
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
    done = run(tmp_path / "none.mp4", "--works", "upside down")
    assert done.returncode == 2
    assert "'upside down' is none of native; square; square, fast; planes" in done.stderr
