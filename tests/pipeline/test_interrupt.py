"""Ctrl-C at any moment: programs end at once, with one traceback and the exit status of a KeyboardInterrupt.

Each trial sends SIGINT to a process and its children, as a terminal does. ``--long`` makes 60 trials;
``python tests/pipeline/test_interrupt.py 300 [SEED]`` makes any number and counts the failures.
"""

from __future__ import annotations

import _thread
import asyncio
import collections
import contextlib
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import pytest

import spdl_media
from spdl_media.dataloader import DataLoader
from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineStopped,
    ProcessPoolExecutorConfig,
    iterate_in_subprocess,
)
from spdl_media.pipeline.children import _children
from spdl_media.pipeline.engine import run as engine_run

PROGRAM = """
import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from spdl_media.dataloader import DataLoader
from spdl_media.pipeline import PipelineBuilder, ProcessPoolExecutorConfig


def work(item):
    time.sleep(0.001)
    if item % 7 == 3:
        raise ValueError(item)
    return item


async def work_async(item):
    await asyncio.sleep(0.001)
    return item


def generate(item):
    yield work(2 * item)
    yield item


async def generate_async(item):
    yield item
    yield await work_async(item)


def consume(pipeline):
    for number, _ in enumerate(pipeline):
        if number == 30:
            break


async def consume_async(pipeline):
    async for _ in pipeline:
        pass


def run(kind):
    builder = PipelineBuilder().add_source(range(50))
    if kind == "threads":
        consume(builder.pipe(work, concurrency=4).aggregate(2).build())
    elif kind == "order":
        builder.pipe(work, concurrency=4, output_order="input").pipe(work_async, concurrency=2)
        consume(builder.build(on_failure=lambda record, item: None))
    elif kind == "async":
        consume(builder.pipe(work_async, concurrency=4).pipe(generate_async).build())
    elif kind == "generators":
        consume(builder.pipe(generate, concurrency=3).path_variants(lambda i: i % 2, [work, work]).build())
    elif kind == "epochs":
        with builder.pipe(work, concurrency=4, timeout=5).build().auto_stop() as pipeline:
            for _ in range(3):
                consume(pipeline)
    elif kind == "executor":
        with ThreadPoolExecutor(4) as executor:
            consume(builder.pipe(work, concurrency=4, executor=executor).build())
    elif "server" in kind or "spawn" in kind:
        config = ProcessPoolExecutorConfig(mp_context=kind)
        consume(builder.pipe(work, concurrency=2, executor=config).build())
    elif kind == "loader":
        consume(DataLoader(range(100), preprocessor=work, batch_size=3, num_threads=4))
    else:
        asyncio.run(consume_async(builder.pipe(work, concurrency=4).build()))


def main(kind):
    while True:
        run(kind)


print("imported", flush=True)
if __name__ == "__main__":
    main(sys.argv[1])
"""
KINDS = (
    *("threads", "async", "executor", "spawn", "loader"),
    *("order", "generators", "epochs", "forkserver", "async consumer"),
)
# An uncaught KeyboardInterrupt ends the process by the signal, as shells expect.
STATUS = -signal.SIGINT
# On a busy machine; otherwise all end within a second, or three with processes, which first import modules.
MOST_SECONDS = 40.0
# Before its task begins, asyncio.run() may forget that a Ctrl-C cancelled it.
_CPYTHONS_OWN = (
    r"BaseEventLoop\.(__del__|shutdown_)|'consume_async' was never awaited"
    r"|async def consume_async\(pipeline\):\n(\s+\^+\n)?asyncio\.exceptions\.CancelledError"
)
# CPython calls this when an object is dropped that one of its own weak sets refers to, such as a Thread. It
# prints a KeyboardInterrupt there, and goes on.
_CPYTHONS_LOSS = r"WeakSet\.__init__\.<locals>\._remove"


def trial(kind: str, delay: float, folder: Path) -> tuple[str, float]:
    """Interrupt a program; return what was wrong, if anything, and how long it took to end."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    package = str(Path(spdl_media.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, script, kind],
        env=os.environ | {"PYTHONPATH": package, "PYTHONASYNCIODEBUG": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        time.sleep(delay)
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        found = "" if re.search(_CPYTHONS_LOSS, errors) else f"did not end:\n{errors}"
        return found, MOST_SECONDS
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    seconds = time.monotonic() - start
    # asyncio.run() cancels its task, and raises the interrupt while it handles the CancelledError.
    most_tracebacks = 2 if "asyncio.exceptions.CancelledError" in errors else 1
    if "asyncio.run" in errors and re.search(_CPYTHONS_OWN, errors):
        # CPython's own messages, when Ctrl-C arrives while asyncio.run() makes or closes its event loop.
        return "", seconds
    problems = {
        f"exit status {process.returncode}": process.returncode != STATUS,
        "no KeyboardInterrupt": not re.search("^KeyboardInterrupt$", errors, re.MULTILINE),
    }
    # Child processes print tracebacks of their own if multiprocessing is interrupted while it starts them.
    if kind not in ("forkserver", "spawn"):
        problems |= {
            "other tracebacks": errors.count("Traceback") > most_tracebacks,
            "more on stderr": any(one in errors for one in ("ignored", "Exception in", "Warning")),
        }
    found = ", ".join(text for text, is_so in problems.items() if is_so)
    return f"{found}:\n{errors}" if found else "", seconds


def trials(count: int, seed: int, folder: Path) -> list[str]:
    """Make trials at random moments, half of them near the start; return what was wrong."""
    rng = random.Random(seed)  # noqa: S311  # no secret
    wrong = []
    slowest = 0.0
    kinds: collections.Counter[str] = collections.Counter()
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        delay = rng.uniform(0, rng.choice([0.05, 0.6]))
        found, seconds = trial(kind, delay, folder)
        kinds[kind] += 1
        slowest = max(slowest, seconds)
        if found:
            wrong.append(f"{kind} after {delay:.4f} s: {found}")
    print(
        f"{count} interrupts, {len(wrong)} wrong, the slowest end took {slowest:.2f} s; {dict(kinds)}"
    )
    return wrong


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to groups of processes")
def test_programs_end_at_once(tmp_path: Path) -> None:
    import effort  # not found where this file is run as a program

    count = 60 if effort.LONG else 5
    assert trials(count, count, tmp_path) == []


def test_one_while_the_event_loop_is_made_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-made loop raises an error when it is collected, so the loop has to be made first."""
    loops: list[asyncio.AbstractEventLoop] = []
    make = asyncio.new_event_loop

    def interrupted() -> asyncio.AbstractEventLoop:
        _thread.interrupt_main()
        loops.append(make())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PipelineBuilder().add_source(range(3)).build().start()
    assert [loop.is_closed() for loop in loops] == [True]


@pytest.mark.usefixtures("no_collection")
def test_one_at_any_moment_of_a_start_closes_the_event_loop_and_the_next_start_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    make = asyncio.new_event_loop
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loops.append(make()) or loops[-1])
    # As below.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    for moment in itertools.count(1):
        pipeline = PipelineBuilder().add_source(range(3)).build()
        with contextlib.suppress(KeyboardInterrupt), Interrupt(moment, is_ours=True) as interrupt:
            pipeline.start()
        pipeline.stop()
        assert list(pipeline) == [0, 1, 2], interrupt.place
        assert all(loop.is_closed() for loop in loops), interrupt.place
        if not interrupt.place:
            return


def test_exit_stops_all_runs_and_forgets_those_that_have_ended() -> None:
    pipeline = PipelineBuilder().add_source(range(10**6)).build()
    pipeline.start()
    assert pipeline._run in engine_run.LIVE
    engine_run._stop_all()
    assert pipeline._run not in engine_run.LIVE
    with pytest.raises(PipelineStopped):
        pipeline.get_item()


def test_one_while_a_thread_is_being_started_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt arrives after the thread was asked for, and before it is known to have started."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def interrupted(self: threading.Thread) -> None:
        if self.name.startswith("spdl_media pipeline"):
            _thread.interrupt_main()
            started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    pipeline = PipelineBuilder().add_source(range(3)).pipe(abs).build()
    with pytest.raises(KeyboardInterrupt):
        list(pipeline)
    monkeypatch.undo()
    assert [thread.is_alive() for thread in started] == [False]
    assert list(pipeline) == [0, 1, 2]


at_fork: list[Callable[[], object]] = []
os.register_at_fork(after_in_parent=lambda: [call() for call in at_fork])


def test_one_while_a_process_is_forked_is_heard() -> None:
    """CPython only prints exceptions in its handlers of forks."""

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    def in_thread() -> None:
        # The main thread blocks the signal, so another thread gets it.
        at_fork.clear()
        thread = threading.Thread(target=interrupt)
        thread.start()
        thread.join()

    pool = ProcessPoolExecutorConfig(1, mp_context="fork")
    pipeline = PipelineBuilder().add_source([1]).pipe(abs, executor=pool).build()
    at_fork.append(in_thread)
    with pytest.raises(KeyboardInterrupt):
        list(pipeline)
    assert list(pipeline) == [1]


class Interrupt:
    """Sends SIGINT at the n-th moment in which CPython looks for signals.

    ``place`` is the function that was interrupted, or empty if there were not so many moments. With
    ``is_ours``, only moments in this package count: an interrupted Thread.start() may keep its locks.
    """

    def __init__(self, moment: int, *, is_ours: bool = False) -> None:
        gc.collect()
        self.place = ""
        self._left = moment
        self._folder = str(Path(spdl_media.__file__).parent) if is_ours else ""

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: types.FrameType, event: str, argument: object) -> None:
        # The start of a function, and the return of one in C.
        if event not in ("call", "c_return"):
            return
        # When a generator is closed, a profiler sees a call, but CPython does not look for signals.
        if event == "call" and frame.f_code.co_name in ("get_iterator", "_finalizer"):
            return
        if not frame.f_code.co_filename.startswith(self._folder):
            return
        self._left -= 1
        if not self._left:
            sys.setprofile(None)
            self.place = f"{event} {frame.f_code.co_name}"
            _thread.interrupt_main()


def _leave(items: Iterable[int], moment: int) -> tuple[str, bool]:
    """Leave a loop, and interrupt it meanwhile; return where, and whether this was heard."""
    interrupt = Interrupt(moment)

    def leave() -> None:
        for item in items:
            if item == 3:
                sys.setprofile(interrupt._look)
                break

    try:
        leave()
        sys.setprofile(None)
        end = time.monotonic() + 20
        while interrupt.place not in ("", *_LOST) and time.monotonic() < end:
            time.sleep(0.001)  # the jump of an empty loop is outside of the try on CPython 3.13.0
    except KeyboardInterrupt:
        return interrupt.place, True
    finally:
        sys.setprofile(None)
    return interrupt.place, False


# CPython's weak sets, when one of its own objects is dropped, such as a Thread.
_LOST = ("call _remove", "c_return _remove")


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "make", [lambda: PipelineBuilder().add_source(range(9)).build(), lambda: DataLoader(range(9))]
)
def test_one_at_any_moment_while_a_loop_is_left_is_heard(
    make: Callable[[], Iterable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's hook would keep what is lost, and with it the run.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    places: dict[bool, list[str]] = {True: [], False: []}
    for moment in itertools.count(1):
        place, is_heard = _leave(make(), moment)
        if not place:
            break
        places[is_heard].append(place)
    assert set(places[False]) <= set(_LOST)
    assert len(places[True]) > 20
    # Runs whose stop() was interrupted end, too, at the latest when their pipelines are collected.
    gc.collect()
    while engine_run.LIVE:
        time.sleep(0.01)


@pytest.mark.usefixtures("no_collection")
def test_a_consumer_that_was_interrupted_at_any_moment_gets_the_items_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # asyncio's debug mode drops generators, in which an interrupt is lost.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    for moment in itertools.count(1):
        pipeline = PipelineBuilder().add_source(range(6)).build()
        with pipeline.auto_stop():
            # Until the buffer is full, so that taking an item makes the source go on.
            assert pipeline._run is not None
            while not pipeline._run.graph.sink._stalled:
                time.sleep(0.001)
            with contextlib.suppress(KeyboardInterrupt), Interrupt(moment) as interrupt:
                pipeline.get_item()
            # The interrupted call may have taken an item.
            assert list(pipeline.get_iterator(timeout=20))[-4:] == [2, 3, 4, 5]
        if not interrupt.place:
            return


@pytest.mark.usefixtures("no_collection")
def test_a_consumer_that_was_interrupted_at_any_moment_gets_the_end_of_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As above.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    for moment in itertools.count(1):
        pipeline = PipelineBuilder().add_source([]).build()
        with pipeline.auto_stop():
            assert pipeline._run is not None
            while pipeline._run.graph.sink.is_awaited():
                time.sleep(0.001)
            with contextlib.suppress(KeyboardInterrupt), Interrupt(moment) as interrupt:
                # The second one begins another epoch.
                for _ in range(2):
                    list(pipeline)
            # Those who wait are woken one by one.
            assert not pipeline._run.graph.sink._waiters, interrupt.place
            assert list(pipeline.get_iterator(timeout=20)) == [], interrupt.place
        if not interrupt.place:
            return


@pytest.mark.usefixtures("no_collection")
def test_one_at_any_moment_while_an_event_loop_waits_for_an_item_is_heard_alone() -> None:
    """asyncio.run() cancels the task that waits, perhaps just when it is woken."""
    import effort  # not found where this file is run as a program

    messages: list[str] = []

    async def consume(moment: int) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: messages.append(context["message"]))
        with Interrupt(moment, is_ours=True) as interrupt:
            places.append(interrupt)
            async for _ in PipelineBuilder().add_source(range(9)).build():
                pass

    places: list[Interrupt] = []
    for moment in itertools.count(1, 1 if effort.LONG else 2):
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(consume(moment))
        assert not messages, places[-1].place
        if not places[-1].place:
            return


class Trip:
    """Sends SIGINT when it is dropped, without a look for signals."""

    __del__ = _thread.interrupt_main


def started() -> Any:
    pipeline = PipelineBuilder().add_source(range(100)).build()
    pipeline.start()
    return pipeline


def begun() -> Any:
    async def begin() -> Any:
        items = aiter(PipelineBuilder().add_source(range(100)).build())
        await anext(items)
        return items

    return asyncio.run(begin())


def left(iterable: Any) -> Any:
    items = iter(iterable)
    next(items)
    return items


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "make",
    [
        started,
        begun,
        lambda: left(DataLoader(range(100))),
        lambda: iterate_in_subprocess(lambda: range(9), mp_context="fork"),
        lambda: left(iterate_in_subprocess(lambda: range(9), mp_context="fork")),
    ],
    ids=["pipeline", "async", "loader", "process", "iteration in process"],
)
def test_one_before_what_was_dropped_is_finalized_is_heard(make: Callable[[], Any]) -> None:
    # A list drops its items from the last to the first.
    dropped = [make(), Trip()]
    # Hypothesis times collections by a callback, and Python only prints what is raised there.
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it arrives a moment later
            del dropped
            gc.collect()
            for _ in range(500):
                time.sleep(0.01)
    finally:
        gc.callbacks.extend(callbacks)
    while engine_run.LIVE or _children:
        time.sleep(0.01)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        print("\n".join(trials(int(sys.argv[1]), seed, Path(name))))
