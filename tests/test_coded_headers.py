"""FFmpeg opens files of H.264 and VP9 without decoding, and all is stated as if it had decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest

import spdl_media as sm
from spdl_media import coded_headers
from spdl_media.testing import AudioTrack, VideoTrack, index_planes, make_media

COLORS = [np.zeros((48, 64, 3), "u1")] * 9
VP9_AUDIO = "aac,opus,vorbis"
PLAIN = sm.demux_config(format="mov")  # FFmpeg's own way, with all decoders


@pytest.fixture
def tried() -> Iterator[list[str | None]]:
    """The decoders that FFmpeg may open, at each opening of a source."""
    found: list[str | None] = []
    opened = av.open

    def open_noted(file: Any, mode: str = "r", **options: Any) -> Any:
        if mode == "r":
            found.append(options["options"].get("codec_whitelist"))
        return opened(file, mode, **options)

    with mock.patch.object(av, "open", open_noted):
        yield found


def movie(x264: str = "", sound: str | None = None, **options: Any) -> bytes:
    options = {"codec": "libx264", "frames": index_planes(20, 64, 48), **options}
    if x264:
        options["options"] = {"x264-params": x264}
    tracks: list[Any] = [VideoTrack(**options)]
    if sound is not None:
        tracks.append(
            AudioTrack(samples=np.zeros((96000, 2), "f4"), sample_rate=48000, codec=sound)
        )
    return make_media(tracks, format="mp4", options={"movflags": "faststart"})


def vp9(format: str = "webm", sound: str | None = None, **options: Any) -> bytes:
    pixels = options.pop("pix_fmt", "yuv420p")
    video = VideoTrack(frames=COLORS, codec="libvpx-vp9", pix_fmt=pixels, options=options)
    tracks: list[Any] = [video]
    if sound is not None:
        tracks.append(
            AudioTrack(samples=np.zeros((48000, 2), "f4"), sample_rate=48000, codec=sound)
        )
    return make_media(tracks, format=format)


def of_more_bits(data: bytes, depth: str) -> bytes:
    """Return a movie whose first frame has 10 bits (0) or 12 bits (1), which this libvpx cannot encode."""
    start = data.index(b"I\x83B") + 3
    bits = f"{int.from_bytes(data[start : start + 16], 'big'):0128b}"
    header = int(depth + bits[:-1], 2).to_bytes(16, "big")
    return data[: start - 4] + b"\x92I\x83B" + header + data[start + 16 :]


def with_other_header(inside: bytes) -> bytes:
    """Return a movie whose index has another level than the headers in its packets."""
    data = movie("repeat-headers=1")
    start = data.index(b"avcC") + 12  # the level after version, set, profile and constraints
    at = start + data[start:].index(b"\x67") + 3
    return data[:at] + inside + data[at + 1 :]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (movie, ["none"]),
        (lambda: movie(max_b_frames=2), ["none"]),
        (lambda: movie(frames=index_planes(20, 66, 50)), ["none"]),  # cropped
        (lambda: movie("colorprim=bt709:transfer=bt709:colormatrix=bt709:sar=7/5"), ["none"]),
        (lambda: movie("overscan=show:chromaloc=2"), ["none"]),
        (lambda: movie("fullrange=on"), ["none"]),
        (lambda: movie("fullrange=on", pix_fmt="yuv420p10le", frames=COLORS), ["none"]),
        (lambda: movie("interlaced=1"), ["none"]),
        (lambda: movie("repeat-headers=1"), ["none"]),
        (lambda: movie(sound="aac"), ["aac"]),
        # The header does not say all, or not the truth.
        (lambda: movie(sound="ac3"), [None]),
        (lambda: movie("sar=1/100"), [None]),  # FFmpeg ignores this shape of a pixel
        (lambda: movie("alternative-transfer=arib-std-b67"), ["none", None]),
        (lambda: with_other_header(b"\x0b"), ["none", None]),
        (lambda: movie()[: movie().index(b"mdat") + 60], ["none", None]),  # within the first frame
        (lambda: movie(pix_fmt="yuv444p", frames=COLORS), [None]),
        (vp9, [VP9_AUDIO]),
        (lambda: vp9("mp4", "aac"), [None]),
        (lambda: vp9("webm", "libopus", color_range="pc", colorspace="bt709"), [VP9_AUDIO]),
        (lambda: of_more_bits(vp9(colorspace="bt2020nc"), "0"), [VP9_AUDIO]),
        (lambda: of_more_bits(vp9(), "1"), [VP9_AUDIO]),
        (lambda: vp9()[: vp9().index(b"I\x83B") + 20], [None]),  # within the first frame
        (lambda: vp9().replace(b"\xb0\x81\x40", b"\xb0\x81\x41"), [VP9_AUDIO, None]),  # the width
        (lambda: vp9(pix_fmt="yuv444p"), [None]),
    ],
)
def test_the_header_states_what_ffmpeg_finds_by_decoding(
    make: Callable[[], bytes], expected: list[str | None], tried: list[str | None]
) -> None:
    data = make()
    tried.clear()
    found = sm.demux_video(data)
    assert tried == expected
    plain = PLAIN if data[4:8] == b"ftyp" else sm.demux_config(format="matroska")
    assert found.codec == sm.demux_video(data, demux_config=plain).codec
    assert sm.probe(data).streams == sm.probe(data, demux_config=plain).streams


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (movie(sound="aac", max_b_frames=2), ["aac"]),
        (vp9("webm", "libopus"), [VP9_AUDIO]),
        (movie()[: movie().index(b"stts") + 9], ["none"]),
    ],
    ids=["h264", "vp9", "cut"],
)
def test_the_tables_of_a_long_index_are_left_out(
    data: bytes, expected: list[str | None], tried: list[str | None]
) -> None:
    def outcome() -> object:
        try:
            return sm.probe(data)
        except sm.DemuxError as error:
            return str(error)

    wanted = outcome()
    tried.clear()
    with mock.patch.object(coded_headers, "_LONG", 0):
        assert outcome() == wanted
    assert tried[:1] == expected


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda data: sm.load_video(data, (0.2, 0.8)), "none"),
        (lambda data: sm.load_video(data, (0.2, 0.8), crops=(0, 0, 32, 32)), "none"),
        (sm.load_image, "none"),
        (lambda data: sm.load_clip(data, 0.5, 0.5).audio, "aac"),
        (lambda data: sm.VideoFile(data).load([3, 15]), "aac"),
    ],
)
def test_no_function_lets_ffmpeg_decode_to_open_an_mp4(
    load: Callable[[bytes], Any], expected: str, tried: list[str | None]
) -> None:
    data = movie(sound="aac", max_b_frames=2)
    tried.clear()
    found = np.asarray(load(data))
    assert tried == [expected]
    with mock.patch.object(sm._container, "open_known", return_value=None):
        np.testing.assert_array_equal(found, load(data))


def test_a_vp9_box_in_a_video_of_unknown_codec() -> None:
    data = vp9("mp4").replace(b"vp09", b"none")
    with pytest.raises(sm.DemuxError, match="this FFmpeg has no decoder for video stream 0"):
        sm.demux_video(data)
