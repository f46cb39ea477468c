"""Decoded frames as plain values: their indices, and digests to compare two processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

import spdl_media as sm
from spdl_media.testing import frame_index


def indices(frames: Iterable[sm.ImageFrames]) -> list[int]:
    """Return the indices that the first planes of the frames show."""
    return [frame_index(frame.planes[0]) for frame in frames]


def digest(packets: Any) -> tuple[Any, ...]:
    """Decode packets, and return counts, times, metadata and a hash of all planes."""
    frames = sm.decode_packets(packets, filter_desc=None)
    if isinstance(frames, sm.AudioFrames):
        planes = [plane for chunk in frames.chunks for plane in chunk.planes]
        facts: tuple[Any, ...] = (len(frames), frames.first_sample, frames.timestamps)
    else:
        pictures = list(frames) if isinstance(frames, sm.VideoFrames) else [frames]
        planes = [plane for picture in pictures for plane in picture.planes]
        facts = (
            [(picture.timestamp, picture.width, picture.height) for picture in pictures],
            frames.rotation,
            frames.mirrored,
            frames.colorspace if pictures else None,
        )
    content = hashlib.sha256()
    for plane in planes:
        content.update(np.ascontiguousarray(plane))
    return repr(facts), packets.get_timestamps(raw=True), content.hexdigest()


def digest_all(packets: list[Any]) -> list[tuple[Any, ...]]:
    """Return the digest of each of the packets."""
    return [digest(one) for one in packets]
