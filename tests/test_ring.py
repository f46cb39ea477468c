"""Ring: arrays in shared memory between two processes, without copies, and the reuse of blocks."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from left_behind import descriptors

import spdl_media as sm
from spdl_media import ring as _ring
from spdl_media import shared_memory
from spdl_media._optional import is_available, require
from spdl_media.ring import Ring, Sender, begin_to_send, shared_empty, unpack
from spdl_media.testing import make_image, make_video

BLOCK = 1 << 20


class Rig:
    """Both ends of a ring in one process."""

    def __init__(self, **options: Any) -> None:
        options = {"num_sent": 2, "num_views": 4} | options
        self.ring = Ring(BLOCK, **options)
        begin_to_send(self.ring.blocks)
        assert shared_memory.sender is not None
        self.sender: Sender = shared_memory.sender

    def cross(self, value: Any) -> Any:
        return unpack(bytes(_ring.pack([value])), self.ring)

    @property
    def num_free(self) -> int:
        blocks = self.ring.blocks
        return blocks.count - len({*np.flatnonzero(blocks.sent)} | self.sender._own.keys())


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    begin_to_send(None)
    made.ring.blocks.close_file()


def big(value: int = 7, dtype: str = "uint8", shape: tuple[int, ...] = (100, 100)) -> Any:
    return np.full(shape, value, dtype)


ARRAYS = {
    "contiguous": np.arange(10_000, dtype=np.int64).reshape(100, 100),
    "transposed": np.arange(10_000, dtype=np.int64).reshape(100, 100).T,
    "mirrored": np.arange(10_000, dtype=np.int64).reshape(100, 100)[:, ::-1],
    "every other": np.arange(20_000, dtype=np.float16)[::2],
    "big endian": np.arange(5000, dtype=">i4"),
    "records": np.zeros(1000, [("a", "i4"), ("b", "f8")]),
    "times": np.arange(5000).astype("datetime64[s]"),
    "objects": np.array([{"a": 1}, "b", None] * 1000, object),
    "none": np.empty((0, 5)),
    "scalar": np.array(3.5),
    "small": np.arange(5),
    "strings": np.array(["word"] * 5000),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_cross_as_they_are(name: str, rig: Rig) -> None:
    array = ARRAYS[name]
    found = rig.cross([array, {"again": array}])
    assert found[0] is found[1]["again"]
    assert (found[0].dtype, found[0].shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found[0], array)
    assert found[0].flags.writeable
    constant = array.view()
    constant.flags.writeable = False
    # Pickle itself does not preserve it for arrays of objects and times.
    assert rig.cross([constant])[0].flags.writeable == (array.dtype.kind in "OM")


def test_nothing_big_is_in_the_message(rig: Rig) -> None:
    arrays = {"a": [big(), (big(1)[:, ::-1],)], "bytes": b"x" * 100_000}
    message = bytes(_ring.pack([arrays]))
    assert len(message) < 2000
    found = unpack(message, rig.ring)
    assert found["bytes"] == arrays["bytes"]
    np.testing.assert_array_equal(found["a"][1][0], 1)


def test_a_block_is_free_when_the_last_array_over_it_is_gone(rig: Rig) -> None:
    before = rig.num_free
    found = rig.cross({"a": big(1), "b": big(2)})
    # Both share one block.
    assert rig.num_free == before - 1
    row = found["a"][3]
    del found
    assert rig.num_free == before - 1
    np.testing.assert_array_equal(row, 1)
    del row
    assert rig.num_free == before


def test_buffers_cross_with_their_metadata(rig: Rig) -> None:
    buffer = sm.CPUBuffer(big(), indices=(3,), colorspace="bt709")
    found = rig.cross(buffer)
    assert (found.indices, found.colorspace) == ((3,), "bt709")
    np.testing.assert_array_equal(found.array, buffer.array)
    free = rig.num_free
    found.release()
    assert rig.num_free == free + 1


@pytest.mark.skipif(not is_available("torch"), reason="needs torch")
def test_tensors_cross(rig: Rig) -> None:
    torch: Any = require("torch", "this test")
    tensors = {
        "floats": torch.arange(5000, dtype=torch.float32).reshape(50, 100),
        "bfloat16": torch.ones(5000, dtype=torch.bfloat16),
        "bool": torch.ones(5000, dtype=torch.bool),
        "complex": torch.full((3000,), 1 + 2j).conj(),
        "channels last": torch.rand(2, 3, 40, 40).to(memory_format=torch.channels_last),
        "every other": torch.arange(9000)[::2],
        "one": torch.tensor(3),
        "none": torch.empty((0, 3)),
        "small": torch.arange(3),
        "expanded": torch.arange(50).expand(100, 50),
    }
    free = rig.num_free
    found = rig.cross(tensors)
    assert rig.num_free == free - 1
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype, name
    assert found["channels last"].is_contiguous(memory_format=torch.channels_last)
    del found
    assert rig.num_free == free
    parameter = rig.cross(torch.nn.Parameter(torch.ones(5000)))
    assert parameter.requires_grad
    for layout in (torch.strided, torch.jagged):
        parts = [torch.ones(3000), torch.zeros(2000)]
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch: a prototype
            nested = rig.cross(torch.nested.nested_tensor(parts, layout=layout))
        assert all(map(torch.equal, nested.unbind(), parts))


def test_what_is_made_in_a_block_is_not_copied(rig: Rig) -> None:
    rows = shared_empty((100, 100), np.float32)
    np.stack([np.arange(100, dtype=np.float32)] * 100, out=rows)
    message = bytes(_ring.pack([(rows, big())]))
    # Modified after it was pickled, so the memory is shared.
    rows[0] = -1
    found, other = unpack(message, rig.ring)
    np.testing.assert_array_equal(found[0], -1)
    np.testing.assert_array_equal(other, 7)
    free = rig.num_free
    del rows
    assert rig.num_free == free
    del found, other
    assert rig.num_free == free + 2


def test_what_is_kept_by_both_sides_is_free_when_both_let_go(rig: Rig) -> None:
    free = rig.num_free
    rows = shared_empty((100, 100))
    rows[:] = 3
    # The second time it is a copy, because the other side still has the first.
    first, second = rig.cross(rows), rig.cross(rows[10:])
    rows[:] = 4
    np.testing.assert_array_equal(first, 4)
    np.testing.assert_array_equal(second, 3)
    assert rig.num_free == free - 2
    del first, second
    assert rig.num_free == free - 1
    found = rig.cross(rows[10:])
    del rows
    np.testing.assert_array_equal(found, 4)
    assert rig.num_free == free - 1
    del found
    assert rig.num_free == free


def test_batches_of_the_library_are_made_in_a_block(rig: Rig) -> None:
    images = [make_image(big(50 * index, shape=(48, 64, 3)), codec="mjpeg") for index in range(4)]
    video = make_video(big(80, shape=(5, 48, 64, 3)))
    makers: dict[str, Any] = {
        "load_image_batch": lambda: sm.load_image_batch(images),
        "load_image": lambda: sm.load_image(images[0]),
        "convert_frames": lambda: sm.convert_frames(
            [sm.decode_packets(sm.demux_image(image)) for image in images]
        ),
        "collate": lambda: sm.collate([{"x": big(index)} for index in range(4)])["x"],
        "load_video": lambda: sm.load_video(video),
    }
    for name, make in makers.items():
        # The first item determines the size of blocks.
        expected = np.array(rig.cross(make()))
        buffer = make()
        assert rig.sender._blocks.place(np.asarray(buffer).reshape(-1).view(np.uint8)), name
        found = rig.cross(buffer)
        assert np.shares_memory(np.asarray(found), np.asarray(buffer)), name
        np.testing.assert_array_equal(found, expected)
        # An array much smaller than a batch is part of the batch, and takes no block.
        assert rig.sender.offer(np.asarray(buffer).nbytes // 3) is None, name


def test_a_sender_that_keeps_its_arrays_gets_ordinary_ones(rig: Rig) -> None:
    kept = [shared_empty(5000) for _ in range(40)]
    for index, array in enumerate(kept):
        array[:] = index
    # There is always a block for copies, even if the consumer keeps all others.
    for _ in range(30):
        found = [rig.cross(array) for array in kept[-2:]]
    np.testing.assert_array_equal(found[0], 38)
    for index, array in enumerate(kept):
        np.testing.assert_array_equal(array, index)


def test_what_a_function_keeps_is_not_what_the_other_process_gets(rig: Rig) -> None:
    def alone(box: list[Any]) -> Any:
        return unpack(bytes(_ring.pack(box, is_alone=True)), rig.ring)

    free = rig.num_free
    kept, box = shared_empty((100, 100)), [{"new": shared_empty((100, 100)), "other": big(5)}]
    kept[:], box[0]["new"][:] = 3, 4
    place = rig.sender._blocks.place(box[0]["new"])
    box[0]["kept"] = kept[10:]
    found = alone(box)
    assert box == []
    assert rig.sender._blocks.place(found["new"]) == place
    for name, value in {"kept": 3, "new": 4, "other": 5}.items():
        np.testing.assert_array_equal(found[name], value)
        found[name][:] = 99
    np.testing.assert_array_equal(kept, 3)
    del kept, found
    assert rig.num_free == free
    # Larger than a block, so it is pickled.
    np.testing.assert_array_equal(alone([big(shape=(2 * BLOCK,))]), 7)
    assert rig.num_free == free


def test_a_block_that_the_other_process_lets_go_is_not_reused_before_it_is_copied(rig: Rig) -> None:
    first, second = shared_empty(10_000), shared_empty(10_000)
    first[:], second[:] = 1, 2
    there, others = [rig.cross(first)], []

    def reuse() -> None:
        there.clear()
        others.append(shared_empty(10_000))
        others[0][:] = 9

    # Called when the sender has given up its own arrays, and copies the one that was sent before.
    weakref.finalize(second, reuse)
    box = [(first, second)]
    del first, second
    found = unpack(bytes(_ring.pack(box, is_alone=True)), rig.ring)
    assert others
    np.testing.assert_array_equal(found[0], 1)
    np.testing.assert_array_equal(found[1], 2)


def test_one_array_may_be_sent_any_number_of_times(rig: Rig) -> None:
    free = rig.num_free
    rows = shared_empty(5000)
    rows[:] = 6
    for _ in range(1000):
        rig.cross(rows)
    np.testing.assert_array_equal(rig.cross(rows), 6)
    del rows
    assert rig.num_free == free


def test_a_receiver_that_keeps_much_gets_copies(rig: Rig) -> None:
    kept = [rig.cross(big(index)) for index in range(40)]
    for index, array in enumerate(kept):
        np.testing.assert_array_equal(array, index)


def test_outside_of_a_process_of_ours_shared_empty_is_empty() -> None:
    array = shared_empty((5, 4000), ">f4")
    assert (array.shape, array.dtype) == ((5, 4000), np.dtype(">f4"))
    assert shared_memory.sender is None


def test_shared_empty_takes_any_type_and_shape(rig: Rig) -> None:
    assert shared_empty(5, object).tolist() == [None] * 5
    assert shared_empty(()).shape == ()
    assert shared_empty(np.int64(7)).shape == (7,)  # type: ignore[arg-type]  # as np.empty does
    assert shared_empty((0, 4)).shape == (0, 4)
    # Larger than a block.
    assert shared_empty(2 * BLOCK).nbytes == 2 * BLOCK


def test_what_does_not_fit_is_refused_and_takes_no_block(rig: Rig) -> None:
    free = rig.num_free
    with pytest.raises(
        ValueError, match=r"take 1048640 bytes, but a block .* has 1048576.*block_size="
    ):
        rig.cross(np.zeros(BLOCK + 1, np.uint8))
    with pytest.raises(TypeError, match="cannot pickle"):
        rig.cross([big(), (index for index in range(3))])
    assert rig.num_free == free


def test_memory_that_cannot_be_had_is_an_error_and_no_crash(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    free = rig.num_free
    # An array that has not been sent yet may be elsewhere.
    assert shared_empty(10_000).nbytes == 10_000
    with pytest.raises(
        MemoryError, match=r"10048 more bytes of shared memory .*No space left.*buffer_size="
    ):
        rig.cross(big(shape=(10_048,)))
    assert rig.num_free == free


def test_a_forked_process_gives_nothing_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rig.cross(big())
    free = rig.num_free
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        del found
        gc.collect()
    assert rig.num_free == free


def test_descriptors_go_with_the_ring() -> None:
    gc.collect()
    before = descriptors()
    for _ in range(5):
        rig = Rig()
        kept = rig.cross(big())
        begin_to_send(None)
        rig.ring.blocks.close_file()
        np.testing.assert_array_equal(kept, 7)
        del rig, kept
    gc.collect()
    assert descriptors() <= before


def test_without_memory_of_that_kind_the_file_has_no_name_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    rig = Rig()
    np.testing.assert_array_equal(rig.cross(big()), 7)
    begin_to_send(None)
    rig.ring.blocks.close_file()


class Runtime:
    """A stand-in for torch.cuda.cudart()."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:  # noqa: N802
        assert address not in self.pinned
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.mark.skipif(not is_available("torch"), reason="needs torch")
def test_blocks_are_pinned_as_far_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = require("torch", "this test")
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    rig = Rig(pin_memory=True)
    for shape, pages in (((5000,), 2), ((4100,), 2), ((9000,), 3)):
        found = rig.cross(big(shape=shape))
        assert list(runtime.pinned.values()) == [pages * os.sysconf("SC_PAGESIZE")]
        del found
        assert rig.num_free
    runtime.code = 2
    with pytest.raises(MemoryError, match=r"cannot be pinned \(CUDA's error 2\)"):
        rig.cross(big(shape=(90_000,)))
    runtime.code = 0
    begin_to_send(None)
    rig.ring.blocks.close_file()
    del rig
    gc.collect()
    assert not runtime.pinned


@pytest.mark.skipif(not is_available("torch"), reason="needs torch")
def test_without_cuda_pinning_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = require("torch", "this test")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("spdl_media._checks.warned_of", {})
    rig = Rig(pin_memory=True)
    with pytest.warns(UserWarning, match="memory cannot be pinned here"):
        rig.cross(big())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(rig.cross(big()), 7)
    begin_to_send(None)
    rig.ring.blocks.close_file()


def test_messages_without_arrays_are_plain_pickles(rig: Rig) -> None:
    assert pickle.loads(_ring.pack([{"a": 1}])) == {"a": 1}  # made above
