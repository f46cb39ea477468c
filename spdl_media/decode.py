"""Decode packets to frames, a whole window in one call."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final, overload

import av

from spdl_media._checks import check_int
from spdl_media._ffmpeg import ffmpeg_log, has_codec, naming
from spdl_media._picture_decoder import decode_into
from spdl_media._sample_decoder import SampleDecoder
from spdl_media.config import DecodeConfig, as_decode_config
from spdl_media.filter_desc import get_audio_filter_desc
from spdl_media.frames import AudioFrames, FrameList, Frames
from spdl_media.image_decoder import decode_image
from spdl_media.image_frames import ImageFrames, VideoFrames
from spdl_media.operations import Desc, PictureOps, Quality
from spdl_media.packets import (
    AudioPackets,
    FrameMetadata,
    ImagePackets,
    Packets,
    VideoPackets,
    av_packets,
    check_complete,
    discarded_pts,
    metadata_of,
)
from spdl_media.sample_rows import SampleChunks, SampleRows

__all__ = ("decode_packets",)


class Default(Enum):
    """Marks an argument that was not passed, where ``None`` has another meaning."""

    FILTER = "the default filter"


DEFAULT_FILTER: Final = Default.FILTER


def picture_filter(
    filter_desc: str | PictureOps | Default | None, quality: Quality = "auto"
) -> Desc:
    """Return the filters for images; the default converts to ``rgb24`` with this quality.

    Raises:
        ValueError: ``quality`` is unknown.
    """
    return PictureOps(quality=quality) if isinstance(filter_desc, Default) else filter_desc


def sample_filter(filter_desc: str | PictureOps | Default | None) -> str | None:
    """Return the filters for audio; the default converts to ``fltp``.

    Raises:
        TypeError: The filters are for images.
    """
    if isinstance(filter_desc, PictureOps):
        raise TypeError(f"the packets are audio, but {filter_desc!r} is for images")
    return get_audio_filter_desc() if isinstance(filter_desc, Default) else filter_desc


@overload
def decode_packets(  # type: ignore[overload-overlap]  # ImagePackets are VideoPackets, and come first
    packets: ImagePackets,
    filter_desc: str | PictureOps | Default | None = ...,
    decode_config: DecodeConfig | None = ...,
    *,
    num_frames: int | None = ...,
) -> ImageFrames: ...
@overload
def decode_packets(
    packets: VideoPackets,
    filter_desc: str | PictureOps | Default | None = ...,
    decode_config: DecodeConfig | None = ...,
    *,
    num_frames: int | None = ...,
) -> VideoFrames: ...
@overload
def decode_packets(
    packets: AudioPackets,
    filter_desc: str | Default | None = ...,
    decode_config: DecodeConfig | None = ...,
    *,
    num_samples: int | None = ...,
) -> AudioFrames: ...
def decode_packets(
    packets: Packets,
    filter_desc: str | PictureOps | Default | None = DEFAULT_FILTER,
    decode_config: DecodeConfig | None = None,
    *,
    num_frames: int | None = None,
    num_samples: int | None = None,
) -> Frames:
    """Decode packets, cut the result to their window, turn frames upright, and filter them.

    The packets stay usable: they can be decoded again, also in other threads at the same time.

    Args:
        packets: Packets from ``demux_*``. Use :class:`VideoDecoder` and :class:`AudioDecoder` for chunks of a
            stream, unless each chunk starts with a key frame.
        filter_desc: FFmpeg filter graph with one input and one output, such as
            :func:`~spdl_media.get_video_filter_desc` returns. The default gives ``rgb24`` frames and
            ``fltp`` samples. ``None`` keeps the decoder's frames, which are then not turned upright.
        decode_config: Options of decoding; see :func:`~spdl_media.decode_config`.
        num_frames: Maximum number of frames of a video. No more are decoded than needed. ``None``: no limit.
        num_samples: Maximum number of samples per channel. No more are decoded than needed. ``None``: no
            limit.

    Returns:
        ``ImageFrames``, ``VideoFrames`` or ``AudioFrames``, by the kind of the packets. For video, exactly
        the frames with ``start <= t < end``; for audio, the samples from ``ceil(start * rate)`` up to
        ``ceil(end * rate)``. They are empty if the window contains nothing.

    Raises:
        DecodeError: The data is damaged, or this FFmpeg has no decoder for it.
        FilterError: The filter graph cannot be used; PictureSizeError: it cannot for a still of this size.
        MissingDependencyError: ``decode_config(downscale="dct")`` needs simplejpeg.
        ValueError: A decoder or option of ``decode_config`` does not exist, or a number is below 1.
        TypeError: ``packets`` are not packets, or ``num_frames`` is given for audio or ``num_samples`` for
            images.

    Thread safety: safe.

    See:
        FFmpeg's filters: https://ffmpeg.org/ffmpeg-filters.html
    """
    config = as_decode_config(decode_config)
    limit = _checked_limit(packets, num_frames, num_samples)
    if isinstance(packets, ImagePackets):
        return decode_image(packets, picture_filter(filter_desc, "accurate"), config).of(packets)
    if isinstance(packets, VideoPackets):
        frames = FrameList(limit)
        take = decode_into(frames, packets, picture_filter(filter_desc), config, limit)
        return VideoFrames(frames.frames, take())
    if isinstance(packets, AudioPackets):
        desc = sample_filter(filter_desc)
        with naming(packets.source):
            sink = SampleChunks(packets.codec, metadata_of(packets).zero, desc, limit)
        metadata = decode_audio_into(sink, packets, config, limit)
        return AudioFrames(sink.take(sink.count if limit is None else limit), metadata)
    raise TypeError(
        f"decode_packets takes AudioPackets, VideoPackets or ImagePackets, not {type(packets).__name__}"
    )


def _checked_limit(packets: Packets, num_frames: int | None, num_samples: int | None) -> int | None:
    of_frames, of_samples = ("num_frames", num_frames), ("num_samples", num_samples)
    is_audio = isinstance(packets, AudioPackets)
    (name, limit), other = (of_samples, of_frames) if is_audio else (of_frames, of_samples)
    if other[1] is not None:
        raise TypeError(
            f"num_frames= is for images and num_samples= for audio, and these are {type(packets).__name__}"
        )
    return None if limit is None else check_int(name, limit)


def decode_audio_into(
    sink: SampleChunks | SampleRows,
    packets: AudioPackets,
    config: DecodeConfig,
    num_samples: int | None,
) -> FrameMetadata:
    """Decode audio packets, and put the samples of each frame into a sink; see :func:`decode_into`.

    Raises:
        DecodeError: The data is damaged or truncated, or this FFmpeg has no decoder for it.
        FilterError: The filters do not accept the samples.
    """
    coded = av_packets(packets)
    if num_samples is None:
        check_complete(packets, config)
    decoder = SampleDecoder(packets.codec, metadata_of(packets), config, discarded_pts(packets))
    with naming(packets.source), ffmpeg_log():
        if coded:
            decoder.run(coded, sink, in_memory=True)
    # If the sink has enough samples, the missing end is not needed.
    if sink.count < (num_samples or 0):
        check_complete(packets, config)
    return decoder.take_metadata()


def configs_by_kind(config: DecodeConfig | None) -> tuple[DecodeConfig, DecodeConfig]:
    """Split the options for a source into those for its video and those for its audio.

    Raises:
        TypeError: ``config`` is not a :class:`~spdl_media.config.DecodeConfig`.
    """
    # A named decoder, and the decoder options, apply only to the stream of the decoder's kind.
    given = as_decode_config(config)
    if given.decoder is None:
        return given, given
    other = replace(given, decoder=None, decoder_options={})
    # If there is no decoder of that name, opening the video decoder raises the error.
    is_audio = has_codec(given.decoder, "r") and av.Codec(given.decoder, "r").type == "audio"
    return (other, given) if is_audio else (given, other)
