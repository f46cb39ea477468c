"""What is said when the CPU decodes a video that was to be decoded on a device."""

from __future__ import annotations

import sys
import warnings

__all__ = ("CPUFallbackWarning",)


class CPUFallbackWarning(UserWarning):
    """A video that NVDEC does not decode was decoded on the CPU and copied to the device."""


def warn_of_fallback(refusal: str) -> None:
    """Say that the CPU decodes, and why, in the name of the line outside of this package that asked."""
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("spdl_media."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{refusal}. The CPU decodes this video, and its frames are copied to the device",
        CPUFallbackWarning,
        stacklevel=level,
    )
