"""Load AAC in an MP4 without PyAV's demuxer, which takes longer than decoding.

FFmpeg takes half a millisecond to open an MP4, and returns one packet per frame. Its tables tell where the
frames lie, so that a packet can hold many. This is for usual files: one audio track of AAC-LC without gaps,
in mono or stereo, of which nothing is hidden but samples at the start. FFmpeg's demuxer reads all others.

See:
    ISO/IEC 14496-12, 8.5.2 (sample descriptions), 8.6.6 (edit lists); 14496-14, 5.6 (the box esds)
"""

from __future__ import annotations

import re
import struct
from fractions import Fraction

import numpy as np

from spdl_media._ffmpeg import CUTS_LAST_FRAME
from spdl_media.audio_clock import AAC_FRAME_SIZE, is_aac_lc
from spdl_media.codec import AudioCodec
from spdl_media.frame_scan import (
    LAYOUTS,
    MOST_BYTES,
    PACKET_SAMPLES,
    CodedFrames,
    packet_positions,
    split,
)
from spdl_media.inputs import Input
from spdl_media.packet_table import Samples, boxes_at, number_after_times, table_at, track_samples
from spdl_media.parts import boxes, read_boxes
from spdl_media.timing import Window

# Frames before a window that its samples may depend on, as many as audio_clock.preroll asks for.
_PREROLL = 3
# Files with more boxes at the top are left to FFmpeg; most are fragmented.
_MOST_BOXES = 64
# The index of an hour of audio has 600 kB. A damaged header may state any size.
_MOST_INDEX_BYTES = 1 << 24
# Where iTunes states the encoder's delay: after eight zeros, in hexadecimal, before two more numbers.
_ITUNES = b"iTunSMPB"
_ITUNES_DELAY = re.compile(
    _ITUNES + rb".{16}\s*[0-9A-F]{8} ([0-9A-F]{8}) [0-9A-F]{8} [0-9A-F]+", re.DOTALL
)
_LONGEST_DELAY = 16384
# A longer edit, in units of the movie, is damage.
_LONGEST_EDIT = 1 << 50


def find_aac(
    input: Input, _head: bytes, window: Window, num_samples: int | None
) -> CodedFrames | None:
    """Find the frames of an MP4 that decode to the samples of a window.

    Arguments and result are those of :func:`~spdl_media.frame_scan.find_mp3`.

    Raises:
        SourceError: The file cannot be read.
        StopIteration: A box is missing.
        struct.error: A box is too short.
        ValueError: A value is one that only FFmpeg handles, as with LookupError and ArithmeticError.
    """
    moov = _read_index(input)
    tracks = list(boxes_at(moov, "trak"))
    track = _only_audio(tracks)
    codec = _read_codec(track)
    samples = track_samples(track, input.size())
    _check_samples(track, samples)
    end = _end_before_edits(samples)
    hidden, delay, end = _edits(moov, track, codec.sample_rate, end)
    start, stop = window.sample_range(codec.sample_rate, num_samples)
    stop = min(stop, end - hidden)
    if (delay and len(tracks) > 1) or start >= stop:
        return None
    first = max((start + hidden) // AAC_FRAME_SIZE - _PREROLL, 0)
    last = -(-(stop + hidden) // AAC_FRAME_SIZE)
    span = first * AAC_FRAME_SIZE - hidden, last * AAC_FRAME_SIZE - hidden
    packets = _read_frames(input, samples, first, last)
    positions = packet_positions(*span, PACKET_SAMPLES)
    return CodedFrames(codec, delay, (start, stop), positions, packets)


def _read_index(input: Input) -> memoryview:
    """Return the content of the box moov of a file whose boxes are all complete.

    Raises:
        ValueError: A box is incomplete, there are too many, the index is long, or the file is fragmented.
        KeyError: There is no index.
    """
    size = input.size()
    found: dict[bytes, tuple[int, int]] = {}
    for number, (kind, start, end) in enumerate(
        read_boxes(input.read_at, 0, size, _MOST_BOXES), start=1
    ):
        # FFmpeg also reads metadata of the file.
        if end > size or number == _MOST_BOXES or kind in (b"moof", b"udta", b"meta"):
            raise ValueError("truncated, fragmented or unusual")
        found.setdefault(kind, (start, end))
    start, end = found[b"moov"]
    if end - start > _MOST_INDEX_BYTES:
        raise ValueError("too long")
    moov = memoryview(input.read_at(start, end - start))
    if next(boxes_at(moov, "mvex"), None) is not None:
        raise ValueError("fragmented")
    return moov


def _only_audio(tracks: list[memoryview]) -> memoryview:
    """Return the audio track.

    Raises:
        ValueError: There is none or more than one, or another track may begin before second 0.
    """
    kinds = [bytes(next(boxes_at(track, "mdia/hdlr"))[8:12]) for track in tracks]
    (found,) = [track for track, kind in zip(tracks, kinds, strict=True) if kind == b"soun"]
    for track, kind in zip(tracks, kinds, strict=True):
        if track is found:
            continue
        shifts = table_at(track, "mdia/minf/stbl/ctts", ">u4,>i4")["f1"]
        is_early = next(boxes_at(track, "edts/elst"), None) is None and (shifts < 0).any()
        # FFmpeg tells audio by its sample description.
        if is_early or (kind != b"vide" and b"mp4a" in bytes(track)):
            raise ValueError("second 0 is not that of the audio, or there is more audio")
    return found


def _read_codec(track: memoryview) -> AudioCodec:
    """Return the codec of a track of AAC-LC.

    Raises:
        ValueError: The track is something else.
    """
    rate = number_after_times(track, "mdia/mdhd")
    descriptions = next(boxes_at(track, "mdia/minf/stbl/stsd"))
    ((kind, start, end),) = boxes(descriptions, 8)
    entry = descriptions[start:end]
    # The version is 0 but in QuickTime, whose entries are longer.
    is_only = bytes(descriptions[4:8]) == b"\0\0\0\1"
    if not is_only or kind != b"mp4a" or any(entry[8:10]):
        raise ValueError("several descriptions, another codec, or QuickTime")
    (esds,) = boxes_at(entry[28:], "esds")
    config = _decoder_config(esds)
    channels = config[1] >> 3 & 15
    if not channels:
        raise ValueError("channels in a list")
    unit, layout = Fraction(1, rate), LAYOUTS[channels - 1]
    codec = AudioCodec("aac", "aac", rate, layout, channels, time_base=unit, extradata=config)
    if not is_aac_lc(codec):
        raise ValueError("another AAC, or timestamps in another unit than samples")
    return codec


def _decoder_config(esds: memoryview) -> bytes:
    """Return the AudioSpecificConfig, which is the innermost of three nested descriptors.

    Raises:
        ValueError: There is another descriptor, or it is for another codec.
    """
    place, length = 4, 0
    # Tags, and bytes of each descriptor before the next one.
    for tag, skip in ((3, 3), (4, 13), (5, 0)):
        if esds[place] != tag:
            raise ValueError("another descriptor")
        more, length = 128, 0
        while more & 128:  # each byte of the length holds 7 bits
            place += 1
            more = esds[place]
            length = length << 7 | more & 127
        place += 1
        has_options = tag == 3 and esds[place + 2] & 0xE0
        if has_options or (tag == 4 and esds[place] != _MPEG4_AUDIO):
            raise ValueError("optional fields, or another codec")
        place += skip
    return bytes(esds[place : place + length])


_MPEG4_AUDIO = 0x40


def _check_samples(track: memoryview, samples: Samples) -> None:
    """Check that frames follow each other without gaps.

    Raises:
        ValueError: They do not, or FFmpeg leaves some out because they have another description.
    """
    times = np.arange(len(samples.dts)) * AAC_FRAME_SIZE
    descriptions = table_at(track, "mdia/minf/stbl/stsc", ">u4,>u4,>u4")["f2"]
    if not np.array_equal(samples.dts, times) or samples.offsets.any() or (descriptions != 1).any():
        raise ValueError("gaps, or frames that are left out")


def _end_before_edits(samples: Samples) -> int:
    """Return the number of samples of a track.

    Raises:
        IndexError: The track is empty.
    """
    count = len(samples.dts) * AAC_FRAME_SIZE
    last = int(samples.dts[-1] + samples.durations[-1])
    return min(count, last) if CUTS_LAST_FRAME else count


def _edits(moov: memoryview, track: memoryview, rate: int, end: int) -> tuple[int, int, int]:
    """Return the number of samples hidden at the start, that of samples before second 0, and the end.

    Samples that iTunes hides lie before second 0. With an edit list, second 0 comes after the hidden ones.

    Args:
        moov: The index.
        track: The track.
        rate: Sample rate.
        end: Number of samples before edits.

    Raises:
        ValueError: Edits do more than hide the start.
    """
    edits = next(boxes_at(track, "edts/elst"), None)
    delay = _itunes_delay(moov) if _ITUNES in bytes(moov) else 0
    if edits is None:
        return delay, delay, end
    version, count = edits[0], *struct.unpack_from(">I", edits, 4)
    duration, hidden, speed = struct.unpack_from(">Qqi" if version else ">Iii", edits, 8)
    unit = number_after_times(moov, "mvhd")
    last = hidden + (2 * duration * rate + unit) // (2 * unit)
    # FFmpeg gives no sample of frames that begin after the last one.
    hides_frames = last <= (end - 1) // AAC_FRAME_SIZE * AAC_FRAME_SIZE
    is_usual = count == 1 and hidden >= 0 and speed == 1 << 16 and duration < _LONGEST_EDIT
    if delay or hides_frames or not is_usual:
        raise ValueError("edits are not simple")
    return hidden, 0, min(end, last) if CUTS_LAST_FRAME else end


def _itunes_delay(moov: memoryview) -> int:
    """Return the encoder's delay in samples, as iTunes states it.

    Raises:
        ValueError: It is stated in another way, or before the track; or FFmpeg also reads the end that iTunes
            states.
    """
    stated = _ITUNES_DELAY.search(moov)
    delay = 0 if stated is None else int(stated[1], 16)
    is_before = stated is not None and stated.start() < bytes(moov).rfind(b"trak")
    if CUTS_LAST_FRAME or is_before or not 0 < delay < _LONGEST_DELAY:
        raise ValueError("not stated as iTunes does")
    return delay


def _read_frames(input: Input, samples: Samples, first: int, last: int) -> list[memoryview]:
    """Read frames, as packets of many.

    Raises:
        ValueError: They are too large, or not all in the file.
    """
    places, sizes = samples.places[first:last], samples.sizes[first:last]
    ends = places + sizes
    if sizes.sum() > MOST_BYTES or ends.max() > input.size() or places.min() < 0:
        raise ValueError("too large, or truncated")
    # In files with video, only some frames follow each other.
    gaps = np.flatnonzero(places[1:] != ends[:-1])
    starts, stops = places[[0, *(gaps + 1)]].tolist(), ends[[*gaps, -1]].tolist()
    parts = (
        input.read_at(*span)
        for span in zip(starts, np.subtract(stops, starts).tolist(), strict=True)
    )
    cuts = [0, *np.cumsum(sizes).tolist()]
    step = PACKET_SAMPLES // AAC_FRAME_SIZE
    return split(b"".join(map(bytes, parts)), [*cuts[:-1:step], cuts[-1]])
