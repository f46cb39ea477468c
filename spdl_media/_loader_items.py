"""Items of a DataLoader: their random numbers, and the stages in which they are read and preprocessed."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import numpy as np

from spdl_media._checks import check_int
from spdl_media._loader_policies import StandIns, is_final
from spdl_media._loader_stages import One, Tagged, stage_of
from spdl_media._resume import Ledger
from spdl_media.pipeline import PipeConfig
from spdl_media.pipeline.executors import ExecutorConfig, kind_of, name_of, refuse_coroutine
from spdl_media.samplers import Purpose, random_bits

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node


def sample_rng(seed: int, epoch: int, position: int) -> np.random.Generator:
    """Make the random number generator of one item in one epoch.

    A :class:`DataLoader` passes it to a preprocessor with a parameter named ``rng``. Its numbers
    depend neither on threads, nor on other items, nor on a stop and resume.

    Args:
        seed: Seed of the loader.
        epoch: The epoch, counted from 0.
        position: Position of the item in the epoch, counted from 0. If the source knows its rank (a
            distributed sampler, or a :class:`~spdl_media.source.MapIterator` over one), the
            position among the items of all ranks, ``rank + world_size * position``, so that no two
            ranks get the same numbers.

    Returns:
        NumPy's generator, over PCG64.

    Raises:
        ValueError: One of the three is negative.

    Thread safety: each call gives a generator of its own.
    """
    key = (check_int("epoch", epoch, at_least=0), check_int("position", position, at_least=0))
    return np.random.Generator(
        random_bits(Purpose.SAMPLE, check_int("seed", seed, at_least=0), *key)
    )


@dataclass(frozen=True)
class RngMaker:
    """Makes the generator of the item at a position.

    Attributes:
        key: Seed of the loader, and epoch.
        place: Gives the place of the item in the order of all ranks.
    """

    key: tuple[int, int]
    place: Callable[[int], int]

    def __call__(self, position: int) -> np.random.Generator:
        return sample_rng(*self.key, self.place(position))


@dataclass(frozen=True)
class ItemCall:
    """Reads an item of a dataset and preprocesses it. Can be pickled if its parts can.

    Attributes:
        fetch: Gives the value for a key.
        preprocessor: Makes the sample of the value.
        rng_key: Seed and epoch, if the preprocessor takes ``rng``.
    """

    fetch: Callable[[Any], Any] | None
    preprocessor: Callable[..., Any] | None
    rng_key: tuple[int, int] | None

    def __call__(self, request: tuple[Any, int]) -> Any:
        """Make the sample of an item, with the random numbers of a place."""
        value, place = request
        for step in self._steps(place):
            value = step(value)
            if value is None:
                break
        return value

    def _steps(self, place: int) -> Iterator[Callable[[Any], Any]]:
        if self.fetch is not None:
            yield self.fetch
        if (fn := self.preprocessor) is not None:
            yield fn if self.rng_key is None else partial(fn, rng=sample_rng(*self.rng_key, place))


class AsyncItemCall(ItemCall):
    """The same where one of the two is a coroutine function; the other one runs in a thread."""

    async def __call__(self, request: tuple[Any, int]) -> Any:
        value, place = request
        for step in self._steps(place):
            is_async = kind_of(step) == "async"
            value = await (step(value) if is_async else asyncio.to_thread(step, value))
            if value is None:
                break
        return value


class SampleCache:
    """Keeps samples in memory, pickled: so their bytes are known, and who changes a sample changes no other.

    Attributes:
        max_bytes: What they may take together. What comes later is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._samples: dict[Any, bytes] = {}
        self._lock = threading.Lock()

    async def sample(self, item: Any, make: Callable[[], Awaitable[Any]]) -> Any:
        """Return the sample of an item, made if it is not kept.

        Raises:
            TypeError: The item cannot be hashed.
            Exception: The sample cannot be made or pickled.
        """
        try:
            kept = self._samples.get(item)
        except TypeError as error:
            raise TypeError(
                f"cache= keeps samples by their items, and one is no key: {error}. Take paths or indices, as "
                "of MapIterator(dataset)"
            ) from error
        if kept is not None:
            return pickle.loads(kept)  # noqa: S301  # our own
        sample = await make()
        if self._num_bytes < self.max_bytes:
            data = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
            with self._lock:
                if item not in self._samples and self._num_bytes + len(data) <= self.max_bytes:
                    self._num_bytes += len(data)
                    self._samples[item] = data
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a loader begins with an empty one.
        return SampleCache, (self.max_bytes,)


@dataclass
class ItemStages:
    """Makes the stages in which items are read and preprocessed.

    Attributes:
        fetch: Gives the value for a key.
        preprocessor: Makes the sample of the value.
        make_rng: Makes the argument ``rng`` of the preprocessor.
        ledger: Of the run.
        stand_ins: Finds what stands in for an item.
        executor: Where the calls are made.
        cache: Keeps samples for later epochs.
    """

    fetch: Callable[[Any], Any] | None
    preprocessor: Callable[..., Any] | None
    make_rng: RngMaker | None
    ledger: Ledger
    stand_ins: StandIns | None
    executor: Executor | ExecutorConfig | None
    cache: SampleCache | None

    def make(self, parallel: Callable[[Callable[..., Any]], dict[str, Any]]) -> list[PipeConfig]:
        """Make the stages: one, if stand-ins, an executor or a cache need the call in one piece.

        Args:
            parallel: Gives the options of a stage by its function.
        """
        fetch, preprocessor, ledger = self.fetch, self.preprocessor, self.ledger
        if self.stand_ins or self.executor or self.cache:
            return [self._whole(parallel)] if fetch or preprocessor else []
        stages = []
        if fetch is not None:
            # In the threads: to read an item of a dataset is often the dear part.
            stages.append(PipeConfig(stage_of(fetch, ledger), "dataset", **parallel(fetch)))
        if preprocessor is not None:
            stage = stage_of(preprocessor, ledger, self.make_rng)
            stages.append(PipeConfig(stage, name_of(preprocessor), **parallel(preprocessor)))
        return stages

    def _whole(self, parallel: Callable[[Callable[..., Any]], dict[str, Any]]) -> PipeConfig:
        fetch, preprocessor, make_rng = self.fetch, self.preprocessor, self.make_rng
        kinds = [kind_of(step) for step in (fetch, preprocessor) if step is not None]
        item_call = AsyncItemCall if "async" in kinds else ItemCall
        rng_key = None if make_rng is None else make_rng.key
        call: Callable[..., Any] = item_call(fetch, preprocessor, rng_key)
        options = parallel(call)
        is_bare = self.executor is not None and fetch is None and make_rng is None
        if is_bare:
            assert preprocessor is not None
            # A sub-interpreter could not import the class above.
            call = preprocessor
        if workers := _num_workers(self.executor):
            options["concurrency"] = workers
        name = "dataset" if preprocessor is None else name_of(preprocessor)
        around = partial(self._around, is_bare=is_bare)
        return PipeConfig(call, name, executor=self.executor, around=around, **options)

    def _around(
        self, call: Callable[..., Any], node: Node, *, is_bare: bool
    ) -> Callable[[Tagged], Any]:
        """Make what this process calls around a call that an executor may make elsewhere."""
        is_async = kind_of(call) == "async"
        stand_ins, place = self.stand_ins, self.make_rng.place if self.make_rng else int

        async def make(item: Any, position: int) -> Any:
            result = call(item if is_bare else (item, place(position)))
            if is_async:
                return await result
            if isinstance(result, CoroutineType):
                refuse_coroutine(result, name_of(self.preprocessor or call))
            return result

        async def load(item: Any, position: int) -> Any:
            if self.cache is None:
                return await make(item, position)
            return await self.cache.sample(item, partial(make, item, position))

        async def stage(tagged: Tagged) -> Tagged | None:
            with One(tagged, self.ledger) as one:
                try:
                    return one.tag(await load(tagged.value, tagged.tags[0][0]))
                except BaseException as error:
                    if stand_ins is None or is_final(error):
                        raise
                    failure = error
                # Not while the error is handled, which else were the context of all that follow.
                return await stand_ins.find(tagged, failure, load, node) or one.tag(None)

        return stage if is_async else lambda tagged: _finished(stage(tagged))


def _num_workers(executor: object) -> int:
    """How many calls an executor makes at a time, if it says so."""
    return (getattr(executor, "max_workers", None) or 0) * getattr(executor, "num_threads", 1)


def aggregator_stage(
    aggregator: Callable[[Any], Any],
    ledger: Ledger,
    executor: Executor | ExecutorConfig | None,
    parallel: dict[str, Any],
) -> PipeConfig:
    """Make the stage that makes a batch of samples, with the options for its function."""
    name = name_of(aggregator)
    if executor is None:
        return PipeConfig(stage_of(aggregator, ledger), name, **parallel)
    parallel["concurrency"] = _num_workers(executor)
    return PipeConfig(
        aggregator,
        name,
        executor=executor,
        around=lambda call, _: stage_of(call, ledger),
        **parallel,
    )


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")
