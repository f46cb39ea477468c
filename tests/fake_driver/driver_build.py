"""A stand-in for NVIDIA's driver, compiled from C.

A process must load it before any other driver, so tests start a process for it (``run``). Formats, surfaces
and errors are as on a GPU. Decoded pictures are only stamped with numbers, and no call takes time.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOLDER = "SPDL_MEDIA_FAKE_DRIVER"
PARTS = {"cuda": "libcuda.so.1", "cuvid": "libnvcuvid.so.1"}


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path, *options: str) -> Path:
    """Compile both libraries into a folder for ``LD_LIBRARY_PATH``."""
    tool = compiler()
    if tool is None or sys.platform != "linux":
        pytest.skip("no C compiler for the driver that stands in for NVIDIA's")
    for part, library in PARTS.items():
        command = [tool, "-shared", "-fPIC", "-O1", "-Wall", *options]
        command += [f"-Wl,-soname,{library}", "-o", str(folder / library), str(HERE / f"{part}.c")]
        subprocess.run(command, check=True)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process with the driver of the folder."""
    found = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, FOLDER: str(folder), "LD_LIBRARY_PATH": os.pathsep.join(found)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


class Part:
    """Settings and counters of one library, as attributes with their C names without the prefix."""

    def __init__(self, part: str) -> None:
        self.__dict__["_library"] = ctypes.CDLL(PARTS[part])
        self.__dict__["_prefix"] = f"fake_{part}_"

    def _value(self, name: str) -> ctypes.c_longlong:
        return ctypes.c_longlong.in_dll(self._library, self._prefix + name)

    def __getattr__(self, name: str) -> int:
        return self._value(name).value

    def __setattr__(self, name: str, value: int) -> None:
        self._value(name).value = value
