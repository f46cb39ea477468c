"""Times of the audio packets of an MP4 with several edits, which FFmpeg does not state.

FFmpeg cuts samples only where the first edit begins. Of further edits it shows the packets that begin in
them, the first of which at the time of the edit.

See:
    ISO/IEC 14496-12, 8.6.6 (edit lists)
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from av.bitstream import BitStreamFilterContext
from av.packet import PacketSideData, PktSideDataT

from spdl_media._ffmpeg import AvPacket
from spdl_media.audio_clock import SKIPPED, Times, are_even, even_samples
from spdl_media.codec import AudioCodec
from spdl_media.inputs import Input
from spdl_media.packet_table import boxes_at, chunks_at, number_after_times, table_at, track_samples
from spdl_media.packets import with_data
from spdl_media.parts import read_moov

# The index of an hour of audio has 600 kB.
_MOST_BYTES = 1 << 24
# A packet has fewer samples.
_MOST_IN_PACKET = 1 << 30
_MOST_SAMPLES = 1 << 50
_SKIP_SAMPLES = get_args(PktSideDataT).index("skip_samples")


class Edits(Times):
    """Times of the packets of several edits, whether any sample is shown, and how many to cut at each end.

    Packets that FFmpeg gives in place of silence have none of these; they are left out.
    """


def find_edits(stream: Any, codec: AudioCodec, input: Input) -> Edits | None:
    """Find the times of the packets of an audio stream; ``None`` unless there are several edits.

    Args:
        stream: The stream of the open MP4.
        codec: Its codec.
        input: The file.

    Raises:
        SourceError: The file cannot be read.
    """
    entries = stream.index_entries
    if len(entries) < 2 or codec.time_base * codec.sample_rate != 1 or not input.seekable:
        return None
    # In FFmpeg's index, the hidden packets before a further edit go back in time.
    if are_even(entries, entries[1].timestamp - entries[0].timestamp):
        return None
    try:
        moov = memoryview(read_moov(input.read_at, input.size(), _MOST_BYTES)[1])
        tracks = boxes_at(moov, "trak")
        (track,) = [one for one in tracks if number_after_times(one, "tkhd") == stream.id]
        edits = _read_edits(moov, track, codec.sample_rate)
        entries = list(entries)  # which PyAV makes anew in each loop
        packets = _find_packets(entries, track, codec, input.size())
        return _edited_times(entries, edits, packets, even_samples(codec))
    # A box is missing, too short or contradicts another, or FFmpeg has made other edits of them.
    except (StopIteration, struct.error, ValueError, LookupError, ArithmeticError):
        return None


def edits_go_back(streams: Any) -> bool:
    """Whether edits of one of several streams go back in time, where FFmpeg's seeks find a wrong packet."""
    indexes = [each.index_entries for each in streams]
    return len(indexes) > 1 and any(
        not are_even(entries, entries[1].timestamp - entries[0].timestamp)
        and any(later.timestamp < one.timestamp for one, later in pairwise(entries))
        for entries in indexes
        if len(entries) > 1
    )


def _read_edits(moov: memoryview, track: memoryview, rate: int) -> list[tuple[int, int, int]]:
    """Return start, end and first sample in the media, -1 for silence, of each edit after first silence.

    Raises:
        ValueError: There is only one.
    """
    unit = number_after_times(moov, "mvhd")
    is_long = next(boxes_at(track, "edts/elst"))[0] == 1
    rows = table_at(track, "edts/elst", ">u8,>i8,>i4" if is_long else ">u4,>i4,>i4").tolist()
    edits: list[tuple[int, int, int]] = []
    end = 0
    for duration, media, _ in rows:
        # Rounded as FFmpeg does.
        start, end = end, end + (2 * duration * rate + unit) // (2 * unit)
        if media >= 0 or edits:
            edits.append((start, end, media))
    if len(edits) < 2:
        raise ValueError("one edit, which FFmpeg cuts")
    return edits


def _find_packets(
    entries: Any, track: memoryview, codec: AudioCodec, size: int
) -> list[tuple[int, int]]:
    """Return time in the media and number of samples of each packet in FFmpeg's index.

    Raises:
        StopIteration, struct.error, ValueError, IndexError: The tables of the track do not tell.
    """
    stbl = next(boxes_at(track, "mdia/minf/stbl"))
    # The table's samples are those of the sound, and a packet is a part of a chunk.
    has_parts = bool((table_at(stbl, "stts", ">u4,>u4")["f1"] == 1).all())
    if has_parts != codec.name.startswith("pcm_"):
        raise ValueError("packets of single samples, or parts of an unknown size")
    if has_parts:
        places, durations = chunks_at(stbl)
        sizes = durations * (codec.bit_rate // (8 * codec.sample_rate))
    else:
        samples = track_samples(track, size)
        places, durations, sizes = samples.places, samples.durations, samples.sizes
    begins, lengths = np.array([(entry.pos, entry.size) for entry in entries]).T
    order = np.argsort(places, kind="stable")
    holders = order[np.searchsorted(places, begins, "right", sorter=order) - 1]
    begins, sizes = begins - places[holders], np.maximum(sizes[holders], 1)
    if (begins < 0).any() or (begins + lengths > sizes).any():
        raise ValueError("a packet that is not in the table")
    starts = (np.cumsum(durations) - durations)[holders]
    ticks = np.stack([begins, lengths]) * durations[holders] // sizes
    return list(zip((starts + ticks[0]).tolist(), ticks[1].tolist(), strict=True))


def _edited_times(
    entries: Any, edits: list[tuple[int, int, int]], packets: list[tuple[int, int]], even: int
) -> Edits:
    """Compute times from FFmpeg's index, in which hidden packets, for decoding, come before each edit.

    Raises:
        StopIteration, ValueError: FFmpeg has made another number of edits, or numbers are too large.
    """
    result, left, seen = Edits(), iter(edits), Counter[tuple[int, int]]()
    start = end = media = duration = before = 0
    after, was_shown = -1, False
    for entry, (time, ticks) in zip(entries, packets, strict=True):
        stated = entry.timestamp
        # Of an edit in which no packet begins, FFmpeg states one time for all packets.
        follows = time == after and stated - before in (0, duration)
        if not follows or (entry.is_discard and was_shown):
            (start, end, media), was_shown = next(left), False
        before, after, duration = stated, time + ticks, ticks
        was_shown = was_shown or not entry.is_discard
        pts, length = start + time - media, max(ticks, even)
        skipped = max(start - pts, 0)
        rest = max(pts + length - end, 0)
        if not -_MOST_SAMPLES < pts < _MOST_SAMPLES or max(length, rest) >= _MOST_IN_PACKET:
            raise ValueError("damage")
        key = entry.pos, stated
        # At most the whole packet: FFmpeg 9 would cut the rest from the next one.
        times = pts, skipped < length, min(skipped, length), rest
        # In place of silence, FFmpeg shows the start of the media.
        result[*key, seen[key]] = times if media >= 0 else ()
        seen[key] += 1
    if next(left, None):
        raise ValueError("an edit without a packet")
    return result


def with_times(
    packets: Iterator[AvPacket], tables: Mapping[int, Times], streams: Any
) -> Iterator[AvPacket]:
    """Set the times of packets, and what the decoder cuts of them, from tables by stream index."""
    detach, seen = BitStreamFilterContext("null").filter, Counter[tuple[int, int, int]]()
    for packet in packets:
        key = packet.stream_index, packet.pos or 0, packet.pts or 0
        found = tables.get(key[0], {}).get((*key[1:], seen[key]))
        if found is not None:
            # Of other tables, whose entries are a timestamp, one serves all packets with a key.
            seen[key] += len(found) != 1
            if not found:
                continue
            pts, *edited = found
            if edited:
                is_shown, *cuts = edited
                if packet.is_discard and is_shown:
                    shown = with_data(packet, memoryview(packet))  # without the flag
                    # This sets the index, but keeps the container alive, unlike a packet of a filter.
                    shown.stream = streams[packet.stream_index]
                    (packet,) = detach(shown)  # noqa: PLW2901
                entry = PacketSideData(_SKIP_SAMPLES, SKIPPED.size)  # type: ignore[call-arg]  # stubs lack it
                entry.update(SKIPPED.pack(*cuts, 0, 0))
                packet.set_sidedata(entry)
            packet.pts = pts
        yield packet
