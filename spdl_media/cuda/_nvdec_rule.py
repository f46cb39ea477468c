"""Which decoder takes a clip: one rule, written as data.

Three ways lead from packets to frames on a device, and this table says which one a clip takes under
``decoder="auto"``:

=================================================================  ==========================================
the clip                                                           decoded by
=================================================================  ==========================================
all rows of :data:`DALI_SERVES` hold                               DALI's video operator (NVDEC)
NVDEC decodes it (:data:`NVDEC_CODECS`, :data:`NVDEC_FORMATS`)     FFmpeg's hardware decoder in PyAV (NVDEC)
any other                                                          the CPU, with a ``CPUFallbackWarning``
=================================================================  ==========================================

DALI's operator takes whole files, knows frames by their number alone, converts by BT.601 without asking the
stream, and gives 8-bit RGB. It reads its numbers off the packets, so a packet that gives no frame, or two,
shifts all that follow; it does not report damage. The rows say where none of this does harm. PyAV's decoder
gives the decoder's own planes and timestamps, one packet after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.cuda._nvdec_sps import may_be_interlaced
from spdl_media.cuda._nvdec_timeline import Timeline
from spdl_media.cuda._nvdec_writer import Output
from spdl_media.errors import DecodeError
from spdl_media.packets import VideoPackets, metadata_of

VideoDecoderName: TypeAlias = Literal["auto", "dali", "pyav"]
Way: TypeAlias = Literal["dali", "pyav", "cpu"]

NVDEC_CODECS = frozenset(
    {"av1", "h264", "hevc", "mpeg1video", "mpeg2video", "mpeg4", "vc1", "vp8", "vp9"}
)
"""Codecs that NVDEC decodes. Motion JPEG is left to the CPU, which notices its damage."""

NVDEC_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "yuv420p": "nv12",
        "yuvj420p": "nv12",
        "nv12": "nv12",
        "yuv420p10le": "p010le",
        "yuv420p12le": "p016le",
    }
)
"""Coded pixel formats that NVDEC decodes, and the format in which the frames lie on the device."""

DALI_CODECS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        # The GPU operator takes each frame that is decoded for one that is shown. AV1 and VP9 show
        # frames again without decoding anything, and MPEG-4 in AVI packs two frames into a packet.
        "cuda": frozenset({"h264", "hevc"}),
        "cpu": frozenset({"vp8", "vp9"}),
    }
)
"""Codecs that DALI's operator is trusted with, by the device that it runs on."""

DALI_MATRICES = frozenset({2, 5, 6})
"""FFmpeg's numbers of the matrices that are BT.601: unspecified, ``bt470bg`` and ``smpte170m``."""

DALI_RANGES = frozenset({0, 1})
"""FFmpeg's numbers of the range: unspecified and limited. DALI goes by H.264, and not by the container."""


@dataclass(frozen=True, slots=True)
class Clip:
    """What the rule looks at: a stream, how its packets lie in time, and what is asked of them.

    Attributes:
        codec: Parameters of the stream.
        timeline: Times of the packets.
        device: ``"cuda"`` or ``"cpu"``.
        pix_fmt: Pixel format that is asked for.
        config: How to decode.
        is_scaled: The frames are to have another size.
        continues: The packets follow others, so that the first need not be a key frame.
    """

    codec: VideoCodec
    timeline: Timeline
    device: str
    pix_fmt: str
    config: DecodeConfig
    is_scaled: bool = False
    continues: bool = False


def clip_of(packets: VideoPackets, device: str, output: Output, config: DecodeConfig) -> Clip:
    """The clip that these packets are, and what is asked of it."""
    return Clip(
        packets.codec,
        Timeline.of(packets),
        device,
        output.pix_fmt,
        config,
        output.is_scaled,
        metadata_of(packets).continues,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One condition of the rule.

    Attributes:
        needs: What must hold, in words for a message.
        holds: Whether it does.
        found: What there is instead, in words with the clip's fields in braces.
        is_hard: ``decoder="dali"`` refuses such a clip too.
    """

    needs: str
    holds: Callable[[Clip], bool]
    found: str
    is_hard: bool = True


DALI_SERVES: tuple[Row, ...] = (
    Row(
        "a codec that DALI decodes there",
        lambda clip: clip.codec.name in DALI_CODECS[clip.device],
        "{codec.name}",
    ),
    Row(
        "8-bit 4:2:0",
        lambda clip: clip.codec.pix_fmt in ("yuv420p", "nv12"),
        "{codec.pix_fmt}",
    ),
    Row(
        "the BT.601 matrix, or none stated",
        lambda clip: clip.codec.color[1] in DALI_MATRICES,
        "matrix {codec.color[1]} of ITU-T H.273",
    ),
    Row(
        "limited range, or none stated",
        lambda clip: clip.codec.color[0] in DALI_RANGES,
        "full range",
    ),
    Row(
        "even sides",
        lambda clip: clip.codec.width % 2 == 0 and clip.codec.height % 2 == 0,
        "{codec.width}x{codec.height}",
    ),
    Row(
        "progressive pictures",
        lambda clip: not may_be_interlaced(clip.codec),
        "H.264 that may be interlaced, or has no header to tell",
    ),
    Row(
        "a time of its own for each packet",
        lambda clip: clip.timeline.distinct,
        "packets without a time, or with the same one",
    ),
    Row(
        "closed groups of pictures from a key frame on",
        lambda clip: clip.timeline.closed and not clip.continues,
        "pictures that refer to a group before theirs, or to one that is not there",
    ),
    Row(
        "RGB",
        lambda clip: clip.pix_fmt in ("rgb24", "bgr24"),
        "{pix_fmt}",
    ),
    Row(
        # It converts first and scales then: half a level off on average, and tens at edges of strong colour.
        "frames in their own size",
        lambda clip: not clip.is_scaled,
        "a clip that is scaled",
        is_hard=False,
    ),
    Row(
        'decode_config(on_corrupt="raise") without options for FFmpeg\'s decoder',
        lambda clip: (
            clip.config.on_corrupt == "raise"
            and not clip.config.decoder_options
            and clip.config.decoder is None
        ),
        "another configuration",
    ),
)
"""The clips that DALI's operator decodes right: all rows must hold."""


def dali_refusals(clip: Clip, *, hard_only: bool = False) -> tuple[str, ...]:
    """Why DALI's operator would not decode a clip right; empty: it does."""
    return tuple(
        f"it needs {row.needs}, and this is {row.found.format(codec=clip.codec, pix_fmt=clip.pix_fmt)}"
        for row in DALI_SERVES
        if not row.holds(clip) and (row.is_hard or not hard_only)
    )


def nvdec_refusal(codec: VideoCodec) -> str | None:
    """Why NVDEC does not decode a stream, as far as its parameters say; ``None``: it may."""
    if codec.name not in NVDEC_CODECS:
        return f"NVDEC has no decoder for {codec.name}, but for {', '.join(sorted(NVDEC_CODECS))}"
    if codec.pix_fmt is not None and codec.pix_fmt not in NVDEC_FORMATS:
        return f"NVDEC decodes 4:2:0 of 8, 10 and 12 bits, and this is {codec.pix_fmt}"
    return None


def choose(clip: Clip, decoder: VideoDecoderName, *, may_use_dali: bool, source: str) -> Way:
    """Choose the decoder for a clip.

    Args:
        clip: What is to be decoded.
        decoder: ``"auto"``, or the one that is forced.
        may_use_dali: Whether DALI is installed, and ``"auto"`` may take it.
        source: What the packets were read from, for messages.

    Raises:
        DecodeError: The forced decoder would not decode it right.
        ValueError: ``decoder`` is none of the three.
    """
    check_decoder(decoder)
    refusals = dali_refusals(clip, hard_only=decoder == "dali")
    if decoder == "dali" and refusals:
        raise DecodeError(
            f"decoder='dali' would not decode this video right: {'; '.join(refusals)}. decoder='auto' takes "
            "PyAV's decoder for such a video",
            source=source,
        )
    if decoder != "pyav" and not refusals and (decoder == "dali" or may_use_dali):
        return "dali"
    refusal = nvdec_refusal(clip.codec) if clip.device == "cuda" else None
    if refusal is None:
        return "pyav"
    if decoder == "pyav":
        raise not_on_nvdec(refusal, source)
    return "cpu"


def found_refusal(codec: VideoCodec, found: str) -> str:
    """Why NVDEC does not decode a stream that was opened, by the frames that FFmpeg gave instead."""
    return f"NVDEC does not decode this {codec.name} stream: FFmpeg gave {found} frames, not on the device"


def not_on_nvdec(refusal: str, source: str) -> DecodeError:
    """The error for a stream that NVDEC does not decode, where nothing else may."""
    return DecodeError(
        f"decoder='pyav': {refusal}. decoder='auto' decodes it on the CPU and copies its frames there",
        source=source,
    )


def check_decoder(decoder: str) -> None:
    """Refuse names that are no decoder's."""
    if decoder not in get_args(VideoDecoderName):
        raise ValueError(f"decoder must be one of {get_args(VideoDecoderName)}, not {decoder!r}")
