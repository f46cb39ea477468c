"""Stages that make one result, or none, of each item, groups of items, paths and merges."""

from __future__ import annotations

import asyncio
import copy
import operator
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from time import perf_counter
from types import CoroutineType
from typing import Any, Protocol, SupportsIndex

from spdl_media.pipeline.engine.hub import Hub, Inlet, Node, Slot, Upstream
from spdl_media.pipeline.engine.workers import Crew, FailureDesk, Threads
from spdl_media.pipeline.failures import PipelineError, PoolBroken, describe, short_repr
from spdl_media.pipeline.functions import TaskHook, refuse_coroutine
from spdl_media.pipeline.stages import Aggregator

__all__ = (
    "Aggregate",
    "AsyncCalls",
    "CallSpec",
    "CustomAggregate",
    "Join",
    "PoolCalls",
    "Switch",
    "ThreadCalls",
    "routed",
)


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What a stage calls, and how.

    Attributes:
        fn: The function or generator function, hooks included.
        name: Name of the stage.
        concurrency: How many calls may run at once.
        slack: How many items may be in the stage beyond those.
        ordered: Whether results leave in the order of the items.
        timeout: Seconds an item may take.
    """

    fn: Callable[[Any], Any]
    name: str
    concurrency: int = 1
    slack: int = 0
    ordered: bool = False
    timeout: float | None = None


class CallStage(Node):
    """The part of such a stage that does not depend on who makes the calls.

    An item is *queued* when accepted, *running* while its call is made, *settled* when the loop has heard
    of the outcome, and *released* when its result may leave: at once, or, where the order of the input is
    kept, after all items that came before it.
    """

    def __init__(self, hub: Hub, spec: CallSpec, desk: FailureDesk) -> None:
        super().__init__(hub, spec.name, spec.concurrency)
        self.spec = spec
        self.capacity = spec.concurrency + spec.slack
        self._desk = desk
        self._window: deque[Slot] | None = deque() if spec.ordered else None

    def accept(self, item: Any) -> None:
        """Take an item for which there is room."""
        slot = Slot(self, item)
        self.held += 1
        if self._window is not None:
            self._window.append(slot)
        self.enqueue(slot)
        if not self.touched:
            self.hub.touch(self)

    def enqueue(self, slot: Slot) -> None:
        """Put a slot where those who call find it."""
        raise NotImplementedError

    def settle(self, slot: Slot) -> None:
        """Hear of the outcome of a call."""
        self.counters.count_call(slot.queued_at, slot.started_at, slot.ended_at)
        if slot.error is None:
            self._release(slot)
        else:
            self._desk.report(slot, self.counters, self._release)

    def running(self) -> Iterable[Slot]:
        """The slots of calls that are being made, other than by worker threads."""
        return ()

    def _release(self, slot: Slot) -> None:
        self.hub.touch(self)
        window = self._window
        if window is None:
            self._leave(slot)
            return
        slot.settled = True
        while window and window[0].settled:
            self._leave(window.popleft())

    def _leave(self, slot: Slot) -> None:
        # Not the other way round: the call of a slot that was given up may have come back since.
        if slot.error is not None:
            self.held -= 1
        elif slot.result is None:
            self.held -= 1
            self.counters.dropped += 1
        else:
            self.out.append(slot.result)


class ThreadCalls(CallStage):
    """A synchronous function, called by threads of this process."""

    def __init__(self, hub: Hub, spec: CallSpec, desk: FailureDesk, threads: Threads) -> None:
        super().__init__(hub, spec, desk)
        self.crew: Crew[Slot] = Crew(
            hub,
            threads,
            spec.concurrency,
            self._call,
            timeout=spec.timeout,
            on_timeout=self._settle_overdue,
        )
        self.enqueue = self.crew.todo.append  # type: ignore[method-assign, assignment]  # saves a call an item
        self._fn = spec.fn

    def dispatch(self) -> None:
        """Call threads to the items that wait."""
        if self.crew.todo:
            self.crew.dispatch()

    def _call(self, slot: Slot) -> Callable[[Slot], None]:
        try:
            slot.result = result = self._fn(slot.item)
            if result.__class__ is CoroutineType:
                refuse_coroutine(result, self.name)
        # Not even SystemExit may end the thread: the item would never be heard of again.
        except BaseException as error:  # noqa: BLE001
            slot.fail(error)
        slot.ended_at = perf_counter()
        return self.settle

    def _settle_overdue(self, slot: Slot) -> None:
        slot.ended_at = perf_counter()
        self.settle(slot)


class AsyncCalls(CallStage):
    """An asynchronous function, awaited by as many tasks as calls may run at once.

    A task takes one item after another. A function that never waits so costs no more than its call.
    """

    def __init__(self, hub: Hub, spec: CallSpec, desk: FailureDesk) -> None:
        super().__init__(hub, spec, desk)
        self._todo: deque[Slot] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._num_tasks = 0
        self._running: dict[asyncio.Task[None], Slot] = {}

    def enqueue(self, slot: Slot) -> None:
        """Put a slot where the tasks find it."""
        self._todo.append(slot)

    def dispatch(self) -> None:
        """Wake tasks, or start them."""
        todo, idle = self._todo, self._idle
        for _ in range(min(len(todo), self.spec.concurrency)):
            if idle:
                if not (waiting := idle.popleft()).done():
                    waiting.set_result(None)
            elif self._num_tasks < self.spec.concurrency:
                self._num_tasks += 1
                self.hub.spawn(self._work(), self.name)
            else:
                break

    def running(self) -> Iterable[Slot]:
        """The slots of calls that are being awaited."""
        return list(self._running.values())

    async def _work(self) -> None:
        task: Any = asyncio.current_task()
        todo = self._todo
        while not self.hub.closed:
            while not todo:
                self._idle.append(idle := self.hub.loop.create_future())
                await idle
            slot = todo.popleft()
            self._running[task] = slot
            slot.started_at = perf_counter()
            try:
                slot.result = await self._call(slot.item)
            except BaseException as error:  # as for threads
                if self.hub.closed:
                    raise
                # A cancellation that the run did not ask for is the function's own affair.
                task.uncancel()
                slot.fail(error)
            slot.ended_at = perf_counter()
            del self._running[task]
            self.settle(slot)
            # The task may wait for its next slot for long, and would keep this one alive.
            del slot

    async def _call(self, item: Any) -> Any:
        timeout = self.spec.timeout
        if timeout is None:
            return await self.spec.fn(item)
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self.spec.fn(item)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the call took longer than timeout={timeout} s") from error


class _Pool(Protocol):
    """Where calls are made that leave this interpreter, or go to an executor of the caller's."""

    def submit(self, item: Any) -> Future[Any]:
        """Call the stage's function with ``item``. Never blocks."""


class PoolCalls(CallStage):
    """A synchronous function, called by an executor. No more calls are given to it than may run at once."""

    def __init__(
        self, hub: Hub, spec: CallSpec, desk: FailureDesk, pool: _Pool, hook: TaskHook | None
    ) -> None:
        super().__init__(hub, spec, desk)
        self._pool = pool
        self._hook = hook
        self._todo: deque[Slot] = deque()
        self._calls: dict[Slot, asyncio.TimerHandle | None] = {}

    def enqueue(self, slot: Slot) -> None:
        """Put a slot where ``dispatch`` finds it."""
        self._todo.append(slot)

    def dispatch(self) -> None:
        """Give items to the pool."""
        while self._todo and len(self._calls) < self.spec.concurrency and not self.hub.closed:
            self._submit(self._todo.popleft())

    def running(self) -> Iterable[Slot]:
        """The slots of calls that the pool has."""
        return list(self._calls)

    def _submit(self, slot: Slot) -> None:
        slot.started_at = perf_counter()
        try:
            if self._hook is not None:
                self._hook.task_start(slot.item)
            future = self._pool.submit(slot.item)
        # A hook, or an executor that does not take this item: even SystemExit fails the item, not the loop.
        except BaseException as error:  # noqa: BLE001
            self._calls[slot] = None
            self._finish(slot, None, error)
            return
        timeout = self.spec.timeout
        self._calls[slot] = (
            None
            if timeout is None
            else self.hub.loop.call_later(timeout, self._expire, slot, future)
        )
        future.add_done_callback(lambda future: self.hub.post(self._receive, (slot, future)))

    def _receive(self, outcome: tuple[Slot, Future[Any]]) -> None:
        slot, future = outcome
        if slot not in self._calls:
            return  # it had taken too long
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        if isinstance(error, PoolBroken):
            self.hub.events.fail(self.name, str(error), error)
            return
        result = None if error is not None else future.result()
        if isinstance(result, CoroutineType):
            try:
                refuse_coroutine(result, self.name)
            except TypeError as refusal:
                error = refusal
        self._finish(slot, result, error)

    def _expire(self, slot: Slot, future: Future[Any]) -> None:
        future.cancel()
        timeout = self.spec.timeout
        self._finish(slot, None, TimeoutError(f"the call took longer than timeout={timeout} s"))

    def _finish(self, slot: Slot, result: Any, error: BaseException | None) -> None:
        slot.ended_at = perf_counter()
        if (timer := self._calls.pop(slot)) is not None:
            timer.cancel()
        try:
            if self._hook is not None:
                self._hook.task_end(slot.item, slot.ended_at - slot.started_at, error)
        except BaseException as hook_error:  # noqa: BLE001  # as everywhere, it fails the item
            error = hook_error
        slot.result = result
        if error is not None:
            slot.fail(error)
        self.settle(slot)


class Aggregate(Node):
    """Makes lists of a number of items. On the loop, for it costs less than any hand-off would.

    It has room for one group, complete or not.
    """

    def __init__(self, hub: Hub, name: str, size: int, *, drop_last: bool) -> None:
        super().__init__(hub, name)
        self._size = size
        self._drop_last = drop_last
        self._group: list[Any] = []

    def room(self) -> int:
        """How many items the group lacks; 0 while a complete one waits for the next stage."""
        return 0 if self.ending or self.out else self._size - len(self._group)

    def accept(self, item: Any) -> None:
        """Add an item to the group."""
        self._group.append(item)
        if len(self._group) == self._size:
            self._complete()

    def is_drained(self) -> bool:
        """Complete the group that is left, or drop it."""
        if self._group and self._drop_last:
            self.counters.dropped += len(self._group)
            self._group = []
        elif self._group:
            self._complete()
        return not self.out

    def _complete(self) -> None:
        self.held += 1
        self.counters.calls += 1
        self.out.append(self._group)
        self._group = []
        self.hub.touch(self)


class _Flush:
    """Stands in for an item when what is left over is asked for."""

    def __repr__(self) -> str:
        return "<no item: flush() at the end>"


FLUSH: Any = _Flush()


def _copied(aggregator: Aggregator, name: str) -> Aggregator:
    try:
        return copy.deepcopy(aggregator)
    except Exception as error:  # whatever the caller's __deepcopy__ or __reduce__ raises
        raise PipelineError(
            f"The aggregator of stage {name!r} cannot be copied, and each run works on a copy of its own: "
            f"{describe(error)}. Give it a method __deepcopy__(memo) that returns a new one"
        ) from error


class CustomAggregate(ThreadCalls):
    """Groups as an object of the caller's wants them. One thread at a time works on a copy of it."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        aggregator: Aggregator,
        *,
        drop_last: bool,
        slack: int,
        desk: FailureDesk,
        threads: Threads,
    ) -> None:
        own = _copied(aggregator, name)

        def call(item: Any) -> Any:
            return own.flush() if item is FLUSH else own.accumulate(item)

        spec = CallSpec(call, name, slack=slack, ordered=True)
        super().__init__(hub, spec, desk, threads)
        self._drop_last = drop_last
        self._flushed = False

    def room(self) -> int:
        """How many items fit; 0 while a group waits for the next stage."""
        return 0 if self.out else super().room()

    def is_drained(self) -> bool:
        """Have what is left over made into a group, once an epoch."""
        if not self._flushed:
            self._flushed = True
            self.accept(FLUSH)
            self.dispatch()
            return False
        self._flushed = False
        return True

    def _leave(self, slot: Any) -> None:
        if slot.item is FLUSH and self._drop_last:
            slot.result = None
        super()._leave(slot)


class Switch(ThreadCalls):
    """Calls the router for each item, in a thread, and hands the item to the path that it names.

    The first item waits for room in its path, and those behind it with it.
    """

    def __init__(
        self,
        hub: Hub,
        name: str,
        router: Callable[[Any], SupportsIndex],
        num_paths: int,
        slack: int,
        desk: FailureDesk,
        threads: Threads,
    ) -> None:
        spec = CallSpec(routed(router, num_paths), name, slack=slack, ordered=True)
        super().__init__(hub, spec, desk, threads)
        self.paths: list[Inlet] = []
        self._sent = [0] * num_paths
        self.next = _AllPaths(self.paths)

    def hand_on(self) -> None:
        """Give items to their paths, until one of them has to wait."""
        out = self.out
        while out:
            index, item = out[0]
            path = self.paths[index]
            if path.room() <= 0:
                return
            out.popleft()
            path.accept(item)
            self.held -= 1
            self.counters.outputs += 1
            self._sent[index] += 1

    def num_sent(self, index: int) -> int:
        """How many items have gone down a path."""
        return self._sent[index]


class _AllPaths:
    """The paths behind a switch, as far as the end of an epoch concerns all of them."""

    def __init__(self, paths: list[Inlet]) -> None:
        self._paths = paths

    def room(self) -> int:
        return min(path.room() for path in self._paths)

    def accept(self, item: Any) -> None:
        raise NotImplementedError("an item goes down one path")

    def end_epoch(self) -> None:
        for path in self._paths:
            path.end_epoch()


def routed(
    router: Callable[[Any], SupportsIndex], num_paths: int
) -> Callable[[Any], tuple[int, Any]]:
    """A function from an item to the index of its path, which there is, and the item itself."""

    def call(item: Any) -> tuple[int, Any]:
        returned = router(item)
        try:
            index = operator.index(returned)  # of NumPy's integers, too
        except TypeError:
            index = -1
        if not 0 <= index < num_paths:
            raise IndexError(
                f"the router returned {short_repr(returned)}; it must return the index of one of the "
                f"{num_paths} paths, from 0 to {num_paths - 1}"
            )
        return index, item

    return call


class Join:
    """Hands on what comes in by several inlets, as it comes.

    An inlet whose epoch has ended has no room until the epochs of all of them have.
    """

    def __init__(self) -> None:
        self.next: Inlet
        self.inlets: list[JoinInlet] = []

    def add_inlet(self) -> JoinInlet:
        """A new way in. Its ``upstream`` is to be set."""
        self.inlets.append(inlet := JoinInlet(self))
        return inlet

    def retry(self) -> None:
        """Let all inlets hand on; another goes first each time, so that none is left behind."""
        self.inlets.append(self.inlets.pop(0))
        for inlet in self.inlets:
            inlet.upstream.retry()

    def end_epoch_if_all_have(self) -> None:
        """End the epoch of what follows when no inlet is left in it."""
        if all(inlet.ended for inlet in self.inlets):
            for inlet in self.inlets:
                inlet.ended = False
            self.next.end_epoch()


class JoinInlet:
    """One of the ways into a join."""

    def __init__(self, join: Join) -> None:
        self.upstream: Upstream
        self.ended = False
        self._join = join

    def room(self) -> int:
        """What the node behind the join has room for, 0 after the end of this way's epoch."""
        return 0 if self.ended else self._join.next.room()

    def accept(self, item: Any) -> None:
        """Hand an item on."""
        self._join.next.accept(item)

    def end_epoch(self) -> None:
        """No more items come this way in this epoch."""
        self.ended = True
        self._join.end_epoch_if_all_have()
