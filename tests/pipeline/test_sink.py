"""The buffer between the engine and its consumers, tested without an engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spdl_media.pipeline.engine import ends
from spdl_media.pipeline.engine.ends import END_OF_EPOCH, Sink
from spdl_media.pipeline.failures import PipelineStopped

WAIT = 60


class FakeHub:
    """A hub that calls posted functions at once."""

    closed = False
    is_quick = True

    def __init__(self) -> None:
        self.events = self
        self.posted = 0
        # Items count as quick, whatever pace the sink measures.
        self.quick_until = math.inf

    def post(self, handler: Callable[[Any], None], argument: Any) -> None:
        self.posted += 1
        handler(argument)

    def epoch_ended(self) -> None:
        pass

    def retry(self) -> None:
        pass


def make_sink(buffer_size: int = 2, slack: int = 3, *, continuous: bool = False) -> Sink:
    hub: Any = FakeHub()
    sink = Sink(hub, buffer_size, continuous=continuous)
    sink.slack = slack
    sink.before.append(hub)
    return sink


def posted(sink: Sink) -> int:
    hub: Any = sink.hub
    return int(hub.posted)


def test_items_are_taken_without_waking_the_loop_unless_it_has_stalled() -> None:
    sink = make_sink(buffer_size=2, slack=3)
    for item in range(5):
        assert sink.room() == 5 - item
        sink.accept(item)

    assert sink.take() == 0
    assert posted(sink) == 0
    sink.accept(5)
    assert sink.room() == 0
    # The loop is woken once, when only the two items of the buffer are left.
    counts = []
    for item in range(1, 6):
        assert sink.take() == item
        counts.append(posted(sink))
    assert counts == [0, 0, 1, 1, 1]


def test_statistics_of_a_part_of_the_time_are_of_that_alone() -> None:
    sink = make_sink(buffer_size=9)
    for item in range(4):
        sink.accept(item)
    before = sink.statistics(2.0)
    assert (before.number, before.rate, before.occupancy) == (4, 2.0, (0 + 1 + 2 + 3) / 4)

    while sink.take() != 3:
        pass
    for item in range(2):
        sink.accept(item)

    later = sink.statistics(2.0, before)
    assert (later.number, later.rate, later.occupancy) == (2, 1.0, (0 + 1) / 2)
    nothing = sink.statistics(2.0, sink.statistics(4.0))
    assert (nothing.number, nothing.rate, nothing.occupancy) == (0, 0.0, 0.0)


def test_a_buffer_of_one_without_slack_wakes_the_loop_when_it_is_empty() -> None:
    sink = make_sink(buffer_size=1, slack=0)
    sink.accept(0)
    assert sink.room() == 0
    assert sink.take() == 0
    assert posted(sink) == 1


def test_a_consumer_that_was_woken_in_vain_wakes_the_next() -> None:
    """The first waiting consumer is woken for an item, and gives up at the same moment."""
    sink = make_sink()
    woken: list[str] = []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    sink._waiters.extend([first, second])
    sink.accept(0)
    assert woken == ["first"]
    sink._leave(first)
    assert woken == ["first", "second"]


def test_a_consumer_that_was_not_woken_just_leaves() -> None:
    sink = make_sink()
    woken: list[str] = []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    sink._waiters.extend([first, second])
    sink._leave(first)
    sink.accept(0)
    assert woken == ["second"]


def test_the_end_of_an_epoch_is_seen_by_all() -> None:
    sink = make_sink()
    sink.end()

    assert [sink.take(), sink.take()] == [END_OF_EPOCH, END_OF_EPOCH]
    sink.begin_epoch()
    with pytest.raises(TimeoutError):
        sink.take(timeout=0)


def test_ends_of_continuous_epochs_do_not_pile_up() -> None:
    sink = make_sink(continuous=True)
    sink.end()
    assert sink.room() > 0
    sink.end()
    assert sink.room() == 0
    assert sink.take() is END_OF_EPOCH
    assert sink.room() > 0


@pytest.mark.parametrize("keep", [False, True])
def test_closing_ends_all_waits(keep: bool) -> None:
    sink = make_sink()
    outcomes: list[BaseException] = []

    def consume() -> None:
        try:
            sink.take()
        except PipelineStopped as error:
            outcomes.append(error)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(sink._waiters) < 3:
        pass
    sink.close(lambda: PipelineStopped("over"), keep=keep)
    for thread in threads:
        thread.join(WAIT)

    assert [str(error) for error in outcomes] == ["over"] * 3


def test_what_is_kept_is_taken_before_the_reason() -> None:
    sink = make_sink()
    sink.accept(1)
    sink.close(lambda: PipelineStopped("over"), keep=True)

    assert sink.take() == 1
    with pytest.raises(PipelineStopped, match="over"):
        sink.take()


def test_the_waits_of_consumers_that_end_at_once_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = make_sink()
    together = threading.Barrier(2)

    def read_clock() -> float:
        together.wait(WAIT)
        return 10.0

    def wait() -> None:
        sink._waiting_since.append(5.0)
        sink._end_wait(5.0)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(ends, "perf_counter", read_clock)
        for wait_of_one in [pool.submit(wait) for _ in range(2)]:
            wait_of_one.result()
    assert sink.statistics(1.0).waited == 10.0
