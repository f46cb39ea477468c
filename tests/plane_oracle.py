"""Frames with known planes, and the expected arrays, computed with NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

import spdl_media as sm
from spdl_media.frames import AudioChunk


@dataclass(frozen=True)
class Row:
    """A row of the table of pixel formats: the layout of planes in FFmpeg's memory and in the array."""

    pix_fmt: str
    kind: str  # "HWC", "CHW", "gbr", "420", "422", "nv"
    channels: int
    dtype: str  # FFmpeg's dtype, including byte order
    bits: int

    def __str__(self) -> str:
        return self.pix_fmt

    def planes(self, width: int, height: int, seed: int) -> list[np.ndarray]:
        half, chroma_height = -(-width // 2), -(-height // 2)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "HWC": [(height, width, self.channels)],
            "CHW": [(height, width)] * self.channels,
            "gbr": [(height, width)] * self.channels,
            "420": [(height, width), (chroma_height, half), (chroma_height, half)],
            "422": [(height, width), (height, half), (height, half)],
            "nv": [(height, width), (chroma_height, half, 2)],
        }
        return [
            self._values(shape, 31 * seed + 7 * plane)
            for plane, shape in enumerate(shapes[self.kind])
        ]

    def _values(self, shape: tuple[int, ...], seed: int) -> np.ndarray:
        # Steps are coprime to the ranges, so neighbours in each direction differ, and so do planes and
        # frames.
        count = (np.arange(np.prod(shape), dtype=np.int64) * 37 + 101 * seed) % (1 << self.bits)
        return count.reshape(shape).astype(self.dtype)

    def array(self, planes: Sequence[np.ndarray]) -> np.ndarray:
        """Return the expected array of one frame with these planes."""
        native = [plane.astype(np.dtype(self.dtype).newbyteorder("=")) for plane in planes]
        if self.kind == "HWC":
            return native[0]
        if self.kind == "CHW":
            return np.stack(native)
        if self.kind == "gbr":
            green, blue, red, *alpha = native
            return np.stack([red, green, blue, *alpha])
        flat = np.concatenate([plane.ravel() for plane in native])
        return flat.reshape(1, -1, native[0].shape[1])


def _deep(name: str, kind: str, channels: int, depths: Sequence[int]) -> list[Row]:
    return [
        Row(f"{name}{bits}{order}", kind, channels, f"{sign}u2", bits)
        for bits in depths
        for order, sign in (("le", "<"), ("be", ">"))
    ]


ROWS = [
    *(Row(name, "HWC", 3, "u1", 8) for name in ("rgb24", "bgr24")),
    *(Row(name, "HWC", 4, "u1", 8) for name in ("rgba", "bgra", "argb", "abgr")),
    Row("gray", "HWC", 1, "u1", 8),
    Row("ya8", "HWC", 2, "u1", 8),
    *(
        Row(f"{name}{order}", "HWC", channels, f"{sign}u2", 16)
        for name, channels in (
            ("rgb48", 3),
            ("bgr48", 3),
            ("rgba64", 4),
            ("bgra64", 4),
            ("ya16", 2),
        )
        for order, sign in (("le", "<"), ("be", ">"))
    ),
    Row("grayf32le", "CHW", 1, "<f4", 20),
    Row("grayf32be", "CHW", 1, ">f4", 20),
    *(Row(name, "CHW", 3, "u1", 8) for name in ("yuv444p", "yuvj444p")),
    Row("yuva444p", "CHW", 4, "u1", 8),
    Row("gbrp", "gbr", 3, "u1", 8),
    Row("gbrap", "gbr", 4, "u1", 8),
    *(Row(name, "420", 1, "u1", 8) for name in ("yuv420p", "yuvj420p")),
    *(Row(name, "422", 1, "u1", 8) for name in ("yuv422p", "yuvj422p")),
    *(Row(name, "nv", 1, "u1", 8) for name in ("nv12", "nv21")),
    *(
        Row(f"{name}{order}", "nv", 1, f"{sign}u2", 16)
        for name in ("p010", "p012", "p016")
        for order, sign in (("le", "<"), ("be", ">"))
    ),
    *_deep("gray", "CHW", 1, (9, 10, 12, 14, 16)),
    *_deep("yuv420p", "420", 1, (9, 10, 12, 14, 16)),
    *_deep("yuv422p", "422", 1, (9, 10, 12, 14, 16)),
    *_deep("yuv444p", "CHW", 3, (9, 10, 12, 14, 16)),
    *_deep("yuva444p", "CHW", 4, (9, 10, 12, 16)),
    *_deep("gbrp", "gbr", 3, (9, 10, 12, 14, 16)),
    *_deep("gbrap", "gbr", 4, (10, 12, 14, 16)),
]


def frame_of(planes: Sequence[np.ndarray], pix_fmt: str, *, upwards: bool = False) -> av.VideoFrame:
    """Make an FFmpeg frame with these planes, and rows padded with other values.

    Args:
        planes: Planes in FFmpeg's layout: ``(height, width)`` or ``(height, width, components)``.
        pix_fmt: FFmpeg's name of the format.
        upwards: Whether rows run upwards in memory, as after the ``vflip`` filter.
    """
    height, width = planes[0].shape[:2]
    frame = av.VideoFrame(width, height, pix_fmt)
    for plane, values in zip(frame.planes, planes, strict=True):
        rows = np.full((values.shape[0], plane.line_size), 0xA5, np.uint8)
        given = values[::-1] if upwards else values
        raw = np.ascontiguousarray(given).reshape(len(values), -1).view(np.uint8)
        rows[:, : raw.shape[1]] = raw
        plane.update(rows.tobytes())
    return _flipped(frame) if upwards else frame


def _flipped(frame: av.VideoFrame) -> av.VideoFrame:
    graph = av.filter.Graph()
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base="1/1"
    )
    flip, sink = graph.add("vflip"), graph.add("buffersink")
    source.link_to(flip)
    flip.link_to(sink)
    graph.configure()
    frame.pts = 0
    graph.push(frame)
    result = graph.pull()
    assert isinstance(result, av.VideoFrame)
    return result


def image(planes: Sequence[np.ndarray], pix_fmt: str, **options: Any) -> sm.ImageFrames:
    return sm.ImageFrames((frame_of(planes, pix_fmt, **options),))


def rgb(width: int, height: int, value: int = 0) -> sm.ImageFrames:
    """Make an image of one value."""
    return image([np.full((height, width, 3), value, np.uint8)], "rgb24")


def sound(
    samples: np.ndarray, sample_fmt: str = "fltp", *, rate: int = 8000, cuts: Sequence[int] = ()
) -> sm.AudioFrames:
    """Make audio frames from samples ``(N, C)``, split into FFmpeg's frames at the given positions."""
    chunks = []
    planar = sample_fmt.endswith("p")
    for part in np.split(samples, cuts):
        data = part.T if planar else part.reshape(1, -1)
        layout = {1: "mono", 2: "stereo", 3: "2.1"}[samples.shape[1]]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(data), sample_fmt, layout)
        frame.sample_rate = rate
        chunks.append(AudioChunk(frame, 0, len(part), sum(map(len, chunks))))
    return sm.AudioFrames(chunks)
