"""The functions of :mod:`spdl_media.load` as awaitables, run in threads.

Each takes what its namesake takes, and ``executor=``: an executor of threads, or ``None`` for the default one
of the running loop.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, cast

from spdl_media.clips import load_clip
from spdl_media.load import (
    load_audio,
    load_image,
    load_image_batch,
    load_video,
    prepare_image_batch,
)

__all__ = (
    "async_load_audio",
    "async_load_clip",
    "async_load_image",
    "async_load_image_batch",
    "async_load_video",
)

P = ParamSpec("P")
T = TypeVar("T")

_DOC = """Run :func:`~spdl_media.{}` in a thread; see there for arguments, result and errors.

``executor`` is where it runs; ``None`` for the default executor of the running loop. When the awaiting task
is cancelled, a call that has not begun never runs, and a batch ends before its next image.

Thread safety: safe, if nothing else uses a file-like ``src`` meanwhile.
"""


def _awaitable(load: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a function that runs another one in a thread, and has its overloads."""
    # Checks the arguments, and gives what does the work: a function of one that says whether to stop.
    prepare = prepare_image_batch if load is load_image_batch else None

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

    functools.update_wrapper(call, load)
    call.__name__ = call.__qualname__ = f"async_{load.__name__}"
    call.__module__ = __name__
    call.__doc__ = _DOC.format(load.__name__)
    signature = inspect.signature(load)
    executor = inspect.Parameter(
        "executor", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Executor | None"
    )
    parameters = [*signature.parameters.values(), executor]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return cast("Callable[P, Coroutine[Any, Any, T]]", call)


async_load_image = _awaitable(load_image)
async_load_video = _awaitable(load_video)
async_load_audio = _awaitable(load_audio)
async_load_clip = _awaitable(load_clip)
async_load_image_batch = _awaitable(load_image_batch)
