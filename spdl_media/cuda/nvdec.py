"""NVDEC, the hardware decoder: it decodes packets of one clip after another to frames on the device.

NVIDIA's parser reads headers in packets alone, and NAL units with start codes. Opening a decoder takes longer
than decoding a short clip (0.3 s), so idle ones are kept for other clips of the same codec and size.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import av

from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.cuda.cuvid import CODECS, VIDEO_LIBRARY, NotOnDeviceError
from spdl_media.cuda_driver import LIBRARY
from spdl_media.demux import make_filter
from spdl_media.errors import DecodeError, MissingDependencyError, TransferError

NVDEC_FORMATS = frozenset({"yuv420p", "yuvj420p", "nv12", "yuv420p10le", "yuv420p12le"})
"""Coded pixel formats that NVDEC decodes."""

LIBRARIES = {
    LIBRARY: (
        "NVIDIA's driver is missing ({}). Install the driver; in a container, start it with the GPU "
        "(docker run --gpus all)"
    ),
    VIDEO_LIBRARY: (
        "the video library of NVIDIA's driver is missing ({}). In a container, set "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; on a host, install the driver's decode "
        "package (libnvidia-decode)"
    ),
}
"""Libraries of NVIDIA's driver that decoding needs, and the messages if they are missing."""


def nvdec_refusal(codec: VideoCodec) -> str | None:
    """Return why NVDEC does not decode a stream, judged by its parameters, or ``None`` if it may.

    It decodes MPEG-1, -2 and -4 with other rounding than the CPU, and VP8 and VC-1 are rare.
    """
    if codec.name not in CODECS:
        return f"NVDEC is used for {', '.join(sorted(CODECS))}, and this is {codec.name}"
    if codec.pix_fmt is not None and codec.pix_fmt not in NVDEC_FORMATS:
        return f"NVDEC decodes 4:2:0 of 8, 10 and 12 bits, and this is {codec.pix_fmt}"
    return None


def config_refusal(config: DecodeConfig) -> str | None:
    """Return why NVDEC does not decode with these options, or ``None`` if it does."""
    if config.decoder is None and not config.decoder_options:
        return None
    return "decode_config(decoder=, decoder_options=) are for FFmpeg's decoders, on the CPU"


def missing_library(load: Callable[[str], Any] = ctypes.CDLL) -> MissingDependencyError | None:
    """Return an error for the first missing library of NVIDIA's driver that decoding needs, or ``None``."""
    for library, text in LIBRARIES.items():
        try:
            load(library)
        except OSError as error:
            return MissingDependencyError(
                f"decoding video on the GPU needs {library}: {text.format(error)}. cuda=None decodes on the "
                "CPU",
                name=library,
            )
    return None


class DeviceDecoder:
    """A decoder on a device, which decodes one clip after another.

    It has the interface of PyAV's decoder, with frames on the device. Its errors distinguish a failure of the
    device from damaged data.

    Args:
        session: A :class:`~spdl_media.cuda.session.Session`.

    Attributes:
        is_sound: Whether the decoder can be used for another clip.

    Thread safety: one thread at a time.
    """

    def __init__(self, session: Any) -> None:
        self._session, self.is_sound = session, True

    @property
    def nbytes(self) -> int:
        """Bytes of the device memory that it uses, estimated."""
        return int(self._session.nbytes)

    def begin(self, codec: VideoCodec, source: str, stream: int) -> None:
        """Prepare for a clip, whose frames are read on this stream of the device.

        Raises:
            DecodeError: The codec's headers are damaged.
        """
        self._codec, self._is_first = codec, True
        self._session.use(stream, codec)
        try:
            self._headers, self._size = stream_headers(codec)
        except ValueError as error:
            raise DecodeError(f"damaged {codec.name} headers: {error}", source=source) from error

    def decode(self, packet: Any) -> list[Any]:
        """Decode a packet, and return the frames that are ready.

        Raises:
            TransferError: The device failed: it has no memory or no decoder left, or is gone.
            NotOnDeviceError: The hardware does not decode this stream.
            av.InvalidDataError: The data is damaged.
        """
        try:
            frames: list[Any] = self._session.decode(
                packet, b"" if packet is None else self._data(packet)
            )
            return frames
        except (TransferError, NotOnDeviceError):
            self.is_sound = False
            raise

    def _data(self, packet: Any) -> bytes:
        """Return the data of a packet with start codes, and at first with headers."""
        if packet.has_sidedata("new_extradata"):  # of a file that was put together from several
            self._codec = replace(
                self._codec, extradata=bytes(packet.get_sidedata("new_extradata"))
            )
            self._is_first = True
            try:
                self._headers, self._size = stream_headers(self._codec)
            except ValueError as error:
                raise av.error.InvalidDataError(
                    errno.EINVAL, f"damaged headers: {error}"
                ) from error
        data = bytes(packet) if packet.size else b""
        if self._size:
            data = with_start_codes(data, self._size)
        if self._is_first:
            # A window may begin with a packet that has none.
            data, self._is_first = self._headers + data, False
        return data

    def flush_buffers(self) -> None:
        """Drop all buffered data, for another clip or after a seek."""
        self._session.flush_buffers()
        self._is_first = True


def has_lengths(codec: VideoCodec) -> bool:
    """Whether NAL units have length prefixes, as in MP4, instead of start codes."""
    start = (codec.extradata or b"")[:3]
    # As FFmpeg judges: old files state version 0 for HEVC.
    return (codec.name == "h264" and start[:1] == b"\1") or (
        codec.name == "hevc" and start > b"\0\0\1"
    )


@lru_cache(maxsize=64)
def stream_headers(codec: VideoCodec) -> tuple[bytes, int]:
    """Return the headers that the container has, as they stand in packets, and the bytes of a NAL length.

    Raises:
        ValueError: The headers are damaged.
    """
    data = codec.extradata or b""
    if has_lengths(codec):
        at = 4 if codec.name == "h264" else 21
        _, after = make_filter(f"{codec.name}_mp4toannexb", codec)
        return after.extradata or b"", (data[at] & 3) + 1
    if codec.name == "av1" and data[:1] == b"\x81":
        return data[4:], 0  # the first 4 bytes of an av1C box are not part of the stream
    return b"" if codec.name == "vp9" else data, 0


def with_start_codes(data: bytes, size: int) -> bytes:
    """Replace the lengths of NAL units, each of ``size`` bytes, by start codes.

    Raises:
        av.InvalidDataError: A length exceeds the data.
    """
    units, at = [], 0
    while at + size <= len(data):  # FFmpeg ignores bytes of padding, too
        length = int.from_bytes(data[at : at + size], "big")
        at += size + length
        if at > len(data):
            raise av.error.InvalidDataError(errno.EINVAL, "a NAL unit exceeds its packet")
        units.append(data[at - length : at])
    return b"".join(b"\0\0\1" + unit for unit in units)


def decoder_key(codec: VideoCodec, index: int) -> Hashable:
    """Return the key of the decoders that can decode a clip without a new one of the hardware."""
    return index, codec.name, codec.width, codec.height, codec.pix_fmt


class DecoderPool:
    """Idle decoders, kept for further clips. If there are too many, the longest idle one is closed.

    Args:
        most: Maximum number of idle decoders.
        room: Maximum bytes of surfaces of all idle decoders.

    Thread safety: safe.
    """

    def __init__(self, most: int = 16, room: int = 1 << 30) -> None:
        self._most, self._room = most, room
        self.after_fork()

    def after_fork(self) -> None:
        """Start with an empty pool. In a forked process, the driver keeps the parent's decoders."""
        self._idle: list[tuple[Hashable, DeviceDecoder]] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> DeviceDecoder | None:
        """Remove and return an idle decoder with this key, or ``None``."""
        with self._lock:
            found = next((one for one in self._idle if one[0] == key), None)
            if found is not None:
                self._idle.remove(found)
        return found and found[1]

    def give(self, key: Hashable, decoder: DeviceDecoder) -> None:
        """Add a flushed decoder."""
        gone = []  # freed after the lock is released, because freeing takes a while
        with self._lock:
            self._idle.append((key, decoder))
            # Remove the longest idle decoder first.
            while len(self._idle) > self._most or sum(d.nbytes for _, d in self._idle) > self._room:
                gone.append(self._idle.pop(0))

    def clear(self) -> bool:
        """Free all idle decoders; return whether there were any."""
        with self._lock:
            idle, self._idle = self._idle, []
        return bool(idle)


class Gate:
    """Counts the threads that decode, and ends others than the main thread there when the process ends.

    Python ends a daemon thread wherever it next asks for the GIL, and a C++ library that stands on its stack
    aborts the process then.

    Thread safety: safe.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._change = threading.Condition()
        self._count, self._is_closed = 0, False

    def __enter__(self) -> None:
        with self._change:
            if self._is_closed and threading.current_thread() is not threading.main_thread():
                raise SystemExit  # ends the thread without a message; an exit handler may wait for it
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._count -= 1
            self._change.notify_all()

    def close(self) -> None:
        """Wait for the threads that decode, at most 10 seconds, and let no other in."""
        with self._change:
            self._is_closed = True
            self._change.wait_for(lambda: not self._count, timeout=10)


DECODERS, GATE = DecoderPool(), Gate()
# Free decoders at exit while the driver still exists. The last function that is registered runs first.
atexit.register(DECODERS.clear)
atexit.register(GATE.close)

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=DECODERS.after_fork)
    # The child process does not have the threads that decode.
    os.register_at_fork(after_in_child=GATE._start)
