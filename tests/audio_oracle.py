"""Helpers of the audio tests: test signals, a linear decode by PyAV as the oracle, and frames as one
array."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from spdl_media import AudioCodec, AudioFrames, MediaError, Window, load_audio
from spdl_media._ffmpeg import CUTS_LAST_FRAME
from spdl_media.testing import AudioTrack, make_media, make_tone


@lru_cache
def sound(num_samples: int, rate: int = 48000, num_channels: int = 2) -> NDArray[np.int16]:
    """Make tones with noise of rising level, so that no two parts are equal."""
    tone = make_tone(num_samples, rate, (440.0, 997.0)[:num_channels])
    noise = np.random.default_rng(0).integers(-3000, 3000, tone.shape)
    return (tone * np.linspace(0.2, 1, num_samples)[:, None] + noise).astype(np.int16)


@lru_cache
def clip(
    codec: str,
    format: str,
    rate: int = 48000,
    seconds: int = 4,
    options: tuple[tuple[str, str], ...] = (),
    muxing: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Make a file with one stereo stream, a few samples longer than ``seconds``."""
    samples = sound(seconds * rate + 777, rate)
    track = AudioTrack(samples=samples, sample_rate=rate, codec=codec, options=dict(options))
    return make_media([track], format=format, options=dict(muxing))


@lru_cache
def linear(data: bytes) -> NDArray[np.generic]:
    """Decode all samples by PyAV's own container and decoder, ``(channels, samples)``."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(container.streams.best("audio")))
    samples = np.concatenate([_by_channel(frame) for frame in frames], axis=1)
    return samples[:, :-cut] if (cut := _padding(data, frames[-1].samples)) else samples


def _padding(data: bytes, last_size: int) -> int:
    """Return the number of samples of an MP4 after its end: FFmpeg 8 cuts none, FFmpeg 9 none of Opus."""
    with av.open(io.BytesIO(data)) as container:
        stream: Any = container.streams.best("audio")
        is_opus = "opus" in stream.codec.name
        if (CUTS_LAST_FRAME and not is_opus) or "mov" not in container.format.name:
            return 0
        *_, last, _ = container.demux(stream)
        assert last.pts is not None
        ends = stream.start_time + stream.duration, last.pts + (last.duration or last_size)
        return max(last.pts + last_size - min(ends), 0)


def outcome(data: Any, **options: Any) -> Any:
    """Load a file. Return its samples, or the error as text."""
    try:
        return load_audio(data, **options).array
    except MediaError as error:
        return f"{type(error).__name__}: {error}"


def _by_channel(frame: av.AudioFrame) -> NDArray[np.generic]:
    array = frame.to_ndarray()
    return array if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels).T


def samples_of(frames: AudioFrames) -> NDArray[np.generic]:
    """Return all samples of frames, ``(channels, samples)``; ``(0, 0)`` if there are none."""
    if not len(frames):
        return np.empty((0, 0))
    planar = frames.sample_fmt.endswith("p")
    parts = [np.stack(chunk.planes) if planar else chunk.planes[0].T for chunk in frames.chunks]
    return np.concatenate(parts, axis=1)


def assert_same(
    samples: NDArray[np.generic], wanted: NDArray[np.generic], codec: AudioCodec
) -> None:
    """Compare a window bit for bit; for Opus, which has long memory, within one level of 16 bits."""
    step = 2**-15 if codec.name == "opus" else 0
    np.testing.assert_allclose(samples, wanted, rtol=0, atol=step)


def expected(
    samples: NDArray[np.generic], window: Window, rate: int, first_sample: int = 0
) -> NDArray[np.generic]:
    """Return the part of a linear decode that lies in a window; the decode begins at ``first_sample``."""
    first, stop = window.samples(rate)
    last = samples.shape[1] if stop is None else max(stop - first_sample, 0)
    return samples[:, max(first - first_sample, 0) : last]
