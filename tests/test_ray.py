"""Decoders for Ray Data, called as by Ray, and by Ray itself on this machine."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.ray import DecodeAudio, DecodeImages, DecodeVideo
from spdl_media.testing import index_planes, make_audio, make_image, make_video


def png(level: int, side: int = 16) -> bytes:
    return make_image(np.full((side, side, 3), level, np.uint8), codec="png")


def column(*inputs: Any) -> Any:
    """Make a column of bytes or text as Ray does."""
    made = np.empty(len(inputs), object)
    made[:] = inputs
    return made


DAMAGED = b"no image"


def test_images_become_one_array_and_errors_text() -> None:
    decode = DecodeImages(width=8, height=8)
    batch = {"bytes": column(png(40), DAMAGED, None, png(80)), "label": np.arange(4)}
    result = decode(batch)
    assert list(result) == ["label", "image", "error"]
    assert result["image"].shape == (4, 8, 8, 3)
    assert result["image"].dtype == np.uint8
    assert result["image"].max(axis=(1, 2, 3)).tolist() == [40, 0, 0, 80]
    assert result["label"].tolist() == [0, 1, 2, 3]
    fine, damaged, absent, last = result["error"]
    assert (fine, last) == ("", "")
    assert damaged.startswith("DemuxError: FFmpeg cannot open it as media")
    assert absent.startswith("TypeError: ")
    assert list(batch) == ["bytes", "label"]


def test_a_batch_of_damaged_images_alone_has_the_same_columns() -> None:
    result = DecodeImages(width=8, height=6, layout="NCHW", dtype="float32")(
        {"bytes": column(DAMAGED, png(40)[:60])}
    )
    assert result["image"].shape == (2, 3, 6, 8)
    assert result["image"].dtype == np.float32
    assert not result["image"].any()
    assert all(result["error"])


def test_images_of_their_own_sizes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("small.png", "damaged.png", "large.png", "absent.png")]
    paths[0].write_bytes(png(40, 8))
    paths[1].write_bytes(DAMAGED)
    paths[2].write_bytes(png(80, 12))
    result = DecodeImages(output="pixels", error="why")({"path": np.array(list(map(str, paths)))})
    assert [one.shape for one in result["pixels"]] == [(8, 8, 3), (0,) * 3, (12, 12, 3), (0,) * 3]
    assert [bool(one) for one in result["why"]] == [False, True, False, True]
    assert "SourceError" in result["why"][3]
    assert result["path"].tolist() == list(map(str, paths))


def test_videos_become_one_array() -> None:
    clip = make_video(index_planes(6, 32, 16), codec="libx264", format="mp4")
    decode = DecodeVideo(width=16, height=8, num_frames=8, on_short="error", timestamp=(0, 9))
    both = {"video_bytes": column(clip, DAMAGED)}
    with pytest.raises(KeyError, match=r"columns \['video_bytes'\], and none named bytes or path"):
        decode(both)
    decode = DecodeVideo(width=16, height=8, num_frames=4, on_short="error", column="video_bytes")
    result = decode(both)
    assert result["video"].shape == (2, 4, 8, 16, 3)
    assert result["error"][0] == ""
    assert result["error"][1].startswith("DemuxError")
    expected = sm.to_numpy(sm.load_video(clip, num_frames=4, width=16, height=8))
    assert (result["video"][0] == expected).all()
    assert not result["video"][1].any()
    short = DecodeVideo(width=16, height=8, num_frames=9, on_short="error", column="video_bytes")
    assert short(both)["error"][0].startswith("ConvertError: ")
    whole = DecodeVideo(column="video_bytes")(both)
    assert [one.shape for one in whole["video"]] == [(6, 16, 32, 3), (0, 0, 0, 0)]


def test_audio_becomes_one_array() -> None:
    samples = np.linspace(-1, 1, 800, dtype=np.float32)[:, None]
    wave = make_audio(samples, 8000)
    decode = DecodeAudio(sample_rate=8000, num_channels=2, num_samples=1000, on_short="zeros")
    result = decode({"bytes": column(wave, DAMAGED)})
    assert result["audio"].shape == (2, 2, 1000)
    assert np.abs(result["audio"][0, 1, :800]).max() > 0.5
    assert not result["audio"][0, :, 800:].any()
    assert not result["audio"][1].any()


def test_what_does_not_fit_among_the_others_is_an_error_of_its_row() -> None:
    gray = make_image(np.full((16, 16), 9, np.uint8), codec="png")
    deep = make_image(np.full((16, 16, 3), 9, np.uint16), codec="png")
    inputs = column(png(40), gray, deep)
    result = DecodeImages(width=8, height=8, pix_fmt=None)({"bytes": inputs})
    assert result["error"][0] == ""
    assert all("which does not fit among (8, 8, 3) of uint8" in one for one in result["error"][1:])


def test_an_option_that_does_not_suit_a_file_is_an_error_of_its_row() -> None:
    clip = make_video(index_planes(4, 32, 16), codec="libx264", format="mp4")
    config = sm.decode_config(decoder="h264")
    decode = DecodeVideo(width=8, height=8, num_frames=2, on_short="wrap", decode_config=config)
    first, second = decode({"bytes": column(clip, png(3))})["error"]
    assert first == ""
    assert second.startswith("ValueError: decode_config(decoder='h264') decodes h264, but the")


def test_a_batch_without_rows_has_the_columns() -> None:
    result = DecodeImages(width=8, height=8)({"bytes": column(), "label": np.arange(0)})
    assert {name: len(values) for name, values in result.items()} == {
        "label": 0,
        "image": 0,
        "error": 0,
    }
    assert result["image"].shape == (0, 8, 8, 3)


@each(
    "make, error, message",
    [
        (lambda: DecodeImages(filter_desc="hflip", width=8), ValueError, "width=8 would have no"),
        (lambda: DecodeImages(widht=3), TypeError, "widht.*width"),
        (lambda: DecodeImages(width=-3), ValueError, "width"),
        (lambda: DecodeImages(cuda=0), TypeError, "DecodeImages takes no cuda=, which it chooses"),
        (lambda: DecodeVideo(num_frames=2, on_short="never"), ValueError, "on_short"),
        (lambda: DecodeVideo(timestamp=(2, 1)), ValueError, "start must be less than end"),
        (lambda: DecodeAudio(sample_rate="high"), TypeError, "sample_rate"),
        (lambda: DecodeImages()([1, 2]), TypeError, "a batch must be a dictionary of arrays"),
    ],
)
def test_mistakes_are_reported_before_rows_are_read(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_batches_take_turns_in_the_memory_of_a_pool() -> None:
    decode = pickle.loads(pickle.dumps(DecodeImages(width=8, height=8)))
    kept = [decode({"bytes": column(png(level))})["image"] for level in (10, 20, 30, 40)]
    assert [int(images[0, 0, 0, 0]) for images in kept] == [10, 20, 30, 40]
    first = decode({"bytes": column(png(10), png(20))})["image"]
    places = {first.ctypes.data}
    del first
    for level in range(5):
        places.add(decode({"bytes": column(png(level), png(level))})["image"].ctypes.data)
    assert len(places) <= 2
    assert pickle.loads(pickle.dumps(decode))({"bytes": column(png(5))})["image"].max() == 5


def is_of_ray(process: Any) -> bool:
    import psutil

    try:
        return "ray" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    pytest.importorskip("ray.data")
    psutil = pytest.importorskip("psutil")
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_AUTH_MODE", "disabled")):
            patch.setenv(name, value)
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 * 2**20,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(sm.__file__).parents[1])}},
        )
        yield ray
        children = psutil.Process().children(recursive=True)
        # Not those of other tests: CPython's server for new processes stays until this one ends.
        started = [one for one in children if is_of_ray(one)]
        assert started
        ray.shutdown()
        assert psutil.wait_procs(started, timeout=30)[1] == []


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_ray_decodes_in_actors_and_in_tasks(ray: Any, tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.png").write_bytes(png(20 * number))
    (tmp_path / "05.png").write_bytes(DAMAGED)
    files = ray.data.read_binary_files(str(tmp_path), include_paths=True)
    actors = files.map_batches(
        DecodeImages,
        fn_constructor_kwargs={"width": 8, "height": 8},
        batch_size=5,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    tasks = files.map_batches(DecodeImages(width=8, height=8), batch_size=5)
    sizes = files.map_batches(DecodeImages(width=4), batch_size=5)
    for dataset, side in ((actors, 8), (tasks, 8), (sizes, 4)):
        rows = sorted(dataset.take_all(), key=lambda row: row["path"])
        assert [bool(row["error"]) for row in rows] == [number == 5 for number in range(12)]
        for number, row in enumerate(rows):
            assert set(row) == {"path", "image", "error"}
            if number != 5:
                assert row["image"].shape == (side, side, 3)
                assert (row["image"] == 20 * number).all()
    damaged = actors.filter(lambda row: row["error"] != "").take_all()
    assert [Path(row["path"]).name for row in damaged] == ["05.png"]


def test_columns_that_are_there_are_not_lost() -> None:
    for decoder, option in (
        (DecodeImages(width=8, height=8), "error"),
        (DecodeImages(width=8, height=8, error="why"), "output"),
    ):
        batch = {"bytes": [b""], "error": ["mine"], "image": [1]}
        if option == "error":
            del batch["image"]
        with pytest.raises(
            ValueError, match=f"already, which would be lost: give {option}= another"
        ):
            decoder(batch)
