"""The pool of slots, with stand-ins for slots. Needs no DALI."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spdl_media.cuda import dali
from spdl_media.cuda.dali import SlotPool


class FakeSlot:
    """A slot that counts the threads that use it."""

    def __init__(self) -> None:
        self.inside = 0

    @contextmanager
    def active(self) -> Iterator[FakeSlot]:
        self.inside += 1
        try:
            yield self
        finally:
            self.inside -= 1


def pool_of(made: list[FakeSlot], limit: int) -> SlotPool:
    def make() -> Any:
        made.append(FakeSlot())
        return made[-1]

    return SlotPool(make, limit)


def test_one_thread_needs_one_slot() -> None:
    made: list[FakeSlot] = []
    pool = pool_of(made, 4)
    for _ in range(5):
        with pool.borrow() as slot:
            assert slot is made[0]
    assert len(made) == 1


def test_slot_comes_back_after_an_error() -> None:
    made: list[FakeSlot] = []
    pool = pool_of(made, 1)
    with pytest.raises(KeyError, match="in the block"), pool.borrow():
        raise KeyError("in the block")
    with pool.borrow() as slot:
        assert slot is made[0]
        assert made[0].inside == 1


def test_slot_used_last_is_lent_first() -> None:
    made: list[FakeSlot] = []
    pool = pool_of(made, 2)
    with pool.borrow():
        with pool.borrow() as second:
            pass
        with pool.borrow() as again:
            assert again is second


def test_threads_wait_while_all_slots_are_lent() -> None:
    made: list[FakeSlot] = []
    pool = pool_of(made, 2)
    full, release = threading.Barrier(3), threading.Event()
    done = threading.Semaphore(0)
    most: list[int] = []

    def hold() -> None:
        with pool.borrow() as slot:
            full.wait(20)
            release.wait(20)
            most.append(slot.inside)  # type: ignore[attr-defined]

    def late() -> None:
        with pool.borrow() as slot:
            most.append(slot.inside)  # type: ignore[attr-defined]
        done.release()

    threads = [threading.Thread(target=target) for target in (hold, hold, late, late, late)]
    for thread in threads[:2]:
        thread.start()
    full.wait(20)
    for thread in threads[2:]:
        thread.start()
    assert not done.acquire(blocking=False)
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(made) == 2
    assert most == [1] * 5


def test_slot_that_cannot_be_made_takes_no_place() -> None:
    failures = iter([RuntimeError("no memory for a slot")])

    def make() -> Any:
        for failure in failures:
            raise failure
        return FakeSlot()

    pool = SlotPool(make, 1)
    with pytest.raises(RuntimeError, match="no memory for a slot"), pool.borrow():
        pass
    with pool.borrow() as slot:
        assert isinstance(slot, FakeSlot)


def test_forked_child_starts_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, abandoned = pool_of([], 1), []
    pools: dict[int | None, SlotPool] = {None: pool}
    monkeypatch.setattr(dali, "_POOLS", pools)
    monkeypatch.setattr(dali, "_ABANDONED", abandoned)
    dali._after_fork()
    assert pools == {}
    # Destroying them would wait for threads that the child does not have.
    assert abandoned == [{None: pool}]


@pytest.mark.parametrize(("index", "name"), [(None, "the CPU"), (1, "CUDA device 1")])
def test_devices_say_their_names(index: int | None, name: str) -> None:
    assert dali.named(index) == name
