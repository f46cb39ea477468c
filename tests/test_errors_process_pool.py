"""Errors of real calls in other processes: all fields come back, and the pool still works."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from damage import container, made

import spdl_media as sm
from spdl_media import errors
from spdl_media.testing import make_image


def source_error(folder: str) -> None:
    sm.demux_video(f"{folder}/none.mp4")


def demux_error(folder: str) -> None:
    sm.demux_video(b"no media at all " * 99, name="record 7")


def decode_error(folder: str) -> None:
    data = bytearray(made("ffv1"))
    data[len(data) // 2] ^= 1
    sm.decode_packets(sm.demux_video(bytes(data)))


def cut_short_error(folder: str) -> None:
    sm.decode_packets(sm.demux_audio(container("wav")[:9000]))


def filter_error(folder: str) -> None:
    sm.decode_packets(sm.demux_image(made("png")), "scale=w=abc")


def picture_size_error(folder: str) -> None:
    sm.load_image(make_image(np.zeros((1, 4000), np.uint8)), height=4000)


def convert_error(folder: str) -> None:
    frames = [sm.decode_packets(sm.demux_image(made(name))) for name in ("png", "png")]
    small = sm.decode_packets(sm.demux_image(made("png")), "scale=8:8,format=rgb24")
    sm.convert_frames([*frames, small])


def storage_too_small_error(folder: str) -> None:
    frames = sm.decode_packets(sm.demux_image(made("png")))
    sm.convert_frames(frames, sm.cpu_storage(8, pin_memory=False))


def transfer_error(folder: str) -> None:
    with patch.dict("sys.modules", {"torch": None, "cupy": None}):
        sm.transfer_buffer(sm.convert_array([1]), cuda_config=0)


def missing_dependency_error(folder: str) -> None:
    # As if it were not installed.
    with patch.dict("sys.modules", {"fsspec": None}):
        sm.demux_image("memory://a.png")


def array_format_error(folder: str) -> None:
    sm.load_npy(b"no array")


def encode_error(folder: str) -> None:
    sm.encode_image(np.zeros((4, 4, 4), np.uint8), format="jpeg")


def write_error(folder: str) -> None:
    sm.save_image(f"{folder}/none/image.png", np.zeros((4, 4, 3), np.uint8))


CALLS = {
    array_format_error: sm.ArrayFormatError,
    source_error: sm.SourceError,
    demux_error: sm.DemuxError,
    decode_error: sm.DecodeError,
    cut_short_error: sm.DecodeError,
    filter_error: sm.FilterError,
    picture_size_error: sm.PictureSizeError,
    convert_error: sm.ConvertError,
    storage_too_small_error: sm.StorageTooSmallError,
    transfer_error: sm.TransferError,
    missing_dependency_error: sm.MissingDependencyError,
    encode_error: sm.EncodeError,
    write_error: sm.WriteError,
}
FIELDS = ("source", "errno", "pts_seconds", "packet_index", "filter_desc", "name")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


def test_every_class_is_raised_here() -> None:
    public = {getattr(errors, name) for name in errors.__all__} - {sm.MediaError}
    assert set(CALLS.values()) == public


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_comes_back_whole(call: object, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    with pytest.raises(CALLS[call]) as here:
        call(str(tmp_path))
    with pytest.raises(CALLS[call]) as there:
        process.submit(call, str(tmp_path)).result(timeout=100)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert there.value.args == here.value.args
    for field in FIELDS:
        assert getattr(there.value, field, None) == getattr(here.value, field, None), field
    # A storage does not know the source of its frames, and neither does a device or an encoder.
    without_source = sm.StorageTooSmallError | sm.TransferError | sm.EncodeError
    assert there.value.source or isinstance(there.value, without_source)
    assert process.submit(abs, -1).result(timeout=100) == 1


def test_fields_are_filled(tmp_path: Path) -> None:
    caught = {}
    for call in CALLS:
        with pytest.raises(sm.MediaError) as error:
            call(str(tmp_path))
        caught[call] = error.value
    assert caught[source_error].errno == 2
    assert caught[demux_error].source == "record 7"
    assert caught[decode_error].pts_seconds == pytest.approx(1.2, abs=0.3)
    assert caught[decode_error].packet_index == round(caught[decode_error].pts_seconds * 10)
    assert "abc" in caught[filter_error].filter_desc
    assert caught[missing_dependency_error].name == "fsspec"
    assert "pip install" in str(caught[missing_dependency_error])
