"""``spdl-media probe``: what is in media files, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from spdl_media._probe import AudioStreamInfo, MediaInfo, VideoStreamInfo, probe
from spdl_media.cli.terminal import make_console, printable, show_table, write_error
from spdl_media.errors import MediaError

_HEADERS = ("file", "stream", "codec", "size", "format", "rate", "seconds", "turn", "colour")


def show(files: Sequence[str], *, as_json: bool) -> int:
    """Print what is in each file, and a line to stderr for each that cannot be read."""
    found: list[tuple[str, MediaInfo]] = []
    for path in files:
        try:
            found.append((path, probe(path)))
        except MediaError as error:
            write_error(str(error))
    if as_json:
        make_console().out(json.dumps([_as_json(*one) for one in found], indent=2), highlight=False)
    elif found:
        rows = [row for path, info in found for row in _rows(path, info)]
        show_table(make_console(), _HEADERS, rows, right=("rate", "seconds"))
    return int(len(found) < len(files))


def _as_json(path: str, info: MediaInfo) -> dict[str, Any]:
    values = {"file": path, **dataclasses.asdict(info), "metadata": dict(info.metadata)}
    for stream, one in zip(values["streams"], info.streams, strict=True):
        kind = {VideoStreamInfo: "video", AudioStreamInfo: "audio"}.get(type(one))
        stream["kind"] = kind or stream["kind"]
        if isinstance(rate := stream.get("frame_rate"), Fraction):
            # A string: 30000/1001 is no decimal number.
            stream["frame_rate"] = str(rate)
    return values


def _rows(path: str, info: MediaInfo) -> Iterator[tuple[str, ...]]:
    name = printable(path)
    for stream in info.streams:
        if isinstance(stream, VideoStreamInfo):
            kind = "image" if info.is_still else f"video {stream.index}"
            rate = f"{float(stream.frame_rate):.6g} fps" if stream.frame_rate else "-"
            turn = " ".join(
                [*(["flip"] if stream.mirrored else []), str(stream.rotation)]
                if stream.mirrored or stream.rotation
                else ["-"]
            )
            size = f"{stream.width}x{stream.height}"
            color = " ".join(filter(None, (stream.colorspace, stream.color_range))) or "-"
            cells = (
                stream.codec,
                size,
                stream.pix_fmt or "-",
                rate,
                _seconds(stream.duration),
                turn,
            )
            yield name, kind, *cells, color
        elif isinstance(stream, AudioStreamInfo):
            coded = (stream.codec, stream.channel_layout, stream.sample_fmt or "-")
            rate, seconds = f"{stream.sample_rate} Hz", _seconds(stream.duration)
            yield name, f"audio {stream.index}", *coded, rate, seconds, "-", "-"
        else:
            yield name, f"{stream.kind} {stream.index}", *["-"] * (len(_HEADERS) - 2)
    if not info.streams:
        yield name, "none", *["-"] * (len(_HEADERS) - 2)


def _seconds(duration: float | None) -> str:
    return "-" if duration is None else f"{duration:.3f}"
