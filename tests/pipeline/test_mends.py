"""What once hung, leaked, or was lost under pressure; each test is named after its mend."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from spdl_media.pipeline import PipelineBuilder, PipelineFailure, TaskHook

WAIT = 20


def test_c1_an_exception_that_cannot_be_written_to_fails_its_item() -> None:
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        code: int

    class NotesError(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError("no notes")

    def fail(item: int) -> int:
        if item < 2:
            raise (FrozenError(item), NotesError(item))[item]
        return item

    pipeline = PipelineBuilder().add_source(range(6)).pipe(fail).build()
    assert list(pipeline.get_iterator(timeout=WAIT)) == [2, 3, 4, 5]
    assert [type(record.exception) for record in pipeline.failures] == [FrozenError, NotesError]


def test_c3_an_interrupt_while_a_run_starts_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when the thread of the loop runs already."""
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name.startswith("spdl_media pipeline"):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    pipeline = PipelineBuilder().add_source(range(3)).pipe(abs).build()
    with pytest.raises(KeyboardInterrupt):
        list(pipeline)
    monkeypatch.undo()
    assert list(pipeline) == [0, 1, 2]


def test_c5_threads_of_calls_that_took_too_long_are_not_kept() -> None:
    builder = PipelineBuilder().add_source(range(10))
    pipeline = builder.pipe(lambda _: time.sleep(0.05), timeout=0.01).build(max_failures=99)
    with pipeline.auto_stop():
        assert list(pipeline) == []
        run: Any = pipeline._run
        deadline = time.monotonic() + WAIT
        while (
            len(run.graph.all_threads()) > 3
        ):  # one of the stage, of the source, and one in a call
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("kind", ["function", "async", "generator"])
def test_c6_no_more_waits_than_the_buffer_and_the_calls_hold(kind: str) -> None:
    made = 0

    def make(item: int) -> int:
        nonlocal made
        time.sleep(0.001)
        made += 1
        return item

    async def make_async(item: int) -> int:
        await asyncio.sleep(0)
        return make(item)

    def generate(item: int) -> Iterator[int]:
        yield make(item)

    fn: Any = {"function": make, "async": make_async, "generator": generate}[kind]
    builder = PipelineBuilder().add_source(range(200)).pipe(fn, concurrency=2)
    with builder.add_sink(1).build().auto_stop() as pipeline:
        for number in range(1, 21):
            pipeline.get_item(timeout=WAIT)
            time.sleep(0.01)
            # The buffer, the calls, and one item that waits for a thread.
            assert made - number <= 1 + 2 + 1


@pytest.mark.parametrize("repetition", range(3))
def test_c7_what_was_made_before_a_failure_is_delivered(repetition: int) -> None:
    bad = 60 + repetition

    def fail(item: int) -> int:
        if item == bad:
            raise ValueError(item)
        return item

    pipeline = PipelineBuilder().add_source(range(200)).pipe(fail).build(max_failures=0)
    seen: list[int] = []
    with pytest.raises(PipelineFailure):
        seen.extend(time.sleep(0.001) or item for item in pipeline)
    assert seen == list(range(bad))


def test_c8_the_end_of_an_epoch_ends_no_other() -> None:
    """Three threads take whole epochs, one after the other, and none is cut short or lost."""
    pipeline = PipelineBuilder().add_source(range(5)).build()
    taken: list[int] = []

    def consume() -> None:
        for _ in range(50):
            taken.extend(pipeline.get_iterator(timeout=WAIT))

    with pipeline.auto_stop():
        threads = [threading.Thread(target=consume) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        taken.extend(pipeline)
    numbers = {taken.count(number) for number in range(5)}
    assert len(numbers) == 1


def test_c11_a_stage_that_cancels_its_own_task_loses_nothing() -> None:
    async def cancel(item: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return item

    pipeline = PipelineBuilder().add_source(range(4)).pipe(cancel).build()
    assert list(pipeline.get_iterator(timeout=WAIT)) == [0, 1, 2, 3]


def test_c12_statistics_of_a_generator_that_waits_for_its_consumer() -> None:
    def generate(_: int) -> Iterator[int]:
        yield from range(5)

    pipeline = PipelineBuilder().add_source([0]).pipe(generate).add_sink(1).build()
    with pipeline.auto_stop():
        for _ in pipeline:
            time.sleep(0.05)
        (stage,) = pipeline.statistics().stages
        assert stage.queue.average < 0.1
        assert stage.calls.occupancy <= 1


def test_c13_an_open_file_that_a_source_gives_stays_open() -> None:
    file = io.StringIO("a\nb\n")

    class Lines:
        def __iter__(self) -> Iterator[str]:
            file.seek(0)
            return file

    pipeline = PipelineBuilder().add_source(Lines()).build()
    with pipeline.auto_stop():
        for _ in range(2):
            assert list(pipeline) == ["a\n", "b\n"]


def test_c14_a_time_out_has_no_other_error_behind_it() -> None:
    gate = threading.Event()
    pipeline = PipelineBuilder().add_source([1]).pipe(lambda _: gate.wait(WAIT)).build()
    with pipeline.auto_stop():
        with pytest.raises(TimeoutError) as caught:
            pipeline.get_item(timeout=0.01)
        gate.set()
    assert caught.value.__context__ is None


def test_c15_threads_start_when_they_are_needed() -> None:
    pipeline = PipelineBuilder().add_source([1, 2]).pipe(abs, concurrency=64).build(num_threads=64)
    with pipeline.auto_stop():
        assert sorted(pipeline) == [1, 2]
        run: Any = pipeline._run
        assert len(run.graph.all_threads()) <= 3


def test_c16_a_hook_in_the_style_of_spdl_is_refused() -> None:
    class Hook(TaskHook):
        def task_hook(self) -> None: ...

        def stage_hook(self) -> None: ...

    pipeline = PipelineBuilder().add_source([1]).pipe(abs).build(task_hook_factory=lambda _: Hook())
    with pytest.raises(TypeError, match="has task_hook and stage_hook, which nothing calls"):
        list(pipeline)
