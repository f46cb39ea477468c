"""Write the media that the other samples read: noise images, audio and videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spdl_media.testing import AudioTrack, VideoTrack, make_audio, make_image, make_media

COLORS = ("blue", "green", "red")
# Format, codec, rate and channels, as in speech datasets.
SOUNDS = (
    ("flac", "flac", 16000, 1),
    ("mp3", "libmp3lame", 44100, 2),
    ("wav", "pcm_s16le", 22050, 1),
)


def make_photos(folder: Path, count: int) -> list[Path]:
    """Write JPEGs of blueish, greenish or reddish noise into folders named after the colour."""
    rng, paths = np.random.default_rng(count), []
    for index in range(count):
        color = index % len(COLORS)
        image = rng.integers(0, 200, (64, 96, 3), dtype=np.uint8)
        image[:, :, 2 - color] += 30
        path = folder / COLORS[color] / f"{index:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(image, codec="mjpeg"))
        paths.append(path)
    return paths


def make_sounds(folder: Path, seconds: Sequence[float]) -> list[Path]:
    """Write fading noise, one file per duration, alternating between FLAC, MP3 and WAV."""
    rng, paths = np.random.default_rng(0), []
    for index, duration in enumerate(seconds):
        format, codec, rate, channels = SOUNDS[index % len(SOUNDS)]
        count = round(rate * duration)
        noise = rng.normal(0, 3000, (count, channels)) * np.linspace(1, 0, count)[:, None]
        paths.append(folder / f"{index:02}.{format}")
        paths[-1].write_bytes(make_audio(noise.astype(np.int16), rate, codec=codec, format=format))
    return paths


def make_movies(folder: Path, count: int) -> list[Path]:
    """Write videos of at least 2 s that show a moving patch, with noise as audio."""
    rng, paths = np.random.default_rng(0), []
    for index in range(count):
        frames = np.zeros((50 + 7 * index, 72, 96), np.uint8)
        for number, frame in enumerate(frames):
            frame[20:50, number % 64 : number % 64 + 30] = 60 + 30 * (index % 6)
        noise = rng.normal(0, 3000, (len(frames) * 16000 // 25, 1)).astype(np.int16)
        tracks = [
            VideoTrack(frames=list(frames), codec="libx264", frame_rate=25, max_b_frames=2),
            AudioTrack(samples=noise, sample_rate=16000, codec="flac"),
        ]
        paths.append(folder / f"{index:02}.mkv")
        paths[-1].write_bytes(make_media(tracks))
    return paths


def cut_short(path: Path) -> None:
    """Truncate a file to its first half."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
