"""Decodes packets with NVIDIA's parser and decoder.

Packets -> parser -> pictures, which the decoder decodes -> surfaces, in the order of presentation.
"""

from __future__ import annotations

import ctypes
import errno
import weakref
from contextlib import suppress
from ctypes import CFUNCTYPE, POINTER, byref, c_int, c_void_p
from itertools import accumulate
from typing import Any

import av

from spdl_media._threads import interrupts_delayed, when_dropped
from spdl_media.codec import VideoCodec
from spdl_media.cuda.cuvid import (
    CODECS,
    Format,
    Packet,
    ParserParams,
    Shown,
    call,
    check_support,
    library,
)
from spdl_media.cuda.surfaces import HardwareDecoder, Surface, kind_of
from spdl_media.cuda_driver import HISTORY, DriverError, Event, current, error_name

_END_OF_STREAM, _TIMESTAMP = 1, 2
# Pictures that the hardware may have in work before the first of them is read, and its limit of surfaces.
_AHEAD, _MOST_SURFACES = 8, 32
# Limit of times that wait for their frames: those of two fields a surface.
_MOST_TIMES = 2 * _MOST_SURFACES
# Times are multiples of a prime, so that none that the parser invents is taken for that of another packet.
_GRID, _SECOND = 97, 97 * 103_093
# Codecs whose packets are in the order of presentation.
_IN_ORDER = ("vp9", "av1")


def shows_frame(data: bytes) -> bool:
    """Whether a packet of VP9 holds a frame that is shown.

    Raises:
        IndexError: The packet is empty.

    See:
        VP9 Bitstream & Decoding Process Specification, 6.2 "Uncompressed header" and Annex B "Superframes".
    """
    starts, last = [0], data[-1]
    count, size = (last & 7) + 1, (last >> 3 & 3) + 1
    index = data[-2 - count * size :]
    if last >> 5 == 0b110 and index[0] == last:
        lengths = [int.from_bytes(index[1 + k * size :][:size], "little") for k in range(count - 1)]
        starts = [0, *accumulate(lengths)]
    for start in starts:
        bits = int.from_bytes(data[start : start + 1], "big")  # 0 beyond the data
        # The third profile has a bit more.
        bits = bits << 1 if bits & 0x30 == 0x30 else bits
        if bits & 0b1010:  # show_existing_frame, show_frame
            return True
    return False


class Session:
    """Decodes the packets of one stream after another, like PyAV's decoder, to surfaces.

    Args:
        name: FFmpeg's name of the codec, one of :data:`CODECS`.
        index: Number of the device.

    Attributes:
        stream: The stream on which surfaces are mapped.
        color: Range, matrix, primaries and transfer that the container states, as FFmpeg's numbers.
        size: Width and height that FFmpeg states for the clip.

    Thread safety: one thread at a time.
    """

    def __init__(self, name: str, index: int) -> None:
        self._name, self._index = name, index
        self._parser: c_void_p | None = None
        # Destroys the parser. Attributes are dropped in this order, and the parser needs the decoder.
        self._end: Any = None
        self._decoder: HardwareDecoder | None = None
        self._format = Format()
        self._frames: list[Surface] = []
        self._done: Event | None = None
        # Not a WeakSet, whose Python code would lose a Ctrl-C when a surface is dropped.
        self._alive: set[weakref.ref[Surface]] = set()
        self._error: BaseException | None = None
        self.stream = 0
        self.color, self.size = (0, 2, 2, 2), (0, 0)
        self._unit = 1, 1
        self._times: dict[int, tuple[int, int]] = {}
        # Added to times, and the greatest one so far.
        self._shift, self._latest = 0, -1 << 63
        self._is_empty = True

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the decoder, estimated."""
        return self._decoder.nbytes if self._decoder else 0

    def use(self, stream: int, codec: VideoCodec) -> None:
        """Prepare for a clip, whose surfaces are mapped on this stream.

        It waits for the work on the stream of the clip before, which may still read surfaces.

        Raises:
            DriverError: The device fails.
        """
        for ref in list(self._alive):
            if (surface := ref()) is not None:  # in the traceback of an error that is kept
                surface.unmap()
        if self._done is not None:
            self._done.delay(stream)
        self.stream, self.color, self.size = stream, codec.color, (codec.width, codec.height)
        self._unit = (10_000_000 * codec.time_base / _GRID).as_integer_ratio()

    def decode(self, packet: Any, data: bytes) -> list[Surface]:
        """Decode the data of a packet, and return the frames that are ready; ``None`` ends the stream.

        Raises:
            NotOnDeviceError: The hardware does not decode this video.
            av.InvalidDataError: The data is damaged.
            TransferError: The device failed: it has no memory or no decoder left, or is gone.
        """
        if packet is None:
            part = Packet(_END_OF_STREAM)
        elif not data:
            return []
        elif packet.pts is None or (self._name == "vp9" and not shows_frame(data)):
            part = Packet(0, len(data), data)
        else:
            # The parser expects units of 0.1 microseconds, and changes times that do not grow from frame to
            # frame, so numbers of packets do not serve.
            time = packet.pts * self._unit[0] // self._unit[1] * _GRID + self._shift
            if packet.is_keyframe and time <= self._latest:
                # Times start again, as where recordings were joined. A second leaves room for frames that
                # are shown before the key frame.
                self._shift += self._latest + _SECOND - time
                time = self._latest + _SECOND
            self._latest = max(self._latest, time)
            self._times[time] = packet.pts, packet.duration or 0
            part = Packet(_TIMESTAMP, len(data), data, time)
        with current(self._index):
            frames = self._parse(part)
        if packet is None and self._parser is not None and self._is_empty:
            raise av.error.InvalidDataError(errno.EINVAL, "NVIDIA's parser finds no frame in it")
        return frames

    def time_of(self, time: int) -> tuple[int | None, int]:
        """Return timestamp and duration of the packet that the parser was given with a time."""
        found = self._times.pop(time, None)
        if found and len(self._times) > _MOST_TIMES:
            # Frames come in the order of their times, so older times, as of second fields, have none.
            self._times = {t: one for t, one in self._times.items() if t > time}
        if found is None and self._times and self._name in _IN_ORDER:
            # A packet of VP9 or AV1 may begin with a frame that is not shown, and takes the time.
            found = self._times.pop(min(self._times))
        return found or (None, 0)

    def _parse(self, data: Packet) -> list[Surface]:
        if self._parser is None:
            self._parser = self._new_parser()
        key = id(self)
        _PARSING[key] = self
        try:
            # Python only prints what a Ctrl-C raises at the start of a callback.
            with interrupts_delayed():
                status = library()[1].cuvidParseVideoData(self._parser, byref(data))
        finally:
            del _PARSING[key]
            frames, self._frames = self._frames, []
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        if status:
            raise av.error.InvalidDataError(
                errno.EINVAL, f"cuvidParseVideoData says {error_name(status)}"
            )
        return frames

    def _new_parser(self) -> c_void_p:
        parser = c_void_p()
        params = ParserParams(
            codec=CODECS[self._name],
            num_surfaces=1,
            error_threshold=100,
            delay=_AHEAD,
            user=id(self),
            sequence=ctypes.cast(_ON_SEQUENCE, c_void_p),
            decode=ctypes.cast(_ON_DECODE, c_void_p),
            display=ctypes.cast(_ON_DISPLAY, c_void_p),
        )
        self._end = when_dropped(_destroy, parser, self._index)
        call(self._index, "cuvidCreateVideoParser", byref(parser), byref(params))
        return parser

    def on_sequence(self, format: Format) -> int:
        """Prepare for frames of this format, and return the number of surfaces.

        Raises:
            NotOnDeviceError: The hardware does not decode this format.
            TransferError: The device fails, or has no memory left.
        """
        is_first = not self._format.width
        self._format = Format.from_buffer_copy(format)
        if is_first and 0 < self.size[0] <= format.width and 0 < self.size[1] <= format.height:
            # NVIDIA's parser ignores crops of a whole macroblock, and rounds odd sizes.
            self._format.right = format.left + self.size[0]
            self._format.bottom = format.top + self.size[1]
        least = format.num_surfaces
        num_surfaces = max(least, min(least + _AHEAD, _MOST_SURFACES))
        made = self._decoder
        if made is None or made.kind != kind_of(format) or made.num_surfaces < num_surfaces:
            check_support(self._index, self._name, format)
            self._decoder = None
            self._decoder = HardwareDecoder(self._index, self._format, num_surfaces)
        assert self._decoder is not None
        return self._decoder.num_surfaces

    def on_decode(self, picture: int) -> int:
        """Start to decode a picture, ``CUVIDPICPARAMS``.

        Raises:
            av.InvalidDataError: The data is damaged.
            TransferError: The device fails.
        """
        surface = c_int.from_address(picture + 8).value
        for frame in self._frames:
            if frame.number == surface:
                frame.map()  # before it is overwritten
        assert self._decoder is not None
        # It waits if the hardware has four pictures in its queue.
        place = self._decoder.handle, c_void_p(picture)
        call(self._index, "cuvidDecodePicture", *place)
        return 1

    def on_display(self, shown: Shown) -> int:
        """Note a frame, in the order of presentation."""
        assert self._decoder is not None
        surface = Surface(self._decoder, self._format, shown, self.stream, self.color)
        surface.pts, surface.duration = self.time_of(shown.timestamp)
        self._frames.append(surface)
        self._alive.add(weakref.ref(surface, self._alive.discard))
        self._is_empty = False
        return 1

    def fail(self, error: BaseException) -> int:
        """Note the first error, which the library does not carry through, and end the parsing."""
        self._error = self._error or error
        return 0

    def flush_buffers(self) -> None:
        """Drop all buffered data, for another stream or after a seek."""
        parser, self._parser, self._end = self._parser, None, None
        self._times.clear()
        self._shift, self._latest = 0, -1 << 63
        self._format, self._is_empty = Format(), True
        if parser is not None and not HISTORY.lost:
            with suppress(DriverError), current(self._index):  # the device may be gone
                # Recorded now, because the stream may be gone at the next clip. Stream 2 differs by thread.
                self._done = Event(self._index, self.stream)


def _destroy(parser: c_void_p, index: int) -> None:
    if parser.value and not HISTORY.lost:
        with suppress(DriverError), current(index):  # the device may be gone
            library()[0].cuvidDestroyVideoParser(parser)


# Sessions by the number that their parser passes to the functions below, while they parse.
_PARSING: dict[int, Session] = {}


def _on_sequence(user: int, format: Any) -> int:
    session = _PARSING[user]
    try:
        return session.on_sequence(format[0])
    except BaseException as error:  # noqa: BLE001  # raised again after the call of the library
        return session.fail(error)


def _on_decode(user: int, picture: int) -> int:
    session = _PARSING[user]
    try:
        return session.on_decode(picture)
    except BaseException as error:  # noqa: BLE001
        return session.fail(error)


def _on_display(user: int, shown: Any) -> int:
    session = _PARSING[user]
    try:
        return session.on_display(shown[0]) if shown else 1
    except BaseException as error:  # noqa: BLE001
        return session.fail(error)


_ON_SEQUENCE = CFUNCTYPE(c_int, c_void_p, POINTER(Format))(_on_sequence)
_ON_DECODE = CFUNCTYPE(c_int, c_void_p, c_void_p)(_on_decode)
_ON_DISPLAY = CFUNCTYPE(c_int, c_void_p, POINTER(Shown))(_on_display)
