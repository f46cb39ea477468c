"""Damaged files of every format; fuzz.py runs the same checks on a hundred times as many files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from array_formats import fuzz, made_files
from effort import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_python

import spdl_media as sm

SCRIPT = Path(fuzz.__file__)


@pytest.mark.parametrize("seed", range(4 if LONG else 2))
def test_damaged_files(seed: int) -> None:
    good = fuzz.run(1000, seed=1000 + seed)
    # If all files were rejected, the test would show nothing about the code after the first check.
    assert set(good) == set(fuzz.READERS)
    assert all(0 < count < 250 for count in good.values())


@pytest.mark.parametrize("format", fuzz.READERS)
@settings(max_examples=examples(200))
@given(data=st.data())
def test_changes_that_hypothesis_chooses(format: str, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(fuzz.good_files()[format])))
    edits = st.tuples(st.integers(0, 2**16), st.integers(0, 8), st.binary(max_size=12))
    for place, length, new in data.draw(st.lists(edits, min_size=1, max_size=4)):
        start = place % (len(content) + 1)
        content[start : start + length] = new
    with fuzz.watched_memory():
        fuzz.check(format, bytes(content))


@pytest.mark.parametrize("format", fuzz.READERS)
@given(data=st.binary(max_size=2000))
def test_noise(format: str, data: bytes) -> None:
    with fuzz.watched_memory():
        fuzz.check(format, data)


@pytest.mark.parametrize("format", fuzz.READERS)
def test_the_good_files_are_good(format: str) -> None:
    with fuzz.watched_memory():
        assert all(fuzz.check(format, data) for data in fuzz.good_files()[format])


def test_an_exception_of_another_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.READERS, "npy", lambda data: {}[0])
    with (
        fuzz.watched_memory(),
        pytest.raises(fuzz.WrongReadError, match="npy: KeyError: 0, from b'x'"),
    ):
        fuzz.check("npy", b"x")


def test_too_much_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.READERS, "npy", lambda data: np.empty(1 << 24, np.uint8).sum())
    with (
        fuzz.watched_memory(),
        pytest.raises(fuzz.WrongReadError, match=r"npy: 16[78]\d+ bytes were allocated"),
    ):
        fuzz.check("npy", b"x")


def test_a_lie_about_the_size_allocates_nothing() -> None:
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000,), }"
    data = made_files.npy_with_header(text, bytes(80))
    with fuzz.watched_memory():
        assert not fuzz.check("npy", data)
        with pytest.raises(sm.ArrayFormatError, match="8000000000 bytes, and 80 follow"):
            sm.load_npy(data, copy=True)


def test_the_command_counts_its_inputs() -> None:
    done = run_python(SCRIPT, "--inputs", 40)
    assert done.stdout.startswith("40 inputs, no failure; could be read all the same: npy ")
