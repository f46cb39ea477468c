"""Whether a file is what it should be: all of it is decoded, and nothing of it kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spdl_media._probe import AudioStreamInfo, MediaInfo, VideoStreamInfo, probe
from spdl_media.cli.files import named_kind
from spdl_media.decode import decode_packets
from spdl_media.decoders import AudioDecoder, VideoDecoder
from spdl_media.demux import Demuxer, demux_image
from spdl_media.errors import DemuxError, MediaError, MissingDependencyError, SourceError
from spdl_media.frames import AudioFrames
from spdl_media.packets import VideoPackets

# Of a long video, only so many packets and decoded frames are in memory at a time.
_PACKETS_AT_A_TIME, _FRAMES_AT_A_TIME = 64, 8

_CODECS = {
    **dict.fromkeys((".jpg", ".jpeg"), "mjpeg"),
    **{f".{name}": name for name in ("png", "webp", "bmp", "gif", "tiff")},
    ".tif": "tiff",
}
"""What still images are, by their names."""

_STREAMS = (VideoStreamInfo, AudioStreamInfo)

# FFmpeg takes text of these formats for pictures.
_NO_MEDIA = frozenset({"tty"})


class Verdict(NamedTuple):
    """What a file is: ``"sound"``, ``"damaged"``, ``"unreadable"``, ``"odd"`` or ``"other"`` (no media)."""

    kind: str
    reason: str | None = None


def check_file(path: Path) -> Verdict:
    """Decode all streams of a file to their ends."""
    try:
        info = probe(path)
        is_media = info.format not in _NO_MEDIA and any(
            isinstance(stream, _STREAMS) for stream in info.streams
        )
        if not is_media and not named_kind(path):
            return Verdict("other")
        oddity = _check_still(path, info) if info.is_still else _check_streams(path, info)
        oddity = oddity or _oddity_of_name(path, info)
    except DemuxError as error:
        # Files of labels and the like are no media, and are not named as if they were.
        return Verdict("damaged", error.message) if named_kind(path) else Verdict("other")
    except (SourceError, MissingDependencyError) as error:
        return Verdict("unreadable", error.message)
    except MediaError as error:
        return Verdict("damaged", error.message)
    except Exception as error:  # noqa: BLE001  # one file does not end the check of a million
        return Verdict("unreadable", f"the check failed: {type(error).__name__}: {error}")
    return Verdict("odd", oddity) if oddity else Verdict("sound")


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
        self.info, self.count, self.oddity = info, 0, ""
        self.size: tuple[int, int] | None = None
        self.decoder: Any = None

    def take(self, packets: Any) -> None:
        """Decode packets."""
        if self.decoder is None:
            if isinstance(packets, VideoPackets):
                self.decoder = VideoDecoder(
                    packets.codec, filter_desc=None, num_frames=_FRAMES_AT_A_TIME
                )
            else:
                self.decoder = AudioDecoder(packets.codec, filter_desc=None)
        self._count(self.decoder.decode(packets))

    def _count(self, chunks: Iterator[Any]) -> None:
        for frames in chunks:
            self.count += len(frames)
            if isinstance(frames, AudioFrames):
                continue
            size = frames.width, frames.height
            if frames.num_skipped:
                self.oddity = f"begins with {frames.num_skipped} frames that cannot be decoded"
            elif self.size not in (None, size):
                self.oddity = "changes the size of its frames"
            self.size = size

    def finish(self) -> str | None:
        """Decode the rest, and say what is odd."""
        if self.decoder is not None:
            self._count(self.decoder.flush())
        name = "video" if isinstance(self.info, VideoStreamInfo) else "audio"
        oddity = self.oddity or self._shortfall()
        return f"{name} stream {self.info.index} {oddity}" if oddity else None

    def _shortfall(self) -> str:
        if not self.count:
            return "is empty"
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
        for chunk in demuxer.streaming_demux([*streams], num_packets=_PACKETS_AT_A_TIME):
            for index, packets in chunk.items():
                streams[index].take(packets)
    oddities = [stream.finish() for stream in streams.values()]
    return next(filter(None, oddities), None)


def _oddity_of_name(path: Path, info: MediaInfo) -> str | None:
    named = named_kind(path)
    has_video, has_audio = info.video is not None, info.audio is not None
    if named == "audio" and not has_audio:
        return f"has no audio, and is named {path.suffix}"
    if named == "video" and (info.is_still or not has_video):
        return f"has no video, and is named {path.suffix}"
    if named == "image" and not info.is_still and has_audio:
        return f"has audio, and is named {path.suffix}"
    return None
