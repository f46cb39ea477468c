"""The iterations of a DataLoader: batches of a running pipeline, for a loop or a task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from spdl_media._resume import Ledger
from spdl_media.arrays import to_jax, to_numpy, to_torch
from spdl_media.loader_stages import tags_of, value_of
from spdl_media.pipeline import Pipeline, PipelineFailure, PipelineStopped
from spdl_media.pipeline.pipeline import deferred_interrupt

__all__ = ("AsyncEpoch", "Epoch")

CONVERTERS = {"torch": to_torch, "numpy": to_numpy, "jax": to_jax}


class _Iteration:
    """Hands out what a pipeline of a loader gives."""

    # Nothing is to be closed if __init__ fails.
    _is_over = True

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        self._loader, self._pipeline, self._ledger = loader, pipeline, ledger
        self._timeout = loader.timeout
        self._convert = None if loader.to is None else CONVERTERS[loader.to]
        self._is_over = False

    def _converted(self, tagged: Any) -> Any:
        value = value_of(tagged)
        if self._convert is not None:
            # In the consumer's thread, whose stream is to wait for arrays on a device.
            (value,) = self._convert((value,))
        self._loader._tags = tags = tags_of(tagged)
        self._ledger.settle(tags)
        return value

    def _complete(self) -> None:
        # The state is now the beginning of the next epoch, unless that has begun.
        if self._loader._ledger is self._ledger:
            self._loader._ledger = None
        self.close()

    def close(self) -> None:
        """Stop loading. Batches that were not handed out are not done."""
        self._is_over = True
        self._ledger.close()

    def __del__(self) -> None:
        # A loop that is left by "break" drops its iterator without closing it.
        if not self._is_over:
            with deferred_interrupt():
                self.close()


class Epoch(_Iteration, Iterator[Any]):
    """An iteration under way. Its pipeline ends with it."""

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        super().__init__(loader, pipeline, ledger)
        pipeline.start()

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        with contextlib.suppress(PipelineStopped):
            try:
                return self._converted(self._pipeline.get_item(timeout=self._timeout))
            except (TimeoutError, PipelineStopped):
                # After a time-out the batch is still being made, and another call may get it.
                raise
            except PipelineFailure as failure:
                self.close()
                # Tracebacks are to show the user's lines.
                raise failure.with_traceback(None) from None
            except BaseException:
                self.close()
                raise
        # Not while the error is handled, which would stand in the traceback of a Ctrl-C.
        self._complete()
        raise StopIteration

    def close(self) -> None:
        """Stop loading, and wait for the threads."""
        super().close()
        self._pipeline.stop()


class AsyncEpoch(_Iteration, AsyncIterator[Any]):
    """The same for a task. Its pipeline starts with the first batch that is asked for."""

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        super().__init__(loader, pipeline, ledger)
        # Stops the pipeline when it ends or is dropped, without blocking the event loop.
        self._items = aiter(pipeline)

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(self._timeout):
                tagged = await anext(self._items)
            return self._converted(tagged)
        except (TimeoutError, asyncio.CancelledError):
            # As in Epoch: the batch is still being made, and another call may get it.
            raise
        except StopAsyncIteration:
            self._complete()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop loading."""
        super().close()
        del self._items
