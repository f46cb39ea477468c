"""The functions of :mod:`spdl_media.load` as awaitables, run in threads.

Each takes what its namesake takes, and ``executor=``: an executor of threads, or ``None`` for the default one
of the running loop. Cancelling stops what has not started: a call that waits for a thread never runs, and a
batch ends before its next picture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from spdl_media._loading.batch import ArrayLayout, OnError
from spdl_media._loading.device_pictures import batch_steps
from spdl_media._loading.on_device import DeviceLike, PictureDecoder, VideoDecoder
from spdl_media._loading.pictures import CropPlan, Flips
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.crops import Box
from spdl_media.cuda_buffer import Buffer
from spdl_media.decode import DEFAULT_FILTER, Default
from spdl_media.inputs import Source
from spdl_media.load import (
    Clip,
    load_audio,
    load_clip,
    load_image,
    load_video,
)
from spdl_media.operations import PictureOps, Quality, Rate, ScaleAlgo, ScaleMode
from spdl_media.storage import Storage
from spdl_media.timing import Seconds, Timestamp, Window

__all__ = (
    "async_load_audio",
    "async_load_clip",
    "async_load_image",
    "async_load_image_batch",
    "async_load_video",
)

T = TypeVar("T")


async def _run(executor: Executor | None, call: Callable[[], T]) -> T:
    import asyncio  # a coroutine runs, so it is there; importing the package should not bring it

    return await asyncio.get_running_loop().run_in_executor(executor, call)


async def async_load_image(
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
    executor: Executor | None = None,
) -> Buffer:
    """Run :func:`~spdl_media.load_image` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """
    return await _run(
        executor,
        partial(
            load_image,
            src,
            width=width,
            height=height,
            pix_fmt=pix_fmt,
            scale_mode=scale_mode,
            scale_algo=scale_algo,
            quality=quality,
            filter_desc=filter_desc,
            demux_config=demux_config,
            decode_config=decode_config,
            storage=storage,
            layout=layout,
            name=name,
            cuda=cuda,
            cuda_config=cuda_config,
            decoder=decoder,
        ),
    )


async def async_load_image_batch(
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
    executor: Executor | None = None,
) -> Buffer:
    """Run :func:`~spdl_media.load_image_batch` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop. When the
    awaiting task is cancelled, the batch ends before its next picture.

    Thread safety: safe.
    """
    load = batch_steps(
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
    stopped = threading.Event()
    try:
        return await _run(executor, partial(load, stopped.is_set))
    finally:
        stopped.set()


async def async_load_video(
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
    executor: Executor | None = None,
) -> Buffer:
    """Run :func:`~spdl_media.load_video` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """
    return await _run(
        executor,
        partial(
            load_video,
            src,
            timestamp,
            width=width,
            height=height,
            pix_fmt=pix_fmt,
            scale_mode=scale_mode,
            scale_algo=scale_algo,
            quality=quality,
            frame_rate=frame_rate,
            num_frames=num_frames,
            stream_index=stream_index,
            filter_desc=filter_desc,
            demux_config=demux_config,
            decode_config=decode_config,
            storage=storage,
            layout=layout,
            name=name,
            cuda=cuda,
            cuda_config=cuda_config,
            decoder=decoder,
        ),
    )


async def async_load_audio(
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
    executor: Executor | None = None,
) -> Buffer:
    """Run :func:`~spdl_media.load_audio` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """
    return await _run(
        executor,
        partial(
            load_audio,
            src,
            timestamp,
            sample_rate=sample_rate,
            num_channels=num_channels,
            sample_fmt=sample_fmt,
            num_frames=num_frames,
            stream_index=stream_index,
            filter_desc=filter_desc,
            demux_config=demux_config,
            decode_config=decode_config,
            storage=storage,
            name=name,
            cuda=cuda,
            cuda_config=cuda_config,
        ),
    )


async def async_load_clip(
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
    executor: Executor | None = None,
) -> Clip:
    """Run :func:`~spdl_media.load_clip` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """
    return await _run(
        executor,
        partial(
            load_clip,
            src,
            start,
            duration,
            width=width,
            height=height,
            pix_fmt=pix_fmt,
            scale_mode=scale_mode,
            scale_algo=scale_algo,
            quality=quality,
            frame_rate=frame_rate,
            sample_rate=sample_rate,
            num_channels=num_channels,
            sample_fmt=sample_fmt,
            demux_config=demux_config,
            decode_config=decode_config,
            video_storage=video_storage,
            audio_storage=audio_storage,
            layout=layout,
            name=name,
            cuda=cuda,
            cuda_config=cuda_config,
            decoder=decoder,
        ),
    )
