"""Save frames or audio to a file in one call, and cut a window out of a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias

from spdl_media.array_frames import frames_from_array
from spdl_media.buffer import Buffer
from spdl_media.codec import AudioCodec, VideoCodec
from spdl_media.coded_headers import may_have_fields
from spdl_media.config import decode_config
from spdl_media.decoders import AudioDecoder, VideoDecoder
from spdl_media.demuxer import Demuxer, has_video
from spdl_media.destination import Target, check_target
from spdl_media.encode import (
    audio_encode_config,
    best_pix_fmt,
    best_sample_fmt,
    find_encoder,
    video_encode_config,
)
from spdl_media.errors import DemuxError
from spdl_media.filter_desc import get_audio_filter_desc
from spdl_media.formats import is_yuv
from spdl_media.frames import AudioFrames
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.inputs import Source
from spdl_media.mux import Muxer
from spdl_media.packets import AudioPackets, VideoPackets, av_packets, discarded_pts, metadata_of
from spdl_media.remux import MAX_UNDATED
from spdl_media.timing import Rate, Seconds, parse_window

__all__ = ("cut", "save_audio", "save_video")

Waveform: TypeAlias = AudioFrames | Buffer | tuple[Any, int]

_SLICE = 16  # frames that are decoded at a time before they are encoded


def save_video(
    dst: Target,
    frames: Any,
    frame_rate: Rate | None = None,
    *,
    audio: Waveform | None = None,
    format: str | None = None,
    encoder: str | None = None,
    encoder_options: Mapping[str, object] | None = None,
    pix_fmt: str | None = None,
    layout: Literal["NCHW", "NHWC"] | None = None,
) -> None:
    """Encode frames, and optionally audio, and write them to a file.

    The file appears at its path only once it is complete. A lossless encoder (``"ffv1"``, ``"ffvhuff"``)
    preserves the frames exactly. The first frame is shown at second 0. Colour metadata and orientation of
    the frames are written. RGB becomes limited-range BT.601 if the encoder does not take RGB, and loses its
    alpha channel if the pixel format of the video has none.

    Args:
        dst: A path, or a binary file object with ``write``.
        frames: ``VideoFrames``, an array ``(N, H, W, 3)`` or any other that :func:`frames_from_array` takes,
            or an iterable of frames or arrays, which is read while encoding.
        frame_rate: Frames per second. The default is 30 for arrays; frames keep their own times.
        audio: ``AudioFrames``, a result of :func:`load_audio`, or a pair of an array ``(C, N)`` or ``(N,)``
            and its sample rate.
        format: FFmpeg's name of the file format. The default follows from the suffix of the path.
        encoder: Name of an FFmpeg encoder or codec. The default is that of the file format, such as
            ``libx264`` for MP4.
        encoder_options: Options of the encoder, such as ``{"crf": 18}``.
        pix_fmt: Pixel format of the coded video. By default, lossless encoders keep that of the frames, and
            all others use ``yuv420p`` for RGB.
        layout: ``"NCHW"`` for arrays of RGB or gray with channels first.

    Raises:
        ValueError: There are no frames, or a name, option or shape is invalid.
        EncodeError: The frames differ in size, their times do not increase, the encoder does not take them
            (such as odd sides in ``yuv420p``), or the file format does not take the codec.
        WriteError: The file cannot be written.
        TypeError: A dtype is not supported.

    Thread safety: safe.

    Example:
        >>> sm.save_video("out.mp4", np.zeros((30, 48, 64, 3), np.uint8), frame_rate=30)
    """
    check_target(dst)
    single = isinstance(frames, VideoFrames | ImageFrames) or hasattr(frames, "shape")
    item, items = _peek([frames] if single else frames)
    if item is None:
        raise ValueError("there are no frames to save")
    if frame_rate is None and hasattr(item, "shape"):
        frame_rate = 30
    first, runs = _peek(_as_video(one, frame_rate, layout) for one in items)
    with Muxer(dst, format=format) as muxer:
        index = _add_video(
            muxer,
            first,
            encoder,
            encoder_options,
            pix_fmt=pix_fmt,
            frame_rate=frame_rate,
            orientation=first.orientation,
            time_base=first.time_base if frame_rate is None else None,
        )
        if audio is not None:
            # Audio is written first, because its packets, which wait for those of the video, are smaller.
            sound = _as_audio(audio)
            muxer.write(_add_audio(muxer, sound), sound)
        # The first frame is shown at second 0.
        _write(muxer, index, runs, Fraction(first.pts[0] or 0) * first.time_base)


def save_audio(
    dst: Target,
    waveform: Any,
    sample_rate: int | None = None,
    *,
    format: str | None = None,
    encoder: str | None = None,
    encoder_options: Mapping[str, object] | None = None,
    bit_rate: int | None = None,
) -> None:
    """Encode audio and write it to a file.

    WAV stores each dtype exactly; FLAC stores int16 and uint8 exactly, and others in 24 bits. AAC is padded
    with silence to whole packets; MP4 and MOV state the length without the padding. The file appears at its
    path only once it is complete.

    Args:
        dst: A path, or a binary file object with ``write``.
        waveform: Array or CPU tensor ``(C, N)`` or ``(N,)`` of uint8, int16, int32, int64, float32 or
            float64 (floats from -1 to 1), or ``AudioFrames``.
        sample_rate: Samples per second and channel. ``AudioFrames`` have their own, and the results of
            :func:`load_audio` have one that is the default.
        format: FFmpeg's name of the file format. The default follows from the suffix of the path.
        encoder: Name of an FFmpeg encoder or codec. The default is that of the file format.
        encoder_options: Options of the encoder.
        bit_rate: Bits per second, for lossy encoders.

    Raises:
        ValueError: A name, option or shape is invalid, or there are no samples.
        EncodeError: The encoder does not take the sample rate or the channels.
        WriteError: The file cannot be written.
        TypeError: The dtype is not supported, or ``sample_rate`` is missing.

    Thread safety: safe.

    Example:
        >>> sm.save_audio("out.flac", np.zeros(16000, np.float32), 16000)
    """
    check_target(dst)
    sound = _as_audio(waveform, sample_rate)
    with Muxer(dst, format=format) as muxer:
        index = _add_audio(muxer, sound, encoder, encoder_options, bit_rate)
        muxer.write(index, sound)


def cut(
    src: Source,
    dst: Target,
    start: Seconds | None,
    end: Seconds | None,
    *,
    format: str | None = None,
    encoder: str | None = None,
    encoder_options: Mapping[str, object] | None = None,
) -> bool:
    """Write exactly the frames and samples of a window of time to a file.

    Video packets are copied if the window begins at a key frame and needs no packets outside of it; otherwise
    the frames are re-encoded, upright. Audio is always re-encoded, because its packets do not start at the
    window; to PCM in WAV and similar formats. Rates that an encoder does not take are resampled: 44.1 kHz to
    48 kHz for Opus. In AVI and MPEG-TS, which do not state what encoders add, AAC begins 1024 samples
    late, MP3 1105 and Opus 312. Covers of audio are left out. ``start`` becomes second 0.

    Args:
        src: The source, as for :func:`demux_video`.
        dst: A path, or a binary file object with ``write``.
        start: Start of the window in seconds on the container's clock; ``None``: start of the file.
        end: End of the window, exclusive; ``None``: end of the file.
        format: FFmpeg's name of the file format. The default follows from the suffix of the path.
        encoder: Encoder with which to re-encode the video. The default is one for the source's codec, if
            FFmpeg and the file format support it, else that of the file format.
        encoder_options: Options of the encoder, such as ``{"qp": 0}``. They also force re-encoding.

    Returns:
        Whether video packets were copied.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: The window contains no frames and no samples.
        DecodeError: Data that has to be re-encoded is damaged.
        EncodeError: An encoder or the file format does not take the frames.
        WriteError: The file cannot be written.
        ValueError: The window is empty, a name or option is invalid, or ``dst`` is the path of the source.

    Thread safety: safe, if no other thread uses a file-like ``src`` or ``dst``.

    Example:
        >>> sm.cut("clip.mp4", "piece.mp4", 2.5, 6)
        False
    """
    window = parse_window((start, end))
    _check_other_file(src, dst)
    with Demuxer(src) as demuxer, Muxer(dst, format=format) as muxer:
        video = demuxer.demux_video(window) if has_video(demuxer) else None
        # Audio from second 0 on, so that silence is written where it begins after the video.
        is_before = window.end is not None and window.end <= 0
        audible = window if is_before else parse_window((start or 0, end))
        audio = demuxer.demux_audio(audible) if demuxer.audio_stream_index is not None else None
        asked = encoder is not None or encoder_options is not None
        copied = video is not None and not asked and _can_be_copied(video, muxer)
        runs: Iterable[Any] = [] if video is None else [video] if copied else _decoded(video)
        first, runs = _peek(runs)
        sound_encoder = None if audio is None else _own_encoder(muxer, audio.codec)
        found = [] if audio is None else _decoded(audio, _rate_taken(muxer, sound_encoder, audio))
        heard, sounds = _peek(found)
        if first is None and heard is None:
            name = next((one.source for one in (video, audio) if one is not None), None)
            raise DemuxError(f"there is no frame and no sample in {window}", source=name)
        index = -1
        if video is not None and copied:
            index = muxer.add_remux_stream(video)
        elif video is not None and first is not None:
            name = encoder or _own_encoder(muxer, video.codec) or muxer.default_codec("video")
            index = _add_video(
                muxer,
                first,
                name,
                encoder_options,
                frame_rate=video.frame_rate,
                time_base=_unit(muxer, name, video.codec, first.time_base),
                sample_aspect_ratio=video.codec.sample_aspect_ratio,
            )
        if audio is not None and heard is not None:
            # Encoders refuse many rates of other codecs. The rate is 0 if the source does not state it.
            rate = audio.codec.bit_rate if sound_encoder else 0
            track = _add_audio(muxer, heard, sound_encoder, bit_rate=rate or None)
            for sound in sounds:
                muxer.write(track, sound)
        clock = metadata_of(video if video is not None else audio)  # type: ignore[arg-type]  # one is there
        _write(muxer, index, runs, clock.zero + (window.start or 0))
    return copied


def _check_other_file(src: Source, dst: Target) -> None:
    # By path: a hard link is another name, so the file stays under that of the source.
    paths = [os.path.realpath(one) for one in (src, dst) if isinstance(one, str | os.PathLike)]
    if len(paths) == 2 and paths[0] == paths[1]:
        raise ValueError(
            f"{paths[0]} is the source, and the cut would replace it; write to another file"
        )


def _can_be_copied(video: VideoPackets, muxer: Muxer) -> bool:
    """Whether the packets of a window decode to exactly its frames, and the file format takes them."""
    metadata, packets = metadata_of(video), av_packets(video)
    # A copy would show frames that an edit list hides, and hide that the source is truncated.
    if discarded_pts(video) or metadata.incomplete or not muxer.takes(video.codec):
        return False
    if not muxer.turns(video.orientation):
        return False  # re-encoded frames are upright
    # Each field of H.264 may be a packet.
    if may_have_fields(video.codec) and not muxer.has_times():
        return False
    start, stop = metadata.span(video.time_base)
    dated = [packet.dts is not None for packet in packets]
    # Of fields in Matroska, FFmpeg states decoding times that step back.
    times = [packet.dts for packet in packets if packet.dts is not None]
    # The Muxer takes packets without decoding times only at the start.
    return (
        any(packet.is_keyframe for packet in packets[:1])
        and (dated == sorted(dated) and all(dated[MAX_UNDATED:]))
        and all(earlier < later for earlier, later in pairwise(times))
        and all(packet.pts is not None and start <= packet.pts < stop for packet in packets)
    )


def _rate_taken(muxer: Muxer, encoder: str | None, audio: AudioPackets) -> int:
    """Return the sample rate of an encoder: that of the audio, the next higher one, or its highest."""
    found, rate = find_encoder(encoder or muxer.default_codec("audio"), "audio"), audio.sample_rate
    rates = found.audio_rates or [rate]
    return min((one for one in rates if one >= rate), default=max(rates))


def _decoded(packets: VideoPackets | AudioPackets, rate: int = 0) -> Iterator[Any]:
    """Decode packets in pieces: upright frames in the coded format, or audio at a rate with gaps filled."""
    decoder: Any
    if isinstance(packets, VideoPackets):
        decoder = VideoDecoder(packets.codec, filter_desc="null", num_frames=_SLICE)
    else:
        config = decode_config(gaps="fill")
        desc = get_audio_filter_desc(sample_rate=rate, sample_fmt=None)
        decoder = AudioDecoder(
            packets.codec,
            filter_desc=None if rate == packets.sample_rate else desc,
            decode_config=config,
            num_frames=rate,
        )
    yield from decoder.decode(packets)
    yield from decoder.flush()


def _peek(runs: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """Return the first item, if any, and an iterator over all items."""
    items = iter(runs)
    first = next(items, None)
    return first, items if first is None else chain([first], items)


def _own_encoder(muxer: Muxer, codec: VideoCodec | AudioCodec) -> str | None:
    """Return an encoder for a stream's codec, if FFmpeg has a stable one and the file format takes it."""
    kind = "video" if isinstance(codec, VideoCodec) else "audio"
    try:
        encoder = find_encoder(codec.name, kind)
    except ValueError:
        return None
    # WAV does not state how many samples other encoders add at start and end, and few readers decode them.
    is_coded = kind == "audio" and not encoder.name.startswith("pcm_")
    if is_coded and muxer.default_codec("audio").startswith("pcm_"):
        return None
    if encoder.name in ("wmav1", "wmav2"):
        return None  # FFmpeg's decoder leaves out the first 2048 samples of what its encoder makes
    return encoder.name if muxer.takes(codec) and not encoder.experimental else None


def _add_video(
    muxer: Muxer,
    first: VideoFrames,
    encoder: str | None,
    encoder_options: Mapping[str, object] | None,
    *,
    pix_fmt: str | None = None,
    **config: Any,
) -> int:
    """Add a stream for frames like the first."""
    found = find_encoder(encoder or muxer.default_codec("video"), "video")
    names = ["color_primaries", "color_trc"]
    if is_yuv(first.pix_fmt):
        names += ["colorspace", "color_range"]
    # Colour metadata is dropped if the file cannot store it; the encoder then converts to the defaults.
    states = muxer.states_colors(found.canonical_name)
    return muxer.add_encode_stream(
        video_encode_config(
            width=first.width,
            height=first.height,
            pix_fmt=pix_fmt or best_pix_fmt(found, first.pix_fmt),
            encoder=found.name,
            encoder_options=encoder_options,
            **{name: getattr(first, name) for name in names if states},
            **config,
        )
    )


def _unit(muxer: Muxer, encoder: str, codec: VideoCodec, time_base: Fraction) -> Fraction:
    """Return the time base of frames that are re-encoded."""
    if encoder in ("mpeg1video", "mpeg2video") and codec.frame_rate:
        return 1 / codec.frame_rate  # they count frames
    # AVI counts frames, too, and the window may begin between two.
    if time_base > Fraction(1, 1000) and muxer.has_times():
        time_base /= 100
    # The time base of MPEG-4 is limited to 16 bits.
    is_long = encoder == "mpeg4" and time_base.denominator >> 16
    return Fraction(1, 60000) if is_long else time_base


def _add_audio(
    muxer: Muxer,
    sound: AudioFrames,
    encoder: str | None = None,
    encoder_options: Mapping[str, object] | None = None,
    bit_rate: int | None = None,
) -> int:
    name = encoder or muxer.default_codec("audio")
    base = sound.sample_fmt.removesuffix("p")
    if encoder is None and name.startswith("pcm_"):  # keep each sample as it is
        base = {"flt": "f32", "dbl": "f64"}.get(base, base)
        name = "pcm_u8" if base == "u8" else f"pcm_{base}{name[-2:]}"
    found = find_encoder(name, "audio")
    return muxer.add_encode_stream(
        audio_encode_config(
            sample_rate=sound.sample_rate,
            num_channels=sound.num_channels,
            sample_fmt=best_sample_fmt(found, sound.sample_fmt),
            encoder=name,
            encoder_options=encoder_options,
            bit_rate=bit_rate if found.lossy else None,
        )
    )


def _as_video(
    item: Any, frame_rate: Rate | None, layout: Literal["NCHW", "NHWC"] | None
) -> VideoFrames:
    # Each array of an iterable may have any number of frames.
    if not isinstance(item, VideoFrames | ImageFrames):
        item = frames_from_array(item, frame_rate=frame_rate or 30, layout=layout)
    return VideoFrames(av_frames(item), frame_metadata(item))


def _as_audio(waveform: Any, sample_rate: int | None = None) -> AudioFrames:
    if isinstance(waveform, tuple) and len(waveform) == 2 and sample_rate is None:
        waveform, sample_rate = waveform
    if isinstance(waveform, AudioFrames):
        if sample_rate is not None:
            raise TypeError(f"{waveform!r} has a sample rate; pass it without {sample_rate!r}")
        return waveform
    rate = getattr(waveform, "sample_rate", None) if sample_rate is None else sample_rate
    if rate is None:
        raise TypeError("an array has no sample rate: pass sample_rate=, or audio=(array, rate)")
    return frames_from_array(waveform, sample_rate=rate)  # type: ignore[return-value]


def _write(muxer: Muxer, index: int, runs: Iterable[Any], zero: Fraction) -> None:
    """Write frames or packets so that time ``zero`` of their clock becomes second 0 of the file."""
    for run in runs:
        # The Muxer maps `zero` of the metadata to second 0.
        if isinstance(run, VideoPackets):
            muxer.write(index, run.with_metadata(zero=zero))
        else:
            muxer.write(index, VideoFrames(av_frames(run), replace(frame_metadata(run), zero=zero)))
