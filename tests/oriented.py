"""Videos with an orientation, also in containers for which make_media() has no option."""

from __future__ import annotations

import io
from functools import cache

import av
import numpy as np

from spdl_media.testing import VideoTrack, index_planes, make_media

# From upright to stored images, by orientation: the inverse of the rotation to upright.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
"""NumPy functions that rotate a stored image upright, by EXIF orientation."""

FRAMES = index_planes(6, 64, 48)


def upright(plane: np.ndarray, orientation: int) -> np.ndarray:
    return UPRIGHT[orientation](plane)


@cache
def oriented_clip(orientation: int, *, codec: str = "libx265", format: str = "mp4") -> bytes:
    """Make six frames of 64 x 48 in a container with an orientation."""
    base = "mov" if format == "mov" else "mp4"
    track = VideoTrack(frames=FRAMES, codec=codec, gop_size=3, orientation=orientation)
    data = make_media([track], format=base)
    return data if format == base else remux(data, format)


def remux(data: bytes, format: str) -> bytes:
    """Write the same packets and display matrix to another container."""
    result = io.BytesIO()
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(result, "w", format=format, options={"strict": "-2"}) as sink,
    ):
        stream = source.streams.video[0]
        copy = sink.add_stream_from_template(stream, opaque=True)  # no encoder is called libdav1d
        for packet in source.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                sink.mux(packet)
    return result.getvalue()
