"""The public class of a running pipeline: callers start, iterate and stop it from threads and tasks."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from spdl_media._checks import with_argument_hints
from spdl_media._optional import require
from spdl_media._threads import when_dropped
from spdl_media.pipeline.engine.ends import END_OF_EPOCH
from spdl_media.pipeline.engine.graph import RunOptions
from spdl_media.pipeline.engine.hub import wake
from spdl_media.pipeline.engine.run import Run
from spdl_media.pipeline.executors import TaskHook, kind_of
from spdl_media.pipeline.failures import (
    FailureLimit,
    FailureRecord,
    MissingPackageError,
    PipelineError,
    PipelineFailure,
    PipelineStopped,
)
from spdl_media.pipeline.stages import (
    AggregateConfig,
    MergeConfig,
    PipeConfig,
    PipelineConfig,
    source_length,
    with_unique_names,
)
from spdl_media.pipeline.stats import PipelineStatistics

T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

# stop() promises to return within a second; the difference leaves time for busy machines.
STOP_SECONDS = 0.8


class PipelineOptions(TypedDict, total=False):
    """The options of :class:`Pipeline`, documented there."""

    num_threads: int
    max_failures: FailureLimit | None  # a number or a rate
    on_failure: Callable[[FailureRecord, Any], object] | None
    report_stats_interval: float | None
    task_hook_factory: Callable[[str], TaskHook | None] | None
    progress: bool | str


def shows_run_options(function: F) -> F:
    """Make ``inspect.signature`` and ``help`` list the options of a run instead of ``**options``."""
    own = inspect.signature(function)
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(RunOptions).parameters.values()
    ]
    named = [parameter for name, parameter in own.parameters.items() if name != "options"]
    vars(function)["__signature__"] = own.replace(parameters=[*named, *options])
    return function


@with_argument_hints({"num_workers": "Use num_threads="})
class Pipeline(Generic[T_co]):
    """A pipeline that can be run any number of times. :meth:`PipelineBuilder.build` makes one.

    Iterate over it: the iteration starts the pipeline, and stops it at the end, on ``break`` and when the
    consumer raises. Each such iteration begins with the first item of the source.

    Within :meth:`auto_stop`, or between :meth:`start` and :meth:`stop`, the pipeline keeps running between
    iterations. An iteration after a ``break`` continues the same epoch. An iteration after the end of an
    epoch begins the next epoch, which iterates over the source again. The pipeline makes items ahead of the
    consumer until its buffers are full.

    Args:
        config: Definition of the pipeline.
        num_threads: Maximum number of synchronous calls at once (default 8), over all stages without an
            executor of their own.
        max_failures: Number (``int``) or rate (``float`` or ``Fraction``) of items that may fail before the
            run ends with :class:`PipelineFailure`. A number applies to all stages together that set no limit
            of their own, a rate to each of them. The default is 0.5: at most half of the calls of a stage may
            fail. A rate applies to one epoch. It is checked after 100 calls of a stage (10 if all failed) and
            at the end of the epoch. -1 or ``math.inf`` allows any number.
        on_failure: Called with the record and the input of each item that fails. All calls are made by one
            separate thread, one after the other. An exception that it raises ends the run.
        report_stats_interval: Seconds between two reports of the statistics to the logger
            ``spdl_media.pipeline`` at level INFO. ``None`` or -1 disables them.
        task_hook_factory: Called with the name of each stage when a run starts; returns the stage's hook or
            ``None``.
        progress: Whether to show a progress bar, which needs tqdm. A string is the label of the bar.

    Raises:
        TypeError: An option is unknown, or has the wrong type.
        ValueError: An option is out of range.
        MissingPackageError: ``progress`` is set and tqdm is not installed.

    Thread safety: safe. Several threads or tasks may take items; each item goes to one of them.
    """

    @shows_run_options
    def __init__(self, config: PipelineConfig, **options: Unpack[PipelineOptions]) -> None:
        self._options = RunOptions(**options)
        if self._options.progress is not False:
            # Import tqdm now, to report a missing package before anything runs.
            _bar_class()
        # get_config() has done this already, but a definition may be made without a builder.
        self._config = with_unique_names(config)
        self._run: Run | None = None
        # Held while a run is started, which may take long. stop() does not take it.
        self._starting = threading.RLock()

    @property
    def config(self) -> PipelineConfig:
        """The definition of the pipeline."""
        return self._config

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The last 1,000 failures of the current or the last run, the oldest first."""
        # Read self._run once, here and below: a failed start in another thread sets it to None.
        run = self._run
        return () if run is None else tuple(run.log.records.copy())

    @property
    def failure_counts(self) -> dict[str, int]:
        """Number of items that failed in the current or the last run, by name of the stage."""
        run = self._run
        return {} if run is None else run.log.counts()

    def statistics(self) -> PipelineStatistics:
        """Return the statistics of the current run so far, or of the last run.

        Raises:
            PipelineError: The pipeline has not been started, or is still starting.
        """
        run = self._run
        if run is None or not run.has_begun:
            raise PipelineError("a pipeline has no statistics before it is started")
        return run.statistics()

    def to_mermaid(self) -> str:
        """Draw the pipeline as a Mermaid flowchart, which Markdown viewers render.

        Raises:
            Exception: The source's ``__len__`` raised an error other than ``TypeError`` or
                ``NotImplementedError``, which mean that it has no length.
        """
        return self._config.to_mermaid()

    def __str__(self) -> str:
        return str(self._config)

    def __repr__(self) -> str:
        config = self._config
        return f"<Pipeline: {' -> '.join(stage.name for stage in (config.src, *config.pipes))}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise PipelineError(
            "a Pipeline cannot be pickled or copied, because it has threads; pickle its definition, "
            "pipeline.config, and run that by Pipeline(config)"
        )

    def start(self) -> None:
        """Start the pipeline, which begins to make items. Blocks only while process pools start.

        Raises:
            PipelineError: The pipeline is already running.
            PipelineStopped: Another thread stopped the pipeline while it was starting.
        """
        with self._starting:
            if self._run is not None and not self._run.was_stopped:
                raise PipelineError("the pipeline is running; stop it before starting it again")
            try:
                # Stored before it has started, so that stop() in another thread finds it.
                run = self._run = Run(self._config, self._options)
                self._end = when_dropped(run.request_stop)
                run.start()
            except BaseException:
                self._run = None
                raise

    def stop(self, *, timeout: float | None = None) -> None:
        """Stop the pipeline and drop the items that were not taken. May be called at any time.

        Returns when all threads and tasks have ended, after about a second at most. A thread that is still in
        a call of a stage or of the source is named in the log; it ends when that call returns.

        Args:
            timeout: Maximum seconds to wait, instead of about one.
        """
        if (run := self._run) is not None:
            run.stop(STOP_SECONDS if timeout is None else timeout)

    @contextmanager
    def auto_stop(self, *, timeout: float | None = None) -> Iterator[Pipeline[T_co]]:
        """Return a context manager that starts the pipeline on entry and stops it on exit.

        Args:
            timeout: Maximum seconds to wait in :meth:`stop`, instead of about one.

        Raises:
            PipelineError: The pipeline is already running.
        """
        self.start()
        try:
            yield self
        finally:
            self.stop(timeout=timeout)

    def get_item(self, *, timeout: float | None = None) -> T_co:
        """Take the next item.

        Args:
            timeout: Maximum seconds to wait.

        Raises:
            TimeoutError: There was no item within ``timeout`` seconds.
            PipelineStopped: The epoch has ended, or the pipeline was stopped. It is an ``EOFError``. With a
                continuous source, the call after the end of an epoch returns the next epoch's first item.
            PipelineFailure: Too many items failed, or the source failed.
            PipelineError: The pipeline was not started.
        """
        run = self._running()
        try:
            item: Any = run.graph.sink.take(timeout)
        except PipelineFailure as failure:
            # Without the engine's frames, the traceback shows the user's lines only.
            raise failure.with_traceback(None) from None
        if item is END_OF_EPOCH:
            raise PipelineStopped(
                "the epoch has ended and there are no more items; iterate the pipeline for the next epoch"
            )
        return item  # type: ignore[no-any-return]

    def get_iterator(self, *, timeout: float | None = None) -> Iterator[T_co]:
        """Iterate over one epoch, or over the rest of the current one.

        Args:
            timeout: Maximum seconds to wait for each item.

        Raises:
            TimeoutError: There was no item within ``timeout`` seconds.
            PipelineStopped: Another thread stopped the pipeline.
            PipelineFailure: Too many items failed, or the source failed. The items that were made before the
                failure are yielded first.
        """
        run, is_own = self._begin()
        bar = self._make_bar()
        # Looked up once, because take() is called for each item.
        take = run.graph.sink.take
        has_end = is_own or bar is not None
        end = when_dropped(_end_iteration, run if is_own else None, bar) if has_end else None
        try:
            while (item := take(timeout)) is not END_OF_EPOCH:
                if bar is not None:
                    bar.update()
                yield item
        except PipelineFailure as failure:
            raise failure.with_traceback(None) from None
        finally:
            # Nothing may follow: when a loop is left, Python loses a Ctrl-C that arrives here.
            del end

    def __iter__(self) -> Iterator[T_co]:
        return self.get_iterator()

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Iterate over one epoch from a task of any asyncio loop, without blocking the loop."""
        return _AsyncEpoch(self)

    def _begin(self) -> tuple[Run, bool]:
        """Return the run to iterate, started if necessary, and whether this iteration has to stop it."""
        with self._starting:
            run = self._run
            if run is None or run.was_stopped:
                self.start()
                return self._running(), True
            # Otherwise the last iteration was left early, and this one continues its epoch.
            if run.graph.sink.has_ended():
                run.request_epoch()
            return run, False

    def _running(self) -> Run:
        with self._starting:
            if self._run is None:
                raise PipelineError(
                    "the pipeline was not started; call start(), or iterate over it"
                )
            return self._run

    def _make_bar(self) -> Any:
        progress = self._options.progress
        if progress is False:
            return None
        label = progress if isinstance(progress, str) else None
        total = _number_of_outputs(self._config)
        # miniters=1: without its monitor thread, tqdm has to check the clock at each item.
        return _bar_class()(desc=label, total=total, unit="item", miniters=1)


class _AsyncEpoch(AsyncIterator[T_co]):
    """Asynchronous iterator over one epoch, or over the rest of it. The first ``__anext__`` begins the epoch.

    It is not an asynchronous generator: the event loop closes an abandoned generator only later, but this
    iterator stops its run as soon as it is dropped.
    """

    def __init__(self, pipeline: Pipeline[T_co]) -> None:
        self._pipeline: Pipeline[T_co] | None = pipeline
        self._run: Run | None = None
        self._is_own = False
        self._bar: Any = None
        self._end: Generator[None] | None = None

    async def __anext__(self) -> T_co:
        if self._pipeline is None:
            raise StopAsyncIteration
        if self._run is None:
            self._run, self._is_own = self._pipeline._begin()
            self._bar = self._pipeline._make_bar()
            self._end = when_dropped(_abandon, self._run if self._is_own else None, self._bar)
        try:
            item: Any = await self._run.graph.sink.take_async()
        except Exception:
            # Not after a cancellation, perhaps by a timeout of this one item: the task may ask again.
            await self.aclose()
            raise
        if item is END_OF_EPOCH:
            await self.aclose()
            raise StopAsyncIteration
        if self._bar is not None:
            self._bar.update()
        return item  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Release the pipeline, and stop it if this iteration started it.

        Raises:
            asyncio.CancelledError: The task was cancelled. The pipeline stops nevertheless.
        """
        run, self._run, self._pipeline = self._run, None, None
        if self._bar is not None:
            self._bar.close()
        if run is not None and self._is_own:
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            # Not by asyncio.to_thread(): the threads of the caller's loop may be busy.
            _stop_in_thread(run, partial(loop.call_soon_threadsafe, wake, ended))
            await ended


def _end_iteration(run: Run | None, bar: Any) -> None:
    if bar is not None:
        bar.close()
    if run is not None:
        run.stop(STOP_SECONDS)


def _abandon(run: Run | None, bar: Any) -> None:
    """End an iteration like :func:`_end_iteration`, but without waiting for its run."""
    if bar is not None:
        bar.close()
    if run is not None and not run.was_stopped:
        with suppress(RuntimeError):  # the interpreter is about to exit
            _stop_in_thread(run, lambda: None)


def _stop_in_thread(run: Run, then: Callable[[], object]) -> None:
    run.request_stop()

    def stop() -> None:
        run.stop(STOP_SECONDS)
        with suppress(RuntimeError):  # the event loop that waits has been closed
            then()

    threading.Thread(target=stop, name="spdl_media stop", daemon=True).start()


def _bar_class() -> Any:
    """Return tqdm's progress bar class for the terminal or notebook, without its monitor thread."""
    base = require("tqdm", "A progress bar", MissingPackageError).tqdm
    # tqdm's monitor thread updates stalled bars and never ends.
    return type("tqdm", (base,), {"monitor_interval": 0})


def _number_of_outputs(config: PipelineConfig) -> int | None:
    """Return the number of items of an epoch if none is dropped or fails; ``None`` if it cannot be known."""
    number = None if isinstance(config.src, MergeConfig) else source_length(config.src.source)
    for stage in config.pipes:
        if number is None:
            break
        if isinstance(stage, AggregateConfig) and isinstance(stage.aggregator, int):
            # Rounded up, unless an incomplete last group is dropped.
            number += 0 if stage.drop_last else stage.aggregator - 1
            number //= stage.aggregator
        # A generator yields any number of items for one input, and a path may lead anywhere.
        elif not (isinstance(stage, PipeConfig) and kind_of(stage.fn) in ("function", "async")):
            number = None
    return number
