"""Import optional packages at first use; the error for a missing one says how to install it."""

from __future__ import annotations

import importlib
import importlib.util
from types import MappingProxyType, ModuleType

from spdl_media.errors import MissingDependencyError

# For each optional package: the module to import, and the command that installs it.
INSTALL = MappingProxyType(
    {
        "cloudpickle": ("cloudpickle", 'pip install ".[dask]" in a clone of spdl_media'),
        "click": ("click", 'pip install ".[cli]" in a clone of spdl_media'),
        "cupy": ("cupy", "pip install cupy-cuda12x (or cupy-cuda13x, as the driver is)"),
        "dali": (
            "nvidia.dali",
            "pip install nvidia-dali-cuda120 (or nvidia-dali-cuda130, as the driver is)",
        ),
        "fsspec": ("fsspec", 'pip install ".[fsspec]" in a clone of spdl_media'),
        "isal": ("isal.isal_zlib", 'pip install ".[isal]" in a clone of spdl_media'),
        "jax": ("jax", "pip install jax"),
        "matplotlib": ("matplotlib.figure", "pip install matplotlib"),
        "numba": ("numba.cuda", "pip install numba-cuda[cu12] (or [cu13], as the driver is)"),
        "nvimgcodec": (
            "nvidia.nvimgcodec",
            "pip install nvidia-nvimgcodec-cu12 (or nvidia-nvimgcodec-cu13, as the driver is)",
        ),
        "pillow": ("PIL.Image", 'pip install ".[stills]" in a clone of spdl_media'),
        "pillow-heif": ("pillow_heif", 'pip install ".[stills]" in a clone of spdl_media'),
        "rich": ("rich.console", 'pip install ".[cli]" in a clone of spdl_media'),
        "rich-table": ("rich.table", 'pip install ".[cli]" in a clone of spdl_media'),
        "simplejpeg": ("simplejpeg", 'pip install ".[jpeg]" in a clone of spdl_media'),
        "torch": ("torch", 'pip install ".[torch]" in a clone of spdl_media'),
        "tqdm": ("tqdm.auto", "pip install tqdm"),
    }
)


def is_available(package: str) -> bool:
    """Whether an optional package is installed, without importing it."""
    try:
        # For a dotted name, find_spec imports the parent packages, but not the module itself.
        return importlib.util.find_spec(INSTALL[package][0]) is not None
    except (ImportError, ValueError):  # forbidden by an import hook; a stub without a spec
        return False


def require(
    package: str, purpose: str, error: type[ImportError] = MissingDependencyError
) -> ModuleType:
    """Import an optional package, or raise an error that says what needs it and how to install it.

    Args:
        package: Key of the package in :data:`INSTALL`.
        purpose: The feature that needs it, as the subject of the message.
        error: Class of the error to raise if the package is missing.

    Raises:
        ImportError: The package is not installed. The class is ``error``.
    """
    module, install = INSTALL[package]
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        problem = error(
            f"{purpose} needs {package}, which is not installed ({missing}). Install it: {install}"
        )
        problem.name = package
        raise problem from missing
