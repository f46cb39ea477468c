"""From a source to an array in one call, also as awaitables: demux, decode, convert and transfer."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import fields, replace
from itertools import chain
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, cast, get_args, overload

from spdl_media._checks import check_choice, check_int
from spdl_media._ffmpeg import ffmpeg_log
from spdl_media.arguments import (
    AudioArguments,
    BatchArguments,
    DeviceLike,
    ImageArguments,
    ImageDecoder,
    OnError,
    VideoArguments,
    VideoDecoder,
    as_list,
    audio_options,
    check_array_layout,
    chosen_filter,
    declared,
)
from spdl_media.audio_arrays import AudioRequest, load_audio_array
from spdl_media.batch import PICTURE_COLORS, FrameRequest, TimedFrames, load_frames, load_rows
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.config import as_decode_config, one_cuda_config
from spdl_media.crops import CropPlan, check_rng
from spdl_media.decode import Default
from spdl_media.demuxer import Demuxer, video_parts
from spdl_media.errors import ConvertError
from spdl_media.filter_desc import FilterDesc
from spdl_media.formats import is_yuv
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps, SoundOps
from spdl_media.packets import VideoPackets
from spdl_media.row_plan import parse_values
from spdl_media.rows import check_length
from spdl_media.timing import Timestamp, Window, parse_window
from spdl_media.transfer import on_its_way, staging

__all__ = (
    "async_load_audio",
    "async_load_image",
    "async_load_image_batch",
    "async_load_video",
    "load_audio",
    "load_image",
    "load_image_batch",
    "load_video",
)

P = ParamSpec("P")
T = TypeVar("T")

ImageSteps: TypeAlias = Callable[[Callable[[], bool] | None], Buffer]
"""Loads images; asks before each whether to stop."""

When: TypeAlias = "Timestamp | Window | None"

# The defaults, made once: a call takes as long for each as for all of its own arguments.
_IMAGE_OPS, VIDEO_OPS, _SOUND_OPS = PictureOps(), PictureOps(quality="auto"), SoundOps()

# Arguments that become operations, and those that are in requests by their own names.
_PICTURE_OPS = "width height pix_fmt scale_mode scale_algo quality frame_rate".split()
_NAMES = {field.name for field in fields(FrameRequest)}


@overload
def load_image(src: Source, **arguments: Unpack[ImageArguments[None]]) -> CPUBuffer: ...
@overload
def load_image(src: Source, **arguments: Unpack[ImageArguments[DeviceLike]]) -> CUDABuffer: ...
@declared(ImageArguments)
def load_image(src: Source, **arguments: Unpack[ImageArguments[DeviceLike | None]]) -> Buffer:
    """Load one image, upright.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(height, width, 3)``
        uint8, values 0 to 255, for ``rgb24``; the table of :mod:`spdl_media.formats` has the other formats.
        Of YUV, ``buffer.colorspace`` and ``buffer.color_range`` say what the numbers mean.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no image.
        DecodeError: It is damaged.
        FilterError: The image cannot be scaled to such a size, or ``filter_desc`` cannot be used.
        ConvertError: Its format makes no array, its crop lies outside, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: An option is invalid, or stands beside a ``filter_desc`` that replaces it.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.
    """
    return _steps([src], _single_request(arguments))(None)


@overload
def load_image_batch(
    srcs: Iterable[Source], **arguments: Unpack[BatchArguments[None]]
) -> CPUBuffer: ...
@overload
def load_image_batch(
    srcs: Iterable[Source], **arguments: Unpack[BatchArguments[DeviceLike]]
) -> CUDABuffer: ...
@declared(BatchArguments)
def load_image_batch(
    srcs: Iterable[Source], **arguments: Unpack[BatchArguments[DeviceLike | None]]
) -> Buffer:
    """Load images into one array.

    To use several cores, load several batches at the same time, or one batch in ``num_threads``.

    Args:
        srcs: A sequence of images, each as for :func:`load_image`.
        width: Width of the result. Without ``height`` the aspect ratio is kept. Without both, all images
            must have one size: the first that differs ends the batch, whatever ``on_error`` says.
        pix_fmt: FFmpeg's name of the pixel format. With ``None``, all images must come in one format and,
            if that is YUV, with one matrix and range; the same holds for what a ``filter_desc`` gives.
        storage: Memory to fill; fresh memory without one. It is taken with the first decoded image.
        on_error: What becomes of an image that cannot be opened, read or decoded, or whose crop does not lie
            inside it: ``"raise"`` the error, which then names the input and its position; ``"skip"`` it, and
            the batch has fewer rows; or ``"fill"`` its row with zeros.
        num_threads: How many images are decoded at the same time, on the CPU. The calling thread is one of
            the threads; the others live as long as the call. Rows and failures are the same for any
            number; with several failures, the error of the lowest position that was seen is raised.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(B, height, width, 3)``
        uint8 for ``rgb24``. ``buffer.failures`` has what could not be loaded and why, ``buffer.indices`` the
        position among ``srcs`` of each row, ``buffer.valid`` a mask of the rows that are images.

    Raises:
        SourceError: An input cannot be opened or read, with ``on_error="raise"``.
        DemuxError: An input is no image, likewise.
        DecodeError: An input is damaged, likewise.
        FilterError: An image cannot be scaled to such a size, or ``filter_desc`` cannot be used.
        ConvertError: There are no inputs, none could be loaded, they differ in size, format, matrix or range,
            the format makes no array, a crop lies outside its image, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: An option is invalid, or there is not one crop or flip for each input.
        TypeError: ``srcs`` is no sequence, or an input is no source.

    Thread safety: safe, if no other thread uses the ``rng``.
    """
    return _prepare_image_batch(srcs, **arguments)(None)


# Of coded data load_video holds two parts of this size, however long the video is.
_PART_BYTES = 8 << 20


@overload
def load_video(
    src: Source, timestamp: When = None, **arguments: Unpack[VideoArguments[None]]
) -> CPUBuffer: ...
@overload
def load_video(
    src: Source, timestamp: When = None, **arguments: Unpack[VideoArguments[DeviceLike]]
) -> CUDABuffer: ...
@declared(VideoArguments, quality="auto")
def load_video(
    src: Source, timestamp: When = None, **arguments: Unpack[VideoArguments[DeviceLike | None]]
) -> Buffer:
    """Load the frames of a video, all or those of a window, upright.

    Packets are read as they are decoded, and frames become rows at once: beside the array it holds 16 MiB of
    coded data at most, however long the video is, and stops after ``num_frames``. With ``cuda=`` the
    packets of the window are read first.

    Args:
        src: A path, URL, bytes, uint8 array, CPU tensor or file-like object, as for :func:`load_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock; ``None`` leaves a
            side open. Exactly the frames with ``start <= t < end`` are loaded.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(N, height, width, 3)``
        uint8 for ``rgb24``.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        DecodeError: It is damaged.
        ConvertError: No frame lies in the window (whatever ``on_short`` says), or too few, the crop lies
            outside, the format makes no array, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: The window holds no time, or an option is invalid.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.
    """
    # The device is opened first: where there is none, nothing is read.
    request = frame_request(arguments, VIDEO_OPS, "load_video(cuda=)")
    decode, index = frame_steps(request), arguments["stream_index"]
    config, name = arguments["demux_config"], arguments["name"]
    with ffmpeg_log(), Demuxer(src, demux_config=config, name=name) as demuxer:
        if request.config is None:
            parts = video_parts(demuxer, timestamp, index, _PART_BYTES, request.num_frames)
            first = next(parts)
            if request.num_frames is not None:
                return load_frames(first, request, parts)[0]
            # Of most videos the first part is all: then the number of rows is known.
            second = next(parts, None)
            more = None if second is None else chain((second,), parts)
            return load_frames(first, request, more)[0]
        packets = demuxer.demux_video(timestamp, stream_index=index)
    return decode(packets)[0]


@overload
def load_audio(
    src: Source, timestamp: When = None, **arguments: Unpack[AudioArguments[None]]
) -> CPUBuffer: ...
@overload
def load_audio(
    src: Source, timestamp: When = None, **arguments: Unpack[AudioArguments[DeviceLike]]
) -> CUDABuffer: ...
@declared(AudioArguments)
def load_audio(
    src: Source, timestamp: When = None, **arguments: Unpack[AudioArguments[DeviceLike | None]]
) -> Buffer:
    """Load audio, all or the samples of a window.

    Args:
        src: A path, URL, bytes, uint8 array, CPU tensor or file-like object, as for :func:`load_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock. Without another
            ``sample_rate``, exactly the samples ``ceil(start * rate)`` up to ``ceil(end * rate)`` are loaded.
        cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`: the result lies there. The CPU
            decodes, and the samples are copied.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(channels, samples)``
        float32 for ``fltp``, -1 to 1; ``(samples, channels)`` for formats that are not planar.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        DecodeError: It is damaged.
        ConvertError: No sample lies in the window (and ``on_short`` is not ``"zeros"``), or too few, or the
            storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
        ValueError: The window holds no time, or an option is invalid.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    desc = chosen_filter(audio_options(arguments), arguments["filter_desc"], _SOUND_OPS)
    config = one_cuda_config(arguments["cuda"], arguments["cuda_config"])
    # The device is opened first: where there is none, nothing is read.
    finish, memory = on_its_way(config, arguments["storage"], "load_audio(cuda=)")
    num_samples = arguments["num_samples"]
    check_length("num_samples", num_samples, arguments["on_short"])
    decoding = as_decode_config(arguments["decode_config"])
    # FFmpeg takes a text; this one carries the operations for those who need no graph.
    text = FilterDesc(desc) if isinstance(desc, SoundOps) else desc
    request = AudioRequest(text, memory, decoding, num_samples, arguments["on_short"])
    audio = load_audio_array(
        src,
        parse_window(timestamp),
        request,
        stream_index=arguments["stream_index"],
        demux_config=arguments["demux_config"],
        name=arguments["name"],
    )
    return finish(audio.buffer)


@declared(BatchArguments)
def _prepare_image_batch(
    srcs: Iterable[Source], **arguments: Unpack[BatchArguments[DeviceLike | None]]
) -> ImageSteps:
    """Check the arguments of :func:`load_image_batch`, and return what loads the batch.

    Raises:
        ConvertError: There are no inputs.
        ValueError: An option is invalid, or there is not one crop or flip for each input.
        TypeError: An option has the wrong type, or ``srcs`` is no sequence.
    """
    # Before the sources are listed, which uses up an iterator.
    check_choice("on_error", arguments["on_error"], get_args(OnError))
    check_int("num_threads", arguments["num_threads"])
    inputs = as_list(srcs)
    if not inputs:
        raise ConvertError("there are no inputs to load: the sequence is empty")
    return _steps(inputs, _image_request(arguments, len(inputs)))


@declared(ImageArguments)
def image_request(**arguments: Unpack[ImageArguments[DeviceLike | None]]) -> FrameRequest:
    """Check the arguments of :func:`load_image`.

    Raises:
        ValueError: An option is invalid.
        TypeError: An option has the wrong type.
    """
    return _single_request(arguments)


def _single_request(arguments: Any) -> FrameRequest:
    return _image_request(arguments, 1, purpose="load_image(cuda=)", is_single=True)


def _steps(inputs: Sequence[Source], request: FrameRequest) -> ImageSteps:
    if request.config is None:
        return functools.partial(load_rows, inputs, request)
    # Whoever uses the CPU alone does not pay for the import of cuda/.
    from spdl_media.cuda.images import device_steps

    return device_steps(inputs, request, request.config)


def frame_steps(request: FrameRequest) -> Callable[[VideoPackets], TimedFrames]:
    """What makes frames in an array of packets, in host memory or on a device.

    Raises:
        ValueError: The device's decoder cannot make such frames.
        TransferError: There is no device.
    """
    if request.config is None:
        return lambda packets: load_frames(packets, request)
    # Here, too, so that only those who use a device import cuda/.
    from spdl_media.cuda.videos import device_frame_steps

    return device_frame_steps(request, request.config)


def _image_request(
    arguments: Any, count: int, purpose: str = "load_image_batch(cuda=)", **others: Any
) -> FrameRequest:
    request = frame_request(arguments, _IMAGE_OPS, purpose, count, ImageDecoder, **others)
    # Changed where it has to be: a copy takes as long as the check of five options.
    ops, changes = request.ops, dict[str, Any]()
    if request.is_plain and ops.pix_fmt is not None and is_yuv(ops.pix_fmt):
        # The colours of JPEG, whatever the file has, so that images of all formats make one array.
        matrix, color_range = PICTURE_COLORS
        changes["desc"] = replace(ops, color_matrix=matrix, color_range=color_range)
    elif request.is_plain and request.layout == "NCHW":
        changes["desc"] = ops.in_planes()
    if request.config is not None:
        # From pinned memory the copy to the device runs in the background.
        changes["storage"] = staging(request.storage)
    return replace(request, **changes) if changes else request


def frame_request(
    arguments: Any,
    defaults: PictureOps,
    purpose: str,
    count: int = 1,
    decoders: Any = VideoDecoder,
    **others: Any,
) -> FrameRequest:
    """Check the options of one load.

    Args:
        arguments: Of one of the classes below.
        defaults: What options become that are not given.
        purpose: The function, for messages.
        count: How many images are cut, each on its own.
        decoders: Who can decode on a device.
        others: Of the request, as they are.

    Raises:
        ValueError: An option is invalid.
        TypeError: An option has the wrong type.
    """
    # Functions lack some of these arguments; the request has defaults for them.
    given = {name: value for name, value in arguments.items() if name in _NAMES}
    if arguments["layout"] is not None:
        check_array_layout(arguments["layout"])
    count_asked, on_short = given.get("num_frames"), given.get("on_short")
    if count_asked is not None or on_short is not None:
        check_length("num_frames", count_asked, on_short)
    ops = PictureOps(**{name: arguments[name] for name in _PICTURE_OPS if name in arguments})
    config, decoder = None, "auto"
    if arguments["cuda"] is not None or arguments["cuda_config"] is not None:
        config = one_cuda_config(arguments["cuda"], arguments["cuda_config"])
    if "decoder" in given:
        decoder = given["decoder"]
        check_choice("decoder", decoder, get_args(decoders))
    if config is None and decoder not in ("auto", "cpu"):
        raise ValueError(
            f"decoder={decoder!r} decodes on a CUDA device, so it needs one: cuda=0. FFmpeg's decoders for "
            "the CPU are chosen by decode_config(decoder=)"
        )
    is_plain = isinstance(arguments["filter_desc"], Default)
    desc: Any = ops if is_plain else chosen_filter(ops, arguments["filter_desc"], defaults)
    values = cuts = None
    dtype, mean, std = arguments["dtype"], arguments["mean"], arguments["std"]
    if not dtype is mean is std is None:
        # What a graph of the caller's gives shows with the first image.
        values = parse_values(dtype, mean, std, pix_fmt=ops.pix_fmt if is_plain else None)
    crops, flips, rng = arguments["crops"], arguments["flips"], arguments["rng"]
    if crops is not None or flips is not None:
        cuts = CropPlan(count, crops, flips, rng)
    elif rng is not None:
        check_rng(rng)
    if (decoding := given.pop("decode_config", None)) is not None:
        given["decode_config"] = as_decode_config(decoding)
    return FrameRequest(
        ops=ops,
        desc=desc,
        cuts=cuts,
        is_plain=is_plain,
        values=values,
        config=config,
        purpose=purpose,
        **given,
        **others,
    )


# Arguments are explained once, at the function that is run.
_DOC = """Run :func:`~spdl_media.{}` in a thread; see there for arguments, result and errors.

``executor`` is where it runs; ``None`` for the default executor of the running loop. When the awaiting task
is cancelled, a call that has not begun never runs, and a batch ends before its next image.

Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
"""


def awaitable(load: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a function that runs another one in a thread, and has its overloads."""
    # Checks the arguments, and gives what does the work: a function of one that says whether to stop.
    prepare = _prepare_image_batch if load is load_image_batch else None

    async def call(*args: Any, executor: Executor | None = None, **arguments: Any) -> Any:
        # A coroutine runs, so it is imported already; importing the package should not bring it.
        import asyncio

        stopped = threading.Event()
        work: Callable[[], Any] = functools.partial(load, *args, **arguments)
        if prepare is not None:
            # In the loop's own thread: wrong arguments are told before the work waits for a thread.
            work = functools.partial(prepare(*args, **arguments), stopped.is_set)
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        finally:
            # Cancelling reaches the await alone; the thread asks before its next image.
            stopped.set()

    # Brings the annotations; name and docstring are then set anew.
    functools.update_wrapper(call, load)
    call.__name__ = call.__qualname__ = f"async_{load.__name__}"
    call.__module__ = load.__module__
    call.__doc__ = _DOC.format(load.__name__)
    signature = inspect.signature(load)
    executor = inspect.Parameter(
        "executor", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Executor | None"
    )
    parameters = [*signature.parameters.values(), executor]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return cast("Callable[P, Coroutine[Any, Any, T]]", call)


async_load_image = awaitable(load_image)
async_load_video = awaitable(load_video)
async_load_audio = awaitable(load_audio)
async_load_image_batch = awaitable(load_image_batch)
