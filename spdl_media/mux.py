"""Files of video and audio, from frames that are encoded or from packets as they are."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import av
from av.bitstream import BitStreamFilterContext

from spdl_media._checks import OneThread, check_int, did_you_mean
from spdl_media._ffmpeg import AvPacket, describe, ffmpeg_log
from spdl_media.codec import AudioCodec, Codec, VideoCodec
from spdl_media.config import string_options
from spdl_media.destination import Draft, Target
from spdl_media.encode import (
    AudioEncodeConfig,
    AudioEncoder,
    VideoEncodeConfig,
    VideoEncoder,
    find_encoder,
    open_encoder,
    set_all,
)
from spdl_media.errors import EncodeError, MediaError, WriteError
from spdl_media.formats import COLOR_TABLES
from spdl_media.frames import AudioFrames
from spdl_media.geometry import display_matrix, is_mirrored
from spdl_media.image_frames import ImageFrames, VideoFrames
from spdl_media.packets import (
    AudioPackets,
    ImagePackets,
    VideoPackets,
    av_packets,
    discarded_pts,
    metadata_of,
    with_data,
)

__all__ = ("Muxer",)

# Numbers of the operating system's that encoders and muxers give for arguments, and not for the disk.
_OF_ARGUMENTS = frozenset({errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EDOM, errno.ERANGE})
_ORIENTED = frozenset({"mp4", "mov", "ipod", "3gp", "3g2", "matroska"})
"""Formats that say how frames are turned. Matroska cannot mirror them."""
_STATES_COLORS = frozenset({"mp4", "ipod", "3gp", "3g2", "matroska", "webm"})
"""Formats that say matrix and range. MOV has no place for the range."""
_STATE_COLORS = frozenset({"h264", "hevc", "av1", "vp9", "mpeg2video", "prores", "png", "mjpeg"})
"""Codecs that say it themselves."""
_MP4_ONLY = frozenset({"av1", "flac", "opus", "truehd", "vp9"})
"""Codecs that FFmpeg refuses for MOV only when the file is begun."""
_IN_MPEGTS = frozenset(
    "aac aac_latm ac3 cavs dirac dts eac3 h264 hevc jpeg2000 mp2 mp3 mpeg1video mpeg2video mpeg4 opus s302m "
    "truehd vc1 vvc".split()
)
"""FFmpeg writes all others into MPEG-TS as data, and readers find no video or audio."""
_EDITED = _ORIENTED - {"matroska"}
"""Formats that hide what is shown before second 0."""
_COPIED = "width", "height", "pix_fmt", "sample_aspect_ratio", "sample_rate", "bit_rate"
"""What an encoder's context and a codec of ours call by one name."""


class _Track(NamedTuple):
    """A stream: PyAV's, the kinds of data that it takes, and what encodes them, if anything."""

    stream: Any
    takes: tuple[type, ...]
    coder: Any


class Muxer:
    """Writes one file of video and audio streams: frames are encoded, packets stay as they are.

    Use it as a context manager. A file gets its name at the end of the ``with`` block, when it is complete:
    until then it is a hidden file in the same folder. When the block raises, on Ctrl-C, and when the disk is
    full, that one is removed, and what had the name before is untouched. A file object gets the complete
    file, too, which until then is a temporary one.

    Args:
        dst: A path, or a binary file object with ``write``.
        format: FFmpeg's name of the file format, such as ``"mp4"``, ``"matroska"`` or ``"webm"``. The default
            follows from the suffix of the path.
        format_options: Options of the format, such as ``{"movflags": "+faststart"}``, which puts the index of
            an MP4 in front, for reading over a network. PyAV logs a warning for those that it does not know.

    Raises:
        ValueError: There is no such format, or the name has no suffix that says one.
        TypeError: ``dst`` is neither a path nor a file object.
        WriteError: There is a folder of this name; or no temporary file can be made for a file object.

    Thread safety: one thread at a time; a second one gets a RuntimeError.

    Example::

        with Muxer("out.mp4") as muxer:
            index = muxer.add_encode_stream(video_encode_config(width=64, height=48, frame_rate=30))
            for frames in decoder.decode(packets):
                muxer.write(index, frames)
    """

    def __init__(
        self,
        dst: Target,
        *,
        format: str | None = None,
        format_options: Mapping[str, object] | None = None,
    ) -> None:
        self._container: Any = None
        self._guard = OneThread("Muxer")
        self._tracks: list[_Track] = []
        self._started = self._flushed = False
        self._failure: MediaError | None = None
        # FFmpeg would otherwise write what is ten seconds ahead of the other streams.
        options = {"max_interleave_delta": "0"}
        options |= string_options("format_options", format_options or {})
        self._draft = Draft(dst)
        self._name = self._draft.name
        try:
            self._container = av.open(str(self._draft.path), "w", format=format, options=options)
        except ValueError as error:
            self._draft.remove()
            hint = did_you_mean(format or "", av.format.formats_available)
            what = f"this FFmpeg writes no format named {format!r}. {hint}".rstrip()
            lacks = f"{self._name}: no format follows from the name; give format='mp4'"
            raise ValueError(what if format else lacks) from error
        if self._format in _EDITED:
            # It otherwise leaves the matrix out where primaries and transfer are not known as well.
            self._container.options["movflags"] = options.get("movflags", "") + "+write_colr"
        if self._container.format.no_file:
            raise ValueError(f"format {self._format!r} does not write one file, as a Muxer does")

    @property
    def _format(self) -> str:
        return str(self._container.format.name)

    def add_encode_stream(self, config: VideoEncodeConfig | AudioEncodeConfig) -> int:
        """Add a stream of frames to encode. All streams are added before the first :meth:`write`.

        Args:
            config: Made by :func:`video_encode_config` or :func:`audio_encode_config`.

        Returns:
            The index of the stream, for :meth:`write`.

        Raises:
            ValueError: This FFmpeg has no such encoder, or it has no such option, pixel or sample format.
            EncodeError: The file format does not take the codec, or the encoder not these values.
            RuntimeError: Something was written already, or another thread is inside.
        """
        with self._guard:
            self._check_can_add()
            if isinstance(config, VideoEncodeConfig):
                kind, rate = "video", config.frame_rate or 30
            elif isinstance(config, AudioEncodeConfig):
                kind, rate = "audio", config.sample_rate
            else:
                raise TypeError(
                    "add_encode_stream takes what video_encode_config() or audio_encode_config() makes, not "
                    f"{config!r}"
                )
            encoder = find_encoder(config.encoder or self.default_codec(kind), kind)
            refused = self._refused(encoder.canonical_name, "encoder= or format=")
            # FFmpeg would write it as data, without an error.
            if self._loses(encoder.canonical_name):
                raise refused
            try:
                stream = self._container.add_stream(encoder.name, rate=rate)
            except ValueError as error:
                raise refused from error
            if isinstance(config, VideoEncodeConfig):
                coder = VideoEncoder(stream, config)
                stream.time_base = coder.time_base
                track = _Track(stream, (VideoFrames, ImageFrames), coder)
                self._turn(stream, config.orientation)
            else:
                track = _Track(stream, (AudioFrames,), AudioEncoder(stream, config))
            # Not left to PyAV, which opens all at the first write: nobody would know whose values are wrong.
            with self._errors():
                open_encoder(stream.codec_context)
            self._tracks.append(track)
            return len(self._tracks) - 1

    def add_remux_stream(
        self, source: Codec | VideoPackets | AudioPackets, *, orientation: int | None = None
    ) -> int:
        """Add a stream of packets that are written as they are. All streams are added before :meth:`write`.

        Args:
            source: Packets of the stream, or their codec, such as ``demuxer.video_codec``.
            orientation: EXIF's number of how players are to turn the frames. The default is that of the
                packets.

        Returns:
            The index of the stream, for :meth:`write`.

        Raises:
            EncodeError: The file format does not take the codec or the orientation.
            RuntimeError: Something was written already, or another thread is inside.
        """
        with self._guard:
            self._check_can_add()
            codec: Any = getattr(source, "codec", source)
            if isinstance(source, ImagePackets) or not isinstance(codec, VideoCodec | AudioCodec):
                raise TypeError(f"add_remux_stream takes video or audio packets, not {source!r}")
            if self._loses(codec.name):
                raise self._refused(codec.name, "format=")
            with self._errors():
                stream = self._remux_stream(codec)
            turned: Any = orientation or getattr(source, "orientation", 1)
            self._turn(stream, turned)
            kind = VideoPackets if isinstance(codec, VideoCodec) else AudioPackets
            self._tracks.append(_Track(stream, (kind,), None))
            return len(self._tracks) - 1

    def _remux_stream(self, codec: Codec) -> Any:
        kind = "video" if isinstance(codec, VideoCodec) else "audio"
        # PyAV makes streams that are not encoded of other streams alone. A filter that does nothing writes
        # the codec over that of the model, and the context, which is never opened, has the parameters.
        model = av.open(io.BytesIO(), "w", format="nut").add_stream(self.default_codec(kind))
        stream: Any = self._container.add_stream_from_template(model, opaque=True)
        BitStreamFilterContext("null", av.Codec(codec.decoder, "r"), stream)
        context, stream.time_base = stream.codec_context, codec.time_base
        context.extradata = codec.extradata
        values: dict[str, Any] = {name: getattr(codec, name, None) for name in _COPIED}
        if isinstance(codec, VideoCodec):
            colors = dict(zip(COLOR_TABLES, codec.color, strict=True))
            values |= {"framerate": codec.frame_rate, **colors}
        else:
            values |= {"layout": codec.channel_layout, "format": codec.sample_fmt}
        set_all(context, **values)
        return stream

    def write(self, index: int, data: Any) -> None:
        """Encode frames, or write packets, to a stream.

        Streams may be written in any order: what is ahead of the others waits in memory, encoded.

        Args:
            index: Of the stream, as ``add_*_stream`` gave it.
            data: Frames for a stream that is encoded; samples follow those before them. Packets for one that
                is not: they keep their times on the container's clock, and must not be those of several
                windows that overlap.

        Raises:
            EncodeError: A frame's size differs from the stream's, times do not rise, packets have no times,
                or the encoder or the file format refuse them.
            WriteError: The disk is full, or the file object fails.
            TypeError: The data are of another kind than the stream.
            RuntimeError: After :meth:`flush` or :meth:`close`, or while another thread is inside.
        """
        with self._guard:
            if self._flushed or self._container is None:
                raise RuntimeError(f"{self._name}: this Muxer was flushed or closed")
            if not 0 <= check_int("index", index, at_least=None) < len(self._tracks):
                raise ValueError(f"there is no stream {index}; there are {len(self._tracks)}")
            track = self._tracks[index]
            if not isinstance(data, track.takes) or isinstance(data, ImagePackets):
                names = " or ".join(kind.__name__ for kind in track.takes)
                raise TypeError(f"stream {index} takes {names}, not {data!r}")
            if not self._started:
                with self._errors():
                    self._container.start_encoding()
                self._started = True
            coder = track.coder
            self._mux(coder.encode(data) if coder else self._moved(data, track.stream))

    def _moved(self, packets: Any, stream: Any) -> Iterator[AvPacket]:
        """Packets as those of a stream of ours, with second 0 at 0."""
        hidden = discarded_pts(packets) if isinstance(packets, VideoPackets) else frozenset()
        zero = round(metadata_of(packets).zero / packets.time_base)
        if hidden and not (self._format in _EDITED and max(hidden) < zero):
            raise EncodeError(
                f"an edit list hides {len(hidden)} of the packets, and {self._format} would show them. "
                "Decode and encode them",
                source=packets.source,
            )
        for packet in av_packets(packets):
            if packet.pts is None or packet.dts is None:
                raise EncodeError(
                    f"the {packets.codec.name} packets have no times of presentation or decoding, which "
                    "files need. Decode and encode them",
                    source=packets.source,
                )
            # Muxers change what they are given.
            moved = with_data(packet, memoryview(packet))
            moved.pts, moved.dts, moved.stream = packet.pts - zero, packet.dts - zero, stream
            yield moved

    def flush(self) -> None:
        """Write what the encoders hold back. Nothing can be written afterwards; :meth:`close` does it, too.

        Raises:
            EncodeError: An encoder fails.
            WriteError: The disk is full, or the file object fails.
            RuntimeError: After :meth:`close`, or while another thread is inside.
        """
        with self._guard:
            if self._container is None:
                raise RuntimeError(f"{self._name}: this Muxer was closed")
            self._flush()

    def _flush(self) -> None:
        # Encoders hold nothing before the first write.
        if self._started and not self._flushed:
            for track in self._tracks:
                if track.coder is not None:
                    self._mux(track.coder.flush())
        self._flushed = True

    def close(self) -> None:
        """Complete the file, and give it its name.

        Raises:
            EncodeError: Nothing was written, or an encoder fails.
            WriteError: The disk is full, or the file object fails. There is no file then.
            RuntimeError: Another thread is inside.
        """
        with self._guard:
            if self._container is None:
                return
            try:
                # The caller may have caught it, but the file lacks what was to be written then.
                if self._failure is not None:
                    raise self._failure
                if not self._started:
                    raise EncodeError("nothing was written, so there is no file", source=self._name)
                self._flush()
                # First, so that nobody closes it twice when that fails.
                container, self._container = self._container, None
                with self._errors():
                    container.close()
                self._draft.complete()
            finally:
                self._abort()

    def _abort(self) -> None:
        """Leave nothing behind; without effect on a file that is complete."""
        container, self._container = self._container, None
        try:
            if container is not None:
                # What it writes at its end is removed with the file.
                with contextlib.suppress(Exception):
                    container.close()
        finally:
            self._draft.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            with self._guard:
                self._abort()

    def __del__(self) -> None:
        # Without the attribute when __init__ refused an argument.
        if getattr(self, "_container", None) is not None:
            self._abort()

    def __repr__(self) -> str:
        return f"<Muxer: {self._name}{', closed' if self._container is None else ''}>"

    def default_codec(self, kind: str) -> str:
        """The file format's usual codec, for modules of this package.

        Raises:
            EncodeError: It holds no streams of the kind.
        """
        name = str(getattr(self._container, f"default_{kind}_codec"))
        if name == "ac3":  # of Matroska; it takes three sample rates alone
            name = "aac"
        if name == "none":
            raise EncodeError(f"format {self._format!r} holds no {kind}", source=self._name)
        return name

    def states_colors(self, codec: str) -> bool:
        """Whether the file tells matrix and range of video of a codec, for modules of this package."""
        return self._format in _STATES_COLORS or codec in _STATE_COLORS

    def takes(self, codec: str) -> bool:
        """Whether the file format takes a codec, as far as FFmpeg knows, for modules of this package."""
        if self._loses(codec) or (self._format == "mov" and codec in _MP4_ONLY):
            return False
        names = self._container.supported_codecs
        return not names or codec in names

    def _loses(self, codec: str) -> bool:
        return self._format == "mpegts" and codec not in _IN_MPEGTS

    def _refused(self, codec: str, remedy: str) -> EncodeError:
        text = f"format {self._format!r} does not take {codec}; give another {remedy}"
        return EncodeError(text, source=self._name)

    def _check_can_add(self) -> None:
        if self._started or self._container is None:
            raise RuntimeError(f"{self._name}: streams are added before anything is written")

    def _turn(self, stream: Any, orientation: int) -> None:
        mirrors = self._format != "matroska" or not is_mirrored(orientation)
        if orientation != 1 and not (self._format in _ORIENTED and mirrors):
            raise EncodeError(
                f"format {self._format!r} cannot say the orientation {orientation}. Turn the frames upright, "
                "or write MP4 or MOV",
                source=self._name,
            )
        if orientation != 1:
            stream.set_display_matrix(display_matrix(orientation))

    def _mux(self, packets: Iterable[AvPacket]) -> None:
        with self._errors():
            for packet in packets:
                self._container.mux_one(packet)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of FFmpeg, of the disk and of the file object."""
        with ffmpeg_log() as lines:
            mark = len(lines)
            try:
                yield
            except av.FFmpegError as error:
                text = describe(error, lines[mark:])
                if error.errno in errno.errorcode and error.errno not in _OF_ARGUMENTS:
                    self._failure = WriteError(
                        f"cannot be written: {text}", source=self._name, errno=error.errno
                    )
                else:
                    # x264 and x265 say so of odd sides in 4:2:0.
                    odd = "divisible by 2" in text
                    remedy = ". Scale to even sides, or take pix_fmt='yuv444p'" if odd else ""
                    text = f"cannot be encoded: {text}{remedy}"
                    self._failure = EncodeError(text, source=self._name)
                raise self._failure from error
