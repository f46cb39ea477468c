"""What became of items that failed: counted exactly, the last of them kept, limits watched."""

from __future__ import annotations

import math
import reprlib
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from spdl_media.pipeline.stats import StageCounters

__all__ = ("DEFAULT_MAX_FAILURES", "FailureRecord")

#: The part of the items that may fail unless ``max_failures`` says otherwise. Data sets have damaged
#: items, and the rest is still worth having; when more than half fails, the code is at fault.
DEFAULT_MAX_FAILURES = 0.5

KEPT_RECORDS = 1000
# A rate of fewer calls says little; at the end of an epoch it is looked at whatever their number.
MIN_CALLS_FOR_RATE = 100


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """An item that failed in a stage.

    Attributes:
        stage: Name of the stage.
        input: The stage's input, as a shortened ``repr``.
        exception: What was raised. Its traceback is taken off, so it keeps no memory of the call alive.
        traceback: The traceback, as text.
    """

    stage: str
    input: str
    exception: BaseException
    traceback: str


def record_failure(
    stage: str, item: object, error: BaseException, where: str = ""
) -> FailureRecord:
    """Describe a failure. The exception loses its traceback, and so do those that led to it.

    Args:
        stage: Name of the stage.
        item: The stage's input.
        error: What was raised.
        where: Stands before the traceback, for an error that was made rather than raised.
    """
    text = where + "".join(traceback.format_exception(error))
    _drop_frames(error)
    return FailureRecord(stage=stage, input=short_repr(item), exception=error, traceback=text)


def short_repr(item: object) -> str:
    """A ``repr`` of at most a hundred characters or so, cheap for big bytes, and never an error."""
    if isinstance(item, bytes | bytearray | memoryview):
        return f"<{type(item).__name__} of length {len(item)}>"
    try:
        return _SHORT.repr(item)
    except Exception as error:  # noqa: BLE001  # a repr of the caller's own may raise anything
        return f"<{type(item).__name__}, whose repr raises {type(error).__name__}>"


def _make_short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short


_SHORT = _make_short()


def _drop_frames(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        error_or_none = waiting.pop()
        if error_or_none is None or id(error_or_none) in seen:
            continue
        seen.add(id(error_or_none))
        error_or_none.__traceback__ = None
        waiting += [error_or_none.__cause__, error_or_none.__context__]
        if isinstance(error_or_none, BaseExceptionGroup):
            waiting += error_or_none.exceptions


@dataclass(frozen=True, slots=True)
class FailureExcess:
    """More failures than are allowed.

    Attributes:
        record: The last of them.
        rule: How many there were and how many are allowed, as text.
    """

    record: FailureRecord
    rule: str

    def __str__(self) -> str:
        error = self.record.exception
        return (
            f"Stage {self.record.stage!r} failed too often: {self.rule}. "
            f"The last was {type(error).__name__}: {error} (input {self.record.input})"
        )


class FailureLog:
    """Keeps the last failures, and says when there are too many. Written on the event loop alone.

    Args:
        limit: For all stages together that have no limit of their own: a number of failures, or the
            part of the items that the stages together may lose.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = DEFAULT_MAX_FAILURES if limit is None else limit
        self.records: deque[FailureRecord] = deque(maxlen=KEPT_RECORDS)
        self._last: dict[str, FailureRecord] = {}
        self._counters: dict[str, StageCounters] = {}
        self._limits: dict[str, float] = {}

    def watch(self, name: str, counters: StageCounters, limit: float | None = None) -> None:
        """Have the failures that ``counters`` count included, under a limit of the stage's own if any."""
        self._counters[name] = counters
        if limit is not None:
            self._limits[name] = limit

    def counts(self) -> dict[str, int]:
        """How many items failed in each stage."""
        return {name: counters.failures for name, counters in self._counters.items()}

    def note(self, record: FailureRecord) -> FailureExcess | None:
        """Keep a failure that has been counted; say so if it is one too many."""
        self.records.append(record)
        self._last[record.stage] = record
        return self._excess(record.stage)

    def at_end(self) -> FailureExcess | None:
        """Whether too much of an epoch that has just ended was lost, at whatever number of items."""
        found = (self._excess(name, at_end=True) for name in self._by_failures())
        return next(filter(None, found), None)

    def _excess(self, name: str, *, at_end: bool = False) -> FailureExcess | None:
        own = self._limits.get(name)
        stages = self._common if own is None else {name: self._counters[name]}
        rule = _broken_rule(stages, self.limit if own is None else own, at_end=at_end)
        return None if rule is None else FailureExcess(self._last[name], rule)

    def _by_failures(self) -> list[str]:
        """The stages that had failures, the worst first: it is the one to name."""
        failed = [name for name, counters in self._counters.items() if counters.failures]
        return sorted(failed, key=lambda name: -self._counters[name].failures)

    @property
    def _common(self) -> Mapping[str, StageCounters]:
        if not self._limits:
            return self._counters
        return {name: one for name, one in self._counters.items() if name not in self._limits}


def _broken_rule(stages: Mapping[str, StageCounters], limit: float, *, at_end: bool) -> str | None:
    failures = sum(one.failures for one in stages.values())
    calls = max(one.calls for one in stages.values())
    if isinstance(limit, int) or math.isinf(limit):
        if failures <= limit:
            return None
        return f"{failures} items failed, and max_failures={limit} allows {limit}"
    if calls < MIN_CALLS_FOR_RATE and not at_end:
        return None
    if (lost := _part_lost(stages)) <= limit:
        return None
    return f"{failures} failures lost {lost:.0%} of the items, and max_failures={limit} allows {limit:.0%}"


def _part_lost(stages: Mapping[str, StageCounters]) -> float:
    """The part of the items that does not survive all stages.

    Not all failures over all calls: with three stages that would be a third when the last of them
    fails always, and above one when a stage makes many items of each.
    """
    survive = math.prod(1 - one.failures / one.calls for one in stages.values() if one.calls)
    return 1 - survive
