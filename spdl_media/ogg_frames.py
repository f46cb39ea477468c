"""Decode whole Ogg files of Vorbis or Opus in one filter graph of FFmpeg, which reads them itself.

Their packets are small. PyAV releases the GIL four times for each, so that two threads are slower than one.
FFmpeg's source ``amovie`` demuxes and decodes without Python.

See:
    RFC 3533, section 6: the pages of an Ogg file
    RFC 7845, section 5.1, and the Vorbis I specification, 4.2.2: the first packets of the two codecs
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import av
from av.filter import Graph

from spdl_media._ffmpeg import unheard_log
from spdl_media._threads import interrupts_delayed
from spdl_media.codec import AudioCodec
from spdl_media.frame_scan import MOST_BYTES, frame_codec
from spdl_media.inputs import Input
from spdl_media.sample_rows import SampleRows
from spdl_media.timing import Window

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
    codec, content = frame_codec(name, rate, channels), input.read_all()
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
    count = 0
    try:
        with unheard_log():
            for frame in _blocks(found.content):
                if not rows.put_frames((frame,), frame.samples, (0, frame.samples), 0):
                    return False
                count += frame.samples
    except (av.FFmpegError, OSError):  # the latter: no more files can be opened
        return False
    return count == found.window[1]


def _blocks(content: bytes | memoryview) -> Iterator[Any]:
    """Yield the samples of an Ogg file in frames of :data:`_BLOCK`."""
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
    gather, sink = graph.add("asetnsamples", n=str(_BLOCK), p="0"), graph.add("abuffersink")
    source.link_to(gather)
    gather.link_to(sink)
    graph.configure()
    try:
        while True:
            yield sink.pull()
    except av.EOFError:
        return
