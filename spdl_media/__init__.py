"""Decode images, video and audio into training batches, in threads.

Load a source in one call: :func:`load_image`, :func:`load_image_batch`, :func:`load_video`,
:func:`load_audio` and :func:`load_clip`. :func:`probe` tells what is in it.

Train with a :class:`DataLoader` over an :class:`ImageFolder`, :class:`Shards` or a list, with
:class:`ImageRecipe` or your own function as preprocessor. Such a function may call :func:`sample_clips` of a
:class:`VideoFile`, or :func:`sample_windows` of audio; :func:`collate` makes the batches.

Do it step by step with :func:`demux_video`, :func:`decode_packets`, :func:`convert_frames`, :func:`to_torch`
and the like::

    source -> demux -> packets -> decode -> frames -> convert -> buffer -> array

Write files with :func:`save_image`, :func:`save_video`, :func:`save_audio` and :func:`cut`.

Modules with further names: ``source``, samplers and sources that combine others; ``pipeline``, concurrent
pipelines of any functions; ``torch``, PyTorch's DataLoader in threads; ``ray``, decoders for Ray Data;
``testing``, media whose pixels hold their own index.

FFmpeg is part of PyAV's wheel; no system library is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# A star where the public names of a module need several lines; __all__ below has each of them.
from spdl_media._collate import Padded, collate
from spdl_media._ffmpeg import set_log_level
from spdl_media._probe import AudioStreamInfo, MediaInfo, OtherStreamInfo, VideoStreamInfo, probe
from spdl_media.array_formats.npy import load_npy
from spdl_media.array_formats.npz import NpzFile, load_npz
from spdl_media.array_formats.tar import iter_tarfile
from spdl_media.array_formats.wav import WAVHeader, load_wav, parse_wav
from spdl_media.array_frames import *
from spdl_media.arrays import to_cupy, to_jax, to_numba, to_numpy, to_torch
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer, Failure
from spdl_media.clips import Clip, async_load_clip, load_clip, sample_windows
from spdl_media.codec import AudioCodec, Codec, VideoCodec
from spdl_media.config import *
from spdl_media.convert import convert_array, convert_frames
from spdl_media.crops import RandomResizedCrop, ResizeCenterCrop, apply_crop
from spdl_media.decode import decode_packets
from spdl_media.decoders import AudioDecoder, VideoDecoder, sample_decode_video
from spdl_media.demux import apply_bsf, demux_audio, demux_image, demux_video
from spdl_media.demuxer import Demuxer
from spdl_media.encode import *
from spdl_media.errors import *
from spdl_media.filter_desc import get_audio_filter_desc, get_filter_desc, get_video_filter_desc
from spdl_media.filter_graph import FilterGraph, get_abuffer_desc, get_buffer_desc
from spdl_media.frames import AudioFrames, Frames
from spdl_media.image_files import encode_image, save_image
from spdl_media.image_frames import ImageFrames, VideoFrames
from spdl_media.inputs import Source
from spdl_media.load import *
from spdl_media.mux import Muxer
from spdl_media.packets import AudioPackets, ImagePackets, Packets, VideoPackets
from spdl_media.recipes import IMAGENET_MEAN, IMAGENET_STD, ImageRecipe
from spdl_media.save import cut, save_audio, save_video
from spdl_media.storage import CPUStorage, StorageInUseWarning, StoragePool, cpu_storage
from spdl_media.timing import Timestamp, Window
from spdl_media.transfer import *
from spdl_media.video_clips import VideoCache, VideoClips, sample_clips
from spdl_media.video_file import VideoFile

if TYPE_CHECKING:
    from spdl_media.cuda.capabilities import Capability, CUDACapabilities, cuda_capabilities
    from spdl_media.cuda.color import nv12_to_bgr, nv12_to_rgb
    from spdl_media.cuda.images import *
    from spdl_media.cuda.videos import decode_packets_nvdec, streaming_load_video_nvdec
    from spdl_media.dataloader import DataLoader
    from spdl_media.datasets import ImageFolder, Mix
    from spdl_media.samplers import BatchByLength
    from spdl_media.shards import Shards, iter_samples

# In the order of the modules above. Added row by row, because the formatter would give each name of one long
# list a line of its own.
__all__ = ["ConvertError", "DecodeError", "DemuxError", "FilterError", "MediaError", "SourceError"]
__all__ += ["MissingDependencyError", "PictureSizeError", "StorageTooSmallError", "TransferError"]
__all__ += ["EncodeError", "WriteError"]
__all__ += ["CUDAConfig", "DecodeConfig", "DemuxConfig"]
__all__ += ["cuda_config", "decode_config", "demux_config"]
__all__ += ["Source", "Timestamp", "Window", "set_log_level"]
__all__ += ["AudioCodec", "Codec", "VideoCodec"]
__all__ += ["AudioPackets", "ImagePackets", "Packets", "VideoPackets"]
__all__ += ["Demuxer", "apply_bsf", "demux_audio", "demux_image", "demux_video"]
__all__ += ["AudioStreamInfo", "MediaInfo", "OtherStreamInfo", "VideoStreamInfo", "probe"]
__all__ += ["get_audio_filter_desc", "get_filter_desc", "get_video_filter_desc"]
__all__ += ["FilterGraph", "get_abuffer_desc", "get_buffer_desc"]
__all__ += ["AudioFrames", "Frames", "ImageFrames", "VideoFrames"]
__all__ += ["create_reference_audio_frame", "create_reference_video_frame", "frames_from_array"]
__all__ += ["AudioDecoder", "VideoDecoder", "decode_packets"]
__all__ += ["CPUStorage", "StorageInUseWarning", "StoragePool", "cpu_storage"]
__all__ += ["Buffer", "CPUBuffer", "CUDABuffer", "Failure"]
__all__ += ["Padded", "collate", "convert_array", "convert_frames"]
__all__ += ["to_cupy", "to_jax", "to_numba", "to_numpy", "to_torch"]
__all__ += ["transfer_buffer", "transfer_buffer_cpu", "transfer_tensor", "transfer_tensor_d2h"]
__all__ += ["Clip", "load_audio", "load_clip", "load_image", "load_image_batch", "load_video"]
__all__ += ["async_load_audio", "async_load_clip", "async_load_image", "async_load_image_batch"]
__all__ += ["RandomResizedCrop", "ResizeCenterCrop", "apply_crop", "async_load_video"]
__all__ += ["IMAGENET_MEAN", "IMAGENET_STD", "ImageRecipe"]
__all__ += ["AudioEncodeConfig", "VideoEncodeConfig", "audio_encode_config", "video_encode_config"]
__all__ += ["Muxer", "cut", "encode_image", "save_audio", "save_image", "save_video"]
__all__ += ["ArrayFormatError", "NpzFile", "WAVHeader", "iter_samples", "iter_tarfile"]
__all__ += ["load_npy", "load_npz", "load_wav", "parse_wav"]
__all__ += ["CPUFallbackWarning", "CUDACapabilities", "Capability", "cuda_capabilities"]
__all__ += ["decode_image_nvjpeg", "load_image_batch_nvjpeg"]
__all__ += ["decode_packets_nvdec", "streaming_load_video_nvdec"]
__all__ += ["nv12_to_bgr", "nv12_to_rgb"]
__all__ += ["BatchByLength", "DataLoader", "ImageFolder", "Mix", "Shards", "sample_windows"]
__all__ += ["VideoCache", "VideoClips", "VideoFile", "sample_clips", "sample_decode_video"]

# Modules imported at first use, because they import asyncio or are rarely needed.
_LAZY_MODULES = ("dataloader", "pipeline", "ray", "source")

# Public names that are imported at first use, by module. Type checkers read the imports above instead.
_LAZY_NAMES = {
    "cuda.capabilities": ("CUDACapabilities", "Capability", "cuda_capabilities"),
    "cuda.color": ("nv12_to_bgr", "nv12_to_rgb"),
    "cuda.videos": ("decode_packets_nvdec", "streaming_load_video_nvdec"),
    "cuda.images": ("CPUFallbackWarning", "decode_image_nvjpeg", "load_image_batch_nvjpeg"),
    "dataloader": ("DataLoader",),
    "datasets": ("ImageFolder", "Mix"),
    "samplers": ("BatchByLength",),
    "shards": ("Shards", "iter_samples"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"spdl_media.{name}")
    for module, names in _LAZY_NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"spdl_media.{module}"), name)
    raise AttributeError(f"module 'spdl_media' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
