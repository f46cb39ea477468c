"""What is said when the CPU decodes what a GPU was to decode."""

from __future__ import annotations

import sys
import warnings

__all__ = ("CPUFallbackWarning",)


class CPUFallbackWarning(UserWarning):
    """What a GPU was to decode was decoded on the CPU and copied to the device. The message says why."""


def warn_of_fallback(refusal: str, what: str = "this video") -> None:
    """Warn that the CPU decodes, and why, with the stack level of the caller outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("spdl_media."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{refusal}. The CPU decodes {what}, and the result is copied to the device",
        CPUFallbackWarning,
        stacklevel=level,
    )
