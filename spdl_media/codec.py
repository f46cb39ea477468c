"""Parameters of a stream that its decoder needs, as our own values, and the decoder made from them.

FFmpeg keeps these in the stream of an open file. As values they outlive the file, travel to another
process, and serve any number of decoders at once.
"""

from __future__ import annotations

import io
import platform
import re
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeAlias

import av
from av.audio.codeccontext import AudioCodecContext
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext

from spdl_media._ffmpeg import TranslatedErrors, as_fraction, check_codec_options
from spdl_media.config import DecodeConfig, as_decode_config
from spdl_media.errors import DecodeError
from spdl_media.formats import COLOR_TABLES
from spdl_media.stills import ERR_DETECT

__all__ = ("AudioCodec", "Codec", "VideoCodec")


@dataclass(frozen=True, slots=True)
class VideoCodec:
    """A coded video or image stream.

    Attributes:
        name: FFmpeg's name of the codec, such as ``"h264"``.
        decoder: FFmpeg's default decoder for it, such as ``"libdav1d"`` for AV1.
        width: Width in pixels as coded, before any rotation; 0: known once a frame is decoded.
        height: Height in pixels as coded; 0: known once a frame is decoded.
        pix_fmt: FFmpeg's name of the pixel format; ``None``: known once a frame is decoded.
        time_base: Seconds in one unit of the packets' timestamps.
        frame_rate: Average frames in a second, ``None`` for a still or where the file does not say.
        sample_aspect_ratio: Width of a pixel over its height, ``None``: not stated.
        extradata: What the container has of the codec's headers; ``None``: they are in the packets.
        codec_tag: The container's own code for the codec, as FFmpeg's number; 0: none.
        bits_per_coded_sample: Bits of a coded pixel or sample; 0: not stated.
        reorder_depth: Frames that a decoder holds back to put them into display order.
        color: Range, matrix, primaries and transfer as FFmpeg's numbers, from the container.
        x264_build: Version of x264, for packets that do not begin with the one that states it; else 0.

    Thread safety: immutable, free to share.
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
        decoder: FFmpeg's default decoder for it, such as ``"mp3float"``.
        sample_rate: Samples of one channel in a second.
        channel_layout: FFmpeg's name of the layout, such as ``"stereo"``.
        num_channels: Number of channels.
        sample_fmt: FFmpeg's name of the sample format that the decoder gives; ``None``: not yet known.
        time_base: Seconds in one unit of the packets' timestamps.
        extradata: What the container has of the codec's headers; ``None``: they are in the packets.
        codec_tag: The container's own code for the codec, as FFmpeg's number; 0: none.
        bit_rate: Bits in a second as stated; 0: not stated.
        start_pts: Timestamp of the first sample that is heard; ``None``: the file does not say.
        delay: Samples that the encoder put before the first one that is heard.
        frame_size: Samples of each packet; 0: they differ, or are not known.
        block_align: Bytes of a block, for codecs whose packets cannot be cut without it; else 0.
        bits_per_coded_sample: Bits of a coded sample, for the same codecs; else 0.

    Thread safety: immutable, free to share.
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
    """Copy out of an open stream what its decoder needs."""
    context = stream.codec_context
    alike = "width height pix_fmt extradata bits_per_coded_sample reorder_depth".split()
    return VideoCodec(
        **_common(stream, alike),
        frame_rate=as_fraction(stream.average_rate) or as_fraction(stream.guessed_rate),
        sample_aspect_ratio=as_fraction(context.sample_aspect_ratio),
        color=color_numbers(context),
    )


def _common(stream: Any, alike: Iterable[str]) -> dict[str, Any]:
    """What streams of both kinds have, and what PyAV has under the same name."""
    context = stream.codec_context
    return {name: getattr(context, name) for name in alike} | {
        "name": context.codec.canonical_name,
        "decoder": context.codec.name,
        "time_base": as_fraction(stream.time_base),
        "codec_tag": _tag_number(context),
    }


STILL_CODECS = frozenset({"png", "webp", "bmp", "tiff", "jpeg2000", "gif", "targa"})
"""Codecs of images, which have no time, although FFmpeg states a rate for them."""


def usual_duration(codec: VideoCodec) -> int:
    """Ticks from frame to frame at the stated rate; 0: the file states none."""
    rate = codec.frame_rate
    return max(1, round(1 / (rate * codec.time_base))) if rate else 0


def color_numbers(source: Any) -> tuple[int, int, int, int]:
    """Range, matrix, primaries and transfer of a codec context or a frame, as FFmpeg's numbers."""
    levels, matrix, primaries, trc = (int(getattr(source, name)) for name in COLOR_TABLES)
    return levels, matrix, primaries, trc


_BITS = {"u8p": 8, "s16p": 16, "s32p": 24}
"""Bits of a sample that Monkey's Audio and TAK code, by the format in which they come out."""


def read_audio_codec(stream: av.AudioStream) -> AudioCodec:
    """Copy out of an open stream what its decoder needs."""
    context = stream.codec_context
    has_blocks = context.codec.name.startswith(_CUT_INTO_BLOCKS)
    block_align, bits = _wave_format(stream) if has_blocks else (0, 0)
    if context.codec.name in ("ape", "tak"):  # PyAV does not show it, but what follows from it
        bits = _BITS.get(context.format.name, 0)
    return AudioCodec(
        **_common(stream, ("sample_rate", "extradata", "delay", "frame_size")),
        channel_layout=context.layout.name,
        num_channels=context.layout.nb_channels,
        # PyAV's types do not say that it is None where FFmpeg could not tell.
        sample_fmt=getattr(context.format, "name", None),
        bit_rate=context.bit_rate or 0,
        start_pts=stream.start_time,
        block_align=block_align,
        bits_per_coded_sample=bits,
    )


def _tag_number(context: CodecContext) -> int:
    """The container's own code for the codec, as FFmpeg's option takes it: little-endian, signed."""
    try:
        tag = context.codec_tag
    except UnicodeDecodeError:
        # PyAV reads four ASCII letters, but WAVE and AVI number their codecs (AAC is 0xFF). The decoders
        # that look at the tag look for letters.
        return 0
    number: int = struct.unpack("<i", tag.encode("ascii"))[0]
    return number


# Codecs whose packets cannot be cut into blocks without the header's block size.
_CUT_INTO_BLOCKS = ("adpcm", "wma", "atrac", "g72", "gsm", "msgsm", "truespeech", "pcm_")


def _wave_format(stream: av.AudioStream) -> tuple[int, int]:
    """Block size and bits a sample of a stream, which PyAV does not show."""
    # ``WAVEFORMATEX`` has both. Where WAV does not take the codec, the decoder does not ask for them either.
    written = _muxed_header(stream, "wav")
    start = written.find(b"fmt ")
    if start < 0 or len(written) < start + 24:
        return 0, 0
    block_align, bits = struct.unpack_from("<HH", written, start + 8 + 12)
    return block_align, bits


def _muxed_header(stream: Any, format: str, options: dict[str, str] | None = None) -> bytes:
    """The header that a muxer writes for a stream: it shows what PyAV has no property for.

    Returns:
        The header; nothing, if the format does not take the codec.
    """
    header = io.BytesIO()
    try:
        with av.open(header, "w", format=format, options=options or {}) as muxer:
            # Opaque: otherwise PyAV looks for an encoder by the name of the decoder (libdav1d).
            muxer.add_stream_from_template(stream, opaque=True)
            muxer.start_encoding()
            return header.getvalue()
    except (av.FFmpegError, ValueError):
        return b""


def muxed_matrix(stream: av.stream.Stream) -> tuple[int, ...] | None:
    """Display matrix of a video stream, by way of a QuickTime header."""
    # PyAV shows a stream's side data only on decoded frames. A muxer given the stream writes it into the
    # track header (tkhd), which takes some 0.1 ms where decoding a frame takes up to ten.
    # MP4 takes VP9 and FFV1, which QuickTime does not, but not ProRes and DV.
    options = {"movflags": "empty_moov", "strict": "-2"}
    written = _muxed_header(stream, "mov", options) or _muxed_header(stream, "mp4", options)
    start = written.find(b"tkhd") + 4
    if start < 4:
        return None
    fixed = 20 if written[start] == 0 else 32  # times and duration, 32 or 64 bit by version
    return struct.unpack_from(">9i", written, start + 4 + fixed + 16)


# Damage that a decoder can notice is an error where noticing costs no good file. Over H.264, HEVC and the
# other video codecs "explode" finds nothing more and turns oddities of real cameras into errors.
_ERR_DETECT = {
    **ERR_DETECT,
    "flac": "crccheck+explode",
    "ac3": "crccheck+explode",
    "hevc": "crccheck",  # compares frames with their hashes, in the few files that have them
}


# On x86, this inverse DCT takes 7 to 9% off the time of decoding. It is at most one level away from FFmpeg's
# default, and as near to the exact one (0.010 levels on average, the default 0.011). Elsewhere it is slow.
_STILL_JPEG_OPTIONS = {"idct": "xvid"} if platform.machine().lower() in ("x86_64", "amd64") else {}


def make_decoder(codec: Codec, config: DecodeConfig, source: str) -> CodecContext:
    """Make a decoder that behaves as the one of the stream that ``codec`` was read from.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.
        ValueError: The decoder or an option that ``config`` names does not exist, or decodes another codec.
    """
    name = _decoder_name(codec, config)
    check_codec_options(name, config.decoder_options)
    context = CodecContext.create(name, "r")
    # A data pipeline runs many decoders; PyAV's default is a thread a core.
    context.thread_count = 1
    if "threads" in config.decoder_options:
        context.thread_type = "AUTO"
    # Without it a decoder cannot move the timestamp of a frame whose first samples it skips.
    options = {"pkt_timebase": f"{codec.time_base.numerator}/{codec.time_base.denominator}"}
    if name in _ERR_DETECT:
        options["err_detect"] = _ERR_DETECT[name]
    if name == "mjpeg" and isinstance(codec, VideoCodec) and codec.frame_rate is None:
        options |= _STILL_JPEG_OPTIONS
    if isinstance(codec, VideoCodec):
        set_video(context, codec)
        if name == "h264" and codec.x264_build:
            options["x264_build"] = str(codec.x264_build)
    else:
        options |= _set_audio(context, codec)
    context.options = {**options, **config.decoder_options}
    try:
        with TranslatedErrors(
            lambda text: DecodeError(
                f"decoder {name!r} cannot be opened for this {codec.name} stream: {text}",
                source=source,
            )
        ):
            context.open(strict=False)
    except DecodeError as error:
        # FFmpeg reports a bad value as it does bad data; only its log names the option.
        bad = re.search(r"Error setting option (\S+) to value (.*)\.\)", str(error))
        if bad and bad[1] in config.decoder_options:
            raise ValueError(
                f"option {bad[1]!r} of decoder {name!r} does not take the value {bad[2]!r}. "
                "See https://ffmpeg.org/ffmpeg-codecs.html"
            ) from error.__cause__
        raise
    return context


class DecoderAtRest(threading.local):
    """The open decoder that a thread has at rest, if any, and of what."""

    codec: Codec | None = None
    context: Any = None

    def take(self, codec: Codec, config: DecodeConfig, source: str) -> Any:
        """Take the decoder, or open one.

        Raises:
            DecodeError: This FFmpeg has no decoder for the codec.
        """
        # Taken while in use, so that a signal handler that decodes, too, does not find it.
        context, self.context = self.context, None
        if context is None or not (self.codec is codec or self.codec == codec):
            context = make_decoder(codec, config, source)
        return context

    def put_back(self, codec: Codec, context: Any) -> None:
        """Keep a decoder whose state is that of a fresh one."""
        self.codec, self.context = codec, context


def configs_by_kind(config: DecodeConfig | None) -> tuple[DecodeConfig, DecodeConfig]:
    """How to decode the video and the audio of one source.

    Raises:
        TypeError: ``config`` is no :class:`~spdl_media.config.DecodeConfig`.
    """
    # A decoder that is named, and the options beside it, are for the stream of its own kind alone.
    given = as_decode_config(config)
    if given.decoder is None:
        return given, given
    other = replace(given, decoder=None, decoder_options={})
    return (other, given) if _decodes_audio(given.decoder) else (given, other)


def _decodes_audio(decoder: str) -> bool:
    try:
        return av.Codec(decoder, "r").type == "audio"
    except ValueError:  # none of that name, as the video decoder will say
        return False


def close_decoder(context: CodecContext, config: DecodeConfig) -> None:
    """Wait for a decoder's own threads before it is freed."""
    # PyAV frees it with the GIL held, and waits for the threads; one of them that has something to log
    # waits for the GIL: a deadlock. A decoder without threads needs nothing.
    if "threads" in config.decoder_options:
        # Waits for them without the GIL. Draining would not do: it ends at the first damaged frame, while
        # the threads that have later ones go on.
        context.flush_buffers()


def _decoder_name(codec: Codec, config: DecodeConfig) -> str:
    if config.decoder is None:
        return codec.decoder
    asked = f"decode_config(decoder={config.decoder!r})"
    stream = f"the stream is {codec.name}, whose default decoder is {codec.decoder!r}"
    try:
        chosen = av.Codec(config.decoder, "r")
    except ValueError as error:
        raise ValueError(f"{asked}: this FFmpeg has no decoder of that name; {stream}") from error
    # Several decoders may share a codec: "libdav1d" and "av1" are both of AV1.
    if chosen.canonical_name != codec.name:
        raise ValueError(f"{asked} decodes {chosen.canonical_name}, but {stream}")
    return config.decoder


def set_video(context: CodecContext, codec: VideoCodec) -> None:
    """Tell a decoder that is not open yet what the container states of a stream.

    Raises:
        TypeError: The decoder is one of another kind of media.
    """
    if not isinstance(context, VideoCodecContext):
        raise TypeError(f"decoder {context.name!r} does not decode video")
    # H.264 without a stated reordering depth guesses it frame by frame, and gives early frames
    # out of order; the demuxer has already found it.
    for name in ("extradata", "width", "height", "reorder_depth"):
        setattr(context, name, getattr(codec, name))
    # What is not stated is left to the decoder, which finds it in the data.
    for name in ("pix_fmt", "bits_per_coded_sample", "sample_aspect_ratio"):
        if value := getattr(codec, name):
            setattr(context, name, value)
    if codec.codec_tag:
        context.codec_tag = struct.pack("<i", codec.codec_tag).decode("latin-1")
    set_colors(context, codec)


def set_colors(context: Any, codec: VideoCodec) -> None:
    """Tell a decoder the colours that the container states, for frames that state none."""
    for name, number in zip(COLOR_TABLES, codec.color, strict=True):
        setattr(context, name, number)


def _set_audio(context: CodecContext, codec: AudioCodec) -> dict[str, str]:
    if not isinstance(context, AudioCodecContext):
        raise TypeError(f"decoder {context.name!r} does not decode audio")
    context.extradata = codec.extradata
    context.sample_rate = codec.sample_rate
    options = {"ch_layout": codec.channel_layout}
    if codec.sample_fmt:
        context.format = codec.sample_fmt
    if codec.bit_rate:
        context.bit_rate = codec.bit_rate
    # PyAV has no properties for these; they are options of FFmpeg as well.
    for name in ("codec_tag", "block_align", "bits_per_coded_sample"):
        if value := getattr(codec, name):
            options[name] = str(value)
    return options
