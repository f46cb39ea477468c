"""Buffers as arrays of NumPy, PyTorch, JAX and Numba share memory, which lives as long as any of them."""

from __future__ import annotations

import gc
import io
import wave
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from effort import each
from plane_oracle import rgb, sound

import spdl_media as sm

CONVERT = {"torch": sm.to_torch, "jax": sm.to_jax, "numba": sm.to_numba, "numpy": sm.to_numpy}
DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "float16", "float32", "bool"]


def library(name: str) -> ModuleType:
    module: ModuleType = pytest.importorskip(name)
    return module


def place(array: Any) -> int:
    """Return the address of an array of any library."""
    for name in ("data_ptr", "unsafe_buffer_pointer"):
        if hasattr(array, name):
            return int(getattr(array, name)())
    return int(array.ctypes.data)


@each("name", CONVERT)
@each("dtype", DTYPES)
@each("store", [False, True])
def test_memory_is_shared(name: str, dtype: str, store: bool) -> None:
    library(name)
    values = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    pool = sm.StoragePool(1000, 2, pin_memory=False) if store else None
    buffer = sm.convert_array(values, pool)
    array = CONVERT[name](buffer)
    assert place(array) == buffer.__array_interface__["data"][0]
    assert tuple(array.shape) == (2, 3, 4)
    assert str(array.dtype).removeprefix("torch.") == dtype
    assert np.array_equal(np.asarray(array), values)


@pytest.mark.parametrize("name", CONVERT)
def test_frames_reach_every_library(name: str) -> None:
    library(name)
    pictures = [rgb(8, 6, value) for value in range(3)]
    batch = CONVERT[name](sm.convert_frames(pictures, layout="NCHW"))
    assert tuple(batch.shape) == (3, 3, 6, 8)
    assert [int(one) for one in batch[:, 0, 0, 0]] == [0, 1, 2]
    samples = np.linspace(-1, 1, 200, dtype=np.float32).reshape(100, 2)
    waveform = CONVERT[name](sm.convert_frames(sound(samples)))
    assert np.array_equal(np.asarray(waveform), samples.T)


@pytest.mark.parametrize("name", CONVERT)
def test_the_array_keeps_the_memory(name: str) -> None:
    library(name)
    pool = sm.StoragePool(1000, 1, pin_memory=False, on_exhausted="raise")
    array = CONVERT[name](sm.convert_frames(rgb(8, 6, 7), pool))
    gc.collect()
    assert pool.num_free == 0
    assert (np.asarray(array) == 7).all()
    del array
    gc.collect()
    assert pool.num_free == 1


@pytest.mark.parametrize("name", ["torch", "numba", "numpy"])
def test_arrays_are_writable(name: str) -> None:
    library(name)
    buffer = sm.convert_frames(rgb(8, 6))
    array = CONVERT[name](buffer)
    array[2, 3, 1] = 9
    assert buffer.array[2, 3, 1] == 9


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("name", CONVERT)
def test_plain_arrays_are_taken_too(name: str) -> None:
    library(name)
    values = np.arange(24, dtype=np.int16).reshape(12, 2)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((2, 2, 8000, 0, "NONE", ""))
        writer.writeframes(values.tobytes())
    for array in (values, sm.load_wav(file.getvalue()), values[:, 1], values[::3]):
        found = CONVERT[name](array)
        assert np.array_equal(np.asarray(found), array)
        if name != "jax":
            assert place(found) == place(array)


def test_torch_names_the_arrays_that_it_cannot_share() -> None:
    library("torch")
    with pytest.raises(ValueError, match="negative"):
        sm.to_torch(np.arange(4)[::-1])
    with pytest.raises(TypeError, match="can't convert"):
        sm.to_torch(np.array(["a"]))


def test_torch_takes_labels_and_deep_images() -> None:
    torch = library("torch")
    assert sm.to_torch(sm.convert_array([3, 1])).dtype == torch.int64
    assert sm.to_torch(sm.convert_array([0.5])).dtype == torch.float64
    assert sm.to_torch(sm.convert_array(np.ones(3, np.uint16))).dtype == torch.uint16
    assert torch.as_tensor(np.asarray(sm.convert_array([3, 1]))).tolist() == [3, 1]


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_jax_does_not_cut_silently(dtype: str) -> None:
    jax = library("jax")
    buffer = sm.convert_array(np.arange(3).astype(dtype))
    with pytest.raises(TypeError, match=f"JAX would cut {dtype} to .*jax_enable_x64.*dtype="):
        sm.to_jax(buffer)
    jax.config.update("jax_enable_x64", True)
    try:
        array = sm.to_jax(buffer)
        assert place(array) == place(buffer.array)
        assert str(array.dtype) == dtype
    finally:
        jax.config.update("jax_enable_x64", False)


def test_jax_takes_the_buffer_itself() -> None:
    jax = library("jax")
    buffer = sm.convert_frames([rgb(8, 6, 7)] * 2)
    array = jax.dlpack.from_dlpack(buffer)
    assert place(array) == place(buffer.array)
    assert int(array.sum()) == 7 * 2 * 8 * 6 * 3


def test_torch_takes_the_buffer_itself() -> None:
    torch = library("torch")
    buffer = sm.convert_frames([rgb(8, 6, 7)] * 2)
    assert torch.from_dlpack(buffer).data_ptr() == place(buffer.array)


def test_numba_compiles_for_it() -> None:
    numba = library("numba")

    @numba.njit
    def total(pixels: Any) -> int:
        result = 0
        for value in pixels.flat:
            result += value
        return result

    buffer = sm.convert_frames([rgb(8, 6, 7)] * 2)
    assert total(sm.to_numba(buffer)) == total(np.asarray(buffer)) == 7 * 2 * 8 * 6 * 3


@each("name", CONVERT)
@each("wrong", [rgb(8, 6), "ab", None])
def test_not_a_buffer(name: str, wrong: Any) -> None:
    library(name)
    message = (
        f"to_{name} takes a CPUBuffer, a CUDABuffer or a NumPy array, not {type(wrong).__name__}"
    )
    with pytest.raises(TypeError, match=message):
        CONVERT[name](wrong)


class Pair(NamedTuple):
    image: Any
    label: Any


@pytest.mark.parametrize("name", ["torch", "jax", "numpy"])
def test_all_of_a_batch_is_converted(name: str) -> None:
    """Containers and other values stay; JAX gets labels as its default 32-bit integers."""
    library(name)
    image, labels = sm.convert_frames([rgb(8, 6, 7)] * 2), sm.convert_array([3, 5])
    clip = sm.Clip(image, image, (0.0, 0.5), 0.25, 8000)
    words = np.array(["a", "b"])
    batch = {
        "pair": Pair(image, labels),
        "rest": [words, (labels.array, "cat", None)],
        "clip": clip,
    }
    found = CONVERT[name](batch)
    assert place(found["pair"].image) == place(found["clip"].video) == place(image.array)
    assert isinstance(found["clip"], sm.Clip)
    assert found["clip"].timestamps == (0.0, 0.5)
    if name == "torch":
        collated = library(name).utils.data.default_collate([found["clip"]] * 3)
        assert isinstance(collated, sm.Clip)
        assert (collated.video.shape, collated.sample_rate.tolist()) == (
            (3, *image.shape),
            [8000] * 3,
        )
    assert found["rest"][0] is words
    assert found["rest"][1][1:] == ("cat", None)
    kind = type(CONVERT[name](image))
    for numbers in (found["pair"].label, found["rest"][1][0]):
        assert isinstance(numbers, kind)
        assert numbers.tolist() == [3, 5]
    assert str(found["pair"].label.dtype)[-2:] == ("32" if name == "jax" else "64")


def test_jax_keeps_the_integers_of_a_batch_that_32_bits_do_not_hold() -> None:
    library("jax")
    with pytest.raises(TypeError, match=r"JAX would cut int64 to int32.*jax_enable_x64"):
        sm.to_jax((sm.convert_array([2**40]),))


@pytest.mark.parametrize("name", CONVERT)
def test_a_released_buffer_has_no_array(name: str) -> None:
    library(name)
    buffer = sm.convert_frames(rgb(8, 6))
    buffer.release()
    with pytest.raises(ValueError, match="this buffer was released"):
        CONVERT[name](buffer)


def test_fields_of_a_dataclass_that_are_not_set_stay_so() -> None:
    @dataclass
    class Item:
        image: Any
        later: Any = field(init=False)

    result = sm.to_numpy(Item(sm.convert_array([1, 2])))
    assert result.image.tolist() == [1, 2]
    assert not hasattr(result, "later")
