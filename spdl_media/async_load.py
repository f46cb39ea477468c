"""The functions of :mod:`spdl_media.load` as awaitables, run in threads.

Each takes what its namesake takes, and ``executor=``: an executor of threads, or ``None`` for the default one
of the running loop. Cancelling stops what has not started: a call that waits for a thread never runs, and a
batch ends before its next image.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar, Unpack, overload

from spdl_media._arguments import (
    AudioArguments,
    BatchArguments,
    ClipArguments,
    DeviceLike,
    ImageArguments,
    VideoArguments,
)
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.inputs import Source
from spdl_media.load import (
    Clip,
    load_audio,
    load_clip,
    load_image,
    load_image_batch,
    load_video,
    prepare_image_batch,
)
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
    # A coroutine runs, so it is imported already; importing the package should not bring it.
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(executor, call)


def _awaitable(load: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a declaration into a function that runs ``load`` in a thread, with its signature."""

    def decorate(declaration: Callable[..., Any]) -> Any:
        # The declaration has the docstring and the overloads, load the arguments.
        @functools.wraps(declaration)
        async def call(*args: Any, executor: Executor | None = None, **arguments: Any) -> Any:
            return await _run(executor, partial(load, *args, **arguments))

        return _with_executor(call, load)

    return decorate


def _with_executor(call: Any, load: Callable[..., Any]) -> Any:
    """Give a function the signature of another one and ``executor=``."""
    signature = inspect.signature(load)
    executor = inspect.Parameter(
        "executor", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Executor | None"
    )
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), executor])
    return call


@overload
async def async_load_image(
    src: Source, *, executor: Executor | None = None, **arguments: Unpack[ImageArguments[None]]
) -> CPUBuffer: ...
@overload
async def async_load_image(
    src: Source,
    *,
    executor: Executor | None = None,
    **arguments: Unpack[ImageArguments[DeviceLike]],
) -> CUDABuffer: ...
@_awaitable(load_image)
def async_load_image(*args: Any, **arguments: Any) -> Any:
    """Run :func:`~spdl_media.load_image` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """


@overload
async def async_load_video(
    src: Source,
    timestamp: Timestamp | Window | None = None,
    *,
    executor: Executor | None = None,
    **arguments: Unpack[VideoArguments[None]],
) -> CPUBuffer: ...
@overload
async def async_load_video(
    src: Source,
    timestamp: Timestamp | Window | None = None,
    *,
    executor: Executor | None = None,
    **arguments: Unpack[VideoArguments[DeviceLike]],
) -> CUDABuffer: ...
@_awaitable(load_video)
def async_load_video(*args: Any, **arguments: Any) -> Any:
    """Run :func:`~spdl_media.load_video` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """


@overload
async def async_load_audio(
    src: Source,
    timestamp: Timestamp | Window | None = None,
    *,
    executor: Executor | None = None,
    **arguments: Unpack[AudioArguments[None]],
) -> CPUBuffer: ...
@overload
async def async_load_audio(
    src: Source,
    timestamp: Timestamp | Window | None = None,
    *,
    executor: Executor | None = None,
    **arguments: Unpack[AudioArguments[DeviceLike]],
) -> CUDABuffer: ...
@_awaitable(load_audio)
def async_load_audio(*args: Any, **arguments: Any) -> Any:
    """Run :func:`~spdl_media.load_audio` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """


async def async_load_clip(
    src: Source,
    start: Seconds,
    duration: Seconds,
    *,
    executor: Executor | None = None,
    **arguments: Unpack[ClipArguments[DeviceLike | None]],
) -> Clip:
    """Run :func:`~spdl_media.load_clip` in a thread; see there for arguments, result and errors.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
    """
    return await _run(executor, partial(load_clip, src, start, duration, **arguments))


_with_executor(async_load_clip, load_clip)


@overload
async def async_load_image_batch(
    srcs: Iterable[Source],
    *,
    executor: Executor | None = None,
    **arguments: Unpack[BatchArguments[None]],
) -> CPUBuffer: ...
@overload
async def async_load_image_batch(
    srcs: Iterable[Source],
    *,
    executor: Executor | None = None,
    **arguments: Unpack[BatchArguments[DeviceLike]],
) -> CUDABuffer: ...
async def async_load_image_batch(
    srcs: Iterable[Source],
    *,
    executor: Executor | None = None,
    **arguments: Unpack[BatchArguments[DeviceLike | None]],
) -> Buffer:
    """Run :func:`~spdl_media.load_image_batch` in a thread; see there for arguments, result and errors.

    When the awaiting task is cancelled, the batch ends before its next image.

    ``executor`` is where it runs; ``None`` for the default executor of the running loop.

    Thread safety: safe.
    """
    # In the loop's own thread: wrong arguments are told before the batch waits for a thread.
    load = prepare_image_batch(srcs, **arguments)
    stopped = threading.Event()
    try:
        return await _run(executor, partial(load, stopped.is_set))
    finally:
        # Cancelling reaches the await alone; the thread asks before its next image.
        stopped.set()


_with_executor(async_load_image_batch, load_image_batch)
