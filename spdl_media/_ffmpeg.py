"""Adapt FFmpeg, as PyAV exposes it: errors, log lines, names of options and formats, fractions."""

from __future__ import annotations

import io
import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fractions import Fraction
from functools import cache, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import av
import av.filter
import av.format
import av.logging
import numpy as np
from av.codec.context import CodecContext

from spdl_media._checks import check_choice, did_you_mean, listed
from spdl_media.errors import FilterError, MediaError

__all__ = ("set_log_level",)

if TYPE_CHECKING:
    AvPacket: TypeAlias = av.Packet[Any]
else:
    AvPacket = av.Packet  # generic in PyAV's stubs only

# Level, name of the FFmpeg component that logged, and the text.
LogLine: TypeAlias = tuple[int, str, str]

_QUIET = -8  # AV_LOG_QUIET
LOG_LEVELS = ("quiet", "error", "warning", "info", "verbose", "debug")

_logger = logging.getLogger("libav")


class LogState:
    """State of FFmpeg's log: whether PyAV captures its lines, and whether they are forwarded to a logger."""

    # Class attributes, because PyAV has one log level and one logger per process.
    prepared = False
    forwarded = False
    handler: logging.Handler = logging.NullHandler()
    lock = threading.Lock()
    # num_open counts the open capturing blocks. is_ours: the program has set no level, so PyAV captures
    # only while such a block is open.
    num_open = 0
    is_ours = False

    @classmethod
    def update(cls) -> None:
        """Capture FFmpeg's log while a block is open, unless the program has set PyAV's log level."""
        if not cls.is_ours or av.logging.get_level() not in (None, av.logging.ERROR):
            return
        # Not captured all the time: PyAV 18 takes the GIL for each line that FFmpeg logs, whatever its level,
        # and a JPEG logs 40 debug lines, at each of which decoding threads would wait for each other.
        # FFmpeg's default callback does nothing at level "quiet". Not set_level(None): it makes a call fail
        # that another thread is making.
        if cls.num_open:
            av.logging.set_level(av.logging.ERROR)
        else:
            av.logging.restore_default_callback()


def set_log_level(level: str) -> None:
    """Forward FFmpeg's log lines to Python's logger ``libav``, or suppress them (the default).

    If the program has not configured logging, forwarded lines go to stderr. Exceptions contain FFmpeg's
    last error line at every level.

    Args:
        level: ``"quiet"`` (the default), ``"error"``, ``"warning"``, ``"info"``, ``"verbose"`` or
            ``"debug"``.

    Raises:
        ValueError: ``level`` is none of these.

    Thread safety: safe. The level applies to the whole process, as in FFmpeg.
    """
    check_choice("level", level, LOG_LEVELS)
    with LogState.lock:
        _suppress_output()
        LogState.forwarded = _logger.propagate = level != "quiet"
        LogState.is_ours = level == "quiet"
        av.logging.set_level(getattr(av.logging, "ERROR" if level == "quiet" else level.upper()))
        LogState.update()
        least = getattr(av.logging, level.upper(), av.logging.ERROR)
        _logger.setLevel(av.logging.adapt_level(least))
        _logger.removeHandler(LogState.handler)
        has_stream = any(isinstance(each, logging.StreamHandler) for each in _logger.handlers)
        # Without a handler anywhere, the lines would be lost.
        if LogState.forwarded and not (logging.getLogger().handlers or has_stream):
            LogState.handler = logging.StreamHandler()
            _logger.addHandler(LogState.handler)


def _suppress_output() -> None:
    """Keep FFmpeg from printing log lines, unless the program has set a log level of PyAV's."""
    if LogState.prepared:
        return
    LogState.prepared = True
    # A log level that the program has set in PyAV is kept.
    if av.logging.get_level() is None:
        LogState.is_ours = True
        av.logging.set_libav_level(_QUIET)
        # Captured lines also reach the logger ``libav``. Without a handler, logging prints them to stderr.
        _logger.addHandler(logging.NullHandler())
        _logger.propagate = False
        # PyAV drops a line that repeats the one before. The second of two equal errors would then have no
        # reason in its message.
        av.logging.set_skip_repeated(False)


@contextmanager
def _captured() -> Iterator[list[LogLine]]:
    """Capture FFmpeg's error lines of this thread in a block. PyAV then captures those of all threads."""
    with LogState.lock:
        _suppress_output()
        LogState.num_open += 1
        LogState.update()
    try:
        with av.logging.Capture() as lines:
            yield lines
    finally:
        with LogState.lock:
            LogState.num_open = max(0, LogState.num_open - 1)
            LogState.update()


def _after_fork() -> None:
    """Reset the state in a forked child, where the parent's other threads and their blocks are gone."""
    # One of those threads may have held the lock at the fork.
    LogState.lock = threading.Lock()
    LogState.num_open = 0


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


class _CurrentLog(threading.local):
    """The log lines of a thread's outermost :func:`ffmpeg_log` block; ``None`` outside of one.

    To enter a block takes 3 microseconds, so a loop over many frames enters one around the loop and reads
    them for each frame.
    """

    lines: list[LogLine] | None = None


current_log = _CurrentLog()


def ffmpeg_log(*, always: bool = False) -> AbstractContextManager[list[LogLine]]:
    """Collect the lines that FFmpeg logs in this thread during a ``with`` block.

    Enter it once for a whole call: entering takes longer than reading a packet. An inner block gives the list
    of the outer one. FFmpeg's lines are appended to it as they come. To get those of one step, take
    ``mark = len(lines)`` before it and ``lines[mark:]`` after it. Never ``yield`` inside the block: the
    generator may be resumed in another thread, or never.

    Args:
        always: Collect them also inside an :func:`unheard_log` block, in a list of its own.
    """
    lines = current_log.lines
    return _current(_captured()) if lines is None or always else nullcontext(lines)


@contextmanager
def _current(log: AbstractContextManager[list[LogLine]]) -> Iterator[list[LogLine]]:
    """Make the lines of a log those of the thread's outermost block."""
    outer = current_log.lines
    with log as lines:
        current_log.lines = lines
        try:
            yield lines
        finally:
            current_log.lines = outer
            if LogState.forwarded:
                for level, name, line in lines:
                    logger = logging.getLogger(f"libav.{name or 'generic'}")
                    logger.log(av.logging.adapt_level(level), line.strip())


def unheard_log() -> AbstractContextManager[list[LogLine]]:
    """Run a block without collecting what FFmpeg logs in it, unless the program wants to see it.

    PyAV takes the GIL for each line, whatever its level, and FFmpeg may log thousands while it opens an MP4.
    Errors of the block lack FFmpeg's reason: repeat what failed in an :func:`ffmpeg_log` block.
    """
    if LogState.forwarded or current_log.lines is not None:
        return ffmpeg_log()
    with LogState.lock:
        _suppress_output()
    return _current(nullcontext([]))


class TranslatedErrors:
    """Turn an FFmpeg error of a ``with`` block into a :class:`MediaError` with FFmpeg's message.

    Args:
        make_error: Makes the error from a text such as "Invalid data found when processing input
            (moov atom not found)" and FFmpeg's error, which becomes its ``__cause__``.
    """

    # Not a generator: on CPython 3.12 and 3.13, its frame and the error form a cycle, which keeps frames.

    def __init__(self, make_error: Callable[[str, av.FFmpegError], MediaError]) -> None:
        self._make_error = make_error
        self._log = ffmpeg_log()

    def __enter__(self) -> None:
        self._lines = self._log.__enter__()
        self._mark = len(self._lines)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._log.__exit__(None, None, None)
        if isinstance(error, av.FFmpegError):
            raise self._make_error(describe(error, self._lines[self._mark :]), error) from error


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Add the name of the source to a FilterError of the block, because graphs do not know it.

    Raises:
        FilterError: The error of the block, with ``source`` set.
    """
    try:
        yield
    except FilterError as error:
        error.source = error.source or source
        raise


def describe(error: BaseException, lines: list[LogLine]) -> str:
    """Return FFmpeg's text for an error: that of its error code, then the last error message in brackets."""
    # Not str(error): it adds the error number and the file name, which our messages have already.
    text = getattr(error, "strerror", None) or str(error)
    said = [line.rstrip() for level, _, line in lines if level <= av.logging.ERROR and line.strip()]
    # Encoders list the sample rates or channel layouts that they support, below two lines, indented.
    if items := list(takewhile(lambda line: line.startswith("  "), reversed(said[2:]))):
        cause, heading = said[-len(items) - 2 : -len(items)]
        said = [f"{cause}. {heading} {', '.join(map(str.strip, items[::-1]))}"]
    if said and re.match(r"(Invalid image|Picture) size(?! 0x| \d+x0\b)", said[-1]):
        said[-1] += "; FFmpeg takes less than 2**28 pixels"
    return f"{text} ({said[-1].strip()})" if said else str(text)


@lru_cache(maxsize=64)
def is_native_layout(name: str) -> bool:
    """Whether a layout has FFmpeg's order of channels. PyAV frees the list of any other order twice."""
    # A layout without a name of its own is its list: "2 channels (FC+BC)".
    _, _, channels = name.partition(" (")
    if not channels:
        return True
    order = [av.AudioLayout(hex(1 << bit)).channels[0].name for bit in range(64)]
    names = channels.removesuffix(")").split("+")
    return names == [one for one in order if one in names]


def says_damaged(lines: list[LogLine]) -> bool:
    """Whether FFmpeg logged damage that it does not report: checksums, missing parts of images."""
    checksums, faxes = "CRC mismatch|mismatching checksum", "Incorrect (code|mode)"
    stills = r"(LZW decode|Uncompressing|decode_block\(\)) failed|Decoded only"
    # TIFF: "Run went out of bounds". BMP: "frame ptr just went out of bounds", "Skip beyond picture bounds".
    runs = "(Read|Copy|Run|just) went|Skip beyond"
    return any(re.search(f"{checksums}|{faxes}|{stills}|{runs}", said) for *_, said in lines)


@lru_cache(maxsize=256)
def codec_option_names(codec: str, mode: Literal["r", "w"] = "r") -> frozenset[str]:
    """Return the option names of a decoder or encoder: its own, and those that all codecs have."""
    options = CodecContext.create(codec, mode).supported_options
    return frozenset(option.name for option in (*options.generic, *options.private))


def check_codec_options(
    codec: str, options: Mapping[str, str], mode: Literal["r", "w"] = "r"
) -> None:
    """Raise for options that a codec does not have. FFmpeg would silently ignore them.

    Raises:
        ValueError: The decoder (mode "r") or encoder ("w") has no option of this name.
    """
    if unknown := sorted(set(options) - codec_option_names(codec, mode)):
        hint = did_you_mean(unknown[0], codec_option_names(codec, mode))
        what = "decoder" if mode == "r" else "encoder"
        raise ValueError(
            f"{what} {codec!r} has no option {', '.join(map(repr, unknown))}. {hint and hint + ' '}"
            "See https://ffmpeg.org/ffmpeg-codecs.html"
        )


# PyAV does not list a demuxer's options. format_has_option passes a value that is no number, flag or size:
# FFmpeg complains about it if it knows the option. That does not work for options that accept any text,
# keys or dictionaries, so these are listed here.
_TEXT_OPTIONS = frozenset(
    """
    activation_bytes aa_fixed_key allowed_extensions allowed_segment_extensions assetmaps
    audible_fixed_key audible_key cenc_decryption_key cenc_decryption_keys codec_whitelist cookies
    decryption_key decryption_keys dump_separator format_whitelist headers pixel_format
    protocol_blacklist protocol_whitelist seg_format_options sub_name video_stream_expr
    """.split()
)
# FFmpeg's complaint names the option or quotes this value.
_NO_VALUE = "(no value)"


@lru_cache(maxsize=1024)
def format_has_option(format: str, option: str) -> bool:
    """Whether a demuxer has an option of this name, or all demuxers have it."""
    if option in _TEXT_OPTIONS:
        return True
    with _captured() as lines, suppress(av.FFmpegError, ValueError):
        # Opening one byte fails for every format, but FFmpeg reads the options before the content.
        av.open(io.BytesIO(b"\0"), "r", format=format, options={option: _NO_VALUE})
    return any(option in line or _NO_VALUE in line for _, _, line in lines)


@lru_cache(maxsize=64)
def check_format(format: str) -> None:
    """Raise for the name of a format that FFmpeg cannot read. PyAV ignores some unknown names.

    Raises:
        ValueError: FFmpeg has no demuxer of this name.
    """
    if not _can_make(av.format.ContainerFormat, format, "r"):
        hint = format_hint(format, "r")
        raise ValueError(
            f"this FFmpeg cannot read a format named {format!r}. {hint and hint + ' '}"
            "See https://ffmpeg.org/ffmpeg-formats.html#Demuxers"
        )


def format_hint(name: str, mode: Literal["r", "w"]) -> str:
    """Return "Did you mean ...?" with the formats of this file extension, else of similar names."""
    # FFmpeg joins the names of one format by commas: "mov,mp4,m4a".
    names = {part for joined in av.format.formats_available for part in joined.split(",")}
    known = sorted(one for one in names if _can_make(av.format.ContainerFormat, one, mode))
    # To read, muxers' extensions help, too: many demuxers have none.
    extensions = (
        av.format.ContainerFormat(one, "w" if mode == "w" else None).extensions for one in known
    )
    same = [one for one, own in zip(known, extensions, strict=True) if name in own]
    return f"Did you mean {listed(same)}?" if same else did_you_mean(name, known)


def check_format_options(format: str, options: Mapping[str, str]) -> None:
    """Raise for options that a demuxer does not have. FFmpeg would silently ignore them.

    Raises:
        ValueError: The demuxer has no option of this name.
    """
    # Options that all containers have, such as "probesize", are known for every format.
    if unknown := [name for name in sorted(options) if not format_has_option(format, name)]:
        raise ValueError(
            f"format {format!r} has no option {', '.join(map(repr, unknown))}. "
            "See https://ffmpeg.org/ffmpeg-formats.html"
        )


@lru_cache(maxsize=256)
def is_pixel_format(name: str) -> bool:
    """Whether FFmpeg has a pixel format of this name."""
    return _can_make(av.VideoFormat, name)


@lru_cache(maxsize=64)
def is_sample_format(name: str) -> bool:
    """Whether FFmpeg has a sample format of this name."""
    return _can_make(av.AudioFormat, name)


def _can_make(make: Callable[..., object], *arguments: str) -> bool:
    try:
        make(*arguments)
    except (av.FFmpegError, ValueError):
        return False
    return True


def has_codec(name: str, mode: Literal["r", "w"]) -> bool:
    """Whether this FFmpeg has a decoder (mode "r") or encoder ("w") of this name."""
    return _can_make(av.Codec, name, mode)


PYAV = int(av.__version__.partition(".")[0])
"""Major version of PyAV, 18 or 19."""

CUTS_LAST_FRAME = av.library_versions["libavformat"] >= (63,)
"""Whether FFmpeg cuts the last frame of AAC in an MP4 where the file says that the audio ends."""


def library_versions() -> dict[str, str]:
    """Return the versions of the FFmpeg libraries inside PyAV, by library name."""
    return {name: ".".join(map(str, version)) for name, version in av.library_versions.items()}


@lru_cache(maxsize=256)
def is_color(text: str) -> bool:
    """Whether FFmpeg can parse a text as a colour. The text must not need quoting in a filter's options."""
    with ffmpeg_log():
        # Takes about 60 microseconds: the filter is created, but makes no frame.
        return _can_make(av.filter.Graph().add, "color", f"color={text}")


def as_fraction(value: Any) -> Any:
    """Return a time base or rate of PyAV's as a ``Fraction``; ``None`` if it is unset."""
    # PyAV 18 gives ``Fraction | None``, PyAV 19 its own rational type, in which unset is a falsy 0/1.
    if isinstance(value, Fraction):
        return value or None
    return Fraction(value.numerator, value.denominator) if value else None


@cache
def keep_freed_memory() -> None:
    """Make glibc's allocator keep some megabytes of freed memory. Runs once in a process.

    glibc returns the top of its heap to the system when it exceeds a threshold, at first 128 KiB. The frames
    of one small image exceed that, so each image costs 24 to 33 page faults: 6% of the time to load JPEGs of
    500x375 into a pool. Freeing a larger block raises the threshold to twice the block's size, so blocks
    are allocated and freed here, without touching their pages. Other allocators are not affected.

    See:
        mallopt(3), ``M_MMAP_THRESHOLD`` and its dynamic adjustment
    """
    # Only a block with its own mapping raises the threshold. The first blocks may fill holes in the heap.
    blocks = [np.empty(4 << 20, np.uint8) for _ in range(8)]
    del blocks


def frame_matrix(frame: av.VideoFrame) -> tuple[int, ...] | None:
    """Return the display matrix of a decoded frame as FFmpeg's nine integers; ``None``: it has none."""
    try:
        side_data: Any = frame.side_data  # indexed by position, which PyAV's stubs do not declare
        entries = [side_data[index] for index in range(len(side_data))]
    except ValueError:  # PyAV 18 does not know every type of side data
        return None
    found = (bytes(entry) for entry in entries if entry.type.name == "DISPLAYMATRIX")
    return next((struct.unpack("=9i", matrix) for matrix in found), None)
