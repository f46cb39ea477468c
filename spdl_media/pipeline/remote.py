"""Iterables and whole pipelines in a process of their own, whose batches cross in shared memory."""

from __future__ import annotations

import itertools
import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from spdl_media._checks import check_callable, check_choice, check_int, check_seconds
from spdl_media.pipeline.children import Child, RemoteTraceback, draw_seeds, failure
from spdl_media.pipeline.executors import name_of
from spdl_media.pipeline.failures import PipelineError, WorkerDied
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

# Blocks that what the consumer keeps may lie in. A batch takes one for each array that was made there.
_NUM_VIEWS: Final = 64

# What the other process answers. It is asked for a number of items of an epoch.
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
    """Iterate in another process over what a function gives there.

    The process starts now and serves all iterations: ``fn`` is called once, and each iteration here is one
    there, by ``iter()`` of what it returned. Its items are pickled; arrays in them (NumPy's, torch's on the
    CPU, buffers of this library, in containers or not) cross in shared memory. Those of ``load_*``,
    ``convert_frames``, ``collate`` and :func:`shared_empty` are made there, and not even copied.

    The process has one thread for NumPy's and torch's own computations, unless ``OMP_NUM_THREADS`` says
    otherwise. Its global random numbers (``random``, NumPy's, torch's) are seeded by numbers drawn from
    those of this process. Seed these, and each run draws the same numbers.

    Args:
        fn: Function without arguments that can be pickled, such as a class or a ``functools.partial``.
        buffer_size: Items that may wait.
        initializer: Called in the process first.
        mp_context: How it starts: ``"spawn"``, ``"forkserver"`` or ``"fork"``. ``None``: Python's default.
        timeout: Seconds to wait for an item before a ``TimeoutError``, which ends the process. The time that
            it takes to start does not count.
        block_size: Bytes that the arrays of an item may take. Memory is used as far as items need it.
        pin_memory: Pin the memory in this process, for copies to a GPU. Needs torch.

    Returns:
        What can be iterated, one iteration at a time.

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

    It serves code that holds the GIL for long, which would keep the consumer waiting. Stages of it may have
    processes of their own. A continuous source goes on into the next epoch meanwhile; then an iteration that
    is broken off is followed by the rest of that epoch, without the items that were under way.

    Args:
        config: The definition, of :meth:`PipelineBuilder.get_config`. It must be picklable.
        buffer_size: As in :func:`iterate_in_subprocess`, beside what the pipeline's own sink holds.
        mp_context: As in :func:`iterate_in_subprocess`.
        timeout: As in :func:`iterate_in_subprocess`.
        block_size: As in :func:`iterate_in_subprocess`.
        pin_memory: As in :func:`iterate_in_subprocess`.
        **options: Those of :class:`Pipeline`. Functions among them are called in the process.

    Returns:
        What can be iterated, one iteration at a time. Errors of stages come as the :class:`PipelineFailure`
        that a pipeline here would raise.

    Raises:
        TypeError: ``config`` is no definition, or an argument has the wrong type.
        ValueError: An argument is out of range.
        PipelineError: The definition cannot be pickled, or no process can be started.
    """
    # What is wrong with the definition or the options is told here.
    Pipeline(config, **options)
    ring = {"block_size": block_size, "pin_memory": pin_memory}
    factory = _PipelineFactory(config, dict(options))
    return SubprocessIterable(factory, None, buffer_size, mp_context, timeout, ring)


@dataclass
class _PipelineFactory:
    """Makes the pipeline in the process in which it is called."""

    config: PipelineConfig
    options: dict[str, Any]
    __name__ = "the pipeline"

    def __call__(self) -> Pipeline[Any]:
        pipeline: Pipeline[Any] = Pipeline(self.config, **self.options)
        if isinstance(self.config.src, SourceConfig) and self.config.src.continuous:
            pipeline.start()
        return pipeline


class SubprocessIterable(Generic[T]):
    """Iterates in another process. :func:`iterate_in_subprocess` makes one.

    The process ends with this object, by :meth:`close`, at the end of a ``with`` statement, and with this
    process, however that ends. One that has died is replaced by the next iteration.

    Items are views of shared memory for as long as they live. A consumer that keeps many gets copies.

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
        check_callable("fn", fn)
        if initializer is not None:
            check_callable("initializer", initializer)
        if mp_context is not None:
            check_choice("mp_context", mp_context, tuple(multiprocessing.get_all_start_methods()))
        # One more is made meanwhile.
        self._num_ahead = 1 + check_int("buffer_size", buffer_size)
        self._timeout = timeout if timeout is None else check_seconds("timeout", timeout)
        check_int("block_size", ring_options["block_size"], unit=" byte")
        options = {"num_sent": self._num_ahead, "num_views": _NUM_VIEWS, "warns": True}
        self._ring_options = ring_options | options
        self._name = name_of(fn)
        self._arguments = (fn, initializer)
        self._context = multiprocessing.get_context(mp_context)
        self._seeds = draw_seeds()
        self._epoch = 0
        self._is_closed = False
        self._child: Child | None = None
        self._start()

    def __iter__(self) -> Iterator[T]:
        """Begin an iteration in the process, and end one that is under way.

        Raises:
            PipelineError: The process was closed, or cannot be started.
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
        """End the process. Items live on."""
        self._is_closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        self._has_answered = False
        self._finalizer = weakref.finalize(self, child.end)
        # At exit all processes are ended together.
        self._finalizer.atexit = False
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._finalizer.detach()
            child.end()

    def _ask(self, child: Child, epoch: int, number: int) -> None:
        # A process that was forked from this one has the pipe, too.
        if child.is_ours:
            # One that has died is told of when an item is waited for.
            with suppress(OSError):
                child.pipes[0].send_bytes(b"%d %d" % (epoch, number))

    def _items(self, child: Child, epoch: int) -> Iterator[T]:
        try:
            while True:
                if self._child is not child or self._epoch != epoch:
                    raise PipelineError(
                        f"the process of {self._name} was closed, or another iteration of it has begun"
                    )
                kind, number, value = unpack(self._receive(child), child.ring)
                # Of an iteration that was broken off.
                if number != epoch:
                    continue
                if kind == _END:
                    return
                if kind == _FAILED:
                    error, text = value
                    error.__cause__ = RemoteTraceback(text)
                    raise error
                self._ask(child, epoch, 1)
                box = [value]
                # Its memory is free when the consumer lets go of it, not when the next one comes.
                del value
                yield box.pop()
        except GeneratorExit:
            if self._epoch == epoch:
                self._ask(child, _NO_EPOCH, 1)
            raise

    def _receive(self, child: Child) -> bytes:
        # What the process takes to start does not count.
        timeout = self._timeout if self._has_answered else None
        try:
            data = child.receive(child.pipes[0], timeout)
        except WorkerDied as error:
            self._end()
            if self._has_answered:
                raise
            raise WorkerDied(
                f"{error} This one ended before its first item. A script that starts processes keeps its own "
                'work below if __name__ == "__main__".'
            ) from error
        except TimeoutError:
            self._end()
            raise TimeoutError(
                f"the process of {self._name} gave no item for timeout={self._timeout} s, and was ended"
            ) from None
        self._has_answered = True
        return data


def _serve(
    pipe: Connection, fn: Callable[[], Iterable[Any]], initializer: Callable[[], object] | None
) -> None:
    """Send as many items as the other process asks for, until it closes the pipe."""
    iterable: Iterable[Any] | BaseException
    try:
        if initializer is not None:
            initializer()
        iterable = fn()
        if not isinstance(iterable, Iterable):
            raise TypeError(f"fn must return an iterable, not {type(iterable).__name__}")
    except BaseException as error:  # noqa: BLE001  # even SystemExit is to be told
        iterable = error
    # It is ready.
    pipe.send_bytes(dumps((_END, _NO_EPOCH, None)))
    epoch, num_asked, answers = _NO_EPOCH, 0, _answers((), _NO_EPOCH)
    while True:
        while not num_asked or pipe.poll():
            asked, number = map(int, pipe.recv_bytes().split())
            # What is asked for in another epoch ends the one that is under way.
            if asked != epoch:
                epoch, num_asked = asked, 0
                answers = _answers(iterable if epoch != _NO_EPOCH else (), epoch)
            num_asked += number
        # None is left when the end has been told.
        for answer in itertools.islice(answers, 1):
            pipe.send_bytes(answer)
        num_asked -= 1


def _answers(iterable: Iterable[Any] | BaseException, epoch: int) -> Iterator[bytes | memoryview]:
    try:
        if isinstance(iterable, BaseException):
            raise iterable
        for item in iterable:
            message = _packed(item, epoch)
            # Its memory is free when the other process lets go of it.
            del item
            try:
                yield message
            except GeneratorExit:
                # The iteration was broken off. Anywhere else it is the user's own.
                return
    except BaseException as error:  # noqa: BLE001  # as above
        yield dumps((_FAILED, epoch, failure(error)))
    else:
        yield dumps((_END, epoch, None))


def _packed(item: object, epoch: int) -> bytes | memoryview:
    try:
        return pack([(_ITEM, epoch, item)])
    except Exception as error:
        error.add_note(f"While an item of class {type(item).__name__} was sent to another process.")
        raise


def cache_iterator(
    src: Iterable[T],
    num_caches: int,
    *,
    return_caches_after: int | None = None,
    stop_after: int | None = None,
    delete_src: bool = True,
) -> Iterator[T]:
    """Give the items of a loader, and from some point on the first ones of them again and again.

    So a training loop shows what it would gain by a loader that takes no time at all.

    Args:
        src: The loader, or another iterable.
        num_caches: How many items to keep, the first ones.
        return_caches_after: How many items come from the loader; as many as are kept unless given.
        stop_after: How many items come in all; ``None``: there is no end, if the loader gives enough to get
            there. A loader that ends before is the end.
        delete_src: Let go of the loader when it is not needed any more, so that its threads end.

    Returns:
        An iterator. What it gives again is the same object, which nobody should change.

    Raises:
        TypeError: A number is no whole number, or ``src`` cannot be iterated.
        ValueError: A number is below 1, or more items are to be kept than come from the loader.

    Example:
        >>> list(cache_iterator(range(9), 2, return_caches_after=3, stop_after=6))
        [0, 1, 2, 0, 1, 0]
    """
    num_caches = check_int("num_caches", num_caches)
    after = num_caches
    if return_caches_after is not None:
        after = check_int("return_caches_after", return_caches_after)
    if after < num_caches:
        raise ValueError(
            f"num_caches={num_caches} items cannot be kept of the return_caches_after={after} that come from "
            "the loader"
        )
    if stop_after is not None:
        stop_after = check_int("stop_after", stop_after)
    # Here, so that arguments are checked by the call and not by the first item.
    return itertools.islice(
        _items(None if delete_src else src, iter(src), num_caches, after), stop_after
    )


def _items(kept: object, iterator: Iterator[T] | None, num_caches: int, after: int) -> Iterator[T]:
    caches: list[T] = []
    num_given = 0
    for item in itertools.islice(iterator, after):  # type: ignore[arg-type]  # not None yet
        if num_given < num_caches:
            caches.append(item)
        num_given += 1
        yield item
    if num_given < after:
        return
    if kept is None:
        # That of a loader is what runs.
        iterator = None
    yield from itertools.cycle(caches)
