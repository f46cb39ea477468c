"""Find the sample of an audio stream that a timestamp means, even if timestamps are rounded.

Timestamps of Matroska are in milliseconds, which are 48 samples at 48 kHz. But most codecs have packets of
one size, which are far longer than a millisecond. So the index of a packet follows from its rounded
timestamp, and the index of its first sample from that of the packet. The headers of Vorbis and AAC state the
number of samples in a packet.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

from av.container import InputContainer

from spdl_media._ffmpeg import as_fraction
from spdl_media.codec import AudioCodec
from spdl_media.timing import nearest_sample

# Seconds to decode before a window. MP3 takes bits from earlier frames, frames of AAC and Vorbis overlap with
# the one before. After half a second, all decode the same samples as from the start of the stream, but for
# the last bit in two codecs: MP2, whose dither depends on all frames before, and Opus for speech, whose
# predictors keep a trace of a seek for more than 5 s. Larger differences end within 0.4 s in music, of which
# each 40 ms leave a quarter, and within half a second in recorded speech; in pure tones as speech, never.
AUDIO_PREROLL = Fraction(1, 2)

# Lossless codecs, whose packets are independent.
_WITHOUT_PREROLL = frozenset({"alac", "flac", "tta", "wavpack"})

_ZERO = Fraction(0)
_FROM_START = Fraction(1 << 40)  # seconds, more than any file has

# The usual number of samples in a packet. Other packets, such as Opus of 10 ms, are recognised by timestamps
# that are not multiples of it.
_PACKET_SAMPLES = {"ac3": 1536, "eac3": 1536, "opus": 960}

# Codecs whose packets all have one number of samples. Phones and live encoders take the timestamps from
# another clock, so they jitter around the exact times.
_EVEN_CODECS = frozenset({"aac", "ac3", "eac3", "mp1", "mp2", "mp3"})

# Tolerance in half ticks. The stream's first timestamp and the current one are rounded, by half a tick each.
_ROUNDING_HALF_TICKS = 3


def frame_position(codec: AudioCodec, pts: int, num_samples: int, zero: Fraction) -> int:
    """Return the position of a decoded frame's first sample, in samples on the container's clock.

    Only the stream's first sample is rounded to a whole position; others are counted from it. So a stream
    that starts between two positions is rounded consistently.
    """
    start, base, rate = codec.start_pts or 0, codec.time_base, codec.sample_rate
    first = nearest_sample(start, base, zero, rate)
    # Try the start of the frame, then its end; of Opus the end first: after a seek, too, its decoder removes
    # the delay from the start of the first frame, but the end is still that of a packet.
    for samples in (num_samples, 0) if codec.name == "opus" else (0, num_samples):
        position = _on_grid(codec, pts, packet_samples(codec), samples)
        if position is not None:
            return first + position - samples
    return first + nearest_sample(pts - start, base, _ZERO, rate)


def _ticks_are_fine(codec: AudioCodec) -> bool:
    """Whether a tick of the time base is a sample, or so short that rounding to ticks moves no sample."""
    # Integers take a tenth of the time of fractions. In Matroska without video, mkvmerge's tick is nearly a
    # sample, and timestamps are wrong by up to two.
    unit, tick = codec.time_base.denominator, codec.time_base.numerator * codec.sample_rate
    return tick == unit or 3 * tick <= 2 * unit


def tells_each_sample(codec: AudioCodec) -> bool:
    """Whether the timestamp of every packet determines the packet's first sample.

    Otherwise :func:`tells_sample` tells it for a single packet.
    """
    # Fine ticks do not suffice. In raw streams (AC-3 at 44.1 kHz) FFmpeg adds up rounded durations. Some
    # writers take times from a clock, or from a Matroska file. Such times drift or jitter, so they are not
    # multiples of the packet size. Vorbis in MP4, in packets of two sizes, is usually copied from Matroska.
    may_jitter = packet_samples(codec) or (codec.name == "vorbis" and codec.codec_tag)
    return _ticks_are_fine(codec) and not may_jitter


def tells_sample(codec: AudioCodec, pts: int, duration: int) -> bool:
    """Whether the timestamp of a packet is a multiple of the packet size, which determines its first sample.

    Otherwise samples can only be counted from the start of the stream.

    Args:
        codec: Codec of the stream.
        pts: Timestamp of the packet.
        duration: Duration of the packet in ticks; 0: unknown.
    """
    if codec.name == "vorbis":
        return False  # its decoder gives no frame for the first packet, and the next timestamp is rounded
    # In integers, samples times unit: all packets before a window are tested, and fractions take longer.
    unit, tick = codec.time_base.denominator, codec.time_base.numerator * codec.sample_rate
    step, length = packet_samples(codec), duration * tick
    if length and step * unit % length == 0 and _ticks_are_fine(codec):
        step = min(step, length // unit)  # E-AC-3 of 1, 2 or 3 blocks, or Opus of less than 20 ms
    # Opus may have shorter packets, of which every other one is a multiple by chance.
    short = 0 < length < step * unit - tick
    return not short and _on_grid(codec, pts, step) is not None


def even_samples(codec: AudioCodec) -> int:
    """Return the number of samples in each packet if timestamps may jitter, else 0."""
    return packet_samples(codec) if codec.name in _EVEN_CODECS else 0


def start_ticks(stream: Any) -> int | None:
    """Return the timestamp of the first audible sample or frame of a stream of PyAV; ``None``: not stated.

    To the first packet of Opus, FFmpeg adds the delay at the sample rate that the header of a Matroska file
    states: that of the encoder's input. The delay counts samples of 48 kHz, and only OpusHead states it for
    files of all versions of FFmpeg.
    """
    ticks: int | None = stream.start_time
    context, entries = stream.codec_context, stream.index_entries
    is_matroska = stream.container.format.name.startswith("matroska")
    skipped = opus_delay(context) if ticks and entries and is_matroska and context else 0
    if skipped:
        delay = Fraction(skipped, 48000) / as_fraction(stream.time_base)
        ticks = min(ticks, entries[0].timestamp + math.floor(delay + Fraction(1, 2)))
    return ticks


def exact_start(container: InputContainer, start: int) -> Fraction:
    """Return the start time of a container in seconds, which FFmpeg states as ``start`` microseconds."""
    # The stream that starts first states the same moment as the rounded start of the container, but exactly,
    # in its own time base. Without that, the edge of a window could miss a frame.
    starts = [(start_ticks(each), each.start_time, each.time_base) for each in container.streams]
    stated = [(exact, ticks, base) for exact, ticks, base in starts if ticks is not None and base]
    # Differences in microseconds. Integers up to the division: fractions take ten times as long.
    errors = [
        abs(ticks * base.numerator * 1_000_000 - start * base.denominator) / base.denominator
        for _, ticks, base in stated
    ]
    if min(errors, default=2.0) > 1:
        return Fraction(start, 1_000_000)
    # Of streams that begin earlier than FFmpeg states, the exact start counts, too.
    chosen = [stated[errors.index(min(errors))], *(one for one in stated if one[0] != one[1])]
    return min(Fraction(exact * as_fraction(base)) for exact, _, base in chosen)


def opus_delay(codec: Any) -> int:
    """Return the number of samples of 48 kHz that decoders skip at the start, from OpusHead; 0: not Opus."""
    header = codec.extradata or b""
    return int.from_bytes(header[10:12], "little") if header.startswith(b"OpusHead") else 0


def with_hidden_samples(codec: AudioCodec, stream: Any) -> AudioCodec:
    """Set the start, and as delay what the edit list of an MP4 hides before it: packets begin that early."""
    entries, codec = stream.index_entries, replace(codec, start_pts=start_ticks(stream))
    if codec.codec_tag or codec.delay:  # PyAV 19 states ticks of an MP4
        codec = replace(codec, delay=opus_delay(codec) or codec.delay)
    counts_samples = codec.time_base == Fraction(1, codec.sample_rate)
    if codec.delay or not entries or codec.start_pts is None or not counts_samples:
        return codec
    return replace(codec, delay=max(codec.start_pts - entries[0].timestamp, 0))


class GapDetector:
    """Tells a gap between packets of one size from jittering timestamps.

    After a gap, all timestamps are ahead of the sample count by a packet or more. Jittering timestamps return
    to the count, and those of a clock that is too fast run ahead slowly.

    Args:
        size: Size of a packet, less the rounding error of timestamps.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._usual = 0

    def is_gap(self, lead: int) -> bool:
        """Whether a timestamp that is ``lead`` ahead of the count shows a gap; the count then restarts."""
        usual = self._usual
        self._usual = min(lead, usual + (lead - usual) // 64)
        if lead - usual < self._size:
            return False
        self._usual = 0
        return True


def _on_grid(codec: AudioCodec, pts: int, step: int, samples: int = 0) -> int | None:
    """Return the exact position of ``pts`` plus ``samples``, if it is one at which a packet begins.

    Positions are in samples from the start of the stream; ``step`` is the number of samples in a packet.
    """
    # In integers: fractions take as long as decoding ten packets.
    unit = codec.time_base.denominator
    tick = codec.time_base.numerator * codec.sample_rate
    after = (pts - (codec.start_pts or 0)) * tick + samples * unit
    # In AVI, a tick may be a packet, and is then exact, except for FLAC, whose empty chunks count as ticks.
    is_coarse = step * unit < 4 * tick and (step * unit != tick or codec.name == "flac")
    if after == 0 or not step or is_coarse:
        return None if after else 0
    # The first packet begins codec.delay samples before the first audible sample. Halves are rounded up, as
    # in nearest_sample.
    number = (2 * (after + codec.delay * unit) + step * unit) // (2 * step * unit)
    position = number * step - codec.delay
    return position if 2 * abs(position * unit - after) <= _ROUNDING_HALF_TICKS * tick else None


def packet_samples(codec: AudioCodec) -> int:
    """Return the number of samples in each packet; 0 if it varies or is unknown."""
    if codec.name == "flac":
        # The sizes of the smallest and the largest block, at the start of STREAMINFO.
        header = codec.extradata or b""
        start = 8 if header.startswith(b"fLaC") else 0
        smallest, largest = header[start : start + 2], header[start + 2 : start + 4]
        return int.from_bytes(smallest, "big") if smallest == largest else 0
    if codec.name in ("aac", "mp1", "mp2", "mp3"):
        return codec.frame_size
    if codec.name == "alac":
        return int.from_bytes((codec.extradata or b"")[12:16], "big")
    return _PACKET_SAMPLES.get(codec.name, 0)


def vorbis_pts_error(codec: AudioCodec) -> int:
    """Return how many samples too late FFmpeg's timestamp is for a Vorbis frame from a long to a short block.

    The timestamp of the next frame is right again, so this is not a gap.
    """
    if codec.name != "vorbis":
        return 0
    short, long = vorbis_blocks(codec)
    return max(long - short, 0) // 4


def vorbis_blocks(codec: AudioCodec) -> tuple[int, int]:
    """Return the number of samples in a short and in a long block of a Vorbis stream.

    See:
        Vorbis I specification, 4.2.2: the sizes of the blocks.
    """
    _, _, header = (codec.extradata or b"").partition(b"\x01vorbis")
    powers = header[21] if len(header) > 21 else 0xD6  # the extremes, 64 and 8192
    return 1 << (powers & 15), 1 << (powers >> 4)


AAC_FRAME_SIZE = 1024
"""Samples in a frame of AAC-LC. A variant with 960 exists."""

_AAC_RATES = (
    96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350,
)  # fmt: skip

# The AudioSpecificConfig of object type 42, USAC, also known as xHE-AAC.
_USAC = re.compile(rb"\xf9[\x40-\x5f]")

# Spectral band replication doubles the rate of lower-rate streams, which need not announce it.
_NEVER_REPLICATED = 32000


def is_aac_lc(codec: AudioCodec) -> bool:
    """Whether a stream is certainly AAC-LC in frames of 1024 samples, without spectral band replication.

    See:
        ISO/IEC 14496-3, 1.6.2.1 and 4.4.1: AudioSpecificConfig begins with the object type (5 bits), sample
        rate and channels (4 bits each), a flag for frames of 960, and two flags that are not for LC. Then
        0x2b7 (11 bits), the object type of replication (5) and a flag for its presence may follow.
    """
    config = codec.extradata or b""
    if codec.name != "aac" or len(config) < 2:
        return False
    bits = int.from_bytes(config[:5].ljust(5, b"\0"), "big")
    object_type, rate, frames_of_960 = bits >> 35, bits >> 31 & 15, bits >> 26 & 1
    if object_type != 2 or frames_of_960 or _AAC_RATES[rate : rate + 1] != (codec.sample_rate,):
        return False
    # With a channel number of 0, a list of channels would come before it.
    says_no = bits >> 27 & 15 != 0 and bits & 0x3FFFF80 == (0x2B7 << 5 | 5) << 8
    return says_no or codec.sample_rate >= _NEVER_REPLICATED


def preroll(codec: AudioCodec) -> Fraction:
    """Return the seconds that must be decoded before a window for the same samples as from the start."""
    if codec.name in _WITHOUT_PREROLL:
        return 2 * codec.time_base  # rounding may state a packet too early
    if codec.name == "opus":
        # Wherever the decoder starts, it drops as many samples as the header states.
        return AUDIO_PREROLL + Fraction(codec.delay, 48000)
    if codec.name == "aac" and _USAC.match(codec.extradata or b""):
        return _FROM_START  # frames depend on all before, but for a few
    block = 0
    if codec.name == "vorbis":
        if not tells_each_sample(codec):
            return _FROM_START
        block = vorbis_blocks(codec)[1]
    elif is_aac_lc(codec):
        block = AAC_FRAME_SIZE
    # Each block overlaps with the previous one, and depends on no other.
    return min(AUDIO_PREROLL, Fraction(3 * block, codec.sample_rate)) if block else AUDIO_PREROLL
