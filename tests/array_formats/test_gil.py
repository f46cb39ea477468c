"""Work on all data is done without the GIL, so that other threads can run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import A_LAW, MU_LAW, PCM, npy, npz, wav, wav_format

import spdl_media as sm

# Private, to choose the decompression library; users choose it by what they install.
from spdl_media.array_formats import npz as npz_module

SIZE = 65 * 1024  # a little more than the promised threshold
NOISE = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
LABELS = np.repeat(NOISE[: SIZE // 256], 256)


@contextmanager
def another_thread() -> Iterator[Callable[[], int]]:
    """Count how often another thread ran, which a long switch interval allows only without the GIL."""
    running, count = True, 0

    def run() -> None:
        nonlocal count
        while running:
            count += 1
            time.sleep(0.0001)  # with 0, it would take the GIL back at once

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        yield lambda: count
    finally:
        running = False
        sys.setswitchinterval(interval)
        thread.join()


def runs_meanwhile(call: Callable[[], object], seconds: float) -> bool:
    """Whether another thread ran during one of many calls; a busy machine may have no core for it."""
    call()  # imports and tables that are made once may release the GIL
    with another_thread() as count:
        before, deadline = count(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            call()
            if count() != before:
                return True
    return False


CALLS: dict[str, Callable[[], Any]] = {}


def reading(name: str, read: Callable[[bytes], Any], data: bytes) -> None:
    CALLS[name] = lambda: read(data)


reading("npy, copy", lambda data: sm.load_npy(data, copy=True), npy(NOISE))
reading("npz, stored", lambda data: sm.load_npz(data)["a"], npz({"a": NOISE}))
TEXT = np.frombuffer(NOISE.tobytes().replace(b"\0", b"x"), "S8")
for what, array in (
    ("text", TEXT),
    ("short text", TEXT.view("S1")),
    ("text in Fortran order", np.asfortranarray(TEXT.reshape(-1, 8))),
    ("Unicode", np.full(SIZE // 16, "abcd")),
    ("records with text", np.zeros(SIZE // 16, [("a", "S8"), ("b", "i8")])),
):
    reading(f"npy, copy of {what}", lambda data: sm.load_npy(data, copy=True), npy(array))
for what, array in (("noise", NOISE), ("labels", LABELS)):
    deflated = npz({"a": array}, compressed=True)
    reading(f"npz, deflated {what}", lambda data: sm.load_npz(data)["a"], deflated)
reading("wav, 24 bits", sm.load_wav, wav(wav_format(PCM, 1, 24), NOISE.tobytes()[: SIZE // 3 * 3]))
reading("wav, A-law", sm.load_wav, wav(wav_format(A_LAW, 1, 8), NOISE.tobytes()))
reading("wav, mu-law", sm.load_wav, wav(wav_format(MU_LAW, 1, 8), NOISE.tobytes()))


@pytest.mark.parametrize("library", ["zlib", "isal.isal_zlib"])
@pytest.mark.parametrize("name", CALLS)
def test_another_thread_runs(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pytest.importorskip(library)
    monkeypatch.setattr(npz_module, "_library", lambda: chosen)
    assert runs_meanwhile(CALLS[name], seconds=20), "nobody else ran"


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no GIL to hold"
)
def test_no_other_thread_runs_where_the_gil_is_held() -> None:
    data = npy(NOISE)
    assert not runs_meanwhile(lambda: bytearray(data), seconds=0.2)
