"""convert_frames of audio, and labels as arrays: all sample formats, different lengths, exact numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from effort import each
from plane_oracle import rgb, sound

import spdl_media as sm
from spdl_media.testing import index_samples, make_audio

FORMATS = {
    "u8": np.uint8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "flt": np.float32,
    "dbl": np.float64,
}
# PyAV cannot make frames of 64-bit integers, but a filter graph can.
MADE = [name for name in FORMATS if name != "s64"]


def ramp(count: int, channels: int, dtype: Any, start: int = 0) -> np.ndarray:
    values = np.arange(count * channels).reshape(count, channels) + start
    return (values % 251).astype(dtype)


@each("channels", [1, 2, 3])
@each("name", MADE)
def test_every_sample_format(name: str, channels: int) -> None:
    samples = ramp(50, channels, FORMATS[name])
    packed = sm.convert_frames(sound(samples, name, cuts=[7, 30]))
    planar = sm.convert_frames(sound(samples, f"{name}p", cuts=[7, 30]))
    assert (packed.shape, planar.shape) == ((50, channels), (channels, 50))
    for buffer, expected in ((packed, samples), (planar, samples.T)):
        assert buffer.dtype == FORMATS[name]
        assert np.array_equal(buffer.array, expected)
        assert buffer.array.flags.c_contiguous


@pytest.mark.parametrize("name", ["s64", "s64p"])
def test_long_samples_of_a_filter(name: str) -> None:
    samples = index_samples(1000, 2)
    packets = sm.demux_audio(make_audio(samples))
    array = sm.convert_frames(sm.decode_packets(packets, f"aformat=sample_fmts={name}")).array
    assert array.dtype == np.int64
    expected = samples.astype(np.int64) << 48
    assert np.array_equal(array.T if name.endswith("p") else array, expected)


@pytest.mark.parametrize("name", ["flt", "fltp"])
def test_a_sequence_puts_b_in_front(name: str) -> None:
    parts = [ramp(20, 2, np.float32, start) for start in (0, 5, 9)]
    buffer = sm.convert_frames([sound(part, name) for part in parts])
    stacked = np.stack(parts)
    assert np.array_equal(buffer.array, stacked if name == "flt" else stacked.transpose(0, 2, 1))
    assert sm.convert_frames([sound(parts[0], name)]).shape == (1, *buffer.shape[1:])


def test_slices_of_samples() -> None:
    samples = ramp(100, 2, np.float32)
    frames = sound(samples, cuts=[30, 60])
    assert np.array_equal(sm.convert_frames(frames[25:61]).array, samples[25:61].T)


def test_lengths_that_differ_are_named() -> None:
    items = [sound(ramp(count, 2, np.float32)) for count in (30, 20, 30)]
    with pytest.raises(
        sm.ConvertError, match=r"have 20 to 30 samples\. convert_frames.*pad=True.*silence"
    ):
        sm.convert_frames(items)


@each("name", [*MADE, *(f"{name}p" for name in MADE)])
def test_pad_fills_with_silence(name: str) -> None:
    dtype = FORMATS[name.removesuffix("p")]
    parts = [ramp(count, 2, dtype, 1) for count in (20, 30, 25)]
    storage = sm.cpu_storage(3 * 30 * 2 * 8, pin_memory=False)
    dirty = sm.convert_array(np.full(storage.nbytes, 77, np.uint8), storage)
    del dirty
    array = sm.convert_frames([sound(part, name) for part in parts], storage, pad=True).array
    if name.endswith("p"):
        array = array.transpose(0, 2, 1)
    assert array.shape == (3, 30, 2)
    for got, part in zip(array, parts, strict=True):
        assert np.array_equal(got[: len(part)], part)
        assert (got[len(part) :] == (128 if dtype is np.uint8 else 0)).all()


def test_pad_changes_nothing_else() -> None:
    frames = sound(ramp(30, 2, np.float32))
    assert np.array_equal(
        sm.convert_frames(frames, pad=True).array, sm.convert_frames(frames).array
    )
    same = sm.convert_frames([frames, frames], pad=True).array
    assert np.array_equal(same, sm.convert_frames([frames, frames]).array)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            sound(ramp(30, 1, np.float32)),
            "2 channels fltp at 8000 Hz, but item 1 .* 1 channel fltp",
        ),
        (sound(ramp(30, 2, np.int16), "s16p"), "2 channels fltp .*, but item 1 .* channels s16p"),
        (sound(ramp(30, 2, np.float32), rate=16000), "at 8000 Hz, but item 1 .* at 16000 Hz"),
    ],
)
def test_formats_that_differ_are_both_named(other: sm.AudioFrames, message: str) -> None:
    first = sound(ramp(30, 2, np.float32))
    with pytest.raises(sm.ConvertError, match=f"{message}.*get_audio_filter_desc"):
        sm.convert_frames([first, other], pad=True)


def test_a_stream_that_changes_in_its_middle() -> None:
    one, other = sound(ramp(30, 2, np.float32)), sound(ramp(30, 1, np.float32))
    with pytest.raises(sm.ConvertError, match=r"changes from 2 channels fltp .* to 1 channel fltp"):
        sm.convert_frames(sm.AudioFrames([*one.chunks, *other.chunks]))


def test_a_window_without_samples_is_named() -> None:
    packets = sm.demux_audio(make_audio(index_samples(8000, 1)), timestamp=(50.5, 51))
    empty = sm.decode_packets(packets)
    for given in (empty, [empty]):
        with pytest.raises(sm.ConvertError, match=r"no sample in the window .*50\.5.*51"):
            sm.convert_frames(given, pad=True)


def test_layout_is_for_images() -> None:
    with pytest.raises(ValueError, match="layout='planes' is for images"):
        sm.convert_frames(sound(ramp(30, 2, np.float32)), layout="planes")


def test_audio_and_images_do_not_mix() -> None:
    with pytest.raises(sm.ConvertError, match="item 0 is AudioFrames, but item 1 is ImageFrames"):
        sm.convert_frames([sound(ramp(30, 2, np.float32)), rgb(8, 6)])


@each(
    "values",
    [
        [3, 1, 2],
        [[1, 2], [3, 4]],
        [0.5, 1.9, -1.5],
        [1, 2.5],
        [True, False],
        [1 + 2j],
        7,
        [],
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(2, 0, 1)[::-1],
        np.zeros((0, 3), np.float32),
        np.float32(2.5),
    ],
)
@each("store", [False, True])
def test_arrays_are_copied_as_they_are(values: Any, store: bool) -> None:
    storage = sm.cpu_storage(4096, pin_memory=False) if store else None
    expected = np.array(values)
    buffer = sm.convert_array(values, storage)
    assert buffer.shape == expected.shape
    assert buffer.dtype == expected.dtype.newbyteorder("=")
    assert np.array_equal(buffer.array, expected)
    assert buffer.array.flags.c_contiguous
    assert not np.shares_memory(buffer.array, values)
    assert buffer.array.ctypes.data % 64 == 0 or not expected.size


def test_labels_are_int64_by_themselves() -> None:
    assert sm.convert_array([3, 1]).dtype == np.int64
    assert sm.convert_array(range(3)).array.tolist() == [0, 1, 2]


@each(
    "values, dtype",
    [
        ([0.5, 1.0], "int64"),
        ([1.0, 2.0], np.int32),
        ([1 + 0j], "float32"),
        ([256], "uint8"),
        ([-1], np.uint64),
        ([2**31], np.int32),
        (np.array([2**63], np.uint64), np.int64),
        ([2], bool),
        ([100_000], "float16"),
        (np.array([-(2**63)]), "float16"),
        ([1e39, 0.0], "float32"),
        ([1e39j], "complex64"),
    ],
)
def test_nothing_is_cut(values: Any, dtype: Any) -> None:
    pool = sm.StoragePool(64, 1, pin_memory=False)
    with pytest.raises(TypeError, match=f"would be cut by dtype='{np.dtype(dtype).name}'"):
        sm.convert_array(values, pool, dtype=dtype)
    assert pool.num_free == 1


@each(
    "values, dtype",
    [
        ([1, 2], "float32"),
        ([0.5], "float32"),
        ([255, 0], "uint8"),
        ([2**31 - 1, -(2**31)], "int32"),
        ([True], "int64"),
        ([], "int32"),
        ([1, 2], ">i4"),
        ([float("inf"), -float("inf"), 0.25], "float16"),
        ([65504, -65504], "float16"),
    ],
)
def test_types_that_hold_the_values(values: Any, dtype: str) -> None:
    buffer = sm.convert_array(values, dtype=dtype)
    assert buffer.dtype == np.dtype(dtype).newbyteorder("=")
    assert buffer.array.tolist() == values


@each(
    "values, message",
    [
        (["cat", "dog"], "holds numbers, not <U3 such as .*'cat'"),
        ([[1, 2], [3]], "do not make one array"),
        ([1, None], "holds numbers, not object"),
        ([10**30], "holds numbers, not object"),
        ("7", "holds numbers, not <U1 such as .*'7'"),
        (np.array(["2026-01-01"], "datetime64[D]"), "holds numbers, not datetime64"),
    ],
)
def test_not_a_number(values: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sm.convert_array(values)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2**63 + 11, 5], None),
        ([5, 2**64 - 1], "uint64"),
        ([[2**63 + 1, 1], [2, 3]], None),
        ([np.uint64(2**53 + 1), np.int64(3)], None),
        ([np.array([2**53 + 1], np.uint64), np.array([1])], None),
    ],
)
def test_integers_stay_integers(values: Any, dtype: Any) -> None:
    """NumPy alone converts integers to floats if some need uint64 and others are negative."""
    buffer = sm.convert_array(values, dtype=dtype)
    assert buffer.dtype == np.uint64
    assert buffer.array.tolist() == [np.asarray(v, object).tolist() for v in values]


def test_integers_that_no_type_holds_together() -> None:
    with pytest.raises(
        TypeError,
        match=r"from -1 to 9223372036854775809: neither int64 nor uint64 .*dtype='float64'\) takes the",
    ):
        sm.convert_array([2**63 + 1, -1])
    nearest = sm.convert_array([2**63 + 1, -1], dtype="float64")
    assert nearest.array.tolist() == [2.0**63, -1.0]


@each("values", [[1, 2.5], [2**63, 2.5], [0.5, 2**63], [[1], [2.5]], (2.5,), []])
def test_floats_among_integers_make_floats(values: Any) -> None:
    buffer = sm.convert_array(values)
    assert buffer.dtype == np.float64
    assert buffer.array.tolist() == list(values)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"requires_grad": True}, "requires grad"), ({"dtype": "bfloat16"}, "BFloat16")],
)
def test_tensors_that_numpy_does_not_take(options: dict[str, Any], reason: str) -> None:
    torch = pytest.importorskip("torch")
    if "dtype" in options:
        options = {"dtype": getattr(torch, options["dtype"])}
    tensor = torch.ones(2, **options)
    match = (
        rf"NumPy cannot view this Tensor: .*{reason}.* by tensor\.detach\(\)\.cpu\(\)\.float\(\)"
    )
    with pytest.raises(TypeError, match=match):
        sm.convert_array(tensor)
    with pytest.raises(TypeError, match=rf"item\['x'\]: {match}"):
        sm.collate([{"x": tensor}])


def test_an_array_too_large_says_both_sizes() -> None:
    with pytest.raises(sm.StorageTooSmallError, match=r"takes 24 bytes, but the storage has 23\."):
        sm.convert_array([1, 2, 3], sm.cpu_storage(23, pin_memory=False))
