"""The border to packages that are not ours.

Optional packages are imported here and nowhere else, at their first use, through one table that
knows how each is installed. PyAV, which brings FFmpeg, has a border of its own in ``_pyav``.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType, ModuleType

from spdl_media.errors import MissingDependencyError

INSTALL = MappingProxyType(
    {
        "fsspec": ("fsspec", 'pip install "spdl_media[fsspec]"'),
        "torch": ("torch", 'pip install "spdl_media[torch]"'),
    }
)
"""What an optional package is called when imported, and the line that installs it."""


def require(package: str, purpose: str) -> ModuleType:
    """Import an optional package, or say what needs it and how to get it.

    Raises:
        MissingDependencyError: It is not installed.
    """
    module, install = INSTALL[package]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs {package}, which is not installed ({error}). Install it: {install}",
            name=package,
        ) from error
