"""Errors of a pipeline, records of the items that failed, and limits on their number."""

from __future__ import annotations

import math
import numbers
import os
import reprlib
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
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
    """The pipeline cannot do what was asked, in its current state or by its definition."""


class PipelineStopped(PipelineError, EOFError):  # noqa: N818  # it tells of no error
    """Nothing more comes: the source has ended, or the pipeline was stopped."""


class WorkerDied(PipelineError):  # noqa: N818  # says what happened
    """The worker of a pool died (killed, out of memory, crashed) with this item in its hands."""


class PoolBroken(PipelineError):  # noqa: N818  # says what happened
    """A pool takes no more items, and nobody can rebuild it. It ends the run."""


class MissingPackageError(PipelineError, ImportError):
    """An optional package is needed and not installed. The message has the ``pip`` line."""


class PipelineFailure(ExceptionGroup[Exception], PipelineError):  # noqa: N818  # says what happened
    """The run ended early because a stage or the source failed.

    It is an ``ExceptionGroup`` of the original exception, ``exceptions[0]``, so ``except*`` catches that by
    its class. It has no ``__cause__``, which a traceback would print beside its members.

    Attributes:
        stage: Name of the stage that failed; ``"source"`` for a source.
    """

    stage: str = ""

    def derive(self, excs: Sequence[Exception], /) -> PipelineFailure:  # type: ignore[override]
        """The same failure with some of its exceptions: what ``except*`` and ``split`` make.

        Raises:
            ValueError: There are none.
        """
        failure = PipelineFailure(self.message, excs)
        failure.stage = self.stage
        return failure


def describe(error: BaseException) -> str:
    """Class and message of an exception of the user's, whatever its ``__str__`` does."""
    try:
        message = str(error)
    except BaseException as mute:  # noqa: BLE001  # nothing that is said of an error may be another error
        message = f"<its message raises {type(mute).__name__}>"
    return f"{type(error).__name__}: {message}"


def pipeline_failure(
    message: str, original: BaseException, stage: str, raised_at: str = ""
) -> PipelineFailure:
    """Make the failure of ``stage`` that ``original`` caused, with the lines that raised it if it lost them.

    A ``SystemExit`` or the like that a stage raises ends the pipeline, not the consumer's program,
    so it is wrapped: a group of plain exceptions can hold none.
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


#: The part of the items that may fail unless ``max_failures`` says otherwise. Data sets have damaged
#: items, and the rest is still worth having; when more than half fails, the code is at fault.
DEFAULT_MAX_FAILURES = 0.5

KEPT_RECORDS = 1000
# Bytes or characters that an exception may hold of what it is about: all records then hold a few megabytes.
KEPT_DATA = 1000
# A rate of fewer calls of a stage says little; at the end of an epoch it is looked at whatever their number.
MIN_CALLS_FOR_RATE = 100
# Enough where each call of a stage has failed so far: the code or a path is at fault, not the data.
MIN_CALLS_IF_ALL_FAIL = 10

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


# A number (int) or a rate. Type checkers take no int for a numbers.Real.
FailureLimit: TypeAlias = float | Fraction


def failure_limit(what: str, value: object) -> float | None:
    """A number of failures (``int``), a rate from 0 to 1 (``float``), ``inf`` for any number, or ``None``.

    Raises:
        TypeError: It is no real number.
        ValueError: It is out of range.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{what} must be an int (a number of items), a float or Fraction (a rate) or None, not {value!r}"
        )
    number = int(value) if isinstance(value, numbers.Integral) else float(value)
    # -1 is SPDL's word for it.
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
        exception: What was raised. It keeps no memory of the call alive: its traceback is taken off, and so
            is what the interpreter attaches to it beyond its message, where that may be big (``obj`` of an
            ``AttributeError``, the whole ``doc`` or ``object`` of what could not be parsed or decoded).
        traceback: The traceback, as text.
        raised_at: Its lines outside of this package alone, as text.
    """

    stage: str
    input: str
    exception: BaseException
    traceback: str
    raised_at: str = ""

    def __str__(self) -> str:
        text = _cut(" ".join(describe(self.exception).split()), 200)
        return f"{self.stage!r}: {text} (input {self.input})"

    def __repr__(self) -> str:
        return f"<FailureRecord of {self}>"


def record_failure(
    stage: str, item: object, error: BaseException, where: str = ""
) -> FailureRecord:
    """Describe a failure. The exception loses what it holds of the call, and so do those that led to it.

    Args:
        stage: Name of the stage.
        item: The stage's input.
        error: What was raised.
        where: Stands before the traceback, for an error that was made rather than raised.
    """
    raised_at = ""
    try:
        text = where + "".join(traceback.format_exception(error))
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
        raised_at = "".join(traceback.format_list(own))
    except BaseException:  # noqa: BLE001  # such as a class of the user's whose notes raise
        text = where + describe(error)
    _lighten(error)
    return FailureRecord(stage, short_repr(item), error, text, raised_at)


# Cuts off what is long, also within containers.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def short_repr(item: object) -> str:
    """A ``repr`` of at most a hundred characters or so, cheap for big bytes, and never an error."""
    if isinstance(item, bytes | bytearray | memoryview):
        return f"<{type(item).__name__} of length {len(item)}>"
    try:
        return _SHORT.repr(item)
    except BaseException as error:  # noqa: BLE001  # such as RecursionError in a container of the user's
        return f"<{type(item).__name__}, whose repr raises {type(error).__name__}>"


def _cut(text: str, longest: int) -> str:
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def _lighten(error: BaseException) -> None:
    """Take frames and data off an exception and those that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        error_or_none = waiting.pop()
        if error_or_none is None or id(error_or_none) in seen:
            continue
        seen.add(id(error_or_none))
        # A class of the user's may make these attributes something else, or be frozen.
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
    # Of json, and of parsers that do as it does.
    elif isinstance(error, ValueError) and len(getattr(error, "doc", "")) > KEPT_DATA:
        error.doc = error.doc[:0]  # type: ignore[attr-defined]


@dataclass(eq=False)
class _StageDropRate:
    """The failures of one stage in this epoch.

    Attributes:
        counters: What has been counted since the run began.
        limit: ``max_failures`` of the stage's own.
    """

    counters: StageCounters
    limit: float | None = None
    _before: StageCounters = field(default_factory=StageCounters)

    @property
    def failures(self) -> int:
        """Failures in this epoch."""
        return self.counters.failures - self._before.failures

    @property
    def calls(self) -> int:
        """Calls that have ended in this epoch, or failed so far."""
        counters, before = self.counters, self._before
        return counters.calls + counters.early - before.calls - before.early

    def begin_epoch(self) -> None:
        """Count from 0 again: losing all of an epoch is an error, however good those before were."""
        self._before = self.counters.copy()

    def part_kept(self, min_calls: int) -> float:
        """The part that does not fail; 1.0 while there were too few calls to tell."""
        return 1 - self.failures / self.calls if self.calls >= max(1, min_calls) else 1.0


@dataclass(eq=False)
class Chain:
    """Stages in a row: each loses a part of what the ones before have kept.

    Not all failures over all calls: with three stages that would be a third when the last of them
    fails always, and above one when a stage makes many items of each.
    """

    parts: list[_StageDropRate | Branches] = field(default_factory=list)

    def part_kept(self, min_calls: int) -> float:
        """The part of the items that survives all stages that have no limit of their own."""
        return math.prod(
            part.part_kept(min_calls)
            for part in self.parts
            if isinstance(part, Branches) or part.limit is None
        )


@dataclass(eq=False)
class Branches:
    """Chains side by side, each with what tells how many items have gone into it."""

    chains: list[tuple[Callable[[], int], Chain]] = field(default_factory=list)

    def part_kept(self, min_calls: int) -> float:
        """The part of the items that survives the chain into which it went."""
        numbers = [(number(), chain) for number, chain in self.chains]
        if not (total := sum(number for number, _ in numbers)):
            return 1.0
        return sum(number * chain.part_kept(min_calls) for number, chain in numbers) / total


# The last of more failures than are allowed, and how many there were and are allowed, as text.
Excess: TypeAlias = tuple[FailureRecord, str]


class FailureLog:
    """Keeps the last failures, and says when there are too many. Written in turns of the engine alone.

    Args:
        limit: For all stages together that have no limit of their own: a number of failures, or the
            part of the items of an epoch that the stages together may lose.

    Raises:
        TypeError: The limit is no real number.
        ValueError: It is out of range.

    Attributes:
        chain: How the stages are linked.
    """

    def __init__(self, limit: FailureLimit | None = None) -> None:
        checked = failure_limit("max_failures", limit)
        self.limit = DEFAULT_MAX_FAILURES if checked is None else checked
        self.records: deque[FailureRecord] = deque(maxlen=KEPT_RECORDS)
        self.chain = Chain()
        self._last: dict[str, FailureRecord] = {}
        self._stages: dict[str, _StageDropRate] = {}

    def watch(
        self,
        name: str,
        counters: StageCounters,
        limit: FailureLimit | None = None,
        *,
        chain: Chain | None = None,
    ) -> None:
        """Have the failures that ``counters`` count included, under a limit of the stage's own if any.

        ``chain`` is where the stage is, if not in the pipeline's own.

        Raises:
            TypeError: The limit is no real number.
            ValueError: It is out of range.
        """
        stage = _StageDropRate(counters, failure_limit("max_failures", limit))
        self._stages[name] = stage
        (self.chain if chain is None else chain).parts.append(stage)

    def counts(self) -> dict[str, int]:
        """How many items failed in each stage."""
        # Copied in one step of C: another thread may be starting the run, which adds stages.
        return {name: stage.counters.failures for name, stage in self._stages.copy().items()}

    def note(self, record: FailureRecord) -> Excess | None:
        """Keep a failure that has been counted; say so if it is one too many."""
        self.records.append(record)
        self._last[record.stage] = record
        stage = self._stages[record.stage]
        # Of one path among several it says nothing of the whole.
        is_alone = stage.limit is not None or stage in self.chain.parts
        fails_always = is_alone and stage.failures >= max(stage.calls, MIN_CALLS_IF_ALL_FAIL)
        min_calls = MIN_CALLS_IF_ALL_FAIL if fails_always else MIN_CALLS_FOR_RATE
        return self._excess(record.stage, min_calls)

    def summary(self) -> str:
        """How many calls of this epoch failed, by stage; an empty string if none did."""
        parts = [(self._stages[name], name) for name in self._by_failures()]
        return ", ".join(f"{part.failures} of {part.calls} in {name!r}" for part, name in parts)

    def end_epoch(self) -> Excess | None:
        """Whether too much of an epoch that has just ended was lost, at whatever number of items."""
        found = (self._excess(name, 0) for name in self._by_failures())
        excess = next(filter(None, found), None)
        for stage in self._stages.values():
            stage.begin_epoch()
        return excess

    def _excess(self, name: str, min_calls: int) -> Excess | None:
        stage = self._stages[name]
        if stage.limit is None:
            stages = [stage for stage in self._stages.values() if stage.limit is None]
            rule = _broken_rule(self.limit, stages, self.chain, min_calls)
        else:
            rule = _broken_rule(stage.limit, [stage], stage, min_calls)
        if rule is None:
            return None
        last = self._last[name]
        return last, (
            f"Stage {name!r} failed too often: {rule}. "
            f"The last was {describe(last.exception)} (input {last.input})"
        )

    def _by_failures(self) -> list[str]:
        """The stages that had failures in this epoch, the worst first: it is the one to name."""
        failed = [name for name, stage in self._stages.items() if stage.failures]
        return sorted(failed, key=lambda name: -self._stages[name].failures)


def _broken_rule(
    limit: float, stages: Sequence[_StageDropRate], whole: Chain | _StageDropRate, min_calls: int
) -> str | None:
    if isinstance(limit, int) or math.isinf(limit):
        failures = sum(stage.counters.failures for stage in stages)
        if failures <= limit:
            return None
        return f"{failures} items failed, and max_failures={limit} allows {limit}"
    # Rounded: of three thirds of the items no more than all may be lost.
    if (lost := round(1 - whole.part_kept(min_calls), 9)) <= limit:
        return None
    failures = sum(stage.failures for stage in stages)
    return f"{failures} failures lost {lost:.0%} of the items, and max_failures={limit} allows {limit:.0%}"
