"""gpu_check without a GPU. ``fake_driver/nvdec_checks.py`` runs its measurement on a stand-in driver."""

from __future__ import annotations

import sys

import gpu_check
import pytest
import real_cuda


@pytest.mark.long  # each part is a process
@pytest.mark.skipif(real_cuda.why_not() is None, reason="there is a GPU")
def test_without_a_gpu_each_part_says_why_it_is_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main() == gpu_check.SKIPPED
    said = capfd.readouterr().out.splitlines()
    assert said.count(f"skipped: {real_cuda.why_not()}") == len(gpu_check.PARTS)
    assert said[-1] == "; ".join(f"{name} skipped" for name in gpu_check.PARTS)


def test_a_part_that_hangs_is_cut_off_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = iter(["import signal; signal.pause()", "", "1 / 0"])
    start = gpu_check.start
    monkeypatch.setattr(gpu_check, "start", lambda _: start([sys.executable, "-Sc", next(codes)]))
    monkeypatch.setitem(gpu_check.PARTS, "tests", (gpu_check.tests, 0))
    assert gpu_check.main("tests", "full", "exits") == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "tests cut off; full done; exits failed with 1"
