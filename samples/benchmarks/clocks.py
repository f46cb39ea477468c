"""Shared functions of the benchmarks that measure threads: rates, and two threads over one."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from figures import Spread, alternating, spread

Call = Callable[[], object]

BLOCK = bytes(1 << 20)


def hash_block() -> object:
    """Run C code that does not hold the GIL and uses little memory."""
    return hashlib.sha256(BLOCK).digest()


def rate(
    calls: Sequence[Call], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the calls per second of all threads together, each of which makes at least one.

    Args:
        calls: The call of each thread. It is made once before the start, to create what the thread keeps.
        seconds: Time of the measurement.
        clock: The clock. That of the process's CPU time is valid for one thread.
    """
    rates = [0.0] * len(calls)
    start = threading.Barrier(len(calls))

    def work(index: int, call: Call) -> None:
        call()
        start.wait()
        begin = now = clock()
        count = 0
        while count == 0 or now - begin < seconds:
            call()
            count, now = count + 1, clock()
        rates[index] = count / (now - begin)

    threads = [threading.Thread(target=work, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def cores_are_free(seconds: float) -> bool:
    """Return whether two threads of C code get two cores."""
    one, two = (rate([hash_block] * threads, seconds) for threads in (1, 2))
    return two >= 1.93 * one


def two_over_one(call: Call, rounds: int, seconds: float) -> tuple[dict[str, Spread], int]:
    """Return the rates of one and two threads, their ratio, and the number of rounds that count.

    A round counts if the cores were free before and after it. There are up to four times as many rounds. If
    none counts, the figures are those of all rounds.
    """
    counted: list[tuple[float, float]] = []
    disturbed: list[tuple[float, float]] = []
    free = cores_are_free(min(seconds, 0.08))
    for order in alternating((1, 2), 4 * rounds):
        found = {threads: rate([call] * threads, seconds) for threads in order}
        before, free = free, cores_are_free(min(seconds, 0.08))
        (counted if before and free else disturbed).append((found[1], found[2]))
        if len(counted) == rounds:
            break
    one, two = zip(*(counted or disturbed), strict=True)
    ratios = [second / first for first, second in zip(one, two, strict=True)]
    return {"one": spread(one), "two": spread(two), "ratio": spread(ratios)}, len(counted)


def usable_cores() -> list[int]:
    """Return the cores that this thread may use, or none if the system does not report them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(cores: Sequence[int]) -> None:
    """Restrict this thread to these cores, if the system allows it."""
    if cores:
        os.sched_setaffinity(threading.get_native_id(), cores)


class Beside(threading.Thread):
    """A thread that works on a core of its own, beside the calling thread.

    In its ``with`` block, the calling thread is on another core and Python's switch interval is short. The
    caller starts the thread there; the end of the block waits for it.

    Args:
        work: Does some work and returns its amount.
        seconds: Time of the work.
        interval: The switch interval in seconds.

    Attributes:
        done: Amount of work that is done.
        elapsed: Seconds since the start of the work.
    """

    def __init__(self, work: Callable[[], int], seconds: float, interval: float) -> None:
        super().__init__()
        self._work, self._seconds, self._interval = work, seconds, interval
        self._cores = usable_cores()
        self.done, self.elapsed = 0, 0.0

    def run(self) -> None:
        """Work until the time is over."""
        pin(self._cores[-1:])
        begin = time.perf_counter()
        while self.elapsed < self._seconds:
            self.done += self._work()
            self.elapsed = time.perf_counter() - begin

    def __enter__(self) -> Self:
        self._interval, interval = sys.getswitchinterval(), self._interval
        sys.setswitchinterval(interval)
        pin(self._cores[:1])
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
        sys.setswitchinterval(self._interval)
        pin(self._cores)
