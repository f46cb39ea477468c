"""Load batches of speech: random windows of 3 s at 16 kHz, padded, with lengths; and compute log-mel spectra.

Command::

    python samples/speech.py

It makes 20 audio files of 1 to 6 seconds in a temporary folder: FLAC, MP3 and WAV, with different sample
rates and numbers of channels.

Output::

    (8, 80, 301) float32, frames: 301 101 156 211 266 301 301 301
    (8, 80, 301) float32, frames: 101 156 211 266 301 301 301 101
    (4, 80, 301) float32, frames: 156 211 266 301

``loader`` does all of the loading; with ``to="torch"`` it gives tensors.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from made_media import make_sounds

import spdl_media as sm

RATE, SECONDS = 16000, 3
SIZE, STEP, NUM_MELS = 400, 160, 80
SECONDS_OF_FILES = (6, 1, 1.55, 2.1, 2.65, 3.2, 4.5)


def load(path: Path, rng: np.random.Generator) -> sm.CPUBuffer:
    """Load a random window of a file, or a shorter file completely."""
    (window,) = sm.sample_windows(path, SECONDS, rng=rng)
    return sm.load_audio(path, window, sample_rate=RATE, num_channels=1)


def loader(paths: list[Path]) -> sm.DataLoader:
    """Make a loader of batches with ``data`` and ``lengths``."""
    return sm.DataLoader(
        paths,
        preprocessor=load,
        batch_size=8,
        aggregator=functools.partial(sm.collate, pad=True),
        output_order="input",
        to="numpy",
    )


def log_mel(waves: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return log-mel spectra ``(B, 80, 1 + samples // 160)`` of waves ``(B, samples)``."""
    padded = np.pad(waves, ((0, 0), (SIZE // 2, SIZE // 2)), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, SIZE, axis=1)[:, ::STEP]
    power = np.abs(np.fft.rfft(frames * np.hanning(SIZE).astype(np.float32))) ** 2
    edges = np.expm1(np.linspace(0, np.log1p(RATE / 2 / 700), NUM_MELS + 2)) * 700
    bins = np.fft.rfftfreq(SIZE, 1 / RATE)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    mel = power @ filters.T
    return np.log(np.maximum(mel, 1e-10)).swapaxes(1, 2).astype(np.float32)


def main() -> None:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = itertools.islice(itertools.cycle(SECONDS_OF_FILES), 20)
        for audio, lengths in loader(make_sounds(Path(folder), list(seconds))):
            spectra = log_mel(audio[:, 0])
            print(spectra.shape, f"{spectra.dtype}, frames:", *(1 + lengths // STEP))


if __name__ == "__main__":
    main()
