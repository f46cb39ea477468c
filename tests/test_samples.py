"""The media of the samples, which tests and documentation use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import av
import numpy as np

import spdl_media as sm

CHECKOUT = Path(__file__).resolve().parent.parent
MEDIA = CHECKOUT / "samples" / "media"
STILLS = [
    "mirror.webp",
    "mirror_gray.png",
    "technician.jpg",
    "technician_odd.webp",
    "technician_turned.jpg",
]


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
        # Allowed differences in levels: rounding of the conversion to RGB, and the loss of JPEG and WebP.
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
    assert (MEDIA / "mirror.webp").read_bytes().find(b"VP8L") == 12  # lossless


def test_make_stills_makes_the_stills_again(tmp_path: Path) -> None:
    script = MEDIA / "make_stills.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=True
    )
    shown = re.search(r"Output::\n\n(.*?)\n\"\"\"", script.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    assert (
        done.stdout == re.sub(r"^    ", "", shown[1] + "\n", flags=re.MULTILINE).rstrip("\n") + "\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == STILLS
    if av.__version__.startswith("18."):  # the version with which the stills were made
        for name in STILLS:
            assert (tmp_path / name).read_bytes() == (MEDIA / name).read_bytes(), name
    for name in STILLS:
        assert np.abs(rgb(tmp_path / name) - rgb(MEDIA / name).astype(int)).mean() < 1, name
