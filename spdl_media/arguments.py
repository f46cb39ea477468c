"""Arguments that the ``load_*`` functions share: types, defaults, documentation and checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import fields
from typing import Any, Generic, Literal, SupportsIndex, TypeAlias, TypedDict, TypeVar, get_args

import numpy as np

from spdl_media._checks import check_choice, with_defaults
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig
from spdl_media.crops import Crops, Flips, Rng
from spdl_media.decode import DEFAULT_FILTER, Default
from spdl_media.geometry import ScaleMode
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps, Quality, ScaleAlgo, SoundOps
from spdl_media.rows import ArrayLayout, DType, OnShort, PerChannel, Values, ValueType
from spdl_media.storage import Storage
from spdl_media.timing import Rate

OnError: TypeAlias = Literal["raise", "skip", "fill"]
ImageDecoder: TypeAlias = Literal["auto", "cpu", "dali"]
VideoDecoder: TypeAlias = Literal["auto", "cpu", "dali", "nvdec"]
DeviceLike: TypeAlias = CUDAConfig | SupportsIndex

# None for results in host memory, DeviceLike for results on a device. Each has an overload.
Device = TypeVar("Device")
Function = TypeVar("Function", bound=Callable[..., Any])


def as_list(srcs: Iterable[Source], *, one: str = "load_image") -> list[Source]:
    """Return the sources of a batch as a list.

    Args:
        srcs: The sources.
        one: Name of the function for a single source, used in the error message.

    Raises:
        TypeError: ``srcs`` is a single source, or not iterable.
    """
    if isinstance(srcs, list) or (isinstance(srcs, Iterable) and not _is_one_source(srcs)):
        return list(srcs)
    raise TypeError(
        f"a batch is a sequence of sources, such as a list of paths, not {type(srcs).__name__}; {one} takes "
        "one source"
    )


def _is_one_source(srcs: Any) -> bool:
    """Whether an iterable is a single source: a string, a file object, a buffer or a 1-D uint8 array."""
    if hasattr(srcs, "__array__"):  # other arrays may hold sources
        dtype = str(getattr(srcs, "dtype", "")).removeprefix("torch.")
        return dtype == "uint8" and srcs.ndim == 1
    # A file object has no length; a collection of files has one.
    if isinstance(srcs, str) or (hasattr(srcs, "read") and not hasattr(srcs, "__len__")):
        return True
    try:
        memoryview(srcs)
    except TypeError:
        return False
    return True


def check_array_layout(layout: str | None) -> None:
    """Check an order of axes.

    Raises:
        ValueError: ``layout`` is not ``"NCHW"``, ``"NHWC"`` or ``None``.
    """
    remedy = "convert_frames(layout='planes') gives one array a plane"
    check_choice("layout", layout, (*get_args(ArrayLayout), None), remedy=remedy)


def own_filter(
    filter_desc: str | None, ops: PictureOps | SoundOps, default: PictureOps | SoundOps
) -> str | None:
    """Return the caller's filter graph, beside which no options may be given.

    Raises:
        ValueError: ``filter_desc`` is given together with options that differ from the default.
    """
    if ops is default:
        return filter_desc
    # Compared by value, so a default may also be passed explicitly.
    for name in (field.name for field in fields(default)):
        if getattr(ops, name) != getattr(default, name):
            raise ValueError(
                f"filter_desc= is the whole filter graph, so {name}={getattr(ops, name)!r} would have no "
                "effect. Give one of them; get_video_filter_desc and get_audio_filter_desc write graphs with "
                "filters of your own in them"
            )
    return filter_desc


def parse_values(dtype: Any, mean: Any, std: Any, *, pix_fmt: str | None) -> Values:
    """Check the options ``dtype``, ``mean`` and ``std``, of which at least one is given.

    Args:
        dtype: Type of the result, if given.
        mean: A number, or a sequence, array or tensor of numbers, if given.
        std: A number, or a sequence, array or tensor of numbers, if given.
        pix_fmt: Format of the pixels, if it is known.

    Raises:
        TypeError: ``mean`` or ``std`` are not numbers.
        ValueError: The type is unknown, numbers are out of range or do not match the channels, ``std`` is not
            positive, ``mean`` or ``std`` are given without a float type, or the format cannot be converted.
    """
    if not isinstance(dtype, str | None):
        # The name of np.float32, np.dtype("float32") or torch.float32.
        dtype = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    check_choice("dtype", dtype, (*get_args(DType), None))
    if dtype in (None, "uint8"):
        if mean is not None or std is not None:
            remedy = "give dtype='float32' or 'float16' beside them"
            raise ValueError(f"mean= and std= are for floats: {remedy}")
        values = Values(dtype)
    else:
        means = (0.0,) if mean is None else _numbers("mean", mean)
        values = Values(dtype, means, (1.0,) if std is None else _numbers("std", std))
    if pix_fmt is not None and (reason := values.refusal(pix_fmt)):
        raise ValueError(reason)
    return values


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    try:
        array = np.asarray(given)
        numbers = tuple(array.astype(np.float64).ravel().tolist())
        if array.dtype.kind not in "iuf" or array.ndim > 1:
            raise TypeError  # gets its message below
    # PyTorch raises RuntimeError for tensors on a GPU.
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a number, or one for each channel, not {given!r}"
        ) from error
    # A smaller std loses digits as float32.
    least, limits = (1e-37, "above 0 and at most 1") if name == "std" else (-1.0, "from -1 to 1")
    if not numbers or not all(least <= number <= 1 for number in numbers):
        raise ValueError(
            f"{name} must be {limits}, because pixels become 0 to 1, not {given!r}. Divide numbers for 0 "
            "to 255 by 255"
        )
    return numbers


SOUND_OPS = SoundOps()
"""Default operations, made once: making them takes as long as checking all arguments of a call."""


def audio_options(arguments: Any) -> SoundOps:
    """Make the audio operations that the arguments ask for.

    Raises:
        ValueError: An option is invalid.
    """
    given = {name: arguments[name] for name in AudioOptions.__annotations__}
    # By identity: a call that leaves them out has the very default values.
    if all(value is _DEFAULTS.get(name) for name, value in given.items()):
        return SOUND_OPS
    return SoundOps(**given)


class _Device(TypedDict, Generic[Device], total=False):
    """Device of the result.

    Attributes:
        cuda: Index of a CUDA device, or a :func:`~spdl_media.cuda_config`, for a result on that device.
        cuda_config: Another name of ``cuda``. Pass only one of them.
    """

    cuda: Device
    cuda_config: Device


class _Arguments(_Device[Device], total=False):
    """Options of demuxing and decoding.

    Attributes:
        demux_config: Options of opening the source; see :func:`~spdl_media.demux_config`.
        decode_config: Options of decoding; see :func:`~spdl_media.decode_config`.
    """

    demux_config: DemuxConfig | None
    decode_config: DecodeConfig | None
    # Only the async_* functions take it. It is declared for all, because a ParamSpec cannot add it.
    executor: Executor | None


class ImageOptions(TypedDict, total=False):
    """Size, format and type of images and frames.

    Attributes:
        width: Width of the result in pixels. If only ``width`` or ``height`` is given, the aspect ratio is
            kept; if neither is, the size is.
        height: Height of the result in pixels.
        pix_fmt: FFmpeg's name of the pixel format; ``None`` keeps the decoder's format. YUV of
            stills has the BT.601 matrix and full range, as in JPEG, whatever the file has.
        scale_mode: With both ``width`` and ``height``: ``"pad"`` scales the image to fit inside and adds a
            black border, ``"crop"`` scales it to cover the size and crops the rest, ``None`` stretches.
        scale_algo: FFmpeg's scaling algorithm, such as ``"bicubic"``, ``"bilinear"`` or ``"area"``.
        quality: Accuracy of scaling and conversion; see :func:`~spdl_media.get_video_filter_desc`.
        layout: Order of the axes of RGB and gray: ``"NCHW"``, which is ``(C, H, W)`` for one image, or
            ``"NHWC"``. ``None``: that of the format, for ``rgb24`` ``"NHWC"``.
        dtype: ``"float32"`` or ``"float16"`` converts RGB and gray to ``(value / 255 - mean) / std``, as
            torchvision does (16-bit formats to ``value / 65535``); ``"uint8"`` refuses formats of other
            types. Dtypes of NumPy and PyTorch with these names do the same. ``None``: the type of the format.
        mean: A number for each channel of the result, or one for all; -1 to 1. The default is 0.
        std: A number for each channel of the result, or one for all; above 0, at most 1. The default is 1.
    """

    width: int | None
    height: int | None
    pix_fmt: str | None
    scale_mode: ScaleMode | None
    scale_algo: ScaleAlgo
    quality: Quality
    layout: ArrayLayout | None
    dtype: ValueType | None
    mean: PerChannel | None
    std: PerChannel | None


class AudioOptions(TypedDict, total=False):
    """Rate, channels and format of audio.

    Attributes:
        sample_rate: Sample rate of the result in Hz; ``None`` keeps that of the source.
        num_channels: Number of channels, mixed up or down to FFmpeg's default layout for that number.
            ``None`` keeps those of the source.
        sample_fmt: FFmpeg's name of the sample format; ``None`` keeps the decoder's format.
    """

    sample_rate: int | None
    num_channels: int | None
    sample_fmt: str | None


class _Result(TypedDict, total=False):
    """Filter graph and memory of the result.

    Attributes:
        filter_desc: A complete filter graph, which replaces the options for size, rate, channels and format;
            these must keep their defaults. ``None``: no graph, and images are not turned upright.
        storage: Memory for the result; ``None``: fresh memory. With ``cuda=``, memory for the decoded data in
            the host, from which it is copied to the device; ``None``: fresh pinned memory.
    """

    filter_desc: str | Default | None
    storage: Storage | None


class _Stream(_Result, total=False):
    """The stream to load.

    Attributes:
        stream_index: Index of the stream in its container. The default is the one that FFmpeg finds best.
        name: Name of the source in messages.
    """

    stream_index: int | None
    name: str | None


class _Length(TypedDict, total=False):
    """Length of the result.

    Attributes:
        num_frames: Maximum number of frames; with ``on_short``, the exact number. No more frames are decoded
            than needed.
        num_samples: Maximum number of samples per channel; with ``on_short``, the exact number.
        on_short: What to do if the source has fewer frames or samples: ``"error"`` raises a ConvertError,
            ``"repeat_last"`` repeats the last one, ``"wrap"`` continues with the first ones, ``"zeros"`` adds
            zeros (silence). ``None``: the result is shorter.
    """

    on_short: OnShort | None


class _Cuts(TypedDict, total=False):
    """Crops and horizontal flips of images.

    Attributes:
        crops: The part of the upright image to use, cut out before scaling: a box ``(x, y, width, height)``
            in pixels, or a function ``f((width, height), rng)`` that returns a box or ``None`` (the whole
            image), such as :class:`~spdl_media.RandomResizedCrop`. Or a sequence of boxes, functions and
            ``None``, one per image. All frames of a video are cropped by one box, which a function chooses
            for the size that the header states. ``buffer.boxes`` has the boxes that were used.
        flips: Whether to mirror the image horizontally: a bool, a probability, or bools as a sequence, 1-D
            array or tensor, one per image. ``buffer.flips`` says which images were mirrored. With crops or
            flips, images are turned upright, whatever ``filter_desc``.
        rng: Source of random numbers for crop functions and flip probabilities: a NumPy generator, or a
            seed. Each image of a batch has random numbers of its own. ``None``: unpredictable numbers.
    """

    crops: Crops | None
    flips: Flips | None
    rng: Rng | None


class ImageArguments(ImageOptions, _Cuts, _Result, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_image`."""

    name: str | None
    decoder: ImageDecoder


class BatchArguments(ImageOptions, _Cuts, _Result, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_image_batch`, which documents those that only it has."""

    on_error: OnError
    num_threads: int
    decoder: ImageDecoder


class VideoArguments(ImageOptions, _Cuts, _Stream, _Length, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_video`.

    Attributes:
        frame_rate: Frames per second of the result. Frame ``k`` is the source frame that is shown at
            ``start + k / frame_rate``, where ``start`` is the window's start, or else the time of the first
            frame. A gap that takes more than 108,000 copies of a frame is a FilterError.
        decoder: The decoder to use with ``cuda=``. ``"dali"`` (and ``"nvdec"`` for video) decodes on the
            device. ``"cpu"`` decodes on the CPU and copies the result. ``"auto"`` uses the first of these
            that is installed and gives the right result; if that is the CPU although a decoder for the
            device is installed, a ``CPUFallbackWarning`` gives the reason.
    """

    num_frames: int | None
    frame_rate: Rate | None
    decoder: VideoDecoder


class FrameArguments(ImageOptions, _Cuts, _Result, _Device[Device], total=False):
    """Arguments of :meth:`~spdl_media.VideoFile.load`, which documents those that only it has."""


class ClipSampleArguments(FrameArguments[Device], AudioOptions, total=False):
    """Arguments of :func:`~spdl_media.sample_clips`, which documents those that only it has."""


class AudioArguments(AudioOptions, _Stream, _Length, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_audio`."""

    num_samples: int | None


class ClipArguments(ImageOptions, _Cuts, AudioOptions, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_clip`, which documents those that only it has."""

    num_frames: int | None
    num_samples: int | None
    on_short: OnShort
    frame_rate: Rate | None
    video_storage: Storage | None
    audio_storage: Storage | None
    video_stream_index: int | None
    audio_stream_index: int | None
    name: str | None
    decoder: VideoDecoder


# Default values; arguments that are not listed default to None.
_DEFAULTS: dict[str, Any] = {
    "pix_fmt": "rgb24",
    "scale_mode": "pad",
    "scale_algo": "bicubic",
    "quality": "accurate",
    "sample_fmt": "fltp",
    "filter_desc": DEFAULT_FILTER,
    "on_error": "raise",
    "num_threads": 1,
    "decoder": "auto",
}

# The "Attributes:" sections of these classes document the arguments in the docstrings of all functions.
_DECLARATIONS: tuple[type, ...] = (_Device, _Arguments, ImageOptions, _Cuts, AudioOptions)
_DECLARATIONS += (_Result, _Stream, _Length, VideoArguments)


def _texts() -> dict[str, str]:
    """Return the documentation of each argument, formatted as an entry of a docstring's "Args:"."""
    docs = "\n".join(inspect.getdoc(one) or "" for one in _DECLARATIONS)
    # An entry is a line "    name: text" and all deeper indented lines that follow.
    entries = re.finditer(r"^    (\w+): .*(?:\n {8}.*)*", docs, re.MULTILINE)
    source = """\
    src: A path, a URL for fsspec, bytes or another C-contiguous buffer, a 1-D uint8 array or CPU
        tensor, or a binary file-like object."""
    return {"src": source} | {entry[1]: entry[0] for entry in entries}


_TEXTS = _texts()


def declared(arguments: Any, **defaults: Any) -> Callable[[Function], Function]:
    """Make a decorator for functions of ``**arguments: Unpack[...]``.

    The signature and docstring of the decorated function list the arguments of the ``TypedDict``. The
    function receives all of them, with defaults for those that the caller leaves out. An unknown argument
    raises a ``TypeError`` that suggests a similar one.

    Args:
        arguments: The ``TypedDict``.
        defaults: Default values that differ from those of other functions.
    """
    # Only the async_* functions have the executor.
    hints = {name: hint for name, hint in arguments.__annotations__.items() if name != "executor"}
    # Made only once, because every call copies it.
    filled = {name: {**_DEFAULTS, **defaults}.get(name) for name in hints}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        names = [parameter.name for parameter in own]
        call = with_defaults(function, filled, [*names, *filled])
        kind = inspect.Parameter.KEYWORD_ONLY
        keywords = [
            inspect.Parameter(name, kind, default=filled[name], annotation=_annotation(hint))
            for name, hint in hints.items()
        ]
        vars(call)["__signature__"] = signature.replace(parameters=[*own, *keywords])
        explained = [name for name in names if name != "self"]
        call.__doc__ = _documented(function.__doc__, [*explained, *filled])
        return call  # type: ignore[return-value]  # with the signature of the function

    return decorate


def _annotation(hint: Any) -> str:
    """Return the text of an annotation, which a ``TypedDict`` keeps in a ``ForwardRef``."""
    text = str(getattr(hint, "__forward_arg__", hint))
    # The type variable differs between overloads; show the union.
    return "DeviceLike | None" if text == "Device" else text


def _documented(doc: str | None, names: list[str]) -> str | None:
    """Add the shared documentation of arguments that the docstring does not describe itself."""
    # Under python -OO there is no docstring.
    if doc is None or "Returns:" not in doc:
        return doc
    doc = inspect.cleandoc(doc)
    missing = [_TEXTS[name] for name in names if f"\n    {name}: " not in doc]
    # Shared arguments follow those that the function documents itself.
    own, returns = doc.split("\n\nReturns:")
    section = [] if "\nArgs:" in own else ["\nArgs:"]
    return "\n".join([own, *section, *missing]) + f"\n\nReturns:{returns}"
