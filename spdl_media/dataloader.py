"""A loader in the style of PyTorch over a pipeline: source, preprocessor, batches, aggregator, transfer."""

from __future__ import annotations

from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar

from spdl_media._checks import answers_unknown, check_choice, check_int, warn_caller
from spdl_media._resume import Ledger, State, Tag, loaded_state
from spdl_media.epochs import iterator_in, order_of
from spdl_media.loader_arguments import (
    TORCH_NAMES,
    OnError,
    check_arguments,
    checked_source,
    compare_ranks,
    origin_of_loader,
)
from spdl_media.loader_ends import CONVERTERS, AsyncEpoch, Epoch, SharedSource
from spdl_media.loader_items import Replaced, SampleCache, StandInTag, sample_rng
from spdl_media.loader_stages import LoaderStages
from spdl_media.pipeline import (
    FailureRecord,
    OutputOrder,
    Pipeline,
    PipelineBuilder,
    PipelineStatistics,
)
from spdl_media.pipeline.executors import ExecutorConfig, kind_of
from spdl_media.pipeline.failures import FailureLimit
from spdl_media.pipeline.stages import source_length
from spdl_media.source import MapIterator, SupportsGetItem

__all__ = ("DataLoader", "MapIterator", "Pipeline", "PipelineBuilder", "Replaced", "sample_rng")

E = TypeVar("E", Epoch, AsyncEpoch)


@answers_unknown(TORCH_NAMES)
@dataclass(eq=False, repr=False)
class DataLoader:
    """Loads, preprocesses and batches the items of a source in threads.

    ::

        src -> preprocessor -> batches -> aggregator -> transfer_fn -> buffer -> iteration
               (num_threads)              (num_threads) (one thread)   (buffer_size)

    Each iteration is an *epoch*. It begins to load when ``iter()`` is called, and its threads end
    when it is complete, stopped early, or garbage collected. ``None`` from a preprocessor,
    aggregator or transfer drops the item. What fails is dropped and recorded in :attr:`failures`;
    see ``max_failures``.

    Args:
        src: The items: an iterable, which is iterated in a thread of its own, an async iterable, or a
            map-style dataset with a length. What can be iterated both ways is iterated asynchronously.
            A dataset, and that of a :class:`~spdl_media.source.MapIterator`, is read in the threads,
            and where it has ``None`` the item is dropped. One with ``set_epoch`` (the
            samplers of :mod:`spdl_media.source`) is told the epoch.
        preprocessor: A function, coroutine function, generator function or async generator function
            from an item to a sample, or several. If it has a parameter named ``rng``, it gets
            :func:`sample_rng` of the item there. Without one, items are samples.
        batch_size: Samples of a batch. ``None``: samples come one by one.
        drop_last: Drop a last batch that is smaller.
        aggregator: A function or coroutine function from the list of samples of a batch to what the
            loader gives; without ``batch_size``, from each sample. Several calls run at a time.
            Without one, batches are lists, or with ``to=`` what :func:`~spdl_media.collate` makes.
        transfer_fn: Applied last, such as a copy to a GPU: in a thread of its own, one batch after
            the other.
        to: ``"torch"``, ``"numpy"`` or ``"jax"``: buffers and arrays in what iteration gives become arrays of
            that library, as by :func:`~spdl_media.to_torch`, :func:`~spdl_media.to_numpy` or
            :func:`~spdl_media.to_jax`. On a device it is the consumer's stream that waits for them.
        buffer_size: Finished batches that may wait.
        num_threads: Threads, and the calls of the preprocessor and of the aggregator that may run
            at a time. ``None``: as many as the cores that this process may use, and at least 8 of coroutines.
            More of them help where files are slow to read, such as over a network.
        timeout: Seconds to wait for a batch before a ``TimeoutError``. Iteration may continue after
            it. ``None``: no limit.
        output_order: ``"completion"``: whatever is ready first. ``"input"``: in the order of the
            source.
        max_failures: How many items (``int``), or which part of them (``float`` or ``Fraction`` up to 1), may
            fail before the epoch ends with a :class:`~spdl_media.pipeline.PipelineFailure`. ``None``:
            half of them, so that an epoch in which everything fails is an error.
            ``float("inf")`` or -1: any number.
        on_failure: Called with the record of each failure and the input that failed, in a thread of
            its own. An exception from it ends the epoch.
        on_error: What becomes of an item that fails in the preprocessor or the source's dataset. It counts
            as a failure in each case. ``"skip"`` drops it. ``"raise"`` ends the epoch, as
            ``max_failures=0`` does. ``"replace"`` puts a good sample of the same rank's share in its place,
            see :attr:`replaced`; the source must have positions, as sequences, samplers and datasets have.
            A function ``f(item, error)`` makes the sample, of the item as the source gave it (the key, for
            a dataset), or drops it by ``None``; what it raises is the failure of the item instead.
        executor: Where the preprocessor runs and the source's dataset is read, instead of in threads: a
            description such as :class:`~spdl_media.pipeline.ProcessPoolExecutorConfig`, of which each epoch
            makes its own, or a ``concurrent.futures.Executor`` of yours. They must be plain functions.
        num_processes: Processes that do so instead, each in ``num_threads`` threads (``None``: the cores,
            shared out). Without preprocessor and dataset they run the aggregator.
        cache: Bytes of samples, pickled, to keep in memory for later epochs, by items as the source gave
            them, which must be hashable. Not for preprocessors that are generators, need ``rng``, or are an
            ``ImageRecipe`` that draws.
        seed: Seed of :func:`sample_rng`.

    Raises:
        TypeError: An argument of the wrong type, such as a ``transfer_fn`` that is a coroutine
            function.
        ValueError: A number that is too small, an unknown order or policy, ``drop_last`` without
            ``batch_size``, or an ``on_error`` that does not go with ``max_failures`` or the preprocessor.
        MissingDependencyError: The library that ``to`` names is not installed.
        PipelineError: The preprocessor cannot be pickled, and ``executor`` needs that.

    Iterate by ``for`` or ``async for``. A loader can be pickled if its source and functions can; the copy
    goes on where the loader is.

    Thread safety: an iterator serves one thread at a time; the loader itself is used by one thread.

    Example:
        >>> loader = DataLoader(range(10), preprocessor=str, batch_size=4, output_order="input")
        >>> list(loader)
        [['0', '1', '2', '3'], ['4', '5', '6', '7'], ['8', '9']]
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
        # `src` stays as it was given; a dataset is read through a MapIterator.
        self._source = SharedSource(checked_source(self.src))
        check_arguments(self, self._source.fetch)
        if self.to is not None:
            check_choice("to", self.to, tuple(CONVERTERS))
            # A missing package raises here, before anything is loaded.
            CONVERTERS[self.to](())
        self.seed = check_int("seed", self.seed, at_least=0)
        # Of the loader, not of an iteration: later epochs are to find what earlier ones made.
        self._samples = None if self.cache is None else SampleCache(self.cache)
        # Of the next iteration, if the user chose it here; else its epoch.
        self._pinned: State | None = None
        self._next_epoch = 0
        # Of the latest iteration, until that is complete.
        self._ledger: Ledger | None = None
        # Of the latest iteration.
        self._pipeline: Pipeline[Any] | None = None
        # Of what iteration has handed out last.
        self._tags: Sequence[Tag] = ()
        # Together they name an iteration alike on all ranks.
        self._origin, self._num_iterations = origin_of_loader(), 0

    def __len__(self) -> int:
        """The batches of an epoch in which nothing is dropped or fails (without ``batch_size``, the samples).

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
        # Rounded up without floats, which are not exact for large numbers.
        return length // size if self.drop_last else -(-length // size)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on with that of :meth:`load_state_dict`.

        Raises:
            TimeoutError: The source is an iterator, or has a state, and is still in a read of the last
                iteration. Another try may follow when that has ended.
            ValueError: The source can be read once, and was read; or ``on_error="replace"`` needs positions,
                which it does not have; or ranks of ``torch.distributed`` differ in its seed, length or epoch.
        """
        return self._iterate(Epoch)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Do as :meth:`__iter__` for a task of any event loop, which goes on with others meanwhile.

        A task that is cancelled while it waits for a batch, such as by ``asyncio.timeout``, loses none: the
        iterator may be asked again.

        Raises:
            TimeoutError: As in :meth:`__iter__`.
            ValueError: As in :meth:`__iter__`.
        """
        return self._iterate(AsyncEpoch)

    def _iterate(self, kind: type[E]) -> E:
        start = self._begin()
        # Counted even if the comparison fails, so that all ranks go on with the same number.
        self._num_iterations += 1
        key = f"{self._origin}/{self._num_iterations}"
        # Before the pipeline starts: a rank that differs should load nothing.
        compare_ranks(self, self._source.source, start.epoch, key)
        ledger = Ledger(self._from_here(start))
        self._pipeline = LoaderStages(self, start, ledger).pipeline()
        # Only now: had the pipeline failed, the state would still be that of the last iteration.
        self._ledger = ledger
        self._pinned, self._next_epoch = None, start.epoch + 1
        return kind(self, self._pipeline, ledger)

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the place in the epoch: a copy in another process goes on from there."""
        # A pipeline has threads, and the ledger belongs to it.
        state = {**self.__dict__, "_ledger": None, "_pipeline": None, "_tags": ()}
        if self._ledger is not None:
            state["_pinned"] = self._ledger.state()
        return state

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration.

        Raises:
            Exception: The source's own ``epoch`` or ``__len__`` raises.
        """
        return self._upcoming().epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins at its start.

        Raises:
            ValueError: The epoch is negative.
        """
        self._pin(self._fresh(check_int("epoch", epoch, at_least=0)))

    def state_dict(self) -> dict[str, Any]:
        """Return what is done, so that a loader made the same way can resume, in any process.

        A batch is done when iteration has handed it out, not before. After the end of an epoch, the
        state is the beginning of the next one.

        Returns:
            Plain numbers, lists and dictionaries, which can be written as JSON; under ``"source"``,
            what ``state_dict`` of a source that has one returned, copied.

        Thread safety: call it in the thread that iterates.

        Raises:
            Exception: The source's own ``state_dict`` raises, or what it returns cannot be copied.
        """
        ledger = self._ledger
        state = self._from_here(self._upcoming()) if ledger is None else ledger.state()
        return state.to_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], /
    ) -> None:
        """Make the next iteration resume where :meth:`state_dict` was called.

        It gives the rest of that epoch, each sample once; with ``output_order="input"`` in the same
        order, and in the same batches if the batch size is the same. A sequence or sampler is
        indexed, a source with ``load_state_dict`` gets its state, and any other iterable is read
        from its start again without processing the items that are done. The seed is taken from the
        state.

        Args:
            state_dict: What :meth:`state_dict` of a loader with an equal source returned. Or a sequence of
                those of all ranks, saved at one time: what is left of the epoch is shared out anew over the
                ranks that there are now, each sample once. The sampler treats a last round that is too short
                for all ranks as ever. The order stays that of the epoch; ``rng`` of a sample stays the same.

        Raises:
            TypeError: It is no mapping, or states of several ranks are loaded for a source that is not shared
                out by a sampler of :mod:`spdl_media.source`, ``ImageFolder`` or ``Shards``.
            ValueError: It is no such state, or that of a source of another length or kind, or of a sampler
                with another seed, rank or world size. Of several, one is missing, or they are of different
                epochs.
        """
        state = loaded_state(state_dict, self._fresh(0), self._source.source)
        # Random numbers of the rest must be those of the samples that are done.
        self.seed = state.seed
        self._pin(state)

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The last 1,000 failures of the latest iteration."""
        return () if self._pipeline is None else self._pipeline.failures

    @property
    def failure_counts(self) -> Mapping[str, int]:
        """How many inputs failed in the latest iteration, by name of the stage."""
        return {} if self._pipeline is None else self._pipeline.failure_counts

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The rows of the batch that iteration gave last whose own items failed (see ``on_error``).

        Ask in the thread that iterates, before the next batch.
        """
        return tuple(
            Replaced(row, tag[0], tag.item, tag.by)
            for row, tag in enumerate(self._tags)
            if isinstance(tag, StandInTag)
        )

    def statistics(self) -> PipelineStatistics | None:
        """Return the statistics of the latest iteration; ``None`` before the first one."""
        return None if self._pipeline is None else self._pipeline.statistics()

    def _fresh(self, epoch: int) -> State:
        source = self._source.source
        return State(epoch, self.seed, source_length=source_length(source), order=order_of(source))

    def _pin(self, state: State) -> None:
        self._pinned, self._ledger = state, None

    def _upcoming(self) -> State:
        if self._pinned is not None:
            return self._pinned
        chosen = self._source.chosen_by_user()
        return self._fresh(self._next_epoch if chosen is None else chosen)

    def _from_here(self, start: State) -> State:
        """Add where an iterator is now: it has no start to which a state without it could lead back."""
        if self._pinned is not None or not self._source.leads_back or start.snapshot is not None:
            return start
        return replace(start, snapshot=self._source.snapshot(0))

    def _begin(self) -> State:
        """Return where the next iteration starts, once no former one reads the source any more."""
        start = self._upcoming()
        source = self._source.source
        iterator, leads_back = iterator_in(source), self._source.leads_back
        if iterator is not None and not leads_back and self._pipeline is not None:
            name = type(source).__name__
            if iterator is not source:
                name += f" over a {type(iterator).__name__}"
            if not start.is_fresh:
                raise ValueError(
                    f"the source, a {name}, can be read once, and was read already; make it and the "
                    "loader anew to go on from a state"
                )
            warn_caller(
                f"the source, a {name}, can be read once: another iteration gives what is left of it, "
                "without what was under way when the last one stopped. Pass a list, or an object whose "
                "__iter__ starts anew",
                UserWarning,
            )
        # After the checks: from here on, former iterations read nothing.
        self._source.take_turn()
        # An iterator was read further than what was handed out; its state leads back to there.
        return self._ledger.state() if leads_back and self._ledger is not None else start
