"""The memory of decoded pictures is used again, and not taken anew from the system for each."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from spdl_media.testing import index_frames, make_image

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators have other habits"
)

# In a process of its own, in which nothing large was freed: that alone would change the allocator.
FAULTS_A_PICTURE = """
import resource, sys
import spdl_media as sm

pool = sm.StoragePool(16 * 224 * 224 * 3, 1, pin_memory=False)

def faults(batches):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(batches):
        with sm.load_image_batch([sys.argv[1]] * 16, width=224, height=224, storage=pool):
            pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(4)
print(faults(4) / 64)
"""


def test_a_loop_over_a_pool_takes_no_new_pages(tmp_path: Path) -> None:
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(make_image(index_frames(1, 500, 375)[0], codec="mjpeg"))
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_A_PICTURE, str(picture)],
        check=True,
        capture_output=True,
        text=True,
    )
    # Without keep_freed_memory it is about 30.
    assert float(done.stdout) < 2
