"""Load a source as an array in one call, also from asyncio: demux, decode, convert and transfer."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, cast, get_args, overload

from spdl_media._checks import check_choice, check_int, unknown_argument
from spdl_media.arguments import (
    SOUND_OPS,
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
    declared,
    own_filter,
    parse_values,
)
from spdl_media.audio_arrays import AudioRequest, load_audio_array
from spdl_media.batch import PICTURE_COLORS, FrameRequest, load_rows
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.config import DEFAULT_DECODE_CONFIG, as_decode_config, one_cuda_config
from spdl_media.crops import CropPlan, check_rng
from spdl_media.decode import Default
from spdl_media.demuxer import Demuxer
from spdl_media.errors import ConvertError
from spdl_media.formats import is_yuv
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.packets import VideoPackets
from spdl_media.rows import check_length
from spdl_media.timing import Timestamp, Window, parse_window
from spdl_media.transfer import on_its_way, staging
from spdl_media.video_arrays import TimedFrames, load_frames, load_video_array

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
"""Loads images. Takes a function, called before each image, that tells whether to stop."""

When: TypeAlias = Timestamp | Window | None

# Default operations, made once: making one takes as long as checking all arguments of a call.
_IMAGE_OPS, VIDEO_OPS = PictureOps(), PictureOps(quality="auto")

# Names of arguments that become operations, and names of the fields of a request.
_PICTURE_OPS = "width height pix_fmt scale_mode scale_algo quality frame_rate".split()
_NAMES = {field.name for field in fields(FrameRequest)}

_ON_ERROR, _IMAGE_DECODERS, _VIDEO_DECODERS = map(get_args, (OnError, ImageDecoder, VideoDecoder))


@overload
def load_image(src: Source, **arguments: Unpack[ImageArguments[None]]) -> CPUBuffer: ...
@overload
def load_image(src: Source, **arguments: Unpack[ImageArguments[DeviceLike]]) -> CUDABuffer: ...
@declared(ImageArguments)
def load_image(src: Source, **arguments: Unpack[ImageArguments[DeviceLike | None]]) -> Buffer:
    """Load one image, upright; of a video, the first frame.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(height, width, 3)``
        uint8, values 0 to 255, for ``rgb24``. See the table of :mod:`spdl_media.formats` for other formats.
        For YUV, ``buffer.colorspace`` and ``buffer.color_range`` give matrix and range of the values.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source has no image.
        DecodeError: The image is damaged.
        MissingDependencyError: fsspec for a URL, or Pillow or simplejpeg for the image, is not installed.
        FilterError: The image cannot be scaled to the size, or ``filter_desc`` cannot be used.
        ConvertError: The format has no array layout, the crop exceeds the image, or storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or its memory is exhausted.
        ValueError: An option is invalid, or is given with a ``filter_desc`` that replaces it.
        TypeError: ``src`` is not a source, or an option has the wrong type.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.

    Example:
        >>> sm.load_image("photo.jpg", width=224, height=224, scale_mode="crop")
        <CPUBuffer: (224, 224, 3) uint8>
    """
    return _steps([src], _image_request(arguments, 1, "load_image(cuda=)", is_single=True))(None)


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

    To use several cores, load several batches concurrently, or set ``num_threads``.

    Args:
        srcs: An iterable of images, each as for :func:`load_image`.
        width: Width of the result. Without ``height`` the aspect ratio is kept. Without both, all images
            must have the same size: one that differs raises, whatever ``on_error`` is.
        pix_fmt: FFmpeg's name of the pixel format. With ``None``, all images must have the same format and,
            if it is YUV, the same matrix and range; so must the output of a ``filter_desc``.
        storage: Memory to fill; by default, new memory. It is leased when the first image is decoded.
        on_error: What to do if an image cannot be opened, read or decoded, or its crop exceeds it:
            ``"raise"`` the error, with the name and position of the input; ``"skip"`` the image, so that
            the batch has fewer rows; or ``"fill"`` its row with zeros.
        num_threads: Number of images decoded concurrently on the CPU. The calling thread is one of the
            threads; the others exist during the call. Rows and failures do not depend on the number; of
            several errors, the one of the lowest position that was seen is raised.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(B, height, width, 3)``
        uint8 for ``rgb24``. ``buffer.failures`` lists the inputs that could not be loaded and why,
        ``buffer.indices`` the position of each row in ``srcs``, ``buffer.valid`` a mask of the rows that are
        images.

    Raises:
        SourceError: An input cannot be opened or read, with ``on_error="raise"``.
        DemuxError: An input is not an image, with ``on_error="raise"``.
        DecodeError: An input is damaged, with ``on_error="raise"``.
        MissingDependencyError: fsspec, Pillow or simplejpeg is needed, with ``on_error="raise"``.
        FilterError: An image cannot be scaled to the size, or ``filter_desc`` cannot be used.
        ConvertError: There are no inputs, none could be loaded, they differ in size, format, matrix or range,
            the format has no array layout, a crop exceeds its image, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or its memory is exhausted.
        ValueError: An option is invalid, or the number of crops or flips differs from that of inputs.
        TypeError: ``srcs`` is a single source, or an input is not a source.

    Thread safety: safe, if no other thread uses the ``rng``.
    """
    return _prepare_image_batch(srcs, **arguments)(None)


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

    Packets are read while decoding, and frames are converted to rows at once: apart from the array, at most
    16 MiB of coded data are in memory, however long the video is. Reading stops after ``num_frames``. With
    ``cuda=`` all packets of the window are read first.

    Args:
        src: A path, URL, bytes, uint8 array, CPU tensor or file-like object, as for :func:`load_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock; ``None`` leaves a
            side open. Exactly the frames with ``start <= t < end`` are loaded.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(N, height, width, 3)``
        uint8 for ``rgb24``.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not media, or has no such stream.
        DecodeError: The video is damaged.
        MissingDependencyError: fsspec for a URL, or Pillow for an animation, is not installed.
        FilterError: ``filter_desc`` cannot be used, or a gap is too long for ``frame_rate``.
        ConvertError: No frame lies in the window (whatever ``on_short`` is), or too few, the crop exceeds the
            frame, the format has no array layout, or the storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or its memory is exhausted.
        ValueError: The window is empty, or an option is invalid.
        TypeError: ``src`` is not a source, or ``timestamp`` or an option has the wrong type.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.

    Example:
        >>> sm.load_video("clip.mp4", (1.5, 3.0), width=112, height=112)
        <CPUBuffer: (45, 112, 112, 3) uint8>
    """
    request = frame_request(arguments, VIDEO_OPS, "load_video(cuda=)")
    index = arguments["stream_index"]
    if request.config is None:
        return load_video_array(src, timestamp, request, index)
    # The device is opened first, so that nothing is read if there is none.
    decode, config, name = frame_steps(request), request.demux_config, request.name
    with Demuxer(src, demux_config=config, name=name) as demuxer:
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
        cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`, for a result on the device. The
            CPU decodes, and the samples are copied to the device.

    Returns:
        A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`: ``(channels, samples)``
        float32 for ``fltp``, -1 to 1; ``(samples, channels)`` for packed formats. ``buffer.sample_rate`` is
        its rate.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not media, or has no such stream.
        DecodeError: The audio is damaged.
        MissingDependencyError: The source is a URL, and fsspec is not installed.
        FilterError: ``filter_desc`` cannot be used.
        ConvertError: No sample lies in the window (and ``on_short`` is not ``"zeros"``), or too few, or the
            storage is too small.
        TransferError: With ``cuda=``: there is no CUDA device, or its memory is exhausted.
        ValueError: The window is empty, or an option is invalid.
        TypeError: ``src`` is not a source, or ``timestamp`` or an option has the wrong type.

    Thread safety: safe, if no other thread uses a file-like ``src``.

    Example:
        >>> sm.load_audio("clip.mp4", (1.5, 3.0), sample_rate=16000, num_channels=1)
        <CPUBuffer: (1, 24000) float32>
    """
    desc: Any = audio_options(arguments)
    if not isinstance(arguments["filter_desc"], Default):
        desc = own_filter(arguments["filter_desc"], desc, SOUND_OPS)
    finish, memory = None, arguments["storage"]
    if arguments["cuda"] is not None or arguments["cuda_config"] is not None:
        config = one_cuda_config(arguments["cuda"], arguments["cuda_config"])
        finish, memory = on_its_way(config, memory, "load_audio(cuda=)")
    count, on_short = arguments["num_samples"], arguments["on_short"]
    if count is not None or on_short is not None:
        count = check_length("num_samples", count, on_short)
    given, opening = arguments["decode_config"], arguments["demux_config"]
    decoding = DEFAULT_DECODE_CONFIG if given is None else as_decode_config(given)
    request = AudioRequest(desc, memory, decoding, count, on_short)
    window, stream, name = parse_window(timestamp), arguments["stream_index"], arguments["name"]
    buffer, _ = load_audio_array(src, window, request, stream, opening, name)
    return buffer if finish is None else finish(buffer)


@declared(BatchArguments)
def _prepare_image_batch(
    srcs: Iterable[Source], **arguments: Unpack[BatchArguments[DeviceLike | None]]
) -> ImageSteps:
    """Check the arguments of :func:`load_image_batch`, and return a function that loads the batch."""
    # Checked before the sources are listed, which exhausts an iterator.
    check_choice("on_error", arguments["on_error"], _ON_ERROR)
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
    return _image_request(arguments, 1, "load_image(cuda=)", is_single=True)


def _steps(inputs: Sequence[Source], request: FrameRequest) -> ImageSteps:
    if request.config is None:
        return functools.partial(load_rows, inputs, request)
    # Imported here, so that CPU users do not pay for it.
    from spdl_media.cuda.images import device_steps

    return device_steps(inputs, request, request.config)


def frame_steps(request: FrameRequest) -> Callable[[VideoPackets], TimedFrames]:
    """Return a function that decodes packets to an array of frames, in host memory or on a device.

    Raises:
        ValueError: The device's decoder cannot produce such frames.
        TransferError: There is no device.
    """
    if request.config is None:
        return lambda packets: load_frames(packets, request)
    from spdl_media.cuda.videos import device_frame_steps

    return device_frame_steps(request, request.config)


def _image_request(
    arguments: Any, count: int, purpose: str = "load_image_batch(cuda=)", **others: Any
) -> FrameRequest:
    request = frame_request(arguments, _IMAGE_OPS, purpose, count, _IMAGE_DECODERS, **others)
    # Copied only if something changes: a copy takes as long as the check of five options.
    ops, changes = request.ops, dict[str, Any]()
    if request.is_plain and ops.pix_fmt is not None and is_yuv(ops.pix_fmt):
        # Matrix and range of JPEG, whatever the file has, so that all images fit in one array.
        matrix, color_range = PICTURE_COLORS
        changes["desc"] = replace(ops, color_matrix=matrix, color_range=color_range)
    elif request.is_plain and request.layout == "NCHW":
        changes["desc"] = ops.in_planes()
    if request.config is not None:
        # Pinned memory, so that the copy to the device is asynchronous.
        changes["storage"] = staging(request.storage)
    return replace(request, **changes) if changes else request


def frame_request(
    arguments: Any,
    defaults: PictureOps,
    purpose: str,
    count: int = 1,
    decoders: tuple[str, ...] = _VIDEO_DECODERS,
    **others: Any,
) -> FrameRequest:
    """Check the options of one load.

    Args:
        arguments: Arguments of the function, complete.
        defaults: Operations without any option given, to detect options beside a ``filter_desc``.
        purpose: The calling function, for messages.
        count: Number of images, each with its own crop.
        decoders: Allowed values of ``decoder``.
        others: Further fields of the request.

    Raises:
        ValueError: An option is invalid.
        TypeError: An option has the wrong type.
    """
    # No function has all of these arguments; the request has defaults for the others.
    given = {name: value for name, value in arguments.items() if name in _NAMES}
    if arguments["layout"] is not None:
        check_array_layout(arguments["layout"])
    lengths = given.get("num_frames"), given.get("on_short")
    given["num_frames"] = check_length("num_frames", *lengths)
    chosen = {name: arguments[name] for name in _PICTURE_OPS if name in arguments}
    changed = [name for name in chosen if chosen[name] is not getattr(defaults, name)]
    ops = PictureOps(**chosen) if changed else defaults
    if arguments["cuda"] is not None or arguments["cuda_config"] is not None:
        given["config"] = one_cuda_config(arguments["cuda"], arguments["cuda_config"])
    decoder = given.get("decoder", "auto")
    check_choice("decoder", decoder, decoders)
    if "config" not in given and decoder not in ("auto", "cpu"):
        raise ValueError(
            f"decoder={decoder!r} decodes on a CUDA device, so it needs one: cuda=0. FFmpeg's decoders for "
            "the CPU are chosen by decode_config(decoder=)"
        )
    is_plain = isinstance(arguments["filter_desc"], Default)
    desc: Any = ops if is_plain else own_filter(arguments["filter_desc"], ops, defaults)
    dtype, mean, std = arguments["dtype"], arguments["mean"], arguments["std"]
    if any(value is not None for value in (dtype, mean, std)):
        # The output format of the caller's graph is known only with the first image.
        given["values"] = parse_values(dtype, mean, std, pix_fmt=ops.pix_fmt if is_plain else None)
    crops, flips, rng = arguments["crops"], arguments["flips"], arguments["rng"]
    if crops is not None or flips is not None:
        given["cuts"] = CropPlan(count, crops, flips, rng)
    elif rng is not None:
        check_rng(rng)
    if (decoding := given.pop("decode_config", None)) is not None:
        given["decode_config"] = as_decode_config(decoding)
    return FrameRequest(ops=ops, desc=desc, is_plain=is_plain, purpose=purpose, **given, **others)


# Arguments are documented only at the synchronous function.
_DOC = """Run :func:`~spdl_media.{}` in a thread; see there for arguments, result and errors.

``executor`` runs the call; ``None`` is the default executor of the running loop. When the awaiting task is
cancelled, a call that has not begun never runs, and a batch stops before its next image.

Thread safety: safe, if nothing else uses a file-like ``src`` during the call.
"""


def awaitable(load: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a coroutine function that runs ``load`` in a thread, with the overloads of ``load``."""
    # Checks the arguments and returns the work: a function whose argument tells whether to stop.
    prepare = _prepare_image_batch if load is load_image_batch else None
    signature = inspect.signature(load)

    async def call(*args: Any, executor: Executor | None = None, **arguments: Any) -> Any:
        # Already imported here, because a coroutine is running; importing the package must not import it.
        import asyncio

        if not arguments.keys() <= (known := signature.parameters.keys()):
            raise unknown_argument(call.__name__, arguments, known, {})
        stopped = threading.Event()
        work: Callable[[], Any] = functools.partial(load, *args, **arguments)
        if prepare is not None:
            # In the loop's thread, so that wrong arguments raise before the work waits for a thread.
            work = functools.partial(prepare(*args, **arguments), stopped.is_set)
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        finally:
            # Cancellation ends only the await, so the thread checks this before its next image.
            stopped.set()

    functools.update_wrapper(call, load)  # copies the annotations; the rest is replaced below
    call.__name__ = call.__qualname__ = f"async_{load.__name__}"
    call.__doc__ = _DOC.format(load.__name__)
    executor = inspect.Parameter(
        "executor", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Executor | None"
    )
    signature = signature.replace(parameters=[*signature.parameters.values(), executor])
    vars(call)["__signature__"] = signature
    return cast("Callable[P, Coroutine[Any, Any, T]]", call)


async_load_image = awaitable(load_image)
async_load_video = awaitable(load_video)
async_load_audio = awaitable(load_audio)
async_load_image_batch = awaitable(load_image_batch)
