"""gpu_first_hour without a GPU: the script skips its parts with reasons, and parts run on stand-ins."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_first_hour
import numpy as np
import pytest
import real_cuda

import spdl_media as sm

TESTS = Path(__file__).resolve().parent
PARTS = ["capabilities", "tests", "exits", "nvdec", "clips", "jpeg", "bench-1"]


@pytest.mark.long  # each part imports what there is of torch, CuPy and DALI
@pytest.mark.timeout(900)
@pytest.mark.skipif(real_cuda.why_not() is None, reason="there is a GPU")
def test_without_a_gpu_each_part_says_why_it_is_skipped(tmp_path: Path) -> None:
    media = TESTS.parent / "samples" / "media"
    given = {"PHOTOS": str(media), "VIDEO": str(media / "nasa_13013.mp4")}
    done = subprocess.run(
        [TESTS / "gpu_first_hour.sh", tmp_path / "results"],
        env={**os.environ, "PYTHON": sys.executable, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[: len(PARTS)]] == [[p, "skipped"] for p in PARTS]
    assert all("driver" in line or "no GPU can be used" in line for line in lines[: len(PARTS)])
    assert lines[-1] == f"0 failed, {len(PARTS)} skipped"
    assert any(line.startswith("Look at, in ") for line in lines)
    found = {path.name for path in (tmp_path / "results").iterdir()}
    assert {f"{part}.txt" for part in PARTS} | {"summary.txt"} <= found
    assert (tmp_path / "results" / "summary.txt").read_text() == done.stdout


class Loaded:
    """An array on a stand-in device."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def synchronize(self) -> None:
        pass


class Machine:
    """A stand-in device, whose work is done by the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._load_video, self.is_full = sm.load_video, False
        self.calls: list[tuple[str, Any]] = []
        found = {
            "load_video": self.load_video,
            "load_image_batch": lambda *_, **options: self.pictures("batch", options),
            "load_image_batch_nvjpeg": lambda *_, **options: self.pictures("nvjpeg", options),
            "load_image": lambda *_, **options: self.pictures("image", options),
            "transfer_buffer_cpu": lambda buffer: buffer,
        }
        for name, function in found.items():
            monkeypatch.setattr(sm, name, function)
        monkeypatch.setattr(gpu_first_hour, "need", lambda *_: None)
        monkeypatch.setattr(gpu_first_hour, "nearly_full", self.full)

    def load_video(self, src: bytes, timestamp: Any = None, **options: Any) -> Any:
        if options.pop("cuda", None) is None:
            return self._load_video(src, timestamp, **options)
        assert options.pop("decoder") == "nvdec"
        if self.is_full:
            raise sm.TransferError("NVDEC failed")
        return Loaded(self._load_video(src, timestamp, **options, quality="accurate").array)

    def pictures(self, name: str, options: Any) -> Loaded:
        assert options.pop("cuda") == 0
        self.calls.append((name, options))
        return Loaded(np.zeros((2, 3)))

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        self.is_full = True
        yield
        self.is_full = False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.long  # videos of many codecs are made
def test_nvdec_is_compared_with_the_cpu(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = gpu_first_hour.clip

    def half_as_large(
        codec: str, format: str, size: tuple[int, int], *args: int, **options: Any
    ) -> bytes:
        # Odd sizes stay odd.
        return make(codec, format, (size[0] // 2, size[1] // 2), *args, **options)

    monkeypatch.setattr(gpu_first_hour, "clip", half_as_large)
    with pytest.raises(SystemExit) as caught:
        gpu_first_hour.nvdec()
    said = capsys.readouterr().out
    assert caught.value.code == 0, said
    assert "BAD" not in said
    assert "a device that is full -> TransferError: NVDEC failed" in said
    assert said.endswith("0 of these are not as they should be\n")
    monkeypatch.setattr(gpu_first_hour, "VIDEOS", gpu_first_hour.VIDEOS[:1])
    monkeypatch.setattr(gpu_first_hour, "difference", lambda *_, **__: (3, 0.5))
    with pytest.raises(SystemExit) as caught:
        gpu_first_hour.nvdec()
    assert caught.value.code == 1
    assert "BAD  libx264 320x240  -> (3, 0.5)" in capsys.readouterr().out


def test_clips_and_images_are_timed(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = gpu_first_hour.clip("libx264", "mp4", (64, 48), 4)
    monkeypatch.setattr(gpu_first_hour, "clip", lambda *_: small)
    gpu_first_hour.clips(2)
    said = capsys.readouterr().out
    assert said.count("new decoder") == said.count("- kept decoder") == 9
    monkeypatch.setattr(gpu_first_hour, "jpegs", lambda: [b"1", b"2"])
    gpu_first_hour.jpeg(1)
    shares = [call[1]["hw_decoder_load"] for call in machine.calls if call[0] == "nvjpeg"]
    assert sorted(set(shares)) == [0.0, 0.25, 0.5, 0.65, 0.8, 1.0]
    said = capsys.readouterr().out
    assert "nvImageCodec alone" in said
    assert "8 threads: " in said


def test_ways_to_end_are_counted(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_first_hour, "_status", lambda script: 134 if "thread" in script else 0)
    with pytest.raises(SystemExit) as caught:
        gpu_first_hour.exits()
    assert caught.value.code == 1
    said = capsys.readouterr().out
    assert said.count("ok  ") == 15
    assert said.count("BAD  NVDEC in a thread -> 134") == 5
    monkeypatch.undo()
    assert gpu_first_hour._status("raise SystemExit(7)") == 7


def test_media_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_first_hour.jpegs(3)
    monkeypatch.setattr(gpu_first_hour, "jpegs", lambda _: found)
    monkeypatch.setattr(gpu_first_hour, "clip", lambda *_: b"a clip")
    gpu_first_hour.media(str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        *(f"00{number}.jpg" for number in range(3)),
        "clip.mp4",
    }
    assert sm.load_image(found[0]).shape == (375, 500, 3)
