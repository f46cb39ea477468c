"""Storages and pools: memory is reused, but never while a view of it exists."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from effort import each
from fake_cuda import HISTORY
from plane_oracle import ROWS, image, rgb

import spdl_media as sm
from spdl_media import devices
from spdl_media import storage as storage_module

NBYTES = 8 * 6 * 3


def pool_of(count: int, **options: Any) -> sm.StoragePool:
    return sm.StoragePool(NBYTES, count, pin_memory=False, **options)


def place(buffer: Any) -> int:
    return int(np.asarray(buffer).ctypes.data)


def test_a_storage_is_filled_again_and_again() -> None:
    storage = sm.cpu_storage(NBYTES, pin_memory=False)
    places = set()
    for value in range(5):
        buffer = sm.convert_frames(rgb(8, 6, value), storage)
        assert (buffer.array == value).all()
        places.add(place(buffer))
        del buffer
    assert len(places) == 1


@each("size", [1, 63, 64, 65, 1000, 1 << 20])
def test_every_block_starts_on_64_bytes(size: int) -> None:
    pool = sm.StoragePool(size, 4, pin_memory=False)
    for storage in (pool, sm.cpu_storage(size, pin_memory=False), None):
        values = np.arange(size, dtype=np.uint8)
        buffers = [sm.convert_array(values, pool) for _ in range(4)]
        assert all(place(buffer) % 64 == 0 for buffer in buffers)
        del buffers
        assert place(sm.convert_array(values, storage)) % 64 == 0


def test_a_storage_in_use_gives_fresh_memory_and_one_warning() -> None:
    storage = sm.cpu_storage(NBYTES, pin_memory=False)
    first = sm.convert_frames(rgb(8, 6, 1), storage)
    with pytest.warns(sm.StorageInUseWarning, match=rf"StoragePool\({NBYTES}, count\)") as caught:
        second, third = (sm.convert_frames(rgb(8, 6, value), storage) for value in (2, 3))
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning names the line of the caller"
    assert [int(buffer.array[0, 0, 0]) for buffer in (first, second, third)] == [1, 2, 3]
    assert place(second) % 64 == place(third) % 64 == 0
    home = place(first)
    del first
    assert place(sm.convert_frames(rgb(8, 6, 4), storage)) == home
    assert (second.array == 2).all()


def test_a_warning_turned_error_spoils_nothing() -> None:
    storage = sm.cpu_storage(NBYTES, pin_memory=False)
    pool = pool_of(1)
    for lender in (storage, pool):
        first = sm.convert_frames(rgb(8, 6, 1), lender)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(sm.StorageInUseWarning):
                sm.convert_frames(rgb(8, 6, 2), lender)
        assert (first.array == 1).all()
        del first
    assert pool.num_free == pool.count == 2


def test_blocks_come_back_when_buffers_go() -> None:
    pool = pool_of(3, on_exhausted="raise")
    buffers = [sm.convert_frames(rgb(8, 6, value), pool) for value in range(3)]
    assert (pool.num_free, pool.count, pool.nbytes) == (0, 3, NBYTES)
    assert len({place(buffer) for buffer in buffers}) == 3
    assert all((buffer.array == value).all() for value, buffer in enumerate(buffers))
    del buffers[1]
    assert pool.num_free == 1
    buffers.clear()
    assert pool.num_free == 3


VIEWS = {
    "array": lambda buffer: buffer.array,
    "asarray": np.asarray,
    "view of a view": lambda buffer: np.asarray(buffer)[1:][:, ::2].T,
    "to_numpy": sm.to_numpy,
    "memoryview": lambda buffer: memoryview(buffer.array),
    "from_dlpack": np.from_dlpack,
    "capsule": lambda buffer: buffer.__dlpack__(),
}


@each("view", VIEWS.values())
@each("release", [False, True])
def test_a_view_keeps_the_block(view: Any, release: bool) -> None:
    pool = pool_of(1, on_exhausted="raise")
    buffer = sm.convert_frames(rgb(8, 6, 7), pool)
    watch = weakref.ref(buffer)
    held = view(buffer)
    if release:
        buffer.release()
    del buffer
    gc.collect()
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match=r"all 1 blocks of the pool are in use.*'wait'"):
        sm.convert_frames(rgb(8, 6), pool)
    if view is not VIEWS["capsule"]:
        assert (np.asarray(held) == 7).all()
    del held
    assert pool.num_free == 1
    assert watch() is None


@pytest.mark.parametrize("release", [False, True], ids=["dropped", "released"])
def test_a_tensor_keeps_the_block(release: bool) -> None:
    pytest.importorskip("torch")
    pool = pool_of(1, on_exhausted="raise")
    buffer = sm.convert_frames(rgb(8, 6, 7), pool)
    held = sm.to_torch(buffer)[2:].permute(2, 0, 1)
    if release:
        buffer.release()
    del buffer
    gc.collect()
    assert pool.num_free == 0
    assert (held == 7).all()
    del held
    gc.collect()
    assert pool.num_free == 1


def test_planes_share_one_block_until_the_last_is_gone() -> None:
    pool = sm.StoragePool(1024, 1, pin_memory=False, on_exhausted="raise")
    row = next(row for row in ROWS if row.pix_fmt == "yuv420p")
    buffers = list(sm.convert_frames(image(row.planes(8, 6, 0), "yuv420p"), pool, layout="planes"))
    for _ in range(3):
        assert pool.num_free == 0
        buffers.pop().release()
    assert pool.num_free == 1


def test_release_gives_back_at_once_and_ends_the_use() -> None:
    pool = pool_of(1, on_exhausted="raise")
    buffer = sm.convert_frames(rgb(8, 6), pool)
    buffer.release()
    buffer.release()
    assert repr(buffer) == "<CPUBuffer: released>"
    assert pool.num_free == 1
    for use in (
        np.asarray,
        len,
        sm.to_numpy,
        lambda b: b.shape,
        lambda b: b.valid,
        lambda b: b.array,
        lambda b: b.__dlpack__(),
        lambda b: b.__dlpack_device__(),
        lambda b: b.__enter__(),
    ):
        with pytest.raises(ValueError, match="this buffer was released"):
            use(buffer)
    assert repr(buffer) == "<CPUBuffer: released>"
    with sm.convert_frames(rgb(8, 6), pool) as again:
        assert pool.num_free == 0
        assert again.shape == (6, 8, 3)
    assert pool.num_free == 1


def test_release_waits_for_views_of_the_array_interface() -> None:
    """They hold the buffer and not its memory, which must not be reused while one of them exists."""
    pool = pool_of(1, on_exhausted="raise")
    buffer = sm.convert_frames(rgb(8, 6, 7), pool)
    held = np.asarray(buffer)
    buffer.release()
    del buffer
    gc.collect()
    assert pool.num_free == 0
    assert (held == 7).all()
    del held
    assert pool.num_free == 1


def test_allocate_adds_blocks_for_good_and_warns_once() -> None:
    pool = pool_of(1)
    first = sm.convert_frames(rgb(8, 6, 1), pool)
    with pytest.warns(sm.StorageInUseWarning, match=r"now has 2\..*count=2\)") as caught:
        second, third = (sm.convert_frames(rgb(8, 6, value), pool) for value in (2, 3))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert pool.count == 3
    assert [int(buffer.array[0, 0, 0]) for buffer in (first, second, third)] == [1, 2, 3]
    del first, second, third
    assert pool.num_free == 3


def test_wait_gets_the_block_that_another_thread_gives_back() -> None:
    pool = pool_of(1, on_exhausted="wait")
    held = [sm.convert_frames(rgb(8, 6, 1), pool)]
    home, got = place(held[0]), []
    waiting = threading.Event()

    def convert() -> None:
        waiting.set()
        got.append(sm.convert_frames(rgb(8, 6, 2), pool))

    thread = threading.Thread(target=convert)
    thread.start()
    waiting.wait(30)
    assert (held[0].array == 1).all()
    assert got == []
    held.clear()
    thread.join(30)
    assert place(got[0]) == home
    assert (got[0].array == 2).all()


def test_wait_ends_with_the_timeout() -> None:
    pool = pool_of(2, on_exhausted="wait", timeout=0.01)
    held = [sm.convert_frames(rgb(8, 6), pool) for _ in range(2)]
    with pytest.raises(TimeoutError, match=r"all 2 blocks of the pool stayed in use for 0\.01 s"):
        sm.convert_frames(rgb(8, 6), pool)
    del held


def test_a_block_may_come_back_in_another_thread_and_in_a_cycle() -> None:
    pool = pool_of(1, on_exhausted="raise")
    held = [sm.convert_frames(rgb(8, 6), pool)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.num_free == 1
    cycle: list[Any] = [sm.convert_frames(rgb(8, 6), pool)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.num_free == 1


@pytest.mark.parametrize("on_exhausted", ["allocate", "wait"])
@pytest.mark.filterwarnings("ignore::spdl_media.StorageInUseWarning")
def test_threads_never_overwrite_each_other(on_exhausted: Any) -> None:
    pool = pool_of(3, on_exhausted=on_exhausted)
    wrong: list[Any] = []

    def run(value: int) -> None:
        for _ in range(200):
            array = sm.to_numpy(sm.convert_frames(rgb(8, 6, value), pool))
            if not (array == value).all():
                wrong.append(value)
            del array

    threads = [threading.Thread(target=run, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.num_free == pool.count
    assert on_exhausted == "allocate" or pool.count == 3


@pytest.mark.filterwarnings("ignore::spdl_media.StorageInUseWarning")
def test_threads_share_one_storage() -> None:
    storage = sm.cpu_storage(NBYTES, pin_memory=False)
    wrong: list[Any] = []

    def run(value: int) -> None:
        for _ in range(200):
            array = sm.to_numpy(sm.convert_frames(rgb(8, 6, value), storage))
            if not (array == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_buffer_outlives_its_pool() -> None:
    pool = pool_of(1)
    watch = weakref.ref(pool)
    array = sm.to_numpy(sm.convert_frames(rgb(8, 6, 9), pool))
    del pool
    gc.collect()
    assert watch() is None
    assert (array == 9).all()


@pytest.fixture
def never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spdl_media._checks.warned_of", {})


def without(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Install stand-ins for torch and cupy; ``None`` means not installed."""
    monkeypatch.setattr(HISTORY, "used", False)
    monkeypatch.setattr(devices, "is_available", lambda name: modules.get(name) is not None)
    for module in (devices, storage_module):
        monkeypatch.setattr(module, "require", lambda name, purpose: modules[name])


def torch_without_device(*, is_built: bool) -> SimpleNamespace:
    built = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: is_built))
    cuda, version = SimpleNamespace(is_available=lambda: False), SimpleNamespace(cuda="12.8")
    return SimpleNamespace(cuda=cuda, backends=built, version=version)


@pytest.mark.usefixtures("never_warned")
def test_without_cuda_memory_is_pageable_with_one_warning(monkeypatch: Any) -> None:
    without(monkeypatch)
    with pytest.warns(
        UserWarning, match="neither torch nor cupy is installed.*pin_memory=False"
    ) as caught:
        storage, pool = sm.cpu_storage(NBYTES), sm.StoragePool(NBYTES)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not storage.is_pinned
    assert not pool.is_pinned
    assert (sm.convert_frames(rgb(8, 6, 4), storage).array == 4).all()
    assert repr(storage) == "<CPUStorage: 144 bytes>"
    assert repr(pool) == "<StoragePool: 4 of 4 blocks of 144 bytes free>"


@pytest.mark.usefixtures("never_warned")
def test_reasons_why_nothing_is_pinned(monkeypatch: Any) -> None:
    def no_driver() -> int:
        raise OSError("no driver")

    torch = torch_without_device(is_built=True)
    runtime = SimpleNamespace(getDeviceCount=no_driver)
    without(monkeypatch, torch=torch, cupy=SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.warns(
        UserWarning,
        match=r"torch finds no CUDA device and cupy finds no CUDA device \(no driver\)\. Pageable",
    ):
        sm.cpu_storage(NBYTES)


@pytest.mark.usefixtures("never_warned")
def test_memory_is_pinned_through_torch(monkeypatch: Any) -> None:
    asked = []

    class Tensor(SimpleNamespace):
        def numpy(self) -> np.ndarray:
            return np.zeros(self.size, np.uint8)

    def empty(size: int, **options: Any) -> Tensor:
        asked.append((size, options))
        return Tensor(size=size)

    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    without(monkeypatch, torch=SimpleNamespace(cuda=cuda, empty=empty, uint8="u8"))
    pool = sm.StoragePool(NBYTES, 2)
    assert asked == [(NBYTES, {"dtype": "u8", "pin_memory": True})] * 2
    assert pool.is_pinned
    assert repr(pool).endswith(" free, pinned>")
    assert (sm.convert_frames(rgb(8, 6, 4), pool).array == 4).all()
    assert not sm.StoragePool(NBYTES, 2, pin_memory=False).is_pinned
    assert len(asked) == 2


@pytest.mark.usefixtures("never_warned")
def test_memory_is_pinned_through_cupy_where_torch_cannot(monkeypatch: Any) -> None:
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: 1),
        alloc_pinned_memory=lambda size: bytearray(size + 512),
    )
    without(
        monkeypatch,
        torch=torch_without_device(is_built=True),
        cupy=SimpleNamespace(cuda=cuda),
    )
    storage = sm.cpu_storage(NBYTES)
    assert storage.is_pinned
    assert (sm.convert_frames(rgb(8, 6, 4), storage).array == 4).all()


@pytest.mark.cuda("torch")
def test_pinned_memory_of_a_real_device() -> None:
    storage = sm.cpu_storage(NBYTES)
    buffer = sm.convert_frames(rgb(8, 6, 4), storage)
    assert storage.is_pinned
    assert sm.to_torch(buffer).is_pinned()
    assert place(buffer) % 64 == 0


CODE = """
import sys, warnings
sys.modules["torch"] = sys.modules["cupy"] = sys.modules["jax"] = None
import numpy as np, spdl_media as sm
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pool = sm.StoragePool(1024)
assert ["neither torch nor cupy" in str(one.message) for one in caught] == [True]
with sm.convert_array([1, 2, 3], pool) as buffer:
    assert np.asarray(buffer).tolist() == sm.to_numpy(buffer).tolist() == [1, 2, 3]
    for convert, line in ((sm.to_torch, ".[torch]"), (sm.to_jax, "pip install jax")):
        try:
            convert(buffer)
        except sm.MissingDependencyError as error:
            assert line in str(error)
        else:
            raise AssertionError(convert)
print("fine")
"""


def test_all_works_without_torch_and_cupy() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "fine\n", done.stderr


def test_pageable_memory_does_not_import_torch() -> None:
    code = "import spdl_media as sm, sys; sm.cpu_storage(9, pin_memory=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("make", [sm.cpu_storage, sm.StoragePool])
def test_bad_sizes(make: Any) -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"size must be at least 1 byte, not {size}"):
            make(size)
    for wrong in (1.5, "9", True, None):
        with pytest.raises(TypeError, match=f"size must be an int, not {wrong!r}"):
            make(wrong)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        pool_of(0)
    with pytest.raises(TypeError, match=r"count must be an int, not 2\.0"):
        pool_of(2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'allocate', 'wait' or 'raise', not 'grow'"):
        pool_of(1, on_exhausted="grow")
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout must be at least 0 seconds"):
            pool_of(1, on_exhausted="wait", timeout=timeout)
    for policy in ("allocate", "raise"):
        with pytest.raises(
            ValueError,
            match=f"timeout=3 is for on_exhausted='wait', .* on_exhausted='{policy}' never",
        ):
            pool_of(1, on_exhausted=policy, timeout=3)


def test_sizes_and_counts_may_be_integers_of_numpy() -> None:
    size = np.prod((6, 8, 3))
    storage = sm.cpu_storage(size, pin_memory=False)
    pool = sm.StoragePool(size, np.int32(2), pin_memory=False)
    for lender in (storage, pool):
        assert lender.nbytes == 144
        assert type(lender.nbytes) is int
        assert sm.convert_frames(rgb(8, 6), lender).shape == (6, 8, 3)
    assert (pool.count, pool.num_free) == (2, 2)


@pytest.mark.parametrize("timeout", [1e12, float("inf"), None])
def test_a_wait_without_an_end(timeout: float | None) -> None:
    pool = pool_of(1, on_exhausted="wait", timeout=timeout)
    held = [sm.convert_frames(rgb(8, 6), pool)]
    waiting = threading.Event()

    def give_back() -> None:
        waiting.wait(30)
        held.clear()

    thread = threading.Thread(target=give_back)
    thread.start()
    waiting.set()
    assert sm.convert_frames(rgb(8, 6, 5), pool).array[0, 0, 0] == 5
    thread.join()


@pytest.mark.parametrize("on_exhausted", ["allocate", "wait", "raise"])
def test_blocks_in_garbage_are_found_before_anybody_suffers(
    on_exhausted: Any, monkeypatch: Any
) -> None:
    """Waiting threads allocate nothing, so they would never trigger the garbage collector."""
    monkeypatch.setattr(storage_module, "_PATIENCE", 0.01)
    options = {"timeout": 20} if on_exhausted == "wait" else {}
    pool = pool_of(1, on_exhausted=on_exhausted, **options)
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [sm.convert_frames(rgb(8, 6), pool)]
        cycle.append(cycle)
        del cycle
        assert pool.num_free == 0
        assert (sm.convert_frames(rgb(8, 6, 7), pool).array == 7).all()
        assert pool.count == pool.num_free == 1
    finally:
        gc.enable()


def test_a_block_becomes_garbage_while_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first collection finds nothing, and another one must follow."""
    collected, collect = threading.Event(), gc.collect

    def first_too_early() -> None:
        (collect if collected.is_set() else collected.set)()

    monkeypatch.setattr(storage_module, "_PATIENCE", 0.01)
    monkeypatch.setattr(storage_module.gc, "collect", first_too_early)
    pool = pool_of(1, on_exhausted="wait", timeout=20)
    cycle: list[Any] = [sm.convert_frames(rgb(8, 6), pool)]
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(sm.convert_frames, rgb(8, 6, 7), pool)
        assert collected.wait(10)
        cycle.append(cycle)
        del cycle
        assert (waiting.result().array == 7).all()


def test_a_finalizer_may_wait_for_a_thread_that_asks_a_pool() -> None:
    pool = pool_of(1, on_exhausted="raise")
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(RuntimeError) as caught:
            pool.acquire(1)
        errors.append(str(caught.value))

    class Owner:
        def __init__(self) -> None:
            self.me, self.block = self, pool.acquire(1)

        def __del__(self) -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(20)

    Owner()
    pool.acquire(1)
    assert len(errors) == 1


@pytest.mark.parametrize("on_exhausted", ["allocate", "wait", "raise"])
def test_a_buffer_may_be_dropped_while_the_thread_that_made_it_sleeps(on_exhausted: Any) -> None:
    """On free-threaded CPython, only the garbage collector frees it, one object within it at a time."""
    pool = pool_of(
        1, on_exhausted=on_exhausted, **{"timeout": 20} if on_exhausted == "wait" else {}
    )
    made: SimpleQueue[Any] = SimpleQueue()
    dropped = threading.Event()

    def make() -> None:
        made.put([sm.convert_frames(rgb(8, 6), pool)])
        dropped.wait(30)

    with ThreadPoolExecutor(1) as executor:
        executor.submit(make)
        try:
            made.get()
            assert (sm.convert_frames(rgb(8, 6, 7), pool).array == 7).all()
            assert pool.count == 1
        finally:
            dropped.set()


@pytest.mark.parametrize("timeout", ["3", True, [1]])
def test_a_timeout_is_a_number(timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None, not "):
        pool_of(1, timeout=timeout)


def test_a_pool_gives_the_block_that_came_back_last() -> None:
    pool = sm.StoragePool(64, count=3, pin_memory=False)
    first = pool.acquire(64)
    address = first.ctypes.data
    del first
    # Unused blocks are never touched, and take no memory of the system.
    for _ in range(5):
        assert pool.acquire(64).ctypes.data == address


def test_large_memory_is_used_again_once_nothing_looks_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 33 << 20

    def buffer() -> Any:
        return sm.convert_array(np.broadcast_to(np.uint8(7), size))

    first = buffer()
    start, view = place(first), first.array[size // 2 :]
    del first
    second = buffer()
    second.array[:] = 1
    assert (view == 7).all()
    del view
    third = buffer()
    assert place(third) == start
    assert (second.array == 1).all()
    # The blocks of two threads, say, and no more than the limit.
    starts = {place(second), place(third)}
    del second, third
    hole = np.empty(size, np.uint8)  # takes memory that was given back to the system
    again = buffer(), buffer()
    assert {place(one) for one in again} == starts
    monkeypatch.setattr(storage_module, "_MOST_KEPT", size * 3 // 2)
    del again, hole
    assert sum(map(len, storage_module._kept)) <= size * 3 // 2


def test_large_blocks_are_kept_while_other_threads_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the GIL, the deque of kept blocks changes while another thread adds up their sizes."""
    kept = deque(np.empty(10, np.uint8) for _ in range(15))
    monkeypatch.setattr(storage_module, "_kept", kept)
    barrier = threading.Barrier(8)

    def use(_: int) -> None:
        barrier.wait(20)
        for _ in range(6000):
            storage_module._keep(np.empty(10, np.uint8))
            storage_module._take_kept(10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert len(kept) == 15
