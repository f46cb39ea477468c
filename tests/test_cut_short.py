"""Truncated files: a partial result is never returned as a complete one."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from damage import (
    CONTAINERS,
    RATE,
    STILLS,
    container,
    decode_audio,
    decode_still,
    decode_video,
    made,
    packet_spans,
    pictures,
    sound,
)
from effort import each
from heif_grid import make_in_idat

import spdl_media as sm
from spdl_media.frame_scan import mp3_frame_size
from spdl_media.packets import av_packets
from spdl_media.parts import missing_end
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_frames,
    index_samples,
    make_audio,
    make_image,
    make_media,
    make_video,
)

# The truncations that are detected in each container, as in the table of docs/damage.md.
ALWAYS = [
    name
    for name in CONTAINERS
    if name not in ("mp4, fragmented", "mpeg-ts", "mp3", "adts") and not name.startswith("ogg")
]


def cut_points(size: int, count: int = 16) -> list[int]:
    return sorted({*(size * k // count for k in range(1, count)), *range(size - 4, size)})


@pytest.mark.parametrize("name", STILLS)
def test_still_cut_anywhere_is_an_error(name: str, tmp_path: Path) -> None:
    data = made(name)
    whole = pixels(decode_still(data))
    path = tmp_path / "cut.tga" if name == "tga" else tmp_path / "cut.dat"
    for size in cut_points(len(data)):
        path.write_bytes(data[:size])
        for source in (data[:size], path):
            for read in (read_image, read_video):
                same_or_error(read, source, name, whole, size)


def read_image(source: object) -> bytes:
    return pixels(sm.decode_packets(sm.demux_image(source), None))


def read_video(source: object) -> bytes:
    frames = sm.decode_packets(sm.demux_video(source), None)
    return pixels(frames[0]) if len(frames) else b""


def same_or_error(
    read: Callable[[object], bytes], source: object, name: str, whole: bytes, size: int
) -> None:
    error, got = outcome(read, source)
    if error is not None:
        is_path = isinstance(source, Path)
        assert error.source == (str(source) if is_path else f"bytes of length {size}")
        return
    # The last bytes of a TIFF and the footer of a TGA contain no pixels.
    assert name in ("tiff", "tiff deflate", "tga"), f"{size} of {len(made(name))} bytes pass"
    assert size > len(made(name)) - 30
    assert got == whole


def outcome(read: Callable[[object], bytes], source: object) -> tuple[sm.MediaError | None, bytes]:
    try:
        return None, read(source)
    except (sm.DecodeError, sm.DemuxError) as error:
        return error, b""


def pixels(frame: sm.ImageFrames) -> bytes:
    return b"".join(np.ascontiguousarray(plane).tobytes() for plane in frame.planes)


PARTLY_DECODED = ("jpeg", "gif", "qoi", "exr")


@pytest.mark.parametrize("name", PARTLY_DECODED)
def test_still_cut_short_can_be_kept(name: str) -> None:
    data = made(name)
    cut = data[: len(data) * 2 // 3]
    with pytest.raises(sm.DecodeError, match="data ends after"):
        decode_still(cut)
    kept = decode_still(cut, on_corrupt="keep")
    assert kept.is_corrupt
    assert len(pixels(kept)) == len(pixels(decode_still(data)))


@each("name", [name for name in STILLS if name not in PARTLY_DECODED])
def test_still_of_which_nothing_can_be_kept_is_an_error_with_its_reason(name: str) -> None:
    data = made(name)[: len(made(name)) // 2]
    with pytest.raises(sm.DecodeError) as caught:
        decode_still(data, on_corrupt="keep")
    assert "no image" in str(caught.value) or caught.value.__cause__ is not None


def test_webp_that_ends_before_its_flags_is_damaged() -> None:
    data = b"RIFF" + struct.pack("<I", 502) + b"WEBPVP8X" + struct.pack("<I", 10)
    with pytest.raises(sm.DecodeError, match="damaged webp data"):
        sm.load_image(data[:18], decode_config=sm.decode_config(on_corrupt="keep"))


def decode(name: str, data: object, **options: object) -> sm.VideoFrames | sm.AudioFrames:
    demux = sm.demux_video if CONTAINERS[name][0] == "video" else sm.demux_audio
    return sm.decode_packets(demux(data), None, sm.decode_config(**options))


@pytest.mark.parametrize("name", CONTAINERS)
def test_whole_file_is_complete(name: str, tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(container(name))
    sources = (container(name), path, io.BytesIO(container(name)))
    counts = {len(decode(name, source)) for source in sources}
    assert len(counts) == 1
    expected = 24 if CONTAINERS[name][0] == "video" else 2 * RATE
    assert counts.pop() >= expected


@pytest.mark.parametrize("name", ALWAYS)
def test_cut_is_always_noticed(name: str, tmp_path: Path) -> None:
    data = container(name)
    total = len(decode(name, data))
    path = tmp_path / "cut"
    for size in cut_points(len(data)):
        path.write_bytes(data[:size])
        for source in (data[:size], path, io.BytesIO(data[:size])):
            try:
                count = len(decode(name, source))
            except (sm.DecodeError, sm.DemuxError):
                continue
            # The index after the frames of an AVI may be missing: all frames are there.
            assert name == "avi", f"{size} of {len(data)}"
            assert count == total


@pytest.mark.parametrize("name", ["mp4, index in front", "matroska", "wav", "flac", "caf"])
def test_cut_between_two_packets_is_noticed(name: str) -> None:
    """No packet is damaged then; only the sizes in the file show it."""
    kind, data = CONTAINERS[name][0], container(name)
    spans = packet_spans(data, kind)
    for _, end in (spans[len(spans) // 3], spans[-2]):
        with pytest.raises(sm.DecodeError, match=r"cut short.*data ends.*on_corrupt='keep'"):
            decode(name, data[:end])
        kept = decode(name, data[:end], on_corrupt="keep")
        assert 0 < len(kept) < len(decode(name, data))


@pytest.mark.parametrize("name", ["ogg, opus", "ogg, flac", "mpeg-ts", "mp3", "adts"])
def test_cut_within_a_unit_is_noticed(name: str) -> None:
    data = container(name)
    for size in cut_points(len(data)):
        if size - 1 in ends_of_units(name) or size in ends_of_units(name):
            continue
        with pytest.raises((sm.DecodeError, sm.DemuxError)):
            decode(name, data[:size])


@pytest.mark.parametrize("name", ["ogg, opus", "mpeg-ts", "mp3", "adts"])
def test_cut_between_two_units_is_not_noticed(name: str) -> None:
    """A documented limit: nothing in the file shows the truncation."""
    data, ends = container(name), ends_of_units(name)
    end = ends[len(ends) // 2]
    assert 0 < len(decode(name, data[:end])) < len(decode(name, data))


@cache
def ends_of_units(name: str) -> list[int]:
    """Return the ends of Ogg pages, of the last transport packets of frames, or of audio frames."""
    data = container(name)
    if name.startswith("ogg"):
        return [n for n in range(1, len(data)) if data[n : n + 4] == b"OggS"][2:]
    if name == "mpeg-ts":
        starts = [n for n in range(0, len(data), 188) if data[n + 1] & 0x5F == 0x41]
        return [n for n in starts if data[n + 2] == 0][2:]
    return [end for _, end in packet_spans(data, "audio")][2:]


def test_fragmented_mp4_cut_in_a_fragment_is_noticed() -> None:
    data = container("mp4, fragmented")
    last = data.index(b"mfra") - 4
    for size in cut_points(last):
        if data[size + 4 : size + 8] == b"moof":
            continue
        with pytest.raises((sm.DecodeError, sm.DemuxError)):
            decode("mp4, fragmented", data[:size])
    assert len(decode("mp4, fragmented", data[:last])) == 24


@pytest.mark.parametrize("states_sizes", [True, False])
def test_live_matroska_cut_in_a_cluster_or_block_is_noticed(*, states_sizes: bool) -> None:
    """Its segment has no size; its clusters may have none, either."""
    track = VideoTrack(frames=index_frames(24, 128, 96), codec="libvpx", options={"g": "6"})
    data = make_media([track], format="webm", options={"live": "1", "cluster_time_limit": "300"})
    starts = [found.start() for found in re.finditer(b"\x1fC\xb6u", data)]
    ends = {*starts, len(data)}
    if not states_sizes:
        ends |= {end for _, end in packet_spans(data, "video")}
        assert all(0x40 <= data[start + 4] < 0x80 for start in starts)  # a size of two bytes
        for start in starts:
            data = data[: start + 4] + b"\x7f\xff" + data[start + 6 :]
    # What follows the last cluster may be no element: zeros, or other bytes.
    for more in (b"", bytes(99), b"\xe7\0" * 50, b"\2" * 9):
        assert len(sm.load_video(data + more)) == 24
    for size in {*cut_points(len(data)), *ends} - set(range(starts[1])):
        if size in ends:
            assert 0 < len(sm.load_video(data[:size])) <= 24
            continue
        with pytest.raises(sm.DecodeError, match="cut short"):
            sm.load_video(data[:size])


def test_message_says_how_much_is_missing() -> None:
    data = container("wav")
    with pytest.raises(sm.DecodeError) as caught:
        decode_audio(data[:1000])
    assert str(caught.value) == (
        "bytes of length 1000: the pcm_s16le data is cut short: the data ends after 1000 bytes, but "
        f"the chunk data should end at byte {len(data)}. decode_config(on_corrupt='keep') decodes what is "
        "there, as far as the decoder can"
    )


def test_index_cut_at_its_end_does_not_pass_for_an_empty_track() -> None:
    # FFmpeg returns a stream without packets, and no error.
    data = make_audio(sound(), RATE, codec="pcm_s16le", format="mov")[:-3]
    with pytest.raises(sm.DecodeError, match="the box moov should end"):
        decode_audio(data)
    with pytest.raises(sm.DemuxError, match="cut short"), sm.Demuxer(data) as demuxer:
        list(demuxer.streaming_demux(num_packets=10))


def test_mp4_without_its_index_says_so() -> None:
    data = container("mp4, index at the end")
    with pytest.raises(
        sm.DemuxError, match=r"no index: .*moov atom not found.*cut short"
    ) as caught:
        sm.demux_video(data[: len(data) // 2])
    assert caught.value.__cause__ is not None


def test_window_in_what_is_there_is_complete() -> None:
    data = container("matroska")
    half = data[: len(data) // 2]
    frames = sm.decode_packets(sm.demux_video(half, timestamp=(0.2, 0.6)), None)
    assert len(frames) == 4
    for window in ((0.2, 9), (0.2, None), (2.0, 2.2)):
        with pytest.raises(sm.DecodeError, match="cut short"):
            sm.decode_packets(sm.demux_video(half, timestamp=window), None)


def test_first_frames_of_a_file_cut_short_can_be_had() -> None:
    half = container("matroska")[: len(container("matroska")) // 2]
    packets = sm.demux_video(half)
    assert len(sm.decode_packets(packets, None, num_frames=5)) == 5
    assert len(sm.decode_packets(packets[:5], None)) == 5
    with pytest.raises(sm.DecodeError, match="cut short"):
        sm.decode_packets(packets, None, num_frames=24)
    sound_packets = sm.demux_audio(container("wav")[:9000])
    assert len(sm.decode_packets(sound_packets, None, num_samples=1000)) == 1000
    with pytest.raises(sm.DecodeError, match="cut short"):
        sm.decode_packets(sound_packets, None, num_samples=9000)


@pytest.mark.parametrize("name", ["matroska", "wav"])
def test_stream_cut_short_gives_its_frames_and_then_the_error(name: str) -> None:
    data = container(name)[: len(container(name)) // 2]
    kept = len(decode(name, data, on_corrupt="keep"))
    assert kept == sum(len(frames) for frames in stream(data, on_corrupt="keep"))
    count = 0
    with pytest.raises(sm.DecodeError, match="cut short"):  # noqa: PT012  # earlier frames count, too
        for frames in stream(data):
            count += len(frames)
    assert count == kept


def stream(data: bytes, **options: object) -> Iterator[sm.VideoFrames | sm.AudioFrames]:
    with sm.Demuxer(data) as demuxer:
        has_video = demuxer.video_stream_index is not None
        make = sm.VideoDecoder if has_video else sm.AudioDecoder
        codec = demuxer.video_codec if has_video else demuxer.audio_codec
        decoder = make(codec, filter_desc=None, decode_config=sm.decode_config(**options))
        for packets in demuxer.streaming_demux(num_packets=3):
            yield from decoder.decode(packets)
        yield from decoder.flush()


class OneWay(io.BytesIO):
    """A source that cannot seek, as a pipe."""

    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("data", [b"\0\0\0\1ftypheic", b"\0\0\0\1mdat" + bytes(5)])
def test_files_that_end_inside_the_first_size(data: bytes) -> None:
    """A size of 1 says that a size of 64 bits follows."""
    calls: list[Callable[[Any], Any]] = [sm.load_image, sm.load_video, sm.load_audio, sm.probe]
    for call in (*calls, sm.VideoFile):
        with pytest.raises(sm.DemuxError):
            call(data)
    for call in calls:
        with pytest.raises(sm.DemuxError):
            call(OneWay(data))


@pytest.mark.parametrize("head_size", [4096, 65536])
def test_a_size_of_64_bits_where_the_part_ends_that_is_looked_at(head_size: int) -> None:
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    track = VideoTrack(frames=index_frames(4, 32, 32))
    data = make_media([track], format="mp4", options=options)
    (size,) = struct.unpack_from(">I", data)
    free = struct.pack(">I4s", head_size - 12 - size, b"free").ljust(head_size - 12 - size, b"\0")
    data = data[:size] + free + struct.pack(">I4sQ", 1, b"free", 16) + data[size:]
    for source in (data, OneWay(data)):
        assert len(sm.load_video(source)) == 4
    assert len(sm.VideoFile(data)) == 4
    assert sm.load_image(data).shape == (32, 32, 3)


@pytest.mark.parametrize("seeks", [True, False])
@pytest.mark.parametrize("num_samples", [5000, 4096 * 3 + 77])
@pytest.mark.parametrize("name", ["wav: 0", "wav: 4294967295", "wav: 2147479552", "caf: -1"])
def test_audio_of_unknown_size_is_complete(name: str, num_samples: int, *, seeks: bool) -> None:
    """A program that writes to a pipe cannot go back to fill in the size."""
    format, _, size = name.partition(": ")
    data = bytearray(make_audio(index_samples(num_samples, 2), RATE, format=format))
    place, width = data.index(b"data") + 4, 4 if format == "wav" else 8
    data[place : place + width] = (int(size) % 256**width).to_bytes(width, "little")

    def load(data: bytes, **options: Any) -> Any:
        source = io.BytesIO(data) if seeks else OneWay(data)
        return sm.load_audio(source, filter_desc=None, **options)

    whole = sm.load_audio(bytes(data), filter_desc=None).array
    assert whole.tolist() == index_samples(num_samples, 2).tolist()
    assert load(bytes(data)).array.tolist() == whole.tolist()
    assert sm.load_audio(bytes(data), (0.05, 0.1), filter_desc=None).shape[0] == RATE // 20
    with pytest.raises(sm.DecodeError, match="cut short: the data ends inside a packet"):
        load(bytes(data[:-1]))


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_a_window_before_the_packet_that_is_cut_is_complete(kind: str) -> None:
    if kind == "audio":
        load, data = sm.load_audio, make_audio(sound(), RATE, codec="aac", format="flv")
        windows = [(0, 1.6), (0, 1.9), (1.5, 1.8)]
    else:
        load = sm.load_video
        data = make_video(pictures(), codec="libx264", max_b_frames=3, gop_size=8)
        windows = [(0.9, 1.6), (0.9, 1.8), (0.9, 2)]
    last, _ = packet_spans(data, kind)[-1]
    for window in windows:
        whole, found = (np.asarray(load(file, window)) for file in (data, data[: last + 4]))
        np.testing.assert_array_equal(found, whole)
    with pytest.raises(sm.DecodeError, match="cut short"):
        load(data[: last + 4])


def test_adx_is_complete_although_ffmpeg_marks_its_last_packets_as_corrupt() -> None:
    silence = av.AudioFrame.from_ndarray(np.zeros((1, 320), np.int16), "s16p", "mono")
    silence.sample_rate = 8000
    file = io.BytesIO()
    with av.open(file, "w", format="adx") as muxer:
        stream = muxer.add_stream("adpcm_adx", rate=8000, layout="mono")
        for frame in (silence, None):
            muxer.mux(stream.encode(frame))
    assert sm.load_audio(file.getvalue()).shape == (1, 320)


@pytest.mark.parametrize("format", ["wav", "aiff", "au"])
def test_audio_cut_in_a_pipe_is_an_error(format: str) -> None:
    file = io.BytesIO()
    sm.save_audio(file, np.zeros((2, 5000), np.float32), RATE, format=format)
    data = file.getvalue()
    assert sm.load_audio(OneWay(data)).shape == (2, 5000)
    with pytest.raises(sm.DecodeError, match="cut short: the data ends"):
        sm.load_audio(OneWay(data[:-400]))


def test_matroska_of_unknown_size_is_complete() -> None:
    live = make_video(pictures(), codec="libx264", options={"qp": "23"})
    data = bytearray(live)
    segment = data.index(b"\x18\x53\x80\x67") + 4
    data[segment : segment + 8] = b"\x01" + b"\xff" * 7
    assert len(decode_video(bytes(data))) == 24


def test_missing_end_survives_hostile_sizes() -> None:
    rng = np.random.default_rng(4)
    for name in CONTAINERS:
        head = bytearray(container(name)[:300])
        for _ in range(60):
            data = bytearray(head)
            for place in rng.integers(4, len(data), 6):
                data[place] = rng.integers(256)
            cut = bytes(data[: int(rng.integers(0, 300))])
            text = missing_end(lambda start, count, data=cut: data[start : start + count], len(cut))
            assert text is None or text.startswith("the data ends after")


def test_avi_of_many_tiny_forms_is_walked_once() -> None:
    """A regression: each RIFF form was walked to the end of the file, which took minutes per megabyte."""
    form = b"RIFF" + struct.pack("<I", 4) + b"AVI "
    reads = 0
    data = form * 50_000

    def read(position: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return data[position : position + size]

    assert missing_end(read, len(data)) is None
    assert reads < 100_000


@pytest.mark.parametrize(
    "rest", [bytes(16), b"JUNK\x08\0\0\0" + bytes(8), b"idx1\0\0\0\0" + bytes(8)], ids=repr
)
def test_what_follows_the_last_form_of_an_avi_is_no_part_of_it(rest: bytes) -> None:
    data = container("avi")
    assert len(decode_video(data + rest)) == len(decode_video(data))
    with pytest.raises(sm.DecodeError, match="cut short"):
        decode_video(data[: len(data) * 2 // 3])


def test_an_mp4_whose_mdat_states_too_much_is_complete_if_its_packets_are_there() -> None:
    """Some writers count the eight bytes of its header twice."""
    data = bytearray(container("mp4, index in front"))
    start = data.index(b"mdat") - 4
    assert struct.unpack_from(">I", data, start)[0] == len(data) - start
    struct.pack_into(">I", data, start, len(data) - start + 8)
    assert len(decode_video(bytes(data))) == len(decode_video(container("mp4, index in front")))
    with pytest.raises(sm.DecodeError, match="cut short"):
        decode_video(bytes(data[:-1]))


def test_an_ogg_that_goes_on_in_another_codec_is_an_error(tmp_path: Path) -> None:
    """FFmpeg does not read what follows. Its ``amovie`` ends there without an error."""
    second = AudioTrack(samples=sound(), sample_rate=RATE, codec="vorbis")
    data = container("ogg, opus") + make_media(
        [second], format="ogg", options={"serial_offset": "5"}
    )
    path = tmp_path / "chained.ogg"
    path.write_bytes(data)
    for source in (path, data):
        with pytest.raises(sm.DemuxError, match="the container is damaged"):
            sm.load_audio(source)


def with_last_packet_alone(data: bytes) -> bytearray:
    """Return an MP4 of one track, with its index at the end, whose last packet is a chunk of its own."""
    changed = bytearray(data)
    sizes = data.index(b"stsz") + 12
    count, *packets = struct.unpack_from(">I48I", data, sizes)
    (start,) = struct.unpack_from(">I", data, data.index(b"stco") + 12)
    chunks = struct.pack(">III", 2, start, start + sum(packets[: count - 1]))
    groups = struct.pack(">I6I", 2, *(1, count - 1, 1), *(2, 1, 1))
    for box, content in ((b"stco", chunks), (b"stsc", groups)):
        place = changed.index(box)
        size = struct.unpack_from(">I", changed, place - 4)[0]
        changed[place + 8 : place - 4 + size] = content
        for name in (box, b"stbl", b"minf", b"mdia", b"trak", b"moov"):
            at = changed.index(name) - 4
            stated = struct.unpack_from(">I", changed, at)[0]
            struct.pack_into(">I", changed, at, stated + len(content) + 12 - size)
    return changed


def test_an_mp4_whose_index_leads_beyond_its_end_and_back_is_cut_short(tmp_path: Path) -> None:
    track = AudioTrack(samples=sound(), sample_rate=RATE, codec="aac")
    data = with_last_packet_alone(made_whole := make_media([track], format="mp4"))
    path = tmp_path / "sound.m4a"
    path.write_bytes(data)
    np.testing.assert_array_equal(sm.load_audio(path).array, sm.load_audio(made_whole).array)
    (size,) = struct.unpack_from(">I", data, place := data.index(b"stsz") + 16 + 4 * 24)
    struct.pack_into(">I", data, place, size + len(data))
    path.write_bytes(data)
    for source in (path, bytes(data)):
        with pytest.raises(sm.DecodeError, match="cut short: the data ends inside a packet"):
            sm.load_audio(source)


def test_an_image_in_the_metadata_of_an_avif_is_complete() -> None:
    picture = index_frames(1, 64, 48)[0]
    data = make_in_idat(picture)
    want = sm.load_image(make_image(picture, codec="libsvtav1"))
    np.testing.assert_array_equal(sm.load_image(data), want)
    with pytest.raises(sm.MediaError, match=r"cut short|ends"):
        sm.load_image(data[:-1])


def test_mp3_frame_sizes_are_those_of_the_frames(media_dir: Path) -> None:
    rates = (8000, 11025, 16000, 22050, 32000, 44100, 48000)
    make = partial(make_audio, sound(), codec="libmp3lame", format="mp3", bit_rate=64000)
    files = [media_dir / "audio" / "nasa_16k.mp3", *map(make, rates)]
    for file in files:
        packets = av_packets(sm.demux_audio(file))
        assert len(packets) > 20
        assert [mp3_frame_size(bytes(packet)[:4]) for packet in packets] == [
            packet.size for packet in packets
        ]


@pytest.mark.parametrize("header", [b"", b"\xff\xfb", b"RIFF", b"\xff\xfb\xf0\0", b"\xff\xfb\0\0"])
def test_other_bytes_than_an_mp3_header_have_no_size(header: bytes) -> None:
    assert mp3_frame_size(header) is None


def test_real_media_are_complete(media_dir: Path) -> None:
    for path in sorted(media_dir.glob("*o/*")):
        if path.name in ("truncated.mp4", "corrupt_middle.ts"):
            continue
        info = sm.probe(path)
        if info.video:
            assert not sm.demux_video(path)._metadata.incomplete, path
        if info.audio:
            assert not sm.demux_audio(path)._metadata.incomplete, path
