"""Exact time windows and conversions between seconds, ticks and samples.

Second 0 is the start time of the container, for all of its streams, so that audio and video stay
aligned. FFmpeg counts in ticks of a stream's time base, from a zero of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Generic, TypeAlias, TypeVar

from spdl_media.errors import FilterError

__all__ = ("Seconds", "Timestamp", "Window", "parse_window")

Seconds: TypeAlias = float | int | Decimal | Fraction | str
"""A time in seconds: ``1.5``, ``"1.5"``, ``Decimal("1.5")``, ``Fraction(3, 2)``."""

Timestamp: TypeAlias = tuple[Seconds | None, Seconds | None]
"""A half-open window ``(start, end)`` in seconds; ``None`` (or infinity) leaves a side open."""

Rate: TypeAlias = int | float | Decimal | Fraction | str | tuple[int, int]


# Limit of the terms of FFmpeg's ratios; denominator of the ratio nearest to a float that exceeds them.
_MAX_TERM, _MAX_DENOMINATOR = 2**31 - 1, 100_000

# Times closer than this are equal. A time that users compute in floats, as start + duration or by a sum, has
# rounding errors: 1e-11 s after a day. Samples at 192 kHz are 5e-6 s apart.
_PARTS = 10**10
_TOLERANCE = Fraction(1, _PARTS)
_TOLERANCE_AS_FLOAT = float(_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval of time, ``start <= t < end``, in exact seconds. ``None`` is an open side.

    A time less than 1e-10 s before a bound counts as equal to it, so that bounds may be computed in floats.

    Raises:
        ValueError: ``start`` is not less than ``end``.
    """

    start: Fraction | None = None
    end: Fraction | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(
                f"the window {self} holds no time: it is [start, end), so start must be less than end"
            )

    def __contains__(self, seconds: Fraction) -> bool:
        # In floats, which compare faster than fractions. Their error is below the tolerance for times up
        # to a day.
        time = float(seconds) + _TOLERANCE_AS_FLOAT
        has_begun = self.start is None or float(self.start) <= time
        return has_begun and (self.end is None or time < float(self.end))

    def __bool__(self) -> bool:
        """False for the window without bounds."""
        return self.start is not None or self.end is not None

    def __str__(self) -> str:
        start = "-inf" if self.start is None else f"{float(self.start):g}"
        end = "inf" if self.end is None else f"{float(self.end):g}"
        return f"[{start}, {end})"

    @property
    def name(self) -> str:
        """Name in messages, "the window [1, 2)", or "the stream" for the window without bounds."""
        return f"the window {self}" if self else "the stream"

    def ticks(self, time_base: Fraction, zero: Fraction) -> tuple[float, float]:
        """Convert the window to FFmpeg's timestamps ``(first, stop)``; an open side is an infinity.

        A timestamp lies in the window if ``first <= pts < stop``. Loops compare these integers, because
        comparing fractions takes longer than all other work for a packet.

        Args:
            time_base: Seconds per tick of the timestamps.
            zero: Second 0 of the container on FFmpeg's clock.
        """
        # The first tick at or after a time; ceil(x) is -floor(-x).
        first = -math.inf if self.start is None else -tick_at(-self.start, time_base, -zero)
        return first, math.inf if self.end is None else -tick_at(-self.end, time_base, -zero)

    def samples(self, sample_rate: int) -> tuple[int, int | None]:
        """Convert the window to samples ``(first, stop)``; ``stop`` is ``None`` for an open end.

        Sample ``k`` is at ``k / sample_rate``, so the first one in the window is ``ceil(start * rate)``
        and the first one after it ``ceil(end * rate)``. Adjacent windows share no sample and lose none.
        """
        first = 0 if self.start is None else _first_sample(self.start, sample_rate)
        return first, None if self.end is None else _first_sample(self.end, sample_rate)

    def sample_range(self, sample_rate: int, limit: int | None = None) -> tuple[int, int]:
        """Return :meth:`samples`, at most ``limit`` of them; ``sys.maxsize`` is an open end."""
        first, stop = self.samples(sample_rate)
        most = sys.maxsize if limit is None else first + limit
        return first, most if stop is None else min(stop, most)


WHOLE = Window()
"""The window without bounds."""


def _first_sample(seconds: Fraction, sample_rate: int) -> int:
    """Return the first sample at or after a time."""
    # In integers, which take a fifth of the time of fractions.
    time, units = seconds.as_integer_ratio()
    return max(0, -((units - time * _PARTS) * sample_rate // (units * _PARTS)))


def parse_window(timestamp: Timestamp | Window | None) -> Window:
    """Convert a user's window.

    Floats are converted by their shortest decimal form, so ``0.1`` means a tenth and not the binary
    number slightly above it; otherwise a window that ends at frame 3 of a 10 fps video would contain
    frame 3.

    Raises:
        TypeError: ``timestamp`` is not a pair of numbers.
        ValueError: A side is not a number, or the window ends before it starts or is empty.
    """
    if timestamp is None:
        return WHOLE
    if isinstance(timestamp, Window):
        return timestamp
    if isinstance(timestamp, str) or not hasattr(timestamp, "__len__") or len(timestamp) != 2:
        raise TypeError(
            f"timestamp must be a pair (start, end) in seconds, either of them None, not {timestamp!r}"
        )
    first, last = timestamp
    start = -math.inf if first is None else _parse_seconds(first, "the start of timestamp")
    end = math.inf if last is None else _parse_seconds(last, "the end of timestamp")
    if start >= end:
        raise ValueError(
            f"timestamp {timestamp!r} holds no time: the window is [start, end), so start must be "
            "less than end"
        )
    return Window(
        None if isinstance(start, float) else start, None if isinstance(end, float) else end
    )


def parse_rate(value: Rate, name: str = "frame_rate") -> Fraction:
    """Convert a frame rate, or another ratio with the given name in errors.

    Raises:
        ValueError: The value is not a number, or not positive.
    """
    try:
        # By its text, so that 29.97 is 2997/100 and not the nearest binary number.
        text = value if isinstance(value, Fraction) else str(value)
        rate = Fraction(*value) if isinstance(value, tuple) else Fraction(text)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{name} must be a number, 'numerator/denominator' or a pair of int, not {value!r}"
        ) from error
    # FFmpeg's terms have 31 bits, but those of the decimal text of 30000 / 1001 have more.
    if max(rate.as_integer_ratio()) > _MAX_TERM:
        rate = rate.limit_denominator(_MAX_DENOMINATOR)
    if not 0 < rate.numerator <= _MAX_TERM:
        limit = "positive" if rate <= 0 else "below 2**31"
        raise ValueError(f"{name} must be {limit}, not {value!r}")
    return rate


def tick_at(seconds: Fraction, time_base: Fraction, zero: Fraction) -> int:
    """Return FFmpeg's last timestamp that is not later than a time on the container's clock."""
    # In integers, which take a fifth of the time of fractions.
    time, units = seconds.as_integer_ratio()
    start, parts = zero.as_integer_ratio()
    length, a_second = time_base.as_integer_ratio()
    ticks = (_PARTS * (time * parts + start * units) + units * parts) * a_second
    return ticks // (units * parts * _PARTS * length)


def parse_time(time: Seconds, name: str = "a time") -> Fraction:
    """Convert a user's time, given as the argument ``name``.

    Raises:
        TypeError: The time is not a number.
        ValueError: The time is not finite.
    """
    seconds = _parse_seconds(time, name)
    if isinstance(seconds, float):
        raise ValueError(f"{name} must be finite, not {time!r}")
    return seconds


def parse_duration(duration: Seconds, name: str = "duration") -> Fraction:
    """Convert a user's duration, given as the argument ``name``.

    Raises:
        TypeError: The duration is not a number.
        ValueError: The duration is not positive and finite.
    """
    if (seconds := parse_time(duration, name)) <= 0:
        raise ValueError(f"{name} must be above 0 seconds, not {duration!r}")
    return seconds


def _parse_seconds(value: Seconds, name: str) -> Fraction | float:
    """Convert a time; the result is a float only if it is infinite."""
    # bool is a subclass of int, but not a time.
    if isinstance(value, bool) or not (
        isinstance(value, int | float | Decimal | Fraction | str) or hasattr(value, "__float__")
    ):
        raise TypeError(f"{name} must be a number of seconds or a numeric string, not {value!r}")
    try:
        number = float(value)
        if math.isinf(number):  # including numbers too large for a float: no file lasts that long
            return number
        # By the shortest decimal form, so that 0.1 is a tenth and not the binary number slightly above
        # it, also for NumPy's float32. Decimal parses text in a third of the time.
        return Fraction(value if isinstance(value, int | Fraction) else Decimal(str(value)))
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{name} must be a number of seconds, not {value!r}") from error


def ticks_to_seconds(pts: int, time_base: Fraction, zero: Fraction) -> Fraction:
    """Convert FFmpeg's timestamp to seconds on the container's clock."""
    return pts * time_base - zero


def seconds_of(pts: Sequence[int | None], time_base: Fraction, zero: Fraction) -> tuple[float, ...]:
    """Convert timestamps to seconds on the container's clock; ``nan`` for ``None``."""
    # In integers, whose quotient is rounded once, because fractions take ten times as long.
    factor, shift, divisor = _integer_terms(time_base, -zero)
    return tuple(math.nan if one is None else (one * factor + shift) / divisor for one in pts)


def nearest_sample(pts: int, time_base: Any, zero: Fraction, sample_rate: int) -> int:
    """Convert FFmpeg's timestamp to the nearest sample on the container's clock.

    Args:
        pts: The timestamp.
        time_base: Seconds per tick of it: a Fraction, or PyAV's own rational.
        zero: Second 0 of the container on FFmpeg's clock.
        sample_rate: Samples per second and channel.
    """
    # In integers: fractions would take as long as filtering a small audio frame.
    shift: int = zero.numerator * time_base.denominator
    ticks: int = pts * time_base.numerator * zero.denominator - shift
    divisor: int = time_base.denominator * zero.denominator
    # Halves are rounded up, whatever the sign, unlike round(), which rounds them to even.
    return (2 * ticks * sample_rate + divisor) // (2 * divisor)


def most_combined(rate: int, into: int) -> int:
    """Return the number of samples that FFmpeg's resampler combines, or a few more."""
    return 33 * max(1, -(-rate // into))


T = TypeVar("T")

# The most copies of one frame: an hour at 30 frames per second. A damaged timestamp could ask for more than
# there is memory.
_MOST_COPIES = 108_000


class ConstantRate(Generic[T]):
    """Resamples frames to a constant rate: selects the frame that is shown at each ``start + k / rate``.

    A frame is shown from its own time until that of the next frame. There is no output before the first
    frame. If the window has no start, ``start`` is the time of the first frame.

    Args:
        rate: Output frames per second.
        window: Window of the output times.
        time_base: Seconds per tick of the input timestamps.
        zero: Second 0 of the container on FFmpeg's clock.

    Attributes:
        time_base: Seconds per tick of the output timestamps.
    """

    def __init__(self, rate: Fraction, window: Window, time_base: Fraction, zero: Fraction) -> None:
        # The rate and the input times are exact in this unit, and so are starts with some decimal places.
        unit = math.lcm(rate.numerator, time_base.denominator)
        while 10 * unit < 2**31:  # FFmpeg's AVRational is a pair of signed 32-bit numbers
            unit *= 10
        self.time_base = Fraction(1, unit if unit < 2**31 else 10**9)
        self._rate, self._source_base, self._window, self._zero = rate, time_base, window, zero
        self._next, self._stop = 0, 2**63
        self._shown: T | None = None
        self._end = 0
        self._is_placed = False
        if window.start is not None:
            self._place(window.start + zero)

    def at(self, window: Window, zero: Fraction) -> ConstantRate[T]:
        """Return another one for another window, without frames."""
        return ConstantRate(self._rate, window, self._source_base, zero)

    def _place(self, start: Fraction) -> None:
        """Set the time of output frame 0, on FFmpeg's clock."""
        self._is_placed = True
        # In integers: fractions would take as long as all other work for a frame.
        shift = (start + _TOLERANCE) * self._rate
        self._to_number = _integer_terms(self._source_base * self._rate, -shift)
        self._to_pts = _integer_terms(1 / (self._rate * self.time_base), start / self.time_base)
        if self._window.end is not None:
            self._stop = math.ceil((self._window.end + self._zero) * self._rate - shift)

    def push(self, frame: T, pts: int, duration: int) -> Iterator[tuple[T, int]]:
        """Add a frame. Yield the previous frame once for each output time, with the output timestamp.

        Raises:
            FilterError: There is a gap, which too many copies of the previous frame would fill.
        """
        if not self._is_placed:
            self._place(pts * self._source_base)
        yield from self._until(self._number(pts))
        self._shown, self._end = frame, pts + max(duration, 1)

    def flush(self, *, goes_on: bool) -> Iterator[tuple[T, int]]:
        """Yield the output of the last frame; ``goes_on``: more frames follow after the end of the window.

        Raises:
            FilterError: There is a gap, which too many copies of the frame would fill.
        """
        if self._shown is not None:
            yield from self._until(self._stop if goes_on else self._number(self._end))

    def _number(self, pts: int) -> int:
        """Return the number of the first output frame at or after a timestamp."""
        factor, offset, divisor = self._to_number
        return -((-offset - pts * factor) // divisor)

    def _until(self, number: int) -> Iterator[tuple[T, int]]:
        begin, self._next = self._next, max(self._next, number)
        if self._shown is not None:
            stop, (factor, offset, divisor) = min(number, self._stop), self._to_pts
            if stop - begin > _MOST_COPIES:
                start = Fraction(begin * factor + offset, divisor) * self.time_base - self._zero
                raise FilterError(
                    f"frame_rate={float(self._rate):g} would repeat a frame {stop - begin} times, from "
                    f"{float(start):.3f} s on: the times of the frames have a gap. Load the windows "
                    "(timestamp=) before and after it"
                )
            for moment in range(begin, stop):
                # Rounded to nearest, in case the unit is not fine enough.
                yield self._shown, (2 * (moment * factor + offset) + divisor) // (2 * divisor)


def _integer_terms(factor: Fraction, offset: Fraction) -> tuple[int, int, int]:
    """Return integers ``(a, b, c)`` such that ``(a * x + b) / c`` is ``factor * x + offset``."""
    divisor = math.lcm(factor.denominator, offset.denominator)
    return int(factor * divisor), int(offset * divisor), divisor
