"""The mark ``cuda``: tests that need a GPU are skipped without one, and fail where one was promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import real_cuda

TESTS = Path(__file__).resolve().parent
ONE = f"{TESTS / 'test_transfer_load.py'}::test_a_device_that_is_not_there[torch]"


@pytest.mark.skipif(real_cuda.why_not("torch") is None, reason="there is a GPU")
@pytest.mark.parametrize(("promised", "said"), [("", "1 skipped"), ("1", "1 error")])
def test_without_a_gpu_tests_skip_or_fail(promised: str, said: str) -> None:
    environment = {**os.environ, real_cuda.REQUIRE: promised}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ONE]
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
