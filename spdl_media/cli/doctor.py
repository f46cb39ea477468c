"""``spdl-media doctor``: what is there, what is missing, and the line that gets it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from spdl_media._ffmpeg import has_codec, library_versions
from spdl_media._loader_arguments import usable_cores
from spdl_media._optional import INSTALL, is_available
from spdl_media.cli.terminal import indented, make_console, print_stripped
from spdl_media.cuda.capabilities import cuda_capabilities

_STYLES = {"ok": "green", "missing": "red", "optional": "yellow", "note": "yellow"}
_NARROW = 60

_DECODERS = (
    "mjpeg png webp gif tiff h264 hevc av1 vp8 vp9 mpeg4 prores aac mp3 opus vorbis flac".split()
)
_ENCODERS = "mjpeg png libwebp libsvtav1 libx264 libx265 libvpx-vp9 ffv1 aac libmp3lame libopus flac".split()

_PACKAGES = {
    "torch": "tensors, pinned memory",
    "jax": "arrays of JAX",
    "cupy": "kernels and arrays on a GPU",
    "dali": "decoding of images on a GPU",
    "pillow": "images that FFmpeg reads wrongly or not at all",
    "pillow-heif": "HEIC of phones",
    "simplejpeg": "JPEGs shrunk while they are decoded",
    "fsspec": "URLs",
    "isal": "faster npz files",
    "matplotlib": "plots of profiles",
    "tqdm": "progress bars of pipelines",
}
_DISTRIBUTIONS = {
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "dali": ("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
}
_CUDA = {
    "pinned_memory": "pinned memory",
    "transfer": "copies to the GPU",
    "kernels": "kernels",
    "dali": "DALI",
    "nvjpeg": "nvJPEG",
    "nvdec": "NVDEC",
}
_FEW_FILES = 4096
_SMALL_MEMORY = 1 << 30


@dataclass(frozen=True)
class Row:
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


def show(*, as_json: bool) -> int:
    """Print all rows; the exit status is 1 if something is missing that the library needs."""
    rows = list(_rows())
    console = make_console()
    if as_json:
        console.out(json.dumps([asdict(row) for row in rows], indent=2), highlight=False)
    elif console.width < _NARROW:
        for row in rows:
            head, text = Text.assemble((row.status, _STYLES[row.status]), " ", row.name), _text(row)
            if len(head) + len(text) < console.width and not row.fix:
                console.print(head.append(f" {text}"))
            else:
                console.print(head)
                console.print(indented(text))
    else:
        table = Table.grid("", "", "", padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(Text(row.status, _STYLES[row.status]), row.name, _text(row))
        print_stripped(console, table)
    return int(any(row.status == "missing" for row in rows))


def _text(row: Row) -> str:
    return f"{row.found}\n-> {row.fix}" if row.fix else row.found


def _rows() -> Iterator[Row]:
    gil = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"
    python = f"{platform.python_implementation()} {platform.python_version()}{gil}, {platform.platform()}"
    yield Row("ok", "Python", python)
    for name in ("spdl_media", "av", "numpy"):
        yield Row("ok", name, _version(name) or "not installed, but imported from its folder")
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    yield Row("ok", "FFmpeg", f"inside PyAV: {versions}")
    yield _codecs("decoders", _DECODERS, "r")
    yield _codecs("encoders", _ENCODERS, "w")
    for name, purpose in _PACKAGES.items():
        if is_available(name):
            found = next(filter(None, map(_version, _DISTRIBUTIONS.get(name, (name,)))), None)
            yield Row("ok", name, found or "there")
        else:
            yield Row("optional", name, f"not installed; for {purpose}", INSTALL[name][1])
    yield from _cuda()
    yield from _system()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _codecs(name: str, wanted: list[str], mode: Literal["r", "w"]) -> Row:
    there = [one for one in wanted if has_codec(one, mode)]
    if missing := [one for one in wanted if one not in there]:
        fix = "python -m pip install --force-reinstall --only-binary av av"
        text = f"{' '.join(there)}; not in this build of PyAV: {' '.join(missing)}"
        return Row("missing", name, text, fix)
    return Row("ok", name, " ".join(there))


def _cuda() -> Iterator[Row]:
    capabilities = cuda_capabilities()
    for name, label in _CUDA.items():
        one = getattr(capabilities, name)
        if one:
            yield Row("ok", label, "can be used")
        else:
            yield Row(
                "optional",
                label,
                f"missing: {', '.join(one.missing)}" if one.missing else one.reason,
            )
    for name, part in capabilities.parts.items():
        if part:
            yield Row("ok", f"CUDA: {name}", "there")
        else:
            # What is the matter, and then what helps.
            found, _, fix = part.reason.partition(". " if ". " in part.reason else ": ")
            yield Row("optional", f"CUDA: {name}", found, fix)


def _system() -> Iterator[Row]:
    cores = usable_cores()
    yield Row(
        "ok",
        "cores",
        f"{cores} of {os.cpu_count()} may be used: num_threads={cores} unless you say otherwise",
    )
    shared = Path("/dev/shm")  # noqa: S108  # where batches of other processes lie
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        text = f"{usage.free / 2**30:.2f} of {usage.total / 2**30:.2f} GiB free"
        is_small = usage.free < _SMALL_MEMORY
        fix = (
            "mount -o remount,size=8G /dev/shm (of a container: docker run --shm-size=8g)"
            if is_small
            else ""
        )
        yield Row("note" if is_small else "ok", str(shared), text, fix)
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [f"{n:,}" if n != resource.RLIM_INFINITY else "unlimited" for n in (soft, hard)]
    is_low = 0 <= soft < _FEW_FILES
    fix = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}" if is_low else ""
    text = f"{limits[0]} (at most {limits[1]})"
    yield Row("note" if is_low else "ok", "open files", text, fix)
