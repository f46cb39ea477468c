"""Bad images among good ones: they are named and handled by on_error=, and the other images are kept."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from dali_oracle import cpu, decode_image_batch, host, jpeg, photo, png_header, png_with_wrong_data

import spdl_media as sm
from spdl_media.testing import make_image

pytest.importorskip("nvidia.dali")

from spdl_media.cuda import dali
from spdl_media.cuda.images import decode_image_nvjpeg

# Ignore the warning about the fallback to the CPU; tests of the warning expect it explicitly.
pytestmark = pytest.mark.filterwarnings("ignore::spdl_media.CPUFallbackWarning")

COUNT = 8
GOOD = [jpeg(60 + index, 50, index) for index in range(COUNT)]
OPTIONS: dict[str, Any] = {"cuda": "cpu", "width": 24, "height": 20}
ROWS = host(decode_image_batch(GOOD, **OPTIONS).array)
# A batch with a bad image is decoded on the CPU.
WANT = cpu(GOOD, width=24, height=20)


BAD: dict[str, tuple[bytes, type[sm.MediaError], str]] = {
    "nothing": (b"", sm.DemuxError, "empty"),
    "text": (b"no picture at all", sm.DemuxError, "FFmpeg"),
    "cut short": (GOOD[0][: len(GOOD[0]) // 2], sm.DecodeError, "cut short"),
    "header only": (GOOD[0][:200] + bytes(400) + b"\xff\xd9", sm.DecodeError, "damaged mjpeg data"),
    "no height": (
        GOOD[0].replace(b"\x08\x00\x32\x00\x3c", b"\x08\x00\x00\x00\x3c"),
        sm.DecodeError,
        "damaged mjpeg data",
    ),
    "pixels": (png_with_wrong_data(photo(40, 30)), sm.DecodeError, "damaged png data"),
    "too large": (
        png_header(make_image(photo(20, 20)), 100_000),
        sm.DecodeError,
        "damaged png data",
    ),
}


LARGE = jpeg(200, 90)
PASSES: dict[str, bytes] = {
    "a hole of zeros": LARGE[: len(LARGE) // 2]
    + bytes(len(LARGE) // 4)
    + LARGE[-(len(LARGE) // 4) :],
    "cut short, with an end marker": LARGE[: len(LARGE) * 6 // 10] + b"\xff\xd9",
}
"""Damaged JPEGs that FFmpeg rejects; see docs/damage.md."""


@pytest.mark.parametrize("kind", PASSES)
def test_what_dali_does_not_notice_of_a_jpeg(kind: str) -> None:
    """Neither DALI nor nvImageCodec has an option to detect it; libjpeg-turbo writes a line to stderr."""
    data = PASSES[kind]
    with pytest.raises(sm.DecodeError, match="damaged mjpeg data"):
        sm.load_image_batch([data])
    batch = decode_image_batch([data, GOOD[0]], **OPTIONS)
    assert batch.failures == ()
    np.testing.assert_array_equal(host(batch.array)[1], ROWS[0])
    assert host(batch.array)[0].any()


@pytest.mark.parametrize("position", range(COUNT))
@pytest.mark.parametrize("kind", BAD)
def test_one_bad_image_in_each_position(kind: str, position: int) -> None:
    data, error, message = BAD[kind]
    srcs = [*GOOD]
    srcs[position] = data
    named = rf"bytes of length {len(data)}: input {position} of the batch of {COUNT}: .*{message}"
    with pytest.raises(error, match=named):
        decode_image_batch(srcs, **OPTIONS)

    rest = [index for index in range(COUNT) if index != position]
    skipped = decode_image_batch(srcs, on_error="skip", **OPTIONS)
    assert skipped.indices == tuple(rest)
    np.testing.assert_array_equal(host(skipped.array), WANT[rest])

    filled = decode_image_batch(srcs, on_error="fill", **OPTIONS)
    assert filled.indices == tuple(range(COUNT))
    assert not host(filled.array)[position].any()
    np.testing.assert_array_equal(host(filled.array)[rest], WANT[rest])
    for batch in (skipped, filled):
        ((index, source, why),) = [(f.index, f.source, f.error) for f in batch.failures]
        assert (index, source) == (position, f"bytes of length {len(data)}")
        assert isinstance(why, error)
        assert why.__traceback__ is None
        assert str(pickle.loads(pickle.dumps(why))) == str(why)


@pytest.mark.parametrize("kind", sorted(set(BAD) - {"pixels"}))
def test_most_bad_images_never_reach_dali(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    run = dali.Slot.run

    def spy(self: Any, operator: str, data: Any, *arguments: Any) -> Any:
        if operator == "decoders.Image":
            batches.append(len(data))
        return run(self, operator, data, *arguments)

    monkeypatch.setattr(dali.Slot, "run", spy)
    decode_image_batch([*GOOD, BAD[kind][0]], on_error="skip", **OPTIONS)
    assert batches == []


def test_all_kinds_at_once_in_the_order_of_the_inputs() -> None:
    srcs = [
        source
        for pair in zip(GOOD, [*BAD.values()], strict=False)
        for source in (pair[0], pair[1][0])
    ]
    batch = decode_image_batch(srcs, on_error="fill", **OPTIONS)
    assert [failure.index for failure in batch.failures] == [1, 3, 5, 7, 9, 11, 13]
    np.testing.assert_array_equal(host(batch.array)[::2], WANT[:7])
    assert not host(batch.array)[1::2].any()


def test_large_batches_with_headers_that_cannot_be_read() -> None:
    """DALI's decoder crashes the process if it meets one of these among some 30 good ones."""
    srcs = (GOOD * 5)[:32]
    for position in range(0, 32, 5):
        srcs[position] = BAD["header only"][0]
    for _ in range(10):
        batch = decode_image_batch(srcs, on_error="skip", **OPTIONS)
        assert len(batch.failures) == 7


def test_none_can_be_loaded() -> None:
    bad = [BAD["text"][0], BAD["pixels"][0]]
    with pytest.raises(
        sm.ConvertError, match=r"none of the 2 inputs could be loaded.*input 1: .*damaged png"
    ):
        decode_image_batch(bad, on_error="skip", **OPTIONS)
    with pytest.raises(sm.ConvertError, match=r"none of the 2 inputs .*gives zeros if width="):
        decode_image_batch(bad, on_error="fill", cuda="cpu")
    zeros = decode_image_batch(bad, on_error="fill", **OPTIONS)
    assert host(zeros.array).shape == (2, 20, 24, 3)
    assert not host(zeros.array).any()
    assert [failure.index for failure in zeros.failures] == [0, 1]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_rows_of_zeros_take_the_size_of_the_others(layout: Any) -> None:
    srcs = [BAD["text"][0], GOOD[0], BAD["pixels"][0], GOOD[0]]
    rows = host(decode_image_batch(srcs, cuda="cpu", on_error="fill", layout=layout).array)
    assert rows.shape == ((4, 50, 60, 3) if layout == "NHWC" else (4, 3, 50, 60))
    assert [bool(row.any()) for row in rows] == [False, True, False, True]


def test_sizes_that_differ_are_named() -> None:
    with pytest.raises(
        sm.ConvertError,
        match=r"input 0 \(bytes.*\) is 60x50 rgb24, but input 1 \(.* is 61x50 rgb24.*give width=",
    ):
        decode_image_batch([GOOD[0], GOOD[1], GOOD[7], *GOOD], cuda="cpu")


def test_error_of_one_image() -> None:
    with pytest.raises(sm.DecodeError, match="cut short"):
        decode_image_nvjpeg(BAD["cut short"][0], cuda="cpu")


def test_damaged_images_can_be_kept() -> None:
    config = sm.decode_config(on_corrupt="keep")
    data = BAD["cut short"][0]
    rows = decode_image_batch([GOOD[1], data], decode_config=config, **OPTIONS)
    oracle = sm.load_image(data, width=24, height=20, decode_config=config)
    np.testing.assert_array_equal(host(rows.array)[1], np.asarray(oracle))


def test_image_that_only_ffmpeg_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in DALI, and FFmpeg decodes the whole batch."""
    run = dali.Slot.run
    broken = GOOD[3]

    def fails(self: Any, operator: str, data: Any, *arguments: Any) -> Any:
        if operator == "decoders.Image" and any(
            bytes(one)[: len(broken)] == broken for one in data
        ):
            raise RuntimeError("Failed to decode sample #3")
        return run(self, operator, data, *arguments)

    monkeypatch.setattr(dali.Slot, "run", fails)
    with pytest.warns(
        sm.CPUFallbackWarning, match="^DALI says 'Failed to decode sample #3'. The CPU"
    ):
        batch = decode_image_batch(GOOD, **OPTIONS)
    assert batch.failures == ()
    np.testing.assert_array_equal(host(batch.array), WANT)


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), RuntimeError("CUDA out of memory")]
)
def test_batch_that_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run = dali.Slot.run

    def fails(self: Any, operator: str, *arguments: Any) -> Any:
        if operator == "Resize":
            raise error
        return run(self, operator, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dali.Slot, "run", fails)
        told = (
            r"the 8 images of this batch, 0\.1 MB when decoded, do not fit into the memory of the CPU: "
            rf"DALI says '{error}'"
        )
        with pytest.raises(sm.TransferError, match=told) as caught:
            decode_image_batch(GOOD, **OPTIONS)
        assert caught.value.__cause__ is error
    np.testing.assert_array_equal(host(decode_image_batch(GOOD, **OPTIONS).array), ROWS)


def test_the_load_was_cancelled() -> None:
    from spdl_media.batch import Stopped

    asked = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(Stopped):
        decode_image_batch(GOOD, stopped=stopped, **OPTIONS)
    assert len(asked) == 4
