"""``collate``: a batch has the structure of the items, with buffers instead of values."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
from effort import each
from plane_oracle import sound

import spdl_media as sm
from spdl_media.testing import index_frames, make_audio, make_image, make_video

PICTURES = index_frames(3, 20, 16)
FRAMES = [sm.decode_packets(sm.demux_image(make_image(picture))) for picture in PICTURES]


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    label: Any
    name: Any = ""


def values(buffer: sm.CPUBuffer) -> Any:
    assert isinstance(buffer, sm.CPUBuffer)
    return np.asarray(buffer)


def test_tuples() -> None:
    images, labels, names = sm.collate([(f, i, f"n{i}") for i, f in enumerate(FRAMES)])
    np.testing.assert_array_equal(values(images), PICTURES)
    assert values(labels).tolist() == [0, 1, 2]
    assert labels.dtype == np.int64
    assert names == ["n0", "n1", "n2"]


def test_named_tuples_lists_and_plain_values() -> None:
    pair = sm.collate([Pair(frame, 0.5) for frame in FRAMES])
    assert isinstance(pair, Pair)
    assert pair.label.dtype == np.float64
    one, two = sm.collate([[1, 2], [3, 4]])
    assert (values(one).tolist(), values(two).tolist()) == ([1, 3], [2, 4])
    np.testing.assert_array_equal(values(sm.collate(FRAMES)), PICTURES)


def test_dictionaries_and_what_is_nested() -> None:
    items = [
        {"x": (frame, {"deep": np.float32(i)}), "none": None} for i, frame in enumerate(FRAMES)
    ]
    batch = sm.collate(items)
    assert list(batch) == ["x", "none"]
    assert batch["none"] == [None, None, None]
    deep = batch["x"][1]["deep"]
    assert (values(deep).tolist(), deep.dtype) == ([0, 1, 2], np.float32)


def test_dataclasses_frozen_ones_too() -> None:
    items = [Sample(frame, i, "a") for i, frame in enumerate(FRAMES)]
    batch = sm.collate(items)
    assert isinstance(batch, Sample)
    assert values(batch.label).tolist() == [0, 1, 2]
    assert batch.name == ["a"] * 3
    assert items[0].label == 0


def test_clips_become_a_clip_of_batches() -> None:
    pictures, audio = sm.convert_frames(FRAMES), sm.convert_array(np.zeros((2, 5), np.float32))
    batch = sm.collate(
        [sm.Clip(pictures, audio, np.array([0, 0.5, i]), i / 4, 8000) for i in range(2)]
    )
    assert isinstance(batch, sm.Clip)
    assert (batch.video.shape, batch.audio.shape) == ((2, *pictures.shape), (2, 2, 5))
    assert np.asarray(batch.timestamps).tolist() == [[0.0, 0.5, 0.0], [0.0, 0.5, 1.0]]
    assert values(batch.audio_timestamp).tolist() == [0.0, 0.25]
    with pytest.raises(sm.ConvertError, match=r"items\[0\]\['timestamps'\] has shape \(1,\)"):
        sm.collate([sm.Clip(audio, audio, np.zeros(n), 0.0, 8000) for n in (1, 2)])
    pool = sm.StoragePool(1 << 16, 1, pin_memory=False)
    kept = sm.collate([batch], storage={"video": pool})
    assert (pool.num_free, kept.video.shape[0]) == (0, 1)


def test_arrays_keep_their_type() -> None:
    arrays = [np.full((2, 3), i, np.int16) for i in range(3)]
    batch = sm.collate(arrays)
    assert (batch.shape, batch.dtype) == ((3, 2, 3), np.int16)
    np.testing.assert_array_equal(values(batch), np.stack(arrays))
    again = sm.collate([sm.convert_array(array) for array in arrays])
    np.testing.assert_array_equal(values(again), np.stack(arrays))


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert values(sm.collate([torch.ones(2), torch.zeros(2)])).tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("numbers", [[True, False], [1, 2], [1.5, 2.0], [1j, 2]])
def test_numbers(numbers: list[Any]) -> None:
    batch = values(sm.collate(numbers))
    assert batch.dtype == np.asarray(numbers).dtype
    assert batch.tolist() == numbers


def test_storage_by_field() -> None:
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    labels = sm.cpu_storage(24, pin_memory=False)
    batch = sm.collate(
        [(f, {"y": i}) for i, f in enumerate(FRAMES)], storage={0: pool, 1: {"y": labels}}
    )
    assert pool.num_free == 0
    assert values(batch[1]["y"]).tolist() == [0, 1, 2]
    del batch
    assert pool.num_free == 1
    buffer = sm.collate(FRAMES, storage=pool)
    assert pool.num_free == 0
    np.testing.assert_array_equal(values(buffer), PICTURES)


@each(
    "items, storage, error, match",
    [
        ([], None, sm.ConvertError, "no items to collate"),
        (
            [(1, 2), (1,)],
            None,
            sm.ConvertError,
            r"items\[0\] is tuple of 2, items\[1\] tuple of 1$",
        ),
        (
            [[1, 2], [1]],
            None,
            sm.ConvertError,
            r"list of 1. Make it an array, .*, and pass pad=True$",
        ),
        (
            [{"a": 1}, {"b": 1}],
            None,
            sm.ConvertError,
            r"dict of \['a'\], items\[1\] dict of \['b'\]",
        ),
        ([(1,), [1]], None, sm.ConvertError, "differ in structure"),
        (
            [{"a": 1}, {"a": "x"}],
            None,
            sm.ConvertError,
            r"items\[0\]\['a'\] is int, items\[1\]\['a'\] str",
        ),
        (
            [np.zeros(2), np.zeros(3)],
            None,
            sm.ConvertError,
            r"^items\[0\] has shape \(2,\).* items\[1\] \(3,\)",
        ),
        ([np.zeros(2), np.zeros(2, int)], None, sm.ConvertError, r"float64, items\[1\].*int64"),
        ([(1,)], {3: None}, ValueError, r"storage= names \[3\], but item has the fields \[0\]"),
        ([(1,)], 5, TypeError, "storage= must map them to storages"),
        ([(1,)], {0: 5}, TypeError, r"item\[0\] takes a CPUStorage or a StoragePool, not 5"),
        ([2**70, 1], None, TypeError, f"item: a buffer .*, not object such as {2**70}; convert"),
        ([Decimal("1.5")], None, TypeError, r"not object such as Decimal\('1.5'\); convert them"),
    ],
)
def test_items_that_do_not_go_together(
    items: Any, storage: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        sm.collate(items, storage=storage)


def test_storage_for_what_stays_a_list() -> None:
    storage = sm.cpu_storage(8, pin_memory=False)
    with pytest.raises(ValueError, match="item is str, which stays a list"):
        sm.collate(["a"], storage=storage)


def test_frames_of_two_sizes() -> None:
    other = sm.decode_packets(sm.demux_image(make_image(PICTURES[0][:10])))
    with pytest.raises(sm.ConvertError, match=r"20x16.*20x10"):
        sm.collate([(FRAMES[0], 1), (other, 2)])


@pytest.mark.parametrize("items", [{"a": 1}, "abc", b"abc", 7, None])
def test_not_a_sequence_of_items(items: Any) -> None:
    with pytest.raises(TypeError, match=f"takes a sequence of items, not {type(items).__name__}"):
        sm.collate(items)


def test_arrays_are_copied_once() -> None:
    arrays = [np.full(100_000, i, np.float32) for i in range(4)]
    storage = sm.cpu_storage(4 * arrays[0].nbytes, pin_memory=False)
    sm.collate(arrays, storage=storage).release()
    gc.collect()
    tracemalloc.start()
    buffer = sm.collate(arrays, storage=storage)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= 65536
    np.testing.assert_array_equal(values(buffer), arrays)


def test_arrays_of_no_dimension_and_of_foreign_byte_order() -> None:
    assert values(sm.collate([np.array(3), np.array(5)])).tolist() == [3, 5]
    batch = sm.collate([np.array([1, 2], ">i4")] * 2)
    assert batch.dtype == np.dtype("int32")
    assert values(batch).tolist() == [[1, 2], [1, 2]]
    assert sm.collate([np.zeros((0, 2))] * 3).shape == (3, 0, 2)


@each(
    "scalars",
    [
        [np.str_("cat"), np.str_("dog")],
        [np.bytes_(b"cat"), np.bytes_(b"dog")],
        [np.datetime64("2026-01-01"), np.datetime64("NaT", "D")],
        [np.timedelta64(3, "s"), np.timedelta64(4, "s")],
        ["cat", np.str_("dog")],
        [None, "cat"],
    ],
)
def test_scalars_that_are_no_numbers_stay_a_list(scalars: list[Any]) -> None:
    _, names = sm.collate(list(zip(FRAMES, scalars, strict=False)))
    assert isinstance(names, list)
    assert all(name is scalar for name, scalar in zip(names, scalars, strict=True))


@each(
    "one, other",
    [
        (1, None),
        (1, "cat"),
        (FRAMES[0], None),
        (FRAMES[0], 1),
        (np.zeros(2), None),
        (np.zeros(2), 1),
    ],
)
def test_values_of_two_kinds_in_either_order(one: Any, other: Any) -> None:
    for values in ([one, one, other], [other, other, one]):
        first, last = type(values[0]).__name__, type(values[2]).__name__
        with pytest.raises(
            sm.ConvertError,
            match=rf"^items\[0\]\['x'\] is {first}, items\[2\]\['x'\] {last}; one field holds one kind",
        ):
            sm.collate([{"x": value} for value in values])


def test_a_structure_in_place_of_a_value_in_either_order() -> None:
    for values, words in (
        ([1, (1, 2)], r"int, items\[1\] tuple of 2"),
        ([None, [1]], r"NoneType, items\[1\] list of 1"),
        ([(1, 2), None], r"tuple of 2, items\[1\] NoneType"),
    ):
        with pytest.raises(sm.ConvertError, match=rf"differ in structure: items\[0\] is {words}"):
            sm.collate(values)


def test_large_identifiers_stay_exact() -> None:
    batch = sm.collate([{"id": 2**63 + 11}, {"id": 5}])
    assert batch["id"].dtype == np.uint64
    assert values(batch["id"]).tolist() == [2**63 + 11, 5]


def test_arrays_of_strings_are_named_by_their_field() -> None:
    with pytest.raises(
        TypeError, match=r"item\['name'\]: a buffer holds numbers, not <U1 such as .*'a'"
    ):
        sm.collate([{"name": np.array(["a"])}])


def test_videos_and_audio() -> None:
    video = sm.VideoFrames([FRAMES[0]._frames[0]] * 4)
    samples = sound(np.zeros((10, 2), np.float32))
    pictures, waves = sm.collate([(video, samples)] * 3)
    assert (pictures.shape, waves.shape) == ((3, 4, 16, 20, 3), (3, 2, 10))


def test_a_failed_item_leaves_nothing_leased() -> None:
    pool = sm.StoragePool(PICTURES.nbytes, 1, pin_memory=False, on_exhausted="raise")
    items = [(frame, np.zeros(2 + i)) for i, frame in enumerate(FRAMES)]
    with pytest.raises(sm.ConvertError, match=r"items\[0\]\[1\] has shape") as kept:
        sm.collate(items, storage={0: pool})
    assert pool.num_free == 1, f"{kept} holds a buffer"


def test_arrays_of_different_lengths_are_padded() -> None:
    tokens = [np.arange(1, n, dtype=np.int32) for n in (4, 2, 6)]
    padded = sm.collate(tokens, pad=True)
    assert isinstance(padded, sm.Padded)
    assert values(padded.data).tolist() == [[1, 2, 3, 0, 0], [1, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
    assert (values(padded.lengths).tolist(), values(padded.lengths).dtype) == ([3, 1, 5], np.int64)
    # The structure does not depend on whether the lengths differ.
    assert isinstance(sm.collate(tokens[:1] * 2, pad=True), sm.Padded)


def test_a_batch_has_the_sample_rate_and_colours_that_its_arrays_share() -> None:
    low, high = (
        sm.load_audio(make_audio(np.zeros((900, 1), np.int16), rate)) for rate in (8000, 16000)
    )
    assert sm.collate([low, low]).sample_rate == 8000
    assert sm.collate([{"audio": high}] * 2, pad=True)["audio"].data.sample_rate == 16000
    assert sm.collate([low, high]).sample_rate is None
    video = sm.load_video(make_video(PICTURES), pix_fmt="yuv420p")
    assert video.color_range is not None
    batch = sm.collate([video, video])
    assert (batch.colorspace, batch.color_range) == (video.colorspace, video.color_range)


def test_padding_by_field() -> None:
    items = [
        {
            "audio": np.ones((2, n), np.float32),
            "mel": np.ones((n, 3)),
            "image": np.zeros((2, 2)),
            "id": n,
        }
        for n in (4, 2)
    ]
    memory = sm.cpu_storage(64, pin_memory=False)
    batch = sm.collate(items, pad={"audio": -1, "mel": 0}, storage={"audio": memory})
    assert values(batch["audio"].data).sum(axis=(1, 2)).tolist() == [8, 4]
    assert batch["mel"].data.shape == (2, 4, 3)
    assert values(batch["mel"].data)[1, 2:].any() == np.False_
    assert (batch["image"].shape, values(batch["id"]).tolist()) == ((2, 2, 2), [4, 2])
    every = sm.collate(items[:1] * 2, pad=True)
    assert [type(every[key]) for key in ("image", "id")] == [sm.Padded, sm.CPUBuffer]
    assert sm.to_numpy(every["audio"]).lengths.tolist() == [4, 4]


def test_labels_that_are_arrays_are_not_padded() -> None:
    items = [
        {"audio": np.ones(3), "label": np.array(5)},
        {"audio": np.ones(1), "label": np.array(6)},
    ]
    batch = sm.collate(items, pad=True)
    assert np.asarray(batch["audio"].data).shape == (2, 3)
    assert np.asarray(batch["label"]).tolist() == [5, 6]


def test_padding_of_audio_frames_is_silence() -> None:
    sound = make_audio(np.full((9, 1), 99, np.int16), 8000, codec="flac", format="flac")
    frames = [
        sm.decode_packets(
            sm.demux_audio(sound), sm.get_audio_filter_desc(sample_fmt="u8p"), num_samples=n
        )
        for n in (5, 3)
    ]
    padded = sm.collate([(frame, 0) for frame in frames], pad={0: True})[0]
    assert values(padded.lengths).tolist() == [5, 3]
    assert set(values(padded.data)[1, :, 3:].ravel()) == {128}


@each(
    "items, pad, error, match",
    [
        (
            [np.ones(2), np.ones(3)],
            False,
            sm.ConvertError,
            r"type. Load images with one width= and height=, audio .*: collate\(items, pad=True\)$",
        ),
        ([np.ones(2), np.ones(2, np.int8)], False, sm.ConvertError, "one shape and type$"),
        ([np.ones((2, 2)), np.ones((3, 2))], True, sm.ConvertError, r"shape \(2, 2\) .* \(3, 2\)"),
        ([np.ones(2), np.ones(3, np.int8)], True, sm.ConvertError, "int8"),
        ([np.float32(1)[...]], 0, sm.ConvertError, r"shape \(\), without the axis 0"),
        (
            [(np.ones(2), 1)],
            {2: -1},
            ValueError,
            r"pad= names \[2\], but item has the fields \[0, 1\]",
        ),
        ([(np.ones(2), 1)], 0, TypeError, r"pad= must map them to axes, such as \{0: -1\}"),
        ([(np.ones(2), 1)], -1, TypeError, r"pad= must map them to axes, such as \{0: -1\}"),
        ([np.ones(2)], {0: -1}, TypeError, "pad= must be a bool or an axis"),
    ],
)
def test_what_cannot_be_padded(items: Any, pad: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sm.collate(items, pad=pad)
