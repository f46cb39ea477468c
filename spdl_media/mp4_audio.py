"""Audio of an MP4 by its index: AAC without PyAV's demuxer, exact times of packets, and the end.

FFmpeg takes half a millisecond to open an MP4, longer than decoding, and returns one packet per frame. The
index tells where the frames lie, so that a packet can hold many. This is for usual files: one audio track of
AAC-LC without gaps, in mono or stereo, of which nothing is hidden but samples at the start and in the last
frames. FFmpeg's demuxer reads all others.

See:
    ISO/IEC 14496-12, 8.5.2 (sample descriptions), 8.6.6 (edit lists); 14496-14, 5.6 (the box esds)
"""

from __future__ import annotations

import math
import re
import struct
from contextlib import suppress
from itertools import dropwhile
from typing import Any, TypeAlias

import numpy as np

from spdl_media import frame_scan
from spdl_media._ffmpeg import CUTS_LAST_FRAME
from spdl_media.audio_clock import (
    AAC_FRAME_SIZE,
    GapDetector,
    even_samples,
    is_aac_lc,
    packet_samples,
)
from spdl_media.codec import AudioCodec
from spdl_media.errors import DemuxError
from spdl_media.frame_scan import CodedFrames
from spdl_media.inputs import Input
from spdl_media.packet_corrections import ExactTime, ExactTimes, PacketKey
from spdl_media.packet_table import (
    Samples,
    boxes_at,
    number_at,
    table_at,
    track_samples,
    track_with_id,
)
from spdl_media.parts import boxes, read_boxes, read_moov
from spdl_media.timing import Window

# Frames before a window that its samples may depend on, as many as audio_clock.preroll asks for.
_PREROLL = 3
# Files with more boxes at the top are left to FFmpeg; most are fragmented.
_MOST_BOXES = 64
# The index of an hour of audio has 600 kB. A damaged header may state any size.
_MOST_INDEX_BYTES = 1 << 24
# Eight zeros, the encoder's delay and padding, and the number of samples.
_ITUNES_EDGES = re.compile(r"\s*[0-9A-F]{8} ([0-9A-F]{8}) ([0-9A-F]{8}) ([0-9A-F]+)")
_MOST_SAMPLES = 1 << 50


def find_aac(input: Input, _head: bytes, window: Window, limit: int | None) -> CodedFrames | None:
    """Find the frames of an MP4 that decode to the samples of a window.

    Arguments and result are those of :func:`~spdl_media.frame_scan.find_mp3`.

    Raises:
        SourceError: The file cannot be read.
        StopIteration, struct.error, ValueError, LookupError, ArithmeticError: FFmpeg has to read it.
    """
    moov = _read_index(input)
    track = _only_audio(list(boxes_at(moov, "trak")))
    codec = _read_codec(track)
    samples = track_samples(track, input.size())
    times = np.arange(len(samples.dts)) * AAC_FRAME_SIZE
    # FFmpeg leaves out frames with another description.
    descriptions = table_at(track, "mdia/minf/stbl/stsc", ">u4,>u4,>u4")["f2"]
    if not np.array_equal(samples.dts, times) or samples.offsets.any() or (descriptions != 1).any():
        raise ValueError("gaps, or frames that are left out")
    hidden, end = _edits(moov, track, codec.sample_rate, samples)
    start, stop = window.sample_range(codec.sample_rate, limit)
    stop = min(stop, end - hidden)
    if start >= stop:
        return None
    first = max((start + hidden) // AAC_FRAME_SIZE - _PREROLL, 0)
    last = -(-(stop + hidden) // AAC_FRAME_SIZE)
    span = first * AAC_FRAME_SIZE - hidden, last * AAC_FRAME_SIZE - hidden
    packets = _read_frames(input, samples, first, last)
    positions = frame_scan.packet_positions(*span, frame_scan.PACKET_SAMPLES)
    return CodedFrames(codec, (start, stop), positions, packets)


def _read_index(input: Input) -> memoryview:
    """Return the content of the box moov of a file whose boxes are all complete.

    Raises:
        ValueError: A box is incomplete, there are too many, the index is long, or the file is fragmented.
        StopIteration: There is no index.
    """
    size = input.size()
    found = list(read_boxes(input.read_at, 0, size, _MOST_BOXES))
    # FFmpeg also reads metadata of the file.
    unusual = any(end > size or kind in (b"moof", b"udta", b"meta") for kind, _, end in found)
    if unusual or len(found) == _MOST_BOXES:
        raise ValueError("truncated, fragmented or unusual")
    start, end = next(span for kind, *span in found if kind == b"moov")
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
    kinds = [(bytes(next(boxes_at(track, "mdia/hdlr"))[8:12]), track) for track in tracks]
    (found,) = [track for kind, track in kinds if kind == b"soun"]
    for kind, track in kinds:
        if track is found:
            continue
        shifts = table_at(track, "mdia/minf/stbl/ctts", ">u4,>i4")["f1"]
        is_early = next(boxes_at(track, "edts/elst"), None) is None and (shifts < 0).any()
        # FFmpeg tells audio by its sample description.
        if is_early or (kind != b"vide" and b"mp4a" in bytes(track)):
            raise ValueError("second 0 is not that of the audio, or there is more audio")
    return found


# The descriptors of a stream (3), of its decoder (4; code 0x40: MPEG-4 audio) and of the decoder's setup
# (5), each inside of the one before: a tag, and a length whose bytes hold 7 bits each. The first may have
# optional fields, which the three highest bits of its flags tell; the last is shorter than 128 bytes.
_DESCRIPTORS = re.compile(
    rb".{4}\x03[\x80-\xff]{0,3}[\0-\x7f]..[\0-\x1f]\x04[\x80-\xff]{0,3}[\0-\x7f]\x40.{12}"
    rb"\x05\x80{0,3}([\0-\x7f])",
    re.DOTALL,
)


def _read_codec(track: memoryview) -> AudioCodec:
    """Return the codec of a track of AAC-LC.

    Raises:
        ValueError: The track is something else.
    """
    rate = number_at(track, "mdia/mdhd")
    descriptions = next(boxes_at(track, "mdia/minf/stbl/stsd"))
    ((kind, start, end),) = boxes(descriptions, 8)
    entry = descriptions[start:end]
    # The version is 0 but in QuickTime, whose entries are longer.
    is_only = bytes(descriptions[4:8]) == b"\0\0\0\1"
    if not is_only or kind != b"mp4a" or any(entry[8:10]):
        raise ValueError("several descriptions, another codec, or QuickTime")
    (esds,) = boxes_at(entry[28:], "esds")
    found = _DESCRIPTORS.match(esds)
    if found is None:
        raise ValueError("other descriptors, optional fields, or another codec")
    config = bytes(esds[found.end() :][: found[1][0]])
    channels = config[1] >> 3 & 15
    if not channels:
        raise ValueError("channels in a list")
    codec = frame_scan.sample_codec("aac", rate, channels, config)
    if not is_aac_lc(codec):
        raise ValueError("another AAC, or timestamps in another unit than samples")
    return codec


def _edits(moov: memoryview, track: memoryview, rate: int, samples: Samples) -> tuple[int, int]:
    """Return the number of samples hidden at the start, and the end.

    Raises:
        ValueError: Edits do more than hide the start, or iTunes states what is hidden.
    """
    if b"iTunSMPB" in bytes(moov):
        raise ValueError("no edit list states it")
    end = len(samples.dts) * AAC_FRAME_SIZE
    # FFmpeg takes a last duration of 0 for unknown.
    stated = min(end, int(samples.dts[-1] + (samples.durations[-1] or AAC_FRAME_SIZE)))
    edits = _edit_list(moov, track, rate)
    if not edits:
        return 0, stated
    ((length, hidden, speed),) = edits
    last = hidden + length
    # FFmpeg gives no sample of frames that begin after the last one.
    hides_frames = last <= (end - 1) // AAC_FRAME_SIZE * AAC_FRAME_SIZE
    if hides_frames or hidden < 0 or speed != 1 << 16 or length >= _MOST_SAMPLES:
        raise ValueError("edits are not simple")
    return hidden, min(stated, last)


def _edit_list(moov: memoryview, track: memoryview, rate: int) -> list[list[int]]:
    """Return number of samples, first sample in the media (-1: silence) and speed of each edit."""
    is_long = next(boxes_at(track, "edts/elst"), b"")[:1] == b"\1"
    rows = table_at(track, "edts/elst", ">u8,>i8,>i4" if is_long else ">u4,>i4,>i4").tolist()
    # As FFmpeg does: 0 ticks in a second are one, and lengths are rounded.
    unit = number_at(moov, "mvhd") or 1
    return [[(2 * length * rate + unit) // (2 * unit), *more] for length, *more in rows]


def _read_frames(input: Input, samples: Samples, first: int, last: int) -> list[memoryview]:
    """Read frames, as packets of many.

    Raises:
        ValueError: They are too large, or not all in the file.
    """
    places, sizes = samples.places[first:last], samples.sizes[first:last]
    ends = places + sizes
    if sizes.sum() > frame_scan.MOST_BYTES or ends.max() > input.size() or places.min() < 0:
        raise ValueError("too large, or truncated")
    # In files with video, only some frames follow each other.
    gaps = np.flatnonzero(places[1:] != ends[:-1])
    starts, stops = places[[0, *(gaps + 1)]].tolist(), ends[[*gaps, -1]].tolist()
    parts = [input.read_at(at, stop - at) for at, stop in zip(starts, stops, strict=True)]
    cuts = [0, *np.cumsum(sizes).tolist()]
    step = frame_scan.PACKET_SAMPLES // AAC_FRAME_SIZE
    return frame_scan.split(b"".join(parts), [*cuts[:-1:step], cuts[-1]])


def packet_times(stream: Any, codec: AudioCodec, input: Input) -> ExactTimes | None:
    """Find exact times of packets of an MP4's audio, and what to cut of them; ``None``: they are not known.

    Raises:
        SourceError: The file cannot be read.
        DemuxError: The edit list shows several parts of the audio.
    """
    # In FFmpeg's index, the hidden packets before a further edit go back in time.
    if input.seekable and not _are_even(stream.index_entries):
        _check_edits(stream, codec, input)
    times = _counted_times(codec, stream)
    if times is None:
        return None
    counts_samples = codec.time_base * codec.sample_rate == 1
    # Their last packet is shorter.
    is_whole = codec.name in ("alac", "flac") and len(stream.index_entries) == stream.frames
    # FFmpeg 9 cuts the end, but not all of it in Opus, and too much of audio that begins late.
    is_right = codec.name != "opus" and not stream.start_time if CUTS_LAST_FRAME else is_whole
    if counts_samples and not is_right:
        _cut_end(times, stream, packet_samples(codec), is_whole=is_whole)
    return ExactTimes(times)


def _check_edits(stream: Any, codec: AudioCodec, input: Input) -> None:
    """Refuse audio of several edits: FFmpeg cuts samples only where the first one begins.

    Raises:
        SourceError: The file cannot be read.
        DemuxError: The edit list shows several parts of the audio.
    """
    edits = []
    with suppress(StopIteration, struct.error, ValueError):  # a box is missing or too short
        moov = memoryview(read_moov(input.read_at, input.size(), _MOST_INDEX_BYTES))
        edits = _edit_list(moov, track_with_id(moov, stream.id), codec.sample_rate)
    # Silence before the audio is only a later start.
    parts = [*dropwhile(lambda edit: edit[1] < 0, edits)]
    if len(parts) > 1 and "ignore_editlist" not in input.config.format_options:
        raise DemuxError(
            f"the edit list of its audio has {len(parts)} parts, which FFmpeg does not join to the sample. "
            "Save the audio anew by an editor, or read all of it without the edits: "
            "demux_config(format_options={'ignore_editlist': '1'})",
            source=input.name,
        )


_Times: TypeAlias = dict[PacketKey, ExactTime]


def _counted_times(codec: AudioCodec, stream: Any) -> _Times | None:
    """Compute exact timestamps for packets whose timestamps jitter: each begins where the one before ends.

    They are empty if the stated ones are exact, and ``None`` if packets have an unknown number of samples.
    """
    entries, (length, a_second) = stream.index_entries, codec.time_base.as_integer_ratio()
    size, rest = divmod(packet_samples(codec) * a_second, length * codec.sample_rate)
    if not entries or size < 1 or rest:
        return None
    times = _Times()
    if _are_even(entries, size):
        return times
    position, last = entries[0].timestamp, len(entries) - 1
    if abs(entries[last].timestamp - position - last * size) > last * size / 8:
        return None  # packets have another number of samples than stated
    # Packets of other codecs may differ in size. Times in milliseconds are copied from Matroska.
    jitter = math.inf if even_samples(codec) else a_second // (500 * length)
    gaps = GapDetector(size)
    for entry in entries:
        pts = entry.timestamp
        if gaps.is_gap(pts - position):
            position = pts
        if abs(pts - position) > jitter:
            return None
        times[entry.pos, pts] = ExactTime(position)
        position += size
    return times


def _are_even(entries: Any, step: int = 0) -> bool:
    """Whether timestamps of some entries of FFmpeg's index show one step between all; 0: the first step."""
    if len(entries) < 2:
        return True
    # Reading the index of an hour takes 70 ms, and timestamps that jitter do so nearly everywhere.
    first, last, num_steps = entries[0].timestamp, len(entries) - 1, 16
    step = step or entries[1].timestamp - first
    some = {last * number // num_steps for number in range(num_steps + 1)}
    return all(entries[number].timestamp == first + number * step for number in some)


def _cut_end(times: _Times, stream: Any, size: int, *, is_whole: bool) -> None:
    """Add cuts of frames of ``size`` samples behind the end that the edit list or iTunes states."""
    entries, start, length = stream.index_entries, stream.start_time or 0, stream.duration or 0
    delay, padding = itunes_edges(stream)
    end, last = start + length - delay - padding, entries[-1].timestamp
    # Only the last packet, unless iTunes states that more of them are padding.
    for entry in entries[-(2 + padding // size if delay else 1) :]:
        begin, key = entry.timestamp, (entry.pos, entry.timestamp)
        cut, hidden = min(begin + size - end, size), max(start - begin, 0)
        # The sound may also start in this packet. The values replace FFmpeg's.
        is_shown = hidden < size if hidden else not entry.is_discard
        if is_shown and (padding or cut < size):
            exact = times.get(key) or ExactTime(begin)
            rest = 0 if is_whole else max(cut, 0)
            last_size = size if begin == last and not is_whole else 0
            times[key] = exact._replace(skipped=hidden, rest=rest, last_size=last_size)


def itunes_edges(stream: Any) -> tuple[int, int]:
    """Return the delay and the padding that iTunes states and the duration of the stream includes."""
    entries, start = stream.index_entries, stream.start_time or 0
    found = _ITUNES_EDGES.match(stream.container.metadata.get("iTunSMPB", ""))
    delay, padding, total = (int(one, 16) for one in found.groups()) if found else (0, 0, 0)
    # As in FFmpeg 9: a part of a file keeps what is stated of the whole. More than the file is damage.
    num_samples = stream.duration or 0
    if total >= num_samples or delay + padding > num_samples:
        padding = 0
    # FFmpeg applies the delay to the last stream, unless it has an edit list.
    is_applied = len(entries) > 0 and start - entries[0].timestamp == delay
    # The padding of a fragmented file, whose header states no packets, is not left out.
    return (delay, padding * (stream.frames > 0)) if is_applied else (0, 0)
