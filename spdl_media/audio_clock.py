"""Which sample of an audio stream a timestamp means, also where timestamps are rounded.

Matroska counts milliseconds, 48 samples at 48 kHz. Most codecs cut audio into packets of one size, far
longer than a millisecond, so the number of the packet follows from its rounded timestamp, and the number of
the sample from that of the packet. The headers of Vorbis and AAC tell how many samples a packet has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import AudioCodec
from spdl_media.timing import nearest_sample

# MP3 takes bits from earlier frames, AAC and Vorbis overlap with the one before; with half a second all
# give after a seek what they give when decoded from the start, but for the last bit of two: MP2, whose
# dither goes on from frame to frame, and Opus for speech, whose predictors still remember it after 5 s. What
# is more of it they forget in 0.32 s (of 1,200 windows).
AUDIO_PREROLL = Fraction(1, 2)

_ZERO = Fraction(0)

# The usual steps. Packets of others, such as Opus of 10 ms, do not stand where these do.
_PACKET_SAMPLES = {"ac3": 1536, "eac3": 1536, "opus": 960}

# Codecs whose packets hold one number of samples. Phones and encoders of live streams write them with
# timestamps of a clock of their own, which waver around the samples.
_EVEN_CODECS = frozenset({"aac", "ac3", "eac3", "mp1", "mp2", "mp3"})

_SHORTEST_VORBIS, _LONGEST_VORBIS = 64, 8192

# A stream's first timestamp and the one at hand are rounded, half a tick each.
_ROUNDING_HALF_TICKS = 3


def frame_position(codec: AudioCodec, pts: int, num_samples: int, zero: Fraction) -> int:
    """Position on the container's clock of the first sample of a decoded frame.

    The stream's first sample is rounded to a position, and the others are counted from it, so that
    a stream that starts between two positions does not waver between them.
    """
    start, base, rate = codec.start_pts or 0, codec.time_base, codec.sample_rate
    first = nearest_sample(start, base, zero, rate)
    if codec.name in _EVEN_CODECS or not _ticks_are_fine(codec):
        # The Opus decoder cuts its own delay off the first frame also after a seek. The end of that
        # frame is still where a packet ends.
        for samples in (0, num_samples):
            place = _on_grid(codec, pts, _packet_samples(codec), samples)
            if place is not None:
                return first + place - samples
    return first + nearest_sample(pts - start, base, _ZERO, rate)


def _ticks_are_fine(codec: AudioCodec) -> bool:
    """Whether each sample has a tick of its own."""
    # In whole numbers, which take a tenth of the time of fractions.
    return codec.time_base.numerator * codec.sample_rate <= codec.time_base.denominator


def tells_each_sample(codec: AudioCodec) -> bool:
    """Whether timestamps are fine enough to tell which sample any packet begins with.

    Otherwise :func:`tells_sample` says it of a packet.
    """
    step = _packet_samples(codec)
    if not step and _ticks_are_fine(codec):
        return True
    tick = _samples_per_tick(codec)
    fine = tick <= 1 or tick == 2  # HE-AAC: ticks of the half-rate core
    # FFmpeg adds up rounded durations in raw streams (AC-3 at 44.1 kHz), and writers take times from a
    # clock: fine ticks, and yet they drift from the samples or waver, which shows on the grid.
    return fine and codec.name not in _EVEN_CODECS and (not step or (step / tick).denominator == 1)


def tells_sample(codec: AudioCodec, pts: int, duration: int) -> bool:
    """Whether the timestamp of a packet is one of a packet, and so tells which sample it begins with.

    Otherwise samples can only be counted from the start of the stream. The duration of the packet
    is in ticks, 0 where it is not known.
    """
    step, tick = _packet_samples(codec), _samples_per_tick(codec)
    if codec.name == "eac3" and duration and step % (duration * tick) == 0:
        step = int(duration * tick)  # frames of 1, 2 or 3 blocks of 256
    # Opus has shorter packets too, of which every other may stand on the grid by chance.
    short = 0 < duration < step / tick - 1
    return not short and _on_grid(codec, pts, step) is not None


def even_samples(codec: AudioCodec) -> int:
    """Samples of each packet, where timestamps may waver around them; else 0."""
    return _packet_samples(codec) if codec.name in _EVEN_CODECS else 0


def counted_starts(codec: AudioCodec, entries: Any) -> dict[int, int] | None:
    """Where packets begin whose stated times waver: where the one before ends.

    Args:
        codec: Of the stream.
        entries: All of its packets, as PyAV gives the index of the container.

    Returns:
        By the stated timestamp, that of the sample with which the packet begins; empty where they are the
        same. ``None``: the samples of the packets are not known.
    """
    step = even_samples(codec) / _samples_per_tick(codec)
    if not entries or step < 1 or step.denominator != 1:
        return None
    size, first, last = int(step), entries[0].timestamp, len(entries) - 1
    # A stream that wavers anywhere does so nearly everywhere. To read the index of an hour takes 70 ms.
    some = {last * number // _PROBES for number in range(_PROBES + 1)}
    if all(entries[number].timestamp == first + number * size for number in some):
        return {}
    stated = [entry.timestamp for entry in entries]
    if abs(stated[-1] - first - last * size) > last * size / 8:
        return None  # packets of another number of samples
    starts: dict[int, int] = {}
    position, lead = first, Lead(size)
    for pts in stated:
        if lead.is_gap(pts - position):
            position = pts
        starts[pts] = position
        position += size
    return starts


def straightened(
    packets: Iterator[AvPacket], starts: Mapping[int, Mapping[int, int]]
) -> Iterator[AvPacket]:
    """Give packets the timestamps of :func:`counted_starts`, listed by the index of their stream."""
    for packet in packets:
        if packet.stream_index in starts and packet.pts is not None:
            packet.pts = starts[packet.stream_index].get(packet.pts, packet.pts)
        yield packet


class Lead:
    """Tells gaps between packets of one size from timestamps that waver.

    Behind a gap all timestamps are ahead of the count of samples, by a packet or more. Those that waver come
    back, and a clock that runs fast gets ahead slowly.

    Args:
        size: Of a packet, less what timestamps may be off by rounding.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._usual = 0

    def is_gap(self, lead: int) -> bool:
        """Whether a timestamp so far ahead of the count shows a gap, behind which the count starts anew."""
        usual = self._usual
        self._usual = min(lead, usual + (lead - usual) // 64)
        if lead - usual < self._size:
            return False
        self._usual = 0
        return True


_PROBES = 16


def _on_grid(codec: AudioCodec, pts: int, step: int, samples: int = 0) -> int | None:
    """Samples from the start of the stream to so many behind a timestamp, if packets stand there."""
    # In whole numbers, samples times this unit: fractions take as long as ten packets take to decode.
    unit = codec.time_base.denominator
    tick = codec.time_base.numerator * codec.sample_rate
    after = (pts - (codec.start_pts or 0)) * tick + samples * unit
    if after == 0 or not step or step * unit < 4 * tick:
        return None if after else 0
    # The first packet begins so many samples before the first one that is heard. Halves go up, as in
    # nearest_sample.
    number = (2 * (after + codec.delay * unit) + step * unit) // (2 * step * unit)
    place = number * step - codec.delay
    return place if 2 * abs(place * unit - after) <= _ROUNDING_HALF_TICKS * tick else None


def _samples_per_tick(codec: AudioCodec) -> Fraction:
    return codec.time_base * codec.sample_rate


def _packet_samples(codec: AudioCodec) -> int:
    """Samples of each packet; 0: they differ, or it is not known."""
    if codec.name == "flac":
        return _flac_block_size(codec.extradata or b"")
    if codec.name in ("aac", "mp1", "mp2", "mp3"):
        return codec.frame_size
    return _PACKET_SAMPLES.get(codec.name, 0)


def _flac_block_size(extradata: bytes) -> int:
    """Block size that the STREAMINFO of FLAC states; 0: it varies."""
    start = 8 if extradata[:4] == b"fLaC" else 0
    if len(extradata) < start + 4:
        return 0
    smallest, largest = struct.unpack_from(">HH", extradata, start)
    return int(smallest) if smallest == largest else 0


def vorbis_lateness(codec: AudioCodec) -> int:
    """How many samples late FFmpeg states a frame of Vorbis that leads from long to short blocks.

    The frame behind it is stated right again, so this is no gap.
    """
    if codec.name != "vorbis":
        return 0
    short, long = vorbis_blocks(codec)
    return max(long - short, 0) // 4


def vorbis_blocks(codec: AudioCodec) -> tuple[int, int]:
    """Samples of the short and of the long blocks of a Vorbis stream.

    See:
        Vorbis I specification, 4.2.2: the sizes of the blocks.
    """
    header = codec.extradata or b""
    place = header.find(b"\x01vorbis") + 28
    if place < 28 or place >= len(header):
        return _SHORTEST_VORBIS, _LONGEST_VORBIS
    return 1 << (header[place] & 15), 1 << (header[place] >> 4)


AAC_FRAME_SIZE = 1024
"""Samples of a frame of AAC-LC, but for those of 960."""

_AAC_RATES = (
    96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350,
)  # fmt: skip

# Replication doubles lower sample rates, and need not be stated.
_NEVER_REPLICATED = 32000


def is_aac_lc(codec: AudioCodec) -> bool:
    """Whether a stream is AAC-LC in frames of 1024 samples for sure, without spectral band replication.

    See:
        ISO/IEC 14496-3, 1.6.2.1 and 4.4.1: AudioSpecificConfig begins with the object type (5 bits), sample
        rate and channels (4 bits each), a mark of frames of 960, and two of what is no LC. Behind them may
        stand 0x2b7 (11 bits), the object type of replication (5), and whether there is any.
    """
    config = codec.extradata or b""
    if codec.name != "aac" or len(config) < 2:
        return False
    bits = int.from_bytes(config[:5].ljust(5, b"\0"), "big")
    object_type, rate, frames_of_960 = bits >> 35, bits >> 31 & 15, bits >> 26 & 1
    if object_type != 2 or frames_of_960 or _AAC_RATES[rate : rate + 1] != (codec.sample_rate,):
        return False
    # Channels that are listed (0) would stand before it.
    says_no = bits >> 27 & 15 != 0 and bits & 0x3FFFF80 == (0x2B7 << 5 | 5) << 8
    return says_no or codec.sample_rate >= _NEVER_REPLICATED


def filled_in(codec: AudioCodec) -> AudioCodec:
    """Add what FFmpeg learns only by trying out the decoder, where the header leaves no doubt of it."""
    # In Ogg, which gives codecs no tag. In MP4 Opus may be stated with the rate of what was encoded.
    if codec.name in ("opus", "vorbis") and not codec.codec_tag:
        return replace(codec, sample_fmt="fltp")
    if is_aac_lc(codec):
        return replace(codec, sample_fmt="fltp", frame_size=AAC_FRAME_SIZE)
    return codec
