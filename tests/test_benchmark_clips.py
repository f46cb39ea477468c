"""The benchmark of clips runs, in short, on a made video, without other libraries. Figures are not
checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from spdl_media.testing import index_planes, make_video

CHECKOUT = Path(__file__).resolve().parent.parent
SCRIPT = CHECKOUT / "samples" / "benchmarks" / "clips.py"
ROUTES = {
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
    works = ",".join(ROUTES)
    options = ["--peers", "none", "--rounds", "2", "--works", works, "--json", str(result)]
    done = subprocess.run(
        [sys.executable, SCRIPT, str(video), *options],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(result.read_text())["results"]
    assert {name: list(routes) for name, routes in results.items()} == ROUTES
    for routes in results.values():
        for row in routes.values():
            assert row["ms"]["lowest"] > 0
    assert len(done.stdout.splitlines()) == 1 + sum(map(len, ROUTES.values()))
