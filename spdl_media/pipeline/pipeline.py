"""The face of a pipeline: started, iterated and stopped by threads and tasks of the caller's."""

from __future__ import annotations

import _thread
import asyncio
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from spdl_media._optional import require
from spdl_media.pipeline.engine.ends import END_OF_EPOCH
from spdl_media.pipeline.engine.graph import RunOptions
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
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    StageConfig,
    source_length,
    with_unique_names,
)
from spdl_media.pipeline.stats import PipelineStatistics

__all__ = ("Pipeline",)

T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

# After so long what was finalized is gone.
INTERRUPT_DELAY = 0.002

# Of the second within which stop() returns; the rest is for machines that are busy.
STOP_SECONDS = 0.8


class PipelineOptions(TypedDict, total=False):
    """The options of :class:`Pipeline`, which says what they mean."""

    num_threads: int
    max_failures: FailureLimit | None  # a number or a rate
    on_failure: Callable[[FailureRecord, Any], object] | None
    report_stats_interval: float | None
    task_hook_factory: Callable[[str], TaskHook | None] | None
    progress: bool | str


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Raise a Ctrl-C once more, a moment later, that comes while something is finalized.

    It would be printed there and lost: a loop that is left by ``break`` finalizes its iterator.
    """
    try:
        yield
    except KeyboardInterrupt:
        threading.Timer(INTERRUPT_DELAY, _thread.interrupt_main).start()


def _stop_dropped(run: Run) -> None:
    with deferred_interrupt():
        run.request_stop()


def shows_run_options(function: F) -> F:
    """Let ``inspect.signature`` and ``help`` list the options of a run in place of ``**options``."""
    own = inspect.signature(function)
    options = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(RunOptions).parameters.values()
    ]
    named = [parameter for name, parameter in own.parameters.items() if name != "options"]
    vars(function)["__signature__"] = own.replace(parameters=[*named, *options])
    return function


class Pipeline(Generic[T_co]):
    """Runs a definition, as often as wanted. :meth:`PipelineBuilder.build` makes one.

    Iterating it is all that is needed: that starts it, and stops it at the end, on ``break``, and when
    the consumer raises. Each such iteration begins with the first item of the source.

    Within :meth:`auto_stop`, or between :meth:`start` and :meth:`stop`, it runs on between iterations: one
    that is broken off is continued by the next, one that has come to the end is followed by the next
    epoch, which iterates the source anew. Items are made ahead of the consumer, as far as buffers allow.

    Args:
        config: What to run.
        num_threads: How many synchronous calls may run at once (default 8), those of all stages that
            have no executor of their own together.
        max_failures: How many items (``int``), or which part of them (``float``), may fail before the run
            ends with :class:`PipelineFailure`: those of all stages together that set no limit of their own.
            The default is 0.5: items may fail, but no more than half of them. A rate (a ``Fraction``, too)
            is that of one epoch; it is looked at after 100 calls of a stage, and at the end of the epoch.
            -1 or ``math.inf`` allows any number.
        on_failure: Called with the record and the input of each item that fails, in a thread of its own,
            one after the other. What it raises ends the run.
        report_stats_interval: Seconds between lines of statistics in the log, logger
            ``spdl_media.pipeline``, level INFO; ``None`` or -1: no such lines.
        task_hook_factory: Called with each stage's name when a run starts; makes its hook, or ``None``.
        progress: Show a progress bar, which needs tqdm; a string is its label.

    Raises:
        TypeError: An option is unknown, or has the wrong type.
        ValueError: An option is out of range.
        MissingPackageError: A progress bar was asked for without tqdm.

    Thread safety: safe. Several threads or tasks may take items; each item goes to one of them.
    """

    @shows_run_options
    def __init__(self, config: PipelineConfig, **options: Unpack[PipelineOptions]) -> None:
        self._options = RunOptions(**options)
        if self._options.progress is not False:
            # Here, so that a missing package is told of before anything runs.
            _bar_class()
        # Again, for a definition that no builder made.
        self._config = with_unique_names(config)
        # Held while a run is started, which may take long. stop() does not take it.
        self._starting = threading.RLock()
        self._run: Run | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def config(self) -> PipelineConfig:
        """The definition."""
        return self._config

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The last 1,000 failures of this run, or of the last one, the oldest first."""
        # Read once, here and below: a start that fails in another thread takes it away.
        run = self._run
        return () if run is None else tuple(run.log.records.copy())

    @property
    def failure_counts(self) -> dict[str, int]:
        """How many items failed, by stage, in this run or in the last one."""
        run = self._run
        return {} if run is None else run.log.counts()

    def statistics(self) -> PipelineStatistics:
        """Return the statistics of this run so far, or of the last one.

        Raises:
            PipelineError: The pipeline has not been started, or is just being started.
        """
        run = self._run
        if run is None or not run.has_begun:
            raise PipelineError("a pipeline has no statistics before it is started")
        return run.statistics()

    def to_mermaid(self) -> str:
        """Draw the pipeline as a Mermaid flowchart, which Markdown viewers render.

        Raises:
            Exception: What the source's ``__len__`` raises, unless it says that there is no length.
        """
        return self._config.to_mermaid()

    def __str__(self) -> str:
        return str(self._config)

    def __reduce__(self) -> tuple[Any, ...]:
        raise PipelineError(
            "a Pipeline cannot be pickled or copied, because it has threads; pickle its definition, "
            "pipeline.config, and run that by Pipeline(config)"
        )

    def start(self) -> None:
        """Start the pipeline, which begins to make items. Blocks only while pools of processes start.

        Raises:
            PipelineError: It is running.
            PipelineStopped: Another thread stopped it meanwhile.
        """
        with self._starting:
            if self._run is not None and not self._run.was_stopped:
                raise PipelineError("the pipeline is running; stop it before starting it again")
            # Known before it has started, so that stop() in another thread finds it.
            run = self._run = Run(self._config, self._options)
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _stop_dropped, run)
            # At exit all runs are stopped together, and waited for.
            self._finalizer.atexit = False
            try:
                run.start()
            except BaseException:
                self._run = None
                raise

    def stop(self, *, timeout: float | None = None) -> None:
        """Stop the pipeline; what it has made and nobody took is dropped. May be called at any time.

        Returns when all threads and tasks have ended, and after a second at most. A thread that is still
        in a call of a stage or of the source is named in the log; it ends when that call returns.

        Args:
            timeout: Seconds to wait at most, instead of about one.
        """
        if (run := self._run) is not None:
            self._stop_run(run, STOP_SECONDS if timeout is None else timeout)

    def _stop_run(self, run: Run, timeout: float) -> None:
        run.stop(timeout)
        # Nothing is left for it to do, and a Ctrl-C in a finalizer would be lost. Read before the run is
        # compared: start() in another thread sets that first, so it is never the next run's.
        finalizer = self._finalizer
        if run is self._run and finalizer is not None:
            finalizer.detach()

    @contextmanager
    def auto_stop(self, *, timeout: float | None = None) -> Iterator[Pipeline[T_co]]:
        """Run the pipeline within a ``with`` statement: started at its beginning, stopped at its end.

        Args:
            timeout: Of :meth:`stop`.

        Raises:
            PipelineError: It is running.
        """
        self.start()
        try:
            yield self
        finally:
            self.stop(timeout=timeout)

    def get_item(self, *, timeout: float | None = None) -> T_co:
        """Take the next item.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: There was no item within ``timeout``.
            PipelineStopped: The epoch has ended (of a continuous source once, then the next one follows), or
                the pipeline was stopped. It is an ``EOFError``.
            PipelineFailure: Too many items failed, or the source did.
            PipelineError: The pipeline was not started.
        """
        run = self._running()
        try:
            item: Any = run.graph.sink.take(timeout)
        except PipelineFailure as failure:
            # Tracebacks are to show the user's lines.
            raise failure.with_traceback(None) from None
        if item is END_OF_EPOCH:
            raise PipelineStopped(
                "the epoch has ended and there are no more items; iterate the pipeline for the next epoch"
            )
        return item  # type: ignore[no-any-return]

    def get_iterator(self, *, timeout: float | None = None) -> Iterator[T_co]:
        """Iterate over one epoch, or over what is left of it.

        Args:
            timeout: Seconds to wait for each item at most.

        Raises:
            TimeoutError: There was no item within ``timeout``.
            PipelineStopped: Another thread stopped the pipeline.
            PipelineFailure: Too many items failed, or the source did; after the items that were made before.
        """
        run, is_own = self._begin()
        bar = self._make_bar()
        # Looked up once, because it is called for each item.
        take = run.graph.sink.take
        is_left = False
        try:
            while (item := take(timeout)) is not END_OF_EPOCH:
                if bar is not None:
                    bar.update()
                yield item
        except PipelineFailure as failure:
            raise failure.with_traceback(None) from None
        except GeneratorExit:
            is_left = True
            raise
        finally:
            if bar is not None:
                bar.close()
            if is_own:
                with deferred_interrupt() if is_left else nullcontext():
                    self._stop_run(run, STOP_SECONDS)

    def __iter__(self) -> Iterator[T_co]:
        return self.get_iterator()

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Iterate over one epoch from a task of any event loop, which goes on with others meanwhile."""
        return _AsyncEpoch(self)

    def _begin(self) -> tuple[Run, bool]:
        """The run to iterate, begun if need be, and whether it is to be stopped afterwards."""
        with self._starting:
            run = self._run
            if run is None or run.was_stopped:
                self.start()
                return self._running(), True
            # Else an iteration was broken off, and this one goes on with its epoch.
            if run.graph.sink.has_ended:
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
        # miniters: without its thread, tqdm has to look at the clock with each item.
        return _bar_class()(desc=label, total=total, unit="item", miniters=1)


class _AsyncEpoch(AsyncIterator[T_co]):
    """An epoch, or what is left of it, for a task. It begins with the first item that is asked for.

    No generator: one that is broken off ends when its event loop comes to it, and this at once.
    """

    def __init__(self, pipeline: Pipeline[T_co]) -> None:
        self._pipeline: Pipeline[T_co] | None = pipeline
        self._run: Run | None = None
        self._is_own = False
        self._bar: Any = None

    async def __anext__(self) -> T_co:
        if self._pipeline is None:
            raise StopAsyncIteration
        if self._run is None:
            self._run, self._is_own = self._pipeline._begin()
            self._bar = self._pipeline._make_bar()
        try:
            item: Any = await self._run.graph.sink.take_async()
        except asyncio.CancelledError:
            # Perhaps by a time limit of this item. The task may ask again; otherwise it drops this iterator.
            raise
        except BaseException:
            await self.aclose()
            raise
        if item is END_OF_EPOCH:
            await self.aclose()
            raise StopAsyncIteration
        if self._bar is not None:
            self._bar.update()
        return item  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Let go of the pipeline, and stop it if this iteration has started it."""
        if (run := self._let_go()) is not None:
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            _stop_in_thread(
                run, functools.partial(loop.call_soon_threadsafe, ended.set_result, None)
            )
            # In a thread and a future: the loop must not block while threads end.
            await asyncio.wait([ended])

    def __del__(self) -> None:
        # The interpreter's exit has stopped all runs, and a thread that starts then may wait forever.
        if (run := self._let_go()) is not None and not sys.is_finalizing():
            run.request_stop()
            with suppress(RuntimeError):  # it is about to exit
                _stop_in_thread(run)

    def _let_go(self) -> Run | None:
        """Forget the pipeline; gives the run if it is to be stopped."""
        self._pipeline = None
        if self._bar is not None:
            self._bar.close()
        run, self._run = self._run, None
        return run if self._is_own else None


def _stop_in_thread(run: Run, then: Callable[[], object] = lambda: None) -> None:
    def stop() -> None:
        run.stop(STOP_SECONDS)
        with suppress(RuntimeError):  # the loop that waited has been closed
            then()

    threading.Thread(target=stop, name="spdl_media stop", daemon=True).start()


def _bar_class() -> Any:
    """The class of progress bars: tqdm's own for the terminal or notebook, without its thread."""
    base = require("tqdm", "A progress bar", MissingPackageError).tqdm
    # The thread looks after bars that stand still, and never ends.
    return type("tqdm", (base,), {"monitor_interval": 0})


def _number_of_outputs(config: PipelineConfig) -> int | None:
    """How many items an epoch delivers if none is dropped or fails; ``None`` when that depends on them."""
    source = config.src
    number: int | None
    if isinstance(source, MergeConfig):
        parts = [_number_of_outputs(pipeline) for pipeline in source.pipeline_configs]
        number = None if None in parts else sum(part or 0 for part in parts)
    else:
        number = source_length(source.source)
    for stage in config.pipes:
        if number is not None:
            number = _outputs(stage, number)
    return number


def _outputs(stage: StageConfig, number: int) -> int | None:
    if isinstance(stage, PipeConfig):
        # A generator makes any number of items of one.
        return number if kind_of(stage.fn) in ("function", "async") else None
    if isinstance(stage, AggregateConfig) and isinstance(stage.aggregator, int):
        # Rounded up, unless the rest is dropped.
        return (number if stage.drop_last else number + stage.aggregator - 1) // stage.aggregator
    if isinstance(stage, PathVariantsConfig):
        # Which path an item takes is unknown, so each must give one item for one.
        kept = all(_outputs(one, 1) == 1 for path in stage.paths for one in path)
        one_each = all(isinstance(one, PipeConfig) for path in stage.paths for one in path)
        return number if kept and one_each else None
    return None
