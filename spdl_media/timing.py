"""Time windows and time bases, in Fractions: the one place where units change.

Second 0 is the start time of the container, one zero for all of its streams, so that audio and
video stay aligned. FFmpeg counts in ticks of a stream's time base, from a zero of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ("Seconds", "Timestamp", "Window", "parse_window")

Seconds: TypeAlias = float | int | Decimal | Fraction | str
"""A time as users write it: ``1.5``, ``"1.5"``, ``Decimal("1.5")``, ``Fraction(3, 2)``."""

Timestamp: TypeAlias = "tuple[Seconds | None, Seconds | None]"
"""A half-open window ``(start, end)`` in seconds; ``None`` (or infinity) leaves a side open."""

Rate: TypeAlias = "int | float | Decimal | Fraction | str | tuple[int, int]"


# Of a ratio of FFmpeg's; and of one that is near any float of a usual rate.
_MAX_TERM, _MAX_DENOMINATOR = 2**31 - 1, 100_000

# Times closer than this are one. A moment that users compute in floats, as start + duration or by adding up,
# lies a few of their last places beside the exact one: 1e-11 s after a day. Samples at 192 kHz are 5e-6 s
# apart.
_PARTS = 10**10
_TOLERANCE = Fraction(1, _PARTS)
_TOLERANCE_AS_FLOAT = float(_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval of time, ``start <= t < end``, in exact seconds. ``None`` is an open side.

    A time less than 1e-10 s before a bound counts as at the bound, so that bounds may come from floats.
    """

    start: Fraction | None = None
    end: Fraction | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(
                f"the window {self} holds no time: it is [start, end), so start must be less than end"
            )

    def __contains__(self, seconds: Fraction) -> bool:
        # In floats, which compare faster than fractions. Up to a day their error is below the
        # tolerance.
        time = float(seconds) + _TOLERANCE_AS_FLOAT
        return (self.start is None or float(self.start) <= time) and (
            self.end is None or time < float(self.end)
        )

    def __bool__(self) -> bool:
        """False for the window that holds everything."""
        return self.start is not None or self.end is not None

    def __str__(self) -> str:
        start = "-inf" if self.start is None else f"{float(self.start):g}"
        end = "inf" if self.end is None else f"{float(self.end):g}"
        return f"[{start}, {end})"

    def ticks(self, time_base: Fraction, zero: Fraction) -> tuple[float, float]:
        """Convert the window to FFmpeg's timestamps ``(first, stop)``; an open side is an infinity.

        A timestamp lies in the window if ``first <= pts < stop``. Loops compare these whole numbers:
        a comparison of fractions takes longer than all else that is done for a packet.

        Args:
            time_base: Seconds in one unit of the timestamps.
            zero: Second 0 of the container on FFmpeg's clock.
        """
        first, stop = (
            None if side is None else _ratio(side, -1, time_base, zero)
            for side in (self.start, self.end)
        )
        return (
            -math.inf if first is None else -(-first[0] // first[1]),
            math.inf if stop is None else -(-stop[0] // stop[1]),
        )

    def samples(self, sample_rate: int) -> tuple[int, int | None]:
        """The samples ``(first, stop)`` whose times lie in the window.

        Sample ``k`` stands at ``k / sample_rate``, so the first one inside is ``ceil(start *
        rate)`` and the first one past it ``ceil(end * rate)``; windows that touch share no sample
        and lose none.
        """
        first = 0 if self.start is None else _first_sample(self.start, sample_rate)
        return first, None if self.end is None else _first_sample(self.end, sample_rate)


def _first_sample(seconds: Fraction, sample_rate: int) -> int:
    """The first sample at or after a time."""
    # In whole numbers, which take a fifth of the time of fractions.
    time, units = seconds.as_integer_ratio()
    return max(0, -((units - time * _PARTS) * sample_rate // (units * _PARTS)))


def parse_window(timestamp: Timestamp | Window | None) -> Window:
    """Read a window as users write it.

    Floats are taken at their shortest decimal form, so ``0.1`` means a tenth and not the binary
    number a little above it; otherwise a window that ends at frame 3 of a 10 fps video would hold
    frame 3.

    Raises:
        TypeError: Not a pair of numbers.
        ValueError: A side is no number, or the window ends before it starts or is empty.
    """
    if timestamp is None:
        return Window()
    if isinstance(timestamp, Window):
        return timestamp
    if isinstance(timestamp, str) or not hasattr(timestamp, "__len__") or len(timestamp) != 2:
        raise TypeError(
            f"timestamp must be a pair (start, end) in seconds, either of them None, not {timestamp!r}"
        )
    first, last = timestamp
    start = -math.inf if first is None else _parse_seconds(first, timestamp)
    end = math.inf if last is None else _parse_seconds(last, timestamp)
    if start >= end:
        raise ValueError(
            f"timestamp {timestamp!r} holds no time: the window is [start, end), so start must be "
            "less than end"
        )
    return Window(
        None if isinstance(start, float) else start, None if isinstance(end, float) else end
    )


def parse_rate(value: Rate, name: str = "frame_rate") -> Fraction:
    """Read a frame rate, or another ratio of this name.

    Raises:
        ValueError: It is no number, or not positive.
    """
    try:
        # By its text, so that 29.97 is 2997/100 and not the nearest binary number.
        text = value if isinstance(value, Fraction) else str(value)
        rate = Fraction(*value) if isinstance(value, tuple) else Fraction(text)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{name} must be a number, 'numerator/denominator' or a pair of int, not {value!r}"
        ) from error
    # FFmpeg's terms have 31 bits, and those of the text of 30000 / 1001 more.
    if max(rate.as_integer_ratio()) > _MAX_TERM:
        rate = rate.limit_denominator(_MAX_DENOMINATOR)
    if not 0 < rate.numerator <= _MAX_TERM:
        limit = "positive" if rate <= 0 else "below 2**31"
        raise ValueError(f"{name} must be {limit}, not {value!r}")
    return rate


def clip_window(start: Seconds, duration: Seconds) -> Window:
    """The window that begins at a time and lasts so long.

    Raises:
        TypeError: Not numbers.
        ValueError: ``start`` is not finite, or ``duration`` is not positive and finite.
    """
    begin = parse_window((start, None)).start
    length = parse_window((None, duration)).end
    if begin is None or length is None or length <= 0:
        raise ValueError(
            f"a clip begins at a finite time and lasts more than 0 s, not start={start!r}, "
            f"duration={duration!r}"
        )
    return Window(begin, begin + length)


def tick_at(seconds: Fraction, time_base: Fraction, zero: Fraction) -> int:
    """The last timestamp of FFmpeg that is not later than a time on the container's clock."""
    ticks, divisor = _ratio(seconds, 1, time_base, zero)
    return ticks // divisor


def _ratio(seconds: Fraction, sign: int, time_base: Fraction, zero: Fraction) -> tuple[int, int]:
    """A time on FFmpeg's clock in ticks, later or earlier by the tolerance: numerator and denominator."""
    # In whole numbers, which take a fifth of the time of fractions.
    time, units = seconds.as_integer_ratio()
    start, parts = zero.as_integer_ratio()
    length, a_second = time_base.as_integer_ratio()
    divisor = units * parts
    return (_PARTS * (time * parts + start * units) + sign * divisor) * a_second, (
        divisor * _PARTS * length
    )


def parse_time(time: Seconds) -> Fraction:
    """Read one time.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite.
    """
    seconds = _parse_seconds(time, time)
    if isinstance(seconds, float):
        raise ValueError(f"a time must be finite, not {time!r}")
    return seconds


def _parse_seconds(value: Seconds, timestamp: object) -> Fraction | float:
    """Read one side of a window; a float is an infinity."""
    # True is an int in Python, but no time.
    if isinstance(value, bool) or not (
        isinstance(value, int | float | Decimal | Fraction | str) or hasattr(value, "__float__")
    ):
        raise TypeError(
            f"timestamp {timestamp!r}: a side must be a number of seconds, a numeric string or None, "
            f"not {type(value).__name__}"
        )
    try:
        number = float(value)
        if math.isinf(number):  # also what is too large for a float: no file lasts that long
            return number
        # By the shortest decimal form, so that 0.1 is a tenth and not the binary number a little
        # above it, also in NumPy's single precision. Decimal reads text in a third of the time.
        return Fraction(value if isinstance(value, int | Fraction) else Decimal(str(value)))
    except (ValueError, ArithmeticError) as error:
        raise ValueError(
            f"timestamp {timestamp!r}: {value!r} is not a number of seconds"
        ) from error


def ticks_to_seconds(pts: int, time_base: Fraction, zero: Fraction) -> Fraction:
    """Place a timestamp of FFmpeg on the container's clock."""
    return pts * time_base - zero


def nearest_sample(pts: int, time_base: Any, zero: Fraction, sample_rate: int) -> int:
    """The sample that a timestamp of FFmpeg means, on the container's clock.

    Args:
        pts: The timestamp.
        time_base: Seconds in one unit of it: a Fraction, or PyAV's own rational.
        zero: Second 0 of the container on FFmpeg's clock.
        sample_rate: Samples of one channel in a second.
    """
    # In whole numbers: fractions take as long as a small audio frame takes to filter.
    ticks: int = (
        pts * time_base.numerator * zero.denominator - zero.numerator * time_base.denominator
    )
    divisor: int = time_base.denominator * zero.denominator
    # Halves go up, whatever the sign: not round(), which takes them to the even side.
    return (2 * ticks * sample_rate + divisor) // (2 * divisor)


T = TypeVar("T")


class ConstantRate(Generic[T]):
    """Says what is shown at each of the moments ``start + k / rate`` of a window.

    A frame is shown from its own time until that of the next one. Moments before the first frame have none.
    Where the window has no start, moments count from the first frame.

    Args:
        rate: Moments in a second.
        window: Where they lie.
        time_base: Seconds in one unit of the frames' timestamps.
        zero: Second 0 of the container on FFmpeg's clock.

    Attributes:
        time_base: Seconds in one unit of the moments' timestamps.
    """

    def __init__(self, rate: Fraction, window: Window, time_base: Fraction, zero: Fraction) -> None:
        # The rate and the file's own times are whole in it, and so are starts of some decimal places.
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

    def _place(self, start: Fraction) -> None:
        """Take the time of moment 0, on FFmpeg's clock."""
        self._is_placed = True
        # In whole numbers: fractions would cost as much as all else that is done for a frame.
        shift = (start + _TOLERANCE) * self._rate
        self._to_number = _whole(self._source_base * self._rate, -shift)
        self._to_pts = _whole(1 / (self._rate * self.time_base), start / self.time_base)
        if self._window.end is not None:
            self._stop = math.ceil((self._window.end + self._zero) * self._rate - shift)

    def push(self, frame: T, pts: int, duration: int) -> Iterator[tuple[T, int]]:
        """The moments of the frame before this one: that frame, and the timestamp of the moment."""
        if not self._is_placed:
            self._place(pts * self._source_base)
        yield from self._until(self._number(pts))
        self._shown, self._end = frame, pts + max(duration, 1)

    def flush(self, *, goes_on: bool) -> Iterator[tuple[T, int]]:
        """The moments of the last frame; ``goes_on``: more follow behind the end of the window."""
        if self._shown is not None:
            yield from self._until(self._stop if goes_on else self._number(self._end))

    def _number(self, pts: int) -> int:
        """The first moment at or after a timestamp."""
        factor, offset, divisor = self._to_number
        return -((-offset - pts * factor) // divisor)

    def _until(self, number: int) -> Iterator[tuple[T, int]]:
        begin, self._next = self._next, max(self._next, number)
        if self._shown is not None:
            factor, offset, divisor = self._to_pts
            for moment in range(begin, min(number, self._stop)):
                # Rounded to the nearest, where the unit is not fine enough.
                yield self._shown, (2 * (moment * factor + offset) + divisor) // (2 * divisor)


def _whole(factor: Fraction, offset: Fraction) -> tuple[int, int, int]:
    """Whole numbers ``(a, b, c)`` so that ``(a * x + b) / c`` is ``factor * x + offset``."""
    divisor = math.lcm(factor.denominator, offset.denominator)
    return int(factor * divisor), int(offset * divisor), divisor
