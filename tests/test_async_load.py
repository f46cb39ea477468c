"""The asynchronous functions: the same results, in threads, and no further work after a cancellation."""

from __future__ import annotations

import asyncio
import inspect
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_frames,
    index_samples,
    make_image,
    make_media,
)

PICTURES = index_frames(4, 40, 30)
SOURCES = [make_image(picture) for picture in PICTURES]
CLIP = make_media(
    [
        VideoTrack(frames=index_frames(10, 32, 24), codec="ffv1", pix_fmt="bgr0"),
        AudioTrack(samples=index_samples(8000, 2), sample_rate=8000, codec="flac"),
    ]
)
NAMES = ["load_image", "load_image_batch", "load_video", "load_audio", "load_clip"]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_the_namesake(name: str) -> None:
    ours = dict(inspect.signature(getattr(sm, f"async_{name}")).parameters)
    executor = ours.pop("executor")
    assert executor.kind is inspect.Parameter.KEYWORD_ONLY
    assert executor.default is None
    assert ours == dict(inspect.signature(getattr(sm, name)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_awaitable_forms_take_an_executor(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'executor'"):
        getattr(sm, name)(b"", executor=None)


def test_results_are_the_same() -> None:
    async def load() -> list[Any]:
        return await asyncio.gather(
            sm.async_load_image(SOURCES[0], width=20),
            sm.async_load_image_batch(SOURCES, width=16, height=16, flips=[True] * 4),
            sm.async_load_video(CLIP, (0.2, 0.5)),
            sm.async_load_audio(CLIP, (0.25, 0.5)),
        )

    image, batch, video, audio = map(np.asarray, asyncio.run(load()))
    np.testing.assert_array_equal(image, np.asarray(sm.load_image(SOURCES[0], width=20)))
    expected = sm.load_image_batch(SOURCES, width=16, height=16, flips=[True] * 4)
    np.testing.assert_array_equal(batch, np.asarray(expected))
    np.testing.assert_array_equal(video, np.asarray(sm.load_video(CLIP, (0.2, 0.5))))
    np.testing.assert_array_equal(audio, np.asarray(sm.load_audio(CLIP, (0.25, 0.5))))


def test_a_clip() -> None:
    clip = asyncio.run(sm.async_load_clip(CLIP, 0.2, 0.3))
    assert clip.timestamps.tolist() == [0.2, 0.3, 0.4]


class Noting(ThreadPoolExecutor):
    """An executor that counts submitted calls."""

    count = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().submit(*args, **kwargs)


def test_it_runs_in_the_executor_given_or_in_the_loops_own() -> None:
    with Noting(1) as mine, Noting(1) as default:

        async def load() -> None:
            await sm.async_load_image(SOURCES[0], executor=mine)
            asyncio.get_running_loop().set_default_executor(default)
            await sm.async_load_image_batch(SOURCES)

        asyncio.run(load())
        assert (mine.count, default.count) == (1, 1)


def test_errors_come_through() -> None:
    with pytest.raises(sm.DemuxError, match="input 1 of the batch of 2"):
        asyncio.run(sm.async_load_image_batch([SOURCES[0], b"bad"]))
    with pytest.raises(TypeError, match="widht"):
        asyncio.run(sm.async_load_image(SOURCES[0], widht=3))


class Gate(io.BytesIO):
    """An image whose read blocks until a gate is opened, and which reports when it is read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.asked, self.open = threading.Event(), threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self.asked.set()
        assert self.open.wait(30)
        return super().read(size)


async def cancelled(task: asyncio.Task[Any]) -> bool:
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def test_what_waits_for_a_thread_is_never_started() -> None:
    gate, never = Gate(SOURCES[0]), Gate(SOURCES[1])
    with ThreadPoolExecutor(1) as executor:

        async def load() -> None:
            first = asyncio.create_task(sm.async_load_image(gate, executor=executor))
            await asyncio.to_thread(gate.asked.wait, 30)
            second = asyncio.create_task(sm.async_load_image(never, executor=executor))
            await asyncio.sleep(0)
            assert await cancelled(second)
            gate.open.set()
            assert (await first).shape == (30, 40, 3)

        asyncio.run(load())
    assert not never.asked.is_set()


def test_a_cancelled_batch_ends_before_its_next_image() -> None:
    gate, never = Gate(SOURCES[0]), Gate(SOURCES[1])
    with ThreadPoolExecutor(1) as executor:

        async def load() -> None:
            task = asyncio.create_task(sm.async_load_image_batch([gate, never], executor=executor))
            await asyncio.to_thread(gate.asked.wait, 30)
            assert await cancelled(task)
            gate.open.set()

        asyncio.run(load())
    assert not never.asked.is_set()


def test_a_cancelled_batch_gives_its_memory_back() -> None:
    gate = Gate(SOURCES[3])
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    with ThreadPoolExecutor(1) as executor:

        async def load() -> None:
            sources = [*SOURCES[:3], gate]
            task = asyncio.create_task(
                sm.async_load_image_batch(sources, storage=pool, executor=executor)
            )
            await asyncio.to_thread(gate.asked.wait, 30)
            assert await cancelled(task)
            gate.open.set()

        asyncio.run(load())
    assert pool.num_free == pool.count == 1


def test_a_timeout_cancels() -> None:
    gate, never = Gate(SOURCES[0]), Gate(SOURCES[1])
    with ThreadPoolExecutor(1) as executor:

        async def load() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(
                    sm.async_load_image_batch([gate, never], executor=executor), 0.01
                )
            gate.open.set()

        asyncio.run(load())
    assert not never.asked.is_set()
