"""``spdl-media probe``: what is in media files, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from spdl_media._probe import AudioStreamInfo, MediaInfo, StreamInfo, VideoStreamInfo, probe
from spdl_media.cli.terminal import printable, show_table, write_error
from spdl_media.errors import MediaError

_HEADERS = ("file", "stream", "codec", "size", "format", "rate", "seconds", "turn", "colour")


@click.command("probe", short_help="Show what is in files.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: an object for each file.")
def command(files: Sequence[str], *, as_json: bool) -> int:
    """Show what is in media files: streams, codecs, sizes, rates, durations, colour.

    A FILE may be a URL, where fsspec is installed. The exit status is 1 if a file cannot be read.

    \b
    Examples:
      spdl-media probe photo.jpg movie.mp4
      spdl-media probe *.mp4 --json | jq '.[].duration'
    """
    found: list[tuple[str, MediaInfo]] = []
    for path in files:
        try:
            found.append((path, probe(path)))
        except MediaError as error:
            write_error(str(error))
    if as_json:
        # Rates as strings: 30000/1001 is no decimal number.
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
    values = dataclasses.asdict(info)
    return {"file": path, **values, "streams": streams, "metadata": dict(info.metadata)}


def _kind(stream: StreamInfo) -> str:
    named = "video" if isinstance(stream, VideoStreamInfo) else "audio"
    return str(getattr(stream, "kind", named))


def _cells(info: MediaInfo, stream: StreamInfo | None) -> Iterator[str]:
    """The cells of a stream behind the name of its file."""
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
    name = "none" if stream is None else f"{_kind(stream)} {stream.index}"
    yield "image" if info.is_still else name
    yield from (str(value or "-") for value in values)


def _seconds(stream: VideoStreamInfo | AudioStreamInfo) -> str:
    return "" if stream.duration is None else f"{stream.duration:.3f}"
