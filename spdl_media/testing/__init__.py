"""Media made in memory, for tests: pixels and samples that tell their own index.

What goes in is then the exact oracle for what must come out: a frame that was skipped, doubled,
shifted, turned or taken from the wrong stream shows in its pixels. Everything here is
deterministic; the same call gives the same bytes with the same version of PyAV.

    frames = index_planes(30, 64, 48, "yuv420p")
    data = make_video(frames, codec="libx264", format="mp4", pix_fmt="yuv420p", max_b_frames=2)

Files of several streams are lists of tracks: ``make_media([VideoTrack(...), AudioTrack(...)],
format="mp4")``.
"""

from __future__ import annotations

from spdl_media.testing.images import (
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_tone,
)
from spdl_media.testing.media import (
    AudioTrack,
    VideoTrack,
    make_audio,
    make_image,
    make_media,
    make_video,
)

__all__ = (
    "AudioTrack",
    "VideoTrack",
    "frame_index",
    "index_frames",
    "index_planes",
    "index_samples",
    "make_audio",
    "make_image",
    "make_media",
    "make_tone",
    "make_video",
)
