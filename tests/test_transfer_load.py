"""Transfers under load. The same tests run on stand-in devices and on a real one (mark ``cuda``)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_rigs import rig_of
from fake_cuda import fresh_process

import spdl_media as sm

TESTS = Path(__file__).resolve().parent
RIGS = [
    "fake torch",
    "fake cupy",
    pytest.param("torch", marks=pytest.mark.cuda("torch")),
    pytest.param("cupy", marks=pytest.mark.cuda("cupy")),
]


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if "fake" in request.param:
        fresh_process(monkeypatch)
    with rig_of(request.param, monkeypatch) as found:
        yield found
        gc.collect()


def batch(value: int, size: int = 4096, pool: Any = None) -> sm.CPUBuffer:
    return sm.convert_array(np.full(size, value % 251, np.uint8), pool)


def test_a_consumer_on_a_side_stream_reads_what_was_copied_later(rig: Any) -> None:
    copying, side = rig.new_stream(), rig.new_stream()
    rig.delay(copying)
    buffer = sm.transfer_buffer(batch(7), cuda_config=sm.cuda_config(0, stream=copying))
    result = rig.copy_on(side, buffer)
    assert (result() == 7).all()


def test_a_result_that_is_dropped_while_it_is_read_is_not_written_over(rig: Any) -> None:
    copying, side = rig.new_stream(), rig.new_stream()
    config = sm.cuda_config(0, stream=copying)
    results = []
    for value in range(16):
        # Each buffer reuses the memory of the one before, which is dropped while the side stream still reads
        # it.
        buffer = sm.transfer_buffer(batch(value), cuda_config=config)
        results.append(rig.copy_on(side, buffer))
        del buffer
    assert [int(result().max()) for result in results] == list(range(16))
    assert [int(result().min()) for result in results] == list(range(16))


def test_a_pool_is_used_again_under_load(rig: Any) -> None:
    pool = sm.StoragePool(4096, 2, on_exhausted="wait", timeout=100)
    assert pool.is_pinned
    copying, side = rig.new_stream(), rig.new_stream()
    config = sm.cuda_config(0, stream=copying)
    results = []
    for value in range(64):
        # No reference to the source is left, so its block is reused when the copy has read it.
        buffer = sm.transfer_buffer(batch(value, pool=pool), cuda_config=config)
        results.append(rig.copy_on(side, buffer))
    assert pool.count == 2
    for value, result in enumerate(results):
        assert (result() == value).all()


def test_threads_share_a_stream_of_the_users(rig: Any) -> None:
    stream = rig.new_stream()
    config = sm.cuda_config(0, stream=stream)

    def work(value: int) -> bool:
        buffer = sm.transfer_buffer(batch(value), cuda_config=config)
        return bool((sm.transfer_buffer_cpu(buffer).array == value % 251).all())

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(work, range(100)))


def test_memory_is_flat_over_a_thousand_ragged_batches(rig: Any, rng: np.random.Generator) -> None:
    pool = sm.StoragePool(8 * 2048, 3, on_exhausted="wait", timeout=100)
    used = []
    for size in map(int, rng.integers(1, 9, 1000)):
        buffer = sm.transfer_buffer(batch(size, size * 2048, pool), cuda_config=0)
        buffer.synchronize()
        used.append(rig.bytes_used())
    after_a_while, at_the_end = used[400], used[-1]
    # The memory of a real device includes that of other processes.
    assert at_the_end <= after_a_while + (0 if rig.is_fake else 32 << 20)
    assert pool.count == 3


def test_after_a_lack_of_memory_all_continues(rig: Any) -> None:
    pool = sm.StoragePool(64 << 10, 1, on_exhausted="wait", timeout=100)
    big = sm.convert_array(np.zeros(64 << 10 if rig.is_fake else 256 << 20, np.uint8))
    with (
        rig.limited(16 << 10 if rig.is_fake else 32 << 20),
        pytest.raises(
            sm.TransferError,
            match=rf"^{big.nbytes} bytes do not fit into the memory of CUDA device 0, which has \d+ b",
        ) as caught,
    ):
        sm.transfer_buffer(big, cuda_config=0)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__ is not caught.value
    for value in range(3):
        buffer = sm.transfer_buffer(batch(value, pool=pool), cuda_config=0)
        assert (sm.transfer_buffer_cpu(buffer).array == value).all()


def test_the_lease_ends_at_once_with_an_error(rig: Any) -> None:
    pool = sm.StoragePool(64 << 10 if rig.is_fake else 256 << 20, 1, on_exhausted="raise")
    gc.disable()
    try:
        with rig.limited(16 << 10 if rig.is_fake else 32 << 20):
            try:
                sm.transfer_buffer(batch(1, pool.nbytes, pool), cuda_config=0)
            except sm.TransferError as error:
                message = str(error)
        assert "do not fit" in message
        assert pool.num_free == 1
    finally:
        gc.enable()


def test_a_device_that_is_not_there(rig: Any) -> None:
    with pytest.raises(
        ValueError, match=r"CUDA device 99 was asked for, and there (is one|are \d+)"
    ):
        sm.transfer_buffer(batch(1), cuda_config=99)


FORK = """
import os, sys, warnings
sys.path.insert(0, sys.argv[2])
from cuda_rigs import rig_of
from fake_cuda import fresh_process
import numpy as np
import spdl_media as sm

class Patch:
    def setitem(self, mapping, key, value):
        mapping[key] = value

    setattr = staticmethod(setattr)

if "fake" in sys.argv[1]:
    fresh_process(Patch())

with rig_of(sys.argv[1], Patch()) as rig:
    pool, storage = sm.StoragePool(64, 2), sm.cpu_storage(64)
    done = sm.transfer_buffer(sm.convert_array([1]), cuda_config=0)
    done.synchronize()
    rig.delay(stream := rig.new_stream())
    if rig.is_fake:
        rig.card.runs_by_itself = False  # the copy is under way, and a thread waits for it
    config = sm.cuda_config(0, stream=stream)
    buffer = sm.transfer_buffer(sm.convert_array(np.arange(8), pool), cuda_config=config)
    calls = {
        "transfer": lambda: sm.transfer_buffer(sm.convert_array([1]), cuda_config=0),
        "tensor": lambda: sm.transfer_tensor([1]),
        "back": lambda: sm.transfer_buffer_cpu(buffer),
        "synchronize": buffer.synchronize,
        "dlpack": lambda: buffer.__dlpack__(),
        "interface": lambda: buffer.__cuda_array_interface__,
        "pinned pool": lambda: pool.acquire(8),
        "pinned storage": lambda: storage.acquire(8),
        "pin": lambda: sm.cpu_storage(8),
    }
    reader, writer = os.pipe()
    warnings.simplefilter("ignore", DeprecationWarning)  # CPython's, of forking beside threads
    child = os.fork()
    if not child:
        for name, call in calls.items():
            try:
                call()
                said = "nothing"
            except sm.TransferError as error:
                said = str(error)
            os.write(writer, f"{name}: {said}\\n".encode())
        sm.cpu_storage(8, pin_memory=False).acquire(8)
        del buffer, done  # given back by nobody, and without an error
        os.write(writer, b"done\\n")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        print(lines.read(), end="")
    assert os.waitpid(child, 0)[1] == 0
    if rig.is_fake:
        rig.card.runs_by_itself = True
    buffer.synchronize()
    print("parent", list(sm.transfer_buffer_cpu(buffer).array) == list(range(8)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("name", RIGS)
def test_a_forked_child_is_refused_by_every_call(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, name, TESTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *said, child, parent = done.stdout.splitlines()
    assert len(said) == 9
    for line in said:
        assert "cannot use CUDA in this process: it was forked from one that had used CUDA" in line
        assert "'spawn' or 'forkserver'" in line
        assert ("pin_memory=False" in line) == line.startswith("pin")
    assert (child, parent) == ("done", "parent True")
