"""Buffers: their attributes, sharing of their memory, and lifetimes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import av
import numpy as np
import pytest
from plane_oracle import rgb

import spdl_media as sm
from spdl_media.testing import frame_index, index_planes, make_video


def test_a_buffer_tells_what_it_holds() -> None:
    buffer = sm.convert_frames([rgb(8, 6, 1), rgb(8, 6, 2)])
    assert (buffer.shape, buffer.ndim, buffer.nbytes, len(buffer)) == ((2, 6, 8, 3), 4, 288, 2)
    assert buffer.dtype == np.uint8
    assert buffer.device == "cpu"
    assert repr(buffer) == "<CPUBuffer: (2, 6, 8, 3) uint8>"
    assert (buffer.failures, buffer.indices) == ((), None)
    assert buffer.valid.tolist() == [True, True]


def test_the_error_of_an_array_method_tells_how_to_get_an_array() -> None:
    message = r"^'CPUBuffer' object has no attribute 'permute'\. A buffer .* to_torch\(buffer\)"
    with pytest.raises(AttributeError, match=message):
        sm.convert_frames(rgb(8, 6)).permute(2, 0, 1)  # type: ignore[attr-defined]


def test_a_batch_tells_what_became_of_its_inputs() -> None:
    failures = (sm.Failure(1, "b.jpg", ValueError("damaged")),)
    zeros = np.zeros((3, 2))
    filled = sm.CPUBuffer(zeros, failures=failures, indices=(0, 1, 2))
    assert filled.valid.tolist() == [True, False, True]
    assert repr(filled) == "<CPUBuffer: (3, 2) float64, 1 failed>"
    skipped = sm.CPUBuffer(zeros[:2], failures=failures, indices=(0, 2))
    assert skipped.valid.tolist() == [True, True]


def test_the_array_interface_shares_writable_memory() -> None:
    buffer = sm.convert_frames(rgb(8, 6))
    interface = buffer.__array_interface__
    assert interface["shape"] == (6, 8, 3)
    assert interface["typestr"] == "|u1"
    assert interface["version"] == 3
    first, second = np.asarray(buffer), np.asarray(buffer)
    first[2, 3, 1] = 9
    assert second[2, 3, 1] == 9
    assert interface["data"] == (first.ctypes.data, False)


def test_rows_are_views() -> None:
    buffer = sm.convert_frames([rgb(8, 6, 1), rgb(8, 6, 2)])
    buffer[1][2, 3] = 9
    assert buffer.array[1, 2, 3].tolist() == [9, 9, 9]
    assert [np.shares_memory(row, buffer.array) for row in buffer] == [True, True]
    assert buffer[-1, ..., 0].shape == (6, 8)
    with pytest.raises(IndexError):
        buffer[2]
    row = buffer[0]
    buffer.release()
    assert (row == 1).all()
    with pytest.raises(ValueError, match="this buffer was released"):
        buffer[0]


def test_the_array_protocol_of_numpy_1_and_2() -> None:
    buffer = sm.convert_array(np.arange(6, dtype=np.int16))
    for same in (
        buffer.__array__(),
        buffer.__array__(np.dtype("int16")),
        buffer.__array__(copy=False),
    ):
        assert same.ctypes.data == buffer.array.ctypes.data
    assert not np.shares_memory(buffer.__array__(copy=True), buffer.array)
    floats = buffer.__array__(np.float32)
    assert (floats.dtype, floats.tolist()) == (np.float32, [0, 1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="a buffer of int16 becomes float32 by a copy alone"):
        buffer.__array__(np.float32, copy=False)
    assert np.array(buffer, np.float64).dtype == np.float64


def test_dlpack_shares_writable_memory() -> None:
    buffer = sm.convert_frames(rgb(8, 6))
    assert buffer.__dlpack_device__() == (1, 0)
    first = np.from_dlpack(buffer)
    assert np.shares_memory(first, buffer.array)
    buffer.array[2, 3, 1] = 9
    assert first[2, 3, 1] == 9


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="DLPack 1 came in 2.1")
def test_dlpack_takes_the_options_of_its_protocol() -> None:
    buffer = sm.convert_frames(rgb(8, 6, 5))
    capsule = buffer.__dlpack__(stream=None, max_version=(1, 0), dl_device=(1, 0), copy=False)
    assert "dltensor_versioned" in repr(capsule)
    copied = np.from_dlpack(buffer, copy=True)
    assert not np.shares_memory(copied, buffer.array)
    with pytest.raises(BufferError):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(TypeError, match="device"):
        buffer.__dlpack__(device="cpu")  # type: ignore[call-arg]


def test_the_array_outlives_buffer_frames_and_packets() -> None:
    gc.collect()
    before = _alive()
    packets = sm.demux_video(make_video(index_planes(8, 64, 48), codec="libx265"))
    frames = sm.decode_packets(packets, filter_desc=None)
    buffer = sm.convert_frames(frames)
    arrays = [np.asarray(buffer), np.from_dlpack(buffer), sm.to_numpy(buffer)]
    assert _alive() - before == 1 + 8 + 1 + 8, "packets and frames, ours and FFmpeg's"
    watch = weakref.ref(buffer)
    del packets, frames, buffer
    gc.collect()
    assert _alive() == before
    for array in arrays:
        assert [frame_index(one[0, :48]) for one in array] == list(range(8))
    del array
    arrays.pop(0)
    gc.collect()
    assert watch() is None, "only np.asarray keeps the buffer itself"
    assert frame_index(arrays[0][7, 0, :48]) == 7


def _alive() -> int:
    """Count packets and frames that are alive; those of FFmpeg do not support weak references."""
    kinds = (sm.VideoPackets, sm.VideoFrames, av.Packet, av.VideoFrame)
    return sum(type(one) in kinds for one in gc.get_objects())


def test_memory_is_free_when_the_last_view_is_gone() -> None:
    pool = sm.StoragePool(1024, 1, pin_memory=False, on_exhausted="raise")
    buffer = sm.convert_array(np.arange(10), pool)
    views: list[Any] = [np.asarray(buffer), np.from_dlpack(buffer), sm.to_numpy(buffer)[3:]]
    del buffer
    while views:
        assert pool.num_free == 0
        views.pop()
    assert pool.num_free == 1


def test_a_buffer_is_made_of_bools_and_scalars_too() -> None:
    assert np.from_dlpack(sm.convert_array([True, False])).tolist() == [True, False]
    scalar = sm.convert_array(7)
    assert int(np.asarray(scalar)) == 7
    assert scalar.valid.tolist() == [True]
    with pytest.raises(TypeError, match="without dimensions"):
        len(scalar)
