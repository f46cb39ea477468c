"""The memory of decoded images is reused, and not allocated from the system for each image."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from spdl_media.testing import index_frames, make_image

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators have other habits"
)

FAULTS_A_PICTURE = """
import resource, sys
import numpy as np
import spdl_media as sm

def fill():
    return [np.ones(100_000, np.uint8) for _ in range(120)]

if sys.argv[2] == "a heap with a hole":
    hole, last = fill(), np.ones(100_000, np.uint8)
    del hole

pool = sm.StoragePool(16 * 224 * 224 * 3, 1, pin_memory=False)

def faults(batches):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(batches):
        with sm.load_image_batch([sys.argv[1]] * 16, width=224, height=224, storage=pool):
            pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(1)
held = fill()
faults(2)
print(faults(2) / 32)
"""


# In new processes, because freeing something large changes the behaviour of the allocator.
@pytest.mark.parametrize("heap", ["a heap as it is", "a heap with a hole"])
def test_a_loop_over_a_pool_takes_no_new_pages(tmp_path: Path, heap: str) -> None:
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(make_image(index_frames(1, 500, 375)[0], codec="mjpeg"))
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_A_PICTURE, str(picture), heap],
        check=True,
        capture_output=True,
        text=True,
        # Dask sets this variable when it starts workers, and glibc then uses that limit.
        env={name: value for name, value in os.environ.items() if "MALLOC" not in name},
    )
    # Without keep_freed_memory it is about 200.
    assert float(done.stdout) < 2
