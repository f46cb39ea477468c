"""Stills: the decoder of a file, the detection of truncated files, and FFmpeg's own checks."""

from __future__ import annotations

import io
import re
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from av.codec.context import CodecContext
from effort import each
from hypothesis import given
from hypothesis import strategies as st
from still_metadata import avif_with_properties, box, gray_tiff, png_chunk, riff_chunk, webp_form

import spdl_media as sm
from spdl_media.parts import MAX_PARTS
from spdl_media.still_parts import check_complete
from spdl_media.stills import ERR_DETECT, HEAD_SIZE, STILL_FORMATS, still_codec
from spdl_media.testing import index_planes, make_image, make_video

RGB = np.random.default_rng(5).integers(0, 256, (24, 33, 3), dtype=np.uint8)
SMOOTH = np.stack(
    [np.tile(np.arange(40, dtype=np.uint8) // 8 * 30, (24, 1))] * 3, axis=2
)  # Has runs, for run-length coding.


@cache
def made(codec: str, pix_fmt: str | None = None, smooth: bool = False) -> bytes:
    return make_image(SMOOTH if smooth else RGB, codec=codec, pix_fmt=pix_fmt)


def bmp(header: bytes, pixels: bytes, *, file_size: int | None = None) -> bytes:
    offset = 14 + len(header)
    size = offset + len(pixels) if file_size is None else file_size
    return b"BM" + struct.pack("<IHHI", size, 0, 0, offset) + header + pixels


def bmp_24(rows: bytes, width: int, height: int, file_size: int | None = None) -> bytes:
    header = struct.pack("<IiiHHIIIIII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return bmp(header, rows, file_size=file_size)


def bmp_runs(size: int, tail: bytes) -> bytes:
    """Make a BMP of a row of four equal 8-bit pixels, run-length coded, with a palette of two colours."""
    header = struct.pack("<IiiHHIIIIII", 40, 4, 1, 1, 8, 1, size, 0, 0, 2, 2)
    return bmp(header + b"\0\0\0\0\xff\xff\xff\0", b"\x04\x01" + tail)


def targa_runs(runs: bytes, width: int = 4, height: int = 2) -> bytes:
    """Make a gray, run-length coded TGA."""
    return struct.pack("<BBBHHBHHHHBB", 0, 0, 11, 0, 0, 0, 0, 0, width, height, 8, 0x20) + runs


TARGA_FOOTER = bytes(8) + b"TRUEVISION-XFILE.\0"


FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "jpeg": ("mjpeg", lambda: made("mjpeg")),
    "jpeg, lossless": ("mjpeg", lambda: made("ljpeg", "yuvj444p")),
    "jpeg-ls": ("jpegls", lambda: made("jpegls", "rgb24")),
    "png": ("png", lambda: made("png")),
    "webp, lossless": ("webp", lambda: made("libwebp")),
    "webp, lossy": ("webp", lambda: made("libwebp", "yuv420p")),
    "bmp": ("bmp", lambda: made("bmp")),
    "tiff": ("tiff", lambda: made("tiff")),
    "tiff, directory first": ("tiff", lambda: gray_tiff(RGB[:, :, 0])),
    "tiff, directory first, big-endian": ("tiff", lambda: gray_tiff(RGB[:, :, 0], order=">")),
    "ppm": ("ppm", lambda: made("ppm")),
    "pgm": ("pgm", lambda: made("pgm", "gray")),
    "pam": ("pam", lambda: made("pam")),
    "pfm": ("pfm", lambda: made("pfm", "gbrpf32le")),
    "jp2": ("jpeg2000", lambda: made("jpeg2000", "rgb24")),
    "qoi": ("qoi", lambda: made("qoi")),
    "dpx": ("dpx", lambda: made("dpx", "rgb24")),
    "exr": ("exr", lambda: made("exr", "gbrpf32le")),
    "sgi": ("sgi", lambda: made("sgi", smooth=True)),
    "gif": ("gif", lambda: made("gif")),
    "avif": ("avif", lambda: made("libsvtav1", "yuv420p")),
    "apng": ("apng", lambda: made("apng")),
    "tga": ("targa", lambda: made("targa", smooth=True)),
    "tga, with a footer": ("targa", lambda: made("targa", smooth=True) + TARGA_FOOTER),
}
IN_CONTAINERS = ("gif", "avif", "apng")


def decode(codec: str, data: bytes) -> list[bytes] | None:
    """Return the pixels of all frames, decoded by FFmpeg with the options of the table."""
    options = {"err_detect": ERR_DETECT[codec]} if codec in ERR_DETECT else {}
    try:
        if codec in IN_CONTAINERS:
            with av.open(io.BytesIO(data)) as container:
                container.streams.video[0].codec_context.options = options
                frames = list(container.decode(video=0))
        else:
            context = CodecContext.create(codec, "r")
            context.thread_count = 1
            context.options = options
            frames = [*context.decode(av.Packet(data)), *context.decode(None)]
    except (av.error.FFmpegError, IndexError):
        return None
    return [frame.to_ndarray(format="rgb24").tobytes() for frame in frames] or None


def silent_cuts(codec: str, data: bytes) -> list[int]:
    """Return the lengths to which a file can be cut without an error, but with a different image."""
    whole = decode(codec, data)
    step = max(1, len(data) * 7 // 100)
    lengths = {*range(0, len(data), step), *range(max(0, len(data) - 40), len(data))}
    silent = [n for n in sorted(lengths) if check_complete(codec, data[:n]) is None]
    return [n for n in silent if decode(codec, data[:n]) not in (None, whole)]


@each("name", FILES)
def test_codec(name: str) -> None:
    codec, make = FILES[name]
    # An animated PNG of one frame is a PNG.
    expected = {"apng": "png", "gif": None, "avif": None}.get(codec, codec)
    assert still_codec(make()) == expected
    if name not in ("png", "apng"):
        assert still_codec(make()[:32]) == expected


@each("name", FILES)
def test_whole_files_pass(name: str) -> None:
    codec, make = FILES[name]
    data = make()
    assert decode(codec, data) is not None
    for kind in (bytes, bytearray, memoryview):
        assert check_complete(codec, kind(data)) is None
    assert check_complete(codec, data + b"\0trailing bytes \xff\xd8\xff") is None


@each("name", FILES)
def test_no_cut_goes_unnoticed(name: str) -> None:
    codec, make = FILES[name]
    assert silent_cuts(codec, make()) == []


@each(
    "name, length, message",
    [
        ("jpeg", -1, "before the end-of-image marker"),
        ("jpeg", 60, "but a segment with marker 0xFFDB should end at byte"),
        ("jpeg-ls", -2, "before the end-of-image marker"),
        ("png", -12, "before the chunk IEND"),
        ("png", 100, "but the chunk IDAT should end at byte"),
        ("apng", -3, "but the chunk IEND should end at byte"),
        ("webp, lossless", -1, "but the RIFF form should end at byte"),
        ("bmp", -1, "but the last row should end at byte"),
        ("qoi", -1, "before the end marker"),
        ("exr", -1, "but the last of 24 blocks of rows should end at byte"),
        ("sgi", -1, "but the last of 72 rows should end at byte"),
        ("gif", -1, "before the trailer of a GIF"),
        ("avif", -1, "but the box mdat should end at byte"),
        ("avif", 20, "but the box ftyp should end at byte 32"),
        ("avif", 32, "before the boxes that hold the image"),
    ],
)
def test_messages(name: str, length: int, message: str) -> None:
    codec, make = FILES[name]
    data = make()[:length]
    found = check_complete(codec, data)
    assert found is not None
    assert found.startswith(f"the data ends after {len(data)} bytes, ")
    assert re.search(message, found)


def test_codecs_without_a_check_pass() -> None:
    assert check_complete("ppm", b"P6") is None
    assert check_complete("h264", b"") is None


@each("codec", ["mjpeg", "png", "webp", "bmp", "gif", "avif", "qoi"])
def test_no_bytes_at_all(codec: str) -> None:
    assert str(check_complete(codec, b"")).startswith("the data ends after 0 bytes")


def test_jpeg_with_several_ends() -> None:
    jpeg = made("mjpeg")
    for tail in (b"\xff\xd9", jpeg, jpeg[:-20], bytes(100), b"\xff\xff\xe1"):
        assert check_complete("mjpeg", jpeg + tail) is None


def test_jpeg_with_an_image_in_its_metadata() -> None:
    jpeg = made("mjpeg")
    preview = b"\xff\xe2" + struct.pack(">H", len(jpeg) + 2) + jpeg
    with_preview = jpeg[:2] + preview + jpeg[2:]
    assert check_complete("mjpeg", with_preview) is None
    message = check_complete("mjpeg", with_preview[:-1])
    assert message is not None
    assert "end-of-image" in message


def test_png_chunks_after_the_pixels() -> None:
    png = made("png")
    text = png_chunk(b"tEXt", b"Comment\0hello")
    assert check_complete("png", png[:-12] + text + png[-12:] + b"garbage") is None
    message = check_complete("png", png[:-12] + text[:-1])
    assert message is not None
    assert "the chunk tEXt should end" in message


def test_bmp_with_a_wrong_size_field() -> None:
    rows = bytes(range(24))
    for size in (0, 10, 10**6):
        assert check_complete("bmp", bmp_24(rows, 2, 3, file_size=size)) is None
    assert check_complete("bmp", bmp_24(rows, 2, -3)) is None


def test_bmp_without_padding_of_rows() -> None:
    assert check_complete("bmp", bmp_24(bytes(18), 2, 3)) is None
    for lost in (1, 5, 6, 7):
        cut = bmp_24(bytes(24), 2, 3)[:-lost]
        assert "the last row" in str(check_complete("bmp", cut))


def test_bmp_of_the_first_kind() -> None:
    header = struct.pack("<IHHHH", 12, 2, 3, 1, 24)
    assert check_complete("bmp", bmp(header, bytes(24))) is None
    assert "the last row" in str(check_complete("bmp", bmp(header, bytes(23))))


def test_bmp_in_runs() -> None:
    assert check_complete("bmp", bmp_runs(4, b"\0\1")) is None
    assert check_complete("bmp", bmp_runs(400, b"\0\1")) is None
    assert check_complete("bmp", bmp_runs(4, b"\0\1more")) is None
    for tail in (b"", b"\0"):
        assert "before the end-of-bitmap code" in str(check_complete("bmp", bmp_runs(4, tail)))


def test_targa_in_runs() -> None:
    whole = targa_runs(b"\x83\x10" + b"\x03abcd")
    assert check_complete("targa", whole) is None
    assert check_complete("targa", whole + TARGA_FOOTER) is None
    assert "the last run should end at byte 25" in str(check_complete("targa", whole[:-1]))
    assert "before the runs of 4 of 8 pixels" in str(check_complete("targa", whole[:20]))


def test_gif_whose_searched_part_ends_inside_the_header_of_an_image_is_a_video() -> None:
    images = [np.roll(RGB[..., 0], number, axis=1) for number in range(3)]
    data = make_video(images, codec="gif", format="gif", pix_fmt="gray")
    start = 13 + (3 << (data[10] & 7) + 1)
    blocks, rest = divmod(HEAD_SIZE - 4 - data.rindex(b"\x2c\0\0\0\0") - 3, 256)
    comment = b"\x21\xfe" + (b"\xff" + bytes(255)) * blocks + bytes([rest - 1]) + bytes(rest)
    data = data[:start] + comment + data[start:]
    assert data.startswith(b"\x2c", HEAD_SIZE - 4)
    assert len(sm.load_video(data).array) == len(sm.VideoFile(data)) == 3
    with pytest.raises(sm.DemuxError, match="FFmpeg cannot open it"):
        sm.VideoFile(data[:7])


def test_gif_with_stray_bytes_between_blocks() -> None:
    gif = made("gif")
    assert check_complete("gif", gif[:-1] + b"\0\0;") is None
    assert "trailer" in str(check_complete("gif", gif[:-1] + b"\0\0"))


@pytest.mark.parametrize("kind", ["RGB_ALPHA", "GRAYSCALE_ALPHA"])
def test_pam_with_alpha_that_ffmpeg_does_not_scale_is_damaged(kind: str) -> None:
    depth = 4 if kind == "RGB_ALPHA" else 2

    def pam(maximum: int) -> bytes:
        head = f"P7\nWIDTH 2\nHEIGHT 1\nDEPTH {depth}\nMAXVAL {maximum}\nTUPLTYPE {kind}\nENDHDR\n"
        return head.encode() + (maximum.to_bytes(1 + (maximum > 255), "big") * 2 * depth)

    for maximum in (255, 1023, 65535):
        assert sm.load_image(pam(maximum), pix_fmt="rgba").array.min() > 253
    for maximum in (1, 100, 254):
        with pytest.raises(sm.DecodeError, match=f"pam data is unsupported: .* alpha .*{maximum}"):
            sm.load_image(pam(maximum), pix_fmt="rgba")


def test_avif_whose_last_box_has_no_size_is_left_to_ffmpeg() -> None:
    data = bytearray(made("libsvtav1", "yuv420p"))
    place = data.index(b"mdat") - 4
    data[place : place + 4] = bytes(4)
    assert silent_cuts("avif", bytes(data)) == []


def test_avif_other_boxes_may_be_cut() -> None:
    assert (
        check_complete("avif", avif_with_properties([], []) + box(b"free", bytes(9))[:-2]) is None
    )


def test_animations_are_left_to_their_demuxers() -> None:
    extended = riff_chunk(b"VP8X", b"\x02\0\0\0" + bytes(6))
    assert still_codec(webp_form(extended)) is None
    still = riff_chunk(b"VP8X", b"\x10\0\0\0" + bytes(6))
    assert still_codec(webp_form(still)) == "webp"
    png = made("png")
    animated = png[:33] + png_chunk(b"acTL", bytes(8)) + png[33:]
    assert still_codec(animated) is None
    assert still_codec(png[:-12] + png_chunk(b"acTL", bytes(8)) + png[-12:]) == "png"


def test_animation_behind_a_colour_profile() -> None:
    png = made("png")
    profile = png_chunk(b"iCCP", bytes(HEAD_SIZE - 200))
    animated = png[:33] + profile + png_chunk(b"acTL", bytes(8)) + png[33:]
    assert still_codec(animated[:HEAD_SIZE]) is None
    assert still_codec(animated[:1000]) == "png"  # Too little data to recognize the format.


@each(
    "head",
    [
        b"",
        b"GIF89a",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"RIFF\0\0\0\0AVI LIST",
        b"\0\0\0\x1cftypavif",
        b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypmjp2\0\0\0\0",
        b"BM, a letter to a friend",
        b"P7 332\n#XVVERSION",
        b"P8\n",
        b"P65 is not a picture",
        b"\x01\xda\x07\x07",
        b"\0\0\2" + bytes(9) + b"\1\0\1\0\x17\0",  # as a TGA of 23 bits a pixel
        b"\0\1\2" + bytes(9) + b"\1\0\1\0\x18\0",  # of colours and a palette
        b"\0\0\3" + bytes(9) + b"\1\0\0\0\x08\0",  # of no rows
        b"This is text. It is long enough.",
    ],
)
def test_not_stills(head: bytes) -> None:
    assert still_codec(head.ljust(32, b"\0")) is None


def test_an_mpeg4_that_begins_like_an_icon() -> None:
    data = make_video(index_planes(3, 64, 48), codec="mpeg4", format="m4v")
    assert sm.load_video(data[data.index(b"\0\0\1\0") :]).shape == (3, 48, 64, 3)


def test_a_radiance_file_may_begin_with_its_pixel_format() -> None:
    data = make_image(RGB, codec="hdr", pix_fmt="gbrpf32le")
    assert data.startswith(b"#?RADIANCE\n")
    other = b"#?RGBE\n" + data[len("#?RADIANCE\n") :]
    np.testing.assert_array_equal(sm.load_image(other).array, sm.load_image(data).array)
    info = sm.probe(other).video
    assert info
    assert (info.codec, info.width, info.height) == ("hdr", 33, 24)


def test_names_are_decoders() -> None:
    for decoder in {*STILL_FORMATS.values(), *ERR_DETECT}:
        assert av.Codec(decoder, "r").type == "video"
    assert STILL_FORMATS["tga"] == "targa"
    assert STILL_FORMATS["jpeg_pipe"] == STILL_FORMATS["jpg"] == "mjpeg"
    pipes = [name for name in STILL_FORMATS if name.endswith("_pipe")]
    assert set(pipes) <= set(av.formats_available)


def test_explode_refuses_whole_tiffs() -> None:
    """This is why TIFF is not in the table: FFmpeg treats an unknown tag as damage."""
    data = made("tiff")
    context = CodecContext.create("tiff", "r")
    context.options = {"err_detect": "explode"}
    with pytest.raises(av.error.InvalidDataError):
        context.decode(av.Packet(data))


def flips_noticed(name: str) -> int:
    codec, make = FILES[name]
    data, chance, noticed = make(), np.random.default_rng(3), 0
    for _ in range(20):
        damaged = bytearray(data)
        position = chance.integers(len(data) // 4, len(data) * 9 // 10)
        damaged[position] ^= 1 << int(chance.integers(8))
        noticed += decode(codec, bytes(damaged)) is None
    return noticed


@pytest.mark.parametrize("name", ["png", "apng"])
def test_flipped_bits_are_noticed(name: str) -> None:
    assert flips_noticed(name) == 20


@pytest.mark.parametrize("name", ["bmp", "ppm", "qoi", "tiff, directory first"])
def test_flipped_bits_that_nothing_notices(name: str) -> None:
    assert flips_noticed(name) == 0


@given(
    st.sampled_from(list(FILES)),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=8),
    st.integers(0, 4000),
)
def test_damage_never_raises(name: str, changes: list[tuple[int, int]], length: int) -> None:
    codec, make = FILES[name]
    damaged = bytearray(make()[:length])
    for position, value in changes:
        if position < len(damaged):
            damaged[position] = value
    still_codec(damaged)
    assert check_complete(codec, damaged) in (None, check_complete(codec, damaged))


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("mjpeg", b"\xff\xd8" + b"\xff\xe0\0\2" * (2 * MAX_PARTS)),
        ("png", b"\x89PNG\r\n\x1a\n" + bytes(12) * (2 * MAX_PARTS)),
        ("gif", b"GIF89a" + bytes(7) + b"!\0\0" * (2 * MAX_PARTS)),
        ("avif", b"\0\0\0\x08free" * (2 * MAX_PARTS)),
    ],
)
def test_files_of_empty_parts_end_soon(codec: str, data: bytes) -> None:
    begin = time.thread_time()
    check_complete(codec, data)
    assert time.thread_time() - begin < 5


def test_real_images(media_dir: Path) -> None:
    names = [
        path
        for folder in ("images_odd", "photos")
        for path in sorted((media_dir / folder).iterdir())
        if not re.search("empty|text|truncated|bitflips|huge", path.name)
    ]
    assert names
    for path in names:
        data = path.read_bytes()
        known = {".gif": "gif", ".avif": "avif", ".tga": "targa", ".webp": "webp_anim"}
        codec = still_codec(data[:HEAD_SIZE]) or known[path.suffix]
        assert check_complete(codec, data) is None, path.name
        if path.parent.name == "images_odd" and codec != "webp_anim":
            assert silent_cuts(codec, data) == [], path.name


def test_real_damage(media_dir: Path) -> None:
    folder = media_dir / "images_odd"
    assert "end-of-image" in str(check_complete("mjpeg", (folder / "truncated.jpg").read_bytes()))
    assert "the chunk IDAT" in str(check_complete("png", (folder / "truncated.png").read_bytes()))
    animated = (folder / "animated.webp").read_bytes()
    assert "the RIFF form" in str(check_complete("webp_anim", animated[:-1]))
