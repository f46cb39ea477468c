"""Which filter a ``load_*`` function runs: the caller's own graph, or its options."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final, TypeVar

from spdl_media.decode import Default
from spdl_media.filter_desc import FilterDesc
from spdl_media.formats import is_yuv
from spdl_media.operations import PictureOps, SoundOps

PICTURE_COLORS: Final = ("bt601", "pc")
"""Matrix and range of YUV made from stills: JPEG's own, so that most files need no conversion."""

VIDEO_OPS: Final = PictureOps(quality="auto")
"""What ``load_video`` does without any option."""

Ops = TypeVar("Ops", PictureOps, SoundOps)


def still_filter(ops: PictureOps, filter_desc: str | Default | None) -> str | None:
    """The filter of a still. YUV gets the colours of JPEG, so that images of all formats make one array.

    Raises:
        ValueError: ``filter_desc`` is given beside options that it replaces.
    """
    if ops.pix_fmt is not None and is_yuv(ops.pix_fmt):
        as_jpeg = replace(ops, color_matrix=PICTURE_COLORS[0], color_range=PICTURE_COLORS[1])
        if isinstance(filter_desc, Default):
            return FilterDesc(as_jpeg)
    return chosen_filter(ops, filter_desc, PictureOps())


def chosen_filter(ops: Ops, filter_desc: str | Default | None, default: Ops) -> str | None:
    """The caller's own graph, or what the options ask for.

    Raises:
        ValueError: ``filter_desc`` is given beside options that differ from the default.
    """
    if isinstance(filter_desc, Default):
        return FilterDesc(ops)
    for name in (field.name for field in fields(default)):
        if getattr(ops, name) != getattr(default, name):
            raise ValueError(
                f"filter_desc= is the whole filter graph, so {name}={getattr(ops, name)!r} would have no "
                "effect. Give one of them; get_video_filter_desc and get_audio_filter_desc write graphs with "
                "filters of your own in them"
            )
    return filter_desc
