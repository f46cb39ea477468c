"""Write files of video and audio: encode frames, or copy packets, in the codecs that file formats take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from errno import EAGAIN, EDOM, EINVAL, ENOMEM, ENOSYS, ERANGE, errorcode
from functools import partial
from operator import mod
from typing import Any, NamedTuple

import av
from av.format import Flags

from spdl_media._checks import check_int
from spdl_media._ffmpeg import AvPacket, TranslatedErrors, ffmpeg_log, format_hint, is_native_layout
from spdl_media._threads import ClosedByWith, OneThread
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
)
from spdl_media.errors import EncodeError, MediaError, WriteError
from spdl_media.formats import chroma_steps
from spdl_media.frames import AudioFrames
from spdl_media.geometry import display_matrix, is_mirrored
from spdl_media.image_frames import ImageFrames, VideoFrames
from spdl_media.packets import AudioPackets, ImagePackets, VideoPackets
from spdl_media.remux import PacketCopier

__all__ = ("Muxer",)

# Error numbers that encoders and muxers use for bad arguments, not for failures of the disk.
_OF_ARGUMENTS = frozenset({EINVAL, ENOMEM, EAGAIN, EDOM, ERANGE, ENOSYS})
# Formats that store the orientation. Matroska cannot store a mirrored one.
_ORIENTED = frozenset({"mp4", "mov", "ipod", "matroska"})
# Formats that store matrix and range. MOV cannot store the range.
_STATES_COLORS = frozenset({"mp4", "ipod", "matroska", "webm"})
# Codecs whose data states matrix and range.
_STATE_COLORS = frozenset({"h264", "hevc", "av1", "vp9", "mpeg2video", "prores", "png"})
# Codecs whose decoders assume BT.601, whatever the file states.
_BT601 = frozenset({"mjpeg", "vp8"})
# Formats with edit lists, which hide frames before second 0.
_EDITED = _ORIENTED - {"matroska"}
# FFmpeg's defaults of these formats take few sample rates and channels, or have no encoder (Theora).
_BETTER = {("matroska", "ac3"): "aac", ("mpegts", "mp2"): "aac", ("ogg", "theora"): "vp8"}
# FFmpeg writes these with codecs that readers do not find, at wrong rates, or without the first samples.
_REFUSED = frozenset("3g2 3gp asf dvd flv mpeg mxf svcd vcd vob".split())
# Codecs that FFmpeg refuses for MOV, but only when it writes the header.
_MP4_ONLY = frozenset({"av1", "flac", "opus", "truehd", "vp8", "vp9"})
# The codecs that readers find in these formats. FFmpeg writes others without an error.
_IN_MPEGTS = (
    "aac aac_latm ac3 cavs dirac dts eac3 h264 hevc mp2 mp3 mpeg1video mpeg2video mpeg4 opus s302m truehd "
    "vc1 vvc"
)
_IN_FORMATS = {"mpegts": _IN_MPEGTS.split(), "flac": ["flac"]}
# Sample rates of MP3 that MP4 takes.
_MP3_RATES = 16000, 22050, 24000, 32000, 44100, 48000


class _Track(NamedTuple):
    """An output stream: the types that :meth:`Muxer.write` takes, and the encoder or copier."""

    takes: tuple[type, ...]
    coder: Any


class Muxer(ClosedByWith):
    """Writes one file of video and audio streams: encodes frames, and copies packets.

    Use it as a context manager. The file appears at its path at the end of the ``with`` block, when it is
    complete; until then it is a hidden file in the same folder. If the block raises, on Ctrl-C, and if the
    disk is full, the hidden file is removed and an existing file at the path is untouched. A file object
    also gets only the complete file, from a temporary file.

    Args:
        dst: A path, or a binary file object with ``write``.
        format: FFmpeg's name of the file format, such as ``"mp4"``, ``"matroska"`` or ``"webm"``. The default
            follows from the suffix of the path.
        format_options: Options of the format, such as ``{"movflags": "+faststart"}``, which puts the index of
            an MP4 at its start, for reading over a network. PyAV logs a warning for unknown options.

    Raises:
        ValueError: There is no such format, the path has no suffix of a format, or the format is one that
            FFmpeg does not write well: 3GP, ASF (WMV, WMA), FLV, MPEG-PS and MXF.
        TypeError: ``dst`` is neither a path nor a file object.
        WriteError: The path is a folder, or no temporary file can be created for a file object.

    Thread safety: one thread at a time; a concurrent call raises RuntimeError.

    Example:
        >>> frames = sm.frames_from_array(np.zeros((30, 48, 64, 3), np.uint8), frame_rate=30)
        >>> with sm.Muxer("out.mp4") as muxer:
        ...     index = muxer.add_encode_stream(sm.video_encode_config(width=64, height=48, frame_rate=30))
        ...     muxer.write(index, frames)
    """

    _container: Any = None  # for __del__, if __init__ refuses an argument

    def __init__(
        self,
        dst: Target,
        *,
        format: str | None = None,
        format_options: Mapping[str, object] | None = None,
    ) -> None:
        self._guard = OneThread("Muxer")
        self._tracks: list[_Track] = []
        self._started = self._flushed = False
        self._failure: Callable[[], MediaError] | None = None  # not an error, which keeps frames
        # 0 is no limit: by default FFmpeg stops interleaving once a stream is ten seconds ahead of others.
        given = string_options("format_options", format_options or {})
        options = {"max_interleave_delta": "0", **given}
        self._draft = Draft(dst)
        self._name = self._draft.name
        try:
            self._container = av.open(str(self._draft.path), "w", format=format, options=options)
        except ValueError as error:
            self._draft.remove()
            hint = format_hint(format or "", "w")
            what = f"this FFmpeg writes no format named {format!r}. {hint}".rstrip()
            lacks = f"{self._name}: no format follows from the name; give format='mp4'"
            raise ValueError(what if format else lacks) from error
        if self._format in _EDITED:
            # Edit lists count units of the movie. With FFmpeg's, milliseconds, the last samples may be lost.
            self._container.options.setdefault("movie_timescale", "1000000")
            # Without write_colr, FFmpeg omits the matrix if primaries or transfer function are unknown.
            self._container.options["movflags"] = options.get("movflags", "") + "+write_colr"
        if self._format in _REFUSED or self._container.format.no_file:
            remedy = "Take MP4, Matroska, MPEG-TS or AVI; save_image writes images"
            raise ValueError(f"{self._name}: the format {self._format!r} is not written. {remedy}")

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
            ValueError: FFmpeg has no such encoder, or the encoder no such option, pixel or sample format.
            EncodeError: The file format does not take the codec, or the encoder refuses the values.
            TypeError: ``config`` is made by neither of these functions.
            RuntimeError: Something was written already, or another thread is using the muxer.
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
            # FFmpeg would write a data stream without an error.
            if self._loses(encoder.canonical_name):
                raise refused
            try:
                stream = self._container.add_stream(encoder.name, rate=rate)
            except ValueError as error:
                raise refused from error
            if isinstance(config, VideoEncodeConfig):
                coder = VideoEncoder(stream, config)
                # x265 would write the reason to stderr, without FFmpeg's log.
                odd = [*map(mod, (config.width, config.height), chroma_steps(coder.pix_fmt))]
                if encoder.name in ("libx264", "libx265") and any(odd):
                    text = f"{encoder.name} takes no odd sides in {coder.pix_fmt}. Scale to even sides, "
                    raise EncodeError(f"{text}or take pix_fmt='yuv444p'", source=self._name)
                stream.time_base = coder.time_base
                track = _Track((VideoFrames, ImageFrames), coder)
                self._turn(stream, config.orientation)
            else:
                track = _Track((AudioFrames,), AudioEncoder(stream, config))
            # PyAV would open all encoders at the first write, and the error would not tell which one failed.
            with self._errors(writes=False):
                open_encoder(stream.codec_context)
            # FFmpeg writes raw video that has no tag, and reads it as rgb555.
            if encoder.name == "rawvideo" and stream.codec_context.codec_tag == "\0\0\0\0":
                text = f"files cannot state that raw video is {stream.codec_context.pix_fmt}. Take another "
                raise EncodeError(f"{text}pix_fmt= or encoder=", source=self._name)
            self._tracks.append(track)
            return len(self._tracks) - 1

    def add_remux_stream(
        self, source: Codec | VideoPackets | AudioPackets, *, orientation: int | None = None
    ) -> int:
        """Add a stream of packets to copy. All streams are added before the first :meth:`write`.

        Args:
            source: Packets of the stream, or their codec, such as ``demuxer.video_codec``.
            orientation: EXIF orientation, which tells players how to turn the frames. The default is that of
                the packets.

        Returns:
            The index of the stream, for :meth:`write`.

        Raises:
            EncodeError: The file format does not take the codec or the orientation, or PyAV the order of the
                channels.
            TypeError: ``source`` is neither packets of video or audio nor a codec.
            RuntimeError: Something was written already, or another thread is using the muxer.
        """
        with self._guard:
            self._check_can_add()
            codec: Any = getattr(source, "codec", source)
            if isinstance(source, ImagePackets) or not isinstance(codec, VideoCodec | AudioCodec):
                raise TypeError(f"add_remux_stream takes video or audio packets, not {source!r}")
            refused = self._refused(codec.name, "format=")
            if self._loses(codec.name):
                raise refused
            if not is_native_layout(layout := getattr(codec, "channel_layout", "")):
                raise EncodeError(f"PyAV crashes at the order of {layout}", source=self._name)
            copier = PacketCopier(
                codec,
                self._format,
                hides=self._format in _EDITED,
                keeps_headers=bool(self._container.format.flags & Flags.global_header.value),
            )
            is_video = isinstance(codec, VideoCodec)
            usual = self.default_codec("video" if is_video else "audio", covers=True)
            with self._errors():
                copier.add_stream(self._container, usual, refused)
            self._turn(copier.stream, orientation or int(getattr(source, "orientation", 1)))
            kind = VideoPackets if is_video else AudioPackets
            self._tracks.append(_Track((kind,), copier))
            return len(self._tracks) - 1

    def write(self, index: int, data: Any) -> None:
        """Encode frames, or copy packets, to a stream.

        Streams may be written in any order: encoded data that is ahead of other streams waits in memory.

        Args:
            index: Index of the stream, as returned by ``add_*_stream``.
            data: Frames for a stream that is encoded; audio is appended to the previous samples. Packets for
                a stream that is copied: they keep their times on the container's clock, and must not come
                from overlapping windows.

        Raises:
            EncodeError: A frame's size differs from the stream's, times do not increase, packets have no
                times, or the encoder or the file format refuses the data.
            WriteError: The disk is full, or the file object fails.
            TypeError: The data has another kind than the stream.
            ValueError: There is no stream of this index.
            RuntimeError: After :meth:`flush` or :meth:`close`, or while another thread is using the muxer.
        """
        with self._guard:
            if self._flushed or self._container is None:
                raise RuntimeError(f"{self._name}: this Muxer was flushed or closed")
            if not 0 <= check_int("index", index, at_least=None) < len(self._tracks):
                raise ValueError(f"there is no stream {index}; there are {len(self._tracks)}")
            track = self._tracks[index]
            if not isinstance(data, track.takes) or isinstance(data, ImagePackets):
                names = " or ".join(kind.__name__ for kind in track.takes)
                made = "; frames_from_array makes frames" if hasattr(data, "__array__") else ""
                raise TypeError(f"stream {index} takes {names}, not {type(data).__name__}{made}")
            if not self._started:
                with self._errors(), ffmpeg_log() as lines:
                    self._container.start_encoding()
                    # FFmpeg only warns, and writes a file that is read with wrong colours or not at all.
                    if any("will be unreadable" in line for *_, line in lines):
                        raise av.ArgumentError(EINVAL, "this raw video needs format='nut'")
                self._started = True
            self._mux(track.coder.encode(data))

    def flush(self) -> None:
        """Write what the encoders hold back. Nothing can be written afterwards. :meth:`close` flushes, too.

        Raises:
            EncodeError: An encoder fails.
            WriteError: The disk is full, or the file object fails.
            RuntimeError: After :meth:`close`, or while another thread is using the muxer.
        """
        with self._guard:
            if self._container is None:
                raise RuntimeError(f"{self._name}: this Muxer was closed")
            self._flush()

    def _flush(self) -> None:
        # Encoders hold nothing before the first write.
        if self._started and not self._flushed:
            for track in self._tracks:
                self._mux(track.coder.flush())
        self._flushed = True

    def close(self) -> None:
        """Complete the file and move it to its path.

        Raises:
            EncodeError: Nothing was written, or an encoder fails.
            WriteError: The disk is full, or the file object fails. No file is left then.
            RuntimeError: Another thread is using the muxer.
        """
        with self._guard:
            if self._container is None:
                return
            try:
                # The caller may have caught the error of a write, but the file lacks that data.
                if self._failure:
                    raise self._failure()
                if not self._started:
                    raise EncodeError("nothing was written, so there is no file", source=self._name)
                self._flush()
                # Cleared first, so that it is not closed again if closing fails.
                container, self._container = self._container, None
                with self._errors():
                    container.close()
                self._draft.complete()
            finally:
                self._abort()

    def _abort(self) -> None:
        """Close and remove an incomplete file; no effect on a complete one."""
        container, self._container = self._container, None
        try:
            if container is not None:
                # Errors of the trailer do not matter, because the file is removed.
                with contextlib.suppress(Exception):
                    container.close()
        finally:
            self._draft.remove()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            with self._guard:
                self._abort()

    def __del__(self) -> None:
        if self._container is not None:
            self._abort()

    def __repr__(self) -> str:
        return f"<Muxer: {self._name}{', closed' if self._container is None else ''}>"

    def default_codec(self, kind: str, *, covers: bool = False) -> str:
        """Return the default codec of the file format. Used within this package.

        Args:
            kind: ``"video"`` or ``"audio"``.
            covers: Whether covers, such as those of MP3 and FLAC, count as video.

        Raises:
            EncodeError: The format holds no streams of the kind.
        """
        name = str(getattr(self._container, f"default_{kind}_codec"))
        name = _BETTER.get((self._format, name), name)
        if name == "none" or (name == "png" and not covers):
            raise EncodeError(f"format {self._format!r} holds no {kind}", source=self._name)
        return name

    def states_colors(self, codec: str) -> bool:
        """Whether the file stores matrix and range for video of a codec. Used within this package."""
        return codec not in _BT601 and (self._format in _STATES_COLORS or codec in _STATE_COLORS)

    def has_times(self) -> bool:
        """Whether the file has times; AVI shows each packet for one frame. Used within this package."""
        return self._format != "avi"

    def takes(self, codec: Any) -> bool:
        """Whether the file format takes a codec, as far as FFmpeg knows. Used within this package."""
        name, format, listed = codec.name, self._format, self._container.supported_codecs
        if self._loses(name) or (format == "mov" and name in _MP4_ONLY):
            return False
        if name == "mp3" and format in ("mp4", "ipod") and codec.sample_rate not in _MP3_RATES:
            return False
        return format == "mpegts" or not listed or name in listed

    def _loses(self, codec: str) -> bool:
        """Whether FFmpeg writes a codec so that readers do not find it, or find noise."""
        format = self._format
        if codec == "pillow" or format in _IN_FORMATS:  # "pillow" stands for a whole animation
            return codec not in _IN_FORMATS.get(format, ())
        # FFmpeg would write packets of other codecs as raw video.
        return format == "avi" and codec not in self._container.supported_codecs

    def _refused(self, codec: str, remedy: str) -> EncodeError:
        text = f"format {self._format!r} does not take {codec}; give another {remedy}"
        return EncodeError(text, source=self._name)

    def _check_can_add(self) -> None:
        if self._started or self._container is None:
            raise RuntimeError(f"{self._name}: streams are added before anything is written")

    def turns(self, orientation: int) -> bool:
        """Whether the file stores an orientation. Used within this package."""
        mirrors = self._format != "matroska" or not is_mirrored(orientation)
        return orientation == 1 or (self._format in _ORIENTED and mirrors)

    def _turn(self, stream: Any, orientation: int) -> None:
        if not self.turns(orientation):
            text = f"format {self._format!r} cannot store the orientation {orientation}. Turn the "
            raise EncodeError(f"{text}frames upright, or write MP4 or MOV", source=self._name)
        if orientation != 1:
            stream.set_display_matrix(display_matrix(orientation))

    def _mux(self, packets: Iterable[AvPacket]) -> None:
        with self._errors():
            for packet in packets:
                # FLAC's last packet is empty, and holds a new header. AVI would count it.
                if packet.size or self.has_times():
                    self._container.mux_one(packet)

    def _errors(self, *, writes: bool = True) -> TranslatedErrors:
        """Translate FFmpeg's errors to WriteError (disk, file object) or EncodeError (all others)."""
        return TranslatedErrors(partial(self._failed, writes=writes))

    def _failed(self, text: str, error: av.FFmpegError, *, writes: bool) -> MediaError:
        if writes and error.errno in errorcode and error.errno not in _OF_ARGUMENTS:
            text = f"cannot be written: {text}"
            self._failure = partial(WriteError, text, source=self._name, errno=error.errno)
        else:
            self._failure = partial(EncodeError, f"cannot be encoded: {text}", source=self._name)
        return self._failure()
