"""The arguments that the functions of ``load`` share: types, defaults, texts and checks, each once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import fields
from typing import (
    Any,
    Generic,
    Literal,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
)

from spdl_media._checks import check_choice, did_you_mean
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig
from spdl_media.crops import Crops, Flips, Rng
from spdl_media.decode import DEFAULT_FILTER, Default
from spdl_media.geometry import ScaleMode
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps, Quality, ScaleAlgo, SoundOps
from spdl_media.row_plan import ArrayLayout, DType, OnShort, PerChannel
from spdl_media.storage import Storage
from spdl_media.timing import Rate

OnError: TypeAlias = Literal["raise", "skip", "fill"]
ImageDecoder: TypeAlias = Literal["auto", "cpu", "dali"]
VideoDecoder: TypeAlias = Literal["auto", "cpu", "dali", "pyav"]
DeviceLike: TypeAlias = CUDAConfig | SupportsIndex

# ``None`` for results in host memory, DeviceLike for results on a device: an overload each.
Device = TypeVar("Device")
Ops = TypeVar("Ops", PictureOps, SoundOps)
Function = TypeVar("Function", bound=Callable[..., Any])


def as_list(srcs: Iterable[Source], *, one: str = "load_image") -> list[Source]:
    """The sources of a batch; ``one`` is the function that takes a single one, for the error.

    Raises:
        TypeError: It is a single source, or cannot be iterated.
    """
    if isinstance(srcs, Iterable) and not _is_one_source(srcs):
        return list(srcs)
    raise TypeError(
        f"a batch is a sequence of sources, such as a list of paths, not one of {type(srcs).__name__}; "
        f"{one} takes one"
    )


def _is_one_source(srcs: Any) -> bool:
    """Whether something iterable is a single source all the same."""
    if hasattr(srcs, "__array__"):  # of more dimensions or other types, it may hold sources
        dtype = str(getattr(srcs, "dtype", "")).removeprefix("torch.")
        return dtype == "uint8" and srcs.ndim == 1
    # A list-like of files has a length, a file has none.
    if isinstance(srcs, str) or (hasattr(srcs, "read") and not hasattr(srcs, "__len__")):
        return True
    try:
        memoryview(srcs)
    except TypeError:
        return False
    return True


def check_array_layout(layout: str | None) -> None:
    """Refuse an unknown order of axes.

    Raises:
        ValueError: It is neither of the two, nor ``None``.
    """
    remedy = "convert_frames(layout='planes') gives one array a plane"
    check_choice("layout", layout, (*get_args(ArrayLayout), None), remedy=remedy)


def chosen_filter(ops: Ops, filter_desc: str | Default | None, default: Ops) -> Ops | str | None:
    """The caller's own graph, or what the options ask for.

    Raises:
        ValueError: ``filter_desc`` is given beside options that differ from the default.
    """
    if isinstance(filter_desc, Default):
        return ops
    # Compared by value: whether a default was written out makes no difference.
    for name in (field.name for field in fields(default)):
        if getattr(ops, name) != getattr(default, name):
            raise ValueError(
                f"filter_desc= is the whole filter graph, so {name}={getattr(ops, name)!r} would have no "
                "effect. Give one of them; get_video_filter_desc and get_audio_filter_desc write graphs with "
                "filters of your own in them"
            )
    return filter_desc


def audio_options(arguments: Any) -> SoundOps:
    """What the arguments ask of audio.

    Raises:
        ValueError: An option is invalid.
    """
    return SoundOps(**{name: arguments[name] for name in AudioOptions.__annotations__})


class _Device(TypedDict, Generic[Device], total=False):
    """Where results lie.

    Attributes:
        cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`: the result lies there.
        cuda_config: The same by another name; give one of them.
    """

    cuda: Device
    cuda_config: Device


class _Arguments(_Device[Device], total=False):
    """How data is read.

    Attributes:
        demux_config: How to open the source; see :func:`~spdl_media.demux_config`.
        decode_config: How to decode; see :func:`~spdl_media.decode_config`.
    """

    demux_config: DemuxConfig | None
    decode_config: DecodeConfig | None
    # Of the async_* functions alone, which have the types of their namesakes: a ParamSpec cannot add it.
    executor: Executor | None


class ImageOptions(TypedDict, total=False):
    """How images and frames come out.

    Attributes:
        width: Width of the result. Without ``height`` the aspect ratio is kept; without both, the size.
        height: Height of the result.
        pix_fmt: FFmpeg's name of the pixel format; ``None`` keeps what the decoder gives. YUV of
            stills has the matrix of BT.601 and full range, as in JPEG, whatever the file has.
        scale_mode: With both sides given, ``"pad"`` fits the whole image inside a black border,
            ``"crop"`` covers the whole size and cuts off the rest, ``None`` stretches.
        scale_algo: Name of FFmpeg's scaling algorithm.
        quality: How exact scaling and conversion are; see :func:`~spdl_media.get_video_filter_desc`.
        layout: ``"NCHW"`` or ``"NHWC"`` for RGB and gray.
        dtype: ``"float32"`` or ``"float16"`` makes ``(value / 255 - mean) / std`` of RGB and gray, as
            torchvision does (of 16 bits, ``value / 65535``); ``"uint8"`` refuses formats of other types.
        mean: A number for each channel of the result, or one for all; 0 without it.
        std: Likewise; 1 without it.
    """

    width: int | None
    height: int | None
    pix_fmt: str | None
    scale_mode: ScaleMode | None
    scale_algo: ScaleAlgo
    quality: Quality
    layout: ArrayLayout | None
    dtype: DType | None
    mean: PerChannel | None
    std: PerChannel | None


class AudioOptions(TypedDict, total=False):
    """How audio comes out.

    Attributes:
        sample_rate: Samples of one channel in a second.
        num_channels: Channels, mixed up or down to FFmpeg's usual layout of that many.
        sample_fmt: FFmpeg's name of the sample format; ``None`` keeps what the decoder gives.
    """

    sample_rate: int | None
    num_channels: int | None
    sample_fmt: str | None


class _Result(TypedDict, total=False):
    """The graph and the memory of one result.

    Attributes:
        filter_desc: A whole filter graph of your own. It replaces the options for size, rate, channels
            and format, which must keep their defaults. ``None``: no graph, and images are not turned upright.
        storage: Memory to fill; fresh memory without one. With ``cuda=``, memory that decoded data passes
            through on its way to the device; fresh pinned memory without one.
    """

    filter_desc: str | Default | None
    storage: Storage | None


class _Stream(_Result, total=False):
    """The stream to load.

    Attributes:
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        name: What to call the source in messages.
    """

    stream_index: int | None
    name: str | None


class _Length(TypedDict, total=False):
    """How long results are.

    Attributes:
        num_frames: At most this many frames, and with ``on_short`` exactly; no more are decoded than needed.
        num_samples: At most this many samples of each channel, and with ``on_short`` exactly.
        on_short: What becomes of fewer: ``"error"`` raises a ConvertError, ``"repeat_last"`` repeats the last
            one, ``"wrap"`` goes on from the first, ``"zeros"`` adds zeros, which are silence. ``None``: they
            stay fewer.
    """

    on_short: OnShort | None


class _Cuts(TypedDict, total=False):
    """What is cut out of images and mirrored.

    Attributes:
        crops: What to cut out before anything else: a box ``(x, y, width, height)`` in pixels of the upright
            image, or a function that chooses one, ``f((width, height), rng)``, such as
            :class:`~spdl_media.RandomResizedCrop`; its ``None`` means all of the image. Or a sequence of
            boxes, functions and ``None``, one an image. ``buffer.boxes`` says what was cut out. All frames of
            a video have one box, drawn for the size that its header states.
        flips: Whether to exchange left and right of what was cut out: a bool, the probability of it, or bools
            as a sequence or a 1-D array or tensor, one an image. ``buffer.flips`` says which were. With
            crops or flips, images are turned upright, whatever ``filter_desc``.
        rng: What functions and probabilities draw from: a generator of NumPy's, or a seed. Each image of a
            batch has numbers of its own. ``None``: others each time.
    """

    crops: Crops | None
    flips: Flips | None
    rng: Rng | None


class ImageArguments(ImageOptions, _Cuts, _Result, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_image`."""

    name: str | None
    decoder: ImageDecoder


class BatchArguments(ImageOptions, _Cuts, _Result, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_image_batch`, which explains those of its own."""

    on_error: OnError
    num_threads: int
    decoder: ImageDecoder


class VideoArguments(ImageOptions, _Cuts, _Stream, _Length, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_video`.

    Attributes:
        frame_rate: Frames a second. Frame ``k`` is the one that is shown at ``start + k / frame_rate``, with
            ``start`` that of the window, or the time of the first frame.
        decoder: With ``cuda=``: ``"dali"`` (and ``"pyav"`` for video) decodes on the device, ``"cpu"`` on
            the CPU, and copies; ``"auto"`` takes the first that is installed and gives the right result.
            A ``CPUFallbackWarning`` says why, if that is the CPU although the device's decoder is installed.
    """

    num_frames: int | None
    frame_rate: Rate | None
    decoder: VideoDecoder


class FrameArguments(ImageOptions, _Cuts, _Result, _Device[Device], total=False):
    """Arguments of :meth:`~spdl_media.VideoFile.load`, which explains those of its own."""


class ClipSampleArguments(FrameArguments[Device], AudioOptions, total=False):
    """Arguments of :func:`~spdl_media.sample_clips`, which explains those of its own."""


class AudioArguments(AudioOptions, _Stream, _Length, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_audio`."""

    num_samples: int | None


class ClipArguments(ImageOptions, _Cuts, AudioOptions, _Arguments[Device], total=False):
    """Arguments of :func:`~spdl_media.load_clip`, which explains those of its own."""

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


# Those that are not listed are None by default.
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

# Their sections "Attributes:" explain the arguments to the users of all functions.
_DECLARATIONS = (
    *(
        _Device,
        _Arguments,
        ImageOptions,
        _Cuts,
        AudioOptions,
        _Result,
        _Stream,
        _Length,
        VideoArguments,
    ),
)


def _texts() -> dict[str, str]:
    """The text of each argument, in the form of a docstring's section."""
    docs = "\n".join(inspect.getdoc(one) or "" for one in _DECLARATIONS)
    # A name behind four spaces, with all lines that stand further in.
    entries = re.finditer(r"^    (\w+): .*(?:\n {8}.*)*", docs, re.MULTILINE)
    source = """\
    src: A path, a URL for fsspec, bytes or another C-contiguous buffer, a 1-D uint8 array or CPU
        tensor, or a binary file-like object."""
    return {"src": source} | {entry[1]: entry[0] for entry in entries}


_TEXTS = _texts()


def declared(arguments: Any, **defaults: Any) -> Callable[[Function], Function]:
    """Make a function of ``**arguments: Unpack[...]`` one with the arguments of the ``TypedDict``.

    The function gets all arguments, with defaults for those that were not given. Its signature and
    docstring list them.

    Args:
        arguments: The class.
        defaults: Where they differ from those of other functions.

    Raises:
        TypeError: In calls of the function: it has no such argument; the message has what is meant.
    """
    # The executor is an argument of the async_* functions alone.
    hints = {name: hint for name, hint in arguments.__annotations__.items() if name != "executor"}
    # Made once, because each call begins with a copy of it.
    filled = {name: {**_DEFAULTS, **defaults}.get(name) for name in hints}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        known = {*filled, *(parameter.name for parameter in own)}

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            # Python would let them through: the function takes any keywords.
            if not given.keys() <= known:
                raise _unexpected(function, given, known)
            return function(*args, **{**filled, **given})

        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=filled[name],
                annotation=_annotation(hint),
            )
            for name, hint in hints.items()
        ]
        vars(call)["__signature__"] = signature.replace(parameters=[*own, *keywords])
        explained = [one.name for one in own if one.name != "self"]
        call.__doc__ = _documented(function.__doc__, [*explained, *filled])
        return cast("Function", call)

    return decorate


def _annotation(hint: Any) -> str:
    """The text of an annotation; a ``TypedDict`` keeps it in a ForwardRef."""
    text = str(getattr(hint, "__forward_arg__", hint))
    # The variable stands for what differs between overloads.
    return "DeviceLike | None" if text == "Device" else text


def _unexpected(function: Any, given: dict[str, Any], known: set[str]) -> TypeError:
    name = next(name for name in given if name not in known)
    hint = did_you_mean(name, known)
    return TypeError(
        f"{function.__name__}() got an unexpected keyword argument {name!r}{hint and '. ' + hint}"
    )


def _documented(doc: str | None, names: list[str]) -> str | None:
    """Add the shared texts of arguments that the docstring does not explain itself."""
    # There is no docstring under python -OO.
    if doc is None or "Returns:" not in doc:
        return doc
    doc = inspect.cleandoc(doc)
    missing = [_TEXTS[name] for name in names if f"\n    {name}: " not in doc]
    # Shared arguments stand behind those that the function explains itself.
    own, returns = doc.split("\n\nReturns:")
    section = [] if "\nArgs:" in own else ["\nArgs:"]
    return "\n".join([own, *section, *missing]) + f"\n\nReturns:{returns}"
