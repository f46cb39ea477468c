"""The border to packages that are not ours.

Optional packages are imported here and nowhere else, at their first use, through one table that
knows how each is installed. PyAV, which brings FFmpeg, has a border of its own in ``_pyav``.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import MappingProxyType, ModuleType

from spdl_media.errors import MissingDependencyError

INSTALL = MappingProxyType(
    {
        # [ctk] brings what CuPy compiles kernels with.
        "cupy": (
            "cupy",
            'pip install "cupy-cuda12x[ctk]" (or "cupy-cuda13x[ctk]", as the driver is)',
        ),
        "dali": (
            "nvidia.dali",
            "pip install nvidia-dali-cuda120 (or nvidia-dali-cuda130, as the driver is)",
        ),
        "fsspec": ("fsspec", 'pip install "spdl_media[fsspec]"'),
        "jax": ("jax", "pip install jax"),
        "numba": ("numba.cuda", "pip install numba-cuda[cu12] (or [cu13], as the driver is)"),
        "nvimgcodec": (
            "nvidia.nvimgcodec",
            "pip install nvidia-nvimgcodec-cu12 (or nvidia-nvimgcodec-cu13, as the driver is)",
        ),
        "simplejpeg": ("simplejpeg", 'pip install "spdl_media[jpeg]"'),
        "torch": ("torch", 'pip install "spdl_media[torch]"'),
    }
)
"""What an optional package is called when imported, and the line that installs it."""


def is_available(package: str) -> bool:
    """Whether an optional package is installed, without importing it."""
    try:
        return importlib.util.find_spec(INSTALL[package][0]) is not None
    except (ImportError, ValueError):  # an import hook forbids it; a stand-in without a spec
        return False


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
