"""``spdl-media doctor``: what is there, what is missing, and the line that gets it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import click

from spdl_media._ffmpeg import has_codec, library_versions
from spdl_media._optional import INSTALL, is_available
from spdl_media.cli.terminal import show_table
from spdl_media.cuda.capabilities import cuda_capabilities
from spdl_media.loader_arguments import usable_cores

_DECODERS = "mjpeg png webp gif tiff h264 hevc av1 vp8 vp9 mpeg4 aac mp3 opus vorbis flac".split()
_ENCODERS = "mjpeg png libwebp libsvtav1 libx264 libx265 libvpx-vp9 ffv1 aac libmp3lame libopus flac".split()

_PACKAGES = {
    "torch": "tensors, pinned memory",
    "jax": "arrays of JAX",
    "pillow": "images that FFmpeg reads wrongly or not at all",
    "pillow-heif": "HEIC of phones",
    "simplejpeg": "JPEGs shrunk while they are decoded",
    "fsspec": "URLs",
    "isal": "faster npz files",
    "matplotlib": "plots of profiles",
    "tqdm": "progress bars of pipelines",
}
_CUDA = ("pinned_memory", "transfer", "kernels", "dali", "nvjpeg", "nvdec")
_FEW_FILES = 4096
_SMALL_MEMORY = 1 << 30


class Row(NamedTuple):
    """One thing that was looked for.

    Attributes:
        status: ``"missing"`` of what the library needs, ``"optional"`` of what some of it needs, ``"note"``
            of a limit that may be too low.
        name: What it is.
        found: What was found, or why it is not.
        fix: The line that would mend it.
    """

    status: Literal["ok", "missing", "optional", "note"]
    name: str
    found: str
    fix: str = ""


@click.command("doctor", short_help="Show what is missing here.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: an object for each row.")
def command(*, as_json: bool) -> int:
    """Show what is there and what is missing, and the line that gets it.

    The exit status is 1 if something is missing that the library needs.

    \b
    Examples:
      spdl-media doctor
      spdl-media doctor --json
    """
    rows = list(_rows())
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        cells = [(*row[:2], f"{row.found}\n-> {row.fix}" if row.fix else row.found) for row in rows]
        show_table(("", "", ""), cells)
    return int(any(row.status == "missing" for row in rows))


def _rows() -> Iterator[Row]:
    gil = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"
    python = f"{platform.python_implementation()} {platform.python_version()}{gil}, {platform.platform()}"
    yield Row("ok", "Python", python)
    for name in ("spdl_media", "av", "numpy"):
        yield Row("ok", name, _version(name))
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    yield Row("ok", "FFmpeg", f"inside PyAV: {versions}")
    yield _codecs("decoders", _DECODERS, "r")
    yield _codecs("encoders", _ENCODERS, "w")
    for name, purpose in _PACKAGES.items():
        if is_available(name):
            yield Row("ok", name, _version(name))
        else:
            yield Row("optional", name, f"not installed; for {purpose}", INSTALL[name][1])
    yield from _cuda()
    yield from _system()


def _version(distribution: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return "imported from its folder, not installed"


def _codecs(name: str, wanted: list[str], mode: Literal["r", "w"]) -> Row:
    missing = [one for one in wanted if not has_codec(one, mode)]
    if missing:
        fix = "python -m pip install --force-reinstall --only-binary av av"
        return Row("missing", name, f"not in this build of PyAV: {' '.join(missing)}", fix)
    return Row("ok", name, " ".join(wanted))


def _cuda() -> Iterator[Row]:
    capabilities = cuda_capabilities()
    for name in _CUDA:
        one = getattr(capabilities, name)
        lack = f"missing: {', '.join(one.missing)}" if one.missing else one.reason
        yield Row("ok" if one else "optional", name, "can be used" if one else lack)
    for name, part in capabilities.parts.items():
        # What is the matter, and then what helps.
        found, _, fix = part.reason.partition(". " if ". " in part.reason else ": ")
        yield Row("ok" if part else "optional", f"CUDA: {name}", found or "there", fix)


def _system() -> Iterator[Row]:
    cores = usable_cores()
    text = f"{cores} of {os.cpu_count()} may be used: num_threads={cores} unless you say otherwise"
    yield Row("ok", "cores", text)
    shared = Path("/dev/shm")  # noqa: S108  # where batches of other processes lie
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        text = f"{usage.free / 2**30:.2f} of {usage.total / 2**30:.2f} GiB free"
        fix = "mount -o remount,size=8G /dev/shm (of a container: docker run --shm-size=8g)"
        is_low = usage.free < _SMALL_MEMORY
        yield Row("note", str(shared), text, fix) if is_low else Row("ok", str(shared), text)
    with suppress(ImportError):  # Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = (f"{n:,}" if n != resource.RLIM_INFINITY else "unlimited" for n in (soft, hard))
        text = f"{' (at most '.join(limits)})"
        fix = f"ulimit -n {min(65536, hard) if hard >= 0 else 65536}"
        is_low = 0 <= soft < _FEW_FILES
        yield Row("note", "open files", text, fix) if is_low else Row("ok", "open files", text)
