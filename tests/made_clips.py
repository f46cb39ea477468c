"""Videos of many containers and codecs, whose frames show their own numbers."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np

from spdl_media.testing import VideoTrack, index_planes, make_media

NUM_FRAMES = 30
# Uneven times of frames in milliseconds: a pause, a burst, thirds of a millisecond.
UNEVEN = [0, 40, 80, 81, 83, 120, 500, 533, 566, 600, 601, 602, 900, 1400, 1401, 1433, 1999, 2000]


@cache
def planes() -> list[tuple[np.ndarray, ...]]:
    return index_planes(NUM_FRAMES, 64, 48)


@cache
def clip(kind: str) -> bytes:
    """Make a clip ``container/codec/B-frames/variant``: 30 frames, 10 per second, a key frame every 8."""
    format, codec, b_frames, how = kind.split("/")
    x264 = {"refresh": "intra-refresh=1", "interlaced": "interlaced=1"}.get(how)
    muxing = {
        "fragments": {"movflags": "frag_keyframe+empty_moov+default_base_moof"},
        "dash": {"movflags": "dash+frag_every_frame+delay_moov"},
        "negative": {"movflags": "negative_cts_offsets"},
        "hybrid": {"movflags": "frag_keyframe"},
    }
    track = VideoTrack(
        frames=planes(),
        codec=codec,
        gop_size=8,
        max_b_frames=int(b_frames),
        open_gop=how == "open",
        options={"x264-params": x264} if x264 else {},
    )
    data = make_media([track], format=format, options=muxing.get(how))
    # A recording that began within a GOP.
    return data[188 * 40 :] if how == "cut" else data


@cache
def uneven(format: str) -> bytes:
    track = VideoTrack(
        frames=planes()[: len(UNEVEN)],
        codec="libx265",
        max_b_frames=2,
        gop_size=5,
        pts=UNEVEN,
        time_base=Fraction(1, 1000),
    )
    return make_media([track], format=format)
