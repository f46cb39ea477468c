"""Metadata of stills from their headers only, compared with Pillow and FFmpeg's decoders."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from still_metadata import exif_block, png_chunk

import spdl_media as sm
from spdl_media import _probe
from spdl_media.testing import index_planes, make_video

Image = pytest.importorskip("PIL.Image")

_RNG = np.random.default_rng(0)


def _image(mode: str, size: tuple[int, int] = (61, 37)) -> Any:
    if mode == "I;16":
        return Image.fromarray(_RNG.integers(0, 65536, size[::-1]).astype(np.uint16))
    rgba = Image.fromarray(_RNG.integers(0, 256, (*size[::-1], 4)).astype(np.uint8), "RGBA")
    return (rgba if mode == "RGBA" else rgba.convert("RGB")).convert(mode)


def _saved(format: str, mode: str, size: tuple[int, int] = (61, 37), **options: Any) -> bytes:
    file = io.BytesIO()
    _image(mode, size).save(file, format, **options)
    return file.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    rows: list[tuple[str, tuple[str, ...], list[dict[str, Any]]]] = [
        (
            "JPEG",
            ("RGB",),
            [{"subsampling": n, "progressive": p} for n in range(3) for p in (0, 1)],
        ),
        ("JPEG", ("L", "CMYK", "RGB"), [{}, {"icc_profile": bytes(200_000)}]),
        ("JPEG", ("RGB",), [{"keep_rgb": True}]),
        ("PNG", ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), [{}, {"icc_profile": b"profile"}]),
        ("PNG", ("P",), [{"bits": 1}, {"bits": 4}, {"transparency": 3}]),
        ("PNG", ("L", "RGB"), [{"transparency": 3}, {"transparency": (1, 2, 3)}]),
        ("WEBP", ("RGB", "RGBA"), [{}, {"lossless": True}, {"icc_profile": b"profile"}]),
        ("BMP", ("1", "L", "P", "RGB", "RGBA"), [{}]),
        ("GIF", ("1", "L", "P", "RGB"), [{}, {"interlace": 0}, {"comment": b"c" * 999}]),
    ]
    for format, modes, options in rows:
        for mode, option in itertools.product(modes, options):
            if mode == "L" and option.get("transparency") == (1, 2, 3):
                continue
            if mode == "RGB" and option.get("transparency") == 3:
                continue
            for exif in (
                (b"", b"Exif\0\0" + exif_block(6)) if format in ("JPEG", "PNG", "WEBP") else (b"",)
            ):
                more = {"exif": exif} if exif else {}
                shown = {key: value for key, value in option.items() if key != "icc_profile"}
                yield (
                    f"{format} {mode} {shown} {bool(exif)}",
                    _saved(format, mode, **option, **more),
                )
    yield "PNG behind the pixels", _with_late_exif(_saved("PNG", "RGB"))


def _with_late_exif(png: bytes) -> bytes:
    return png[:-12] + png_chunk(b"eXIf", exif_block(6)) + png[-12:]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[sm.ImagePackets]:
    """Return a list of the stills that probe decodes."""
    calls: list[sm.ImagePackets] = []
    # Private: that nothing is decoded is visible otherwise only in the time.
    decode = _probe.decode_packets
    monkeypatch.setattr(
        _probe, "decode_packets", lambda packets, *_: calls.append(packets) or decode(packets, *_)
    )
    return calls


def test_headers_say_what_pillow_and_the_decoders_find(decoded: list[sm.ImagePackets]) -> None:
    wrong = []
    for name, data in _files():
        info = sm.probe(data)
        video = info.video
        assert video is not None
        packets = sm.demux_image(data)
        with Image.open(io.BytesIO(data)) as reference:
            size = reference.size[::-1] if video.orientation > 4 else reference.size
        frames = sm.decode_packets(packets, None)
        native = frames.pix_fmt if video.pix_fmt else None
        found = (video.width, video.height, info.is_still, video.num_frames, video.pix_fmt)
        if found != (*size, True, 1, native):
            wrong.append((name, found, size, native))
        if (packets.width, packets.height, packets.pix_fmt) != (*size, native):
            wrong.append((name, packets.width, packets.height, packets.pix_fmt))
        if video.orientation != (6 if "True" in name.split()[-1] or "behind" in name else 1):
            wrong.append((name, video.orientation))
    assert not wrong
    assert not decoded


def test_what_the_header_does_not_state_is_none(decoded: list[sm.ImagePackets]) -> None:
    for options in ({"mode": "CMYK"}, {"mode": "RGB", "keep_rgb": True}):
        video = sm.probe(_saved("JPEG", **options)).video
        assert video is not None
        assert (video.pix_fmt, video.color_range, video.width) == (None, None, 61)
    assert not decoded


def test_colours_of_png_are_those_of_the_decoder() -> None:
    png = _saved("PNG", "RGB")
    for kind, content, name, told in (
        (b"gAMA", struct.pack(">I", 45455), "color_trc", "bt470m"),
        (
            b"cHRM",
            struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000),
            "color_primaries",
            "bt709",
        ),
    ):
        video = sm.probe(png[:33] + png_chunk(kind, content) + png[33:]).video
        assert getattr(video, name) == told


def test_an_image_without_a_height_is_not_called_too_large() -> None:
    jpeg = _saved("JPEG", "RGB")
    at = jpeg.index(b"\xff\xc0") + 5
    with pytest.raises(sm.DecodeError, match=r"Picture size \d+x0 is invalid\)"):
        sm.load_image(jpeg[:at] + b"\0\0" + jpeg[at + 2 :])


@pytest.mark.parametrize("size", [(2**31 - 1, 5), (2**14, 2**14)])
def test_sizes_that_cannot_be_are_reported_by_the_decoder(size: tuple[int, int]) -> None:
    header = struct.pack(">2I5B", *size, 8, 2, 0, 0, 0)
    png = _saved("PNG", "RGB")
    with pytest.raises(sm.DecodeError, match=r"FFmpeg takes less than 2\*\*28 pixels"):
        sm.probe(png[:8] + png_chunk(b"IHDR", header) + png[33:])


def test_damage_and_animations_are_reported_as_before() -> None:
    for format in ("JPEG", "PNG", "WEBP", "BMP"):
        whole = _saved(format, "RGB")
        with pytest.raises(sm.DecodeError, match="cut short"):
            sm.probe(whole[: len(whole) * 2 // 3])
    png = _saved("PNG", "RGB")
    bad = png[:16] + struct.pack(">I", 62) + png[20:]
    with pytest.raises(sm.DecodeError):
        sm.probe(bad)
    animation = make_video(
        index_planes(3, 64, 48, "gray"), codec="gif", format="gif", pix_fmt="gray"
    )
    info = sm.probe(animation)
    assert not info.is_still
    assert info.video is not None
    assert info.video.num_frames != 1


class _Counted(io.BytesIO):
    num_read = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        return data


def test_of_a_large_still_the_head_and_the_end_are_read() -> None:
    for format, data in (
        ("jpeg", _saved("JPEG", "RGB", (1500, 1000), quality=95)),
        ("png", _with_late_exif(_saved("PNG", "RGB", (1000, 700)))),
        ("webp", _saved("WEBP", "RGB", (1500, 1000), quality=95)),
        ("bmp", _saved("BMP", "RGB", (1500, 1000))),
    ):
        file = _Counted(data)
        video = sm.probe(file).video
        assert video is not None
        assert video.orientation == (6 if format == "png" else 1)
        assert file.num_read <= 3 * 65536 < len(data), format


def test_a_size_is_known_of_packets_that_are_cut_short() -> None:
    data = _saved("JPEG", "RGB")
    packets = sm.demux_image(data[: len(data) // 2])
    assert (packets.width, packets.height) == (61, 37)
    assert sm.demux_image(_saved("TIFF", "RGB")).width == 0
