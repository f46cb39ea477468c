"""The commands ``probe`` and ``contact-sheet`` for media files, and ``doctor`` for the installation."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import has_codec, library_versions
from spdl_media._optional import INSTALL, is_available
from spdl_media._probe import AudioStreamInfo, MediaInfo, StreamInfo, VideoStreamInfo, probe
from spdl_media._threads import has_gil
from spdl_media.cli.app import FILE, Refused, make_console, printable, show_table, write_error
from spdl_media.cuda.capabilities import cuda_capabilities
from spdl_media.errors import MediaError
from spdl_media.image_files import save_image
from spdl_media.pipeline.executors import usable_cores
from spdl_media.video_file import VideoFile

_HEADERS = ("file", "stream", "codec", "size", "format", "rate", "seconds", "turn", "colour")


@click.command("probe", short_help="Show what is in files.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: an object for each file.")
def probe_command(files: Sequence[str], *, as_json: bool) -> int:
    """Show what is in media files: streams, codecs, sizes, rates, durations, colour.

    A FILE may be a URL if fsspec is installed. The exit status is 1 if a file cannot be read.

    \b
    Examples:
      spdl-media probe photo.jpg movie.mp4
      spdl-media probe *.mp4 --json | jq '.[].duration'

    \f
    Raises:
        OSError: stdout or stderr cannot be written.
    """
    found: list[tuple[str, MediaInfo]] = []
    for path in files:
        try:
            found.append((path, probe(path)))
        except MediaError as error:
            # Go on with the other files; the exit status reports the failure.
            write_error(str(error))
    if as_json:
        # default=str writes rates as strings, such as 30000/1001, which has no exact decimal form.
        click.echo(json.dumps([_as_object(*one) for one in found], indent=2, default=str))
    elif found:
        rows = [
            (printable(path), *_cells(info, stream))
            for path, info in found
            for stream in info.streams or [None]
        ]
        show_table(_HEADERS, rows, right=("rate", "seconds"))
    return int(len(found) < len(files))


def _as_object(path: str, info: MediaInfo) -> dict[str, Any]:
    streams = [{**dataclasses.asdict(one), "kind": _kind(one)} for one in info.streams]
    return {"file": path, **dataclasses.asdict(info), "streams": streams}


def _kind(stream: StreamInfo) -> str:
    named = "video" if isinstance(stream, VideoStreamInfo) else "audio"
    return str(getattr(stream, "kind", named))


def _cells(info: MediaInfo, stream: StreamInfo | None) -> Iterator[str]:
    """Yield the cells of a stream's row, without the file name."""
    values: tuple[object, ...] = ("",) * 7
    if isinstance(stream, VideoStreamInfo):
        values = (
            stream.codec,
            f"{stream.width}x{stream.height}",
            stream.pix_fmt,
            f"{float(stream.frame_rate):.6g} fps" if stream.frame_rate else "",
            _seconds(stream),
            f"{'flip ' * stream.mirrored}{stream.rotation or ''}".strip(),
            " ".join(filter(None, (stream.colorspace, stream.color_range))),
        )
    elif isinstance(stream, AudioStreamInfo):
        coded = (stream.codec, stream.channel_layout, stream.sample_fmt)
        values = (*coded, f"{stream.sample_rate} Hz", _seconds(stream), "", "")
    elif stream is not None:
        values = (stream.codec, *[""] * 6)
    name = "none" if stream is None else f"{_kind(stream)} {stream.index}"
    yield "image" if info.is_still else name
    yield from (str(value or "-") for value in values)


def _seconds(stream: VideoStreamInfo | AudioStreamInfo) -> str:
    return "" if stream.duration is None else f"{stream.duration:.3f}"


_GAP, _GRAY = 4, 24
_GRID: dict[str, Any] = {"type": click.IntRange(1, 12), "metavar": "N", "default": 4}

# Each character has five rows of three bits; a digit is a row, from the top, with the left bit first. The
# FFmpeg in PyAV's wheels has no drawtext filter, and a font library would be one more dependency.
_GLYPHS = {
    character: [[int(bit) for bit in f"{int(row, 8):03b}"] for row in rows]
    for character, rows in zip(
        "0123456789:.",
        "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717 02020 00002".split(),
        strict=True,
    )
}


@click.command("contact-sheet", short_help="Put frames of a video into one image.")
@click.argument("video")
@click.option("-o", "--output", **FILE, default="sheet.jpg", help="The image to write.")
@click.option("--columns", **_GRID, help="Frames per row.")
@click.option("--rows", **_GRID, help="Rows of frames.")
@click.option("--width", type=click.IntRange(48, 960), metavar="N", default=320, help="Of a frame.")
def contact_sheet_command(*, video: str, output: Path, columns: int, rows: int, width: int) -> int:
    """Put frames of a video at regular times, with their times, into one image.

    \b
    Examples:
      spdl-media contact-sheet movie.mp4
      spdl-media contact-sheet movie.mp4 -o sheet.png --columns 6 --rows 5

    \f
    Raises:
        SourceError: The video cannot be read.
        DemuxError: The file is not a video.
        DecodeError: A frame is damaged, or missing from the file.
        Refused: There is no encoder for the suffix of ``output``.
        WriteError: The image cannot be written.
    """
    with VideoFile(video) as file:
        if not len(file):
            raise Refused(f"{printable(video)} has no video frame")
        height = max(1, round(width * file.height / file.width))
        count = min(columns * rows, len(file))
        first, end = file.timestamps[0], file.end
        # Take the middle of equal parts, because the first and last frames are often black.
        numbers = file.numbers_at([first + (end - first) * (n + 0.5) / count for n in range(count)])
        frames = file.load(numbers, width=width, height=height, scale_mode=None).array
        columns = min(columns, count)
        rows = -(-count // columns)
        tall, wide = height + _GAP, width + _GAP
        sheet = np.full((rows * tall + _GAP, columns * wide + _GAP, 3), _GRAY, np.uint8)
        for place, (frame, number) in enumerate(zip(frames, numbers, strict=True)):
            _draw(frame, file.timestamps[number])
            top, left = place // columns * tall + _GAP, place % columns * wide + _GAP
            sheet[top : top + height, left : left + width] = frame
    try:
        save_image(output, sheet)
    except ValueError as error:
        suffix = printable(output.suffix)
        problem = f"{printable(output)}: there is no image encoder for the suffix {suffix!r}"
        raise Refused(f"{problem}. Use .jpg or .png") from error
    size = f"{sheet.shape[1]}x{sheet.shape[0]}"
    make_console().print(f"{printable(output)}: {count} frames of {end:.1f} s, {size} pixels")
    return 0


def _draw(frame: npt.NDArray[Any], seconds: float) -> None:
    """Write a time in white on black into the lower left corner, scaled to the frame's width."""
    # Round down, but tolerate floats that are slightly below their exact value.
    tenths = max(int(seconds * 10 + 1e-6), 0)
    minutes = tenths // 600
    text = f"{minutes // 60}:{minutes % 60:02}:{tenths // 10 % 60:02}.{tenths % 10}"
    bits = [np.pad(_GLYPHS[character], ((1, 1), (1, 0))) for character in text]
    label = np.pad(np.concatenate(bits, axis=1), ((0, 0), (0, 1)))
    # The text takes about a third of the width.
    scale = max(1, frame.shape[1] // 100)
    label = np.kron(label, np.ones((scale, scale), int))[-frame.shape[0] :, : frame.shape[1]]
    height, width = label.shape
    frame[-height:, :width] = (label * 255)[:, :, None]


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


class Row(NamedTuple):
    """A row of the report: one package, feature or limit.

    Attributes:
        status: ``"ok"``; ``"missing"`` if the library needs it; ``"optional"`` if some features need it;
            ``"note"`` for a limit that may be too low.
        name: Name of the package, feature or limit.
        found: What was found, or why it is missing.
        fix: Command that fixes the problem.
    """

    status: Literal["ok", "missing", "optional", "note"]
    name: str
    found: str
    fix: str = ""


@click.command("doctor", short_help="Show what is missing here.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: an object for each row.")
def doctor_command(*, as_json: bool) -> int:
    """Show what is installed and what is missing, with the commands that install it.

    The exit status is 1 if something is missing that the library needs.

    \b
    Examples:
      spdl-media doctor
      spdl-media doctor --json

    \f
    Raises:
        OSError: stdout cannot be written.
    """
    rows = list(_rows())
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        cells = [(*row[:2], f"{row.found}\n-> {row.fix}" if row.fix else row.found) for row in rows]
        show_table(("", "", ""), cells)
    return int(any(row.status == "missing" for row in rows))


def _rows() -> Iterator[Row]:
    gil = "" if has_gil() else ", without the GIL"
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
    # A PyAV that was built from source may lack some codecs.
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
        # The first sentence of a reason says what is missing, the rest is the fix.
        found, _, fix = part.reason.partition(". " if ". " in part.reason else ": ")
        yield Row("ok" if part else "optional", f"CUDA: {name}", found or "there", fix)


def _system() -> Iterator[Row]:
    cores = usable_cores()
    text = f"{cores} of {os.cpu_count()} may be used: num_threads={cores} unless you say otherwise"
    yield Row("ok", "cores", text)
    with suppress(ImportError):  # Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = (f"{n:,}" if n != resource.RLIM_INFINITY else "unlimited" for n in (soft, hard))
        text = f"{' (at most '.join(limits)})"
        fix = f"ulimit -n {min(65536, hard) if hard >= 0 else 65536}"
        if soft == hard:
            fix = "raise the limit as root (of a container: docker run --ulimit nofile=65536)"
        is_low = 0 <= soft < _FEW_FILES
        yield Row("note", "open files", text, fix) if is_low else Row("ok", "open files", text)
