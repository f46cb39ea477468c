"""Transfers on stand-in devices: what is copied, when, on which stream, and lifetimes."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import gc
import importlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import fake_cuda
import numpy as np
import pytest
from effort import each
from fake_cuda import HISTORY, Card, FakeCupy, FakeTorch, fresh_process, install, values_of

import spdl_media as sm
from spdl_media import devices
from spdl_media.cuda_driver import device_of_stream
from spdl_media.handover import KEEPER, Keeper

transfer = importlib.import_module("spdl_media.transfer")


@pytest.fixture
def card() -> Card:
    return Card(devices=2)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By default, no library finds a device, and none has found one before."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    fresh_process(monkeypatch)
    monkeypatch.setattr("spdl_media._checks.warned_of", {})
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield
    gc.collect()


@pytest.fixture
def torch(card: Card, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return install(monkeypatch, FakeTorch(card))


@pytest.fixture
def cupy(card: Card, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    return install(monkeypatch, FakeCupy(card))


@pytest.fixture(params=["torch", "cupy"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def buffer_of(values: Any, **options: Any) -> sm.CPUBuffer:
    return sm.CPUBuffer(np.array(values), **options)


def transferred(values: Any, config: Any = 0) -> sm.CUDABuffer:
    return sm.transfer_buffer(buffer_of(values), cuda_config=config)


def test_a_copy_begins_and_ends_on_the_stream(card: Card, library: Any) -> None:
    card.runs_by_itself = False
    failures = (sm.Failure(1, "bad.jpg", ValueError()),)
    source = buffer_of(
        np.arange(6, dtype=np.uint16).reshape(2, 3), failures=failures, indices=(0, 1)
    )
    config = sm.cuda_config(1, stream=0x4400)
    buffer = sm.transfer_buffer(source, cuda_config=config)
    assert isinstance(buffer, sm.CUDABuffer)
    assert (buffer.shape, buffer.dtype, buffer.device) == ((2, 3), np.uint16, "cuda:1")
    assert (buffer.failures, buffer.indices) == (failures, (0, 1))
    assert list(buffer.valid) == [True, False]
    assert card.log == [
        "copy in on stream 0x4400 of device 1",
        "event on stream 0x4400 of device 1",
    ]
    assert (values_of(buffer).view(np.uint8) == fake_cuda.JUNK).all()
    card.run()
    np.testing.assert_array_equal(values_of(buffer), source.array)


def test_without_a_stream_each_thread_has_its_own(card: Card, library: Any) -> None:
    for _ in range(2):
        transferred([1]).synchronize()
    thread = threading.Thread(target=lambda: transferred([1]).synchronize())
    thread.start()
    thread.join()
    used = [line.partition(" on ")[2] for line in card.log if line.startswith("copy")]
    assert used[0] == used[1] != used[2]
    assert all("stream 0x1" in name and "stream 0x1 of" not in name for name in used)


def test_a_buffer_outlives_the_thread_whose_stream_made_it(card: Card, library: Any) -> None:
    """The next thread uses the same stream: there are only as many streams as threads at once."""
    card.runs_by_itself = False
    made: list[sm.CUDABuffer] = []
    for value in range(3):
        source = buffer_of([value])
        thread = threading.Thread(
            target=lambda s=source: made.append(sm.transfer_buffer(s, cuda_config=0))
        )
        thread.start()
        thread.join()
        gc.collect()
    used = {line.partition(" on ")[2] for line in card.log if line.startswith("copy")}
    assert len(used) == 1
    reader = card.new_stream(0).address
    for buffer in made:
        buffer.wait_on(reader)
    card.run()
    assert [values_of(buffer).item() for buffer in made] == [0, 1, 2]
    made.clear()
    del buffer
    gc.collect()
    card.run()
    assert not any(stream.work for stream in card.streams.values())


def test_threads_at_the_same_time_have_streams_of_their_own(card: Card, library: Any) -> None:
    together = threading.Barrier(4)

    def send(value: int) -> sm.CUDABuffer:
        together.wait(10)
        buffer = transferred([value], value % 2)
        together.wait(10)
        return buffer

    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            for buffer in pool.map(send, range(4)):
                buffer.synchronize()
    used = [line.partition(" on ")[2] for line in card.log if line.startswith("copy")]
    assert len(set(used[:4])) == len(set(used[4:])) == 4


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_has_two_addresses(card: Card, library: Any, stream: int) -> None:
    transferred([1], sm.cuda_config(0, stream=stream)).synchronize()
    assert card.log[0] == "copy in on stream 0x1 of device 0"


def test_the_lease_of_a_pool_is_held_until_the_copy_is_done(card: Card, library: Any) -> None:
    card.runs_by_itself = False
    pool = sm.StoragePool(8, 2, pin_memory=False, on_exhausted="wait", timeout=10)
    source = sm.convert_array(np.arange(8, dtype=np.uint8), pool)
    expected = source.array.copy()
    buffer = sm.transfer_buffer(source, cuda_config=0)
    source.release()
    del source
    gc.collect()
    assert pool.num_free == 1
    first, second = [], []
    first.append(pool.acquire(8))
    waiting = threading.Thread(target=lambda: second.append(pool.acquire(8)))
    waiting.start()  # there is no later transfer, which would release the block
    card.run()
    waiting.join()
    assert second
    np.testing.assert_array_equal(values_of(buffer), expected)


def test_a_source_that_is_read_already_is_not_kept(card: Card, library: Any) -> None:
    class Eager(type(card.stream(0, 1))):  # type: ignore[misc]  # a class that is computed
        def put(self, what: str, do: Any) -> None:
            super().put(what, do)
            self.run()

    card.streams[0, 0x4400] = Eager(card, 0, 0x4400)
    before = set(threading.enumerate())
    transferred([1], sm.cuda_config(0, stream=0x4400))
    assert set(threading.enumerate()) <= before


class Gone:
    """An object that records its deletion."""

    def __init__(self) -> None:
        self.event = threading.Event()
        weakref.finalize(self, self.event.set)


def comes(event: threading.Event) -> bool:
    """Wait in steps: free-threaded CPython frees what this thread made only when it runs Python code."""
    return any(event.wait(0.01) for _ in range(1000))


class Point:
    """A stand-in for an event, whose wait calls a function."""

    def __init__(self, synchronize: Any = lambda: None) -> None:
        self.synchronize = synchronize


def test_a_slow_stream_does_not_hold_the_sources_of_others() -> None:
    keeper, slow, kept = Keeper(), threading.Event(), Gone()
    keeper.keep("slow", Point(slow.wait), object())
    gone = kept.event
    keeper.keep("fast", Point(), kept)
    del kept
    assert comes(gone)
    assert not keeper.drain(0.01), "something is kept still"
    slow.set()
    assert keeper.drain(10)


def test_a_source_is_released_when_the_device_fails() -> None:
    keeper, kept = Keeper(), Gone()

    def fail() -> None:
        raise TypeError("whatever a library raises")

    gone, done = kept.event, threading.Event()
    keeper.keep("stream", Point(fail), kept)
    del kept
    assert comes(gone)
    keeper.keep("stream", Point(done.set), object())
    assert comes(done), "what follows is kept for ever"


def test_one_thread_a_stream_idles_between_copies(
    card: Card, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.runs_by_itself = False
    before = set(threading.enumerate())
    for value in range(5):
        transferred([value])
        card.run()
        assert KEEPER.drain(10)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon, "it would keep the process from ending"
    monkeypatch.setattr("spdl_media.handover._IDLE", 0.01)
    transferred([5])
    card.run()
    thread.join(20)
    assert not thread.is_alive(), "without work it ends"
    transferred([6])
    card.run()
    assert KEEPER.drain(10)


def test_the_thread_that_keeps_a_source_starts_no_other_device(card: Card, cupy: FakeCupy) -> None:
    """With CUDA 12, it would start the first device by selecting the device that was current before."""
    cupy.cuda.Device(1).use()
    card.runs_by_itself = False
    buffer = transferred(np.arange(5), 1)
    card.run()
    assert KEEPER.drain(10)
    del buffer
    assert cupy.started == card.driver.started == {1}


@pytest.mark.parametrize("nbytes", [1 << 17, 5 << 17, (5 << 17) + 3])
def test_pageable_memory_goes_in_pieces_through_one_pinned_block(
    library: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    card = library.card
    card.total = 1 << 24
    window = transfer._Window(half=1 << 17)
    monkeypatch.setattr(transfer, "_WINDOW", window)
    values = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    buffers = []
    for index in range(2):
        source = sm.CPUBuffer(values + np.uint8(index))
        buffers.append(sm.transfer_buffer(source, cuda_config=0))
        source.array[...] = 0  # it was read when the call returned
    assert KEEPER.num_kept == 0
    assert [line for line in card.log if "pinned" in line] == [f"{1 << 18} bytes pinned"]
    pieces = [line for line in card.log if line.startswith("copy in")]
    assert len(pieces) == 2 * -(-nbytes // (1 << 17))
    for index, buffer in enumerate(buffers):
        back = sm.transfer_buffer_cpu(buffer).array
        np.testing.assert_array_equal(back, values + np.uint8(index))


def test_large_results_on_their_way_are_not_pinned_whole(library: Any) -> None:
    from spdl_media.storage import PinnedMemory

    library.card.total = 1 << 28
    small, large = (PinnedMemory().acquire(nbytes) for nbytes in (1 << 20, (64 << 20) + 1))
    assert (len(small), len(large)) == (1 << 20, (64 << 20) + 1)
    assert library.card.log == [f"{1 << 20} bytes pinned"]


def test_the_callers_allocator_is_used(card: Card, library: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    def allocate(nbytes: int, device: int, stream: int) -> int:
        calls.append((nbytes, device, stream))
        return card.allocate(nbytes, device, stream)

    def free(address: int) -> None:
        calls.append(("free",))
        card.free(address)

    config = sm.cuda_config(0, stream=0x4400, allocator=(allocate, free))
    buffer = transferred(np.arange(5, dtype=np.int32), config)
    buffer.synchronize()
    assert calls == [(20, 0, 0x4400)]
    np.testing.assert_array_equal(values_of(buffer), np.arange(5))
    view = buffer.array
    del buffer
    gc.collect()
    assert len(calls) == 1, "freed under an array that still uses it"
    del view
    gc.collect()
    assert calls[1:] == [("free",)]


def test_an_allocator_that_gives_nothing_is_an_error(library: Any) -> None:
    config = sm.cuda_config(0, allocator=(lambda *_: 0, lambda _: None))
    with pytest.raises(
        sm.TransferError, match=r"gave no memory for 8 bytes on CUDA device 0: it returned 0"
    ):
        transferred([1], config)


def test_memory_that_does_not_suffice_is_named_and_the_pools_continue(
    card: Card, library: Any
) -> None:
    pool = sm.StoragePool(2 << 20, 1, pin_memory=False, on_exhausted="raise")
    source = sm.convert_array(np.zeros(2 << 20, np.uint8), pool)
    with pytest.raises(
        sm.TransferError,
        match=r"2097152 bytes do not fit.*device 0, which has 1048576 bytes and 1048576 of them free",
    ):
        sm.transfer_buffer(source, cuda_config=0)
    del source
    gc.collect()
    assert pool.num_free == 1
    transferred([1]).synchronize()


def test_nothing_is_asked_of_an_allocator_for_no_elements(card: Card, library: Any) -> None:
    def never(*_: object) -> int:
        raise AssertionError("asked")

    config = sm.cuda_config(0, allocator=(never, never))
    buffer = transferred(np.zeros((0, 3)), config)
    assert buffer.shape == (0, 3)


def test_what_must_not_be_written_to_or_has_gaps_is_copied_first(card: Card, library: Any) -> None:
    values = np.arange(12).reshape(3, 4)
    values.flags.writeable = False
    for array in (values, values[:, ::2], values.T):
        buffer = sm.transfer_buffer(sm.CPUBuffer(array), cuda_config=0)
        np.testing.assert_array_equal(sm.transfer_buffer_cpu(buffer).array, array)


def test_the_library_that_is_there_pins_memory(card: Card, library: Any) -> None:
    storage, pool = sm.cpu_storage(100), sm.StoragePool(200, 2)
    assert (storage.is_pinned, pool.is_pinned) == (True, True)
    assert card.log == ["100 bytes pinned", "200 bytes pinned", "200 bytes pinned"]
    assert HISTORY.used, "a child that is forked now has no driver"
    address = sm.convert_array(np.arange(4), pool).array.ctypes.data
    assert address % 64 == 0


def test_memory_that_cannot_be_pinned_is_named_and_the_pool_continues(
    card: Card, library: Any
) -> None:
    for make in (sm.cpu_storage, sm.StoragePool):
        with pytest.raises(
            sm.TransferError, match=r"2097152 bytes of pinned memory.*pin_memory=False"
        ) as caught:
            make(2 << 20)
        assert isinstance(caught.value.__cause__, fake_cuda.FakeOutOfMemoryError)
    pool = sm.StoragePool(64, 1)
    first = pool.acquire(64)
    card.total = 0
    with pytest.raises(sm.TransferError, match="64 bytes of pinned memory cannot be allocated"):
        pool.acquire(64)
    assert (pool.count, pool.num_free) == (1, 0)
    del first
    assert pool.num_free == 1
    pool.acquire(64)


def test_memory_is_pinned_by_nothing_without_a_device(card: Card, library: Any) -> None:
    card.devices = 0
    with pytest.warns(UserWarning, match="memory cannot be pinned here: (torch|cupy) finds no"):
        assert not sm.cpu_storage(8).is_pinned


def test_a_type_that_pytorch_lacks_is_named(torch: FakeTorch) -> None:
    with pytest.raises(
        sm.TransferError, match=r"PyTorch has no tensors of (float128|longdouble|float64)"
    ):
        transferred(np.zeros(2, np.longdouble))


def test_a_copy_that_fails_says_what_it_was(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    buffer = transferred([1])
    tensor = fake_cuda.HostTensor(torch, np.arange(3))

    torch.card.broken = True
    for name, call in (
        (
            "8 bytes to CUDA device 0 failed: NVIDIA's driver refuses cuMemcpyHtoDAsync_v2",
            lambda: transferred([1]),
        ),
        ("8 bytes from cuda:0 failed: NVID", lambda: sm.transfer_buffer_cpu(buffer)),
    ):
        with pytest.raises(sm.TransferError, match=rf"copying {name}.*"):
            call()
    torch.card.broken = False
    monkeypatch.setattr(torch, "copy", fail)
    with pytest.raises(sm.TransferError, match="copying a batch to CUDA device 0 failed: Runtim"):
        sm.transfer_tensor(tensor)


def test_the_source_of_a_copy_that_fails_is_gone_at_once(torch: FakeTorch) -> None:
    source = np.arange(4)
    gone = weakref.ref(source)
    torch.card.broken = True
    gc.disable()
    try:
        try:
            sm.transfer_buffer(sm.CPUBuffer(source), cuda_config=0)
        except sm.TransferError as error:
            message = str(error)
        del source
        assert "copying 32 bytes to CUDA device 0 failed" in message
        assert gone() is None
    finally:
        gc.enable()


def test_and_back(card: Card, library: Any) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    failures = (sm.Failure(0, "bad.jpg", ValueError()),)
    buffer = sm.transfer_buffer(
        buffer_of(values, failures=failures, indices=(0, 1, 2)), cuda_config=1
    )
    pool = sm.StoragePool(values.nbytes, 1, pin_memory=False, on_exhausted="raise")
    back = sm.transfer_buffer_cpu(buffer, storage=pool)
    np.testing.assert_array_equal(back.array, values)
    assert (back.failures, back.indices) == (failures, (0, 1, 2))
    assert pool.num_free == 0
    with pytest.raises(sm.StorageTooSmallError, match="the result takes 48 bytes"):
        sm.transfer_buffer_cpu(buffer, storage=sm.cpu_storage(47, pin_memory=False))


def test_no_dimensions_and_no_elements(library: Any) -> None:
    for shape in ((), (0, 3)):
        buffer = transferred(np.zeros(shape, np.int64))
        assert buffer.shape == shape
        assert sm.transfer_buffer_cpu(buffer).shape == shape


# --- errors


def test_no_device_at_all(card: Card, library: Any) -> None:
    card.devices = 0
    name = "torch" if isinstance(library, FakeTorch) else "cupy"
    with pytest.raises(
        sm.TransferError,
        match=rf"^transfer_buffer needs a CUDA device, and there is none: {name} finds no CUDA.*"
        r"the driver serves CUDA 12\.4.*nvidia-smi",
    ):
        transferred([1])


def test_a_pytorch_without_cuda_is_named(card: Card, torch: FakeTorch) -> None:
    card.devices = 0
    torch.backends.cuda.is_built = lambda: False
    message = r"there is none: torch 0.fake is built without CUDA. .*pytorch.org.*pip install cupy-cuda12x"
    with pytest.raises(sm.TransferError, match=message):
        transferred([1])


def test_neither_library() -> None:
    with pytest.raises(
        sm.TransferError, match=r"neither torch nor cupy is installed\. pip install"
    ):
        transferred([1])


def test_a_number_that_no_device_has(library: Any) -> None:
    with pytest.raises(
        ValueError, match="CUDA device 2 was asked for, and there are 2, counted from 0"
    ):
        transferred([1], 2)


def test_a_stream_of_another_device(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_of_stream", lambda _: 1)
    with pytest.raises(
        sm.TransferError, match=r"stream 0x4400 belongs to CUDA device 1, and device 0"
    ):
        transferred([1], sm.cuda_config(0, stream=0x4400))
    transferred([1], sm.cuda_config(1, stream=0x4400)).synchronize()


def test_in_a_forked_child(library: Any) -> None:
    transferred([1]).synchronize()
    assert HISTORY.used
    HISTORY.after_fork()
    for call in (
        lambda: transferred([1]),
        lambda: sm.transfer_tensor([1]),
    ):
        with pytest.raises(
            sm.TransferError, match=r"cannot use CUDA in this process: it was forked.*'spawn'"
        ):
            call()


def test_looking_for_devices_in_vain_is_not_using_cuda(card: Card, library: Any) -> None:
    card.devices = 0
    with pytest.raises(sm.TransferError, match="needs a CUDA device"):
        transferred([1])
    HISTORY.after_fork()
    assert not HISTORY.lost


@each(
    "call, error, message",
    [
        (lambda: sm.transfer_buffer([1], cuda_config=0), TypeError, "takes a CPUBuffer, not list"),
        (
            lambda: transferred([1], "0"),
            TypeError,
            "cuda_config must be",
        ),
        (
            lambda: transferred([1], True),
            TypeError,
            "cuda_config must be",
        ),
        (
            lambda: sm.transfer_buffer_cpu(buffer_of([1])),
            TypeError,
            "takes a CUDABuffer, not CPUBuffer",
        ),
        (lambda: sm.cuda_config(-1), ValueError, "device_index must be at least 0, not -1"),
        (lambda: sm.cuda_config(None), TypeError, "device_index must be an int, not None"),
        (lambda: sm.cuda_config(0, stream="x"), TypeError, "cudaStream_t"),
        (lambda: sm.cuda_config(0, stream=-2), ValueError, "stream must be at least 0, not -2"),
        (lambda: sm.cuda_config(0, allocator=print), TypeError, "a tuple of two functions"),
        (lambda: sm.cuda_config(0, allocator=(print, 1)), TypeError, "a tuple of two functions"),
    ],
)
def test_misuse(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_released_buffer_is_refused(library: Any) -> None:
    buffer = buffer_of([1])
    buffer.release()
    with pytest.raises(ValueError, match="this buffer was released"):
        sm.transfer_buffer(buffer, cuda_config=0)


def test_configs_are_values() -> None:
    import pickle

    config = sm.cuda_config(np.int64(1), stream=7)
    assert config == sm.CUDAConfig(1, 7) == pickle.loads(pickle.dumps(config))
    assert type(config.device_index) is int


# --- ownership of streams


def test_the_driver_knows_the_device_of_a_stream(
    card: Card, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_of_stream(card.new_stream(1).address) == 1
    for address in (0, 1, 2, 0x9999):
        assert device_of_stream(address) is None
    for failing in ("cuCtxPushCurrent_v2", "cuCtxGetDevice"):
        monkeypatch.setattr(card.driver, failing, lambda *_: 1)
        assert device_of_stream(card.new_stream(1).address) is None
    fake_cuda._CARDS.clear()
    assert device_of_stream(0x4400) is None, "there is no driver"


def test_a_stream_of_cupys_lives_as_long_as_the_memory_that_it_reads(
    card: Card, cupy: FakeCupy
) -> None:
    """CuPy destroys a stream with its object, and an event cannot be recorded there any more."""
    card.runs_by_itself = False
    buffer = transferred(np.arange(4))
    stream = cupy.cuda.Stream(non_blocking=True)
    inner = stream.stream
    with stream:
        array = sm.to_cupy(buffer)
    del stream, buffer
    gc.collect()
    assert not inner.is_destroyed
    seen: list[list[int]] = []

    def read() -> bool:
        seen.append(list(values))
        return True

    values = (ctypes.c_int64 * 4).from_address(array.data.ptr)
    inner.put("read", read)
    del array
    gc.collect()
    card.run()
    assert seen == [[0, 1, 2, 3]], "the memory was given back under the work that reads it"
    assert "all waited for" not in card.log
    gc.collect()
    assert inner.is_destroyed, "it is kept no longer than that"


def test_memory_that_a_destroyed_stream_has_read_goes_back_when_all_is_done(
    card: Card, cupy: FakeCupy
) -> None:
    buffer = transferred(np.arange(4))
    stream = card.new_stream(0)
    buffer.wait_on(stream.address)
    stream.destroy()
    del buffer
    gc.collect()
    assert card.log.count("all waited for") == 1


# --- batches of tensors


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: str
    extra: Any = dataclasses.field(default=None, init=False)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_containers_keep_their_kind(card: Card, torch: FakeTorch) -> None:
    def tensor() -> Any:
        return fake_cuda.HostTensor(torch, np.arange(3))

    there = torch.empty((2,), dtype="int64", device="cuda:0")
    batch = {
        "list": [tensor(), 1, "text", None],
        "tuple": (tensor(),),
        "named": Pair(tensor(), 2),
        "default": collections.defaultdict(list, {"a": tensor()}),
        "ordered": collections.OrderedDict(a=tensor()),
        "frozen": MappingProxyType({"a": tensor()}),
        "sample": Sample(tensor(), "cat"),
        "buffer": buffer_of([7, 8]),
        "array": (array := np.ones(2)),
        "there": there,
    }
    result = sm.transfer_tensor(batch)
    moved = [
        result["list"][0],
        result["tuple"][0],
        result["named"].first,
        result["default"]["a"],
        result["ordered"]["a"],
        result["frozen"]["a"],
        result["sample"].image,
    ]
    for one in moved:
        assert one.device.type == "cuda"
        np.testing.assert_array_equal(one.values, np.arange(3))
    for name, value in batch.items():
        if name != "buffer":
            assert type(result[name]) is (dict if isinstance(value, Mapping) else type(value))
    assert result["list"][1:] == [1, "text", None]
    assert (result["sample"].label, result["sample"].extra) == ("cat", None)
    assert isinstance(batch["sample"].image, fake_cuda.HostTensor)
    np.testing.assert_array_equal(values_of(result["buffer"]), [7, 8])
    assert result["array"] is array
    assert result["there"] is there


class Second(Pair):
    def __new__(cls, first: Any) -> Self:
        return super().__new__(cls, first, 2)


def test_items_of_a_batch_come_over_once_and_alone(torch: FakeTorch) -> None:
    image = fake_cuda.HostTensor(torch, np.arange(3))
    user = collections.UserDict(image=image)
    counter, mapping, pair = sm.transfer_tensor([collections.Counter(a=3), user, Second(image)])
    assert counter == {"a": 3}
    assert (type(mapping), mapping["image"].device.type) == (dict, "cuda")
    assert user["image"] is image
    assert (type(pair), pair.first.device.type, pair.second) == (Second, "cuda", 2)


def test_tensors_are_ready_and_pinned_and_kept_for_the_default_stream(
    card: Card, torch: FakeTorch
) -> None:
    tensor = fake_cuda.HostTensor(
        torch, np.arange(3)
    )  # not pinned, so the stand-in refuses the copy
    result = sm.transfer_tensor(tensor)
    np.testing.assert_array_equal(result.values, np.arange(3))
    assert "memory kept for stream 0x1 of device 0" in card.log
    assert card.log[0].startswith("copy in on stream 0x1100")


def test_the_device_is_the_one_of_the_rank(
    card: Card, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = fake_cuda.HostTensor(torch, np.arange(3))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert sm.transfer_tensor(tensor).device.index == 1
    assert sm.transfer_tensor(tensor, cuda_config=0).device.index == 0
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ValueError, match="LOCAL_RANK must be the number of a device, not 'first'"):
        sm.transfer_tensor(tensor)


def test_and_back_to_pinned_memory(card: Card, torch: FakeTorch) -> None:
    values = np.arange(3.0)
    there = sm.transfer_tensor([fake_cuda.HostTensor(torch, values), buffer_of([5])])
    tensor, buffer, rest = sm.transfer_tensor_d2h([*there, 3])
    np.testing.assert_array_equal(tensor.values, values)
    assert tensor.is_pinned()
    np.testing.assert_array_equal(buffer.array, [5])
    assert rest == 3
    made = card.log.index("event on stream 0x1 of device 0")
    assert card.log[made + 1].startswith("wait on stream 0x1100"), "for the current stream"
    assert card.log[made + 2].startswith("copy out on stream 0x1100")
    event = torch.cuda.Stream(0).record_event()
    sm.transfer_tensor_d2h(there[0], event=event)
    with pytest.raises(sm.TransferError, match="lies on CUDA device 0, and device 1 was asked for"):
        sm.transfer_tensor_d2h(there[0], cuda_config=1)


def test_with_cupy_alone_buffers_move_and_tensors_are_refused(
    card: Card, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = sm.transfer_tensor([buffer_of([1, 2])])
    np.testing.assert_array_equal(values_of(result[0]), [1, 2])
    without = FakeTorch(Card(devices=0))
    install(monkeypatch, without)
    with pytest.raises(
        sm.TransferError, match="this PyTorch finds no CUDA device, although CuPy does"
    ):
        sm.transfer_tensor(fake_cuda.HostTensor(without, np.arange(3)))


@pytest.mark.parametrize("function", [sm.transfer_tensor, sm.transfer_tensor_d2h])
def test_without_cuda_the_batch_comes_back_with_one_warning(function: Any) -> None:
    batch = [object()]
    with pytest.warns(
        UserWarning, match=r"copies nothing, because no CUDA device.*neither torch nor cupy"
    ) as caught:
        assert function(batch) is batch
    assert caught[0].filename == __file__
    assert function(batch) is batch


def test_out_of_memory_in_a_batch(card: Card, torch: FakeTorch) -> None:
    tensor = fake_cuda.HostTensor(torch, np.zeros(2 << 20, np.uint8))
    with pytest.raises(
        sm.TransferError, match="2097152 bytes do not fit into the memory of CUDA device 0"
    ):
        sm.transfer_tensor({"a": tensor})


def test_many_threads(card: Card, library: Any) -> None:

    def work(seed: int) -> bool:
        same = []
        for step in range(20):
            values = np.full(64, seed * 20 + step)
            buffer = transferred(values, seed % 2)
            same.append(np.array_equal(sm.transfer_buffer_cpu(buffer).array, values))
        return all(same)

    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(work, range(4))) == [True] * 4


def test_nothing_is_imported_for_it() -> None:
    program = """
import sys
import spdl_media as sm
sm.transfer_buffer, sm.CUDABuffer, sm.cuda_config
assert not {"torch", "cupy", "nvidia.dali", "spdl_media.cuda"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sources_are_gone_when_all_is_done(card: Card, library: Any) -> None:
    source = np.arange(4)
    gone = weakref.ref(source)
    buffer = sm.transfer_buffer(sm.CPUBuffer(source), cuda_config=0)
    buffer.synchronize()
    del source
    assert KEEPER.drain(10)
    gc.collect()
    assert gone() is None
    assert KEEPER.num_kept == 0
