"""Media files of every kind, and reproducible ways to damage them."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import av
import numpy as np

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    make_audio,
    make_image,
    make_media,
    make_video,
)

RATE = 24000
NUM_VARIANTS = 16


@cache
def picture(seed: int = 1, width: int = 96, height: int = 64) -> np.ndarray:
    """Make an RGB image with soft shapes and some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9 + c) * np.cos(y / 7 - c) for c in range(3)]
    noise = rng.normal(0, 8, (height, width, 3))
    return np.clip(128 + 90 * np.stack(waves, 2) + noise, 0, 255).astype(np.uint8)


@cache
def pictures(count: int = 24) -> list[np.ndarray]:
    """Make frames with motion."""
    return [np.roll(picture(), (n, 2 * n), (0, 1)) for n in range(count)]


@cache
def sound(seconds: int = 2) -> np.ndarray:
    """Make two channels of chirps and noise."""
    rng = np.random.default_rng(2)
    time = np.arange(RATE * seconds) / RATE
    tones = np.stack([np.sin(900 * time * (1 + time)), np.sin(2500 * time)], 1)
    return (12000 * tones + rng.normal(0, 500, tones.shape)).astype(np.int16)


def _video(codec: str, format: str = "matroska", **options: object) -> Callable[[], bytes]:
    return lambda: make_video(pictures(), codec=codec, format=format, gop_size=8, **options)


def _hevc(params: str) -> Callable[[], bytes]:
    options = {"x265-params": f"{params}:log-level=none:pools=none"}
    return _video("libx265", max_b_frames=2, options=options)


def _audio(codec: str, format: str = "matroska", **options: object) -> Callable[[], bytes]:
    return lambda: make_audio(sound(), RATE, codec=codec, format=format, **options)


def _image(codec: str, **options: object) -> Callable[[], bytes]:
    return lambda: make_image(picture(), codec=codec, **options)


STILLS: dict[str, Callable[[], bytes]] = {
    "jpeg": _image("mjpeg", options={"qmin": "5", "qmax": "5"}),
    "png": _image("png"),
    "webp lossy": _image("libwebp", pix_fmt="yuv420p", options={"lossless": "0"}),
    "webp lossless": _image("libwebp"),
    "gif": _image("gif"),
    "bmp": _image("bmp"),
    "tiff": _image("tiff"),
    "tiff deflate": _image("tiff", options={"compression_algo": "deflate"}),
    "exr": _image("exr", pix_fmt="gbrpf32le", options={"compression": "zip16"}),
    "jp2": _image("jpeg2000", pix_fmt="rgb24"),
    "avif": lambda: make_image(
        picture(width=320, height=240), codec="libsvtav1", pix_fmt="yuv420p"
    ),
    "ppm": _image("ppm"),
    "pgm": _image("pgm", pix_fmt="gray"),
    "pam": _image("pam"),
    "tga": _image("targa"),
    "qoi": _image("qoi"),
}

VIDEO: dict[str, Callable[[], bytes]] = {
    "h264": _video("libx264", max_b_frames=2, options={"qp": "23"}),
    "hevc": _hevc("qp=23"),
    "hevc with hashes": _hevc("qp=23:hash=1"),
    "mpeg2": _video("mpeg2video", frame_rate=25, options={"qmin": "4", "qmax": "4"}),
    "mpeg4": _video("mpeg4", options={"qmin": "4", "qmax": "4"}),
    "vp9": _video("libvpx-vp9", options={"lossless": "0", "crf": "23"}),
    "av1": _video("libsvtav1"),
    "ffv1": _video("ffv1"),
    "mjpeg": _video("mjpeg", pix_fmt="yuvj420p", options={"qmin": "4", "qmax": "4"}),
}

AUDIO: dict[str, Callable[[], bytes]] = {
    "mp3": _audio("libmp3lame"),
    "flac": _audio("flac"),
    "opus": _audio("libopus"),
    "vorbis": _audio("vorbis"),
    # As FFmpeg does by itself, for the figures of docs/damage.md.
    "aac": _audio("aac", options={"aac_coder": "twoloop"}),
    "ac3": lambda: make_audio(sound(), 48000, codec="ac3", format="matroska"),
    "alac": _audio("alac"),
    "pcm": _audio("pcm_s16le"),
}

CONTAINERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "mp4, index in front": ("video", _video("libx264", "mp4", max_b_frames=2, faststart=True)),
    "mp4, index at the end": ("video", _video("libx264", "mp4", max_b_frames=2)),
    "mp4, fragmented": (
        "video",
        lambda: make_media(
            [VideoTrack(frames=pictures(), codec="libx264", gop_size=8)],
            format="mp4",
            options={"movflags": "frag_keyframe+empty_moov"},
        ),
    ),
    "mp4, sound": (
        "audio",
        lambda: make_media(
            [AudioTrack(samples=sound(), sample_rate=RATE, codec="aac")],
            format="mp4",
            faststart=True,
        ),
    ),
    "matroska": ("video", _video("libx264", max_b_frames=2)),
    "matroska, sound": ("audio", _audio("flac")),
    "webm": ("video", _video("libvpx-vp9", "webm")),
    "avi": ("video", _video("mpeg4", "avi")),
    "mpeg-ts": ("video", _video("libx264", "mpegts", max_b_frames=2)),
    "wav": ("audio", _audio("pcm_s16le", "wav")),
    "aiff": ("audio", _audio("pcm_s16be", "aiff")),
    "au": ("audio", _audio("pcm_s16be", "au")),
    "caf": ("audio", _audio("pcm_s16le", "caf")),
    "flac": ("audio", _audio("flac", "flac")),
    "ogg, opus": ("audio", _audio("libopus", "ogg")),
    "ogg, flac": ("audio", _audio("flac", "ogg")),
    "mp3": ("audio", _audio("libmp3lame", "mp3")),
    "adts": ("audio", _audio("aac", "adts")),
}


@cache
def made(name: str) -> bytes:
    """Return one of the files above."""
    for table in (STILLS, VIDEO, AUDIO):
        if name in table:
            return table[name]()
    return CONTAINERS[name][1]()


@cache
def container(name: str) -> bytes:
    return CONTAINERS[name][1]()


def decode_still(data: bytes, **options: object) -> sm.ImageFrames:
    return sm.decode_packets(sm.demux_image(data), None, sm.decode_config(**options))


def decode_video(data: bytes, **options: object) -> sm.VideoFrames:
    return sm.decode_packets(sm.demux_video(data), None, sm.decode_config(**options))


def decode_audio(data: bytes, **options: object) -> sm.AudioFrames:
    return sm.decode_packets(sm.demux_audio(data), None, sm.decode_config(**options))


def packet_spans(data: bytes, kind: str) -> list[tuple[int, int]]:
    """Return begin and end of the coded data of each packet in a file."""
    spans, position = [], 0
    with av.open(io.BytesIO(data)) as file:
        for packet in file.demux(**{kind: 0}):
            if packet.size:
                position = data.find(bytes(packet), position)
                assert position >= 0, "the container must hold packets as they are"
                spans.append((position, position + packet.size))
                position += packet.size
    return spans


def spans_of(name: str) -> list[tuple[int, int]]:
    """Return begin and end of the parts of a file that are coded data and not headers."""
    data = made(name)
    if name in STILLS and name not in ("gif", "avif"):
        return [(len(data) * 3 // 10, len(data) * 95 // 100)]
    return packet_spans(data, "audio" if name in AUDIO else "video")


def flipped(name: str) -> Iterator[bytes]:
    """Yield copies of a file with one flipped bit in its coded data, at seeded places."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for place in _places(name, rng):
        data = bytearray(made(name))
        data[place] ^= 1 << int(rng.integers(8))
        yield bytes(data)


def overwritten(name: str) -> Iterator[bytes]:
    """Yield copies of a file with 32 bytes of its coded data replaced by noise, at seeded places."""
    rng = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    for place in _places(name, rng):
        data = bytearray(made(name))
        end = min(place + 32, next(stop for start, stop in spans_of(name) if place < stop))
        data[place:end] = rng.bytes(end - place)
        yield bytes(data)


def _places(name: str, rng: np.random.Generator) -> list[int]:
    spans = spans_of(name)
    lengths = np.array([stop - start for start, stop in spans])
    chosen = rng.integers(int(lengths.sum()), size=NUM_VARIANTS)
    starts = np.cumsum(lengths) - lengths
    index = np.searchsorted(starts, chosen, side="right") - 1
    return [spans[i][0] + int(k - starts[i]) for i, k in zip(index, chosen, strict=True)]


def is_noticed(name: str, data: bytes) -> bool:
    """Whether reading a damaged file to its end is an error."""
    try:
        if name in STILLS:
            decode_still(data)
        elif name in VIDEO:
            decode_video(data)
        else:
            decode_audio(data)
    except (sm.DecodeError, sm.DemuxError):
        return True
    return False


def count_noticed(name: str, damaged: Callable[[str], Iterator[bytes]]) -> int:
    return sum(is_noticed(name, data) for data in damaged(name))


# Headers that claim 100000 x 100000 pixels, with almost no data.
SIDE = 100_000


def _png_chunk(kind: bytes, payload: bytes) -> bytes:
    body = kind + payload
    return struct.pack(">I", len(payload)) + body + struct.pack(">I", zlib.crc32(body))


def _huge_tiff() -> bytes:
    entries = [(256, 4, SIDE), (257, 4, SIDE), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8)]
    entries += [(277, 3, 1), (278, 4, SIDE), (279, 4, 8)]
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return (
        b"II*\0"
        + struct.pack("<I", 16)
        + bytes(8)
        + struct.pack("<H", len(entries))
        + rows
        + bytes(4)
    )


def _huge_jpeg() -> bytes:
    data = bytearray(made("jpeg"))
    frame = data.index(b"\xff\xc0")
    struct.pack_into(">HH", data, frame + 5, 65500, 65500)
    return bytes(data)


def _huge_webp() -> bytes:
    # Its fields have 14 bits, so the maximum is 16384 x 16384.
    bits = 16383 | 16383 << 14
    payload = b"\x2f" + struct.pack("<I", bits) + bytes(11)
    body = b"WEBPVP8L" + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _huge_jp2() -> bytes:
    data = bytearray(made("jp2"))
    size = data.index(b"\xff\x51") + 6
    struct.pack_into(">II", data, size, SIDE, SIDE)
    return bytes(data)


HUGE: dict[str, Callable[[], bytes]] = {
    "png": lambda: (
        b"\x89PNG\r\n\x1a\n"
        + _png_chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0))
        + _png_chunk(b"IDAT", zlib.compress(bytes(1000)))
        + _png_chunk(b"IEND", b"")
    ),
    "bmp": lambda: (
        b"BM"
        + struct.pack("<IHHI", 154, 0, 0, 54)
        + struct.pack("<IiiHHIIIIII", 40, SIDE, SIDE, 1, 24, 0, 0, 0, 0, 0, 0)
        + bytes(100)
    ),
    "tiff": _huge_tiff,
    "ppm": lambda: b"P6\n%d %d\n255\n" % (SIDE, SIDE) + bytes(100),
    "pam": lambda: (
        b"P7\nWIDTH %d\nHEIGHT %d\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n" % (SIDE, SIDE)
        + bytes(100)
    ),
    "qoi": lambda: (
        b"qoif" + struct.pack(">IIBB", SIDE, SIDE, 3, 0) + bytes(100) + bytes(7) + b"\x01"
    ),
    # The fields of these formats have 16 bits.
    "gif": lambda: (
        b"GIF89a"
        + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0)
        + bytes(6)
        + b","
        + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
        + b"\x02\x02\x44\x01\0;"
    ),
    "tga": lambda: (
        struct.pack("<BBBHHBHHHHBB", 0, 0, 10, 0, 0, 0, 0, 0, 65535, 65535, 24, 0) + bytes(99)
    ),
    "jpeg": _huge_jpeg,
    "webp lossless": _huge_webp,
    "jp2": _huge_jp2,
}


def read_everything(src: object) -> None:
    """Read a source by all functions, none of which may crash."""
    for demux in (sm.demux_image, sm.demux_video, sm.demux_audio):
        with contextlib.suppress(sm.MediaError):
            sm.decode_packets(demux(src))
    with contextlib.suppress(sm.MediaError):
        sm.probe(src)
