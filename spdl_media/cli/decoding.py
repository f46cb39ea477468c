"""Whether a file is what it should be: all of it is decoded, and nothing of it kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spdl_media._probe import AudioStreamInfo, MediaInfo, VideoStreamInfo, probe
from spdl_media.cli.files import named_kind
from spdl_media.decode import decode_packets
from spdl_media.decoders import AudioDecoder, VideoDecoder
from spdl_media.demux import demux_image
from spdl_media.demuxer import Demuxer
from spdl_media.errors import DemuxError, MediaError, MissingDependencyError, SourceError
from spdl_media.image_frames import VideoFrames

# Of a long video, only so many packets and decoded frames are in memory at a time.
_PACKETS, _FRAMES = 64, 8

_CODECS = {f".{name}": name for name in ("png", "webp", "bmp", "gif", "tiff")}
_CODECS |= {".jpg": "mjpeg", ".jpeg": "mjpeg", ".tif": "tiff"}
"""What still images are, by their names."""

_STREAMS = (VideoStreamInfo, AudioStreamInfo)

# FFmpeg takes text of these formats for pictures.
_NO_MEDIA = frozenset({"tty"})


def check_file(path: Path) -> tuple[str, str | None]:
    """Decode all streams of a file to their ends.

    Returns:
        What it is, ``"sound"``, ``"damaged"``, ``"unreadable"``, ``"odd"`` or ``"other"`` (no media), and
        why.
    """
    try:
        info = probe(path)
        is_media = any(isinstance(stream, _STREAMS) for stream in info.streams)
        if not named_kind(path) and (info.format in _NO_MEDIA or not is_media):
            return "other", None
        oddity = _check_still(path, info) if info.is_still else _check_streams(path, info)
        oddity = oddity or _oddity_of_name(path, info)
    except DemuxError as error:
        # Files of labels and the like are no media, and are not named as if they were.
        return ("damaged", error.message) if named_kind(path) else ("other", None)
    except (SourceError, MissingDependencyError) as error:
        return "unreadable", error.message
    except MediaError as error:
        return "damaged", error.message
    except Exception as error:  # noqa: BLE001  # one file does not end the check of a million
        return "unreadable", f"the check failed: {type(error).__name__}: {error}"
    return ("odd", oddity) if oddity else ("sound", None)


def _check_still(path: Path, info: MediaInfo) -> str | None:
    frames = decode_packets(demux_image(path), filter_desc=None)
    if max(frames.width, frames.height) == 1:
        return "an image of one pixel"
    expected = _CODECS.get(path.suffix.lower(), info.format)
    if expected != info.format and {expected, info.format} <= set(_CODECS.values()):
        return f"an image of the format {info.format}, and named {path.suffix}"
    return None


class _Stream:
    """What has come of a stream."""

    def __init__(self, info: VideoStreamInfo | AudioStreamInfo) -> None:
        self.info, self.count, self.skipped = info, 0, ""
        self.sizes: set[tuple[int, int]] = set()
        self.decoder: Any = None

    def take(self, packets: Any) -> None:
        """Decode packets."""
        if self.decoder is None:
            is_video = isinstance(self.info, VideoStreamInfo)
            kind = functools.partial(VideoDecoder, num_frames=_FRAMES) if is_video else AudioDecoder
            self.decoder = kind(packets.codec, filter_desc=None)
        self._count(self.decoder.decode(packets))

    def _count(self, chunks: Iterator[Any]) -> None:
        for frames in chunks:
            self.count += len(frames)
            if isinstance(frames, VideoFrames):
                self.sizes.add((frames.width, frames.height))
                if frames.num_skipped:
                    self.skipped = f"begins with {frames.num_skipped} frames that cannot be decoded"

    def finish(self) -> str | None:
        """Decode the rest, and say what is odd."""
        if self.decoder is not None:
            self._count(self.decoder.flush())
        name = "video" if isinstance(self.info, VideoStreamInfo) else "audio"
        oddity = self.skipped or self._shortfall()
        return f"{name} stream {self.info.index} {oddity}" if oddity else None

    def _shortfall(self) -> str:
        if not self.count:
            return "is empty"
        if len(self.sizes) > 1:
            return "changes the size of its frames"
        if isinstance(self.info, AudioStreamInfo):
            seconds, stated = self.count / self.info.sample_rate, self.info.duration or 0
            if seconds < 0.9 * stated - 1:
                return f"lasts {seconds:.1f} s, and the file states {stated:.1f} s"
        elif self.count < 0.9 * (self.info.num_frames or 0) - 2:
            return f"has {self.count} frames, and the file states {self.info.num_frames}"
        return ""


def _check_streams(path: Path, info: MediaInfo) -> str | None:
    streams = {one.index: _Stream(one) for one in info.streams if isinstance(one, _STREAMS)}
    if not streams:
        return "holds no image, video or audio that can be decoded"
    with Demuxer(path) as demuxer:
        for chunk in demuxer.streaming_demux([*streams], num_packets=_PACKETS):
            for index, packets in chunk.items():
                streams[index].take(packets)
    oddities = [stream.finish() for stream in streams.values()]
    return next(filter(None, oddities), None)


def _oddity_of_name(path: Path, info: MediaInfo) -> str | None:
    has = {"audio": info.audio is not None, "video": info.video is not None and not info.is_still}
    named = named_kind(path)
    if named in has and not has[named]:
        return f"has no {named}, and is named {path.suffix}"
    if named == "image" and not info.is_still and has["audio"]:
        return f"has audio, and is named {path.suffix}"
    return None
