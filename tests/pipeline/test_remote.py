"""Iterables and whole pipelines in another process: epochs, errors, deaths, and cleanup."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from left_behind import descriptors, wait_until
from remote_items import (
    Batches,
    Draws,
    Faulty,
    Items,
    fail_to_start,
    one,
    pid_with,
    refuse_memory,
    same,
    square,
)

import spdl_media
from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineError,
    PipelineFailure,
    ProcessPoolExecutorConfig,
    WorkerDied,
    cache_iterator,
    iterate_in_subprocess,
    run_pipeline_in_subprocess,
)

ROOT = Path(spdl_media.__file__).parents[1]
TESTS = [str(folder) for folder in Path(__file__).parents[:2]]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_every_iteration_is_one_in_the_same_process() -> None:
    with iterate_in_subprocess(Batches) as batches:
        pids = set()
        for _ in range(2):
            found = []
            for batch in batches:
                np.testing.assert_array_equal(batch["rows"], batch["index"])
                np.testing.assert_array_equal(batch["made"][0], batch["index"] + 100)
                batch["rows"][0] = 99
                found.append(batch["index"])
                pids.add(batch["pid"])
            assert found == [0, 1, 2, 3, 4]
        (pid,) = pids
        assert pid != os.getpid()


def test_an_iteration_that_is_broken_off_leaves_nothing_to_the_next() -> None:
    with iterate_in_subprocess(functools.partial(Batches, 100), buffer_size=2) as batches:
        # More times than there are blocks.
        for _ in range(60):
            assert [batch["index"] for batch in itertools.islice(batches, 2)] == [0, 1]
        # One iteration that is dropped without being closed, and one that is replaced by another.
        first = iter(batches)
        assert next(first)["index"] == 0
        assert sum(batch["index"] for batch in batches) == 4950
        with pytest.raises(PipelineError, match="another iteration of it has begun"):
            next(first)


def test_what_is_kept_stays_right_after_the_process_is_gone() -> None:
    with iterate_in_subprocess(functools.partial(Batches, 90)) as batches:
        kept = list(batches)
    for index, batch in enumerate(kept):
        np.testing.assert_array_equal(batch["rows"], index)
    with pytest.raises(PipelineError, match="was closed"):
        iter(batches)


FORKS = """
import os, sys
import spdl_media as sm
from spdl_media.pipeline import iterate_in_subprocess

def same(item):
    return item

if __name__ == "__main__":
    loaders = sm.DataLoader(range(40), preprocessor=same, num_processes=2, output_order="input"), None
    items = iter(loaders[0] if sys.argv[1] == "loader" else iterate_in_subprocess(Numbers))
    found = [next(items)]
    if os.fork() == 0:
        try:
            print(list(loaders[0] if sys.argv[1] == "loader" else items)[-1], flush=True)
        except Exception as error:
            print(error, flush=True)
        del items, loaders
        os._exit(0)
    assert os.wait()[1] == 0
    print(found + list(items) == list(range(40)))
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython warns of forks beside threads")
@pytest.mark.parametrize("kind", ["loader", "iterable"])
def test_a_process_that_is_forked_meanwhile_ends_nothing(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "forks.py"
    numbers = "class Numbers:\n    def __iter__(self):\n        return iter(range(40))\n"
    program.write_text(FORKS.replace("\ndef same", f"\n{numbers}\ndef same"))
    command = [sys.executable, str(program), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *told, last = done.stdout.splitlines()
    assert last == "True", done.stderr
    # An epoch of the loader has processes of its own.
    (answer,) = told
    assert answer == "39" if kind == "loader" else "this one was forked from that" in answer


@pytest.mark.parametrize("package", ["numpy", pytest.param("torch", marks=pytest.mark.long)])
def test_random_numbers_follow_the_seeds_of_this_process(package: str) -> None:
    # Packages that the process imports to unpickle the dataset are seeded, too.
    loaded = pytest.importorskip(package).float32
    runs = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        if package == "torch":
            sys.modules["torch"].manual_seed(1)
        with iterate_in_subprocess(functools.partial(same, Draws(loaded))) as draws:
            runs.append([*draws, *draws])
    assert runs[0] == runs[1]
    with iterate_in_subprocess(functools.partial(same, Draws(loaded))) as draws:
        runs.append([*draws])
    # No number comes twice, neither in two epochs, nor in two processes.
    drawn = [number for numbers in (*runs[0], *runs[2]) for number in numbers]
    assert len(set(drawn)) == len(drawn) == (9 if package == "torch" else 6)


ERRORS: dict[str, tuple[type[BaseException], str, str]] = {
    "leave": (PipelineError, "GeneratorExit: left", "in __getitem__"),
    "raise": (LookupError, "no third item", "in __getitem__"),
    "memory": (MemoryError, "none left", "in __getitem__"),
    "unpicklable": (TypeError, "cannot pickle '_thread.lock' object", "in _answers"),
    "large": (ValueError, "take 1048576 bytes, but a block .* has 65536", "in _answers"),
}


def test_an_error_comes_with_its_traceback_and_the_process_continues() -> None:
    with iterate_in_subprocess(functools.partial(Faulty, *ERRORS), block_size=1 << 16) as items:
        for error, message, place in ERRORS.values():
            found: list[int] = []
            with pytest.raises(error, match=message) as caught:
                found.extend(items)
            assert found == [0, 1]
            assert place in str(caught.value.__cause__)
        assert list(items) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 3"), ("kill", "signal 9, Killed")])
def test_a_process_that_dies_is_reported_and_replaced(how: str, said: str) -> None:
    with iterate_in_subprocess(functools.partial(Items, how)) as items:
        for _ in range(2):
            iterator = iter(items)
            assert [next(iterator), next(iterator)] == [0, 1]
            with pytest.raises(WorkerDied, match=rf"process of Items ended \({said}\)"):
                next(iterator)


def test_a_process_that_is_killed_while_it_waits_is_reported() -> None:
    with iterate_in_subprocess(functools.partial(Batches, 100), buffer_size=1) as batches:
        iterator = iter(batches)
        batch = next(iterator)
        os.kill(batch["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="signal 9"):
            list(iterator)
        np.testing.assert_array_equal(batch["rows"], 0)


def test_a_process_that_takes_too_long_is_ended() -> None:
    with iterate_in_subprocess(functools.partial(Items, "hang"), timeout=3) as items:
        with pytest.raises(TimeoutError, match=r"gave no item for timeout=3\.0 s, and was ended"):
            list(items)
        assert list(itertools.islice(items, 2)) == [0, 1]


def test_a_process_that_hangs_ends_with_what_holds_it() -> None:
    items = iterate_in_subprocess(functools.partial(Items, "hang"))
    iterator = iter(items)
    assert [next(iterator), next(iterator)] == [0, 1]
    del items, iterator


def test_what_cannot_be_pickled_is_refused_here() -> None:
    with pytest.raises(PipelineError, match=r"no process can be started for lambda: .*lambdas"):
        iterate_in_subprocess(lambda: [1])
    config = PipelineBuilder().add_source([1]).pipe(lambda item: item, name="same").get_config()
    with pytest.raises(PipelineError, match="function of stage 'same' cannot be pickled"):
        run_pipeline_in_subprocess(config)


def test_wrong_arguments_are_refused_here() -> None:
    with pytest.raises(TypeError, match=r"fn must be.*not list.*a function that does"):
        iterate_in_subprocess([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer_size must be at least 1"):
        iterate_in_subprocess(one, buffer_size=0)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="initializer must be a function or another callable, not int"
    ):
        iterate_in_subprocess(Batches, initializer=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mp_context .*'spawn'"):
        iterate_in_subprocess(one, mp_context="spwan")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"must be a PipelineConfig, not PipelineBuilder.*get_config\(\)"
    ):
        run_pipeline_in_subprocess(PipelineBuilder())  # type: ignore[arg-type]
    config = PipelineBuilder().add_source([1]).get_config()
    with pytest.raises(TypeError, match="threads"):
        run_pipeline_in_subprocess(config, threads=3)  # type: ignore[call-arg]


def test_what_fails_before_the_first_item_is_reported_with_it() -> None:
    with (
        iterate_in_subprocess(one) as number,  # type: ignore[arg-type]
        pytest.raises(TypeError, match="fn must return an iterable, not int"),
    ):
        list(number)
    with (
        iterate_in_subprocess(Batches, initializer=fail_to_start) as batches,
        pytest.raises(LookupError, match="no licence"),
    ):
        list(batches)


def test_shared_memory_that_is_full_is_an_error() -> None:
    with (
        iterate_in_subprocess(Batches, initializer=refuse_memory) as batches,
        pytest.raises(
            MemoryError, match=r"more bytes of shared memory cannot be allocated .*No space left"
        ),
    ):
        list(batches)


def test_descriptors_that_are_used_up_are_an_error_and_none_is_lost() -> None:
    gc.collect()
    before = descriptors()
    numbers = {int(number) for number, _ in before}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = next(number for number in itertools.count() if number not in numbers) + 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(PipelineError, match=r"no process can be started .*Too many open files"):
            iterate_in_subprocess(Batches)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()
    assert descriptors() <= before


def test_a_pipeline_runs_there_each_iteration_one_epoch() -> None:
    builder = (
        PipelineBuilder().add_source(range(6)).pipe(square, output_order="input").pipe(pid_with)
    )
    with run_pipeline_in_subprocess(builder.get_config(), num_threads=2) as pipeline:
        for _ in range(2):
            found = list(pipeline)
            assert [number for number, _ in found] == [0, 1, 4, 9, 16, 25]
            assert {pid for _, pid in found}.isdisjoint({os.getpid()})


def test_a_continuous_source_continues_between_epochs() -> None:
    builder = PipelineBuilder().add_source(range(4), continuous=True).aggregate(3)
    with run_pipeline_in_subprocess(builder.get_config()) as pipeline:
        for _ in range(3):
            assert list(pipeline) == [[0, 1, 2], [3]]


def test_a_stage_there_may_have_processes_of_its_own() -> None:
    pool = ProcessPoolExecutorConfig(max_workers=1)
    config = (
        PipelineBuilder()
        .add_source(range(3))
        .pipe(pid_with, executor=pool)
        .pipe(pid_with)
        .get_config()
    )
    with run_pipeline_in_subprocess(config) as pipeline:
        found = list(pipeline)
    assert sorted(item for (item, _), _ in found) == [0, 1, 2]
    assert len({pid for (_, inner), outer in found for pid in (inner, outer)} | {os.getpid()}) == 3


def test_a_pipeline_that_fails_there_names_the_stage_here() -> None:
    config = PipelineBuilder().add_source([1, -1, 2]).pipe(square, name="roots").get_config()
    with run_pipeline_in_subprocess(config, max_failures=0) as pipeline:
        for _ in range(2):
            with pytest.raises(PipelineFailure, match="'roots' failed too often") as caught:
                list(pipeline)
            assert caught.value.stage == "roots"
            assert isinstance(caught.value.exceptions[0], ValueError)
            assert "in square" in "".join(caught.value.__notes__)


SCRIPT = """
import os, sys
import spdl_media.pipeline as p
sys.path[:0] = {tests!r}
from remote_items import Batches
if __name__ == "__main__":
    batches = p.iterate_in_subprocess({fn})
    iterator = iter(batches)
    print(next(iterator)["pid"], flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("pass", 0),
        pytest.param("os.kill(os.getpid(), 9)", -9),
        pytest.param("sys.exit(4)", 4, marks=pytest.mark.long),
        pytest.param("os._exit(5)", 5, marks=pytest.mark.long),
    ],
)
def test_the_process_ends_with_this_one(end: str, code: int, tmp_path: Path) -> None:
    text = SCRIPT.format(tests=TESTS, fn="Batches", end=end)
    (tmp_path / "main.py").write_text(text)
    command = [sys.executable, str(tmp_path / "main.py")]
    found = subprocess.run(
        command,
        # On a busy machine, asyncio's debug mode reports slow calls.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONASYNCIODEBUG": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stderr
    assert found.stderr == ""
    pid = int(found.stdout)
    # If the system has reused the pid, the new process is younger.
    wait_until(
        lambda: "Batches" not in _command_line(pid) and "spawn_main" not in _command_line(pid)
    )


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_script_without_a_guard_is_told_how_to_write_it(tmp_path: Path) -> None:
    text = SCRIPT.format(tests=TESTS, fn="Batches", end="pass")
    (tmp_path / "main.py").write_text(text.replace('if __name__ == "__main__":', "if True:"))
    found = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert re.search(
        "keeps its own work below if __name__ .* and their functions above", found.stderr
    )
    assert "memory, descriptors" not in found.stderr
    assert "bootstrapping" not in found.stderr


@pytest.mark.parametrize("name", ["iterate_in_subinterpreter", "run_pipeline_in_subinterpreter"])
def test_sub_interpreters_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(
        ImportError, match=f"there is no {name}: NumPy, PyAV .* Use .*_in_subprocess"
    ):
        getattr(spdl_media.pipeline, name)


class Loader:
    """A loader that counts the items that were taken from it."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(6):
            self.asked.append(number)
            yield number


def test_cached_items_come_again_when_the_loader_is_not_asked_any_more() -> None:
    loader = Loader()
    assert list(cache_iterator(loader, 2, return_caches_after=4, stop_after=9)) == [
        0,
        1,
        2,
        3,
        0,
        1,
        0,
        1,
        0,
    ]
    assert loader.asked == [0, 1, 2, 3]
    assert list(itertools.islice(cache_iterator(Loader(), 3), 7)) == [0, 1, 2, 0, 1, 2, 0]
    assert list(cache_iterator(Loader(), 2, stop_after=1)) == [0]
    # A loader that ends earlier ends the iteration.
    assert list(cache_iterator(Loader(), 7)) == [0, 1, 2, 3, 4, 5]
    assert list(cache_iterator([], 1)) == []


def test_a_loader_that_is_not_needed_any_more_is_released() -> None:
    ended: list[str] = []

    def generate() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            ended.append("loader")

    items = cache_iterator(generate(), 2)
    assert [next(items), next(items)] == [0, 1]
    assert next(items) == 0
    assert ended == ["loader"]
    source = generate()
    items = cache_iterator(source, 1, delete_src=False)
    assert [next(items), next(items)] == [0, 0]
    del source
    assert ended == ["loader"]


def test_wrong_numbers_of_caches_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="num_caches must be at least 1"):
        cache_iterator([1], 0)
    assert list(cache_iterator([1, 2, 3], 3, return_caches_after=2, stop_after=5)) == [
        1,
        2,
        1,
        2,
        1,
    ]
    with pytest.raises(TypeError, match="not iterable"):
        cache_iterator(1, 3)  # type: ignore[arg-type]
