"""Calls on a Dask cluster, through the executor that Dask's own client gives.

A future of that executor is never completed if its result cannot be pickled, or not be unpickled here, and
whoever waits for it would wait for ever. So items, results and the function cross as bytes, pickled and
unpickled by the code of this module.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from spdl_media._optional import require
from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.executors import AwaitedPool, name_of
from spdl_media.pipeline.failures import MissingPackageError, PipelineError
from spdl_media.pipeline.stages import PipeConfig

__all__ = ("DaskPool", "is_dask")

# By name, so that nothing is imported for it. Dask has executors of threads, too.
_DASK = ("distributed.cfexecutor", "ClientExecutor")


def is_dask(executor: object) -> bool:
    """Whether an executor hands calls to a Dask cluster."""
    kinds = type(executor).__mro__
    return any((kind.__module__, kind.__name__) == _DASK for kind in kinds)


class DaskPool(AwaitedPool):
    """The executor of a stage whose calls run on a Dask cluster.

    Raises:
        PipelineError: The function cannot be pickled.
    """

    remedy = (
        "The client was closed, or its scheduler does not answer. Make a new client and run the pipeline "
        "anew; a DataLoader goes on from its state_dict()."
    )

    def __init__(self, hub: Hub, stage: PipeConfig) -> None:
        super().__init__(hub, stage)
        try:
            self._sent = _Sent(stage.fn)
        except Exception as error:  # whatever __reduce__ of a user's object raises
            raise PipelineError(
                f"The function of stage {stage.name!r} cannot be pickled, which a Dask cluster needs: "
                f"{error}. Have it open files and make locks when it is first called"
            ) from error

    async def call(self, item: Any) -> Any:
        """Call the function of the stage on the cluster.

        Raises:
            PoolBroken: The client takes no more items.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        data: bytes = await self._outcome(self._sent, _dumps(item))
        return pickle.loads(data)  # noqa: S301  # from a worker of the user's own cluster

    def _submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            # Each item is a call: Dask would take equal ones for one task, and cancel all with the first.
            return self._executor.submit(fn, *args, pure=False)
        except Exception as error:
            # Bytes alone are sent, so nothing is wrong with the item.
            raise self._broken(error) from error


class _Sent:
    """A function as the cluster gets it: pickled once, with a name for Dask's dashboard."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.__name__ = name_of(fn)
        self._fn = _dumps(fn)

    def __call__(self, item: bytes) -> bytes:
        return _dumps(_unpickled(self._fn)(pickle.loads(item)))  # noqa: S301  # from the user's client


@functools.lru_cache(maxsize=16)
def _unpickled(fn: bytes) -> Callable[[Any], Any]:
    """Unpickle a function once in each worker, so that an object keeps what it has opened."""
    unpickled: Callable[[Any], Any] = pickle.loads(fn)  # noqa: S301  # from the user's client
    return unpickled


def _dumps(value: object) -> bytes:
    # Plain pickle cannot send what a notebook or script defines.
    cloudpickle = require("cloudpickle", "a Dask cluster", MissingPackageError)
    data: bytes = cloudpickle.dumps(value)
    return data
