"""The display matrix of a video stream: from its container's header, or from a decoded frame."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from typing import Any

import av

from spdl_media._ffmpeg import AvPacket


def muxed_matrix(stream: av.VideoStream) -> tuple[int, ...] | None:
    """Display matrix of a stream, by way of a QuickTime header.

    PyAV shows a stream's side data only on decoded frames. A muxer given the stream writes it into the
    track header (``tkhd``), which takes some 0.1 ms where decoding a frame takes up to ten.
    """
    # MP4 takes VP9 and FFV1, which QuickTime does not, but not ProRes and DV.
    written = _muxed_header(stream, "mov") or _muxed_header(stream, "mp4")
    start = written.find(b"tkhd") + 4
    if start < 4:
        return None
    fixed = 20 if written[start] == 0 else 32  # times and duration, 32 or 64 bit by version
    return struct.unpack_from(">9i", written, start + 4 + fixed + 16)


def _muxed_header(stream: av.VideoStream, format: str) -> bytes:
    header = io.BytesIO()
    options = {"movflags": "empty_moov", "strict": "-2"}
    try:
        with av.open(header, "w", format=format, options=options) as mov:
            # Opaque: otherwise PyAV looks for an encoder by the name of the decoder (libdav1d).
            mov.add_stream_from_template(stream, opaque=True)
            mov.start_encoding()
            return header.getvalue()
    except (av.FFmpegError, ValueError):  # a codec that the format does not take
        return b""


def decoded_matrix(stream: av.VideoStream, packets: Iterable[AvPacket]) -> tuple[int, ...] | None:
    """Display matrix of a stream, from its first decoded frame."""
    context = stream.codec_context
    context.thread_count = 1
    try:
        for packet in packets:
            for frame in context.decode(packet):
                return frame_matrix(frame)
        for frame in context.decode(None):
            return frame_matrix(frame)
    except av.FFmpegError:  # damaged data; decoding it in earnest will say so
        return None
    finally:
        context.flush_buffers()
    return None


def frame_matrix(frame: av.VideoFrame) -> tuple[int, ...] | None:
    """The display matrix that a decoded frame carries, as FFmpeg's nine numbers."""
    try:
        side_data: Any = frame.side_data  # by position, which the stubs do not know
        entries = [side_data[index] for index in range(len(side_data))]
    except ValueError:  # PyAV 18 does not know the type of every entry
        return None
    for entry in entries:
        if entry.type.name == "DISPLAYMATRIX":
            return struct.unpack("=9i", bytes(entry))
    return None
