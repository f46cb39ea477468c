"""What can be said of a container format before FFmpeg opens anything."""

from __future__ import annotations

from functools import lru_cache

import av.format

from spdl_media._checks import did_you_mean

__all__ = ("check_format", "index_is_last", "may_be_mp4")

_MP4_NAMES = frozenset({"mov", "mp4", "m4a", "3gp", "3g2", "mj2"})
_BEFORE_INDEX = frozenset({b"ftyp", b"free", b"skip", b"wide", b"uuid", b"pnot"})


def check_format(format: str) -> None:
    """Refuse the name of a format that FFmpeg cannot read, which PyAV in part would ignore.

    Raises:
        ValueError: FFmpeg has no demuxer of this name.
    """
    if not _is_demuxer(format):
        names = {part for name in av.format.formats_available for part in name.split(",")}
        hint = did_you_mean(format, sorted(filter(_is_demuxer, names)))
        raise ValueError(
            f"this FFmpeg cannot read a format named {format!r}. {hint and hint + ' '}"
            "See https://ffmpeg.org/ffmpeg-formats.html#Demuxers"
        )


@lru_cache(maxsize=1024)
def _is_demuxer(format: str) -> bool:
    try:
        av.format.ContainerFormat(format, "r")
    except ValueError:
        return False
    return True


def may_be_mp4(format: str | None) -> bool:
    """Whether a format as given by the user (or not) allows for an MP4 or QuickTime file."""
    return format is None or not _MP4_NAMES.isdisjoint(format.split(","))


def index_is_last(head: bytes) -> bool:
    """Whether an MP4 or QuickTime file that begins so has its samples before its index."""
    position = 0
    while position + 8 <= len(head):
        size, kind = (
            int.from_bytes(head[position : position + 4]),
            head[position + 4 : position + 8],
        )
        if kind == b"mdat":
            return True
        if kind not in _BEFORE_INDEX or size < 8:
            return False
        position += size
    return False
