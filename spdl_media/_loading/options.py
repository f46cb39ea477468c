"""From the options of ``load_*`` to the text of a filter graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spdl_media._checks import check_positive
from spdl_media._decoding.defaults import Default
from spdl_media._filters.stages import Quality, Rate, ScaleAlgo, ScaleMode
from spdl_media.filter_desc import get_audio_filter_desc, get_video_filter_desc
from spdl_media.planes import is_yuv

PICTURE_COLORS: Final = ("bt601", "pc")
"""Matrix and range of YUV made from stills: JPEG's own, so that most files need no conversion."""

# A graph that does nothing. Without a graph, pictures would not be turned upright.
_NOTHING = "null"


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """How pictures are to come out. The arguments of :func:`~spdl_media.load_image` explain them."""

    width: int | None = None
    height: int | None = None
    pix_fmt: str | None = "rgb24"
    scale_mode: ScaleMode | None = "pad"
    scale_algo: ScaleAlgo = "bicubic"
    quality: Quality = "accurate"
    frame_rate: Rate | None = None

    def desc(self, filter_desc: str | Default | None, *, still: bool = False) -> str | None:
        """The filter graph: the caller's own, or what these options ask for.

        ``still``: YUV is to have the colours of JPEG, whatever the file, so that pictures of all formats
        make one array. Videos keep their own.
        """
        if not isinstance(filter_desc, Default):
            _refuse_both(self, PictureOptions())
            return filter_desc
        # The builder of the graph knows them by longer names.
        for name, side in (("width", self.width), ("height", self.height)):
            if side is not None:
                check_positive(name, side)
        as_jpeg = still and isinstance(self.pix_fmt, str) and is_yuv(self.pix_fmt)
        written = get_video_filter_desc(
            scale_width=self.width,
            scale_height=self.height,
            pix_fmt=self.pix_fmt,
            scale_mode=self.scale_mode,
            scale_algo=self.scale_algo,
            quality=self.quality,
            frame_rate=self.frame_rate,
            color_matrix=PICTURE_COLORS[0] if as_jpeg else None,
            color_range=PICTURE_COLORS[1] if as_jpeg else None,
        )
        return written or _NOTHING


@dataclass(frozen=True, slots=True)
class SoundOptions:
    """How sound is to come out. The arguments of :func:`~spdl_media.load_audio` explain them."""

    sample_rate: int | None = None
    num_channels: int | None = None
    sample_fmt: str | None = "fltp"

    def desc(self, filter_desc: str | Default | None) -> str | None:
        """The filter graph: the caller's own, or what these options ask for."""
        if not isinstance(filter_desc, Default):
            _refuse_both(self, SoundOptions())
            return filter_desc
        return get_audio_filter_desc(
            sample_rate=self.sample_rate,
            num_channels=self.num_channels,
            sample_fmt=self.sample_fmt,
        )


def _refuse_both(
    given: PictureOptions | SoundOptions, default: PictureOptions | SoundOptions
) -> None:
    for name in type(given).__slots__:
        if getattr(given, name) != getattr(default, name):
            raise ValueError(
                f"filter_desc= is the whole filter graph, so {name}={getattr(given, name)!r} would have no "
                "effect. Give one of them; get_video_filter_desc and get_audio_filter_desc write graphs with "
                "filters of your own in them"
            )
