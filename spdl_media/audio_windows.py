"""Random windows of audio, whole in samples, drawn from what the header says."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from os import PathLike
from typing import cast

import numpy as np

from spdl_media._checks import check_int
from spdl_media._probe import MediaInfo, probe
from spdl_media.crops import Rng, check_rng
from spdl_media.errors import DemuxError
from spdl_media.inputs import Source
from spdl_media.timing import Seconds, clip_window, parse_window

__all__ = ("sample_windows",)

# A sample rate, where only a duration is given.
_RATE = 48000


def sample_windows(
    src: Source | MediaInfo | float | Decimal | Fraction,
    length: Seconds,
    *,
    num: int = 1,
    rng: Rng | None = None,
) -> list[tuple[Fraction, Fraction]]:
    """Draw random windows of one length for :func:`~spdl_media.load_audio`.

    Each start is as likely as any other. Windows begin with a sample of the file, so all of one file hold
    equally many: ``length * sample_rate``, rounded up.

    Args:
        src: A source, whose header is read by :func:`~spdl_media.probe`; what that has returned; or the
            seconds that the audio lasts.
        length: Seconds of a window. Audio that is shorter has one window, which begins at 0:
            ``load_audio(num_samples=, on_short=)`` fills it up.
        num: Number of windows, which may overlap.
        rng: A generator of NumPy's, such as a :class:`~spdl_media.DataLoader` passes to its preprocessor, or
            a seed. ``None``: others each time.

    Returns:
        Pairs ``(start, end)`` of exact seconds on the container's clock.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: It is no media, has no audio, or does not say how long that is.
        ValueError: ``length`` or the seconds of ``src`` are not positive and finite, ``num`` is below 1, or
            the seed is negative.
        TypeError: ``src`` is no source, or ``rng`` neither a generator nor a seed.

    Thread safety: safe, if no other thread uses a file-like ``src`` or the ``rng``.

    Example:
        >>> [(start, end)] = sample_windows(12.5, 3, rng=0)
        >>> end - start
        Fraction(3, 1)
    """
    seconds, rate = clip_window(0, length).end or Fraction(0), _RATE
    duration: Seconds | None
    if isinstance(src, int | float | Real | Decimal):
        duration = cast("float", src)
        if not 0 < duration < math.inf:
            raise ValueError(f"src is audio of {duration} seconds; give a finite number above 0")
    else:
        info = src if isinstance(src, MediaInfo) else probe(src)
        name = str(src) if isinstance(src, str | PathLike) else None
        if info.audio is None:
            raise DemuxError("there is no audio to draw windows from", source=name)
        rate, duration = info.audio.sample_rate, info.audio.duration or info.duration
        if duration is None:
            raise DemuxError(
                f"this {info.format} does not say how long it is. Give the seconds in its place, such as "
                "sm.demux_audio(src).get_timestamps()[-1], which reads all of it",
                source=name,
            )
    found, wanted = (parse_window((None, one)).samples(rate)[1] or 0 for one in (duration, seconds))
    generator = np.random.default_rng(check_rng(rng))
    last = max(found - wanted, 0)
    starts = generator.integers(last, size=check_int("num", num), endpoint=True).tolist()
    return [(Fraction(start, rate), Fraction(start, rate) + seconds) for start in starts]
