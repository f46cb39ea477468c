"""The mark ``cuda``: tests are skipped without a GPU, and fail if the environment requires one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import real_cuda

TESTS = Path(__file__).resolve().parent
SOME = [
    f"{TESTS / file}::{test}"
    for file, test in (
        ("test_transfer_load.py", "test_a_device_that_is_not_there[torch]"),
        ("cuda/test_gpu_pictures.py", "test_ragged_batches_are_as_on_the_cpu_path[gpu-pad]"),
        ("cuda/test_gpu_videos.py", "test_planes_are_the_cpus_bit_for_bit[gpu-libx264]"),
        ("cuda/test_gpu_videos.py", "test_dali_gives_the_frames_of_the_cpu[options0-libx264]"),
        ("cuda/test_gpu_colors.py", "test_the_kernel_gives_what_the_reference_gives[gpu-nv12-tv]"),
        ("cuda/test_gpu_loading.py", "test_tensors_go_and_come_back"),
    )
]


@pytest.mark.long  # pytest starts twice, and imports all packages of the GPU tests
@pytest.mark.skipif(real_cuda.why_not("torch") is None, reason="there is a GPU")
@pytest.mark.parametrize(("promised", "said"), [("", "6 skipped"), ("1", "6 errors")])
def test_without_a_gpu_tests_skip_or_fail(promised: str, said: str) -> None:
    """They include tests of transfers, images, videos and colours, with any installed packages."""
    environment = {**os.environ, real_cuda.REQUIRE: promised}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SOME]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=TESTS.parent, check=False
    )
    assert done.stdout.splitlines()[-1].startswith(said), done.stdout + done.stderr
    assert (done.returncode != 0) == bool(promised)
    reason = real_cuda.why_not("torch")
    assert reason is not None
    assert (f"{real_cuda.REQUIRE}=1, and {reason}" in done.stdout) == bool(promised)


@pytest.mark.cuda
def test_a_promised_gpu_is_there() -> None:
    assert real_cuda.why_not() is None


def test_a_package_without_a_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, _: int) -> int:  # noqa: N802  # the driver's name
            return 0

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802  # the driver's name
            count._obj.value = found[0]  # type: ignore[attr-defined]  # a reference of ctypes
            return 0

    found = [0]
    monkeypatch.setattr(real_cuda.ctypes, "CDLL", lambda _: Driver())
    assert real_cuda.why_not() == "the driver finds no device"
    found[0] = 1
    assert real_cuda.why_not() is None
    assert real_cuda.why_not("nosuchpackage") == "nosuchpackage is not installed"
    assert real_cuda.why_not("nosuch.package") == "nosuch.package is not installed"


def test_a_library_that_the_driver_lacks_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_cuda, "_why_not", lambda _: None)
    reason = real_cuda._why_not_library("libnosuch.so.1")
    assert reason == "the driver has no libnosuch.so.1"
    assert real_cuda._why_not_library("libc.so.6") is None
