"""Decoded samples, still in FFmpeg's memory and layout; and what all kinds of frames are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import av

from spdl_media._audio_chunks import AudioChunk, cut_chunks
from spdl_media.image_frames import DecodedFrames, FrameMetadata, ImageFrames, VideoFrames

__all__ = ("AudioFrames", "Frames")


class AudioFrames(DecodedFrames):
    """Samples of an audio stream. Made by :func:`~spdl_media.decode_packets`.

    ``len(frames)`` counts samples of one channel; ``frames[a:b]`` shares memory, step 1 only. Rate,
    channels and format are those of the first sample; without any sample they raise a ValueError
    that names the window.

    Thread safety: immutable, free to share.
    """

    __slots__ = ("_chunks", "_first_sample")

    def __init__(
        self,
        chunks: Sequence[AudioChunk],
        metadata: FrameMetadata | None = None,
        *,
        first_sample: int = 0,
    ) -> None:
        # The first chunk tells the format and the place of the first sample, so none may be empty.
        self._chunks = tuple(chunk for chunk in chunks if len(chunk))
        self._metadata = metadata or FrameMetadata()
        self._first_sample = first_sample

    def _first(self) -> av.AudioFrame:
        if not self._chunks:
            raise self._no_first("sample")
        return self._chunks[0].frame

    @property
    def chunks(self) -> tuple[AudioChunk, ...]:
        """The samples as FFmpeg holds them, frame by frame."""
        return self._chunks

    @property
    def num_frames(self) -> int:
        """Samples of one channel, the same as ``len(frames)``."""
        return len(self)

    @property
    def num_channels(self) -> int:
        """Number of channels.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().layout.nb_channels

    @property
    def channel_layout(self) -> str:
        """FFmpeg's name of the channel layout, such as ``"stereo"``.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().layout.name

    @property
    def sample_rate(self) -> int:
        """Samples of one channel in a second.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().sample_rate

    @property
    def sample_fmt(self) -> str:
        """FFmpeg's name of the sample format, such as ``"fltp"``; a final ``p``: one plane a channel.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().format.name

    @property
    def pts(self) -> tuple[int | None, ...]:
        """Presentation timestamps of the chunks as FFmpeg has them, before any cutting."""
        return tuple(chunk.frame.pts for chunk in self._chunks)

    @property
    def first_sample(self) -> int:
        """Position of the first sample: sample k of the container's clock stands at k / sample_rate."""
        return self._first_sample

    @property
    def timestamp(self) -> float:
        """Seconds on the container's clock at which the first sample stands.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first_sample / self.sample_rate

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds on the container's clock at which each of the :attr:`chunks` begins."""
        position, times = self._first_sample, []
        for chunk in self._chunks:
            # Where the file leaves audio out, or damage was dropped, a chunk does not follow on.
            position = position if chunk.position is None else chunk.position
            times.append(position / self.sample_rate)
            position += len(chunk)
        return tuple(times)

    @property
    def is_corrupt(self) -> tuple[bool, ...]:
        """Which chunks the decoder reported as damaged; only with ``on_corrupt="keep"`` can one be."""
        return tuple(bool(chunk.frame.is_corrupt) for chunk in self._chunks)

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __getitem__(self, key: slice) -> AudioFrames:
        # Chunks are runs of samples, which no other step could share.
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(
                f"audio frames are cut by a slice with step 1, such as [:16000], not {key!r}"
            )
        start, stop, _ = key.indices(len(self))
        chunks = list(cut_chunks(self._chunks, start, max(start, stop)))
        # A chunk knows its own place, which counts the gaps before it.
        first = chunks[0].position if chunks else None
        first = self._first_sample + start if first is None else first
        return AudioFrames(chunks, self._metadata, first_sample=first)

    def __repr__(self) -> str:
        if not self._chunks:
            return f"<AudioFrames: none in {self._metadata.window}>"
        return (
            f"<AudioFrames: {len(self)} samples of {self.num_channels} channels {self.sample_fmt}, "
            f"{self.sample_rate} Hz, from {self.timestamp:.3f} s>"
        )


Frames: TypeAlias = AudioFrames | VideoFrames | ImageFrames


def frame_metadata(frames: Frames) -> FrameMetadata:
    return frames._metadata
