"""Which packets a window of time needs: where to start reading, and where to stop.

A window is cut exactly when it is decoded. Here, packets are found that hold it: for video from a key frame
at or before its start, for audio from half a second before, and until no later packet can belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import chain

from spdl_media._backends._pyav import AvPacket
from spdl_media._demuxing.container import Container
from spdl_media._demuxing.sample_clock import tells_sample
from spdl_media.codec import AudioCodec
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


def read_video(
    container: Container, index: int, time_base: Fraction, window: Window
) -> list[AvPacket]:
    """Packets that decode to every frame of the window, in decoding order, from a key frame on."""
    packets = _from_key_frame(container, index, time_base, window)
    if window.end is None:
        return list(packets)
    end = (window.end + container.zero) / time_base
    kept: list[AvPacket] = []
    inside = 0
    late = 0
    for packet in packets:
        kept.append(packet)
        time = packet.dts if packet.pts is None else packet.pts
        if time is None or time < end:
            inside, late = len(kept), 0
            continue
        late += 1
        # Timestamps of decoding only grow, and nothing is shown before it is decoded.
        if (packet.pts is not None and packet.dts is not None and packet.dts >= end) or (
            late > _MAX_REORDER
        ):
            break
        if packet.pts is None:  # it may be shown earlier than its place in the file says
            inside = len(kept)
    return kept[:inside]


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
    if window.end is None:
        return list(packets)
    # Timestamps are rounded; those that do not tell samples may also drift from their count.
    slack = 2 * codec.time_base if exact else _AUDIO_PREROLL
    end = (window.end + container.zero + slack) / codec.time_base
    kept = []
    for packet in packets:
        kept.append(packet)  # one past the end too: it shows whether something before it is missing
        if packet.pts is not None and packet.pts >= end:
            break
    return kept


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
