"""A data loader like PyTorch's, built on a pipeline: source, preprocessor, batches, aggregator, transfer."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from spdl_media._checks import check_int, outer_frame, warn_caller, with_argument_hints
from spdl_media._resume import Ledger, State, Tag, loaded_state
from spdl_media.epochs import compare_ranks, iterator_in, order_of
from spdl_media.loader_ends import AsyncEpoch, Epoch, SharedSource, checked_source
from spdl_media.loader_items import Replaced, SampleCache, StandInTag, sample_rng
from spdl_media.loader_stages import LoaderStages, OnError, check_arguments
from spdl_media.pipeline import (
    FailureRecord,
    OutputOrder,
    Pipeline,
    PipelineBuilder,
    PipelineStatistics,
)
from spdl_media.pipeline.executors import ExecutorConfig, kind_of, name_of
from spdl_media.pipeline.failures import FailureLimit, PipelineError
from spdl_media.pipeline.stages import SourceConfig, source_length
from spdl_media.source import MapIterator, SupportsGetItem

__all__ = ("DataLoader", "MapIterator", "Pipeline", "PipelineBuilder", "Replaced", "sample_rng")

E = TypeVar("E", Epoch, AsyncEpoch)

# Numbers of further loaders that each line of the program creates.
_loaders: dict[str, count[int]] = {}

# For each argument of PyTorch's DataLoader that does not exist here: what to use instead.
_TORCH_NAMES = {
    "dataset": "Use src=dataset",
    "collate_fn": "Use aggregator=collate_fn; without one, to='torch' collates",
    "num_workers": "Use num_threads=, or num_processes= for Python code that holds the GIL",
    "shuffle": "The source shuffles: ImageFolder(shuffle=True), Shards(shuffle_buffer=...), or "
    "MapIterator(dataset, DistributedRandomSampler(len(dataset))) of spdl_media.source",
    "sampler": "Use src=MapIterator(dataset, sampler) of spdl_media.source",
    "batch_sampler": "Use src=MapIterator(dataset, sampler) of spdl_media.source with batch_size=",
    "pin_memory": "Use transfer_fn=transfer_tensor, which pins batches and copies them to a GPU",
    "prefetch_factor": "Use buffer_size=, the finished batches that wait",
    "in_order": "Use output_order='input'",
    "generator": "Use seed= of the source for its order, and here for the rng of preprocessors",
    "transform": "Use preprocessor=transform",
    "worker_init_fn": "Leave it out: threads share all that is set up before",
    "multiprocessing_context": "Leave it out: threads load, or use executor=ProcessPoolExecutorConfig(...)",
    "persistent_workers": "Leave it out: threads start quickly",
}


@with_argument_hints(_TORCH_NAMES)
@dataclass(eq=False, repr=False)
class DataLoader:
    """Loads, preprocesses and batches the items of a source in threads.

    ::

        src -> preprocessor -> batches -> aggregator -> transfer_fn -> buffer -> iteration
               (num_threads)              (num_threads) (one thread)   (buffer_size)

    Each iteration is an *epoch*, unless its iterator is dropped before the first batch. Loading begins when
    ``iter()`` is called. The threads end when the epoch is complete, stopped early, or garbage-collected. If
    a preprocessor, aggregator or transfer returns ``None``, the item is dropped. An item that fails is
    dropped and recorded in :attr:`failures`; see ``max_failures``.

    Args:
        src: The items: an iterable, which is iterated in a thread of its own, an async iterable, or a
            map-style dataset with a length. An object that is iterable in both ways is iterated
            asynchronously. A dataset, also that of a :class:`~spdl_media.source.MapIterator`, is read in the
            loader's threads, so it must not seek and read a file that all calls share. A ``None`` in it is
            dropped. If the source has ``set_epoch``, as the samplers of :mod:`spdl_media.source` do, it is
            called with the epoch.
        preprocessor: A function, coroutine function, generator function or async generator function
            that turns an item into one sample, or into several. If it has a parameter named ``rng``, it
            receives :func:`~spdl_media.dataloader.sample_rng` of the item. Without a preprocessor, the items
            are the samples.
        batch_size: Number of samples in a batch. ``None``: no batches, but single samples.
        drop_last: Whether to drop the last batch if it is smaller.
        aggregator: A function or coroutine function that turns the list of samples of a batch, or without
            ``batch_size`` each sample, into a result of the loader. Several calls run concurrently. Without
            an aggregator, batches are lists, or with ``to=`` the results of :func:`~spdl_media.collate`. For
            samples that differ in length, ``lambda batch: collate(batch, pad=True)``.
        transfer_fn: A function of a result before ``to`` converts it, such as a copy of its buffers to a GPU
            by :func:`~spdl_media.transfer_tensor`. It runs in a thread of its own, for one batch at a time.
        to: ``"torch"``, ``"numpy"`` or ``"jax"``: convert buffers and arrays in the results to arrays of
            that library, as by :func:`~spdl_media.to_torch`, :func:`~spdl_media.to_numpy` or
            :func:`~spdl_media.to_jax`. On a device, the consumer's stream waits for them.
        buffer_size: Number of finished batches that are kept ahead of the consumer.
        num_threads: Number of threads, and of concurrent calls of the preprocessor and of the aggregator.
            ``None``: the number of cores that this process may use, for coroutines at least 8. More threads
            help if reading files is slow, such as over a network.
        timeout: Seconds to wait for a batch before a ``TimeoutError``, after which iteration may continue.
            ``None``: no limit.
        output_order: ``"completion"``: results in the order in which they are ready. ``"input"``: in the
            order of the source.
        max_failures: Number (``int``) or fraction (``float`` or ``Fraction`` up to 1) of items that may fail
            in an iteration before it ends with a :class:`~spdl_media.pipeline.PipelineFailure`. ``None``:
            half of the items, so that an epoch in which everything fails is an error. ``float("inf")`` or
            -1: any number. A fraction holds for each stage. A resumed epoch counts from where it resumes.
        on_failure: Called with the record of each failure and the input that failed, in a thread of
            its own. If it raises, the epoch ends.
        on_error: What to do with an item that fails in the preprocessor or the source's dataset. In each
            case it counts as a failure. ``"skip"`` drops the item. ``"raise"`` ends the epoch, as
            ``max_failures=0`` does. ``"replace"`` uses a good sample of the same rank instead, see
            :attr:`replaced`; the source must have positions, as sequences, samplers and datasets do. A
            function ``f(item, error)`` returns the sample to use, or ``None`` to drop the item; ``item`` is
            the source's item (for a dataset, the key). If the function raises, that is recorded as the
            failure of the item.
        executor: The executor in which the preprocessor runs and the source's dataset is read, instead of in
            the loader's threads: a config such as :class:`~spdl_media.pipeline.ProcessPoolExecutorConfig`,
            from which each epoch makes its own executor, or a ``concurrent.futures.Executor``. The
            preprocessor must then be a plain function.
        num_processes: Number of processes in which the preprocessor runs and the dataset is read instead,
            with ``num_threads`` threads each (``None``: the cores divided among the processes). Without
            preprocessor and dataset, the processes run the aggregator. A script needs
            ``if __name__ == "__main__":`` before its own work, because the processes import it.
        cache: Bytes of memory in which to keep pickled samples for later epochs. The keys are the source's
            items, which must be hashable. Not for generators and preprocessors that take ``rng``, except
            ``ImageRecipe`` and ``load_image`` without random crops and flips.
        seed: Seed of :func:`~spdl_media.dataloader.sample_rng`.

    Raises:
        TypeError: An argument has the wrong type; for example, ``transfer_fn`` is a coroutine function.
        ValueError: A number is too small, an order or policy is unknown, ``drop_last`` is given without
            ``batch_size``, or ``on_error`` cannot be combined with ``max_failures`` or the preprocessor.
        MissingDependencyError: The library that ``to`` names is not installed.
        PipelineError: The preprocessor cannot be pickled, but ``executor`` needs that.

    Iterate with ``for`` or ``async for``. A loader can be pickled if its source and functions can; the copy
    continues at the loader's position.

    Thread safety: an iterator serves one thread at a time. Use the loader itself from one thread.

    Example:
        >>> recipe = sm.ImageRecipe(224, random_crop=True, flip=0.5, dtype="float32")
        >>> samples = [("photo.jpg", 3)] * 10
        >>> for images, labels in sm.DataLoader(samples, preprocessor=recipe, batch_size=5, to="numpy"):
        ...     print(images.shape, labels)
        (5, 3, 224, 224) [3 3 3 3 3]
        (5, 3, 224, 224) [3 3 3 3 3]
    """

    src: Iterable[Any] | AsyncIterable[Any] | SupportsGetItem[int, Any]
    _: KW_ONLY
    preprocessor: Callable[..., Any] | None = None
    batch_size: int | None = None
    drop_last: bool = False
    aggregator: Callable[[Any], Any] | None = None
    transfer_fn: Callable[[Any], Any] | None = None
    to: Literal["torch", "numpy", "jax"] | None = None
    buffer_size: int = 3
    num_threads: int | None = None
    timeout: float | None = None
    output_order: OutputOrder = "completion"
    max_failures: FailureLimit | None = None
    on_failure: Callable[[FailureRecord, Any], object] | None = None
    on_error: OnError = "skip"
    executor: Executor | ExecutorConfig | None = None
    num_processes: int | None = None
    cache: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # `src` keeps the argument; a dataset is read through a MapIterator.
        self._source = SharedSource(checked_source(self.src))
        check_arguments(self)
        self.seed = check_int("seed", self.seed, at_least=0)
        # The cache belongs to the loader, so that later epochs find the samples of earlier ones.
        self._samples = None if self.cache is None else SampleCache(self.cache)
        # State of the next iteration, if set_epoch or load_state_dict has set it. Otherwise only its epoch.
        self._pinned: State | None = None
        self._next_epoch = 0
        # Ledger of the latest iteration, until that is complete.
        self._ledger: Ledger | None = None
        # Pipeline of the latest iteration.
        self._pipeline: Pipeline[Any] | None = None
        # Tags of the samples in the batch that was handed out last.
        self._tags: Sequence[Tag] = ()
        # Together they identify an iteration, with the same value on all ranks.
        self._origin, self._num_iterations = _origin(), 0

    def __setattr__(self, name: str, value: Any) -> None:
        # Arguments are checked together, and the source and the cache are objects that were made from them.
        if name in _ARGUMENTS and "_origin" in self.__dict__:
            raise AttributeError(
                f"{name}= of a DataLoader stays what it was made with; make another loader, and load this "
                "one's state_dict() to go on in its epoch"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        batches = None if self.batch_size is None else f"batches of {self.batch_size}"
        steps = [self.preprocessor, batches, self.aggregator, self.transfer_fn, self.to]
        names = [one if isinstance(one, str) else name_of(one) for one in steps if one is not None]
        source = SourceConfig(self._source.source).name
        return f"<{type(self).__name__}: {' -> '.join([source, *names])}>"

    def __len__(self) -> int:
        """Return the number of batches (or samples) of an epoch in which nothing fails or is dropped.

        Raises:
            TypeError: The source has no length, or the preprocessor is a generator.
        """
        if self.preprocessor is not None and "generator" in kind_of(self.preprocessor):
            raise TypeError(
                "the loader has no length: its preprocessor is a generator, so an item may give any "
                "number of samples"
            )
        length = source_length(self._source.source)
        if length is None:
            name = type(self._source.source).__name__
            raise TypeError(f"the loader has no length, because its source, a {name}, has none")
        size = self.batch_size or 1
        # Round up in integers, because floats are not exact for large numbers.
        return length // size if self.drop_last else -(-length // size)

    def __iter__(self) -> Epoch:
        """Begin the next epoch, or continue that of :meth:`load_state_dict`.

        Raises:
            TimeoutError: The source is an iterator, or has a state, and the last iteration is still reading
                from it. Try again when that read has ended.
            ValueError: The source can be read only once, and was read; or it has no positions, which
                ``on_error="replace"`` needs; or ranks of ``torch.distributed`` differ in seed, length or
                epoch.
            PipelineError: The dataset has to be pickled for other processes, and cannot be.
        """
        return self._iterate(Epoch)

    def __aiter__(self) -> AsyncEpoch:
        """Begin the next epoch for an asynchronous consumer, in any asyncio event loop.

        If the task is cancelled while it waits for a batch, such as by ``asyncio.timeout``, no batch is lost:
        the iterator can still be used.

        Raises:
            TimeoutError: As in :meth:`__iter__`.
            ValueError: As in :meth:`__iter__`.
            PipelineError: As in :meth:`__iter__`.
        """
        return self._iterate(AsyncEpoch)

    def _iterate(self, kind: type[E]) -> E:
        start = self._begin()
        # Counted even if the comparison fails, so that the number stays the same on all ranks.
        self._num_iterations += 1
        key = f"{self._origin}/{self._num_iterations}"
        # Before the pipeline starts, so that a rank that differs loads nothing.
        compare_ranks(self, self._source.source, start.epoch, key)
        ledger = Ledger(self._from_here(start))
        pipeline = LoaderStages(self, start, ledger).pipeline()
        iteration = kind(self, pipeline, ledger)
        # Set last: if the pipeline cannot be made or started, the state stays that of the last iteration.
        self._pipeline, self._ledger = pipeline, ledger
        self._pinned, self._next_epoch = None, start.epoch + 1
        return iteration

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the state of the epoch, so that a pickled copy continues from there."""
        # Without the pipeline, which has threads, and the ledger, which belongs to it.
        start = self._pinned if self._ledger is None else self._ledger.state()
        return {**self.__dict__, "_pinned": start, "_ledger": None, "_pipeline": None, "_tags": ()}

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next iteration.

        Raises:
            Exception: The source's ``epoch`` or ``__len__`` raises.
        """
        return self._upcoming().epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which starts at the epoch's beginning.

        A loaded state of that epoch stays, so that a training loop may set each epoch.

        Raises:
            ValueError: ``epoch`` is negative.
        """
        epoch = check_int("epoch", epoch, at_least=0)
        if self._pinned is None or self._pinned.epoch != epoch:
            self._pin(self._fresh(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which a loader made with equal arguments can resume, in any process.

        A batch counts as done when iteration has handed it out. After the end of an epoch, the state is the
        beginning of the next one.

        Returns:
            Numbers, lists and dictionaries, which can be written as JSON. If the source has ``state_dict``, a
            copy of its result is under ``"source"``.

        Thread safety: call it in the thread that iterates.

        Raises:
            Exception: The source's ``state_dict`` raises, or its result cannot be copied.
        """
        ledger = self._ledger
        state = self._from_here(self._upcoming()) if ledger is None else ledger.state()
        return state.to_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], /
    ) -> None:
        """Make the next iteration resume where :meth:`state_dict` was called.

        The iteration gives the rest of that epoch, each sample once. With ``output_order="input"`` the
        samples have the same order as without the interruption, and with an equal batch size they are in the
        same batches. A sequence or sampler is read by index, a source with ``load_state_dict`` gets its
        state, and any other iterable is read from its start again without processing the items that are done.
        The seed is taken from the state.

        Args:
            state_dict: The result of :meth:`state_dict` of a loader with an equal source. Or a sequence of
                the states of all ranks, saved at one time: then the rest of the epoch is redistributed over
                the current ranks, each sample once. If the last round is too short for all ranks, the
                sampler's ``uneven`` applies. The order stays that of the epoch, and each sample keeps its
                ``rng``.

        Raises:
            TypeError: The state is not a mapping; or states of several ranks are given, but the source is not
                distributed by a sampler of :mod:`spdl_media.source`, ``ImageFolder`` or ``Shards``.
            ValueError: The state is invalid, or is that of a source of another length or kind, or of a
                sampler with another seed, rank or world size. Of several states, one is missing, or they are
                of different epochs.
        """
        source = self._source
        state = loaded_state(state_dict, self._fresh(0), source.source, source.length_in)
        # The remaining samples must draw from the same seed as those that are done.
        vars(self)["seed"] = state.seed
        self._pin(state)

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The last 1,000 failures of the latest iteration."""
        return () if self._pipeline is None else self._pipeline.failures

    @property
    def failure_counts(self) -> Mapping[str, int]:
        """Number of inputs that failed in the latest iteration, by the name of the stage."""
        return {} if self._pipeline is None else self._pipeline.failure_counts

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Rows of the last batch that have a replacement, because their items failed (see ``on_error``).

        Thread safety: read it in the thread that iterates, before the next batch.
        """
        return tuple(
            Replaced(row, tag[0], tag.item, tag.by)
            for row, tag in enumerate(self._tags)
            if isinstance(tag, StandInTag)
        )

    def statistics(self) -> PipelineStatistics:
        """Return the statistics of the latest iteration.

        Raises:
            PipelineError: There was no iteration yet, or no batch of an asynchronous one was requested yet.
        """
        if self._pipeline is None:
            raise PipelineError("a loader has no statistics before its first iteration")
        return self._pipeline.statistics()

    def _fresh(self, epoch: int) -> State:
        source = self._source.source
        return State(epoch, self.seed, source_length=source_length(source), order=order_of(source))

    def _pin(self, state: State) -> None:
        # In this order: the garbage collector may end an unused iterator, which sets back what it pinned.
        self._ledger, self._pinned = None, state

    def _upcoming(self) -> State:
        if self._pinned is not None:
            return self._pinned
        chosen = self._source.chosen_by_user()
        return self._fresh(self._next_epoch if chosen is None else chosen)

    def _from_here(self, start: State) -> State:
        """Add the current state of a source that is an iterator, because it cannot be iterated again."""
        if self._pinned is not None or not self._source.is_rewindable or start.snapshot is not None:
            return start
        return replace(start, snapshot=self._source.snapshot(0))

    def _begin(self) -> State:
        """Return the state from which the next iteration starts, after earlier ones have stopped reading."""
        start = self._upcoming()
        source = self._source.source
        iterator, is_rewindable = iterator_in(source), self._source.is_rewindable
        if iterator is not None and not is_rewindable and self._pipeline is not None:
            inner = "" if iterator is source else f" over a {type(iterator).__name__}"
            once = f"the source, a {type(source).__name__}{inner}, can be read only once"
            if not start.is_fresh:
                raise ValueError(
                    f"{once}, and was read already; make it and the loader again to resume from a state"
                )
            warn_caller(
                f"{once}: another iteration gives the rest of it, without the items in progress when the "
                "last one stopped. Pass a list, or an object whose __iter__ starts again",
                UserWarning,
            )
        # After the checks, because from here on earlier iterations cannot read the source.
        self._source.take_turn()
        # An iterator was read ahead of what was handed out; its state rewinds it to there.
        return self._ledger.state() if is_rewindable and self._ledger is not None else start


_ARGUMENTS = frozenset(DataLoader.__dataclass_fields__)
# Lightning maps over the fields of a dataclass that it sends to processes, and sets them.
del DataLoader.__dataclass_fields__


def _origin() -> str:
    """Return a name for the loader being created: the line of the program, and a number for that line.

    A number alone would not match between ranks, because one rank may create more loaders than others.
    """
    frame, _ = outer_frame()
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    # A line in a loop creates several loaders, in the same order on all ranks.
    # In one step, because other threads may create loaders at the same line.
    return f"{line}/{next(_loaders.setdefault(line, count(1)))}"
