"""The sample that cleans a folder of videos, and the benchmark of encoders, on made media."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from programs import SAMPLES, run_python

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    make_media,
    make_tone,
    make_video,
)


def test_damaged_videos_are_named_and_the_others_described(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    (folder / "sub").mkdir(parents=True)
    tracks = [
        VideoTrack(frames=index_planes(65, 160, 120), codec="libx264"),
        AudioTrack(samples=make_tone(104000, 16000), sample_rate=16000, codec="aac"),
    ]
    good = make_media(tracks, format="mp4")
    (folder / "sub" / "good.mp4").write_bytes(good)
    (folder / "short.mp4").write_bytes(good[: len(good) // 2])
    (folder / "text.mkv").write_text("no video")
    (folder / "notes.txt").write_text("not looked at")
    damaged = bytearray(make_video(index_planes(20, 160, 120), codec="libx264", format="mpegts"))
    damaged[len(damaged) // 2 : len(damaged) // 2 + 4000] = bytes(4000)
    (folder / "damaged.ts").write_bytes(damaged)
    done = run_python(
        SAMPLES / "clean_videos.py", folder, out, "--start", 2.5, "--seconds", 3, status=1
    )
    assert done.stderr == ""
    assert done.stdout.startswith("4 videos, 3 damaged\n")
    report = (out / "damaged.tsv").read_text(encoding="utf-8").splitlines()
    assert [Path(line.split("\t")[0]).name for line in report] == [
        *("damaged.ts", "short.mp4", "text.mkv"),
    ]
    assert all(len(line.split("\t")[1]) > 20 for line in report)
    result = out / "sub_good.mp4"
    stills = sorted(result.glob("0*.jpg"))
    found = [frame_index(sm.load_image(path).array) for path in stills]
    assert found == list(range(0, 65, 10))
    sheet = sm.load_image(result / "sheet.jpg").array
    assert sheet.shape == (2 * 108, 5 * 192, 3)
    # A 4:3 frame is in the middle of its tile.
    assert frame_index(np.ascontiguousarray(sheet[108:, 192 + 24 : 384 - 24])) == 60
    piece = sm.load_video(result / "piece.mp4").array
    assert [frame_index(one) for one in piece] == list(range(25, 55))
    assert sm.load_audio(result / "piece.mp4").shape[1] >= 48000


def test_a_folder_without_videos_is_reported(tmp_path: Path) -> None:
    done = run_python(SAMPLES / "clean_videos.py", tmp_path, tmp_path / "out", status=2)
    assert done.stdout == ""
    assert "there are no videos in" in done.stderr


def test_the_benchmark_of_encoders_prints_ratios(tmp_path: Path) -> None:
    sm.save_video(tmp_path / "made.mkv", index_frames(12, 64, 48), encoder="ffv1")
    script, options = SAMPLES / "benchmarks" / "encode.py", ("--rounds", 1, "--frames", 12)
    done = run_python(script, tmp_path / "made.mkv", *options)
    lines = done.stdout.splitlines()
    assert lines[0] == "12 frames of 64x48 RGB, 1 pairs"
    rows = [
        re.fullmatch(r"(\S+).* \d+/s +\d+/s  \d+\.\d\d \(.*\) +\d+\.\d\d", one) for one in lines[2:]
    ]
    assert [row and row[1] for row in rows] == [
        *("libx264", "libx264", "mpeg4", "mjpeg", "ffvhuff", "ffv1"),
    ]
