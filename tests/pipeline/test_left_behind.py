"""Worker processes that refuse to end are killed, and memory is freed without a garbage collection."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import several_tries
from left_behind import WAIT, segments, wait_until
from resisting import Numbers, resist, rows_of, same, wait_for_ever, wait_if_negative

import spdl_media as sm
from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineStopped,
    ProcessPoolExecutorConfig,
    iterate_in_subprocess,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_workers_that_resist_end_with_their_epoch() -> None:
    pool = ProcessPoolExecutorConfig(max_workers=2, initializer=resist)
    pipeline = PipelineBuilder().add_source(range(5)).pipe(same, executor=pool).build()
    for _ in range(2):
        assert sorted(pipeline) == [0, 1, 2, 3, 4]


def test_a_worker_that_resists_in_a_call_holds_nobody(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    pool = ProcessPoolExecutorConfig(max_workers=1, initializer=resist)
    pipeline = PipelineBuilder().add_source([str(runs)]).pipe(wait_for_ever, executor=pool).build()
    pipeline.start()
    while not runs.exists():
        time.sleep(0.01)
    start = time.monotonic()
    pipeline.stop()
    assert time.monotonic() - start < 15
    with pytest.raises(PipelineStopped):
        pipeline.get_item(timeout=WAIT)


@several_tries
def test_a_worker_that_resists_is_killed_when_a_call_takes_too_long() -> None:
    pool = ProcessPoolExecutorConfig(max_workers=1, num_threads=2, initializer=resist)
    builder = PipelineBuilder().add_source([0, -1, 1, 2, 3])
    builder.pipe(wait_if_negative, executor=pool, concurrency=2, timeout=0.5)
    pipeline = builder.build(max_failures=10)
    found = list(pipeline)
    # The process is killed, together with its other calls.
    assert {0, 3} <= set(found) <= {0, 1, 2, 3}
    assert any("timeout=0.5 s" in str(record.exception) for record in pipeline.failures)


@pytest.mark.parametrize("end", [3, -1])
def test_an_iterable_that_resists_ends_with_its_iterator(end: int) -> None:
    with iterate_in_subprocess(functools.partial(Numbers, end), initializer=resist) as numbers:
        iterator = iter(numbers)
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        start = time.monotonic()
    assert time.monotonic() - start < 15


def of_loader() -> Any:
    return iter(
        sm.DataLoader(
            range(400), preprocessor=rows_of, num_processes=2, batch_size=3, aggregator=same
        )
    )


def of_pipeline() -> Any:
    """Make a pipeline with each kind of stage and joint in which items may wait."""
    builder = PipelineBuilder().add_source(range(400))
    builder.pipe(rows_of, executor=ProcessPoolExecutorConfig(), output_order="input")
    builder.pipe(lambda rows: iter([rows]), concurrency=2).disaggregate()
    builder.aggregate(2).disaggregate().pipe(same, concurrency=2).aggregate(3).add_sink(2)
    return iter(builder.build())


def of_subprocess() -> Any:
    return iter(iterate_in_subprocess(functools.partial(map, rows_of, range(400))))


@pytest.mark.parametrize("make", [of_loader, of_pipeline, of_subprocess])
@pytest.mark.parametrize("how", ["dropped", "raised"])
def test_memory_comes_back_without_a_garbage_collection(make: Any, how: str) -> None:
    before = segments()
    gc.disable()
    try:
        items = make()
        kept = next(items)[0]
        expected = kept.copy()
        for _ in range(20):
            next(items)
        assert segments() != before
        if how == "dropped":
            del items
        else:
            with pytest.raises(LookupError), contextlib.closing(items):
                raise LookupError
        # Items that the consumer keeps are unchanged.
        np.testing.assert_array_equal(kept, expected)
        del kept
        wait_until(lambda: segments() == before)
    finally:
        gc.enable()


SCRIPT = """
import sys
sys.path[:0] = {folders!r}
from spdl_media.pipeline import PipelineBuilder, ProcessPoolExecutorConfig, iterate_in_subprocess
from resisting import Numbers, resist, same

if __name__ == "__main__":
    if sys.argv[1] == "iterable":
        items = [iterate_in_subprocess(Numbers, initializer=resist) for _ in range(3)]
        found = [list(one) for one in items]
    else:
        pool = ProcessPoolExecutorConfig(max_workers=2, initializer=resist)
        pipeline = PipelineBuilder().add_source(range(3)).pipe(same, executor=pool).build()
        found = [sorted(pipeline)]
    print(found[0])
"""


@pytest.mark.long  # programs with processes of their own
@pytest.mark.parametrize("kind", ["iterable", "stage"])
def test_a_program_ends_whose_processes_resist(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folders = [str(Path(__file__).parent), *sys.path]
    script.write_text(SCRIPT.format(folders=folders))
    done = subprocess.run(
        [sys.executable, str(script), kind],
        # On a busy machine, asyncio's debug mode reports slow calls.
        env=os.environ | {"PYTHONASYNCIODEBUG": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2]\n", "")


def test_the_end_of_a_program_does_not_wait_again_for_a_call_that_stop_has_reported() -> None:
    program = """
import threading
from spdl_media.pipeline import PipelineBuilder

async def block_the_loop(_):
    begun.set()
    threading.Event().wait()

begun = threading.Event()
pipeline = PipelineBuilder().add_source([1]).pipe(block_the_loop).build()
pipeline.start()
begun.wait()
pipeline.stop(timeout=0.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONASYNCIODEBUG": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("cannot be interrupted: block_the_loop has run") == 1
