"""Load frames and audio of one interval, with fixed lengths if wanted; draw random intervals of audio."""

from __future__ import annotations

from fractions import Fraction
from os import PathLike
from typing import Any, NamedTuple, Unpack, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int
from spdl_media._probe import MediaInfo, probe
from spdl_media.arguments import ClipArguments, DeviceLike, audio_options, declared
from spdl_media.audio_arrays import AudioRequest, decode_audio_array
from spdl_media.buffer import Buffer
from spdl_media.crops import Rng, check_rng
from spdl_media.decode import DEFAULT_FILTER, configs_by_kind
from spdl_media.demuxer import Demuxer
from spdl_media.errors import DemuxError
from spdl_media.inputs import Source
from spdl_media.load import VIDEO_OPS, awaitable, frame_request, frame_steps
from spdl_media.packets import AudioPackets, VideoPackets, metadata_of
from spdl_media.rows import OnShort, check_length
from spdl_media.timing import Seconds, Window, parse_duration, parse_time, parse_window
from spdl_media.transfer import on_its_way

__all__ = ("Clip", "async_load_clip", "load_clip", "sample_windows")

# Seconds to read past the end of a window, for the samples that a resampler delays.
RESAMPLED = Fraction(1, 20)


class Clip(NamedTuple):
    """Frames and audio of one interval. Made by :func:`load_clip`.

    Attributes:
        video: The frames; for ``rgb24``, ``(N, height, width, 3)`` uint8.
        audio: The samples; for ``fltp``, ``(channels, samples)`` float32.
        timestamps: Time of each frame on the container's clock, in seconds, ``(N,)`` float64; ``nan`` for a
            frame of zeros.
        audio_timestamp: Time of the first sample on the same clock, in seconds.
        sample_rate: Sample rate in Hz.
    """

    video: Buffer
    audio: Buffer
    timestamps: npt.NDArray[np.float64]
    audio_timestamp: float
    sample_rate: int


@declared(ClipArguments, quality="auto", on_short="error")
def load_clip(
    src: Source,
    start: Seconds,
    duration: Seconds | None = None,
    **arguments: Unpack[ClipArguments[DeviceLike | None]],
) -> Clip:
    """Load the frames and the audio of one interval, reading the source once.

    Args:
        src: A path, URL, bytes, uint8 array, CPU tensor or file-like object, as for :func:`load_image`.
        start: Start of the half-open interval, in seconds on the container's clock.
        duration: Length of the interval in seconds. ``None``: as long as ``num_samples`` last, or
            ``num_frames`` at ``frame_rate``; if both are given, each stream has its own length.
        num_frames: Exact number of frames: the first ones with ``start <= t``, or with ``frame_rate`` those
            shown at ``start + k / frame_rate``.
        num_samples: Exact number of samples per channel: those of ``num_samples / rate`` seconds from
            ``start``. So all clips have one shape, wherever they start.
        on_short: What to do if there are fewer frames or samples: ``"error"`` raises a ConvertError,
            ``"repeat_last"`` repeats the last one, ``"wrap"`` continues with the first ones, ``"zeros"`` adds
            zeros (silence).
        video_storage: Memory for the frames; ``None``: fresh memory.
        audio_storage: Memory for the audio, not that of the frames; ``None``: fresh memory.
        video_stream_index: Index of the video stream in its container. The default is the one that FFmpeg
            finds best.
        audio_stream_index: Index of the audio stream in its container. The default is the one that FFmpeg
            finds best.
        name: Name of the source in messages.
        decode_config: Options of decoding for both streams. Its ``decoder`` and ``decoder_options`` apply
            only to the stream of that decoder's kind; the other stream uses its default decoder.

    Returns:
        The frames with ``start <= t < start + duration`` and the samples of the same interval, exact to the
        sample. Frames are as from :func:`load_video`, samples as from :func:`load_audio`.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not a media file, or one of the streams is missing.
        DecodeError: The data is damaged.
        FilterError: A gap is too long for ``frame_rate``.
        ConvertError: The interval contains no frame (with any ``on_short``), no sample (unless ``on_short``
            is ``"zeros"``) or too few of them, the crop is not inside the frames, or a storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it is out of memory.
        ValueError: ``start`` is not a finite time, ``duration`` is not positive, no argument determines the
            length of the clip, or an option is invalid.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.

    Example:
        >>> clip = sm.load_clip("clip.mp4", 2.5, num_frames=16, frame_rate=8, num_samples=32000)
        >>> clip.video, clip.audio
        (<CPUBuffer: (16, 270, 480, 3) uint8>, <CPUBuffer: (2, 32000) float32>)
    """
    for_video, for_audio = configs_by_kind(arguments["decode_config"])
    on_short = arguments["on_short"]
    check_choice("on_short", on_short, (*get_args(OnShort), None))
    # on_short applies only to a number that is given.
    num_frames, num_samples = (
        check_length(name, arguments[name], None if arguments[name] is None else on_short)
        for name in ("num_frames", "num_samples")
    )
    # There is no filter_desc argument, and each stream has its own decode_config and storage.
    of_video: Any = {
        **arguments,
        "filter_desc": DEFAULT_FILTER,
        "on_short": None if num_frames is None else on_short,
        "decode_config": for_video,
        "storage": arguments["video_storage"],
    }
    request = frame_request(of_video, VIDEO_OPS, "load_clip(cuda=)")
    ops = audio_options(arguments)
    frame_rate: Any = request.ops.frame_rate  # parsed
    begin = parse_time(start, "start")
    length = None if duration is None else parse_duration(duration)
    if duration is num_samples is None and (num_frames is None or not frame_rate):
        raise ValueError(
            "the clip has no length: give duration=, num_samples=, or num_frames= with frame_rate="
        )
    # Opens the device first, so that nothing is read if there is none.
    decode = frame_steps(request)
    finish, memory = on_its_way(request.config, arguments["audio_storage"], request.purpose)
    of_audio = AudioRequest(
        ops, memory, for_audio, num_samples, None if num_samples is None else on_short
    )
    with Demuxer(src, demux_config=arguments["demux_config"], name=arguments["name"]) as demuxer:
        # Read both streams before decoding, so that the source is closed early.
        counts, rates = (num_frames, num_samples), (frame_rate, ops.sample_rate)
        streams = arguments["video_stream_index"], arguments["audio_stream_index"]
        frames, coded_audio = _read(demuxer, begin, length, counts, rates, streams)
    video, timestamps = decode(frames)
    try:
        audio, first = decode_audio_array(coded_audio, of_audio)
        buffer = finish(audio)
    except BaseException:
        # Released explicitly, because the traceback would keep the memory through this frame.
        video.release()
        raise
    assert audio.sample_rate, "audio has one"
    return Clip(video, buffer, np.array(timestamps()), first, audio.sample_rate)


async_load_clip = awaitable(load_clip)


def _read(
    demuxer: Demuxer,
    start: Fraction,
    duration: Fraction | None,
    counts: tuple[int | None, int | None],
    rates: tuple[Fraction | None, int | None],
    streams: tuple[int | None, int | None],
) -> tuple[VideoPackets, AudioPackets]:
    """Read the packets of both streams that the requested frames and samples need.

    Args:
        demuxer: The open source.
        start: Start of the clip in seconds.
        duration: Length of the clip in seconds; ``None``: as long as the numbers last.
        counts: ``num_frames`` and ``num_samples``.
        rates: ``frame_rate`` and ``sample_rate``.
        streams: Indices of the video and the audio stream; ``None``: the best one.

    Raises:
        DemuxError: One of the streams is missing.
    """
    (num_frames, num_samples), (frame_rate, sample_rate) = counts, rates
    of_video = of_audio = duration
    if duration is None and num_frames is not None and frame_rate is not None:
        of_video = of_audio = num_frames / frame_rate
    if num_samples is not None:
        codec = demuxer.audio_codec if streams[1] is None else demuxer.codec(streams[1])
        # A stream of another kind has no sample rate; demux_clip raises the error for it.
        rate = getattr(codec, "sample_rate", 1)
        wanted = Fraction(num_samples, sample_rate or rate)
        if duration is None or wanted <= duration:
            of_audio = wanted if sample_rate in (None, rate) else wanted + RESAMPLED
        if num_frames is None and of_video is None:
            of_video = wanted
    chosen = dict(zip(("video_stream_index", "audio_stream_index"), streams, strict=True))
    assert of_audio is not None, "checked before the source was opened"
    audio_window = Window(start, start + of_audio)
    if num_frames is None or of_video is not None:
        return demuxer.demux_clip(
            Window(start, start + (of_video or 0)), audio_timestamp=audio_window, **chosen
        )
    # Interlaced video may have one packet per field, so read twice as many packets as frames. The decoder
    # stops after num_frames.
    video = demuxer.video_codec if streams[0] is None else demuxer.codec(streams[0])
    seconds = (2 * num_frames + 1) / (getattr(video, "frame_rate", None) or Fraction(25))
    while True:
        window = Window(start, start + seconds)
        frames, audio = demuxer.demux_clip(window, audio_timestamp=audio_window, **chosen)
        if len(frames.get_timestamps()) >= 2 * num_frames or not metadata_of(frames).goes_on:
            return frames, audio
        seconds *= 2


def sample_windows(
    src: Source | MediaInfo, length: Seconds, *, num: int = 1, rng: Rng | None = None
) -> list[tuple[Fraction, Fraction]]:
    """Draw random windows of one length for :func:`~spdl_media.load_audio`.

    The starts are uniformly distributed. Each window begins exactly at a sample, so all windows of one file
    have the same number of samples: ``length * sample_rate``, rounded up.

    Args:
        src: A source, whose header is read by :func:`~spdl_media.probe`, or a result of ``probe``.
        length: Length of a window in seconds. If the audio is shorter, all windows start at 0, and
            ``load_audio(num_samples=, on_short=)`` fills them up.
        num: Number of windows, which may overlap.
        rng: A NumPy generator, such as a :class:`~spdl_media.DataLoader` passes to its preprocessor, or a
            seed. ``None``: unpredictable windows.

    Returns:
        Pairs ``(start, end)`` of exact seconds on the container's clock.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not a media file, has no audio, or does not state its duration.
        ValueError: ``length`` is not positive and finite, ``num`` is below 1, or the seed is negative.
        TypeError: ``src`` is not a source, or ``rng`` is neither a generator nor a seed.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.

    Example:
        >>> [(start, end)] = sm.sample_windows("clip.mp4", 3, rng=0)
        >>> end - start
        Fraction(3, 1)
    """
    seconds = parse_duration(length, "length")
    info = src if isinstance(src, MediaInfo) else probe(src)
    name = str(src) if isinstance(src, str | PathLike) else None
    if info.audio is None:
        raise DemuxError("there is no audio stream to choose windows from", source=name)
    rate, duration = info.audio.sample_rate, info.audio.duration or info.duration
    if duration is None:
        raise DemuxError(
            f"this {info.format} states no duration. Choose the starts yourself, up to the last of "
            "sm.demux_audio(src).get_timestamps(), which reads all of it",
            source=name,
        )
    # In samples, so that all windows begin exactly at one and have equal numbers of them.
    found, wanted = (parse_window((None, one)).samples(rate)[1] or 0 for one in (duration, seconds))
    generator = np.random.default_rng(check_rng(rng))
    # Audio that is too short has only the start 0.
    last = max(found - wanted, 0)
    starts = generator.integers(last, size=check_int("num", num), endpoint=True).tolist()
    return [(Fraction(start, rate), Fraction(start, rate) + seconds) for start in starts]
