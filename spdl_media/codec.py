"""Parameters of a stream that its decoder needs, as plain values, and decoders made from them.

FFmpeg keeps these parameters in the stream of an open file. As plain values they outlive the file, can be
pickled, and can be used by any number of decoders at once.
"""

from __future__ import annotations

import io
import platform
import re
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from typing import Any, TypeAlias

import av
from av.codec.context import CodecContext

from spdl_media._ffmpeg import TranslatedErrors, as_fraction, check_codec_options, is_native_layout
from spdl_media._threads import never_freed_in_forks, when_dropped
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.formats import COLOR_TABLES
from spdl_media.stills import ERR_DETECT
from spdl_media.timing import ticks_to_seconds

__all__ = ("AudioCodec", "Codec", "VideoCodec")


@dataclass(frozen=True, slots=True)
class VideoCodec:
    """A coded video or image stream.

    Attributes:
        name: FFmpeg's name of the codec, such as ``"h264"``.
        decoder: Name of FFmpeg's default decoder for it, such as ``"libdav1d"`` for AV1.
        width: Coded width in pixels, before any rotation; 0: known only after a frame is decoded.
        height: Coded height in pixels; 0: known only after a frame is decoded.
        pix_fmt: FFmpeg's name of the pixel format; ``None``: known only after a frame is decoded.
        time_base: Unit of the packets' timestamps, in seconds.
        frame_rate: Average number of frames per second; ``None`` for a still, or if not stated.
        sample_aspect_ratio: Width of a pixel divided by its height; ``None``: not stated.
        extradata: Headers of the codec that the container has; ``None``: they are in the packets.
        codec_tag: The container's code (FourCC) for the codec, as FFmpeg's number; 0: none.
        bits_per_coded_sample: Bits of a coded pixel or sample; 0: not stated.
        reorder_depth: Number of frames that a decoder delays to put frames into display order.
        color: Range, matrix, primaries and transfer that the container states, as FFmpeg's numbers.
        x264_build: Version of x264, for packets without the first one, which states it; else 0.

    Thread safety: safe; it is immutable.
    """

    name: str
    decoder: str
    width: int = 0
    height: int = 0
    pix_fmt: str | None = None
    time_base: Fraction = Fraction(1, 25)
    frame_rate: Fraction | None = None
    sample_aspect_ratio: Fraction | None = None
    extradata: bytes | None = field(default=None, repr=False)
    codec_tag: int = field(default=0, repr=False)
    bits_per_coded_sample: int = field(default=0, repr=False)
    reorder_depth: int = field(default=0, repr=False)
    # FFmpeg's "unspecified" is 0 for the range and 2 for the others.
    color: tuple[int, int, int, int] = field(default=(0, 2, 2, 2), repr=False)
    x264_build: int = field(default=0, repr=False)


@dataclass(frozen=True, slots=True)
class AudioCodec:
    """A coded audio stream.

    Attributes:
        name: FFmpeg's name of the codec, such as ``"mp3"``.
        decoder: Name of FFmpeg's default decoder for it, such as ``"mp3float"``.
        sample_rate: Sample rate in Hz.
        channel_layout: FFmpeg's name of the channel layout, such as ``"stereo"``.
        num_channels: Number of channels.
        sample_fmt: FFmpeg's name of the sample format that the decoder gives; ``None``: not known yet.
        time_base: Unit of the packets' timestamps, in seconds.
        extradata: Headers of the codec that the container has; ``None``: they are in the packets.
        codec_tag: The container's code (FourCC) for the codec, as FFmpeg's number; 0: none.
        bit_rate: Stated bit rate in bits per second; 0: not stated.
        start_pts: Timestamp of the first audible sample; ``None``: not stated.
        delay: Number of samples that the encoder put before the first audible one.
        frame_size: Number of samples in each packet; 0: it varies, or is unknown.
        block_align: Size of a block in bytes, for codecs whose packets consist of blocks of it; else 0.
        bits_per_coded_sample: Bits of a coded sample, for the same codecs; else 0.

    Thread safety: safe; it is immutable.
    """

    name: str
    decoder: str
    sample_rate: int
    channel_layout: str
    num_channels: int
    sample_fmt: str | None = None
    time_base: Fraction = Fraction(1, 48000)
    extradata: bytes | None = field(default=None, repr=False)
    codec_tag: int = field(default=0, repr=False)
    bit_rate: int = field(default=0, repr=False)
    start_pts: int | None = field(default=None, repr=False)
    delay: int = field(default=0, repr=False)
    frame_size: int = field(default=0, repr=False)
    block_align: int = field(default=0, repr=False)
    bits_per_coded_sample: int = field(default=0, repr=False)


Codec: TypeAlias = VideoCodec | AudioCodec


def read_video_codec(stream: av.VideoStream) -> VideoCodec:
    """Copy the parameters that a decoder needs from an open stream."""
    context = stream.codec_context
    alike = "width height pix_fmt extradata bits_per_coded_sample reorder_depth".split()
    return VideoCodec(
        **_common(stream, alike),
        frame_rate=as_fraction(stream.average_rate) or as_fraction(stream.guessed_rate),
        sample_aspect_ratio=as_fraction(context.sample_aspect_ratio),
        color=color_numbers(context),
    )


def _common(stream: Any, alike: Iterable[str]) -> dict[str, Any]:
    """Return the parameters of video and audio streams, and those in ``alike``, named as PyAV names them."""
    context = stream.codec_context
    return {name: getattr(context, name) for name in alike} | {
        "name": context.codec.canonical_name,
        "decoder": context.codec.name,
        "time_base": as_fraction(stream.time_base),
        "codec_tag": _tag_number(context),
    }


STILL_CODECS = frozenset({"png", "webp", "bmp", "tiff", "jpeg2000", "gif", "targa"})
"""Codecs of still images, which have no timestamps, although FFmpeg states a frame rate for them."""


def usual_duration(codec: VideoCodec) -> int:
    """Return the duration of a frame at the stated rate, in ticks; 0 if the file states no rate."""
    rate, base = codec.frame_rate, codec.time_base
    if not rate:
        return 0
    # In integers, because fractions take ten times as long.
    return max(1, round(base.denominator * rate.denominator / (base.numerator * rate.numerator)))


def needs_first_packet(codec: VideoCodec) -> bool:
    """Whether a stream has to be decoded from its first packet on.

    The first packet has the palette. Packets of H.261 do not tell whether they are key frames.
    """
    return codec.pix_fmt == "pal8" or codec.name == "h261"


_colors_of = attrgetter(*COLOR_TABLES)


def color_numbers(source: Any) -> tuple[int, int, int, int]:
    """Return range, matrix, primaries and transfer of a codec context or frame, as FFmpeg's numbers."""
    levels, matrix, primaries, trc = map(int, _colors_of(source))
    return levels, matrix, primaries, trc


# Bits of a coded sample of Monkey's Audio and TAK, by the decoder's sample format.
_BITS = {"u8p": 8, "s16p": 16, "s32p": 24}


def read_audio_codec(stream: av.AudioStream) -> AudioCodec:
    """Copy the parameters that a decoder needs from an open stream."""
    context = stream.codec_context
    has_blocks = context.codec.name.startswith(_CUT_INTO_BLOCKS)
    block_align, bits = _wave_format(stream) if has_blocks else (0, 0)
    # PyAV's stubs do not declare that format is None if FFmpeg does not know it.
    sample_fmt, layout = getattr(context.format, "name", None), context.layout
    if not is_native_layout(layout.name):  # let no other object free its list of channels
        context.layout = f"{layout.nb_channels} channels"
    formats = [each.name for each in context.codec.audio_formats or ()]
    if sample_fmt and formats and sample_fmt not in formats:
        sample_fmt = formats[0]  # FFmpeg took MP2 for MP3, and tried another decoder
    if context.codec.name in ("ape", "tak"):  # PyAV does not expose their bits, only the format
        bits = _BITS.get(sample_fmt or "", 0)
    elif context.codec.name == "g726le" and context.sample_rate:  # which _wave_format does not read
        bits = (context.bit_rate or 0) // context.sample_rate
    return AudioCodec(
        **_common(stream, ("sample_rate", "extradata", "delay", "frame_size")),
        channel_layout=layout.name,
        num_channels=layout.nb_channels,
        sample_fmt=sample_fmt,
        bit_rate=context.bit_rate or 0,
        block_align=block_align,
        bits_per_coded_sample=bits,
    )


def _tag_number(context: CodecContext) -> int:
    """Return the FourCC of the codec as FFmpeg's option takes it: a signed little-endian integer."""
    try:
        tag = context.codec_tag
    except UnicodeDecodeError:
        # PyAV expects four ASCII letters, but WAVE and AVI number their codecs (AAC is 0xFF). Decoders that
        # read the tag compare it with letters, so the number can be left out.
        return 0
    return int(struct.unpack("<i", tag.encode("ascii"))[0])


# Prefixes of codecs whose packets can be split into blocks only with the block size in the header.
_CUT_INTO_BLOCKS = ("adpcm", "wma", "atrac", "g72", "gsm", "msgsm", "truespeech", "pcm_")


def _wave_format(stream: av.AudioStream) -> tuple[int, int]:
    """Return block size and bits per sample of a stream, which PyAV does not expose."""
    # WAVEFORMATEX has both. If WAV does not support the codec, its decoder does not need them either.
    written = muxed_header(stream, "wav")
    start = written.find(b"fmt ")
    if start < 0 or len(written) < start + 24:
        return 0, 0
    return struct.unpack_from("<HH", written, start + 8 + 12)


def muxed_header(stream: Any, format: str, options: dict[str, str] | None = None) -> bytes:
    """Return the header that a muxer writes for a stream, to read parameters that PyAV does not expose.

    Returns:
        The header; empty, if the format does not support the codec.
    """
    header = io.BytesIO()
    try:
        with av.open(header, "w", format=format, options=options or {}) as muxer:
            # opaque, because PyAV would look for an encoder with the name of the decoder (libdav1d).
            muxer.add_stream_from_template(stream, opaque=True)
            muxer.start_encoding()
            return header.getvalue()
    except (av.FFmpegError, ValueError):
        return b""


# Strict error detection, for codecs in which it refuses no good file. In H.264, HEVC and other video codecs,
# "explode" finds no further damage, and makes errors of harmless oddities of real cameras.
_ERR_DETECT = {
    **ERR_DETECT,
    "flac": "crccheck+explode",
    "ac3": "crccheck+explode",
    "hevc": "crccheck",  # checks the hashes of frames, which few files have
}


# On x86, this inverse DCT makes decoding 7 to 9% faster; on other CPUs it is slow. It differs by at most one
# level from FFmpeg's default, and is as close to the exact one (0.010 levels on average, the default 0.011).
_STILL_JPEG_OPTIONS = {"idct": "xvid"} if platform.machine().lower() in ("x86_64", "amd64") else {}


def make_decoder(codec: Codec, config: DecodeConfig, source: str) -> CodecContext:
    """Open a decoder that behaves as that of the stream from which ``codec`` was read.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec, the header states a codec of another kind, or
            PyAV cannot handle the order or the number of the channels.
        ValueError: The decoder or an option that ``config`` names does not exist, or decodes another codec.
    """
    name = _decoder_name(codec, config)
    check_codec_options(name, config.decoder_options)
    context = CodecContext.create(name, "r")
    kind = "video" if isinstance(codec, VideoCodec) else "audio"
    if context.type != kind:
        raise DecodeError(f"the header says that this {kind} is {codec.name}", source=source)
    if isinstance(codec, AudioCodec) and not is_native_layout(codec.channel_layout):
        raise DecodeError(
            f"it has {codec.channel_layout} in an order at which PyAV crashes. Convert it to your "
            "layout: ffmpeg -i FILE -af aformat=channel_layouts=5.1 NEW.wav",
            source=source,
        )
    # A data pipeline runs many decoders at once; PyAV's default is one thread per core.
    context.thread_count = 1
    if "threads" in config.decoder_options:
        context.thread_type = "AUTO"
    # A decoder needs pkt_timebase to move the timestamp of a frame whose first samples it skips.
    options = {"pkt_timebase": f"{codec.time_base.numerator}/{codec.time_base.denominator}"}
    if name in _ERR_DETECT:
        options["err_detect"] = _ERR_DETECT[name]
    if isinstance(codec, VideoCodec):
        options |= _set_video(context, codec)
    else:
        options |= _set_audio(context, codec)
    context.options = {**options, **config.decoder_options}
    try:
        what = f"decoder {name!r} cannot be opened for this {codec.name} stream"
        with TranslatedErrors(lambda text, _: DecodeError(f"{what}: {text}", source=source)):
            context.open(strict=False)
    except DecodeError as error:
        # The error code of a bad option value is that of bad data; only FFmpeg's log names the option.
        bad = re.search(r"Error setting option (\S+) to value (.*)\.\)", str(error))
        if bad and bad[1] in config.decoder_options:
            raise ValueError(
                f"option {bad[1]!r} of decoder {name!r} does not take the value {bad[2]!r}. "
                "See https://ffmpeg.org/ffmpeg-codecs.html"
            ) from error.__cause__
        raise
    return context


class SpareDecoder(threading.local):
    """An open decoder that each thread keeps for reuse, and the codec it is for."""

    codec: Codec | None = None
    context: Any = None

    def take(self, codec: Codec, config: DecodeConfig, source: str) -> Any:
        """Return the kept decoder if it is for this codec, else open one.

        Raises:
            DecodeError: This FFmpeg has no decoder for the codec.
        """
        # Removed while in use: a signal handler that decodes in the same thread must not find it.
        context, self.context = self.context, None
        if context is None or not (self.codec is codec or self.codec == codec):
            context = make_decoder(codec, config, source)
        return context

    def put_back(self, codec: Codec, context: Any) -> None:
        """Keep a decoder for reuse. Its state must be that of a fresh one."""
        self.codec, self.context = codec, context


class OpenDecoder:
    """An open FFmpeg decoder, with the handling of damaged packets.

    Args:
        codec: Parameters of the stream.
        metadata: Metadata of the packets.
        config: Options of decoding.
        context: An open decoder to use in place of a new one of FFmpeg's.

    Attributes:
        metadata: Metadata of the packets that are being decoded.
        discarded: Timestamps of frames that an edit list hides.
    """

    _remedy: str  # ends the message about damaged data with what the user can do

    def __init__(
        self, codec: Codec, metadata: Any, config: DecodeConfig, context: Any = None
    ) -> None:
        self._codec: Any = codec
        self._config = config
        # A PacketMetadata, whose module imports this one.
        self.metadata = metadata
        self.discarded: frozenset[int] = frozenset()
        self.num_dropped = 0
        self._packet_index = -1
        self._context: Any = context or make_decoder(codec, config, metadata.source)
        if context is None and "threads" in config.decoder_options:
            # PyAV holds the GIL while it frees a decoder and waits for its threads, which need it to log.
            # This waits without the GIL. Draining would end at the first damaged frame, before the threads.
            self._end = when_dropped(self._context.flush_buffers)
            never_freed_in_forks(self)

    @property
    def has_started(self) -> bool:
        """Whether the decoder has been given any packet."""
        return self._packet_index >= 0

    def _lose(self, error: DecodeError, cause: BaseException | None = None) -> None:
        """Raise the error of data that cannot be decoded, or count it as dropped, by ``on_corrupt``."""
        if isinstance(cause, MemoryError):  # no fault of the data, which no batch may skip
            raise MemoryError(f"{error.source}: there is too little memory to decode it") from cause
        if self._config.on_corrupt == "raise":
            try:
                raise error from cause
            finally:
                del error  # or it and this frame form a cycle, which keeps what was decoded
        self.num_dropped += 1

    def _error(self, text: str, pts: int | None) -> DecodeError:
        codec, seconds, at = self._codec, None, ""
        if pts is not None:
            seconds = float(ticks_to_seconds(pts, codec.time_base, self.metadata.zero))
            at = f" at {seconds:.3f} s"
        return DecodeError(
            f"damaged {codec.name} data{at} (packet {self._packet_index}): {text}{self._remedy}",
            source=self.metadata.source,
            pts_seconds=seconds,
            packet_index=self._packet_index,
        )


def _decoder_name(codec: Codec, config: DecodeConfig) -> str:
    if config.decoder is None:
        return codec.decoder
    asked = f"decode_config(decoder={config.decoder!r})"
    stream = f"the stream is {codec.name}, whose default decoder is {codec.decoder!r}"
    try:
        chosen = av.Codec(config.decoder, "r")
    except ValueError as error:
        raise ValueError(f"{asked}: this FFmpeg has no decoder of that name; {stream}") from error
    # A codec may have several decoders: "libdav1d" and "av1" both decode AV1.
    if chosen.canonical_name != codec.name:
        raise ValueError(f"{asked} decodes {chosen.canonical_name}, but {stream}")
    return config.decoder


def _set_video(context: Any, codec: VideoCodec) -> dict[str, str]:
    """Set what the container states of a stream on a decoder that is not open yet, and return options."""
    # Without reorder_depth, the H.264 decoder guesses it, and gives the first frames out of order.
    for name in ("extradata", "width", "height", "reorder_depth"):
        setattr(context, name, getattr(codec, name))
    # Parameters that are not stated are left to the decoder, which finds them in the data.
    for name in ("pix_fmt", "bits_per_coded_sample", "sample_aspect_ratio"):
        if value := getattr(codec, name):
            setattr(context, name, value)
    if codec.codec_tag:
        context.codec_tag = struct.pack("<i", codec.codec_tag).decode("latin-1")
    # For frames that state no colours.
    for name, number in zip(COLOR_TABLES, codec.color, strict=True):
        setattr(context, name, number)
    if context.name == "mjpeg" and codec.frame_rate is None:
        return _STILL_JPEG_OPTIONS
    has_build = context.name == "h264" and codec.x264_build
    return {"x264_build": str(codec.x264_build)} if has_build else {}


def _set_audio(context: Any, codec: AudioCodec) -> dict[str, str]:
    """Set what the container states of a stream on a decoder that is not open yet, and return options."""
    context.extradata = header = codec.extradata
    if codec.name == "opus" and codec.delay and not codec.codec_tag and header:
        context.extradata = header[:10] + bytes(2) + header[12:]  # packets state what to drop
    context.sample_rate = codec.sample_rate
    options = {"ch_layout": codec.channel_layout}
    if codec.sample_fmt:
        context.format = codec.sample_fmt
    if codec.bit_rate:
        context.bit_rate = codec.bit_rate
    # Set as FFmpeg options, because PyAV has no properties for them.
    for name in ("codec_tag", "block_align", "bits_per_coded_sample"):
        if value := getattr(codec, name):
            options[name] = str(value)
    return options
