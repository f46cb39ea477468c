"""Items of a DataLoader: their random numbers, and the stages in which they are read and preprocessed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import numpy as np

from spdl_media._checks import check_int
from spdl_media._loader_policies import Policy, StandInTag, is_final
from spdl_media._loader_stages import One, Tagged, stage_of
from spdl_media._resume import Ledger
from spdl_media.pipeline import PipeConfig
from spdl_media.pipeline.executors import kind_of, name_of, refuse_coroutine
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
        seed: Of the loader.
        epoch: The epoch.
        place: Gives the place of the item in the order of all ranks.
    """

    seed: int
    epoch: int
    place: Callable[[int], int]

    def __call__(self, position: int) -> np.random.Generator:
        return sample_rng(self.seed, self.epoch, self.place(position))


@dataclass(frozen=True)
class ItemCall:
    """Reads an item of a dataset and preprocesses it. Can be pickled if its parts can.

    Attributes:
        fetch: Gives the value for a key.
        preprocessor: Makes the sample of the value.
        make_rng: Makes the argument ``rng`` of the preprocessor, if it takes one.
    """

    fetch: Callable[[Any], Any] | None
    preprocessor: Callable[..., Any] | None
    make_rng: RngMaker | None

    def __call__(self, request: tuple[Any, int]) -> Any:
        """Make the sample of an item, with the random numbers of a position."""
        value, position = request
        for step in self._steps(position):
            value = step(value)
            if isinstance(value, CoroutineType):
                refuse_coroutine(value, name_of(step))
            if value is None:
                break
        return value

    def _steps(self, position: int) -> Iterator[Callable[[Any], Any]]:
        if self.fetch is not None:
            yield self.fetch
        if self.preprocessor is not None:
            make_rng, fn = self.make_rng, self.preprocessor
            yield fn if make_rng is None else partial(fn, rng=make_rng(position))


class AsyncItemCall(ItemCall):
    """The same where one of the two is a coroutine function; the other one runs in a thread."""

    async def __call__(self, request: tuple[Any, int]) -> Any:
        value, position = request
        for step in self._steps(position):
            is_async = kind_of(step) == "async"
            value = await (step(value) if is_async else asyncio.to_thread(step, value))
            if value is None:
                break
        return value


def item_call(
    fetch: Callable[[Any], Any] | None,
    preprocessor: Callable[..., Any] | None,
    make_rng: RngMaker | None,
) -> ItemCall:
    """Make one call of the two, a coroutine function if one of them is."""
    kinds = [kind_of(step) for step in (fetch, preprocessor) if step is not None]
    return (AsyncItemCall if "async" in kinds else ItemCall)(fetch, preprocessor, make_rng)


def item_stages(
    fetch: Callable[[Any], Any] | None,
    preprocessor: Callable[..., Any] | None,
    make_rng: RngMaker | None,
    ledger: Ledger,
    policy: Policy | None,
    parallel: Callable[[Callable[..., Any]], dict[str, Any]],
) -> Iterator[PipeConfig]:
    """Make the stages in which items are read and preprocessed; one, if something may stand in for an item.

    Args:
        fetch: Gives the value for a key.
        preprocessor: Makes the sample of the value.
        make_rng: Makes the argument ``rng`` of the preprocessor.
        ledger: Of the run.
        policy: Finds what stands in.
        parallel: Gives the options of a stage by its function.
    """
    if policy is not None and (fetch or preprocessor):
        call = item_call(fetch, preprocessor, make_rng)
        name = "dataset" if preprocessor is None else name_of(preprocessor)
        yield PipeConfig(call, name, around=item_stage(ledger, policy), **parallel(call))
        return
    if fetch is not None:
        # In the threads: to read an item of a dataset is often the dear part.
        yield PipeConfig(stage_of(fetch, ledger), "dataset", **parallel(fetch))
    if preprocessor is not None:
        stage = stage_of(preprocessor, ledger, make_rng)
        yield PipeConfig(stage, name_of(preprocessor), **parallel(preprocessor))


def item_stage(ledger: Ledger, policy: Policy | None) -> Callable[[Callable[..., Any], Node], Any]:
    """Make what a pipeline calls around an :class:`ItemCall`, which an executor may make elsewhere."""

    def around(call: Callable[..., Any], node: Node) -> Callable[[Tagged], Any]:
        is_async = kind_of(call) == "async"

        async def load(item: Any, position: int) -> Any:
            result = call((item, position))
            return await result if is_async else result

        async def stage(tagged: Tagged) -> Tagged | None:
            with One(tagged, ledger) as one:
                try:
                    return one.tag(await load(tagged.value, tagged.tags[0][0]))
                except BaseException as error:
                    if policy is None or is_final(error):
                        raise
                    failure = error
                # Not while the error is handled, which else were the context of all that follow.
                stand_in = await policy.stand_in(tagged, failure, load, node)
                if stand_in is None:
                    return one.tag(None)
                return Tagged(stand_in[0], (_stand_in_tag(tagged, stand_in[1]),))

        return stage if is_async else lambda tagged: _finished(stage(tagged))

    return around


def _stand_in_tag(tagged: Tagged, by: int | None) -> StandInTag:
    tag = StandInTag(tagged.tags[0])
    tag.item, tag.by = tagged.value, by
    return tag


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")
