"""The one border to FFmpeg: its errors, its log lines, the names of its options, its fractions."""

from __future__ import annotations

import io
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import av
import av.filter
import av.format
import av.logging
from av.codec.context import CodecContext

from spdl_media._checks import check_choice, did_you_mean
from spdl_media.errors import MediaError

__all__ = ("set_log_level",)

if TYPE_CHECKING:
    AvPacket: TypeAlias = av.Packet[Any]
else:
    AvPacket = av.Packet  # generic in PyAV's stubs only

# Level, name of the part of FFmpeg that speaks, and what it says.
LogLine: TypeAlias = tuple[int, str, str]

_QUIET = -8  # AV_LOG_QUIET
LOG_LEVELS = ("quiet", "error", "warning", "info", "verbose", "debug")

_logger = logging.getLogger("libav")


class _LogState:
    """Whether PyAV hears FFmpeg's lines, and whether they are passed on as well."""

    # PyAV has one log level and one logger for the process.
    prepared = False
    forwarded = False
    handler: logging.Handler = logging.NullHandler()
    lock = threading.Lock()
    # Blocks of ffmpeg_log that are open, and whether PyAV hears FFmpeg because of them alone.
    num_open = 0
    is_ours = False

    @classmethod
    def update(cls) -> None:
        """Have PyAV hear FFmpeg while a block is open, unless the program says what it hears."""
        if not cls.is_ours or av.logging.get_level() not in (None, av.logging.ERROR):
            return
        # Not always: PyAV 18 takes the GIL for each line of FFmpeg's, whatever its level, and a JPEG has 40
        # for debuggers. Threads that decode would wait for each other as often. FFmpeg's own function does
        # nothing at the level "quiet". Not set_level(None): it fails a call that another thread is making.
        if cls.num_open:
            av.logging.set_level(av.logging.ERROR)
        else:
            av.logging.restore_default_callback()


def set_log_level(level: str) -> None:
    """Let FFmpeg's own log lines through to Python's logger ``libav``, or keep them in (the default).

    Where the program has set up no logging, they go to stderr. Errors carry FFmpeg's last line
    whatever the level is.

    Args:
        level: ``"quiet"`` (the default), ``"error"``, ``"warning"``, ``"info"``, ``"verbose"``,
            ``"debug"``.

    Raises:
        ValueError: Any other level.

    Thread safety: safe; the level is one for the whole process, as in FFmpeg.
    """
    check_choice("level", level, LOG_LEVELS)
    with _LogState.lock:
        _keep_in()
        _LogState.forwarded = _logger.propagate = level != "quiet"
        _LogState.is_ours = level == "quiet"
        av.logging.set_level(getattr(av.logging, "ERROR" if level == "quiet" else level.upper()))
        _LogState.update()
        _logger.setLevel(
            av.logging.adapt_level(getattr(av.logging, level.upper(), av.logging.ERROR))
        )
        _logger.removeHandler(_LogState.handler)
        has_stream = any(isinstance(each, logging.StreamHandler) for each in _logger.handlers)
        # A program without any logging would see nothing.
        if _LogState.forwarded and not (logging.getLogger().handlers or has_stream):
            _LogState.handler = logging.StreamHandler()
            _logger.addHandler(_LogState.handler)


def _keep_in() -> None:
    """Have no line of FFmpeg's printed."""
    if _LogState.prepared:
        return
    _LogState.prepared = True
    # A program that has chosen a log level of PyAV's own keeps it.
    if av.logging.get_level() is None:
        _LogState.is_ours = True
        av.logging.set_libav_level(_QUIET)
        # The lines reach Python's logger ``libav``, which prints them on stderr for lack of a handler.
        _logger.addHandler(logging.NullHandler())
        _logger.propagate = False
        # Otherwise the same line twice in a row is kept once, and the second error has lost its
        # reason.
        av.logging.set_skip_repeated(False)


@contextmanager
def _heard() -> Iterator[None]:
    """Have PyAV hear FFmpeg's error lines in a block, in all threads."""
    with _LogState.lock:
        _keep_in()
        _LogState.num_open += 1
        _LogState.update()
    try:
        yield
    finally:
        with _LogState.lock:
            _LogState.num_open = max(0, _LogState.num_open - 1)
            _LogState.update()


def _after_fork() -> None:
    """Forget the blocks of the parent's other threads, one of which may hold the lock."""
    _LogState.lock = threading.Lock()
    _LogState.num_open = 0


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


def forwards_log() -> bool:
    """Whether FFmpeg's lines go to the program's log."""
    return _LogState.forwarded


class _CurrentLog(threading.local):
    """The lines of the innermost block of :func:`ffmpeg_log` that a thread is in."""

    lines: list[LogLine] | None = None


_current_log = _CurrentLog()


def current_log() -> list[LogLine] | None:
    """FFmpeg's log lines of this thread, in the block of :func:`ffmpeg_log` that it is in, if any.

    A loop over many frames opens one block, which takes 3 microseconds, and looks here for each of them.
    """
    return _current_log.lines


@contextmanager
def ffmpeg_log() -> Iterator[list[LogLine]]:
    """Collect what FFmpeg logs in this thread in a block.

    Open it once for a whole call: entering takes longer than reading a packet. The list grows as FFmpeg
    speaks, so ``mark = len(lines)`` before a step and ``lines[mark:]`` after it are the lines of that
    step. Never hold it over a ``yield``: a generator may go on in another thread, or never.
    """
    outer = _current_log.lines
    with _heard(), av.logging.Capture() as lines:
        _current_log.lines = lines
        try:
            yield lines
        finally:
            _current_log.lines = outer
            if _LogState.forwarded:
                _forward(lines)


class TranslatedErrors:
    """A block that translates every error of FFmpeg into one of ours, with FFmpeg's own message.

    Inside of a block of :func:`ffmpeg_log` it takes that one's lines, because to open another costs as much
    as to make a small filter.

    Args:
        make_error: Makes the error from a text such as "Invalid data found when processing input
            (moov atom not found)". The original becomes its cause.
    """

    __slots__ = ("_lines", "_log", "_make_error", "_mark")

    def __init__(self, make_error: Callable[[str], MediaError]) -> None:
        self._make_error = make_error
        self._log: AbstractContextManager[list[LogLine]] | None = None

    def __enter__(self) -> None:
        self._log, lines = None, current_log()
        if lines is None:
            self._log = ffmpeg_log()
            lines = self._log.__enter__()
        self._lines, self._mark = lines, len(lines)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._log is not None:
            self._log.__exit__(kind, error, trace)
        if isinstance(error, av.FFmpegError):
            raise self._make_error(describe(error, self._lines[self._mark :])) from error


def describe(error: BaseException, lines: list[LogLine]) -> str:
    """FFmpeg's own words for an error: the text of its number, then its last error line in brackets."""
    # str() of it would add an error number, and the name of the file, which our messages have
    # already.
    text = getattr(error, "strerror", None) or str(error)
    said = [line.strip() for level, _, line in lines if level <= av.logging.ERROR and line.strip()]
    return f"{text} ({said[-1]})" if said else str(text)


def says_checksum_failed(lines: list[LogLine]) -> bool:
    """Whether FFmpeg found data that do not fit their checksum, which for it is not always an error."""
    return any("CRC mismatch" in line or "mismatching checksum" in line for _, _, line in lines)


def _forward(lines: list[LogLine]) -> None:
    for level, name, line in lines:
        logger = logging.getLogger(f"libav.{name}" if name else "libav.generic")
        logger.log(av.logging.adapt_level(level), line.strip())


@lru_cache(maxsize=256)
def codec_option_names(codec: str, mode: Literal["r", "w"] = "r") -> frozenset[str]:
    """The names of the options that a decoder or encoder takes: FFmpeg's for all codecs, and its own."""
    options = CodecContext.create(codec, mode).supported_options
    return frozenset(option.name for option in (*options.generic, *options.private))


def check_codec_options(
    codec: str, options: Mapping[str, str], mode: Literal["r", "w"] = "r"
) -> None:
    """Refuse options that FFmpeg would ignore without a word.

    Raises:
        ValueError: A name that this decoder (mode "r") or encoder ("w") does not have.
    """
    if unknown := sorted(set(options) - codec_option_names(codec, mode)):
        hint = did_you_mean(unknown[0], codec_option_names(codec, mode))
        what = "decoder" if mode == "r" else "encoder"
        raise ValueError(
            f"{what} {codec!r} has no option {', '.join(map(repr, unknown))}. {hint and hint + ' '}"
            "See https://ffmpeg.org/ffmpeg-codecs.html"
        )


# FFmpeg gives no list of a demuxer's options, but refuses a value that cannot be read as a number,
# a flag or a size. Options that hold text, keys or dictionaries take any value, so they are named
# here.
_TEXT_OPTIONS = frozenset(
    """
    activation_bytes aa_fixed_key allowed_extensions allowed_segment_extensions assetmaps
    audible_fixed_key audible_key cenc_decryption_key cenc_decryption_keys codec_whitelist cookies
    decryption_key decryption_keys dump_separator format_whitelist headers pixel_format
    protocol_blacklist protocol_whitelist seg_format_options sub_name video_stream_expr
    """.split()
)
# No number, flag or size; FFmpeg then complains of the option, or of this value.
_NO_VALUE = "(no value)"


@lru_cache(maxsize=1024)
def format_has_option(format: str, option: str) -> bool:
    """Whether a demuxer, or FFmpeg's opening of any container, knows an option of this name."""
    if option in _TEXT_OPTIONS:
        return True
    with _heard(), av.logging.Capture() as lines:
        try:
            # One byte is no file of any format, but options are read before the content is.
            av.open(io.BytesIO(b"\0"), "r", format=format, options={option: _NO_VALUE}).close()
        except (av.FFmpegError, ValueError):
            return any(option in line or _NO_VALUE in line for _, _, line in lines)
    return False


@lru_cache(maxsize=1024)
def _is_demuxer(format: str) -> bool:
    return _can_make(av.format.ContainerFormat, format, "r")


def check_format(format: str) -> None:
    """Refuse the name of a format that FFmpeg cannot read, which PyAV in part would ignore.

    Raises:
        ValueError: FFmpeg has no demuxer of this name.
    """
    if not _is_demuxer(format):
        # FFmpeg lists all names of a format as one: "mov,mp4,m4a".
        names = {part for name in av.format.formats_available for part in name.split(",")}
        hint = did_you_mean(format, sorted(filter(_is_demuxer, names)))
        raise ValueError(
            f"this FFmpeg cannot read a format named {format!r}. {hint and hint + ' '}"
            "See https://ffmpeg.org/ffmpeg-formats.html#Demuxers"
        )


def check_format_options(format: str, options: Mapping[str, str]) -> None:
    """Refuse options that FFmpeg would ignore without a word.

    Raises:
        ValueError: A name that this demuxer does not have.
    """
    # A name may be an option of all containers, such as "probesize", or of this one.
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


def library_versions() -> dict[str, str]:
    """The versions of FFmpeg's libraries inside PyAV, by name."""
    return {name: ".".join(map(str, version)) for name, version in av.library_versions.items()}


@lru_cache(maxsize=256)
def is_color(text: str) -> bool:
    """Whether FFmpeg reads this as a colour. It must need no quoting in the options of a filter."""
    with ffmpeg_log():
        # Some 60 microseconds, and no frame is made.
        return _can_make(av.filter.Graph().add, "color", f"color={text}")


def as_fraction(value: Any) -> Any:
    """A time base or rate of PyAV's as a Fraction; ``None``: unset."""
    # PyAV 18 gives ``Fraction | None``, 19 its own rational, where unset is a falsy 0/1.
    if isinstance(value, Fraction):
        return value or None
    return Fraction(value.numerator, value.denominator) if value else None


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
