"""Which packets a window of time needs: where to start reading, and where to stop.

A window is cut exactly when it is decoded. Here, packets are found that hold it: for video from a key frame
at or before its start, for audio from half a second before, and until no later packet can belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import chain

from spdl_media._demuxing.container import Container
from spdl_media._demuxing.sample_clock import tells_sample
from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import AudioCodec, VideoCodec
from spdl_media.timing import Window

# MP3 takes bits from earlier frames, AAC and Vorbis overlap with the one before; with half a second all
# give after a seek what they give when decoded from the start (MP2 but for the last bit, whose
# dither goes on from frame to frame).
_AUDIO_PREROLL = Fraction(1, 2)

# Opus sounds right after 80 ms, but the last bits of its predictors take longer: of 240 windows of speech
# 9 differed with a lead-in of 2 s, 1 with 3 s, none with 4 s. Decoding 5 s takes 9 ms.
_PREROLLS = {"opus": Fraction(5)}

# A packet of an MPEG program stream has a timestamp only now and then; after a seek, those in between are
# counted from the wrong one.
_UNSURE_SEEKS = frozenset({"mpeg"})

# No codec in use shows a picture more than 16 pictures later than it is coded (H.264 and HEVC: 16).
_MAX_REORDER = 16


class _PictureRun:
    """Packets of a video stream as they are read, until those of the window are complete.

    Args:
        container: Where they are read from.
        time_base: Of the stream.
        window: What is asked for.
        restart_until: Time on FFmpeg's clock up to which each key frame makes those before it needless.
    """

    def __init__(
        self,
        container: Container,
        time_base: Fraction,
        window: Window,
        *,
        restart_until: Fraction | None = None,
    ) -> None:
        self._restart = None if restart_until is None else restart_until / time_base
        self._end = None if window.end is None else (window.end + container.zero) / time_base
        self._kept: list[AvPacket] = []
        self._inside = 0
        self._late = 0
        self.complete = False

    def add(self, packet: AvPacket) -> None:
        if (
            self._restart is not None
            and packet.is_keyframe
            and _at_or_before(packet, self._restart)
        ):
            self._kept.clear()
        self._kept.append(packet)
        end, time = self._end, packet.dts if packet.pts is None else packet.pts
        if end is None or time is None or time < end:
            self._inside, self._late = len(self._kept), 0
            return
        self._late += 1
        # Timestamps of decoding only grow, and nothing is shown before it is decoded.
        if (packet.pts is not None and packet.dts is not None and packet.dts >= end) or (
            self._late > _MAX_REORDER
        ):
            self.complete = True
        elif packet.pts is None:  # it may be shown earlier than its place in the file says
            self._inside = len(self._kept)

    def packets(self) -> list[AvPacket]:
        return self._kept[: self._inside]


class _SoundRun:
    """Packets of an audio stream as they are read, until those of the window are complete.

    Args:
        container: Where they are read from.
        codec: Of the stream.
        window: What is asked for.
        exact: Timestamps tell samples.
        restart_until: Time on FFmpeg's clock up to which packets that tell their sample make those before
            them needless.
    """

    def __init__(
        self,
        container: Container,
        codec: AudioCodec,
        window: Window,
        *,
        exact: bool,
        restart_until: Fraction | None = None,
    ) -> None:
        self._codec = codec
        self._restart = None if restart_until is None else restart_until / codec.time_base
        # Timestamps are rounded; those that do not tell samples may also drift from their count.
        slack = 2 * codec.time_base if exact else _AUDIO_PREROLL
        self._end = (
            None if window.end is None else (window.end + container.zero + slack) / codec.time_base
        )
        self._kept: list[AvPacket] = []
        self.complete = False

    def add(self, packet: AvPacket) -> None:
        if (
            self._restart is not None
            and _at_or_before(packet, self._restart)
            # At the stream's stated start, packets before it may still be needed to decode it.
            and packet.pts != self._codec.start_pts
            and tells_sample(self._codec, packet.pts or 0, packet.duration or 0)
        ):
            self._kept.clear()
        self._kept.append(
            packet
        )  # one past the end too: it shows whether something before it is missing
        if self._end is not None and packet.pts is not None and packet.pts >= self._end:
            self.complete = True

    def packets(self) -> list[AvPacket]:
        return self._kept


def _at_or_before(packet: AvPacket, ticks: Fraction) -> bool:
    return packet.pts is not None and packet.pts <= ticks


def read_video(
    container: Container, index: int, time_base: Fraction, window: Window
) -> list[AvPacket]:
    """Packets that decode to every frame of the window, in decoding order, from a key frame on."""
    run = _PictureRun(container, time_base, window)
    for packet in _from_key_frame(container, index, time_base, window):
        run.add(packet)
        if run.complete:
            break
    return run.packets()


def _from_key_frame(
    container: Container, index: int, time_base: Fraction, window: Window
) -> Iterator[AvPacket]:
    """Packets from the last key frame that is shown at or before the window's start."""
    if window.start is None or window.start <= 0 or container.av.format.name in _UNSURE_SEEKS:
        container.rewind()
        return container.packets([index])
    start = window.start + container.zero
    first_pts = start / time_base
    back = Fraction(0)
    while container.seek(start - back, index):
        packets = container.packets([index])
        key = next((packet for packet in packets if packet.is_keyframe), None)
        if key is not None and key.pts is not None and key.pts <= first_pts:
            return chain([key], packets)
        # MPEG-TS lands late and between key frames; an open group's key frame can be shown after
        # frames that are asked for. Go back further, twice as far each time.
        if back > window.start:
            break
        back = back * 2 or Fraction(1)
    container.rewind()
    return container.packets([index])


def read_audio(
    container: Container, index: int, codec: AudioCodec, window: Window
) -> list[AvPacket]:
    """Packets that decode to every sample of the window, with the lead-in that decoders need."""
    packets, exact = _from_preroll(container, index, codec, window)
    run = _SoundRun(container, codec, window, exact=exact)
    for packet in packets:
        run.add(packet)
        if run.complete:
            break
    return run.packets()


def read_clip(
    container: Container,
    indices: tuple[int, int],
    codecs: tuple[VideoCodec, AudioCodec],
    window: Window,
) -> tuple[list[AvPacket], list[AvPacket]]:
    """What :func:`read_video` and :func:`read_audio` give, read in one pass over both streams.

    Args:
        container: The open container.
        indices: Of the video and the audio stream.
        codecs: Of the same two.
        window: What is asked for.
    """
    picture_time, sound_time = _lead_in(container, codecs[1], window)
    packets, exact = _from_both(container, indices, codecs, (picture_time, sound_time))
    runs: tuple[_PictureRun, _SoundRun] = (
        _PictureRun(container, codecs[0].time_base, window, restart_until=picture_time),
        _SoundRun(
            container, codecs[1], window, exact=exact, restart_until=sound_time if exact else None
        ),
    )
    for packet in packets:
        run = runs[indices.index(packet.stream_index)]
        if not run.complete:
            run.add(packet)
        elif runs[0].complete and runs[1].complete:
            break
    return runs[0].packets(), runs[1].packets()


def _from_preroll(
    container: Container, index: int, codec: AudioCodec, window: Window
) -> tuple[Iterator[AvPacket], bool]:
    """Packets from one on whose first sample is known, and whether its timestamp says so."""
    preroll = _PREROLLS.get(codec.name, _AUDIO_PREROLL)
    if (
        window.start is not None
        and window.start > preroll
        and _can_start_anywhere(codec, container.av.format.name)
    ):
        target = window.start - preroll + container.zero
        back = Fraction(0)
        while back <= window.start + 1 and container.seek(target - back, index):
            packets = container.packets([index])
            first = next(packets, None)
            if (
                first is not None
                and first.pts is not None
                and first.pts * codec.time_base <= target
            ):
                if tells_sample(codec, first.pts, first.duration or 0):
                    return chain([first], packets), True
                break
            back = back * 2 or Fraction(1)
    container.rewind()
    return container.packets([index]), False


def _lead_in(
    container: Container, codec: AudioCodec, window: Window
) -> tuple[Fraction | None, Fraction | None]:
    """Times on FFmpeg's clock at which pictures and sound may begin; ``None``: at the start of the file."""
    if window.start is None or window.start <= 0:
        return None, None
    picture_time = window.start + container.zero
    preroll = _PREROLLS.get(codec.name, _AUDIO_PREROLL)
    if window.start <= preroll or not _can_start_anywhere(codec, container.av.format.name):
        return picture_time, None
    return picture_time, picture_time - preroll


def _from_both(
    container: Container,
    indices: tuple[int, int],
    codecs: tuple[VideoCodec, AudioCodec],
    times: tuple[Fraction | None, Fraction | None],
) -> tuple[Iterator[AvPacket], bool]:
    """Packets of both streams from where both can be decoded, and whether the sound's times tell samples."""
    picture_time, sound_time = times
    if picture_time is not None and sound_time is not None:
        back = Fraction(0)
        # A second before the start, as the sound alone is sought.
        while back <= picture_time - container.zero + 1 and container.seek(
            sound_time - back, indices[0]
        ):
            packets = container.packets(indices)
            head = _Head(indices, codecs, (picture_time, sound_time))
            if head.read(packets):
                return chain(head.packets, packets), True
            back = back * 2 or Fraction(1)
    container.rewind()
    return container.packets(indices), False


class _Head:
    """Where both streams can be decoded from, found among the first packets after a seek."""

    def __init__(
        self,
        indices: tuple[int, int],
        codecs: tuple[VideoCodec, AudioCodec],
        times: tuple[Fraction, Fraction],
    ) -> None:
        self._indices = indices
        self._codecs = codecs
        self._latest = times[0] / codecs[0].time_base, times[1] / codecs[1].time_base
        self.packets: list[AvPacket] = []

    def read(self, packets: Iterator[AvPacket]) -> bool:
        """Read until the first key frame and the first sound are there; whether both are early enough."""
        has_key = has_sound = False
        for packet in packets:
            if packet.stream_index == self._indices[0]:
                if not has_key and not packet.is_keyframe:
                    continue
                if not has_key and not _at_or_before(packet, self._latest[0]):
                    return False
                has_key = True
            elif not has_sound:
                has_sound = _at_or_before(packet, self._latest[1]) and tells_sample(
                    self._codecs[1], packet.pts or 0, packet.duration or 0
                )
                if not has_sound:
                    return False
            self.packets.append(packet)
            if has_key and has_sound:
                return True
        return False


def _can_start_anywhere(codec: AudioCodec, format: str) -> bool:
    """Whether a decoder that starts in mid-stream soon gives what it gives from the start.

    The predictors of ADPCM, WMA and speech codecs remember, and seeks in WAV are off by up to two
    blocks of ADPCM. In Ogg, FLAC packets of the last page have wrong timestamps after a seek.
    """
    if (format, codec.name) == ("ogg", "flac") or format in _UNSURE_SEEKS:
        return False
    if codec.name.startswith("pcm_"):
        # FFmpeg finds the place in WAV by the bytes a second that the header states, true or not.
        stated, true = codec.bit_rate, 8 * codec.block_align * codec.sample_rate
        return not stated or not true or stated == true
    return codec.name in _INDEPENDENT


_INDEPENDENT = frozenset("aac ac3 alac dts eac3 flac mp1 mp2 mp3 opus tta vorbis wavpack".split())
