"""The samples, run as their users run them."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import av
import numpy as np
import pytest

import spdl_media as sm
from spdl_media.testing import index_planes, make_image, make_video

CHECKOUT = Path(__file__).resolve().parent.parent
SAMPLES = CHECKOUT / "samples"
MEDIA = SAMPLES / "media"
SCRIPT = SAMPLES / "decode_media.py"
STILLS = [
    "mirror.webp",
    "mirror_gray.png",
    "technician.jpg",
    "technician_odd.webp",
    "technician_turned.jpg",
]


# The package of this checkout, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(CHECKOUT)}


def run(
    *args: str | Path, cwd: Path, columns: int = 100, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the sample as a user does, in a folder that is not the checkout."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)],
        cwd=cwd,
        env={**ENVIRONMENT, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == status, done.stderr
    return done


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def decode_media() -> Iterator[ModuleType]:
    yield load(SCRIPT)
    del sys.modules[SCRIPT.stem]


def without_milliseconds(table: str) -> str:
    table = re.sub(r" +\d+\.\d$", "", table, flags=re.MULTILINE)
    return re.sub(r"\d+ ms|ms$| +$", "", table, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def own_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the sample prints without arguments."""
    return run(cwd=tmp_path_factory.mktemp("elsewhere")).stdout


def test_prints_what_its_docstring_shows(decode_media: ModuleType, own_table: str) -> None:
    assert decode_media.__doc__ is not None
    shown = re.search(r"Output .*?::\n\n(.*?)\n\n", decode_media.__doc__, re.DOTALL)
    assert shown is not None
    promised = re.sub(r"^    ", "", shown[1], flags=re.MULTILINE)
    assert [line.split() for line in without_milliseconds(own_table).splitlines()] == [
        line.split() for line in without_milliseconds(promised).splitlines()
    ]


def test_all_four_streams_of_the_clip_and_every_still_are_rows(own_table: str) -> None:
    rows = own_table.splitlines()[1:-1]
    kinds = [re.search(r"(video|audio|image)( \d)?", row)[0] for row in rows]  # type: ignore[index]
    assert sorted(kinds) == ["audio 1", "audio 4", *["image"] * 5, "video 0", "video 3"]
    for still in STILLS:
        assert sum(row.startswith(still) for row in rows) == 1


def test_lines_fit_the_terminal(
    tmp_path: Path,
    decode_media: ModuleType,
    index_clips: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = tmp_path / "a_folder_with_a_long_name" / "and_a_clip_with_a_name_that_is_even_longer"
    long.mkdir(parents=True)
    (long / "clip.mp4").write_bytes(index_clips["mp4"])
    (long / "cut.mp4").write_bytes(index_clips["mp4"][:1000])
    deep = make_video(index_planes(2, 3840, 16, pix_fmt="yuv422p10le"), pix_fmt="yuv422p10le")
    (long / "deep.mkv").write_bytes(deep)
    monkeypatch.setattr(sys, "argv", ["decode_media.py", str(tmp_path)])
    for columns in (60, 80, 97, 120, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        decode_media.main()
        table = capsys.readouterr().out
        longest = max(map(len, table.splitlines()))
        assert longest <= min(max(columns, 80), 120)
        assert table.count("deep.mkv") == table.count("cut.mp4") == 1
        assert "yuv422p10le" in table


def test_a_file_of_the_user_is_decoded_instead(
    tmp_path: Path, index_clips: dict[str, bytes]
) -> None:
    (tmp_path / "clip.mkv").write_bytes(index_clips["matroska"])
    table = run("clip.mkv", cwd=tmp_path).stdout
    assert re.search(
        r"^clip\.mkv +video 0 +hevc +64x48 +yuv420p +3\.000 +30 +upright", table, re.MULTILINE
    )
    assert "\n1 of 1 streams and pictures decoded from 1 file in " in table
    assert "nasa" not in table


def test_folders_are_searched_and_what_is_no_media_is_left_out(tmp_path: Path) -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    deeper = tmp_path / "media" / "b" / "c"
    deeper.mkdir(parents=True)
    for file in (tmp_path / "media" / "z.png", deeper / "a.png"):
        file.write_bytes(make_image(picture, codec="png"))
    (tmp_path / "media" / ".hidden.png").write_bytes(b"no picture")
    (tmp_path / "media" / "README.md").write_text("# Not media\n")
    (deeper / "script.py").write_text("print('not media')\n")
    (deeper / "empty.txt").touch()
    (deeper / "lines.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nWords.\n")
    rows = run("media", cwd=tmp_path).stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["file", "z.png", str(Path("b/c/a.png")), "2"]


def test_named_files_are_reported(tmp_path: Path) -> None:
    files = [
        ("README.md", b"# Not media\n", "cannot open it as media"),
        ("lines.srt", b"1\n00:00:01,000 --> 00:00:02,000\nWords.\n", "holds no picture, video or"),
        ("empty.mp4", b"", "is empty"),
        ("absent.mp4", None, "No such file"),
    ]
    for name, content, _ in files:
        if content is not None:
            (tmp_path / name).write_bytes(content)
    done = run(*(name for name, _, _ in files), cwd=tmp_path, status=1)
    _, *lines, summary = done.stdout.splitlines()
    assert summary.startswith("0 of 4 streams and pictures decoded from 4 files")
    text = " ".join(line.strip() for line in lines)
    starts = [re.search(rf"{re.escape(name)} +error +\w", text) for name, _, _ in files]
    places = [start.start() for start in starts if start is not None]
    assert len(places) == len(files)
    for name, _, why in files:
        place = text.index(name)
        assert why in text[place : min([at for at in places if at > place], default=None)], name


def test_a_damaged_file_is_one_row_that_says_why(tmp_path: Path) -> None:
    jpeg = (MEDIA / "technician.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (tmp_path / "text.jpg").write_text("This is no picture, whatever it is called.")
    (tmp_path / "whole.jpg").write_bytes(jpeg)
    clip = (MEDIA / "nasa_13013.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(clip[: len(clip) // 2])
    table = run(tmp_path, cwd=tmp_path).stdout
    for name in ("cut.jpg", "text.jpg", "cut.mp4"):
        assert len(re.findall(rf"^{name} +(error|image) +\w+ \w+ \w+", table, re.MULTILINE)) == 1
    assert re.search(r"^whole\.jpg +image +mjpeg +480x270", table, re.MULTILINE)
    assert "\n1 of 4 streams and pictures decoded from 4 files in " in table


def test_a_name_of_odd_letters_stays_one_line(tmp_path: Path) -> None:
    name = os.fsdecode(b"new\nline \xff.jpg")
    try:
        (tmp_path / name).write_bytes((MEDIA / "technician.jpg").read_bytes())
    except OSError:
        pytest.skip("the file system takes no such name")
    assert "\nnew?line ?.jpg  image" in run(tmp_path, cwd=tmp_path).stdout


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, cwd=tmp_path, status=1).stderr == f"no media in {tmp_path}\n"


def test_a_wrong_command_is_a_usage_error(tmp_path: Path) -> None:
    assert "usage: decode_media.py" in run("--fast", cwd=tmp_path, status=2).stderr


def test_a_folder_that_cannot_be_read_is_a_row(
    decode_media: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Root may read everything, so the system's answer is played.
    def walk(top: Path, onerror: Callable[[OSError], None]) -> Iterator[object]:
        onerror(PermissionError(errno.EACCES, "Permission denied", str(top / "locked")))
        yield top, [], []

    monkeypatch.setattr(decode_media.os, "walk", walk)
    (row,) = decode_media.find_files([tmp_path])
    assert (row.file, row.cells, row.error) == (
        str(tmp_path / "locked"),
        ("error",),
        "Permission denied",
    )


def test_ctrl_c_prints_what_is_there(
    decode_media: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode_file = decode_media.decode_file

    def interrupted(file: object) -> Iterator[object]:
        for row in decode_file(file):
            yield row
            if row.file == "nasa_13013.mp4":
                raise KeyboardInterrupt

    monkeypatch.setattr(decode_media, "decode_file", interrupted)
    monkeypatch.setattr(sys, "argv", ["decode_media.py"])
    assert decode_media.main() == 130
    out, err = capsys.readouterr()
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["file", "mirror.webp", "mirror_gray.png", "nasa_13013.mp4", "3"]
    assert err == ""


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=100)
    assert err == b""


def test_a_long_video_is_never_held_as_a_whole(
    decode_media: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "long.mkv"
    path.write_bytes(make_video(index_planes(300, 64, 48), format="matroska", codec="ffv1"))
    sizes = []
    frames_of = decode_media.stream_frames

    def watched(path: Path, index: int) -> Iterator[sm.VideoFrames | sm.AudioFrames]:
        for frames in frames_of(path, index):
            sizes.append(len(frames))
            yield frames

    monkeypatch.setattr(decode_media, "stream_frames", watched)
    (row,) = decode_media.decode_file(decode_media.Found(path, "long.mkv", named=True))
    assert row.cells[5] == "300"
    assert sum(sizes) == 300
    assert max(sizes) == 16


def rgb(source: Path) -> np.ndarray:
    return sm.decode_packets(sm.demux_image(source)).planes[0]


def test_stills_show_the_frames_they_are_named_for() -> None:
    clip = sm.decode_packets(sm.demux_video(MEDIA / "nasa_13013.mp4"))
    technician, mirror = (clip[number].planes[0].astype(int) for number in (200, 300))
    pairs = {
        "technician.jpg": technician,
        "technician_turned.jpg": technician,
        "technician_odd.webp": technician[::2, :-2:2],
        "mirror.webp": mirror[::2, ::2],
        "mirror_gray.png": np.repeat(mirror @ (0.299, 0.587, 0.114), 3).reshape(mirror.shape),
    }
    for name, expected in pairs.items():
        picture = rgb(MEDIA / name)
        assert picture.shape == expected.shape, name
        # Levels of 255: conversion to RGB with its rounding, and the loss of JPEG and WebP.
        assert np.abs(picture - expected).mean() < 4, name


def test_stills_are_of_the_kinds_that_their_names_say() -> None:
    info = {name: sm.probe(MEDIA / name).streams[0] for name in STILLS}
    facts = {name: (s.codec, s.pix_fmt, s.orientation, s.width) for name, s in info.items()}  # type: ignore[union-attr]
    assert facts == {
        "mirror.webp": ("webp", "argb", 1, 240),
        "mirror_gray.png": ("png", "gray", 1, 480),
        "technician.jpg": ("mjpeg", "yuvj420p", 1, 480),
        "technician_odd.webp": ("webp", "yuv420p", 1, 239),
        "technician_turned.jpg": ("mjpeg", "yuvj420p", 6, 480),
    }
    assert (MEDIA / "mirror.webp").read_bytes().find(b"VP8L") == 12  # without loss


def test_make_stills_makes_the_stills_again(tmp_path: Path) -> None:
    script = MEDIA / "make_stills.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=100, check=True
    )
    shown = re.search(r"Output::\n\n(.*?)\n\"\"\"", script.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    assert (
        done.stdout == re.sub(r"^    ", "", shown[1] + "\n", flags=re.MULTILINE).rstrip("\n") + "\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == STILLS
    if av.__version__.startswith("18."):  # of the one that the stills in the folder were made with
        for name in STILLS:
            assert (tmp_path / name).read_bytes() == (MEDIA / name).read_bytes(), name
    for name in STILLS:
        assert np.abs(rgb(tmp_path / name) - rgb(MEDIA / name).astype(int)).mean() < 1, name


def test_samples_use_the_public_names_alone() -> None:
    text = SCRIPT.read_text("utf-8")
    assert re.findall(r"^.*import.*spdl_media.*$|^from spdl_media.*$", text, re.MULTILINE) == [
        "import spdl_media as sm"
    ]
    assert set(re.findall(r"\bsm\.(\w+)", text)) <= set(sm.__all__)
