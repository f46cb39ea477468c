"""NVDEC, the hardware decoder, through FFmpeg and PyAV: it decodes packets to frames on the device.

Opening an NVDEC decoder takes longer than decoding a short clip, so decoders are kept: after a flush, a
decoder serves other clips of the same codec and size. H.264 and HEVC packets are converted to Annex B, with
start codes and with the headers in the packets, because an open decoder reads no other headers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import threading
from collections.abc import Callable, Hashable
from typing import Any

import av
from av.codec.context import CodecContext
from av.codec.hwaccel import HWAccel

from spdl_media._ffmpeg import LogLine, check_codec_options, current_log, translated_errors
from spdl_media.codec import VideoCodec, set_colors, set_video
from spdl_media.config import DecodeConfig
from spdl_media.cuda.color_plan import SEMI_PLANAR
from spdl_media.cuda_driver import LIBRARY, driver_version
from spdl_media.demux import make_filter
from spdl_media.errors import DecodeError, MediaError, MissingDependencyError, TransferError
from spdl_media.packets import with_data

NVDEC_CODECS = frozenset(
    {"av1", "h264", "hevc", "mpeg1video", "mpeg2video", "mpeg4", "vc1", "vp8", "vp9"}
)
"""Codecs that NVDEC decodes. Motion JPEG is left to the CPU, which detects damage."""

NVDEC_FORMATS = frozenset({"yuv420p", "yuvj420p", "nv12", "yuv420p10le", "yuv420p12le"})
"""Coded pixel formats that NVDEC decodes."""

VIDEO_LIBRARY = "nvcuvid.dll" if os.name == "nt" else "libnvcuvid.so.1"
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


class NotOnDeviceError(Exception):
    """The hardware does not support this stream. The message says why."""


def nvdec_refusal(codec: VideoCodec) -> str | None:
    """Return why NVDEC does not decode a stream, judged by its parameters, or ``None`` if it may."""
    if codec.name not in NVDEC_CODECS:
        return f"NVDEC has no decoder for {codec.name}, but for {', '.join(sorted(NVDEC_CODECS))}"
    if codec.pix_fmt is not None and codec.pix_fmt not in NVDEC_FORMATS:
        return f"NVDEC decodes 4:2:0 of 8, 10 and 12 bits, and this is {codec.pix_fmt}"
    return None


def open_on_device(
    codec: VideoCodec, config: DecodeConfig, source: str, device_index: int
) -> CodecContext:
    """Open the hardware decoder of a stream, in the current CUDA context of this thread.

    Its frames are copies that hold no surfaces of the decoder. FFmpeg makes them unless the option
    ``hwaccel_flags=unsafe_output`` is set.

    Raises:
        ValueError: A decoder option does not exist, or ``config`` names a CPU decoder.
        TransferError: The driver is too old.
        DecodeError: The device cannot be opened.
    """
    # Only FFmpeg's own decoders support hardware, not libraries such as dav1d.
    name = codec.name
    if config.decoder not in (None, name):
        raise ValueError(
            f"decode_config(decoder={config.decoder!r}) runs on the CPU alone; the decoder on the device is "
            f"{name!r}. Leave it out, or decode with cuda=None"
        )
    check_codec_options(name, config.decoder_options)
    accel = HWAccel(
        "cuda",
        str(device_index),
        allow_software_fallback=True,
        # Kernels run in the device's primary context, and cannot read memory of another context. FFmpeg fails
        # to retain the primary context if its flags differ, which PyTorch, CuPy and DALI cause. So use the
        # current context, which is the primary one. PyAV requests primary_ctx by default, and FFmpeg rejects
        # both options together.
        options={"primary_ctx": "0", "current_ctx": "1"},
        is_hw_owned=True,
    )
    with translated_errors(lambda text: _open_error(device_index, text, source)):
        context = CodecContext.create(name, "r", hwaccel=accel)
        context.thread_count = 1
        # This sets the pixel format, without which FFmpeg's AV1 decoder does not use the hardware.
        set_video(context, codec)
        context.options = dict(config.decoder_options)
        context.open(strict=False)
    return context


def _open_error(index: int, text: str, source: str) -> MediaError:
    """Return the error for a decoder that does not open, from FFmpeg's message."""
    # FFmpeg's messages when dlsym does not find a function.
    if "dynamically load" not in text and "Cannot load" not in text:
        return DecodeError(f"NVDEC cannot be opened on device {index}: {text}", source=source)
    return TransferError(
        f"NVIDIA's driver, which is of CUDA {driver_version()}, lacks functions that FFmpeg "
        f"{av.ffmpeg_version_info} in the wheel of PyAV {av.__version__} calls: {text}. Install a newer "
        "driver, or decode with cuda=None",
        source=source,
    )


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
    """An FFmpeg decoder on a device, which decodes one clip after another.

    It has the interface of PyAV's decoder, with frames on the device. Its errors distinguish a failure of the
    device from damaged data.

    Args:
        context: PyAV's codec context.
        index: Number of the device.

    Attributes:
        is_sound: Whether the decoder can be used for another clip.
        nbytes: Estimated maximum of the device memory that it uses.

    Thread safety: one thread at a time.
    """

    def __init__(self, context: Any, index: int) -> None:
        self._context, self._index = context, index
        self._filter: Any = None
        self._headers: bytes | None = None
        self.is_sound, self.nbytes = True, 0

    def begin(self, codec: VideoCodec, source: str) -> None:
        """Prepare for a clip, and reset properties of the clip before.

        Raises:
            DecodeError: The codec's headers are damaged.
        """
        self._codec, self._source, self._is_first = codec, source, True
        # FFmpeg determines the reorder depth from frames, and keeps it after a flush.
        self._context.reorder_depth = codec.reorder_depth
        set_colors(self._context, codec)
        # Reference surfaces of H.264, surfaces that FFmpeg adds, and the frames of a launch.
        self.nbytes = 40 * codec.width * codec.height * (3 if "p1" in str(codec.pix_fmt) else 2)
        if has_lengths(codec) and codec.extradata != self._headers:
            try:
                self._filter, after = make_filter(f"{codec.name}_mp4toannexb", codec)
            except ValueError as error:
                raise DecodeError(
                    f"damaged {codec.name} headers: {error}", source=source
                ) from error
            self._headers, self._sets = codec.extradata, after.extradata or b""

    def decode(self, packet: Any) -> list[Any]:
        """Decode a packet, and return the frames that are ready.

        Raises:
            TransferError: The device failed: it has no memory or no decoder left, or is gone.
            NotOnDeviceError: The frames are in host memory, or only a CPU decoder could make them.
        """
        log = current_log()
        assert log is not None, "the loop over the packets stands in a block of ffmpeg_log"
        start, frames = len(log), []
        try:
            for part in self._parts(packet):
                frames += self._context.decode(part)
        except av.FFmpegError as error:
            self.is_sound = False
            self._check_device(log[start:], error)
            if isinstance(error, av.error.NotImplementedError):  # no AV1 in software
                raise NotOnDeviceError(self._found("no", log[start:])) from error
            raise
        # FFmpeg logs a failure of the device, and continues in software without an error.
        if len(log) > start:
            self._check_device(log[start:])
        for frame in frames:
            self._check(frame, log[start:])
        return frames

    def _parts(self, packet: Any) -> list[Any]:
        """Return the packets to decode for a packet of the clip: itself, or converted to Annex B."""
        if not has_lengths(self._codec):
            return [packet]
        parts = list(self._filter.filter(packet and with_data(packet, memoryview(packet))))
        if self._is_first and parts:
            # The filter inserts headers before IDR pictures or the like, and a window may begin with others.
            parts[0], self._is_first = with_data(parts[0], self._sets + bytes(parts[0])), False
        return parts if packet is not None else [*parts, None]

    def _check_device(self, lines: list[LogLine], cause: BaseException | None = None) -> None:
        """Raise an error for a CUDA failure that FFmpeg has logged, unless the data caused it."""
        text = _text(lines)
        if old := re.search(r"Cannot load (\w+)", text):
            self.is_sound = False
            raise _open_error(self._index, old[0], self._source) from cause
        failed = re.search(r"(\w+)\([^\n]* failed -> (CUDA_ERROR_\w+): ([^\n]*)", text)
        if not failed or failed[2] in _DATA_ERRORS:
            return
        self.is_sound = False
        remedy = (
            "Its memory or its decoders are used up: decode in fewer threads, load fewer frames at a time, "
            "or drop buffers earlier"
            if failed[2] == "CUDA_ERROR_OUT_OF_MEMORY"
            else "nvidia-smi shows whether the device is still there"
        )
        raise TransferError(
            f"NVDEC failed on CUDA device {self._index}: {failed[1]} says {failed[2]} ({failed[3]}). "
            f"{remedy}",
            source=self._source,
        ) from cause

    def _check(self, frame: Any, lines: list[LogLine]) -> None:
        """Raise :class:`NotOnDeviceError` for a frame that is not on the device, or not completely."""
        # The decoder is not used again if one of the errors below is raised.
        is_sound, self.is_sound = self.is_sound, False
        if frame.format.name != "cuda" or getattr(frame.sw_format, "name", "") not in SEMI_PLANAR:
            raise NotOnDeviceError(self._found(format_name(frame), lines))
        # The decoder's size may already be that of later frames; these then have the codec's size.
        size, codec = (frame.width, frame.height), self._codec
        sizes = (self._context.width, self._context.height), (codec.width, codec.height)
        for width, height in sizes:
            if size == (width + width % 2, height + height % 2):
                if height % 2:
                    raise NotOnDeviceError(
                        f"NVDEC's chroma of frames with an odd height, here {width}x{height}, lies where "
                        "FFmpeg does not look for it"
                    )
                self.is_sound = is_sound
                return
        raise NotOnDeviceError(
            f"NVDEC gives {size[0]}x{size[1]} for frames of {sizes[0][0]}x{sizes[0][1]}, which this "
            f"{codec.name} stream cuts on the left or at the top"
        )

    def _found(self, what: str, lines: list[LogLine]) -> str:
        said = re.search(r"Video .* not within [^\n]*|.*exceeds maximum[^\n]*", _text(lines))
        return (
            f"NVDEC does not decode this {self._codec.name} stream: FFmpeg gave {what} frames, not on the "
            f"device{(said and f' ({said[0]})') or ''}"
        )

    def flush_buffers(self) -> None:
        """Drop all buffered data, for another clip or after a seek."""
        self._context.flush_buffers()
        self._is_first = True
        if self._filter is not None:
            self._filter.flush()


# CUDA errors that are caused by the stream: it is not supported by the hardware, or damaged.
_DATA_ERRORS = frozenset({"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"})


def _text(lines: list[LogLine]) -> str:
    """Join the messages of FFmpeg's log, because FFmpeg may write a line in pieces."""
    return "".join(line for _, _, line in lines)


def has_lengths(codec: VideoCodec) -> bool:
    """Whether NAL units have length prefixes, as in MP4, instead of start codes."""
    return codec.name in ("h264", "hevc") and (codec.extradata or b"")[:1] == b"\1"


def format_name(frame: Any) -> str:
    """Return the pixel format of a frame in host or device memory."""
    name: str = frame.format.name if frame.sw_format is None else frame.sw_format.name
    return name


class DecoderPool:
    """Idle decoders, kept for further clips. If there are too many, the longest idle one is closed.

    Args:
        most: Maximum number of idle decoders.
        room: Maximum bytes of surfaces of all idle decoders.

    Thread safety: safe.
    """

    def __init__(self, most: int = 8, room: int = 1 << 30) -> None:
        self._most, self._room = most, room
        self.after_fork()

    def after_fork(self) -> None:
        """Start with an empty pool. In a forked process, the parent's decoders are never freed."""
        if hasattr(self, "_idle"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._idle))
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


DECODERS = DecoderPool()
# Free decoders at exit while the driver still exists.
atexit.register(DECODERS.clear)

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=DECODERS.after_fork)


def decoder_key(codec: VideoCodec, config: DecodeConfig, index: int) -> Hashable:
    """Return the key of the decoders that can decode a clip."""
    kind = codec.name, codec.width, codec.height, codec.pix_fmt
    # If units have length prefixes, headers are sent with the packets.
    headers = None if has_lengths(codec) else codec.extradata
    # FFmpeg identifies the encoder by these, to work around its known bugs.
    encoder = codec.x264_build, codec.codec_tag if codec.name == "mpeg4" else 0
    return index, kind, headers, encoder, tuple(sorted(config.decoder_options.items()))
