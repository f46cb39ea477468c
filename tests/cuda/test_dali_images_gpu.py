"""The GPU path of DALI, with its CPU operators as a stand-in that records all calls with a device."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from dali_oracle import decode_image_batch, host, jpeg
from fake_cuda import HISTORY, fresh_process

pytest.importorskip("nvidia.dali")

import spdl_media as sm
from spdl_media.cuda import dali
from spdl_media.cuda.images import load_image_batch_nvjpeg

SRCS = [jpeg(50 + 7 * index, 40, index) for index in range(5)]
OPTIONS: dict[str, Any] = {"width": 24, "height": 20, "layout": "NCHW"}


class Stream:
    handle = 0x4400

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("synchronize")


class Context:
    """DALI's evaluation context on the CPU, with a stream as on a GPU."""

    def __init__(self, context: Any, stream: Any) -> None:
        self._context, self.cuda_stream = context, stream

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


class Dynamic:
    """DALI's dynamic API as on a machine with two GPUs."""

    def __init__(self) -> None:
        self._real: Any = dali.dynamic()
        self.log: list[Any] = []
        self.count = 2
        self._ops = types.SimpleNamespace(
            decoders=types.SimpleNamespace(Image=self._operator("decoders.Image")),
            **{name: self._operator(name) for name in ("Resize", "Slice", "CropMirrorNormalize")},
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def GetCUDADeviceCount(self) -> int:  # noqa: N802  # DALI's name
        return self.count

    @contextmanager
    def Device(self, name: str) -> Iterator[None]:  # noqa: N802  # DALI's name
        self.log.append(("enter", name))
        yield

    def stream(self, *, device_id: int) -> Stream:
        self.log.append(("stream", device_id))
        return Stream(self.log)

    def EvalContext(self, *, num_threads: int, device_id: int, cuda_stream: Any) -> Any:  # noqa: N802
        self.log.append(("context", device_id, num_threads))
        return Context(self._real.EvalContext(num_threads=num_threads), cuda_stream)

    def _operator(self, path: str) -> Any:
        def make(*, device: str, **settings: Any) -> Any:
            self.log.append((path, device))
            found = self._real._ops
            for name in path.split("."):
                found = getattr(found, name)
            return found(device="cpu", **settings)

        return make


@pytest.fixture
def dynamic(monkeypatch: pytest.MonkeyPatch) -> Dynamic:
    fake = Dynamic()
    real = dali.dali_module
    monkeypatch.setattr(dali, "dynamic", lambda: fake)
    monkeypatch.setattr(dali, "dali_module", lambda name: fake if name == "backend" else real(name))
    monkeypatch.setattr(dali, "_POOLS", {})
    fresh_process(monkeypatch)
    return fake


def test_all_work_is_done_on_the_device_that_was_asked_for(dynamic: Dynamic) -> None:
    rows = host(decode_image_batch(SRCS, cuda_config=sm.cuda_config(1), **OPTIONS).array)
    assert dynamic.log == [
        ("enter", "gpu:1"),
        ("stream", 1),
        ("context", 1, dali.THREADS_A_SLOT),
        ("enter", "gpu:1"),
        ("decoders.Image", "gpu:1"),
        ("Resize", "gpu:1"),
        ("Slice", "gpu:1"),
        ("CropMirrorNormalize", "gpu:1"),
        "synchronize",
    ]
    assert HISTORY.used
    np.testing.assert_array_equal(rows, host(decode_image_batch(SRCS, cuda=1, **OPTIONS).array))


def test_second_batch_uses_what_the_first_made(dynamic: Dynamic) -> None:
    decode_image_batch(SRCS, cuda=0, **OPTIONS)
    del dynamic.log[:]
    decode_image_batch(SRCS, cuda=0, **OPTIONS)
    assert dynamic.log == [("enter", "gpu:0"), "synchronize"]


def test_each_device_has_slots_and_streams_of_its_own(dynamic: Dynamic) -> None:
    decode_image_batch(SRCS, cuda=0, **OPTIONS)
    decode_image_batch(SRCS, cuda=1, **OPTIONS)
    assert [entry for entry in dynamic.log if entry[0] == "stream"] == [
        ("stream", 0),
        ("stream", 1),
    ]
    first, second = (dali.slot_pool(index) for index in (0, 1))
    assert first is not second


def test_device_is_done_with_the_inputs_even_after_an_error(dynamic: Dynamic) -> None:
    with (
        pytest.raises(KeyError, match="in the block"),
        dali.slot_pool(0).borrow(),
    ):
        raise KeyError("in the block")
    assert dynamic.log[-1] == "synchronize"


def test_settings_of_the_gpu_reach_the_decoder(
    dynamic: Dynamic, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    run = dali.Slot.run

    def spy(self: Any, operator: str, data: Any, settings: Any, *arguments: Any) -> Any:
        seen.append(dict(settings))
        return run(self, operator, data, settings, *arguments)

    monkeypatch.setattr(dali.Slot, "run", spy)
    decode_image_batch(SRCS, cuda=0, hw_decoder_load=0.25, **OPTIONS)
    load_image_batch_nvjpeg(SRCS, cuda=0, width=37, height=30, hw_decoder_load=None)
    load_image_batch_nvjpeg(SRCS, cuda=0, width=37, height=31)  # SRCS[0] is 50x40
    sm.load_image_batch(SRCS[:1], cuda=0, decoder="dali")
    found = [one for one in seen if "output_type" in one]
    assert [one.get("hw_decoder_load") for one in found] == [0.25, None, 1, 1]
    assert [one["jpeg_fancy_upsampling"] for one in found] == [False, False, True, True]
    assert not any(one["affine"] for one in found)


def test_device_that_is_not_there(dynamic: Dynamic) -> None:
    with pytest.raises(ValueError, match=r"CUDA device 2 was asked for, and there are 2, counted"):
        decode_image_batch(SRCS, cuda=2, **OPTIONS)


def test_forked_child_is_refused(dynamic: Dynamic) -> None:
    decode_image_batch(SRCS, cuda=0, **OPTIONS)
    HISTORY.after_fork()
    with pytest.raises(RuntimeError, match=r"it was forked from one that had used CUDA.*'spawn'"):
        decode_image_batch(SRCS, cuda=0, **OPTIONS)
