"""Frozen option values, which are checked when they are made, and the functions that make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar, get_args

from spdl_media._checks import as_int, check_choice, check_int, with_argument_hints

__all__ = (
    "CUDAConfig",
    "DecodeConfig",
    "DemuxConfig",
    "cuda_config",
    "decode_config",
    "demux_config",
)

Allocator: TypeAlias = tuple[Callable[[int, int, int], int], Callable[[int], object]]
OnCorrupt = Literal["raise", "keep", "drop"]
Downscale = Literal["dct"]
Gaps = Literal["join", "fill"]
Config = TypeVar("Config", "DemuxConfig", "DecodeConfig")

_MIN_BUFFER_SIZE = 1024
_STREAM_HINT = "It is the address of a cudaStream_t, such as torch.cuda.Stream().cuda_stream"


def _set(config: object, **checked: object) -> None:
    # The classes are frozen, so set the checked values without their __setattr__.
    for name, value in checked.items():
        object.__setattr__(config, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemuxConfig:
    """Options of opening a source. ``demux_config`` is another name of this class.

    Args:
        format: Name of an FFmpeg demuxer (``"mp4"``, ``"s16le"``), for data without a signature.
            The default lets FFmpeg detect the format.
        format_options: Options of the demuxer, such as ``{"sample_rate": 8000}`` for raw audio.
            Names that the demuxer does not support raise an error when the source is opened. Stills that
            need no container, such as JPEG and PNG, have no demuxer and ignore the options.
        buffer_size: Number of bytes that FFmpeg reads at a time from bytes, file-like objects and URLs.
        storage_options: Options of fsspec's file system for URLs, such as credentials, headers and timeouts.
            Each file system has its own: ``{"anon": True}`` for ``s3://``, and ``{"client_kwargs":
            {"timeout": aiohttp.ClientTimeout(total=10)}}`` for ``http://``, whose default is five minutes.
            Options of a part of a chained URL are given under the name of its protocol:
            ``{"simplecache": {"cache_storage": "/scratch"}}``. Other sources ignore them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``buffer_size`` is not a whole number of at least 1024.

    See:
        FFmpeg's formats and their options: https://ffmpeg.org/ffmpeg-formats.html
    """

    format: str | None = None
    format_options: Mapping[str, Any] = field(default_factory=dict)
    buffer_size: int = 32768
    # May hold passwords, so it is left out of the repr.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.format is not None and not isinstance(self.format, str):
            raise TypeError(f"format must be a str, such as 'mp4', not {self.format!r}")
        check_int("buffer_size", self.buffer_size, at_least=_MIN_BUFFER_SIZE, unit=" bytes")
        storage = {} if self.storage_options is None else self.storage_options
        if not isinstance(storage, Mapping) or not all(isinstance(key, str) for key in storage):
            raise TypeError(
                f"storage_options must be a mapping of fsspec's options by name, not {storage!r}"
            )
        _set(
            self,
            format_options=string_options("format_options", self.format_options or {}),
            storage_options=dict(storage),
        )


@with_argument_hints({"threads": "Use decoder_options={'threads': n}"})
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Options of decoding packets. ``decode_config`` is another name of this class.

    Args:
        decoder: Name of an FFmpeg decoder, for codecs that have several (``"libvpx-vp9"``); ``"pillow"``
            decodes stills and animations with Pillow.
        decoder_options: Options of the decoder. Names that it does not support raise an error before it is
            opened. The decoder has one thread by default, because a data pipeline runs many decoders at
            once; ``{"threads": 4}`` changes that.
        orient: Whether to turn frames upright (by EXIF or display matrix) before they enter the filter graph.
        on_corrupt: What to do about damage that the decoder detects: ``"raise"`` a
            :class:`~spdl_media.DecodeError`, ``"keep"`` the frame, marked in ``frames.is_corrupt``,
            or ``"drop"`` it, counted in ``frames.num_dropped``.
        downscale: ``"dct"`` scales large JPEG stills down while they are decoded by libjpeg-turbo: to 1/2,
            1/4 or 1/8 of their sides, but no smaller than 1.2 times the result. The filters then scale to
            the size of the result. It needs the package simplejpeg. It applies to YCbCr images that a filter
            of this library scales to RGB; all others, and damaged ones, are decoded as usual.
        gaps: What to do with gaps, times for which the file has no audio: ``"join"`` leaves them out, so that
            the samples after a gap directly follow those before it. ``"fill"`` fills them with silence, so
            that each sample is at its time. With ``"fill"``, audio begins at the start of the window if it
            has one, but no silence is added after the last sample of the file. A gap of more than an hour is
            damage.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``on_corrupt``, ``downscale`` or ``gaps`` is not one of its values.

    See:
        FFmpeg's codecs and their options: https://ffmpeg.org/ffmpeg-codecs.html
    """

    decoder: str | None = None
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    orient: bool = True
    on_corrupt: OnCorrupt = "raise"
    downscale: Downscale | None = None
    gaps: Gaps = "join"

    def __post_init__(self) -> None:
        if self.decoder is not None and not isinstance(self.decoder, str):
            raise TypeError(f"decoder must be a str, such as 'h264', not {self.decoder!r}")
        if not isinstance(self.orient, bool):
            raise TypeError(f"orient must be True or False, not {self.orient!r}")
        check_choice("on_corrupt", self.on_corrupt, get_args(OnCorrupt))
        check_choice("downscale", self.downscale, (*get_args(Downscale), None))
        check_choice("gaps", self.gaps, get_args(Gaps))
        _set(self, decoder_options=string_options("decoder_options", self.decoder_options or {}))


@dataclass(frozen=True, slots=True)
class CUDAConfig:
    """Device, stream and allocator of results on a device. ``cuda_config`` is another name of this class.

    Args:
        device_index: Index of the device, from 0, among those that the process sees.
        stream: Address of the ``cudaStream_t`` on which copies are made, such as
            ``torch.cuda.Stream().cuda_stream`` or ``cupy.cuda.Stream().ptr``. 0 and 1 are the legacy default
            stream, 2 is the per-thread default stream. The stream must belong to the device, and exist as
            long as the buffers made on it. ``None``: a stream of the library, one for each thread.
        allocator: Allocator of device memory, a tuple ``(allocate, free)``.
            ``allocate(nbytes, device_index, stream)`` returns an address, which ``free(address)`` takes.
            PyTorch has ``torch.cuda.caching_allocator_alloc`` and ``torch.cuda.caching_allocator_delete``.
            ``None``: PyTorch's memory pool, or without PyTorch that of the driver.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``device_index`` or ``stream`` is negative.
    """

    device_index: int
    stream: int | None = None
    allocator: Allocator | None = None

    def __post_init__(self) -> None:
        _set(self, device_index=check_int("device_index", self.device_index, at_least=0))
        if self.stream is not None:
            _set(self, stream=check_int("stream", self.stream, at_least=0, remedy=_STREAM_HINT))
        allocator = self.allocator
        if allocator is not None and not (
            isinstance(allocator, tuple) and len(allocator) == 2 and all(map(callable, allocator))
        ):
            raise TypeError(
                "allocator must be a tuple of two functions, allocate(nbytes, device_index, stream) and "
                f"free(address), not {allocator!r}"
            )


demux_config = DemuxConfig
decode_config = DecodeConfig
cuda_config = CUDAConfig


def string_options(name: str, options: Mapping[str, object]) -> dict[str, str]:
    # FFmpeg's options are text. Other types than strings and numbers have no definite form as text.
    if not isinstance(options, Mapping):
        raise TypeError(f"{name} must be a mapping of option names to values, not {options!r}")
    strings = {}
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, str | Real):
            raise TypeError(f"{name} maps str to str or numbers, not {key!r} to {value!r}")
        # FFmpeg accepts 0 and 1 for flags, but not "True".
        strings[key] = str(int(value) if isinstance(value, bool) else value)
    return strings


# The default values, made only once, because loading a still image needs both of them every time.
DEFAULT_DEMUX_CONFIG = DemuxConfig()
DEFAULT_DECODE_CONFIG = DecodeConfig()


@lru_cache
def format_config(format: str, decoders: str | None = None) -> DemuxConfig:
    """Return the configuration that opens a known format, and may try these decoders only; ``None``: any."""
    options = {} if decoders is None else {"codec_whitelist": decoders}
    return DemuxConfig(format=format, format_options=options)


def as_demux_config(config: DemuxConfig | None) -> DemuxConfig:
    """Return the config, or the default one for ``None``.

    Raises:
        TypeError: ``config`` is not a :class:`DemuxConfig`.
    """
    return _or_default(config, DEFAULT_DEMUX_CONFIG, "demux_config")


def as_decode_config(config: DecodeConfig | None) -> DecodeConfig:
    """Return the config, or the default one for ``None``.

    Raises:
        TypeError: ``config`` is not a :class:`DecodeConfig`.
    """
    return _or_default(config, DEFAULT_DECODE_CONFIG, "decode_config")


def as_indexing_config(config: DecodeConfig | None) -> DecodeConfig:
    """Check a config for frames by index; ``None`` is the default.

    Raises:
        TypeError: ``config`` is not a DecodeConfig.
        ValueError: It drops frames.
    """
    config = as_decode_config(config)
    if config.on_corrupt == "drop":
        raise ValueError(
            "decode_config(on_corrupt='drop') would change the indices of the frames. Use 'keep' or 'raise'"
        )
    return config


def _or_default(config: Config | None, default: Config, name: str) -> Config:
    if config is None:
        return default
    if not isinstance(config, type(default)):
        raise TypeError(f"{name} must be made by spdl_media.{name}(), not {config!r}")
    return config


def as_cuda_config(config: CUDAConfig | SupportsIndex) -> CUDAConfig:
    """Return the config, or make one from the index of a device.

    Raises:
        TypeError: ``config`` is neither.
        ValueError: The index is negative.
    """
    if isinstance(config, CUDAConfig):
        return config
    if (number := as_int(config)) is None:
        raise TypeError(
            f"cuda_config must be the number of a device, such as 0, or made by cuda_config(), not {config!r}"
        )
    return CUDAConfig(number)


def one_cuda_config(
    cuda: CUDAConfig | SupportsIndex | None, cuda_config: CUDAConfig | SupportsIndex | None
) -> CUDAConfig | None:
    """Return the config that one of the two arguments gives; ``None`` if neither does.

    Raises:
        ValueError: Both arguments are given.
        TypeError: The argument is neither an index nor a config.
    """
    if cuda is not None and cuda_config is not None:
        raise ValueError(
            f"cuda= and cuda_config= are one argument with two names, so give one of them, not {cuda!r} and "
            f"{cuda_config!r}"
        )
    given = cuda_config if cuda is None else cuda
    return None if given is None else as_cuda_config(given)
