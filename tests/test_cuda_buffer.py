"""Buffers on a device: their attributes, and the waits between streams when other libraries take them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_cuda
import numpy as np
import pytest
from fake_cuda import (
    HISTORY,
    Card,
    DeviceArray,
    Driver,
    FakeCupy,
    FakeTorch,
    fresh_process,
    install,
    values_of,
)

import spdl_media as sm
from spdl_media.cuda.dali import ready_buffer

COPYING, SIDE = 0x4400, 0x5500


@pytest.fixture
def card() -> Iterator[Card]:
    found = Card(devices=2)
    found.runs_by_itself = False
    yield found
    found.run()  # otherwise threads would wait for queued work


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    fresh_process(monkeypatch)
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


def there(values: Any, device: int = 1, **about: Any) -> sm.CUDABuffer:
    """Make a device buffer whose copy is still queued on a stream."""
    source = sm.CPUBuffer(np.array(values), **about)
    return sm.transfer_buffer(source, cuda_config=sm.cuda_config(device, stream=COPYING))


def logged(card: Card, text: str) -> int:
    return sum(text in line for line in card.log)


def test_it_says_what_it_is(card: Card, library: Any) -> None:
    about = {"colorspace": "bt709", "color_range": "tv", "indices": (0, 1)}
    buffer = there(np.zeros((2, 3), np.float32), **about)
    assert (buffer.shape, buffer.dtype, buffer.ndim, buffer.nbytes) == ((2, 3), np.float32, 2, 24)
    assert (buffer.device, buffer.device_index, len(buffer)) == ("cuda:1", 1, 2)
    assert repr(buffer) == "<CUDABuffer: (2, 3) float32 on cuda:1>"
    assert (buffer.colorspace, buffer.color_range) == ("bt709", "tv")
    card.run()
    card.runs_by_itself = True
    back = sm.transfer_buffer_cpu(buffer)
    assert (back.colorspace, back.color_range, back.indices) == ("bt709", "tv", (0, 1))
    with pytest.raises(TypeError, match=r"len\(\) of a buffer without dimensions"):
        len(there(1))


# --- the array interface


def test_the_array_interface_names_the_stream_until_the_array_is_ready(
    card: Card, library: Any
) -> None:
    buffer = there(np.arange(6, dtype=np.uint16).reshape(2, 3))
    interface = buffer.__cuda_array_interface__
    address = buffer.array.__cuda_array_interface__["data"][0]
    assert interface == {
        "shape": (2, 3),
        "typestr": "<u2",
        "data": (address, False),
        "strides": None,
        "stream": COPYING,
        "version": 3,
    }
    card.run()
    assert buffer.__cuda_array_interface__["stream"] is None


def test_the_default_stream_is_1_in_the_array_interface(card: Card, library: Any) -> None:
    # 0 is ambiguous there, and not allowed.
    source = sm.convert_array([1])
    buffer = sm.transfer_buffer(source, cuda_config=sm.cuda_config(0, stream=0))
    assert buffer.__cuda_array_interface__["stream"] == 1


def test_an_empty_array_has_no_address(card: Card, library: Any) -> None:
    assert there(np.zeros((0, 3))).__cuda_array_interface__["data"] == (0, False)


def test_the_memory_lives_as_long_as_an_array_over_it(card: Card, library: Any) -> None:
    class Taker:
        def __init__(self, given: Any) -> None:
            self.interface, self.given = given.__cuda_array_interface__, given

    buffer = there(np.arange(4))
    address = values_of(buffer).ctypes.data
    taker = Taker(buffer)
    buffer.release()
    del buffer
    gc.collect()
    card.run()
    there(np.full(4, 9))  # would reuse the memory
    card.run()
    assert list((ctypes.c_int64 * 4).from_address(address)) == [0, 1, 2, 3]
    del taker
    gc.collect()
    assert logged(card, "event on stream 0x1 of device 1") == 1, "the default stream may read it"
    card.run()
    assert values_of(there(np.arange(4))).ctypes.data == address, "the memory is not used again"


# --- DLPack


@pytest.mark.parametrize(("stream", "waits"), [(SIDE, SIDE), (1, 1), (2, 2), (None, 1)])
def test_a_taker_by_dlpack_has_its_stream_wait(
    card: Card, library: Any, stream: int | None, waits: int
) -> None:
    buffer = there([1, 2])
    assert buffer.__dlpack_device__() == (2, 1)
    given = buffer.__dlpack__(stream=stream, max_version=(1, 0), dl_device=(2, 1), copy=False)
    assert logged(card, f"wait on stream {waits:#x} of device 1") == 1
    # The owner of the memory must not make another stream wait in addition.
    assert getattr(given, "exports", [-1]) == [-1]


@pytest.mark.parametrize("stream", [-1, COPYING])
def test_nobody_waits_who_need_not(card: Card, library: Any, stream: int) -> None:
    there([1, 2]).__dlpack__(stream=stream)
    assert logged(card, "wait on") == 0


def test_a_ready_array_is_its_owners_to_hand_over(card: Card) -> None:
    # As an array of DALI, which is complete when DALI returns.
    owner = DeviceArray(card, 0, np.arange(3), None)
    buffer = sm.CUDABuffer(owner, (3,), np.int64, 0)
    buffer.__dlpack__(stream=SIDE)
    buffer.synchronize()
    buffer.wait_on(SIDE)
    assert owner.exports == [SIDE]
    assert buffer.__cuda_array_interface__["stream"] is None
    assert not card.log


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"copy": True}, BufferError, "hands its own memory over, so copy=True is not possible"),
        (
            {"dl_device": (1, 0)},
            BufferError,
            r"lies on cuda:1, and DLPack device \(1, 0\).*transfer_buffer_cpu",
        ),
        ({"stream": 0}, ValueError, "DLPack has no stream 0: 1 is the default stream"),
    ],
)
def test_what_dlpack_does_not_give(
    card: Card, library: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        there([1]).__dlpack__(**options)


# --- memory of DALI, which knows only its own stream


@pytest.fixture
def driver(card: Card) -> Driver:
    FakeTorch(card)  # importing it installs the card's driver
    return card.driver


def of_dali(card: Card, values: np.ndarray) -> Any:
    """Make an array whose memory is reused in the order of its stream."""
    address = card.allocate(values.nbytes, 1, COPYING)
    memory = np.frombuffer((ctypes.c_uint8 * values.nbytes).from_address(address), values.dtype)
    memory[:] = values
    array = DeviceArray(card, 1, memory, None)
    weakref.finalize(array, card.free, address)
    return array


def by_interface(given: Any, stream: int) -> Any:
    return given, given.__cuda_array_interface__


def by_dlpack(given: Any, stream: int) -> Any:
    given.__dlpack__(stream=stream)


@pytest.mark.parametrize(("take", "stream"), [(by_interface, 1), (by_dlpack, SIDE)])
def test_memory_of_dali_waits_for_the_streams_that_read_it(
    card: Card, driver: Driver, take: Any, stream: int
) -> None:
    buffer = ready_buffer(of_dali(card, np.arange(4)), COPYING, indices=(0, 1, 2, 3))
    assert isinstance(buffer, sm.CUDABuffer)
    card.run()
    buffer.synchronize()
    assert (buffer.device, buffer.shape, buffer.indices) == ("cuda:1", (4,), (0, 1, 2, 3))
    memory = (ctypes.c_int64 * 4).from_address(buffer.__cuda_array_interface__["data"][0])
    assert buffer.__cuda_array_interface__["stream"] is None, "it is complete"
    taken = take(buffer, stream)
    seen: list[list[int]] = []

    def read() -> bool:
        seen.append(list(memory))
        return True

    card.stream(1, stream).put("read", read)
    buffer.release()
    del taken, buffer
    gc.collect()
    card.stream(1, COPYING).run()  # as far as it can get, before the other one
    assert list(memory) == [0, 1, 2, 3]
    card.run()
    assert seen == [[0, 1, 2, 3]]
    assert list(memory) != [0, 1, 2, 3], "the memory is not given back"
    assert driver.contexts == []


def test_memory_of_dali_waits_for_work_on_a_tensor_that_outlives_the_buffer(
    card: Card, torch: FakeTorch
) -> None:
    tensor = sm.to_torch(ready_buffer(of_dali(card, np.arange(4)), COPYING))
    gc.collect()
    card.run()
    memory = (ctypes.c_int64 * 4).from_address(tensor.data_ptr())  # keeps nothing
    seen: list[list[int]] = []

    def read() -> bool:
        seen.append(list(memory))
        return True

    card.stream(1, 1).put("read", read)
    del tensor
    gc.collect()
    card.stream(1, COPYING).run()  # as far as it can get, before the other one
    card.run()
    assert seen == [[0, 1, 2, 3]]
    assert list(memory) != [0, 1, 2, 3], "the memory is not given back"


def test_memory_of_dali_that_nobody_read_waits_for_nobody(card: Card, driver: Driver) -> None:
    buffer = ready_buffer(of_dali(card, np.arange(4)), COPYING)
    buffer.__dlpack__(stream=COPYING)
    del buffer
    gc.collect()
    assert not driver.events


def test_all_is_waited_for_if_a_reader_of_dalis_memory_is_gone(card: Card, driver: Driver) -> None:
    buffer = ready_buffer(of_dali(card, np.arange(4)), COPYING)
    buffer.__dlpack__(stream=SIDE)
    card.stream(1, SIDE).destroy()
    del buffer
    gc.collect()
    assert logged(card, "all waited for") == 1
    assert not driver.events, "the event is kept"


def test_a_forked_child_leaves_dalis_memory_alone(card: Card, driver: Driver) -> None:
    buffer = ready_buffer(of_dali(card, np.arange(4)), COPYING)
    buffer.__dlpack__(stream=SIDE)
    card.log.clear()
    HISTORY.after_fork()
    HISTORY.lost = True
    del buffer
    gc.collect()
    assert not logged(card, "event on") + logged(card, "wait on")


# --- the end of its life


def test_release_gives_the_memory_back(card: Card, library: Any) -> None:
    buffer = there(np.arange(4))
    gone = weakref.ref(buffer.array)
    with buffer as same:
        assert same is buffer
        assert "released" not in repr(buffer)
    assert "released" in repr(buffer)
    assert gone() is None, "release keeps the memory"
    buffer.release()
    buffer.synchronize()
    assert repr(buffer) == "<CUDABuffer: released>"
    for use in (
        lambda: buffer.array,
        buffer.__dlpack__,
        lambda: buffer.__cuda_array_interface__,
        lambda: sm.transfer_buffer_cpu(buffer),
        buffer.__enter__,
    ):
        with pytest.raises(ValueError, match="this buffer was released, and its memory may hold"):
            use()


def test_memory_waits_for_the_streams_that_read_it(card: Card, library: Any) -> None:
    buffer = there(np.arange(4))
    memory = (ctypes.c_int64 * 4).from_address(values_of(buffer).ctypes.data)  # keeps nothing
    buffer.wait_on(SIDE)
    seen: list[list[int]] = []

    def read() -> bool:
        seen.append(list(memory))
        return True

    card.stream(1, SIDE).put("read", read)
    del buffer
    gc.collect()
    again = there(np.full(4, 9))  # after it on the same stream
    card.stream(1, COPYING).run()  # as far as it can get, before the other one
    card.run()
    assert seen == [[0, 1, 2, 3]]
    np.testing.assert_array_equal(values_of(again), np.full(4, 9))


def test_a_stream_of_the_users_is_not_destroyed_with_cupys_object_for_it(
    card: Card, cupy: FakeCupy
) -> None:
    buffer = there(np.arange(4))
    buffer.wait_on(SIDE)
    del buffer
    gc.collect()
    assert not card.stream(1, COPYING).is_destroyed
    assert not card.stream(1, SIDE).is_destroyed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_goes_back_although_a_stream_that_read_it_is_gone(
    card: Card, cupy: FakeCupy
) -> None:
    freed: list[int] = []
    config = sm.cuda_config(0, stream=COPYING, allocator=(card.allocate, freed.append))
    buffer = sm.transfer_buffer(sm.convert_array([1]), cuda_config=config)
    address = values_of(buffer).ctypes.data
    buffer.wait_on(SIDE)
    card.stream(0, SIDE).destroy()
    del buffer
    gc.collect()
    assert freed == [address]


def test_a_forked_child_is_refused(card: Card, library: Any) -> None:
    buffer = there([1])
    HISTORY.after_fork()
    for use in (
        buffer.synchronize,
        buffer.__dlpack__,
        lambda: buffer.wait_on(SIDE),
        lambda: buffer.__cuda_array_interface__,
        lambda: sm.to_torch(buffer) if isinstance(library, FakeTorch) else sm.to_cupy(buffer),
    ):
        with pytest.raises(
            sm.TransferError, match=r"a CUDABuffer cannot use CUDA in this process: it was forked"
        ):
            use()


def test_a_forked_child_does_not_give_its_parents_memory_back(card: Card, library: Any) -> None:
    freed: list[int] = []
    source = sm.convert_array([1])
    config = sm.cuda_config(0, stream=COPYING, allocator=(card.allocate, freed.append))
    buffer = sm.transfer_buffer(source, cuda_config=config)
    buffer.wait_on(SIDE)
    HISTORY.after_fork()
    before = list(card.log)
    del buffer
    gc.collect()
    assert (freed, card.log) == ([], before)


# --- arrays of other libraries


def test_to_torch_gives_a_tensor_over_the_same_memory(card: Card, torch: FakeTorch) -> None:
    buffer = there(np.arange(3))
    side = torch.cuda.ExternalStream(SIDE, 1)
    with torch.cuda.stream(side):
        tensor = sm.to_torch(buffer)
    assert tensor is not buffer.array
    assert tensor.data.ptr == values_of(buffer).ctypes.data
    assert logged(card, f"wait on stream {SIDE:#x} of device 1") == 1
    assert logged(card, f"memory kept for stream {SIDE:#x} of device 1") == 1


def test_to_torch_of_anothers_array_goes_through_dlpack(
    card: Card, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = there(np.arange(3))
    torch = FakeTorch(card)
    install(monkeypatch, torch)
    with torch.cuda.stream(torch.cuda.ExternalStream(SIDE, 1)):
        tensor = sm.to_torch(buffer)
    assert tensor.data.ptr == values_of(buffer).ctypes.data
    assert logged(card, f"wait on stream {SIDE:#x} of device 1") == 1


def test_to_cupy(card: Card, cupy: FakeCupy) -> None:
    buffer = there(np.arange(3))
    with cupy.stream_at(SIDE, 1):
        array = sm.to_cupy(buffer)
    assert (array.index, array.data.ptr) == (1, values_of(buffer).ctypes.data)
    assert logged(card, f"wait on stream {SIDE:#x} of device 1") == 1
    with pytest.raises(TypeError, match=r"to_cupy takes a CUDABuffer, not CPUBuffer\. transfer_bu"):
        sm.to_cupy(sm.convert_array([1]))


def test_to_numba(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def select(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    def as_cuda_array(given: Any) -> Any:
        assert current == [given.device_index], "Numba takes it for memory of the current device"
        return "numba", given.__cuda_array_interface__

    cuda = SimpleNamespace(as_cuda_array=as_cuda_array, gpus=[select(0), select(1)])
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "numba.cuda", cuda)  # type: ignore[arg-type]  # a stand-in
    buffer = there(np.arange(3))
    name, interface = sm.to_numba(buffer)
    assert (name, interface["stream"]) == ("numba", COPYING)


def test_numbas_name_for_it() -> None:
    cuda = pytest.importorskip("numba.cuda")
    assert callable(cuda.as_cuda_array)


def test_to_jax(card: Card, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_dlpack(given: Any) -> Any:
        assert given.__dlpack_device__() == (2, 1)
        return fake_cuda.by_dlpack(given, 1, SIDE)[0]

    jax = SimpleNamespace(
        dtypes=SimpleNamespace(canonicalize_dtype=lambda dtype: dtype),
        dlpack=SimpleNamespace(from_dlpack=from_dlpack),
    )
    monkeypatch.setitem(sys.modules, "jax", jax)  # type: ignore[arg-type]  # a stand-in
    buffer = there(np.arange(3))
    assert sm.to_jax(buffer).ctypes.data == values_of(buffer).ctypes.data
    assert logged(card, f"wait on stream {SIDE:#x} of device 1") == 1


def test_to_numpy_says_that_it_lies_on_a_device(library: Any) -> None:
    with pytest.raises(TypeError, match=r"this one lies on cuda:1\. transfer_buffer_cpu copies"):
        sm.to_numpy(there([1]))


@pytest.mark.parametrize(
    ("package", "convert", "line"),
    [
        ("cupy", sm.to_cupy, r"pip install cupy-cuda12x"),
        ("torch", sm.to_torch, r"pip install \"\.\[torch\]\""),
        ("numba.cuda", sm.to_numba, "pip install numba-cuda"),
        ("jax", sm.to_jax, "pip install jax"),
    ],
)
def test_a_library_that_is_missing_is_named(
    card: Card, monkeypatch: pytest.MonkeyPatch, package: str, convert: Any, line: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    buffer = sm.CUDABuffer(DeviceArray(card, 0, np.arange(3), None), (3,), np.int64, 0)
    with pytest.raises(sm.MissingDependencyError, match=line):
        convert(buffer)
