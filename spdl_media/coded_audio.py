"""Load AAC in an MP4, and whole Ogg files, without PyAV's demuxer, which takes longer than decoding.

AAC: FFmpeg takes half a millisecond to open an MP4, and returns one packet per frame. Its tables tell where
the frames lie, so that a packet can hold many. This is for usual files: one audio track of AAC-LC without
gaps, in mono or stereo, of which nothing is hidden but samples at the start.

Ogg: packets of Vorbis and Opus cannot be joined, and PyAV releases the GIL four times for each, so that two
threads are slower than one. So FFmpeg's source ``amovie`` demuxes and decodes whole files without Python.

FFmpeg's demuxer reads all other files.

See:
    ISO/IEC 14496-12, 8.5.2 (sample descriptions), 8.6.6 (edit lists); 14496-14, 5.6 (the box esds)
    RFC 3533, section 6: the pages of an Ogg file
    RFC 7845, section 5.1, and the Vorbis I specification, 4.2.2: the first packets of the two codecs
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from av.filter import Graph

from spdl_media._ffmpeg import CUTS_LAST_FRAME, unheard_log
from spdl_media._threads import interrupts_delayed
from spdl_media.audio_clock import AAC_FRAME_SIZE, is_aac_lc
from spdl_media.codec import AudioCodec
from spdl_media.frame_scan import LAYOUTS, MOST_BYTES, PACKET_SAMPLES, PADDING, CodedFrames
from spdl_media.inputs import Input
from spdl_media.packet_table import Samples, boxes_at, table_at, track_samples
from spdl_media.parts import boxes, read_boxes
from spdl_media.sample_rows import SampleRows, most_combined
from spdl_media.timing import Window

# AAC in an MP4.

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
    position, count = first * AAC_FRAME_SIZE - hidden, (last - first) * AAC_FRAME_SIZE
    found = count, PACKET_SAMPLES, *_read_frames(input, samples, first, last)
    return CodedFrames(codec, delay, (start, stop), position, *found)


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
    header = next(boxes_at(track, "mdia/mdhd"))
    (rate,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
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
    header = next(boxes_at(moov, "mvhd"))
    (unit,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
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


def _read_frames(input: Input, samples: Samples, first: int, last: int) -> tuple[bytes, list[int]]:
    """Read frames, and find where packets of many begin.

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
    data = b"".join(map(bytes, parts)) + PADDING
    cuts = [0, *np.cumsum(sizes).tolist()]
    step = PACKET_SAMPLES // AAC_FRAME_SIZE
    return data, [*cuts[:-1:step], cuts[-1]]


# Whole Ogg files.

# Samples per frame of the graph. With 16 Ki, the C library returns memory to the system and gets it again for
# each file, which takes a third of the time.
_BLOCK = 8 * 1024

# Signature, version, flags, position after the page, serial number, sequence number, checksum, segments.
_PAGE = struct.Struct("<4sBBqIIIB")
_FIRST, _LAST = 2, 4
_NO_POSITION = -1
# The longest packets: 120 ms of Opus. Vorbis has at most 4096 samples.
_MOST_IN_PACKET = 5760


class OggAudio(NamedTuple):
    """An Ogg file of one stream of audio that begins at second 0.

    Attributes:
        codec: Codec of the stream.
        window: First sample, and the one after the last.
        content: The whole file.
        delay: Samples of the stream before second 0.
    """

    codec: AudioCodec
    window: tuple[int, int]
    content: bytes | memoryview
    delay: int = 0


def find_ogg(input: Input, head: bytes, window: Window, num_samples: int | None) -> OggAudio | None:
    """Find what a whole Ogg file of Vorbis or Opus decodes to.

    Arguments and result are those of :func:`~spdl_media.frame_scan.find_mp3`.

    Raises:
        SourceError: The file cannot be read.
        LookupError, ArithmeticError, struct.error, ValueError: It has more than two channels, does not begin
            at second 0, or is damaged.
    """
    if window or num_samples is not None or input.size() > MOST_BYTES:
        return None
    # Only Linux has memfd_create. FFmpeg cannot read from Python's memory without the GIL.
    if not hasattr(os, "memfd_create"):
        return None
    start = _PAGE.size + head[_PAGE.size - 1]
    if head[start : start + 7] == b"\x01vorbis":
        name, skipped = "vorbis", 0
        channels, rate = struct.unpack_from("<BI", head, start + 11)
    elif head[start : start + 8] == b"OpusHead" and not head[start + 18]:
        name, rate = "opus", 48000
        channels, skipped = struct.unpack_from("<BH", head, start + 9)
    else:
        return None
    codec = AudioCodec(name, name, rate, LAYOUTS[channels - 1], channels)
    content = input.read_all()
    first, last = _positions(content)
    if name == "vorbis" and first == last:
        return None  # FFmpeg states wrong times in a single page, and cuts the end wrongly
    return OggAudio(codec, (0, last - skipped), content)


def _positions(content: bytes | memoryview) -> tuple[int, int]:
    """Return the positions at the end of the first page of samples and at the end of the file.

    Raises:
        ValueError: Pages are missing, of several streams, or begin after second 0.
        struct.error: The file ends inside a page.
    """
    place = first = last = number = flags = 0
    serial = None
    while place < len(content):
        signature, version, flags, position, stream, sequence, _, segments = _PAGE.unpack_from(
            content, place
        )
        serial = stream if serial is None else serial
        is_first = flags & _FIRST != 0
        expected = b"OggS", 0, serial, number, number == 0
        if (signature, version, stream, sequence, is_first) != expected:
            raise ValueError("another stream, or a page is missing")
        sizes = bytes(content[place + _PAGE.size : place + _PAGE.size + segments])
        place += _PAGE.size + segments + sum(sizes)
        number += 1
        if position != _NO_POSITION:
            packets = 1 + sum(size < 255 for size in sizes)
            if position < last or (not first and position > packets * _MOST_IN_PACKET):
                raise ValueError("the stream begins after second 0, or goes back")
            first, last = first or position, position
        elif any(size < 255 for size in sizes):
            raise ValueError("a packet ends in a page without a position")
        if flags & _LAST:
            break
    if place != len(content) or not flags & _LAST:
        raise ValueError("the last page is missing, or other data follow it")
    return first, last


def decode_ogg(found: OggAudio, rows: SampleRows) -> bool:
    """Decode a file and put its samples into rows.

    Returns:
        False if FFmpeg fails, or gives another number of samples than the file states: a page or a packet is
        damaged, or FFmpeg's times of this file are wrong.

    Raises:
        FilterError: The filters do not take the samples.
    """
    codec, (_, wanted), count = found.codec, found.window, 0
    # In the same graph, so that FFmpeg copies the samples less often.
    filters = rows.filters(("fltp", codec.channel_layout, codec.sample_rate))
    try:
        with unheard_log():
            for frame in _blocks(found.content, filters):
                if filters:
                    rows.put_filtered((frame,))
                elif not rows.put_frames((frame,), frame.samples, (0, frame.samples), 0):
                    return False
                count += frame.samples
    except (av.FFmpegError, OSError):  # the latter: no more files can be opened
        return False
    rate, into = codec.sample_rate, rows.sample_rate
    if filters and rows.resamples(rate):
        # The resampler rounds up or down. A lost packet, of at least 32 samples, must make a difference of
        # more than that. SampleRows resamples short audio in its own way.
        is_whole = 0 <= count - wanted * into // rate <= 1
        return is_whole and rate < 10 * into and wanted > most_combined(rate, into)
    return count == wanted


def _blocks(content: bytes | memoryview, filters: list[str]) -> Iterator[Any]:
    """Yield the samples of an Ogg file in frames of :data:`_BLOCK`, or what filters make of them."""
    graph = Graph()
    # A Ctrl-C before the number is assigned would leave the file open.
    with interrupts_delayed():
        file = os.memfd_create("spdl_media")
        try:
            if os.write(file, content) != len(content):
                return
            # One thread: FFmpeg's decoding threads would take buffers of the graph while it makes new ones.
            source = graph.add(
                "amovie", filename=f"/proc/self/fd/{file}", format_name="ogg", dec_threads="1"
            )
        finally:
            os.close(file)
    # FFmpeg's times may be wrong, so the filters get the number of each first sample.
    counted = ["asetpts=N", *filters] if filters else []
    sink = source
    for text in (f"asetnsamples=n={_BLOCK}:p=0", *counted, "abuffersink"):
        name, _, args = text.partition("=")
        before, sink = sink, graph.add(name, args or None)
        before.link_to(sink)
    graph.configure()
    try:
        while True:
            yield sink.pull()
    except av.EOFError:
        return
