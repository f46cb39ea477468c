"""Iterables and whole pipelines in another process, which sends its items in shared memory.

And :func:`cache_iterator`, which repeats the first items of any loader.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Generic, TypeVar, Unpack

from spdl_media._checks import check_callable, check_choice, check_int, check_seconds
from spdl_media._threads import ClosedByWith, when_dropped
from spdl_media.pipeline.children import Child, RemoteTraceback, draw_seeds, failure
from spdl_media.pipeline.executors import name_of
from spdl_media.pipeline.failures import PipelineError, describe
from spdl_media.pipeline.pipeline import Pipeline, PipelineOptions, shows_run_options
from spdl_media.pipeline.stages import PipelineConfig, SourceConfig
from spdl_media.ring import dumps, pack, unpack

__all__ = (
    "SubprocessIterable",
    "cache_iterator",
    "iterate_in_subprocess",
    "run_pipeline_in_subprocess",
)

T = TypeVar("T")

# Kinds of answers of the other process. A request is an epoch and a number of items.
_ITEM, _END, _FAILED = range(3)
_NO_EPOCH: Final = 0


def iterate_in_subprocess(
    fn: Callable[[], Iterable[T]],
    *,
    buffer_size: int = 3,
    initializer: Callable[[], object] | None = None,
    mp_context: str | None = "spawn",
    timeout: float | None = None,
    block_size: int = 1 << 28,
    pin_memory: bool = False,
) -> SubprocessIterable[T]:
    """Iterate in another process over the iterable that a function returns there.

    The process starts now and serves all iterations. It calls ``fn`` once; each iteration here calls
    ``iter()`` of the returned iterable there. Items are pickled, but their arrays (of NumPy, of torch on the
    CPU, and buffers of this library, also within containers) are passed in shared memory. Arrays of
    ``load_*``, ``convert_frames``, ``collate`` and :func:`shared_empty` are allocated in shared memory and
    not copied at all.

    The process uses one thread for the computations of NumPy and torch, unless ``OMP_NUM_THREADS`` is set.
    Its global random generators (of ``random``, NumPy and torch) are seeded by numbers drawn from those of
    this process. Seed the generators here to get the same numbers in each run.

    Args:
        fn: Function without arguments that can be pickled, such as a class or a ``functools.partial``.
        buffer_size: Maximum number of items that wait for the consumer.
        initializer: Called first in the process.
        mp_context: Start method: ``"spawn"``, ``"forkserver"`` or ``"fork"``. ``None`` means Python's
            default.
        timeout: Maximum seconds to wait for an item. After that, the process is ended and a ``TimeoutError``
            is raised. The start of the process does not count.
        block_size: Maximum bytes of the arrays of one item. Memory is allocated only as items need it.
        pin_memory: Whether to pin the memory in this process, for copies to a GPU. Needs torch.

    Returns:
        An iterable that allows one iteration at a time.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
        PipelineError: The function cannot be pickled, or no process can be started.

    Example:
        ::

            for batch in iterate_in_subprocess(make_loader):
                train(batch)
    """
    ring = {"block_size": block_size, "pin_memory": pin_memory}
    return SubprocessIterable(fn, initializer, buffer_size, mp_context, timeout, ring)


@shows_run_options
def run_pipeline_in_subprocess(
    config: PipelineConfig,
    *,
    buffer_size: int = 3,
    mp_context: str | None = "spawn",
    timeout: float | None = None,
    block_size: int = 1 << 28,
    pin_memory: bool = False,
    **options: Unpack[PipelineOptions],
) -> SubprocessIterable[Any]:
    """Run a whole pipeline in another process. Each iteration is one epoch.

    Use it for code that holds the GIL for long, which would delay the consumer. Stages may have processes of
    their own. With a continuous source, the next epoch starts by itself. An iteration after a ``break`` then
    continues the same epoch, but the items that were already under way are lost.

    Args:
        config: The definition, from :meth:`PipelineBuilder.get_config`. It must be picklable.
        buffer_size: Maximum number of items that wait for the consumer, in addition to the pipeline's sink.
        mp_context: Start method: ``"spawn"``, ``"forkserver"`` or ``"fork"``. ``None``: Python's default.
        timeout: Maximum seconds to wait for an item. After that, the process is ended and a ``TimeoutError``
            is raised. The start of the process does not count.
        block_size: Maximum bytes of the arrays of one item. Memory is allocated only as items need it.
        pin_memory: Whether to pin the memory in this process, for copies to a GPU. Needs torch.
        **options: Options of :class:`Pipeline`. Functions among them are called in the other process.

    Returns:
        An iterable that allows one iteration at a time. It raises the same :class:`PipelineFailure`
        as a pipeline in this process.

    Raises:
        TypeError: ``config`` is not a :class:`PipelineConfig`, or an argument has the wrong type.
        ValueError: An argument is out of range.
        PipelineError: The definition cannot be pickled, or no process can be started.
    """
    # Make a pipeline here, only to report wrong definitions and options in this process.
    Pipeline(config, **options)
    ring = {"block_size": block_size, "pin_memory": pin_memory}
    factory = _PipelineFactory(config, dict(options))
    return SubprocessIterable(factory, None, buffer_size, mp_context, timeout, ring)


@dataclass
class _PipelineFactory:
    """A function that can be pickled and makes the pipeline in the other process."""

    config: PipelineConfig
    options: dict[str, Any]
    __name__ = "the pipeline"

    def __call__(self) -> Pipeline[Any]:
        pipeline: Pipeline[Any] = Pipeline(self.config, **self.options)
        if isinstance(self.config.src, SourceConfig) and self.config.src.continuous:
            pipeline.start()
        return pipeline


class SubprocessIterable(ClosedByWith, Generic[T]):
    """An iterable that runs in another process. :func:`iterate_in_subprocess` makes one.

    The process ends when this object is deleted or closed, at the end of a ``with`` statement, and when this
    process ends, even if it is killed. If the process has died, the next iteration starts a new one.

    Items are views of shared memory, which stays valid as long as they live. A consumer that keeps many items
    gets copies.

    Thread safety: for one thread at a time.
    """

    def __init__(
        self,
        fn: Callable[[], Iterable[T]],
        initializer: Callable[[], object] | None,
        buffer_size: int,
        mp_context: str | None,
        timeout: float | None,
        ring_options: dict[str, Any],
    ) -> None:
        remedy = "The process calls it to make the iterable: pass a function that does"
        check_callable("fn", fn, remedy=remedy)
        check_callable("initializer", initializer, optional=True)
        if mp_context is not None:
            check_choice("mp_context", mp_context, tuple(multiprocessing.get_all_start_methods()))
        # One more, because the process makes an item while the buffer is full.
        self._num_ahead = 1 + check_int("buffer_size", buffer_size)
        self._timeout = timeout if timeout is None else check_seconds("timeout", timeout)
        check_int("block_size", ring_options["block_size"], unit=" byte")
        self._ring_options = {"num_sent": self._num_ahead} | ring_options
        self._name = name_of(fn)
        self._arguments = (fn, initializer)
        self._context = multiprocessing.get_context(mp_context)
        self._seeds = draw_seeds()
        self._epoch = 0
        self._is_closed = False
        self._child: Child | None = None
        self._start()

    def __iter__(self) -> Iterator[T]:
        """Begin a new iteration in the process, which ends the current one.

        Raises:
            PipelineError: This object was closed, or no process can be started.
        """
        if self._is_closed:
            raise PipelineError(f"the process of {self._name} was closed; make another one")
        child = self._child
        if child is None or not child.is_alive():
            self._end()
            child = self._start()
        self._epoch += 1
        self._ask(child, self._epoch, self._num_ahead)
        return self._items(child, self._epoch)

    def close(self) -> None:
        """End the process. Items that were taken stay valid."""
        self._is_closed = True
        self._end()

    def __reduce__(self) -> tuple[Any, ...]:
        raise PipelineError("what iterates in a process of its own cannot be pickled or copied")

    def __repr__(self) -> str:
        return f"<SubprocessIterable of {self._name}>"

    def _start(self) -> Child:
        child = self._child = Child(
            self._context,
            _serve,
            self._arguments,
            owner=self._name,
            seeds=next(self._seeds),
            is_daemon=False,
            **self._ring_options,
        )
        self._at_drop = when_dropped(child.end)
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _ask(self, child: Child, epoch: int, number: int) -> None:
        # A process that was forked from this one has the pipe, too, but must not use it.
        if child.is_ours:
            # If the child has died, _receive() raises an error.
            with suppress(OSError):
                child.pipes[0].send_bytes(b"%d %d" % (epoch, number))

    def _items(self, child: Child, epoch: int) -> Iterator[T]:
        end = when_dropped(self._leave, child, epoch)
        try:
            while True:
                if self._child is not child or self._epoch != epoch:
                    raise PipelineError(
                        f"the process of {self._name} was closed, or another iteration of it has begun"
                    )
                kind, number, value = unpack(self._receive(child), child.ring)
                # An answer to an earlier iteration, which was left before its end.
                if number != epoch:
                    continue
                if kind == _END:
                    self._epoch += 1
                    return
                if kind == _FAILED:
                    error, text = value
                    if not isinstance(error, Exception):
                        # A SystemExit there must not end this program.
                        error = PipelineError(describe(error))
                    raise error from RemoteTraceback(text)
                self._ask(child, epoch, 1)
                box = [value]
                # Keep no reference, so that the memory is free when the consumer drops the item.
                del value
                yield box.pop()
        finally:
            # Nothing may follow, as in Pipeline.get_iterator().
            del end

    def _leave(self, child: Child, epoch: int) -> None:
        if self._epoch == epoch:
            self._ask(child, _NO_EPOCH, 1)

    def _receive(self, child: Child) -> bytes:
        # The start of the process does not count.
        timeout = self._timeout if child.is_ready else None
        try:
            return child.receive(child.pipes[0], timeout)
        except TimeoutError:
            raise TimeoutError(
                f"the process of {self._name} gave no item for timeout={self._timeout} s, and was ended"
            ) from None


def _serve(
    pipe: Connection, fn: Callable[[], Iterable[Any]], initializer: Callable[[], object] | None
) -> None:
    """Send as many items as the parent process requests, until it closes the pipe."""
    iterable: Iterable[Any] | BaseException
    try:
        if initializer is not None:
            initializer()
        iterable = fn()
        if not isinstance(iterable, Iterable):
            raise TypeError(f"fn must return an iterable, not {type(iterable).__name__}")
    except BaseException as error:  # noqa: BLE001  # even SystemExit has to be reported
        iterable = error
    # Report that the process is ready.
    pipe.send_bytes(dumps((_END, _NO_EPOCH, None)))
    epoch, num_asked, answers = _NO_EPOCH, 0, _answers((), _NO_EPOCH)
    while True:
        while not num_asked or pipe.poll():
            asked, number = map(int, pipe.recv_bytes().split())
            # A request for another epoch ends the current one.
            if asked != epoch:
                epoch, num_asked = asked, 0
                answers = _answers(iterable if epoch != _NO_EPOCH else (), epoch)
            num_asked += number
        # There is no answer any more after the end of the epoch has been sent.
        for answer in itertools.islice(answers, 1):
            pipe.send_bytes(answer)
        num_asked -= 1


def _answers(iterable: Iterable[Any] | BaseException, epoch: int) -> Iterator[bytes | memoryview]:
    try:
        if isinstance(iterable, BaseException):
            raise iterable
        for item in iterable:
            message = pack([(_ITEM, epoch, item)])
            # Keep no reference, so that the memory is free when the other process drops the item.
            del item
            try:
                yield message
            except GeneratorExit:
                # The iteration was left early. A GeneratorExit from elsewhere is an error of the user's code.
                return
    except BaseException as error:  # noqa: BLE001  # as above
        yield dumps((_FAILED, epoch, failure(error)))
    else:
        yield dumps((_END, epoch, None))


def cache_iterator(
    src: Iterable[T],
    num_caches: int,
    *,
    return_caches_after: int | None = None,
    stop_after: int | None = None,
    delete_src: bool = True,
) -> Iterator[T]:
    """Yield the items of a loader, then its first items again and again.

    This shows how fast a training loop would be with a loader that takes no time.

    Args:
        src: The loader, or another iterable.
        num_caches: Number of items to keep: the first ones that are taken from the loader.
        return_caches_after: Number of items to take from the loader; the default is ``num_caches``. If the
            loader has fewer items, the iterator ends with them.
        stop_after: Total number of items; ``None`` means no end.
        delete_src: Whether to drop the loader when it is no longer needed, so that its threads end.

    Returns:
        An iterator. Repeated items are the same objects, so they must not be modified.

    Raises:
        TypeError: A number is not an integer, or ``src`` is not iterable.
        ValueError: A number is below 1.

    Example:
        >>> list(cache_iterator(range(9), 2, return_caches_after=3, stop_after=6))
        [0, 1, 2, 0, 1, 0]
    """
    num_caches = check_int("num_caches", num_caches)
    given = num_caches if return_caches_after is None else return_caches_after
    after = check_int("return_caches_after", given)
    if stop_after is not None:
        stop_after = check_int("stop_after", stop_after)
    # _items() is a separate generator, so that this call checks the arguments, not the first next().
    return itertools.islice(
        _items(None if delete_src else src, iter(src), num_caches, after), stop_after
    )


def _items(kept: object, iterator: Iterator[T] | None, num_caches: int, after: int) -> Iterator[T]:
    caches: list[T] = []
    num_given = 0
    for num_given, item in enumerate(itertools.islice(iterator, after), 1):  # type: ignore[arg-type]  # not None yet
        if num_given <= num_caches:
            caches.append(item)
        yield item
    if num_given < after:
        return
    if kept is None:
        # The loader runs as long as its iterator exists.
        iterator = None
    yield from itertools.cycle(caches)
