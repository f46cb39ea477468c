"""NVDEC on stand-in drivers, each in a process of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "fake_driver"))

from driver_build import build, run  # noqa: E402  # of the tests, in a folder of its own


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


def test_decoding_on_a_driver_without_a_device(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all tests of ``fake_driver/nvdec_checks.py`` in a process with the stand-in driver."""
    checks = HERE.parent / "fake_driver" / "nvdec_checks.py"
    # Other plugins take a second to load.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    done = run(driver, "-m", "pytest", "-q", "-n0", *plugins, str(checks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_a_driver_that_is_too_old_is_named(tmp_path: Path) -> None:
    build(tmp_path, "-DOLD")
    done = run(tmp_path, str(HERE.parent / "fake_driver" / "old_driver.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    said, version = done.stdout.splitlines()
    driver = "NVIDIA's driver, which is of CUDA 11.4, lacks "
    assert said.startswith(f"DriverError: {driver}cuStreamCreate, which the wheel of spdl_media ")
    assert said.endswith(" calls. Install a newer driver, or leave cuda= out")
    assert version == "11.4"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["returns", "raises", "exits", "in a thread", "holds frames"])
def test_processes_end_well_with_decoders_and_frames_at_hand(driver: Path, way: str) -> None:
    """Run four processes for each way to end."""
    script = str(HERE.parent / "fake_driver" / "ends.py")
    for _ in range(4):
        done = run(driver, script, way)
        assert done.returncode == {"raises": 1, "exits": 7}.get(way, 0), done.stderr
        said = re.findall(r"^\w*Error.*", done.stderr, re.MULTILINE)
        assert said == ["RuntimeError: the end"] * (way == "raises")
