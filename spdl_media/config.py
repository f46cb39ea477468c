"""Options as frozen values, checked when they are made, and the functions that make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar, get_args

from spdl_media._checks import as_int, check_choice, check_int

__all__ = (
    "CUDAConfig",
    "DecodeConfig",
    "DemuxConfig",
    "OnCorrupt",
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


@dataclass(frozen=True, slots=True)
class _Config:
    """Base of options as values; their mappings are copies that cannot be written to."""

    def _set(self, **checked: object) -> None:
        # The classes are frozen, so what was checked is put in past their setter.
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        # The read-only views of the options are not picklable; the plain values are.
        plain = {each.name: _copied(getattr(self, each.name)) for each in fields(self)}
        return partial(type(self), **plain), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemuxConfig(_Config):
    """How a source is opened. ``demux_config`` is its other name.

    Args:
        format: Name of an FFmpeg demuxer (``"mp4"``, ``"s16le"``, ``"tga"``), for data without a
            signature of its own. The default lets FFmpeg find out.
        format_options: Options of the demuxer, such as ``{"sample_rate": 8000}`` for raw audio.
            Names are checked against what the format supports before it is opened.
        buffer_size: Bytes that FFmpeg asks for at a time from bytes, file-like objects and URLs.
        storage_options: Options of fsspec's file system for URLs: credentials, headers, timeouts. They are
            the file system's own: ``{"anon": True}`` for ``s3://``, and ``{"client_kwargs": {"timeout":
            aiohttp.ClientTimeout(total=10)}}`` for ``http://``, which otherwise waits up to five minutes.
            Those of a chained URL stand under the name of the protocol:
            ``{"simplecache": {"cache_storage": "/scratch"}}``. Other sources have no use for them. Copied,
            with the dictionaries and lists in them.

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
        self._set(
            format_options=string_options("format_options", self.format_options or {}),
            storage_options=MappingProxyType(_copied(storage)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(_Config):
    """How packets are decoded. ``decode_config`` is its other name.

    Args:
        decoder: Name of an FFmpeg decoder, where a codec has several (``"libvpx-vp9"``); ``"pillow"``: Pillow
            decodes stills and animations.
        decoder_options: Options of the decoder. Names are checked before it is opened. FFmpeg's
            threads default to 1, because a data pipeline runs many decoders at once; ``{"threads":
            4}`` changes that.
        orient: Turn frames upright (EXIF, display matrix) before they enter the filter graph.
        on_corrupt: What becomes of damage that the decoder notices: ``"raise"`` a
            :class:`~spdl_media.DecodeError`, ``"keep"`` the frame, marked in ``frames.is_corrupt``,
            or ``"drop"`` it, counted in ``frames.num_dropped``.
        downscale: ``"dct"`` lets large JPEG stills shrink while they are decoded, to 1/2, 1/4 or 1/8 of
            their sides but 1.2 times those of the result at least, by libjpeg-turbo; the filters then
            scale as they do without it. It needs the package simplejpeg. It has an effect on YCbCr images
            that a filter of this library scales to RGB; all others, and damaged ones, are decoded as usual.
        gaps: What becomes of times for which the file has no audio: ``"join"`` lets the samples behind a gap
            follow those before it; ``"fill"`` puts silence there, so that each sample stands at its time.
            A window with a start begins there; silence is not added behind the last sample of the file.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``on_corrupt``, ``downscale`` or ``gaps`` is none of its values.

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
        self._set(decoder_options=string_options("decoder_options", self.decoder_options or {}))


@dataclass(frozen=True, slots=True)
class CUDAConfig(_Config):
    """Where work for a CUDA device is done. ``cuda_config`` is its other name.

    Args:
        device_index: Number of the device, counted from 0 among those that the process sees.
        stream: The address of a ``cudaStream_t``, such as ``torch.cuda.Stream().cuda_stream`` or
            ``cupy.cuda.Stream().ptr``, on which copies are made: 0 and 1 are the default stream, 2 is that of
            the thread. It must be one of this device, and live as long as what is made on it. ``None``: a
            stream of the library's own, one for each thread.
        allocator: What gives memory of the device: ``(allocate, free)``, called as
            ``allocate(nbytes, device_index, stream)``, which returns an address, and ``free(address)``.
            PyTorch has ``torch.cuda.caching_allocator_alloc`` and ``torch.cuda.caching_allocator_delete``.
            ``None``: PyTorch's pool, or the driver's without PyTorch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A negative number.
    """

    device_index: int
    stream: int | None = None
    allocator: Allocator | None = None

    def __post_init__(self) -> None:
        self._set(device_index=check_int("device_index", self.device_index, at_least=0))
        if self.stream is not None:
            self._set(stream=check_int("stream", self.stream, at_least=0, remedy=_STREAM_HINT))
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


def string_options(name: str, options: Mapping[str, object]) -> Mapping[str, str]:
    # FFmpeg takes text. Numbers have one form in it; how to write anything else would be a guess.
    if not isinstance(options, Mapping):
        raise TypeError(f"{name} must be a mapping of option names to values, not {options!r}")
    strings = {}
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise TypeError(f"{name} maps str to str or numbers, not {key!r} to {value!r}")
        # FFmpeg's flags are 0 and 1, and "True" is none of its words for them.
        strings[key] = str(int(value) if isinstance(value, bool) else value)
    return MappingProxyType(strings)


def _copied(value: Any) -> Any:
    # Not by copy.deepcopy: options hold sessions and locks, too.
    if isinstance(value, dict | MappingProxyType):
        return {key: _copied(one) for key, one in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value


# What the functions give without arguments, made once: each still needs both.
DEFAULT_DEMUX_CONFIG = DemuxConfig()
DEFAULT_DECODE_CONFIG = DecodeConfig()


def as_demux_config(config: DemuxConfig | None) -> DemuxConfig:
    """The config, or the default one.

    Raises:
        TypeError: It is no :class:`DemuxConfig`.
    """
    return _or_default(config, DEFAULT_DEMUX_CONFIG, "demux_config")


def as_decode_config(config: DecodeConfig | None) -> DecodeConfig:
    """The config, or the default one.

    Raises:
        TypeError: It is no :class:`DecodeConfig`.
    """
    return _or_default(config, DEFAULT_DECODE_CONFIG, "decode_config")


def _or_default(config: Config | None, default: Config, name: str) -> Config:
    if config is None:
        return default
    if not isinstance(config, type(default)):
        raise TypeError(f"{name} must be made by spdl_media.{name}(), not {config!r}")
    return config


def as_cuda_config(config: CUDAConfig | SupportsIndex) -> CUDAConfig:
    """The config, or that of a device's number.

    Raises:
        TypeError: It is neither.
        ValueError: The number is negative.
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
    """The config that one of two arguments gives, or ``None``: no device.

    Raises:
        ValueError: Both are given.
        TypeError: It is neither a number nor a config.
    """
    if cuda is not None and cuda_config is not None:
        raise ValueError(
            f"cuda= and cuda_config= are one argument with two names, so give one of them, not {cuda!r} and "
            f"{cuda_config!r}"
        )
    given = cuda_config if cuda is None else cuda
    return None if given is None else as_cuda_config(given)
