"""Detection of damage as in the tables of docs/damage.md, and the results of damaged files."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from audio_oracle import clip
from damage import (
    AUDIO,
    NUM_VARIANTS,
    RATE,
    STILLS,
    VIDEO,
    count_noticed,
    decode_audio,
    decode_still,
    decode_video,
    flipped,
    is_noticed,
    made,
    overwritten,
    packet_spans,
    pictures,
    sound,
)
from still_metadata import gray_tiff, png_chunk

import spdl_media as sm
from spdl_media.testing import index_frames, make_audio, make_image, make_video

PAGE = Path(__file__).parent.parent / "docs" / "damage.md"
KINDS = {"one bit": flipped, "32 bytes": overwritten}


@cache
def table() -> dict[tuple[str, str], str]:
    """Return the cells of the table of flipped bits, by format or codec and kind of damage."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+?) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    return {
        (name, kind): cell.strip()
        for name, *cells in rows
        for kind, cell in zip(KINDS, cells, strict=True)
        if name in {**STILLS, **VIDEO, **AUDIO}
    }


def cells() -> Iterator[tuple[str, str]]:
    for name in (*STILLS, *VIDEO, *AUDIO):
        for kind in KINDS:
            yield name, kind


@pytest.mark.parametrize(("name", "kind"), list(cells()), ids=lambda word: word.replace(" ", "-"))
def test_damage_is_noticed_as_the_page_says(name: str, kind: str) -> None:
    assert not is_noticed(name, made(name)), "the whole file must decode"
    cell = table()[name, kind]
    count = count_noticed(name, KINDS[kind])
    if cell == "always":
        assert count == NUM_VARIANTS
    elif cell == "never":
        assert count == 0
    else:
        bound, number = re.fullmatch(rf"at (least|most) (\d+) of {NUM_VARIANTS}", cell).groups()
        assert count >= int(number) if bound == "least" else count <= int(number)


def damage_in(name: str, packet: int, kind: str = "video") -> bytes:
    """Return the file with one flipped bit in the middle of one packet."""
    data = bytearray(made(name))
    start, end = packet_spans(made(name), kind)[packet]
    data[(start + end) // 2] ^= 4
    return bytes(data)


def test_ffv1_checksum_marks_the_frame_that_fails_it() -> None:
    # FFmpeg logs it and continues with the pixels of the frame before.
    damaged = damage_in("ffv1", 5)
    with pytest.raises(
        sm.DecodeError, match=r"damaged ffv1 data at 0\.500 s \(packet 5\)"
    ) as caught:
        decode_video(damaged)
    assert caught.value.pts_seconds == 0.5
    assert caught.value.packet_index == 5
    kept = decode_video(damaged, on_corrupt="keep")
    assert [n for n, mark in enumerate(kept.is_corrupt) if mark] == [5]
    dropped = decode_video(damaged, on_corrupt="drop")
    assert (len(dropped), dropped.num_dropped) == (23, 1)
    assert not any(dropped.is_corrupt)


def test_hashes_of_hevc_mark_the_image_that_fails_them() -> None:
    damaged = damage_in("hevc with hashes", 0)
    with pytest.raises(sm.DecodeError, match="damaged hevc data"):
        decode_video(damaged)
    kept = decode_video(damaged, on_corrupt="keep")
    assert len(kept) == 24
    assert kept.is_corrupt[0]
    # Pictures that are predicted from it fail as well, up to the next key frame.
    assert not any(kept.is_corrupt[8:])


def in_mp4(stream: bytes, *units: bytes) -> bytes:
    """Return an MP4 of a raw stream and of one more packet for each unit."""
    file = io.BytesIO()
    with av.open(io.BytesIO(stream)) as source, av.open(file, "w", format="mp4") as out:
        track = out.add_stream_from_template(source.streams.video[0])
        track.time_base = tick = Fraction(1, 25)
        packets = [packet for packet in source.demux() if packet.size]
        for number, packet in enumerate([*packets, *map(av.Packet, units)]):
            packet.stream, packet.time_base = track, tick
            packet.pts, packet.dts, packet.duration = number, number, 1
            out.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(("codec", "end"), [("libx264", b"\x0a"), ("libx265", b"\x48\x01")])
def test_the_unit_that_ends_a_sequence_is_no_frame(codec: str, end: bytes) -> None:
    stream = make_video(
        index_frames(4, 64, 48), codec=codec, format="h264" if codec == "libx264" else "hevc"
    )
    data = in_mp4(stream, b"\0\0\0\1" + end)
    with sm.VideoFile(data) as video:
        assert video.timestamps == (0, 0.04, 0.08, 0.12)
    np.testing.assert_array_equal(sm.load_video(data).array, sm.load_video(stream).array)


@pytest.mark.parametrize(
    ("codec", "format", "unit", "message"),
    [
        ("libx264", "h264", b"\0\0\1\x67", b"\0\0\1\6"),
        ("libx265", "hevc", b"\0\0\1\x42", b"\0\0\1\x4e"),
    ],
)
def test_parameter_sets_in_front_of_a_missing_key_frame_are_no_damage_if_whole(
    codec: str, format: str, unit: bytes, message: bytes
) -> None:
    stream = make_video(index_frames(4, 64, 48), codec=codec, format=format)
    cut = stream + stream[: stream.index(message)]
    np.testing.assert_array_equal(sm.load_video(cut).array, sm.load_video(stream).array)
    assert len(sm.demux_video(cut).get_timestamps()) == 4
    with sm.VideoFile(in_mp4(cut)) as video:
        assert video.timestamps == (0, 0.04, 0.08, 0.12)
    place = cut.rindex(unit) + 8
    damaged = cut[:place] + b"\xff" + cut[place + 1 :]
    with pytest.raises(sm.DecodeError, match=r"damaged \w+ data \(packet 4\): Invalid "):
        sm.load_video(damaged)


@pytest.mark.parametrize(
    ("codec", "format", "sets"),
    [("libx264", "h264", rb"[\x67\x68]"), ("libx265", "hevc", rb"[\x40\x42\x44]")],
)
def test_video_without_its_parameter_sets_is_damaged(codec: str, format: str, sets: bytes) -> None:
    """FFmpeg ignores HEVC slices without them."""
    stream = make_video(index_frames(4, 64, 48), codec=codec, format=format)
    units = re.split(rb"\x00*\x00\x00\x01", stream)[1:]
    kept = [b"\0\0\0\1" + unit for unit in units if not re.match(sets, unit)]
    assert len(kept) < len(units)
    packets = sm.demux_video(b"".join(kept), demux_config=sm.demux_config(format=format))
    with pytest.raises(sm.DecodeError, match=r"no frame"):
        sm.decode_packets(packets)
    decoder = sm.VideoDecoder(packets.codec)
    with pytest.raises(sm.DecodeError, match=r"no frame"):
        [*decoder.decode(packets), *decoder.flush()]
    assert len(sm.decode_packets(packets, decode_config=sm.decode_config(on_corrupt="keep"))) == 0


@pytest.mark.parametrize("codec", ["libopus", "flac"])
def test_damaged_page_of_an_ogg_is_no_gap_in_silence(codec: str) -> None:
    """FFmpeg drops such a page silently and continues."""
    whole = make_audio(sound(), RATE, codec=codec, format="ogg")
    total = len(decode_audio(whole))
    for place in (len(whole) * 2 // 5, len(whole) * 3 // 4):
        data = bytearray(whole)
        data[place] ^= 4
        with pytest.raises(sm.DecodeError, match=r"a page fails its checksum.*on_corrupt='keep'"):
            decode_audio(bytes(data))
        assert 0 < len(decode_audio(bytes(data), on_corrupt="keep")) < total


def test_a_png_whose_header_or_colours_fail_their_checksum_is_damaged() -> None:
    header = struct.pack(">II5B", 4, 1, 8, 3, 0, 0, 0)
    parts = {
        b"IHDR": header,
        b"tEXt": b"Comment\0none",
        b"PLTE": bytes(range(12)),
        b"tRNS": b"\x80",
        b"IDAT": zlib.compress(b"\0\0\1\2\3"),
        b"IEND": b"",
    }

    def png(wrong: bytes) -> bytes:
        chunks = [png_chunk(*part) for part in parts.items()]
        chunks = [one[:-1] + bytes([one[-1] ^ (one[4:8] == wrong)]) for one in chunks]
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)

    for wrong in (b"", b"tEXt", b"IEND"):
        image = decode_still(png(wrong))
        assert (image.width, image.height) == (4, 1)
    for wrong in (b"IHDR", b"PLTE", b"tRNS"):
        message = f"png data is damaged: the checksum of the chunk {wrong.decode()} is wrong"
        with pytest.raises(sm.DecodeError, match=message):
            decode_still(png(wrong))
        with pytest.raises(sm.DecodeError, match=message):
            sm.probe(png(wrong))
        assert decode_still(png(wrong), on_corrupt="keep").is_corrupt


def test_a_jpeg_without_the_scan_of_a_component_is_damaged() -> None:
    """FFmpeg gives green images. A scan of one gray image for each component makes a complete one."""
    image = pytest.importorskip("PIL.Image")
    plain, scans = b"", []
    for number, level in enumerate((90, 200, 60), start=1):
        file = io.BytesIO()
        image.new("L", (16, 8), level).save(file, "jpeg")
        plain, scan = file.getvalue()[:-2].split(b"\xff\xda\0\x08\1\1")
        scans.append(b"\xff\xda\0\x08\1" + bytes([number]) + scan)
    size = b"\x08\0\x08\0\x10"
    start = b"\xff\xc0\0\x0b" + size + b"\1\1\x11\0"
    assert start in plain
    components = b"\3\1\x11\0\2\x11\0\3\x11\0"
    head = plain.replace(start, b"\xff\xc0\0\x11" + size + components)
    whole = decode_still(b"".join((head, *scans, b"\xff\xd9")))
    assert [int(plane[4, 4]) for plane in whole.planes] == pytest.approx([90, 200, 60], abs=1)
    for count in (1, 2):
        cut = b"".join((head, *scans[:count], b"\xff\xd9"))
        message = f"mjpeg data is damaged: {3 - count} of its components have no first scan"
        with pytest.raises(sm.DecodeError, match=message):
            decode_still(cut)
        assert decode_still(cut, on_corrupt="keep").is_corrupt
    # With its end, it is not cut short, whatever a segment says of its length.
    with pytest.raises(sm.DecodeError, match="damaged mjpeg data"):
        decode_still(b"".join((head, b"\xff\xdb\xff\xff", *scans, b"\xff\xd9")))


def test_a_progressive_jpeg_without_its_first_scan_is_damaged() -> None:
    """FFmpeg gives green images: only the first scan of a component has the mean of each block."""
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pictures()[0]).save(file, "jpeg", progressive=True)
    head, scan, rest = file.getvalue().split(b"\xff\xda", 2)
    assert decode_still(file.getvalue()).width == pictures()[0].shape[1]
    tables = scan[scan.index(b"\xff\xc4") :]
    with pytest.raises(sm.DecodeError, match="3 of its components have no first scan"):
        decode_still(head + tables + b"\xff\xda" + rest)


def test_an_exr_that_ffmpeg_does_not_read_is_unsupported() -> None:
    """FFmpeg's DWAA and DWAB take the first channels for alpha of 16 bits, blue, green and red."""
    for pix_fmt, compressions, message in (
        ("gbrapf32le", (8, 9), "data is unsupported: FFmpeg mixes up channels of DWA"),
        ("gbrpf32le", (8, 9), "exr data(?!.*mixes up)"),  # the pixels are not of DWA
        # Its table of blocks was read wrongly, so that the file was said to be cut short.
        ("gbrpf32le", (10,), "data is unsupported: FFmpeg does not know its compression 10"),
    ):
        data = make_image(pictures()[0], codec="exr", pix_fmt=pix_fmt)
        place = data.index(b"compression\0compression\0") + 28
        for compression in compressions:
            with pytest.raises(sm.DecodeError, match=message):
                decode_still(data[:place] + bytes([compression]) + data[place + 1 :])


@pytest.mark.parametrize("name", ["flac", "ac3"])
def test_damaged_audio_is_dropped_and_counted(name: str) -> None:
    damaged = damage_in(name, 3, "audio")
    with pytest.raises(sm.DecodeError, match=rf"damaged {name} data at .*\(packet 3\)"):
        decode_audio(damaged)
    whole, dropped = decode_audio(made(name)), decode_audio(damaged, on_corrupt="drop")
    assert dropped.num_dropped == 1
    assert 0 < len(dropped) < len(whole)


def test_each_damaged_frame_of_flac_is_an_error() -> None:
    """FFmpeg makes one packet of the third or fourth frame and those before, and counts from the last."""
    data = clip("flac", "flac", seconds=2)
    with av.open(io.BytesIO(data)) as container:
        places = [packet.pos for packet in container.demux() if packet.size and packet.pos]
    assert len(places) > 8
    wanted = sm.load_audio(data, timestamp=(1.5, 2)).array
    for place in places:
        damaged = bytearray(data)
        damaged[place + 30] ^= 1
        with pytest.raises(sm.DecodeError, match="flac data"):
            decode_audio(bytes(damaged))
        if place < places[6]:
            packets = sm.demux_audio(bytes(damaged), timestamp=(1.5, 2))
            assert np.array_equal(sm.convert_frames(sm.decode_packets(packets)).array, wanted)


@pytest.mark.parametrize("window", [None, (0, 1), (1, 2)])
def test_flac_in_which_ffmpeg_finds_no_frame_is_an_error(
    window: tuple[int, int] | None,
) -> None:
    """Nor does it in a few good files whose frames are large."""
    data = clip("flac", "flac", seconds=2)
    with av.open(io.BytesIO(data)) as container:
        first = next(container.demux()).pos
    packets = sm.demux_audio(data[:first] + bytes(len(data)), timestamp=window)
    with pytest.raises(sm.DecodeError, match="FFmpeg finds none of its frames"):
        sm.decode_packets(packets)


@pytest.mark.parametrize("run", [b"\x07\x11", b"\0\7\x11\x11\x11\x10"])
def test_runs_of_a_bmp_beyond_its_pixels_are_damage(run: bytes) -> None:
    """FFmpeg leaves out all rows from the first of them on, with a line in its log."""
    head = struct.pack("<2sIHHI", b"BM", 140, 0, 0, 118)
    head += struct.pack("<IiiHHIIiiII", 40, 5, 2, 1, 4, 2, 0, 0, 0, 0, 0)
    head += b"".join(bytes((16 * k, 0, 0, 0)) for k in range(16))
    whole = head + b"\5\x11\0\0\5\x22\0\0\0\1"
    assert sm.load_image(whole).array[:, 0, 2].tolist() == [32, 16]
    with pytest.raises(sm.DecodeError, match="damaged bmp data"):
        sm.load_image(head + run + b"\0\0\5\x22\0\0\0\1")


def test_short_strips_of_a_tiff_are_damage() -> None:
    """FFmpeg leaves out all rows from the first of them on, without a word."""
    gray = np.arange(40, dtype=np.uint8).reshape(8, 5)
    # Four strips of ten bytes, whose sizes are before the first one.
    data = bytearray(gray_tiff(gray))
    place = len(data) - gray.size - 4 * 2
    assert struct.unpack_from("<I", data, place) == (10,)
    for size in (0, 9):
        struct.pack_into("<I", data, place, size)
        with pytest.raises(sm.DecodeError, match="damaged: 1 of 4 strips of rows are too short"):
            decode_still(bytes(data))
        rows = decode_still(bytes(data), on_corrupt="keep").planes[0]
        assert np.array_equal(rows[:4], gray[:4])
        assert not rows[6:].any()
    # Of a single strip without a size, it takes what is there.
    single = gray_tiff(gray, rows_per_strip=8)
    unsized = single.replace(
        struct.pack("<HHII", 279, 4, 1, 40), struct.pack("<HHII", 279, 4, 1, 0)
    )
    assert unsized != single
    assert np.array_equal(decode_still(unsized).planes[0], gray)


@pytest.mark.parametrize("name", ["jpeg", "tiff deflate", "exr"])
def test_keep_gives_a_damaged_still_marked(name: str) -> None:
    # FFmpeg decodes nothing of a PNG with a wrong checksum.
    damaged = next(data for data in overwritten(name) if is_noticed(name, data))
    whole = decode_still(made(name))
    with pytest.raises(sm.DecodeError, match=r"on_corrupt='keep'.*decodes what"):
        decode_still(damaged)
    kept = decode_still(damaged, on_corrupt="keep")
    assert kept.is_corrupt
    assert (kept.width, kept.height) == (whole.width, whole.height)
    assert not whole.is_corrupt
    with pytest.raises(sm.DecodeError):
        decode_still(damaged, on_corrupt="drop")  # no pixels are left
