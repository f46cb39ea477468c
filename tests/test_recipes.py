"""ImageRecipe gives the same as load_image, in items of any kind and in batches."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copy_of
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from effort import each

import spdl_media as sm
from spdl_media.dataloader import sample_rng
from spdl_media.testing import make_image

NORMALISED: dict[str, Any] = {
    "dtype": "float32",
    "mean": sm.IMAGENET_MEAN,
    "std": sm.IMAGENET_STD,
}


@pytest.fixture
def photo(rng: np.random.Generator) -> bytes:
    return make_image(rng.integers(0, 256, (60, 90, 3), dtype=np.uint8), codec="png")


def array_of(buffer: Any) -> npt.NDArray[Any]:
    return np.asarray(buffer)


@pytest.mark.parametrize("options", [{}, NORMALISED, {**NORMALISED, "layout": "NHWC"}])
def test_training_draws_a_box_and_stretches_it(photo: bytes, options: dict[str, Any]) -> None:
    recipe = sm.ImageRecipe(32, random_crop=True, flip=0.5, **options)
    for seed in range(4):
        image = recipe(photo, rng=np.random.default_rng(seed))
        expected = sm.load_image(
            photo,
            width=32,
            height=32,
            scale_mode=None,
            crops=sm.RandomResizedCrop(),
            flips=0.5,
            rng=np.random.default_rng(seed),
            **{"layout": "NCHW", **options},
        )
        assert np.array_equal(array_of(image), array_of(expected))
        assert (image.boxes, image.flips) == (expected.boxes, expected.flips)
        assert image.dtype == expected.dtype == options.get("dtype", "uint8")


@pytest.mark.parametrize(("resize_size", "expected"), [(None, (228, 200)), (300, (300, 200))])
def test_evaluation_cuts_out_the_middle(
    photo: bytes, resize_size: int | None, expected: tuple[int, int]
) -> None:
    image = sm.ImageRecipe(200, resize_size=resize_size)(photo)
    crop = sm.ResizeCenterCrop(*expected)
    whole = sm.load_image(photo, width=200, height=200, scale_mode=None, crops=crop, layout="NCHW")
    assert np.array_equal(array_of(image), array_of(whole))


class Row(NamedTuple):
    label: int
    source: bytes


@dataclass
class Sample:
    source: bytes
    name: str


def test_items_keep_all_else(photo: bytes) -> None:
    image = array_of(sm.ImageRecipe(16)(photo))
    recipe = sm.ImageRecipe(16, field="source")
    pair = sm.ImageRecipe(16)((photo, 3))
    row = sm.ImageRecipe(16, field=1)(Row(3, photo))
    record = recipe({"source": photo, "key": "a"})
    sample = recipe(Sample(photo, "a"))
    named = recipe(Row(3, photo))
    for found in (pair[0], row.source, named.source, record["source"], sample.source):
        assert np.array_equal(array_of(found), image)
    assert (pair[1], row.label, record["key"], sample.name) == (3, 3, "a", "a")
    assert (type(row), type(sample), type(pair)) == (Row, Sample, tuple)
    with pytest.raises(
        KeyError, match=r"no field 'source', only \['jpg'\]\. State .*ImageRecipe\(field="
    ):
        recipe({"jpg": photo})


def test_errors_name_the_shard_and_the_member() -> None:
    sample = {"__key__": "dir/1", "__url__": "a.tar", "jpg": b"no image"}
    with pytest.raises(sm.DemuxError, match=r"^a\.tar: dir/1\.jpg: FFmpeg cannot open it"):
        sm.ImageRecipe(16, field="jpg")(sample)


def test_a_field_url_alone_names_no_shard(photo: bytes) -> None:
    record = sm.ImageRecipe(24, field="jpg")({"__url__": "a.tar", "jpg": photo})
    assert array_of(record["jpg"]).shape == (3, 24, 24)


def test_a_batch_is_that_of_arrays(photo: bytes) -> None:
    recipe = sm.ImageRecipe(24, random_crop=True, flip=0.5, **NORMALISED)
    items = [(recipe(photo, rng=seed), seed) for seed in range(5)]
    pool = sm.StoragePool(5 * 3 * 24 * 24 * 4, 1, pin_memory=False)
    images, labels = sm.collate(items, storage={0: pool})
    assert pool.num_free == 0
    assert (images.shape, images.dtype) == ((5, 3, 24, 24), np.float32)
    assert np.asarray(labels).tolist() == [0, 1, 2, 3, 4]
    assert images.boxes == tuple(image.boxes[0] for image, _ in items)
    assert images.flips == tuple(image.flips[0] for image, _ in items)
    # An image that was already converted to an array works as well.
    array_of(items[2][0])
    again, _ = sm.collate(items)
    for row, (image, _) in enumerate(items):
        assert np.array_equal(array_of(images[row]), array_of(image))
    assert np.array_equal(array_of(again), array_of(images))
    other = sm.ImageRecipe(25, **NORMALISED)(photo)
    with pytest.raises(sm.ConvertError, match=r"\(3, 24, 24\).* items\[1\] \(3, 25, 25\)"):
        sm.collate([items[0][0], other])


def array_or_none(image: sm.CPUBuffer) -> npt.NDArray[Any] | None:
    try:
        return np.asarray(image)
    except ValueError:  # released
        return None


def test_an_image_becomes_one_array_whoever_asks(photo: bytes) -> None:
    recipe = sm.ImageRecipe(64, **NORMALISED)
    for _ in range(20):
        image = recipe(photo)
        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(lambda _, one=image: one.array.ctypes.data, range(8)))
        assert len(set(places)) == 1
    for _ in range(50):  # neither waits for the other
        image = recipe(photo)
        with ThreadPoolExecutor(2) as pool:
            array, none = pool.submit(array_or_none, image), pool.submit(image.release)
        assert none.result() is None
        assert array.result() is None or array.result().shape == (3, 64, 64)
    image = recipe(photo)
    for copy in (pickle.loads(pickle.dumps(image)), copy_of(image)):
        assert np.array_equal(copy, image)
        assert (copy.boxes, copy.flips) == (image.boxes, image.flips)
    image.release()
    with pytest.raises(ValueError, match="was released"):
        image.array  # noqa: B018  # the access is what fails


def test_images_are_kept_for_later_epochs(photo: bytes) -> None:
    items = [(photo, 1), (photo, 2)]
    recipe = sm.ImageRecipe(64, **NORMALISED)
    loader = sm.DataLoader(items, preprocessor=recipe, batch_size=2, to="numpy", cache=10**6)
    (first,), (second,) = loader, loader
    assert first[0].shape == (2, 3, 64, 64)
    assert np.array_equal(first[0], second[0])


def test_a_loader_trains_from_a_folder_and_resumes(tmp_path: Path, photo: bytes) -> None:
    for number in range(12):
        path = tmp_path / "cat dog".split()[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(photo)
    recipe = sm.ImageRecipe(16, random_crop=True, flip=0.5, **NORMALISED)

    def loader() -> sm.DataLoader:
        return sm.DataLoader(
            sm.ImageFolder(tmp_path, shuffle=True, seed=2),
            preprocessor=pickle.loads(pickle.dumps(recipe)),
            batch_size=4,
            to="numpy",
            output_order="input",
            seed=5,
        )

    whole, stopped, resumed = list(loader()), loader(), loader()
    begun = list(itertools.islice(stopped, 1))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    batches = begun + list(resumed)
    assert len(batches) == len(whole) == 3
    for (images, labels), (others, other_labels) in zip(batches, whole, strict=True):
        assert np.array_equal(images, others)
        assert np.array_equal(labels, other_labels)
    assert (whole[0][0].shape, whole[0][0].dtype) == ((4, 3, 16, 16), np.float32)
    assert whole[0][1].dtype == np.int64
    first = recipe(photo, rng=sample_rng(5, 0, 0))
    assert np.array_equal(whole[0][0][0], array_of(first))


def test_torch_takes_single_images(photo: bytes) -> None:
    torch = pytest.importorskip("torch")
    (image, label), *_ = sm.DataLoader(
        [(photo, 3)], preprocessor=sm.ImageRecipe(16, **NORMALISED), to="torch"
    )
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.float32, 3)


@each(
    "make, message",
    [
        (lambda: sm.ImageRecipe(0), "size must be at least 1, not 0"),
        (lambda: sm.ImageRecipe(9, flip=True), r"flip must be a probability.*\(1\.0 .*not True"),
        (lambda: sm.ImageRecipe(9, flip=np.True_), "flip must be a probability"),  # type: ignore[arg-type]
        (lambda: sm.ImageRecipe(9, flip=2), "flips must be a probability from 0 to 1, not 2"),
        (lambda: sm.ImageRecipe(9, mean=0.5), "mean= and std= are for floats: give dtype"),
        (lambda: sm.ImageRecipe(9, dtype="float32", mean=(0, 1)), "for each channel of rgb24"),
        (lambda: sm.ImageRecipe(9, layout="CHW"), "layout must be 'NCHW', 'NHWC' or None"),  # type: ignore[arg-type]
        (lambda: sm.ImageRecipe(9, resize_size=8), "crop_size must be at most resize_size, 8"),
        (
            lambda: sm.ImageRecipe(9, resize_size=12, random_crop=True),
            "resize_size=12 is for evaluation, random_crop for training",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_random_boxes_of_large_jpegs_can_be_shrunk() -> None:
    pytest.importorskip("simplejpeg")
    ramp = np.linspace(0, 255, 500 * 701 * 3).reshape(500, 701, 3).astype(np.uint8)
    photo = make_image(ramp, codec="mjpeg")
    config = sm.decode_config(downscale="dct")
    shrinking = sm.ImageRecipe(150, random_crop=True, decode_config=config)
    whole = sm.ImageRecipe(150, random_crop=True)
    num_large = 0
    for seed in range(30):
        image, other = shrinking(photo, rng=seed), whole(photo, rng=seed)
        (box,), (drawn,) = image.boxes, other.boxes
        if min(drawn[2:]) < 300:
            assert box == drawn
            continue
        num_large += 1
        assert not any(number % 8 for number in box)
        ends = [box[0] + box[2] - drawn[0] - drawn[2], box[1] + box[3] - drawn[1] - drawn[3]]
        assert max(map(abs, [box[0] - drawn[0], box[1] - drawn[1], *ends])) < 8
        assert box[0] + box[2] <= 701
        assert box[1] + box[3] <= 500
    assert 5 < num_large < 30


def test_errors_name_the_source() -> None:
    with pytest.raises(sm.SourceError, match=r"^missing\.jpg: "):
        sm.ImageRecipe(9)(("missing.jpg", 0))
