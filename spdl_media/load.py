"""From a source to an array in one call: demux, decode, convert, transfer, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spdl_media._audio_arrays import decode_samples
from spdl_media._loading.batch import ArrayLayout, OnError, check_array_layout
from spdl_media._loading.device_frames import FramesAsked, frame_steps
from spdl_media._loading.device_pictures import Asked, batch_steps, load_picture
from spdl_media._loading.on_device import (
    DeviceLike,
    PictureDecoder,
    VideoDecoder,
    device_config,
    into_array,
    staging,
)
from spdl_media._loading.options import chosen_filter, still_filter
from spdl_media._loading.pictures import CropPlan, Flips
from spdl_media.buffer import CPUBuffer
from spdl_media.codec import configs_by_kind
from spdl_media.config import DecodeConfig, DemuxConfig, one_cuda_config
from spdl_media.convert import convert_frames
from spdl_media.crops import Box
from spdl_media.cuda_buffer import Buffer
from spdl_media.decode import DEFAULT_FILTER, Default, decode_packets
from spdl_media.demux import Demuxer, demux_audio, demux_image, demux_video
from spdl_media.filter_desc import FilterDesc
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps, Quality, Rate, ScaleAlgo, ScaleMode, SoundOps
from spdl_media.storage import Storage
from spdl_media.timing import Seconds, Timestamp, Window, clip_window

__all__ = ("Clip", "load_audio", "load_clip", "load_image", "load_image_batch", "load_video")


def load_image(
    src: Source,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: str | None = "rgb24",
    scale_mode: ScaleMode | None = "pad",
    scale_algo: ScaleAlgo = "bicubic",
    quality: Quality = "accurate",
    filter_desc: str | Default | None = DEFAULT_FILTER,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    storage: Storage | None = None,
    layout: ArrayLayout | None = None,
    name: str | None = None,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    decoder: PictureDecoder = "auto",
) -> Buffer:
    """Load one picture, upright.

    Args:
        src: A path, a URL for fsspec, bytes or another C-contiguous buffer, a 1-D uint8 array or CPU
            tensor, or a binary file-like object.
        width: Width of the result. Without ``height`` the aspect ratio is kept; without both, the size.
        height: Height of the result.
        pix_fmt: FFmpeg's name of the pixel format; ``None`` keeps what the decoder gives. YUV formats come
            with the matrix of BT.601 and in full range, as JPEG has them, whatever the file.
        scale_mode: With both sides given, ``"pad"`` fits the whole picture inside a black border,
            ``"crop"`` covers the whole size and cuts off the rest, ``None`` stretches.
        scale_algo: Name of FFmpeg's scaling algorithm.
        quality: ``"fast"`` is less exact; see :func:`~spdl_media.get_video_filter_desc`.
        filter_desc: A whole filter graph of your own instead of the options above, which have no effect
            then: also ``pix_fmt="rgb24"``, the default, which is not told from none. ``None`` for no graph,
            and then the picture is not turned either. Matrix and range of YUV are what the graph gives.
        demux_config: How to open the source.
        decode_config: How to decode; see :func:`~spdl_media.decode_config`.
        storage: Memory to fill; fresh memory without one. With ``cuda=``, memory that the picture passes
            through where the CPU decodes it; fresh page-locked memory without one.
        layout: ``"NCHW"`` or ``"NHWC"`` for RGB and gray.
        name: What to call the source in messages.
        cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`: the result lies there.
        cuda_config: The same by another name; give one of them.
        decoder: With ``cuda=``: ``"dali"`` decodes on the device, ``"cpu"`` on the CPU, and copies;
            ``"auto"`` takes the first that is installed and can make what is asked for. Where DALI is
            installed and finds no device, a ``CPUFallbackWarning`` says so.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(height, width, 3)``
        uint8, values 0 to 255, for ``rgb24``; the table of :mod:`spdl_media.formats` has the other formats.
        Of YUV, ``buffer.colorspace`` and ``buffer.color_range`` say what the numbers mean.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no picture.
        DecodeError: It is damaged.
        FilterError: The picture cannot be scaled to such a size, or ``filter_desc`` cannot be used.
        ConvertError: Its format makes no array, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: An option that cannot be, or ``filter_desc`` beside options that it replaces.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    check_array_layout(layout)
    options = PictureOps(width, height, pix_fmt, scale_mode, scale_algo, quality)
    desc = still_filter(options, filter_desc)

    def load(storage: Storage | None) -> CPUBuffer:
        packets = demux_image(src, demux_config=demux_config, name=name)
        frames = decode_packets(packets, desc, decode_config)
        return convert_frames(frames, storage, layout=layout)

    config = device_config(cuda, cuda_config, decoder, PictureDecoder)
    if config is None:
        return load(storage)
    asked = Asked(
        config=config,
        decoder=decoder,
        options=options,
        is_plain=isinstance(filter_desc, Default),
        demux_config=demux_config,
        decode_config=decode_config,
        storage=staging(storage),
        layout=layout,
        purpose="load_image(cuda=)",
        is_single=True,
        name=name,
    )
    return load_picture(src, asked, lambda: load(asked.storage))


def load_image_batch(
    srcs: Iterable[Source],
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: str | None = "rgb24",
    scale_mode: ScaleMode | None = "pad",
    scale_algo: ScaleAlgo = "bicubic",
    quality: Quality = "accurate",
    crops: Sequence[Box | None] | None = None,
    flips: Flips | None = None,
    filter_desc: str | Default | None = DEFAULT_FILTER,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    storage: Storage | None = None,
    layout: ArrayLayout | None = None,
    on_error: OnError = "raise",
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    decoder: PictureDecoder = "auto",
) -> Buffer:
    """Load pictures into one array, one after the other in the calling thread.

    To use several threads, load several batches at the same time; nothing here holds the GIL for long.

    Args:
        srcs: A sequence of pictures, each as for :func:`load_image`.
        width: As in :func:`load_image`, as are the arguments that are not listed here.
        height: See ``width``. Without both, all pictures must have one size: the first that differs ends the
            batch, whatever ``on_error`` says.
        pix_fmt: As in :func:`load_image`. With ``None``, all must come in one format and, if that is YUV,
            with one matrix and range; the same holds for what a ``filter_desc`` gives.
        scale_mode: As in :func:`load_image`.
        scale_algo: As in :func:`load_image`.
        quality: As in :func:`load_image`.
        crops: For each picture a box ``(x, y, width, height)`` in pixels of the upright picture, or
            ``None`` for all of it, to cut out before anything else. :func:`~spdl_media.random_resized_crop`
            makes such boxes.
        flips: For each picture whether to exchange left and right, after it is cut: bools, or a 1-D array or
            tensor of them.
        filter_desc: As in :func:`load_image`; crops and flips come before it. They are those of upright
            pictures, so with either of them ``None`` leaves no picture unturned, not even where the box is
            ``None`` and the flip ``False``.
        demux_config: As in :func:`load_image`.
        decode_config: As in :func:`load_image`.
        storage: As in :func:`load_image`. Its memory is taken with the first picture that is decoded, and
            each picture goes there at once.
        layout: As in :func:`load_image`.
        on_error: What becomes of a picture that cannot be opened, read or decoded, or whose crop does not lie
            inside it: ``"raise"`` the error, which then names the input and its position; ``"skip"`` it, and
            the batch has fewer rows; or ``"fill"`` its row with zeros.
        cuda: As in :func:`load_image`.
        cuda_config: As in :func:`load_image`.
        decoder: As in :func:`load_image`. With ``"cpu"``, what is copied are FFmpeg's planes where CuPy can
            scale and colour them on the device, else finished pictures.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(B, height, width, 3)``
        uint8 for ``rgb24``. ``buffer.failures``
        has what could not be loaded and why, ``buffer.indices`` the position among ``srcs`` of each row,
        ``buffer.valid`` a mask of the rows that are pictures.

    Raises:
        SourceError: An input cannot be opened or read, with ``on_error="raise"``.
        DemuxError: An input is no picture, likewise.
        DecodeError: An input is damaged, likewise.
        FilterError: A picture cannot be scaled to such a size, or ``filter_desc`` cannot be used.
        ConvertError: There are no inputs, none could be loaded, they differ in size, format, matrix or range,
            the format makes no array, a crop lies outside its picture, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: An option that cannot be, or not one crop or flip for each input.
        TypeError: ``srcs`` is no sequence, or an input is no source.

    Thread safety: safe.
    """
    decode_and_convert = batch_steps(
        srcs,
        options=PictureOps(width, height, pix_fmt, scale_mode, scale_algo, quality),
        filter_desc=filter_desc,
        cuts=CropPlan(crops, flips),
        demux_config=demux_config,
        decode_config=decode_config,
        storage=storage,
        layout=layout,
        on_error=on_error,
        cuda=cuda,
        cuda_config=cuda_config,
        decoder=decoder,
    )
    return decode_and_convert(lambda: False)


def load_video(
    src: Source,
    timestamp: Timestamp | Window | None = None,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: str | None = "rgb24",
    scale_mode: ScaleMode | None = "pad",
    scale_algo: ScaleAlgo = "bicubic",
    quality: Quality = "auto",
    frame_rate: Rate | None = None,
    num_frames: int | None = None,
    stream_index: int | None = None,
    filter_desc: str | Default | None = DEFAULT_FILTER,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    storage: Storage | None = None,
    layout: ArrayLayout | None = None,
    name: str | None = None,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    decoder: VideoDecoder = "auto",
) -> Buffer:
    """Load the frames of a video, all or those of a window, upright.

    Args:
        src: As for :func:`load_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock; ``None`` leaves a
            side open. Exactly the frames with ``start <= t < end`` are loaded.
        width: As in :func:`load_image`, as are the arguments that are not listed here.
        height: As in :func:`load_image`.
        pix_fmt: As in :func:`load_image`.
        scale_mode: As in :func:`load_image`.
        scale_algo: As in :func:`load_image`.
        quality: As in :func:`load_image`.
        frame_rate: Frames in a second; frames are repeated or left out.
        num_frames: At most so many frames, and no more are decoded than they need.
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        filter_desc: As in :func:`load_image`.
        demux_config: As in :func:`load_image`.
        decode_config: As in :func:`load_image`.
        storage: As in :func:`load_image`.
        layout: As in :func:`load_image`.
        name: As in :func:`load_image`.
        cuda: As in :func:`load_image`.
        cuda_config: As in :func:`load_image`.
        decoder: With ``cuda=``: ``"dali"`` and ``"pyav"`` decode on the device (NVDEC), ``"cpu"`` on the CPU,
            and copies; ``"auto"`` takes the first that decodes the video right. If that is the CPU because
            of the video or of something missing, a ``CPUFallbackWarning`` says why.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(N, height, width, 3)``
        uint8 for ``rgb24``.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        DecodeError: It is damaged.
        ConvertError: No frame lies in the window, the format makes no array, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: The window holds no time, or an option that cannot be.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    check_array_layout(layout)
    options = PictureOps(width, height, pix_fmt, scale_mode, scale_algo, quality, frame_rate)
    config = device_config(cuda, cuda_config, decoder, VideoDecoder)
    asked = FramesAsked(
        options=options,
        filter_desc=filter_desc,
        num_frames=num_frames,
        decode_config=decode_config,
        storage=storage,
        layout=layout,
        config=config,
        decoder=decoder,
        purpose="load_video(cuda=)",
    )
    decode = frame_steps(asked)
    packets = demux_video(
        src, timestamp=timestamp, stream_index=stream_index, demux_config=demux_config, name=name
    )
    return decode(packets)[0]


def load_audio(
    src: Source,
    timestamp: Timestamp | Window | None = None,
    *,
    sample_rate: int | None = None,
    num_channels: int | None = None,
    sample_fmt: str | None = "fltp",
    num_frames: int | None = None,
    stream_index: int | None = None,
    filter_desc: str | Default | None = DEFAULT_FILTER,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    storage: Storage | None = None,
    name: str | None = None,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
) -> Buffer:
    """Load sound, all or the samples of a window.

    Args:
        src: As for :func:`load_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock. Without another
            ``sample_rate``, exactly the samples ``ceil(start * rate)`` up to ``ceil(end * rate)`` are loaded.
        sample_rate: Samples of one channel in a second.
        num_channels: Channels, mixed up or down to FFmpeg's usual layout of that many.
        sample_fmt: FFmpeg's name of the sample format; ``None`` keeps what the decoder gives.
        num_frames: At most so many samples of each channel.
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        filter_desc: A whole filter graph of your own instead of ``sample_rate``, ``num_channels`` and
            ``sample_fmt``, which have no effect then: also ``sample_fmt="fltp"``, the default, which is not
            told from none. ``None`` for no graph.
        demux_config: As in :func:`load_image`.
        decode_config: As in :func:`load_image`.
        storage: As in :func:`load_image`.
        name: As in :func:`load_image`.
        cuda: As in :func:`load_image`. The CPU decodes, and the samples are copied.
        cuda_config: As in :func:`load_image`.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(channels, samples)``
        float32 for ``fltp``, -1 to 1; ``(samples, channels)`` for formats that are not planar.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        DecodeError: It is damaged.
        ConvertError: No sample lies in the window, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: The window holds no time, or an option that cannot be.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    desc = chosen_filter(SoundOps(sample_rate, num_channels, sample_fmt), filter_desc, SoundOps())
    config = one_cuda_config(cuda, cuda_config)
    convert = into_array(config, storage, None, "load_audio(cuda=)")
    packets = demux_audio(
        src, timestamp=timestamp, stream_index=stream_index, demux_config=demux_config, name=name
    )
    return convert(decode_samples(packets, desc, decode_config, num_frames=num_frames))


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames and sound of one interval. Made by :func:`load_clip`.

    Attributes:
        video: ``(N, height, width, 3)`` uint8 for ``rgb24``.
        audio: ``(channels, samples)`` float32 for ``fltp``.
        timestamps: Seconds of each frame on the container's clock.
        audio_timestamp: Seconds of the first sample on the same clock.
        sample_rate: Samples of one channel in a second.
    """

    video: Buffer
    audio: Buffer
    timestamps: tuple[float, ...]
    audio_timestamp: float
    sample_rate: int


def load_clip(
    src: Source,
    start: Seconds,
    duration: Seconds,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: str | None = "rgb24",
    scale_mode: ScaleMode | None = "pad",
    scale_algo: ScaleAlgo = "bicubic",
    quality: Quality = "auto",
    frame_rate: Rate | None = None,
    sample_rate: int | None = None,
    num_channels: int | None = None,
    sample_fmt: str | None = "fltp",
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    video_storage: Storage | None = None,
    audio_storage: Storage | None = None,
    layout: ArrayLayout | None = None,
    name: str | None = None,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    decoder: VideoDecoder = "auto",
) -> Clip:
    """Load the frames and the sound of one interval, reading the source once.

    Args:
        src: As for :func:`load_image`.
        start: Seconds on the container's clock.
        duration: Seconds. The interval is half-open.
        width: As in :func:`load_video`, as are all arguments for pictures.
        height: As in :func:`load_video`.
        pix_fmt: As in :func:`load_video`.
        scale_mode: As in :func:`load_video`.
        scale_algo: As in :func:`load_video`.
        quality: As in :func:`load_video`.
        frame_rate: As in :func:`load_video`.
        sample_rate: As in :func:`load_audio`, as are all arguments for sound.
        num_channels: As in :func:`load_audio`.
        sample_fmt: As in :func:`load_audio`.
        demux_config: How to open the source.
        decode_config: How to decode both streams. A ``decoder`` that it names, and the ``decoder_options``
            beside it, are for the stream of the decoder's own kind; the other one has its default decoder.
        video_storage: Memory for the frames; fresh memory without one.
        audio_storage: Memory for the sound, another one; fresh memory without one.
        layout: As in :func:`load_video`.
        name: What to call the source in messages.
        cuda: As in :func:`load_video`; frames and sound lie on the device.
        cuda_config: As in :func:`load_video`.
        decoder: As in :func:`load_video`, for the frames. The CPU decodes the sound.

    Returns:
        The frames with ``start <= t < start + duration`` and the samples of the same interval, cut to the
        sample, each what :func:`load_video` and :func:`load_audio` give.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or one of the streams is missing.
        DecodeError: It is damaged.
        ConvertError: No frame or no sample lies in the interval, or a storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: ``start`` is no finite time, ``duration`` is not positive, or an option that cannot be.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    check_array_layout(layout)
    options = PictureOps(width, height, pix_fmt, scale_mode, scale_algo, quality, frame_rate)
    sound_desc = FilterDesc(SoundOps(sample_rate, num_channels, sample_fmt))
    window = clip_window(start, duration)
    config = device_config(cuda, cuda_config, decoder, VideoDecoder)
    purpose = "load_clip(cuda=)"
    for_video, for_audio = configs_by_kind(decode_config)
    asked = FramesAsked(
        options=options,
        filter_desc=DEFAULT_FILTER,
        num_frames=None,
        decode_config=for_video,
        storage=video_storage,
        layout=layout,
        config=config,
        decoder=decoder,
        purpose=purpose,
    )
    decode = frame_steps(asked)
    convert_sound = into_array(config, audio_storage, None, purpose)
    with Demuxer(src, demux_config=demux_config, name=name) as demuxer:
        pictures, sound = demuxer.demux_clip(window)
    video, timestamps = decode(pictures)
    try:
        samples = decode_samples(sound, sound_desc, for_audio)
        audio = convert_sound(samples)
    except BaseException:
        # The traceback holds on to this frame, and the memory shall be free at once.
        video.release()
        raise
    return Clip(video, audio, timestamps, samples.timestamp, samples.sample_rate)
