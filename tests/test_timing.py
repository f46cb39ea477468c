"""Windows of time: the accepted forms, the frames and samples in them, and adjacent windows."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from effort import each
from hypothesis import given
from hypothesis import strategies as st

from spdl_media.timing import (
    Window,
    nearest_sample,
    parse_duration,
    parse_time,
    parse_window,
    ticks_to_seconds,
)

fractions = st.fractions(min_value=-1000, max_value=1000, max_denominator=100_000)
decimals = st.decimals(min_value=-1000, max_value=1000, places=6)
floats = st.floats(min_value=-1e6, max_value=1e6)
rates = st.sampled_from([1, 10, 8000, 11025, 22050, 44100, 48000, 96000])
time_bases = st.sampled_from(
    [Fraction(1, 90000), Fraction(1, 1000), Fraction(1001, 30000), Fraction(1, 44100)]
)


def test_none_is_everything() -> None:
    window = parse_window(None)
    assert window == Window(None, None)
    assert not window
    assert Fraction(-5) in window
    assert Fraction(10**9) in window
    assert window.samples(48000) == (0, None)


@given(fractions, fractions)
def test_fractions_are_taken_as_they_are(start: Fraction, length: Fraction) -> None:
    end = start + abs(length) + 1
    assert parse_window((start, end)) == Window(start, end)


@given(decimals)
def test_decimals_are_exact(start: Decimal) -> None:
    assert parse_window((start, None)).start == Fraction(start)


@given(floats)
def test_floats_mean_their_shortest_decimal(start: float) -> None:
    assert parse_window((start, None)).start == Fraction(repr(start))


@given(decimals)
def test_a_decimal_and_its_text_and_its_float_mean_the_same(value: Decimal) -> None:
    window = parse_window((value, None))
    assert parse_window((str(value), None)) == window
    assert parse_window((float(value), None)) == window


@pytest.mark.parametrize("value", [0.1, "0.1", Decimal("0.1"), Fraction(1, 10), np.float64(0.1)])
def test_a_tenth_is_a_tenth(value: Any) -> None:
    assert parse_window((value, None)).start == Fraction(1, 10)


def test_single_precision_means_what_it_prints() -> None:
    assert parse_window((np.float32(0.1), None)).start == Fraction(1, 10)


def test_ratios_are_exact() -> None:
    assert parse_window((Fraction(1, 3), None)).start == Fraction(1, 3)


@pytest.mark.parametrize("value", [2, "2", 2.0, np.int64(2), np.int32(2)])
def test_whole_seconds(value: Any) -> None:
    assert parse_window((value, None)).start == 2


@each("open_start", [None, -math.inf, "-inf", Decimal("-Infinity"), np.float32("-inf")])
@each("open_end", [None, math.inf, "inf", Decimal("Infinity"), np.float64("inf")])
def test_none_and_infinity_leave_a_side_open(open_start: Any, open_end: Any) -> None:
    assert parse_window((open_start, open_end)) == Window(None, None)
    assert parse_window((1, open_end)) == Window(Fraction(1), None)
    assert parse_window((open_start, 1)) == Window(None, Fraction(1))


def test_lists_and_arrays_are_pairs_too() -> None:
    assert parse_window([1, 2]) == parse_window((1, 2))  # type: ignore[arg-type]  # allowed at run time
    assert parse_window(np.array([1.0, 2.5])) == parse_window((1, "2.5"))  # type: ignore[arg-type]


def test_a_window_passes_through() -> None:
    window = Window(Fraction(1), Fraction(2))
    assert parse_window(window) is window


@each("timestamp", [1.5, "15", "1,2", (1,), (1, 2, 3), object()])
def test_not_a_pair_is_a_type_error(timestamp: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a pair \(start, end\) in seconds"):
        parse_window(timestamp)


@pytest.mark.parametrize(
    ("side", "name"), [(object(), "object"), (b"1", "b'1'"), (True, "True"), ([1], r"\[1\]")]
)
def test_a_side_that_is_no_number_is_a_type_error(side: Any, name: str) -> None:
    with pytest.raises(
        TypeError, match=f"start of timestamp must be a number of seconds.*not .*{name}"
    ):
        parse_window((side, None))


@each(
    "side",
    ["one", "", "1:30", "nan", math.nan, Decimal("nan"), "1/0", "infantry", np.float32("nan")],
)
def test_text_and_nan_that_are_no_number_are_value_errors(side: Any) -> None:
    with pytest.raises(ValueError, match="the end of timestamp must be a number of seconds, not "):
        parse_window((None, side))


@each(
    "timestamp",
    [
        (2, 1),
        (1, 1),
        (0.1, "0.1"),
        (math.inf, None),
        (math.inf, 3),
        (None, -math.inf),
        (3, -math.inf),
    ],
)
def test_a_window_that_holds_no_time_is_a_value_error(timestamp: Any) -> None:
    with pytest.raises(ValueError, match=r"holds no time.*start must be less than end"):
        parse_window(timestamp)


@given(fractions, fractions)
def test_order_decides_between_window_and_error(start: Fraction, end: Fraction) -> None:
    if start < end:
        assert parse_window((start, end)) == Window(start, end)
    else:
        with pytest.raises(ValueError, match="holds no time"):
            parse_window((start, end))


@given(fractions, fractions, fractions)
def test_windows_that_touch_share_no_time_and_lose_none(
    a: Fraction, b: Fraction, time: Fraction
) -> None:
    a, b = min(a, b), max(a, b) + 1
    before, after, both = Window(a, b), Window(b, None), Window(a, None)
    assert (time in before) + (time in after) == (time in both)


@given(st.lists(fractions, min_size=2, max_size=6, unique=True), rates)
def test_windows_that_touch_share_no_sample_and_lose_none(cuts: list[Fraction], rate: int) -> None:
    cuts = sorted(cuts)
    edges: list[Fraction | None] = [None, *cuts, None]
    pieces = [Window(*pair).samples(rate) for pair in pairwise(edges)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] is None
    assert all(stop == first for (_, stop), (first, _) in pairwise(pieces))
    assert all(stop is None or first <= stop for first, stop in pieces)


@given(fractions, fractions, rates, st.integers(0, 10**8))
def test_samples_are_those_whose_time_is_inside(
    start: Fraction, length: Fraction, rate: int, sample: int
) -> None:
    window = Window(start, start + abs(length) + Fraction(1, 10**6))
    first, stop = window.samples(rate)
    assert stop is not None
    # An off-by-one error would be at the edges.
    for k in {sample, first - 1, first, stop - 1, stop} - {-1}:
        assert (first <= k < stop) == (Fraction(k, rate) in window)


def test_count_of_samples() -> None:
    assert parse_window((1.5, 3)).samples(44100) == (66150, 132300)
    assert parse_window((0.1, 0.3)).samples(10) == (1, 3)
    assert parse_window((-2, -1)).samples(48000) == (0, 0)


@given(st.integers(-(10**12), 10**12), time_bases, fractions)
def test_ticks_stand_where_the_time_base_says(
    pts: int, time_base: Fraction, zero: Fraction
) -> None:
    seconds = ticks_to_seconds(pts, time_base, zero)
    assert (seconds + zero) / time_base == pts
    assert ticks_to_seconds(pts + 1, time_base, zero) - seconds == time_base


@given(pts=st.integers(-(10**6), 10**6), side=st.integers(-(10**6), 10**6))
def test_a_window_in_ticks_holds_the_timestamps_that_lie_in_it(pts: int, side: int) -> None:
    time_base, zero = Fraction(1, 90_000), Fraction(1, 7)
    # Bounds as users compute them: floats that differ slightly from the exact time of a frame.
    seconds = float(ticks_to_seconds(side, time_base, zero))
    first, stop = parse_window((seconds, seconds + 1)).ticks(time_base, zero)
    assert (first, stop) == (side, side + 90_000)
    assert parse_window(None).ticks(time_base, zero) == (-math.inf, math.inf)
    inside = ticks_to_seconds(pts, time_base, zero) in parse_window((seconds, seconds + 1))
    assert inside == (side <= pts < side + 90_000)


@given(st.integers(-(10**9), 10**9), time_bases, fractions, rates)
def test_the_nearest_sample_is_at_most_half_a_sample_away(
    pts: int, time_base: Fraction, zero: Fraction, rate: int
) -> None:
    sample = nearest_sample(pts, time_base, zero, rate)
    assert abs(ticks_to_seconds(pts, time_base, zero) - Fraction(sample, rate)) * rate <= Fraction(
        1, 2
    )


def sum_of(start: float, duration: float) -> Window:
    begin = parse_time(start)
    return Window(begin, begin + parse_duration(duration))


@given(st.integers(0, 10**6), st.integers(1, 5000), rates)
def test_windows_computed_in_floats_hold_their_samples(first: int, count: int, rate: int) -> None:
    start, duration = first / rate, count / rate
    assert parse_window((start, start + duration)).samples(rate) == (first, first + count)
    assert sum_of(start, duration).samples(rate) == (first, first + count)


@pytest.mark.parametrize("fps", [Fraction(24), Fraction(25), Fraction(30), Fraction(30000, 1001)])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_windows_computed_in_floats_hold_their_frames(fps: Fraction, count: int) -> None:
    duration = float(count / fps)
    for first in range(0, 1000, count):
        start = float(first / fps)
        for window in (parse_window((start, start + duration)), sum_of(start, duration)):
            near = range(max(0, first - 1), first + count + 1)
            assert [k for k in near if k / fps in window] == list(range(first, first + count))


@given(st.integers(1, 2000), rates.filter(lambda rate: rate >= 8000))
def test_windows_whose_starts_are_added_up_tile(num_windows: int, rate: int) -> None:
    start = 0.0
    for _ in range(num_windows):
        start += 1024 / rate
    assert parse_window((start, None)).samples(rate)[0] == 1024 * num_windows


@pytest.mark.parametrize(("nanoseconds", "first"), [("-1", 1), ("-0.01", 1), ("0.01", 1), ("1", 2)])
def test_only_a_hair_is_forgiven(nanoseconds: str, first: int) -> None:
    edge = Fraction(1, 48000) + Fraction(nanoseconds) / 10**9
    assert Window(edge).samples(48000)[0] == first
    assert (Fraction(1, 48000) in Window(edge)) is (first == 1)


@given(st.integers(0, 10**8), rates)
def test_a_sample_whose_time_is_given_as_a_float_is_inside(sample: int, rate: int) -> None:
    assert parse_window((sample / rate, None)).samples(rate)[0] == sample
    assert parse_window((None, (sample + 1) / rate)).samples(rate)[1] == sample + 1


def test_str_is_for_messages() -> None:
    assert str(parse_window((1.5, 3))) == "[1.5, 3)"
    assert str(parse_window((None, 3))) == "[-inf, 3)"
    assert str(parse_window((1, None))) == "[1, inf)"


def test_a_window_that_holds_no_time_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r"the window \[2, 1\) holds no time"):
        Window(Fraction(2), Fraction(1))


def test_windows_are_values() -> None:
    window = parse_window((1.5, 3))
    assert pickle.loads(pickle.dumps(window)) == window
    assert hash(window) == hash(parse_window(("1.5", Decimal(3))))
    with pytest.raises(AttributeError):
        window.start = None  # type: ignore[misc]  # that it is frozen is the point
