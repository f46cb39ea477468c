"""Packages that only some of the pipeline needs, imported at their first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from spdl_media.pipeline.errors import MissingPackageError

__all__ = ("require",)


def require(module: str, purpose: str) -> ModuleType:
    """Import an optional package, or say what needs it and how to get it.

    Raises:
        MissingPackageError: It is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs {package}, which cannot be imported ({error}). "
            f"Install it: pip install {package}"
        ) from error
