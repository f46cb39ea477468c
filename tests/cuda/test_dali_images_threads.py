"""DALI in more threads than there are slots: results are exact, also after errors and after a fork."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from dali_oracle import cpu, decode_image_batch, host, jpeg, photo, png_with_wrong_data

import spdl_media as sm

pytest.importorskip("nvidia.dali")

from spdl_media.cuda import dali

# Ignore the warning about the fallback to the CPU; tests of the warning expect it explicitly.
pytestmark = pytest.mark.filterwarnings("ignore::spdl_media.CPUFallbackWarning")

THREADS, ROUNDS = 12, 4
SRCS = [jpeg(50 + 7 * index, 40 + 3 * index, index) for index in range(10)]
OPTIONS: dict[str, Any] = {"cuda": "cpu", "width": 32, "height": 24, "scale_mode": "crop"}
ROWS = host(decode_image_batch(SRCS, **OPTIONS).array)
WANT = cpu(SRCS, width=32, height=24, scale_mode="crop")
BAD = png_with_wrong_data(photo(40, 30))


def test_results_are_exact_from_many_threads_and_after_errors() -> None:
    together = threading.Barrier(THREADS)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        together.wait()
        for _ in range(ROUNDS):
            order = rng.permutation(len(SRCS))[: rng.integers(1, len(SRCS) + 1)]
            srcs = [SRCS[index] for index in order]
            np.testing.assert_array_equal(
                host(decode_image_batch(srcs, **OPTIONS).array), ROWS[order]
            )
            with pytest.raises(sm.DecodeError, match="input 0 of the batch"):
                decode_image_batch([BAD, *srcs], **OPTIONS)
            kept = decode_image_batch([*srcs, BAD], on_error="skip", **OPTIONS)
            np.testing.assert_array_equal(host(kept.array), WANT[order])

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    idle = dali.slot_pool(None)._idle.queue
    assert len(idle) == dali.MAX_SLOTS
    assert any(idle)


@pytest.mark.long  # a process that imports DALI
def test_forked_child_decodes_with_slots_of_its_own() -> None:
    """The child has no threads of the parent's slots. The parent is a new process without other threads."""
    script = """
    import os, sys, traceback
    import numpy as np
    from dali_oracle import cpu, decode_image_batch, host, jpeg
    srcs = [jpeg(40, 30, seed) for seed in range(4)]
    before = host(decode_image_batch(srcs, cuda="cpu", width=20, height=20).array)
    child = os.fork()
    if child == 0:
        try:
            after = host(decode_image_batch(srcs, cuda="cpu", width=20, height=20).array)
            os._exit(0 if np.array_equal(before, after) else 3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    path = [part for part in sys.path if part]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{textwrap.dedent(script)}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
