"""Find the frames of AAC in an MP4 by its tables, so that a packet can hold many frames.

FFmpeg takes half a millisecond to open such a file, and returns one packet per frame. This module replaces
its demuxer for usual files: one audio track of AAC-LC without gaps, in mono or stereo, of which at most the
encoder's delay is hidden. FFmpeg reads all other files.

See:
    ISO/IEC 14496-12, 8.5.2 (sample descriptions), 8.6.6 (edit lists); 14496-14, 5.6 (the box esds)
"""

from __future__ import annotations

import re
import struct

import numpy as np

from spdl_media._ffmpeg import CUTS_LAST_FRAME
from spdl_media.audio_clock import AAC_FRAME_SIZE, is_aac_lc
from spdl_media.codec import AudioCodec
from spdl_media.frame_scan import (
    MOST_BYTES,
    PACKET_SAMPLES,
    PADDING,
    CodedFrames,
    bounds,
    frame_codec,
)
from spdl_media.inputs import Input
from spdl_media.mp4_tables import Samples, boxes_at, track_samples
from spdl_media.parts import boxes, read_boxes
from spdl_media.timing import Window

# Frames before a window that its samples depend on, or may depend on.
_PREROLL = 3
# Files with more boxes at the top are fragmented, or left to FFmpeg.
_MOST_BOXES = 64
# That of an hour of audio has 600 kB. A damaged header may state any size.
_LONGEST_INDEX = 1 << 24
# Where iTunes states the encoder's delay: after eight zeros, in hexadecimal, before two more numbers.
_ITUNES_DELAY = re.compile(
    rb"iTunSMPB.{16}\s*[0-9A-F]{8} ([0-9A-F]{8}) [0-9A-F]{8} [0-9A-F]+", re.DOTALL
)
_LONGEST_DELAY = 16384


def find_aac(input: Input, window: Window, num_samples: int | None) -> CodedFrames | None:
    """Find the frames that decode to the samples of a window.

    Args:
        input: The open file; it can be read at any offset.
        window: The window.
        num_samples: Maximum number of samples.

    Returns:
        The frames; ``None`` if FFmpeg has to read the file, or the window holds no sample.

    Raises:
        SourceError: The file cannot be read.
    """
    try:
        moov = _read_index(input)
        tracks = list(boxes_at(moov, "trak"))
        (track,) = [each for each in tracks if _is_audio(each)]
        codec = _read_codec(track)
        samples = track_samples(track, input.size())
        end = _stated_end(samples)
        hidden, delay, end = _edits(moov, track, codec.sample_rate, end)
    # A box is missing, too short, or has a value that only FFmpeg handles.
    except (StopIteration, ValueError, LookupError, ArithmeticError, struct.error):
        return None
    count, size = len(samples.dts), AAC_FRAME_SIZE
    start, stop = bounds(window, codec.sample_rate, num_samples)
    stop = min(stop, end - hidden)
    is_usual = np.array_equal(samples.dts, np.arange(count) * size) and not samples.offsets.any()
    if (delay and len(tracks) > 1) or not is_usual or start >= stop:
        return None
    first = max((start + hidden) // size - _PREROLL, 0)
    last = -(-(stop + hidden) // size)
    found = _read_frames(input, samples, first, last)
    if found is None:
        return None
    position, data, cuts = first * size - hidden, *found
    of_packets = (last - first) * size, PACKET_SAMPLES, data, cuts
    return CodedFrames(codec, delay, (start, stop), position, *of_packets)


def _read_index(input: Input) -> memoryview:
    """Return the content of the box moov of a file whose boxes are all complete.

    Raises:
        ValueError: A box is incomplete, the index is long, or the file is fragmented.
        StopIteration: There is no index.
    """
    size, found = input.size(), {}
    for kind, start, end in read_boxes(input.read_at, 0, size, _MOST_BOXES):
        if end > size or kind == b"moof":
            raise ValueError("truncated or fragmented")
        found[kind] = start, end
    start, end = next(span for kind, span in found.items() if kind == b"moov")
    if end - start > _LONGEST_INDEX:
        raise ValueError("too long")
    moov = memoryview(input.read_at(start, end - start))
    if next(boxes_at(moov, "mvex"), None) is not None:
        raise ValueError("fragmented")
    return moov


def _is_audio(track: memoryview) -> bool:
    return bytes(next(boxes_at(track, "mdia/hdlr"))[8:12]) == b"soun"


def _read_codec(track: memoryview) -> AudioCodec:
    """Return the codec of a track of AAC-LC.

    Raises:
        ValueError: The track is something else.
    """
    header = next(boxes_at(track, "mdia/mdhd"))
    (rate,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    descriptions = next(boxes_at(track, "mdia/minf/stbl/stsd"))
    ((kind, start, end),) = boxes(descriptions, 8)
    entry = descriptions[start:end]
    # The version is 0 but in QuickTime, whose entries are longer.
    if kind != b"mp4a" or any(entry[8:10]):
        raise ValueError("not AAC, or QuickTime")
    config = _decoder_config(next(boxes_at(entry[28:], "esds")))
    channels = config[1] >> 3 & 15
    codec = frame_codec("aac", rate, channels, config)
    if not channels or not is_aac_lc(codec):
        raise ValueError("another AAC, or timestamps in another unit than samples")
    return codec


def _decoder_config(esds: memoryview) -> bytes:
    """Return the AudioSpecificConfig: a descriptor in one in one.

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


def _stated_end(samples: Samples) -> int:
    """Return the number of samples of a track before edits.

    Raises:
        IndexError: The track is empty.
    """
    count = len(samples.dts) * AAC_FRAME_SIZE
    last = int(samples.dts[-1] + samples.durations[-1])
    return min(count, last) if CUTS_LAST_FRAME else count


def _edits(moov: memoryview, track: memoryview, rate: int, end: int) -> tuple[int, int, int]:
    """Return how many samples are hidden at the start, how many of these lie before second 0, and the end.

    Args:
        moov: The index.
        track: The track.
        rate: Sample rate.
        end: Number of samples before edits.

    Raises:
        ValueError: Edits do more than hide the start.
    """
    edits = next(boxes_at(track, "edts/elst"), None)
    stated = _ITUNES_DELAY.search(moov)
    if edits is None:
        delay = 0 if stated is None else int(stated[1], 16)
        if not delay:
            return 0, 0, end
        # With the delay, iTunes states where the audio ends.
        if CUTS_LAST_FRAME or delay >= _LONGEST_DELAY:
            raise ValueError("the end is stated in two ways")
        return delay, delay, end
    version, count = edits[0], *struct.unpack_from(">I", edits, 4)
    duration, hidden, speed = struct.unpack_from(">Qqi" if version else ">Iii", edits, 8)
    header = next(boxes_at(moov, "mvhd"))
    (unit,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    last = hidden + (2 * duration * rate + unit) // (2 * unit)
    # FFmpeg gives no sample of frames that begin after the last one.
    hides_frames = last <= (end - 1) // AAC_FRAME_SIZE * AAC_FRAME_SIZE
    if stated or count != 1 or hidden < 0 or speed != 1 << 16 or hides_frames:
        raise ValueError("edits are not simple")
    return hidden, 0, min(end, last) if CUTS_LAST_FRAME else end


def _read_frames(
    input: Input, samples: Samples, first: int, last: int
) -> tuple[bytes, list[int]] | None:
    """Read frames, and find where packets of many begin; ``None``: they are too large or incomplete."""
    places, sizes = samples.places[first:last], samples.sizes[first:last]
    ends = places + sizes
    if sizes.sum() > MOST_BYTES or ends.max() > input.size() or places.min() < 0:
        return None
    # In files with video, only some frames follow each other.
    breaks = (np.flatnonzero(places[1:] != ends[:-1]) + 1).tolist()
    spans = zip(
        places[[0, *breaks]].tolist(),
        ends[[*(each - 1 for each in breaks), -1]].tolist(),
        strict=True,
    )
    data = b"".join(bytes(input.read_at(start, end - start)) for start, end in spans)
    cuts = [0, *np.cumsum(sizes).tolist()]
    step = PACKET_SAMPLES // AAC_FRAME_SIZE
    return data + PADDING, [*cuts[:-1:step], cuts[-1]]
