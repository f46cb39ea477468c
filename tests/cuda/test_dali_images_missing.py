"""Errors with remedies without DALI, without a GPU, or in a forked process. Needs no DALI."""

from __future__ import annotations

import pickle
import sys
import types

import pytest
from dali_oracle import decode_image_batch
from fake_cuda import HISTORY, fresh_process

import spdl_media as sm
from spdl_media.cuda import dali
from spdl_media.cuda.dali import check_device
from spdl_media.cuda.images import decode_image_nvjpeg, load_image_batch_nvjpeg
from spdl_media.cuda_driver import CUDAHistory
from spdl_media.testing import index_frames, make_image

PICTURE = make_image(index_frames(1, 16, 12)[0], codec="mjpeg")


def test_missing_dali_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(
        sm.MissingDependencyError,
        match=r"decoding with DALI needs dali, .*pip install nvidia-dali-cuda120",
    ) as caught:
        decode_image_batch([PICTURE], cuda="cpu")
    assert caught.value.name == "dali"
    assert pickle.loads(pickle.dumps(caught.value)).name == "dali"


def test_missing_header_reader_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "dynamic", lambda: types.ModuleType("dynamic"))
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    with pytest.raises(
        sm.MissingDependencyError, match=r"needs nvimgcodec, .*pip install nvidia-nvimgcodec-cu12"
    ):
        decode_image_nvjpeg(PICTURE, cuda="cpu")


def test_old_dali_is_distinguished_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("nvidia.dali")
    old.__version__ = "1.50.0"
    monkeypatch.setitem(sys.modules, "nvidia.dali", old)
    monkeypatch.setitem(sys.modules, "nvidia.dali.experimental", None)
    monkeypatch.setitem(sys.modules, "nvidia.dali.experimental.dynamic", None)
    with pytest.raises(
        sm.MissingDependencyError, match=r"2\.4 or later, and version 1\.50\.0 .*--upgrade"
    ):
        check_device(None)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Replace DALI's number of devices by one that a test may set. CUDA counts as unused."""
    backend = types.SimpleNamespace(count=2)
    backend.GetCUDADeviceCount = lambda: backend.count
    monkeypatch.setattr(dali, "dali_module", lambda name: {"backend": backend}[name])
    fresh_process(monkeypatch)
    return backend


def test_no_device_at_all(devices: types.SimpleNamespace) -> None:
    devices.count = 0
    with pytest.raises(
        RuntimeError, match=r"CUDA device 0: DALI finds no CUDA device\. nvidia-smi"
    ):
        check_device(0)


@pytest.mark.parametrize(
    ("count", "allowed"), [(1, "there is one, counted from 0"), (2, "there are 2, counted from 0")]
)
def test_device_that_is_not_there(devices: types.SimpleNamespace, count: int, allowed: str) -> None:
    devices.count = count
    for index in (2, -1):
        with pytest.raises(ValueError, match=rf"CUDA device {index} was asked for, and {allowed}"):
            check_device(index)


def test_child_forked_after_cuda_is_refused(
    devices: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_device(0)
    assert HISTORY.used
    HISTORY.after_fork()
    with pytest.raises(
        RuntimeError, match=r"cannot use CUDA in this process: it was forked .*'spawn'"
    ):
        check_device(0)
    # A process forked from the child is refused, too, although the child has not used CUDA.
    HISTORY.after_fork()
    with pytest.raises(RuntimeError, match="it was forked"):
        check_device(0)


def test_child_forked_before_cuda_may_use_it() -> None:
    history = CUDAHistory()
    history.after_fork()
    history.check("a test")
    assert (history.used, history.lost) == (False, False)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, r"give one of cuda= and cuda_config=, .*not neither"),
        ({"cuda": 0, "cuda_config": 0}, ValueError, r"are one argument with two names"),
        ({"cuda": "cpu", "cuda_config": 0}, ValueError, r"are one argument with two names"),
        (
            {"cuda": "gpu"},
            TypeError,
            r"number of a device, such as 0, or made by cuda_config\(\), not 'gpu'",
        ),
        ({"cuda": True}, TypeError, r"not True"),
        ({"cuda": 1.0}, TypeError, r"not 1\.0"),
        ({"cuda": "cpu", "pix_fmt": "rgb24"}, ValueError, r"pix_fmt must be 'rgb' or 'bgr'"),
        ({"cuda": "cpu", "width": 0}, ValueError, r"^width must be positive"),
        ({"cuda": "cpu", "layout": "HWC"}, ValueError, r"layout must be 'NCHW', 'NHWC'"),
        ({"cuda": "cpu", "on_error": "warn"}, ValueError, r"on_error must be 'raise', 'skip'"),
        ({"cuda": "cpu", "hw_decoder_load": 65}, ValueError, r"share from 0 to 1, .*not 65"),
    ],
)
def test_misuse_is_refused_before_anything_is_read(
    given: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_image_batch_nvjpeg(["no such file"], **{"width": 8, "height": 8, **given})  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("srcs", ["picture.jpg", b"bytes", None])
def test_one_source_is_no_batch(srcs: object) -> None:
    with pytest.raises(
        TypeError,
        match=r"a batch is a sequence of sources, .*not .*; decode_image_nvjpeg takes",
    ):
        load_image_batch_nvjpeg(srcs, cuda="cpu", width=8, height=8)  # type: ignore[arg-type]


def test_a_size_is_reported_by_the_name_it_was_given_by() -> None:
    with pytest.raises(ValueError, match=r"^scale_width must be positive"):
        decode_image_nvjpeg("no such file", cuda="cpu", scale_width=0)


def test_empty_batch() -> None:
    with pytest.raises(sm.ConvertError, match="there are no inputs to load: the sequence is empty"):
        load_image_batch_nvjpeg([], cuda="cpu", width=8, height=8)


def test_colours_of_spdl_only() -> None:
    with pytest.raises(ValueError, match=r"pix_fmt must be 'rgb' or 'bgr', not 'rgb24'"):
        decode_image_nvjpeg(PICTURE, cuda="cpu", pix_fmt="rgb24")
