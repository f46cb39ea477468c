"""Where each picture of a batch goes: the sizes and places that FFmpeg's filters give on the CPU path."""

from __future__ import annotations

from dataclasses import dataclass

from spdl_media.operations import PictureOps


@dataclass(frozen=True, slots=True)
class Placement:
    """How a picture becomes one of the size asked for: it is scaled, and a window of that is taken.

    Attributes:
        width: Width that the whole picture is scaled to.
        height: Height that the whole picture is scaled to.
        left: Left edge of the window in the scaled picture; below 0 there is a border.
        top: Upper edge of the window.
        out_width: Width of the window.
        out_height: Height of the window.
    """

    width: int
    height: int
    left: int
    top: int
    out_width: int
    out_height: int

    @property
    def is_whole(self) -> bool:
        """Whether the window is the scaled picture."""
        return (self.width, self.height) == (self.out_width, self.out_height)

    @property
    def is_covered(self) -> bool:
        """Whether the scaled picture covers the window, so that there is no border."""
        return self.width >= self.out_width and self.height >= self.out_height


def placement(width: int, height: int, options: PictureOps) -> Placement:
    """Place an upright picture of this size as :func:`~spdl_media.get_video_filter_desc` would."""
    sides = _sides(width, height, options)
    if options.width is None or options.height is None or options.scale_mode is None:
        return Placement(*sides, 0, 0, *sides)
    out = (options.width, options.height)
    if options.scale_mode == "pad":
        # FFmpeg's pad filter cuts off the fraction of half a pixel, its crop filter rounds to even.
        place = [-((outer - inner) // 2) for inner, outer in zip(sides, out, strict=True)]
    else:
        place = [round((inner - outer) / 2) for inner, outer in zip(sides, out, strict=True)]
    return Placement(*sides, place[0], place[1], *out)


def _sides(width: int, height: int, options: PictureOps) -> tuple[int, int]:
    """The size to scale to."""
    w, h = options.width, options.height
    if w is None and h is None:
        return width, height
    # The side that keeps the aspect ratio beside the one that was asked for.
    across = None if h is None else _rounded(h * width, height)
    down = None if w is None else _rounded(w * height, width)
    if w is None or h is None or across is None or down is None:
        return max(1, w or across or 0), max(1, h or down or 0)
    if options.scale_mode == "pad":
        return max(1, min(w, across)), max(1, min(h, down))
    return (max(w, across), max(h, down)) if options.scale_mode == "crop" else (w, h)


def _rounded(dividend: int, divisor: int) -> int:
    """The nearest whole number; a half goes up."""
    return (2 * dividend + divisor) // (2 * divisor)
