"""``sample_windows``: random windows of one length, drawn from the metadata of the header."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media.testing import index_samples, make_audio, make_video

SAMPLES = index_samples(2 * 44100, 1)
FILES = {
    "wav": make_audio(SAMPLES, 44100, codec="pcm_s16le", format="wav"),
    "flac": make_audio(SAMPLES, 44100, codec="flac", format="flac"),
    "mka": make_audio(SAMPLES, 44100, codec="flac", format="matroska"),
}


@pytest.mark.parametrize("name", FILES)
def test_windows_hold_equally_many_samples(name: str, tmp_path: Any) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    windows = sm.sample_windows(path, "0.25", num=20, rng=1)
    assert windows == sm.sample_windows(sm.probe(path), 0.25, num=20, rng=np.random.default_rng(1))
    assert len({start for start, _ in windows}) > 15
    for start, end in windows:
        first = int(start * 44100)
        wanted = SAMPLES[first : first + 11025].T
        assert end - start == Fraction(1, 4)
        np.testing.assert_array_equal(
            np.asarray(sm.load_audio(path, (start, end), sample_fmt="s16p")), wanted
        )
        mono = sm.load_audio(path, (start, end), sample_rate=16000)
        assert mono.shape == (1, 4000)


def test_all_starts_are_drawn() -> None:
    data = make_audio(SAMPLES[:5], 48000, codec="pcm_s16le", format="wav")
    starts = {start for start, _ in sm.sample_windows(data, Fraction(3, 48000), num=99)}
    assert starts == {Fraction(0), Fraction(1, 48000), Fraction(2, 48000)}


def test_audio_that_is_shorter_is_filled_up() -> None:
    ((start, end),) = sm.sample_windows(FILES["wav"], 3)
    assert (start, end) == (0, 3)
    audio = sm.load_audio(FILES["wav"], (start, end), num_samples=3 * 44100, on_short="zeros")
    assert audio.shape == (1, 3 * 44100)


def test_what_has_no_windows() -> None:
    with pytest.raises(sm.DemuxError, match="there is no audio"):
        sm.sample_windows(
            make_video(np.zeros((2, 16, 16, 3), np.uint8), codec="ffv1", pix_fmt="bgr0"), 1
        )
    with pytest.raises(ValueError, match="length must be above 0 seconds, not 0"):
        sm.sample_windows(FILES["wav"], 0)
    bad: Any = "x"
    with pytest.raises(TypeError, match=r"rng must be a generator, .*, or a seed, not 'x'"):
        sm.sample_windows(FILES["wav"], 1, rng=bad)
    with pytest.raises(ValueError, match="rng must be at least 0"):
        sm.sample_windows(FILES["wav"], 1, rng=-1)
    with pytest.raises(ValueError, match="num must be at least 1"):
        sm.sample_windows(FILES["wav"], 1, num=0)
    stated = sm.probe(FILES["wav"])
    assert stated.audio is not None
    unknown = replace(stated, duration=None, streams=(replace(stated.audio, duration=None),))
    with pytest.raises(sm.DemuxError, match=r"states no duration. Choose the starts yourself"):
        sm.sample_windows(unknown, 1)
