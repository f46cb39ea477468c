"""Still images opened as videos: every read of a Demuxer gives the whole file, in any order of reads."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import effort
import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.packets import av_packets
from spdl_media.testing import index_planes, make_image, make_video

# Noise, so that the file is longer than the part by which FFmpeg recognizes it. A JPEG whose end it has not
# seen is opened by its name, like formats without a signature, which takes another path.
RGB = np.random.default_rng(3).integers(0, 256, (78, 104, 3), dtype=np.uint8)

# Encoder and suffix of the file. Each file is one packet.
STILLS: dict[str, str] = dict(
    pair.split("/")  # type: ignore[misc]  # into two
    for pair in """
    mjpeg/jpg png/png libwebp/webp bmp/bmp tiff/tif gif/gif targa/tga pam/pam ppm/ppm pgm/pgm pbm/pbm
    pgmyuv/pgmyuv pfm/pfm phm/phm jpeg2000/jp2 jpegls/jls dpx/dpx exr/exr sgi/sgi qoi/qoi
    pcx/pcx xbm/xbm ljpeg/ljpg
    """.split()
)
PIX_FMTS = {
    "pgm": "gray",
    "pbm": "monow",
    "xbm": "monow",
    "pgmyuv": "yuv420p",
    "pfm": "gbrpf32le",
    "exr": "gbrpf32le",
    "ljpeg": "yuvj444p",
    "dpx": "rgb24",
    "pcx": "rgb24",
}
# FFmpeg has no demuxer that recognizes these by their content.
BY_NAME_ONLY = {"targa", "pam"}


@cache
def still(codec: str) -> bytes:
    if codec == "phm":  # swscale makes no halves
        return b"PH\n104 78\n-1.0\n" + (RGB[::-1] / 256).astype("<f2").tobytes()
    return make_image(RGB, codec=codec, pix_fmt=PIX_FMTS.get(codec))


def moving(codec: str, format: str) -> Callable[[], bytes]:
    pix_fmt = "gray" if codec in ("gif", "apng") else "yuv420p"
    frames = index_planes(3, 64, 48, pix_fmt)
    return cache(lambda: make_video(frames, codec=codec, format=format, pix_fmt=pix_fmt))


SEVERAL: dict[str, Callable[[], bytes]] = {
    "gif": moving("gif", "gif"),
    "avif": lambda: make_image(RGB, codec="libsvtav1"),
    "ppm": lambda: still("ppm") * 5,
    "jpg": lambda: still("mjpeg") * 2,
}


def payload(packets: Any) -> bytes:
    return b"".join(bytes(memoryview(packet)) for packet in av_packets(packets))


READS: dict[str, Callable[[sm.Demuxer], bytes]] = {
    "image": lambda demuxer: payload(demuxer.demux_image()),
    "video": lambda demuxer: payload(demuxer.demux_video()),
    "window": lambda demuxer: payload(demuxer.demux_video((0.01, 0.03))),
    "late window": lambda demuxer: payload(demuxer.demux_video((0.05, 9))),
    "stream": lambda demuxer: b"".join(map(payload, demuxer.streaming_demux(num_packets=4))),
    "stream, left half way": lambda demuxer: payload(next(demuxer.streaming_demux(num_packets=1))),
}


# Files that FFmpeg recognizes by content or by name, with and without several images.
ALONE = {".jpg", ".png", ".gif", ".ppm", ".tga"}


def source(kind: str, data: bytes, suffix: str, folder: Path) -> Any:
    if kind == "path":
        path = folder / f"picture.{suffix}"
        path.write_bytes(data)
        return path
    return io.BytesIO(data) if kind == "file object" else data


def in_every_order(src: Any) -> dict[str, bytes]:
    """Check that each read gives the same first and after any other read; return the results by read."""
    first = {}
    for name, read in READS.items():
        with sm.Demuxer(src) as demuxer:
            first[name] = read(demuxer)
    # Each read after each other and after itself. Some files are opened again for each of these pairs.
    orders = [[a, b, a, b] for a, b in itertools.product(READS, repeat=2)]
    if not isinstance(src, Path) or (src.suffix not in ALONE and not effort.LONG):
        orders = [list(first)[:1]]
        for number, one in enumerate(first):
            orders[0] += [
                one,
                *(name for other in list(first)[number + 1 :] for name in (other, one)),
            ]
    for order in orders:
        with sm.Demuxer(src) as demuxer:
            for name in order:
                assert READS[name](demuxer) == first[name], f"{name}, of {order}"
    return first


KINDS = ["path", "bytes", "file object"]


# Neither bytes nor file objects have a name, so that half of the codecs tell enough of each.
@pytest.mark.parametrize(
    ("codec", "kind"),
    [*itertools.product(STILLS, KINDS)]
    if effort.LONG
    else [*zip(STILLS, itertools.cycle(KINDS[1:])), *((codec, "path") for codec in STILLS)],
)
def test_every_read_gives_the_whole_file(codec: str, kind: str, tmp_path: Path) -> None:
    data = still(codec)
    assert len(data) > (2048 if PIX_FMTS.get(codec) != "monow" else 512)
    src = source(kind, data, STILLS[codec], tmp_path)
    if codec in BY_NAME_ONLY and kind != "path":
        with pytest.raises(sm.DemuxError, match="FFmpeg cannot open it as media"):
            sm.Demuxer(src)
        return
    first = in_every_order(src)
    for name in ("image", "video", "stream", "stream, left half way"):
        assert first[name] == data, name


@pytest.mark.parametrize("kind", ["path", "bytes", "file object"])
@pytest.mark.parametrize("suffix", SEVERAL)
def test_several_images_are_read_from_the_first(suffix: str, kind: str, tmp_path: Path) -> None:
    first = in_every_order(source(kind, SEVERAL[suffix](), suffix, tmp_path))
    assert first["video"].startswith(first["image"])
    assert len(first["stream"]) == len(first["video"]) >= len(first["image"]) > 0


@pytest.mark.parametrize("codec", ["ppm", "mjpeg", "bmp", "png"])
@pytest.mark.parametrize("count", [2, 5])
def test_windows_of_images_one_behind_the_other(codec: str, count: int) -> None:
    with sm.Demuxer(still(codec) * count) as demuxer:
        for _ in range(2):
            last = sm.decode_packets(demuxer.demux_video((0.04 * count - 0.05, 9)))
            assert last.timestamps == pytest.approx((0.04 * (count - 1),))
            assert len(sm.decode_packets(demuxer.demux_video())) == count


def test_windows_of_an_animation() -> None:
    with sm.Demuxer(SEVERAL["gif"]()) as demuxer:
        for _ in range(2):
            assert demuxer.demux_video((0.15, 9)).get_timestamps() == pytest.approx((0.2,))
            assert demuxer.demux_video().get_timestamps() == pytest.approx((0, 0.1, 0.2))


def test_a_photograph_serves_many_reads(media_dir: Path) -> None:
    path = next(iter(sorted((media_dir / "photos_hd").glob("*.jpg"))))
    data = path.read_bytes()
    with sm.Demuxer(str(path)) as demuxer:
        for name in ("video", "video", "image", "stream", "image"):
            assert READS[name](demuxer) == data


@each("load", [sm.probe, sm.load_image, sm.load_video, sm.load_audio])
@each("format", [None, "sunrast_pipe"])
def test_a_sun_raster_at_which_ffmpeg_ends_the_process_is_refused(
    load: Callable[..., object], format: str | None
) -> None:
    data = struct.pack(">8I", 0x59A66A95, 15447, 15447, 24, 100, 2, 0, 0) + bytes(100)
    with pytest.raises(sm.MediaError, match=r"Sun raster"):
        load(data, demux_config=sm.demux_config(format=format))
