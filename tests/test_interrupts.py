"""A Ctrl-C that comes just before what was dropped is finalized is heard, and the finalizer does its work."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import time
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media import codec, cuda_driver
from spdl_media._threads import when_dropped
from spdl_media.cuda import session, surfaces
from spdl_media.cuda.cuvid import Format, Shown
from spdl_media.handover import Guard
from spdl_media.inputs import open_input

Case = tuple[Any, Callable[[], bool]]


class Trip:
    """Sends SIGINT when it is dropped, without a look for signals."""

    __del__ = _thread.interrupt_main


def lease(_: pytest.MonkeyPatch) -> Case:
    pool = sm.StoragePool(1000, 1, pin_memory=False)
    return pool.acquire(10), lambda: pool.num_free == 1


def opened_file(_: pytest.MonkeyPatch) -> Case:
    opened = open_input(Path(__file__))
    assert opened._file is not None
    number = opened._file.number

    def is_closed() -> bool:
        with contextlib.suppress(OSError):
            os.fstat(number)
            return False
        return True

    return opened, is_closed


def device_memory(_: pytest.MonkeyPatch) -> Case:
    freed: list[int] = []
    guard = Guard(0, 0, 64, (1,), np.dtype(np.uint8), lambda: freed.append(1))
    return guard, lambda: freed == [1]


def driver(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a driver in place that notes its calls."""

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name)

    for module in (session, surfaces, cuda_driver):
        monkeypatch.setattr(module, "current", lambda index: contextlib.nullcontext())
    for module in (session, surfaces):
        monkeypatch.setattr(module, "library", lambda: (Library(), Library()))
    monkeypatch.setattr(cuda_driver, "driver", Library)
    for module in (session, surfaces, cuda_driver):
        monkeypatch.setattr(module, "call", lambda *_: None)


def surface(monkeypatch: pytest.MonkeyPatch) -> Case:
    calls: list[str] = []
    driver(calls, monkeypatch)
    decoder: Any = SimpleNamespace(handle=c_void_p(1), index=0, per_launch=8)
    mapped = surfaces.Surface(decoder, Format(), Shown(), 0, (0, 0, 0, 0))
    mapped._address.value = 64
    return mapped, lambda: calls == ["cuvidUnmapVideoFrame64"]


def decoder(monkeypatch: pytest.MonkeyPatch) -> Case:
    calls: list[str] = []
    driver(calls, monkeypatch)
    made = surfaces.HardwareDecoder(0, Format(), 4)
    made.handle.value = 1
    return made, lambda: calls == ["cuvidDestroyDecoder"]


def parser(monkeypatch: pytest.MonkeyPatch) -> Case:
    calls: list[str] = []
    driver(calls, monkeypatch)
    made = session.Session("h264", 0)
    made._parser = made._new_parser()
    made._parser.value = 1
    return made, lambda: calls == ["cuvidDestroyVideoParser"]


def video(_: pytest.MonkeyPatch) -> Case:
    opened = sm.VideoFile(Path(__file__).parent.parent / "samples" / "media" / "nasa_13013.mp4")
    source = opened._file
    return opened, lambda: source.container is None


def threads(monkeypatch: pytest.MonkeyPatch) -> Case:
    waits: list[int] = []
    context = SimpleNamespace(flush_buffers=lambda: waits.append(1))
    monkeypatch.setattr(codec, "make_decoder", lambda *_: context)
    packets, config = SimpleNamespace(source=""), sm.decode_config(decoder_options={"threads": 2})
    opened = codec.OpenDecoder(codec.VideoCodec("h264", "h264"), packets, config)
    return opened, lambda: waits == [1]


def event(monkeypatch: pytest.MonkeyPatch) -> Case:
    calls: list[str] = []
    driver(calls, monkeypatch)
    return cuda_driver.Event(0, 0), lambda: calls == ["cuEventDestroy_v2"]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "case",
    [lease, opened_file, video, threads, device_memory, surface, decoder, parser, event],
)
def test_one_before_what_was_dropped_is_finalized_is_heard(
    case: Callable[[pytest.MonkeyPatch], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    thing, is_done = case(monkeypatch)
    # A list drops its items from the last to the first.
    dropped = [thing, Trip()]
    del thing
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may arrive a moment later
        del dropped
        for _ in range(500):
            time.sleep(0.01)
    assert is_done()


@pytest.mark.usefixtures("no_collection")
def test_no_frames_of_a_thread_that_runs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free-threaded CPython crashes by that."""
    monkeypatch.setattr(sys, "_current_frames", None)
    ended: list[int] = []
    dropped = [when_dropped(ended.append, 1), Trip()]
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it arrives a moment later
        del dropped
        for _ in range(500):
            time.sleep(0.01)
    assert ended == [1]
