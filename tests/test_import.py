"""Importing the package is quick, and imports no module that is not needed yet."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from spdl_media import MissingDependencyError

MAX_SECONDS = 0.6  # 0.2 to 0.3 on an idle machine
MAX_RUNS = 10
HEAVY = ("torch", "torchvision", "nvidia", "cupy", "jax", "numba", "fsspec", "aiohttp", "asyncio")
HEAVY += ("click", "rich", "sqlite3")

PROGRAM = """
import json, sys, time
import av.filter, av.video.reformatter, numpy, pickle, logging, typing  # not ours to make quick
start = time.process_time()
import spdl_media
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


def _import_in_a_new_process() -> tuple[float, set[str]]:
    # Warnings are errors here as well, whatever the parent's settings.
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    return answer["seconds"], set(answer["modules"])


def test_import_is_quick() -> None:
    # Use CPU time and the best of up to ten runs, because a busy machine slows most of them.
    times: list[float] = []
    while min(times, default=MAX_SECONDS) >= MAX_SECONDS and len(times) < MAX_RUNS:
        times.append(_import_in_a_new_process()[0])
    assert min(times) < MAX_SECONDS, times


def test_import_loads_no_optional_package() -> None:
    _, modules = _import_in_a_new_process()
    assert not {name for name in modules if name.split(".")[0] in HEAVY}
    assert {"av", "numpy"} <= modules


def test_the_face_of_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "spdl_media.torch", raising=False)
    with pytest.raises(MissingDependencyError, match=r"spdl_media\.torch needs torch.*pip install"):
        importlib.import_module("spdl_media.torch")


def test_import_leaves_testing_and_pipeline_alone() -> None:
    _, modules = _import_in_a_new_process()
    assert not modules & {"spdl_media.testing", "spdl_media.pipeline", "spdl_media.cli"}


@pytest.mark.parametrize("name", ["spdl_media.pipeline", "spdl_media.dataloader"])
def test_what_draws_random_numbers_has_imported_those_of_numpy(name: str) -> None:
    """NumPy imports them at their first use, where a Ctrl-C may get lost in its compiled modules."""
    code = f"import sys, {name}; print('numpy.random' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
