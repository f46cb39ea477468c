"""Errors of a pipeline, records of failed items, and limits on their number."""

from __future__ import annotations

import math
import numbers
import reprlib
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from types import FrameType
from typing import TypeAlias

from spdl_media.pipeline.stats import StageCounters

__all__ = (
    "FailureRecord",
    "MissingPackageError",
    "PipelineError",
    "PipelineFailure",
    "PipelineStopped",
    "PoolBroken",
    "WorkerDied",
)


class PipelineError(RuntimeError):
    """The operation is not valid in the pipeline's current state, or not possible with its definition."""


class PipelineStopped(PipelineError, EOFError):  # noqa: N818  # it tells of no error
    """There are no more items: the epoch has ended, or the pipeline was stopped."""


class WorkerDied(PipelineError):  # noqa: N818  # says what happened
    """The worker process that had the item died (killed, out of memory, crashed)."""


class PoolBroken(PipelineError):  # noqa: N818  # says what happened
    """A pool takes no more items: it cannot be rebuilt, which ends the run, or was shut down."""


class MissingPackageError(PipelineError, ImportError):
    """A required optional package is not installed. The message contains the ``pip`` command."""


class PipelineFailure(ExceptionGroup[Exception], PipelineError):  # noqa: N818  # says what happened
    """The run ended early because a stage or the source failed.

    It is an ``ExceptionGroup`` whose only member, ``exceptions[0]``, is the original exception, so
    ``except*`` catches that by its class. It has no ``__cause__``: a traceback would print it in addition to
    the member.

    Attributes:
        stage: Name of the stage that failed; ``"source"`` for a source.
    """

    stage: str = ""

    def derive(self, excs: Sequence[Exception], /) -> PipelineFailure:  # type: ignore[override]
        """Return this failure with other exceptions. ``except*``, ``split`` and ``subgroup`` call it.

        Raises:
            ValueError: ``excs`` is empty.
        """
        failure = PipelineFailure(self.message, excs)
        failure.stage = self.stage
        return failure


def describe(error: BaseException) -> str:
    """Return class and message of an exception as text, even if its ``__str__`` raises."""
    try:
        message = str(error)
    except BaseException as mute:  # noqa: BLE001  # describing an error must not raise another one
        message = f"<its message raises {type(mute).__name__}>"
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def pipeline_failure(
    message: str, original: BaseException, stage: str, raised_at: str
) -> PipelineFailure:
    """Make the failure of ``stage`` that ``original`` caused. A note has ``raised_at``, unless it is empty.

    A ``SystemExit`` or the like that a stage raises ends the pipeline, not the consumer's program. It is
    wrapped in a :class:`PipelineError`, because an ``ExceptionGroup`` holds no plain ``BaseException``.
    """
    plain = original
    if not isinstance(plain, Exception):
        plain = PipelineError(describe(original))
        plain.__cause__ = original
    failure = PipelineFailure(message, [plain])
    failure.stage = stage
    if raised_at:
        failure.add_note(f"Raised at:\n{raised_at.rstrip()}")
    return failure


#: Default of ``max_failures``. Data sets have damaged items, and the rest is still useful; when more than
#: half of the items fail, the code is probably at fault.
DEFAULT_MAX_FAILURES = 0.5

KEPT_RECORDS = 1000
# Maximum bytes or characters of data that an exception may keep: all records then hold a few megabytes.
KEPT_DATA = 1000
# Fewer calls of a stage give no meaningful rate; at the end of an epoch, the rate of any number is checked.
MIN_CALLS_FOR_RATE = 100
# Enough calls when every call of a stage has failed: then the code or a path is at fault, not the data.
MIN_CALLS_IF_ALL_FAIL = 10

_PACKAGE = __name__.partition(".")[0]


# A number (int) or a rate. It is not numbers.Real, because type checkers do not accept an int for that.
FailureLimit: TypeAlias = float | Fraction


def failure_limit(what: str, value: object) -> float | None:
    """Return a checked limit: a number (``int``), a rate from 0 to 1 (``float``), ``inf``, or ``None``.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is out of range.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{what} must be an int (a number of items), a float or Fraction (a rate) or None, not {value!r}"
        )
    number = int(value) if isinstance(value, numbers.Integral) else float(value)
    # SPDL uses -1 for "any number".
    if number in (-1, math.inf):
        return math.inf
    # Not "number > 1", which NaN would pass.
    if number < 0 or (isinstance(number, float) and not number <= 1):
        raise ValueError(
            f"{what} must be a whole number of at least 0 or a rate from 0.0 to 1.0, not {value}. "
            "-1 or math.inf allows any number."
        )
    return number


@dataclass(frozen=True, slots=True, repr=False)
class FailureRecord:
    """An item that failed in a stage.

    Attributes:
        stage: Name of the stage.
        input: The stage's input, as a shortened ``repr``.
        exception: The exception. To keep no memory of the call alive, its traceback is removed, and so is
            data beyond its message that may be large (``obj`` of an ``AttributeError``, a long ``doc`` or
            ``object`` of an error from parsing or decoding).
        traceback: The traceback, as text.
        raised_at: The lines of the traceback outside of this package, as text.
    """

    stage: str
    input: str
    exception: BaseException
    traceback: str
    raised_at: str = ""

    def __str__(self) -> str:
        text = " ".join(describe(self.exception).split())
        if len(text) > 500:
            text = f"{text[:248]}...{text[-248:]}"
        return f"{self.stage!r}: {text} (input {self.input})"

    def __repr__(self) -> str:
        return f"<FailureRecord of {self}>"


def record_failure(stage: str, item: object, error: BaseException) -> FailureRecord:
    """Make the record of a failure. Traceback and large data of the exception and its causes are removed.

    Args:
        stage: Name of the stage.
        item: The stage's input.
        error: The exception.
    """
    raised_at = ""
    try:
        text = "".join(traceback.format_exception(error))
        # Not by file names: a dataclass makes its __init__ in the file "<string>".
        steps = error.__traceback__
        frames = zip(traceback.walk_tb(steps), traceback.extract_tb(steps), strict=False)
        own = [line for (frame, _), line in frames if not _is_ours(frame)]
        raised_at = "".join(traceback.format_list(own))
    except BaseException:  # noqa: BLE001  # such as an exception class whose notes raise
        text = describe(error)
    _lighten(error)
    return FailureRecord(stage, short_repr(item), error, text, raised_at)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


class _Short(reprlib.Repr):
    """Shortens long values, also within containers. The repr of large bytes would take milliseconds."""

    def repr_bytes(self, data: bytes | bytearray | memoryview, _: int) -> str:
        return f"<{type(data).__name__} of length {len(data)}>"

    repr_bytearray = repr_memoryview = repr_bytes


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 100


def short_repr(item: object) -> str:
    """Return a ``repr`` of about a hundred characters at most. Cheap for large bytes; never raises."""
    try:
        return _SHORT.repr(item)
    except BaseException as error:  # noqa: BLE001  # such as RecursionError in a container of the user's
        return f"<{type(item).__name__}, whose repr raises {type(error).__name__}>"


def _lighten(error: BaseException) -> None:
    """Remove traceback and large data from an exception, its causes and its members."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        error_or_none = waiting.pop()
        if error_or_none is None or id(error_or_none) in seen:
            continue
        seen.add(id(error_or_none))
        # An exception class of the user's may define these attributes otherwise, or be frozen.
        with suppress(Exception):
            error_or_none.__traceback__ = None
            _drop_data(error_or_none)
        waiting += [error_or_none.__cause__, error_or_none.__context__]
        if isinstance(error_or_none, BaseExceptionGroup):
            waiting += error_or_none.exceptions


def _drop_data(error: BaseException) -> None:
    if isinstance(error, AttributeError):
        error.obj = None
    elif isinstance(error, UnicodeError):
        whole = getattr(error, "object", "")
        if len(whole) > KEPT_DATA:
            error.args = tuple(whole[:0] if one is whole else one for one in error.args)
            error.object = whole[:0]  # type: ignore[attr-defined]  # all but UnicodeError itself have it
    # json.JSONDecodeError, and similar errors of other parsers.
    elif isinstance(error, ValueError) and len(getattr(error, "doc", "")) > KEPT_DATA:
        error.doc = error.doc[:0]  # type: ignore[attr-defined]


@dataclass(eq=False)
class _StageFailures:
    """The failures of one stage in this epoch.

    Attributes:
        counters: The counts since the run began.
        limit: The stage's own ``max_failures``, or ``None``.
        counts_early: Whether a few calls count. A stage of one of several paths or merged pipelines, without
            a limit of its own, may get few items, all of them damaged.
        before: The counts when this epoch began.
    """

    counters: StageCounters
    limit: float | None
    counts_early: bool
    before: StageCounters = field(default_factory=StageCounters)

    @property
    def failures(self) -> int:
        """Number of failures in this epoch."""
        return self.counters.failures - self.before.failures

    @property
    def calls(self) -> int:
        """Number of calls in this epoch that have ended, or have failed but not ended yet."""
        counters, before = self.counters, self.before
        return counters.calls + counters.early - before.calls - before.early

    @property
    def rate(self) -> float:
        """The part of these calls that failed."""
        return self.failures / max(1, self.calls)


# Ends the run: called with the stage, a message, the exception and the lines of its traceback.
Fail: TypeAlias = Callable[[str, str, BaseException, str], object]


class FailureLog:
    """Keeps the last failures, and ends the run when there are too many. Written in turns of the engine only.

    Args:
        fail: Called when a limit is exceeded.
        limit: Limit for the stages without a limit of their own: a number of failures of all of them, or the
            part of its calls in an epoch that each may fail.

    Raises:
        TypeError: The limit is not a real number.
        ValueError: The limit is out of range.
    """

    def __init__(self, fail: Fail, limit: FailureLimit | None = None) -> None:
        self._fail = fail
        checked = failure_limit("max_failures", limit)
        self.limit = DEFAULT_MAX_FAILURES if checked is None else checked
        self.records: deque[FailureRecord] = deque(maxlen=KEPT_RECORDS)
        self._last: dict[str, FailureRecord] = {}
        self._stages: dict[str, _StageFailures] = {}
        self._before = (0, 0)

    def watch(
        self, name: str, counters: StageCounters, limit: FailureLimit | None, *, gets_all: bool
    ) -> None:
        """Add a stage, whose failures ``counters`` count.

        Args:
            name: Name of the stage.
            counters: Counters of the stage.
            limit: The stage's own limit, or ``None`` for the common limit.
            gets_all: Whether all items pass the stage: it is on no path of several, in no merged pipeline.

        Raises:
            TypeError: The limit is not a real number.
            ValueError: The limit is out of range.
        """
        checked = failure_limit("max_failures", limit)
        self._stages[name] = _StageFailures(counters, checked, gets_all or checked is not None)

    def counts(self) -> dict[str, int]:
        """Return the number of items that failed, by name of the stage."""
        # The copy is one step in C: another thread may be starting the run, which adds stages.
        return {name: stage.counters.failures for name, stage in self._stages.copy().items()}

    def note(self, record: FailureRecord) -> None:
        """Keep the record of a failure that was counted, and check the limits."""
        self.records.append(record)
        self._last[record.stage] = record
        stage = self._stages[record.stage]
        fails_always = stage.counts_early and stage.failures >= max(
            stage.calls, MIN_CALLS_IF_ALL_FAIL
        )
        min_calls = MIN_CALLS_IF_ALL_FAIL if fails_always else MIN_CALLS_FOR_RATE
        self._check(record.stage, min_calls)

    def summary(self) -> str:
        """Describe how many calls failed in this epoch, by stage; an empty string if none failed."""
        return ", ".join(
            f"{one.failures} of {one.calls} in {name!r}" for name, one in self._by_rate()
        )

    def end_epoch(self, num_items: int, num_delivered: int) -> None:
        """Check the rates of the epoch that has ended, and reset the counts.

        Args:
            num_items: Number of items that the sources gave since the run began.
            num_delivered: Number of items that were delivered since then.
        """
        stages = self._stages.values()
        items, given = num_items - self._before[0], num_delivered - self._before[1]
        self._before = num_items, num_delivered
        # Parts that may get few items count together. What they lost is compared to the items of the epoch,
        # of the sources or in its busiest stage; to itself if nothing is left, as groups are fewer.
        lost = sum(one.failures for one in stages if not one.counts_early)
        busiest = max([items, *(one.calls for one in stages)]) if given else 1
        number = max(given + lost, busiest)
        for name, one in self._by_rate():
            if one.counts_early or lost / number > self.limit:
                self._check(name, 0)
        for stage in stages:
            # Losing a whole epoch is an error, however good the epochs before were.
            stage.before = stage.counters.copy()

    def _check(self, name: str, min_calls: int) -> None:
        stage = self._stages[name]
        limit, counted = stage.limit, [stage]
        if limit is None:
            limit = self.limit
            counted = [one for one in self._stages.values() if one.limit is None]
        if isinstance(limit, int) or math.isinf(limit):
            number = sum(one.counters.failures for one in counted)
            if number <= limit:
                return
            rule = f"{number} failed, and max_failures={limit} allows {limit}"
        else:
            if stage.calls < min_calls or stage.rate <= limit:
                return
            rule = (
                f"{stage.failures} of {stage.calls} calls failed, and max_failures={limit} allows "
                f"{limit:.0%}"
            )
        last = self._last[name]
        message = (
            f"Stage {name!r} failed too often: {rule}. "
            f"The last was {describe(last.exception)} (input {last.input})"
        )
        self._fail(name, message, last.exception, last.raised_at)

    def _by_rate(self) -> list[tuple[str, _StageFailures]]:
        """Return the stages that failed in this epoch, the highest rate first."""
        failed = [item for item in self._stages.items() if item[1].failures]
        return sorted(failed, key=lambda item: item[1].rate, reverse=True)
