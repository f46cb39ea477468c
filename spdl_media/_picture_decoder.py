"""Decode packets of a video or a still to frames: handle damage, cut to the window, orient, filter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Any, Protocol

import av

from spdl_media._ffmpeg import (
    AvPacket,
    LogLine,
    current_log,
    describe,
    ffmpeg_log,
    frame_matrix,
    naming,
    says_damaged,
)
from spdl_media.codec import STILL_CODECS, OpenDecoder, VideoCodec, usual_duration
from spdl_media.coded_units import has_checksum, is_sliceless, needs_newer_pyav, states_orientation
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.filters import PictureFilter
from spdl_media.geometry import matrix_orientation
from spdl_media.operations import Desc
from spdl_media.packets import (
    FrameMetadata,
    PacketMetadata,
    VideoPackets,
    av_packets,
    check_complete,
    discarded_pts,
    metadata_of,
    with_data,
)
from spdl_media.pillow_frames import PILLOW, decode_animation
from spdl_media.still_headers import without_exif


class Sink(Protocol):
    """The destination of decoded frames: a list of frames, or the rows of an array."""

    def put(self, frame: av.VideoFrame, /) -> bool:
        """Take ownership of a frame. Return whether the sink is full.

        Raises:
            ConvertError: The frame does not match the frames before it.
        """
        ...


class PictureDecoder(OpenDecoder):
    """Decodes packets in order and gives the frames inside the window.

    Frames are left out for three reasons. Lead-in cannot be decoded, because the stream was cut in mid-GOP:
    it is skipped and counted in ``num_skipped``. Frames before the window are decoded only as references, and
    left out. Frames that the decoder reports as damaged are raised, kept or dropped by ``config.on_corrupt``.

    The caller must be inside an :func:`ffmpeg_log` block, from which FFmpeg's log lines are read.

    Args:
        codec: Parameters of the stream.
        metadata: Metadata of the first packets.
        config: Options of decoding.
        context: An open decoder to use in place of a new one of FFmpeg's.
    """

    def __init__(
        self, codec: VideoCodec, metadata: PacketMetadata, config: DecodeConfig, context: Any = None
    ) -> None:
        super().__init__(codec, metadata, config, context)
        self._remedy = ""
        if codec.frame_rate is not None:
            self._remedy = _KEEPS_FRAMES
        elif codec.name in _PARTLY_DECODED:
            self._remedy = ". decode_config(on_corrupt='keep') decodes what can be decoded"
        self.needs_log = codec.name in _LOGGED_DAMAGE
        self.needs_key, self.gives_lead_in = True, False
        self.orientation, self.num_skipped = 1, 0
        self.corrupt_pts: frozenset[int | None] = frozenset()
        self._first_key_pts = -math.inf
        self._leading: set[int | None] = set()
        self._next_pts: int | None = None
        # Heap of the dts of packets whose frames have not come out; None as soon as a packet has a pts.
        self._pending_dts: list[int] | None = []
        # Duration of a frame in ticks, used where packets state none; 0: unknown.
        self._step = usual_duration(codec)
        self._started = self._skips = self._states_orientation = False
        self.follow(metadata)

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int] = frozenset()) -> None:
        """Use the window and the clock of the next packets, and the timestamps of the frames they hide."""
        self.metadata: PacketMetadata = metadata
        # Added to the earlier ones, because frames of earlier packets may still be in the decoder.
        self.discarded |= discarded
        if self.orientation == 1:
            self.orientation = metadata.orientation
        # In ticks, because comparing fractions takes 3 microseconds a frame.
        self._first, self._stop = metadata.span(self._codec.time_base)

    def decode(self, packet: AvPacket | None) -> Iterator[av.VideoFrame]:
        """Yield the frames that are ready after this packet; ``None`` flushes the decoder.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
        """
        if packet is not None and not self._accept_packet(packet):
            return
        frames = self._send(packet)[::-1]
        while frames:  # without the list holding those before, because NVDEC maps few at a time
            frame = frames.pop()
            if packet is None:  # PyAV 18 does not set it on flushed frames
                frame.time_base = self._codec.time_base
            # FFmpeg passes on the numbers in a ProRes header, but its scaler refuses reserved ones.
            if frame.color_primaries in _RESERVED:
                frame.color_primaries = _UNSPECIFIED
            if frame.color_trc in _RESERVED:
                frame.color_trc = _UNSPECIFIED
            if self._wanted(frame):
                yield frame
        if packet is None:
            # Most decoders silently leave out frames whose references are missing.
            for pts in self._leading - self.discarded:
                self._skip(pts)
            self._leading.clear()
            # The HEVC decoder ignores slices without parameter sets.
            if self._codec.name == "hevc" and not (self._started or self.needs_key):
                self._lose(self._error("no frame: parameter sets may be missing", None))

    def _accept_packet(self, packet: AvPacket) -> bool:
        """Note timestamps and flags of a packet. Return whether to send it to the decoder."""
        pts = packet.pts
        self._packet_index += 1
        self._step = packet.duration or self._step
        if not self._started and self.orientation == 1:
            # Found in the packet, because reading a PyAV frame's side data makes a reference cycle, which
            # keeps the frame until the garbage collector runs.
            self._states_orientation |= states_orientation(packet, self._codec)
        if self.needs_key:
            # Without a key frame before it, its references are missing.
            if not packet.is_keyframe:
                self._skip(pts)
                return False
            self.needs_key, self._first_key_pts = False, -math.inf if pts is None else pts
        elif self.is_lead_in(pts) and not packet.is_discard:
            self._leading.add(pts)
        if pts is not None:
            self._pending_dts = None
        elif self._pending_dts is not None and packet.dts is not None:
            heappush(self._pending_dts, packet.dts)
        return True

    def restart(self, packet: int = 0) -> None:
        """Reset the decoder for packets that do not continue the last ones, from index ``packet`` on."""
        # After its end was signalled, a decoder takes no packets until its buffers are flushed.
        self._context.flush_buffers()
        self.needs_key, self._first_key_pts, self._next_pts = True, -math.inf, None
        self.discarded, self._pending_dts = frozenset(), []
        self._leading.clear()
        self._packet_index = packet - 1

    def check_keyed(self) -> None:
        """Raise DecodeError if no packet was decoded, because none is a key frame."""
        if self.has_started and self.needs_key:
            raise DecodeError(
                f"none of the {self._packet_index + 1} packets is marked as a key frame, at which decoding "
                "begins. decode_packets decodes such packets from the first one on",
                source=self.metadata.source,
            )

    def skip_unreferenced(self, *, skip: bool) -> None:
        """Set whether the decoder skips the frames of the next packets that no other frame refers to."""
        # Not with decoder threads, which may still be at earlier packets.
        if skip != self._skips and "threads" not in self._config.decoder_options:
            self._skips = skip
            self._context.skip_frame = "NONREF" if skip else "DEFAULT"

    def _send(self, packet: AvPacket | None) -> list[av.VideoFrame]:
        log = current_log.lines
        assert log is not None, "the loop over the packets stands in a block of ffmpeg_log"
        start = len(log)
        if packet is not None and self._codec.decoder == "png":
            packet = with_data(packet, without_exif(memoryview(packet)))
        try:
            frames: list[av.VideoFrame] = self._context.decode(packet)
        except av.FFmpegError as error:
            self._failed(packet, error, log[start:])
            return []
        if len(log) > start and packet is not None and says_damaged(log[start:]):
            self.corrupt_pts |= {packet.pts}
        return frames

    def _failed(self, packet: AvPacket | None, cause: av.FFmpegError, lines: list[LogLine]) -> None:
        """Raise the decoder's error, or count it as dropped, by ``on_corrupt``."""
        pts = None if packet is None else packet.pts
        # Lead-in is counted at the flush. H.264 fails without a slice; if its sets are damaged, it logs more.
        is_whole = self._codec.name == "h264" and len(lines) == 1
        if self.is_lead_in(pts) or (is_whole and is_sliceless(packet, self._codec)):
            return
        if packet is not None and needs_newer_pyav(packet, self._codec):
            raise DecodeError(
                f"animated WebP is decoded from PyAV 19 on, and this is {av.__version__}, the last for "
                "CPython 3.11. Use CPython 3.12 or newer with PyAV 19",
                source=self.metadata.source,
            ) from cause
        self._lose(self._error(describe(cause, lines), pts), cause)

    def _wanted(self, frame: av.VideoFrame) -> bool:
        pts = frame.pts
        if pts is None:
            pts = self._assign_pts(frame)
        else:
            self._next_pts = pts + self._step
        is_corrupt = frame.is_corrupt
        if self._leading and not (is_corrupt and self.is_lead_in(pts)):
            self._leading.discard(pts)
        if not self._started:
            self._started = True
            if self._states_orientation:
                matrix = frame_matrix(frame)
                self.orientation = matrix_orientation(matrix) if matrix else 1
        if pts in self.discarded:
            return False
        if (is_corrupt or pts in self.corrupt_pts) and not self._keeps_corrupt(pts):
            return False
        is_early = pts is not None and pts < self._first
        return (not is_early or self.gives_lead_in) and (pts is None or pts < self._stop)

    def _keeps_corrupt(self, pts: int | None) -> bool:
        # Damage before the window is reported, because frames inside may refer to it; after it, it is not.
        if self.is_lead_in(pts) or (pts is not None and pts >= self._stop):
            return False
        if self._config.on_corrupt == "raise":
            raise self._error("the decoder reports that the frame is damaged", pts)
        if self._config.on_corrupt == "drop":
            # Only frames that the window misses are counted.
            self.num_dropped += pts is None or pts >= self._first
            return False
        return True

    def is_lead_in(self, pts: int | None) -> bool:
        """Whether a frame is shown before the first key frame, so that it may refer to missing frames."""
        return pts is not None and pts < self._first_key_pts

    def _skip(self, pts: int | None) -> None:
        self.num_skipped += pts is None or self._first <= pts < self._stop

    def _assign_pts(self, frame: av.VideoFrame) -> int | None:
        """Return a timestamp for a frame that has none; ``None``: it is a still, or the rate is unknown."""
        # A still has no timestamp, although FFmpeg states a frame rate for it.
        if not self._step or self._codec.name in STILL_CODECS:
            return None
        pts = self._next_pts
        if self._pending_dts:
            # H.264 in AVI has dts alone. Sorted, they are the pts.
            pts = heappop(self._pending_dts)
        # Raw streams have neither: count frames at the stated rate, as players do.
        elif pts is None:
            # The first frame is at second 0 of the container.
            pts = round(self.metadata.zero / self._codec.time_base)
        frame.pts = pts
        self._next_pts = pts + self._step
        return pts


# Values of colour primaries and transfer functions. See: ITU-T H.273, tables 2 and 3.
_RESERVED, _UNSPECIFIED = (0, 3), 2
_LOGGED_DAMAGE = frozenset("av1 bmp exr ffv1 gif hevc tiff vvc".split())  # see says_damaged
_KEEPS_FRAMES = ". decode_config(on_corrupt='keep') keeps such frames, 'drop' leaves them out"
# Stills whose damaged files FFmpeg decodes in part. Of others it gives the whole image or nothing.
_PARTLY_DECODED = frozenset({"exr", "gif", "mjpeg", "qoi", "tiff"})


class PicturePath:
    """Turns packets into frames: decodes, cuts to the window, turns upright and filters, in this order."""

    def __init__(
        self, codec: VideoCodec, metadata: PacketMetadata, filter_desc: Desc, config: DecodeConfig
    ) -> None:
        self.decoder = PictureDecoder(codec, metadata, config)
        self._filter = PictureFilter(codec, filter_desc, config, metadata)
        self.decoder.gives_lead_in = self._filter.rate is not None

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int], sink: Sink) -> None:
        """Prepare for the next packets: use their metadata, and the timestamps of the frames they hide.

        Raises:
            DecodeError: As for :meth:`push`.
            FilterError: As for :meth:`push`.
        """
        is_new = not metadata.continues and self.decoder.has_started
        try:
            if is_new:
                # The packets do not continue the last ones (they are another window, say). Delayed frames
                # must come out first, and the decoder must not use them as references.
                self._put(self.decoder.decode(None), sink)
                for frame in self._filter.end_run():
                    sink.put(frame)
        finally:
            if is_new:
                self.decoder.restart()
            self.decoder.follow(metadata, discarded)
            self._filter.follow(metadata)

    def _put(self, frames: Iterable[av.VideoFrame], sink: Sink) -> bool:
        # No variable holds a converted frame, so that its buffer is back in FFmpeg's pool for the next one.
        decoder, filter = self.decoder, self._filter
        for frame in frames:
            is_corrupt = filter.rate is not None and frame.pts in decoder.corrupt_pts
            if any(map(sink.put, filter.push(frame, decoder.orientation, is_corrupt=is_corrupt))):
                return True
        return False

    def push(self, packet: AvPacket | None, sink: Sink) -> bool:
        """Put the frames of this packet into a sink; ``None`` flushes the decoder and the filters.

        Returns:
            Whether the sink is full.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
            FilterError: The filters do not accept the frames.
        """
        is_full = self._put(self.decoder.decode(packet), sink)
        return is_full or (packet is None and any(map(sink.put, self._filter.flush())))

    def run(self, packets: Iterable[AvPacket], sink: Sink) -> bool:
        """Put the frames of all packets into a sink.

        Returns:
            Whether the sink was full before the packets ended.

        Raises:
            DecodeError: As for :meth:`push`.
            FilterError: As for :meth:`push`.
        """
        with ffmpeg_log(always=self.decoder.needs_log):  # one for all packets; see current_log
            for packet in packets:
                if self._put(self.decoder.decode(packet), sink):
                    return True
            return self.push(None, sink)

    def take_metadata(self) -> FrameMetadata:
        """Return the metadata of the frames that came out since the last call, and reset the counts."""
        decoder = self.decoder
        metadata = FrameMetadata.of(
            decoder.metadata,
            orientation=self._filter.orientation or decoder.orientation,
            num_skipped=decoder.num_skipped,
            num_dropped=decoder.num_dropped,
            corrupt_pts=self._filter.copied_corrupt
            | (frozenset() if self._filter.rate else decoder.corrupt_pts),
        )
        decoder.num_skipped = decoder.num_dropped = 0
        return metadata


def check_start(packets: VideoPackets) -> None:
    """Raise for packets that continue a stream and do not start with a key frame.

    Raises:
        DecodeError: The packets cannot be decoded without those before them.
    """
    coded = av_packets(packets)
    if metadata_of(packets).continues and coded and not coded[0].is_keyframe:
        raise DecodeError(
            "these packets continue a stream and do not start with a key frame, so they cannot be decoded "
            "alone. Give the chunks of a stream, in order, to one VideoDecoder",
            source=packets.source,
        )


def decode_into(
    sink: Sink,
    packets: VideoPackets,
    filter_desc: Desc,
    config: DecodeConfig,
    num_frames: int | None,
    make_path: Callable[..., PicturePath] = PicturePath,
    more: Iterable[VideoPackets] | None = None,
) -> Callable[[], FrameMetadata]:
    """Decode the packets of a video, and put each frame into a sink as it leaves the filters.

    Args:
        sink: A sink that is full after ``num_frames`` frames.
        packets: As for :func:`~spdl_media.decode_packets`.
        filter_desc: The filters; ``None``: the frames stay as decoded.
        config: Options of decoding.
        num_frames: Number of frames that the sink takes; ``None``: all.
        make_path: Opens decoder and filters; called with the arguments of :class:`PicturePath`.
        more: Packets that continue these, in the order in which they were read; iterated as needed.

    Returns:
        A function that returns the metadata of the frames.

    Raises:
        DecodeError: The data is damaged, or this FFmpeg has no decoder for it.
        FilterError: The filter graph cannot be used.
    """
    metadata, coded = metadata_of(packets), av_packets(packets)
    if metadata.pillow is not None and config.decoder in (None, PILLOW):
        with naming(packets.source):
            return decode_animation(sink.put, packets, filter_desc, config)
    last = packets

    def check_end(packets: VideoPackets) -> None:
        nonlocal last
        last = packets
        if num_frames is None:
            check_complete(packets, config)

    def following() -> Iterator[AvPacket]:
        for part in more or ():
            check_end(part)
            path.follow(metadata_of(part), frozenset(), sink)
            yield from av_packets(part)

    check_end(packets)
    check_start(packets)
    with naming(packets.source):
        path = make_path(packets.codec, metadata, filter_desc, config)
        # Frames that an edit list hides are decoded, because others refer to them, and dropped by timestamp:
        # packets of another process lack FFmpeg's flag. Timestamps of one part do not tell another's frames.
        path.decoder.discarded = discarded_pts(packets) if more is None else frozenset()
        # A stream without any key frame uses intra refresh, and its decoder can start anywhere.
        keys = [packet for packet in coded if packet.is_keyframe]
        path.decoder.needs_key = bool(keys)
        if packets.codec.name == "hevc":  # its decoder logs four lines for each frame
            path.decoder.needs_log = any(has_checksum(p, packets.codec) for p in keys or coded)
        is_full = path.run(chain(coded, following()), sink) if coded else False
    if not is_full:  # a full sink does not need the missing end
        check_complete(last, config)
    return path.take_metadata
