"""The colour kernel on a GPU and its reference; the same tests run with its source compiled for the CPU."""

from __future__ import annotations

from typing import Any

import color_kernel
import numpy as np
import pytest
from color_kernel import fake_cupy
from color_reference import by_reference, noise, to_rgb

import spdl_media as sm
from spdl_media.cuda.color_plan import SEMI_PLANAR

NORMAL = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(params=["compiled for the CPU", pytest.param("gpu", marks=pytest.mark.cuda)])
def device(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A GPU, or a stand-in for one."""
    if request.param != "gpu":
        folder = color_kernel.shared_folder(tmp_path_factory)
        fake_cupy(monkeypatch, color_kernel.compiled(folder))


def values_of(buffer: sm.CUDABuffer) -> np.ndarray:
    return np.array(sm.transfer_buffer_cpu(buffer))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("color_range", ["tv", "pc"])
@pytest.mark.parametrize("pix_fmt", list(SEMI_PLANAR))
def test_the_kernel_gives_what_the_reference_gives(pix_fmt: str, color_range: str) -> None:
    planes = noise(pix_fmt, 37, 29, 2)
    there = [sm.transfer_buffer(sm.CPUBuffer(plane), cuda_config=0) for plane in planes]
    for options in (
        {},
        {"width": 64, "height": 50, "layout": "NCHW"},
        {"width": 9, "height": 11, "scale_algo": "bilinear", "matrix": "bt709"},
        {"normalize": NORMAL, "layout": "NCHW", "matrix": "bt2020nc"},
    ):
        look: dict[str, Any] = {**options, "color_range": color_range}
        found = values_of(to_rgb(there, pix_fmt, **look))
        want = by_reference(to_rgb, planes, pix_fmt, **look)
        # Bit for bit if the kernel is compiled for the CPU. On a GPU, the limit has not been measured yet.
        if want.dtype == np.uint8:
            assert np.abs(found.astype(int) - want).max() <= 1
        else:
            np.testing.assert_allclose(found, want, atol=1e-4)
