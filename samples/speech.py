"""Batches of speech: random windows of 3 s at 16 kHz, padded, with their lengths, as log-mel spectra.

Command::

    python samples/speech.py

It makes 20 sounds of 1 to 6 seconds in a temporary folder: FLAC, MP3 and WAV, of several rates and channels.

Output::

    (8, 80, 301) float32, frames: 301 101 156 211 266 301 301 301
    (8, 80, 301) float32, frames: 101 156 211 266 301 301 301 101
    (4, 80, 301) float32, frames: 156 211 266 301
    resumed after 1 batch: the same

Exit status: 0, or 1 if a loader that resumed gives other batches.
"""

from __future__ import annotations

import functools
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import spdl_media as sm
from spdl_media.testing import make_audio

RATE, SECONDS = 16000, 3
SIZE, STEP, NUM_MELS = 400, 160, 80
SECONDS_OF_FILES = (6, 1, 1.55, 2.1, 2.65, 3.2, 4.5)


def load(path: Path, rng: np.random.Generator) -> dict[str, Any]:
    """A random window of a file, or all of it where it is shorter."""
    (window,) = sm.sample_windows(path, SECONDS, rng=rng)
    return {
        "audio": sm.load_audio(path, window, sample_rate=RATE, num_channels=1),
        "name": path.name,
    }


def loader(paths: list[Path]) -> sm.DataLoader:
    """With ``to="torch"`` it gives tensors."""
    return sm.DataLoader(
        paths,
        preprocessor=load,
        batch_size=8,
        aggregator=functools.partial(sm.collate, pad={"audio": -1}),
        output_order="input",
        to="numpy",
    )


def log_mel(waves: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Logarithms of mel spectra, ``(B, 80, 1 + samples // 160)``, of waves ``(B, samples)``."""
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


def make_speech(folder: Path) -> list[Path]:
    """Write noise that fades, in the formats and rates of collections of speech."""
    rng, paths = np.random.default_rng(0), []
    kinds = (
        ("flac", "flac", 16000, 1),
        ("mp3", "libmp3lame", 44100, 2),
        ("wav", "pcm_s16le", 22050, 1),
    )
    for index, (format, codec, rate, channels) in zip(range(20), itertools.cycle(kinds)):
        count = round(rate * SECONDS_OF_FILES[index % len(SECONDS_OF_FILES)])
        noise = rng.normal(0, 3000, (count, channels)) * np.linspace(1, 0, count)[:, None]
        paths.append(folder / f"{index:02}.{format}")
        paths[-1].write_bytes(make_audio(noise.astype(np.int16), rate, codec=codec, format=format))
    return paths


def main() -> int:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        paths = make_speech(Path(folder))
        batches = list(loader(paths))
        for batch in batches:
            audio, lengths = batch["audio"]
            spectra = log_mel(audio[:, 0])
            print(spectra.shape, f"{spectra.dtype}, frames:", *(1 + lengths // STEP))
        begun = loader(paths)
        next(iter(begun))
        resumed = loader(paths)
        resumed.load_state_dict(begun.state_dict())
        rest = list(resumed)
        same = len(rest) == 2 and all(
            np.array_equal(one["audio"].data, other["audio"].data)
            for one, other in zip(batches[1:], rest, strict=True)
        )
        print(f"resumed after 1 batch: {'the same' if same else 'others'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
