"""Where the chain splits into paths, and where paths or pipelines come together."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

from spdl_media.pipeline.engine.calls import CallSpec, ThreadCalls
from spdl_media.pipeline.engine.failing import FailureDesk
from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.engine.node import Inlet, Upstream
from spdl_media.pipeline.engine.workers import Threads
from spdl_media.pipeline.failures import short_repr

__all__ = ("Join", "Switch", "routed")


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
