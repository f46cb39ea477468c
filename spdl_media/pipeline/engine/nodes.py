"""Stages of one result, or none, for each item; groups of items; where the chain splits and joins."""

from __future__ import annotations

import asyncio
import copy
import operator
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from types import CoroutineType
from typing import Any, Protocol, SupportsIndex

from spdl_media.pipeline.engine.hub import Hub, Inlet, Node, Slot, wake
from spdl_media.pipeline.engine.workers import Threads, WorkerGroup
from spdl_media.pipeline.executors import refuse_coroutine
from spdl_media.pipeline.failures import PipelineError, PoolBroken, describe, short_repr
from spdl_media.pipeline.stages import Aggregator

__all__ = (
    "Aggregate",
    "AsyncCalls",
    "CallSpec",
    "CustomAggregate",
    "Join",
    "Stage",
    "Switch",
    "ThreadCalls",
    "call_in_pool",
    "limited",
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


class Stage(Node):
    """A stage that calls a function for each item, whoever makes the calls.

    An item is *queued* when accepted, *running* while its call is made, *settled* when the loop has
    heard of the outcome, and *released* when its failure, if any, has been reported.

    Attributes:
        todo: The slots that are queued.
        window: Where results keep the order of the items: the slots that have not left, in order.
    """

    def __init__(self, hub: Hub, spec: CallSpec, slot_type: type[Slot] = Slot) -> None:
        super().__init__(hub, spec.name, spec.concurrency)
        self.spec = spec
        self._slot_type = slot_type
        # The slack is what threads work on while the loop sleeps.
        self.capacity = spec.concurrency + spec.slack
        self.todo: deque[Any] = deque()
        self.window: deque[Any] | None = deque() if spec.ordered else None

    def accept(self, item: Any) -> None:
        """Take an item for which there is room."""
        # By a local name: CPython 3.11 specializes this form alone, and it runs for each item.
        slot_type = self._slot_type
        slot = slot_type(self, item)
        self.held += 1
        if self.window is not None:
            self.window.append(slot)
        self.todo.append(slot)
        if not self.touched:
            self.hub.touch(self)

    def settle(self, slot: Any) -> None:
        """Hear of the outcome of a call."""
        self.counters.count_call(slot.queued_at, slot.started_at, slot.ended_at)
        if slot.error is None:
            self.release(slot)
        else:
            self.hub.events.item_failed(slot, self.counters, self.release)

    def release(self, slot: Any) -> None:
        """Let the result of a settled slot leave, now or in its turn."""
        self.hub.touch(self)
        window = self.window
        if window is None:
            self.leave(slot)
            return
        slot.settled = True
        while window and window[0].settled:
            self.leave(window.popleft())

    def leave(self, slot: Slot) -> None:
        """Hand the result of a slot on, if there is one."""
        # Not the other way round: the call of a slot that was given up may have come back since.
        if slot.error is not None:
            self.held -= 1
        elif slot.result is None:
            self.held -= 1
            self.counters.dropped += 1
        else:
            self.out.append(slot.result)


class ThreadCalls(Stage):
    """A synchronous function, called by threads of this process."""

    def __init__(self, hub: Hub, spec: CallSpec, threads: Threads) -> None:
        super().__init__(hub, spec)
        self.group = WorkerGroup(
            hub, threads, spec.concurrency, self._call, spec.timeout, self._settle_overdue
        )
        self.todo = self.group.todo
        self._fn = spec.fn

    def dispatch(self) -> None:
        """Have threads take the slots that are queued."""
        if self.todo:
            self.group.dispatch()

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


class AsyncCalls(Stage):
    """An asynchronous function, awaited by as many tasks as calls may run at once."""

    def __init__(self, hub: Hub, spec: CallSpec) -> None:
        super().__init__(hub, spec)
        self._idle: deque[asyncio.Future[None]] = deque()
        self._num_tasks = 0
        self._running: dict[asyncio.Task[None], Slot] = {}

    def dispatch(self) -> None:
        """Wake tasks, or start them."""
        for _ in range(min(len(self.todo), self.spec.concurrency)):
            if self._idle:
                wake(self._idle.popleft())
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
        todo, fn, timeout = self.todo, self.spec.fn, self.spec.timeout
        # One item after another: a function that never waits then costs no more than its call.
        while not self.hub.closed:
            while not todo:
                self._idle.append(idle := self.hub.loop.create_future())
                await idle
            slot = todo.popleft()
            self._running[task] = slot
            slot.started_at = perf_counter()
            call = None
            try:
                call = fn(slot.item)
                slot.result = await (limited(call, timeout, "the call") if timeout else call)
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
            del slot, call


async def limited(awaitable: Awaitable[Any], seconds: float, what: str) -> Any:
    """Await something for a time at most.

    Raises:
        TimeoutError: It took longer.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{what} took longer than timeout={seconds} s") from error


class _Pool(Protocol):
    """Where calls are made that leave this interpreter, or go to an executor of the user's."""

    def submit(self, item: Any) -> Future[Any]:
        """Call the stage's function with ``item``. Never blocks."""


def call_in_pool(hub: Hub, name: str, pool: _Pool) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """Make an asynchronous function of one that a pool calls for the stage ``name``."""

    async def call(item: Any) -> Any:
        future = pool.submit(item)
        done = hub.loop.create_future()
        # Not asyncio.wrap_future(): the hub wakes the loop once for many results.
        future.add_done_callback(lambda _: hub.post(wake, done))
        try:
            await done
        finally:
            # It took too long, or the run is over. After its end this does nothing.
            future.cancel()
        # Not result(), which raises: the frames in the traceback would keep the item alive.
        error = future.exception()
        # No item can be processed any more, so the run fails, not the item alone.
        if isinstance(error, PoolBroken):
            hub.events.fail(name, str(error), error)
        if error is not None:
            raise error
        if isinstance(result := future.result(), CoroutineType):
            refuse_coroutine(result, name)
        return result

    return call


class Aggregate(Node):
    """Makes lists of a number of items. On the loop, where it costs less than any hand-off would.

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
    """Stands in for an item when an aggregator is asked for what is left over."""

    def __repr__(self) -> str:
        return "<no item: flush() at the end>"


FLUSH: Any = _Flush()


class CustomAggregate(ThreadCalls):
    """Groups as an aggregator of the user's wants them. One thread at a time works on a copy of it."""

    def __init__(
        self,
        hub: Hub,
        spec: CallSpec,
        threads: Threads,
        aggregator: Aggregator,
        *,
        drop_last: bool,
    ) -> None:
        super().__init__(hub, spec, threads)
        try:
            # An aggregator has state, and one definition serves many runs.
            own = copy.deepcopy(aggregator)
        except Exception as error:  # whatever the user's __deepcopy__ or __reduce__ raises
            raise PipelineError(
                f"The aggregator of stage {spec.name!r} cannot be copied, and each run works on a copy of "
                f"its own: {describe(error)}. Give it a method __deepcopy__(memo) that returns a new one"
            ) from error
        self._fn = lambda item: own.flush() if item is FLUSH else own.accumulate(item)
        self._drop_last = drop_last
        self._flushed = False

    def room(self) -> int:
        """How many items fit; 0 while a group waits for the next stage."""
        return 0 if self.out else super().room()

    def is_drained(self) -> bool:
        """Have what is left over made into a group, once an epoch."""
        self._flushed = not self._flushed
        if self._flushed:
            self.accept(FLUSH)
            self.dispatch()
        return not self._flushed

    def leave(self, slot: Slot) -> None:
        """Hand a group on, unless it is the incomplete one and to be dropped."""
        if slot.item is FLUSH and self._drop_last:
            slot.result = None
        super().leave(slot)


class Switch(ThreadCalls):
    """Calls the router for each item, in a thread, and hands the item to the path that it names.

    The first item waits for room in its path, and those behind it with it.
    """

    def __init__(self, hub: Hub, spec: CallSpec, threads: Threads, num_paths: int) -> None:
        super().__init__(hub, spec, threads)
        self.num_sent = [0] * num_paths

    def hand_on(self) -> None:
        """Give items to their paths, until one of them has to wait."""
        out = self.out
        while out:
            index, item = out[0]
            path = self.outlets[index]
            if path.room() <= 0:
                return
            out.popleft()
            path.accept(item)
            self.held -= 1
            self.counters.outputs += 1
            self.num_sent[index] += 1


def routed(
    router: Callable[[Any], SupportsIndex], num_paths: int
) -> Callable[[Any], tuple[int, Any]]:
    """Make a function from an item to the index of an existing path and the item itself."""

    def call(item: Any) -> tuple[int, Any]:
        returned = router(item)
        try:
            index = operator.index(returned)  # of NumPy's integers, too
        except TypeError:
            # Refused below, with what was returned.
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
        self.inlets: list[_JoinInlet] = []

    def connect(self, inlet: Inlet) -> None:
        """Link the next node."""
        self.next = inlet
        inlet.upstream = self

    def add_inlet(self) -> Inlet:
        """One more way in."""
        self.inlets.append(inlet := _JoinInlet(self))
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


class _JoinInlet:
    """One of the ways into a join."""

    def __init__(self, join: Join) -> None:
        self.upstream: Any
        self.ended = False
        self._join = join

    def room(self) -> int:
        return 0 if self.ended else self._join.next.room()

    def accept(self, item: Any) -> None:
        self._join.next.accept(item)

    def end_epoch(self) -> None:
        self.ended = True
        self._join.end_epoch_if_all_have()
