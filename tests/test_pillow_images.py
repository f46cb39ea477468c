"""Images that FFmpeg reads wrongly or not at all are read by Pillow, through the same functions."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from effort import each
from heif_grid import make_in_idat
from still_metadata import png_chunk

import spdl_media as sm

Image = pytest.importorskip("PIL.Image")
Array = np.ndarray[Any, Any]


def slopes(width: int = 24, height: int = 16) -> Array:
    """Make RGBA in which all channels and axes differ."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, 255 - x, 64 + y * 0.7], axis=-1).astype(np.uint8)


def saved(mode: str, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture = Image.fromarray(slopes())
    if mode == "LAB":
        cms = pytest.importorskip("PIL.ImageCms")
        profiles = cms.createProfile("sRGB"), cms.createProfile("LAB")
        picture = cms.profileToProfile(picture.convert("RGB"), *profiles, outputMode="LAB")
    elif mode != "RGBA":
        picture = picture.convert("RGB").convert(mode) if mode != "LA" else picture.convert("LA")
    picture.save(file, format, **options)
    return file.getvalue()


def by_pillow(data: bytes) -> Array:
    with Image.open(io.BytesIO(data)) as image:
        if image.mode == "LAB":
            from PIL import ImageCms

            profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
            return np.asarray(
                ImageCms.profileToProfile(image, *profiles, outputMode="RGB").convert("RGBA")
            )
        if image.mode == "La":  # Pillow has no conversion from this mode to RGBA
            return np.asarray(image.convert("LA").convert("RGBA"))
        return np.asarray(image.convert("RGBA"))


def cursor() -> bytes:
    """Make an icon of one BMP, marked as a cursor, with planes and bits in the fields of its hot spot."""
    icon = bytearray(saved("RGBA", "ICO", sizes=[(24, 16)], bitmap_format="bmp"))
    icon[2] = 2
    return bytes(icon)


def big_endian_tiles() -> bytes:
    """Make a TIFF of two tiles of 16x16 gray pixels, because Pillow does not write tiles."""
    pixels = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(16, 32)
    tags = [(256, 32), (257, 16), (258, 8), (259, 1), (262, 1), (277, 1), (322, 16), (323, 16)]
    head = bytearray(b"MM\0*" + (8).to_bytes(4, "big") + (len(tags) + 2).to_bytes(2, "big"))
    for tag, value in tags:
        head += tag.to_bytes(2, "big") + b"\0\3\0\0\0\1" + value.to_bytes(2, "big") + b"\0\0"
    behind = len(head) + 2 * 12 + 4
    head += (324).to_bytes(2, "big") + b"\0\4\0\0\0\2" + behind.to_bytes(4, "big")
    head += (325).to_bytes(2, "big") + b"\0\4\0\0\0\2" + (behind + 8).to_bytes(4, "big") + bytes(4)
    for number in (behind + 16, behind + 16 + 256, 256, 256):
        head += number.to_bytes(4, "big")
    return bytes(head) + pixels[:, :16].tobytes() + pixels[:, 16:].tobytes()


def tiff(
    tags: dict[int, int], bits: tuple[int, ...], *strips: bytes, order: Literal["<", ">"] = "<"
) -> bytes:
    """Make a TIFF of 4x2 pixels, with other tags (0: without), all of type LONG."""
    usual = {256: 4, 257: 2, 259: 1, 277: len(bits), 278: 2}
    values = {tag: (value,) for tag, value in (usual | tags).items() if value}
    rows = values | {258: bits, 273: (0,) * len(strips), 279: tuple(map(len, strips))}
    place = 8 + 2 + 12 * len(rows) + 4
    start = place + sum(4 * len(row) for row in rows.values() if len(row) > 1)
    rows[273] = tuple(accumulate(rows[279][:-1], initial=start))
    directory, arrays = struct.pack(order + "H", len(rows)), b""
    for tag, row in sorted(rows.items()):
        numbers = struct.pack(f"{order}{len(row)}I", *row)
        value = numbers if len(row) == 1 else struct.pack(order + "I", place + len(arrays))
        arrays += numbers if len(row) > 1 else b""
        directory += struct.pack(order + "HHI", tag, 4, len(row)) + value
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8)
    return head + directory + bytes(4) + arrays + b"".join(strips)


def old_lzw(data: bytes) -> bytes:
    """Code each byte in 9 bits, the least significant first, between the codes to clear and to end."""
    codes = (256, *data, 257)
    bits = sum(code << 9 * index for index, code in enumerate(codes))
    return bits.to_bytes(-(-9 * len(codes) // 8), "little")


def dds(flags: int, bits: int, masks: tuple[int, ...], pixels: bytes, dxgi: int = 0) -> bytes:
    """Make a DDS of 4x4 pixels, with the header of DirectX 10 if a format is given."""
    kind = b"DX10" if dxgi else bytes(4)
    head = struct.pack("<4s7I44x", b"DDS ", 124, 0x100F, 4, 4, len(pixels) // 4, 0, 0)
    head += struct.pack("<2I4s5I", 32, flags, kind, bits, *masks) + struct.pack(
        "<5I", 0x1000, 0, 0, 0, 0
    )
    return head + (struct.pack("<5I", dxgi, 3, 0, 1, 0) if dxgi else b"") + pixels


def bmp_without_place_for_its_palette() -> bytes:
    data = bytearray(saved("P", "BMP"))
    data[10:14] = struct.pack("<I", 54)
    return bytes(data)


def bmp_with_masks() -> bytes:
    """Make a BMP of 32 bits per pixel, with three masks in a header that FFmpeg does not support."""
    masks = struct.pack("<3I", 0xFF0000, 0xFF00, 0xFF)
    head = struct.pack("<IiiHHIIiiII", 52, 4, 2, 1, 32, 3, 32, 2835, 2835, 0, 0) + masks
    return struct.pack("<2sIHHI", b"BM", 14 + 52 + 32, 0, 0, 66) + head + NUMBERS[:32]


def jp2_with(mode: str, colors: tuple[int, ...]) -> bytes:
    """Make a JPEG 2000 with alpha whose channels are associated with other colours (0: the whole image)."""
    data = saved(mode, "JPEG2000")

    def channels(colors: Sequence[int]) -> bytes:
        return b"".join(struct.pack(">3H", i, 0, color) for i, color in enumerate(colors))

    usual = channels(range(1, len(colors) + 1))
    assert usual in data
    return data.replace(usual, channels(colors))


def jp2_with_metadata(num_boxes: int) -> bytes:
    """Make a JPEG 2000 with boxes of metadata before its code stream, as Photoshop writes them."""
    data = saved("RGB", "JPEG2000")
    start = data.index(b"jp2c") - 4
    return data[:start] + (struct.pack(">I4s", 24, b"uuid") + bytes(16)) * num_boxes + data[start:]


def image_in_a_sequence() -> bytes:
    """Make a file of type msf1, whose image is larger than the frames of its track, as bursts have it."""
    image = make_in_idat(slopes(64, 48)[..., :3]).replace(b"ftypavif", b"ftypmsf1")
    video = sm.testing.make_video(sm.testing.index_frames(4, 32, 16), codec="libx264", format="mp4")
    return image + video[int.from_bytes(video[:4], "big") :]


def numbered_cmyk() -> bytes:
    """Make a JPEG of CMYK whose components have numbers, without the segment of Adobe's marker."""
    data = saved("CMYK", "JPEG")
    start = data.index(b"\xff\xee")
    data = data[:start] + data[start + 2 + data[start + 3] :]
    for between in (b"\x11\0", b"\0"):  # in the headers of the frame and of the scan
        data = data.replace(
            between.join((b"C", b"M", b"Y", b"K")), between.join((b"\1", b"\2", b"\3", b"\4"))
        )
    return data


def with_adobe(jpeg: bytes, transform: int | None) -> bytes:
    """Return a JPEG whose first segment is Adobe's marker with this transform, or is missing."""
    body = (
        b"" if transform is None else b"\xff\xee\0\x0eAdobe\0\x64" + bytes(4) + bytes([transform])
    )
    return jpeg[:2] + body + jpeg[4 + int.from_bytes(jpeg[4:6], "big") :]


NUMBERS = bytes(range(0, 256, 8)) * 4
FILES: dict[str, Callable[[], bytes]] = {
    "TIFF, JPEG": lambda: saved("RGB", "TIFF", compression="jpeg"),
    "TIFF, JPEG, gray": lambda: saved("L", "TIFF", compression="jpeg"),
    "TIFF, LZMA": lambda: saved("RGB", "TIFF", compression="lzma"),
    "TIFF, YCbCr": lambda: saved("YCbCr", "TIFF"),
    "TIFF, Lab": lambda: saved("LAB", "TIFF"),
    "TIFF, big": lambda: saved("RGBA", "TIFF", big_tiff=True),
    "TIFF, tiles": big_endian_tiles,
    "TIFF, no rows per strip": lambda: tiff({262: 2, 278: 0}, (8,) * 3, NUMBERS[:24]),
    "TIFF, old LZW": lambda: tiff({262: 2, 259: 5}, (8,) * 3, old_lzw(NUMBERS[:24])),
    "TIFF, predictor without LZW": lambda: saved("RGB", "TIFF", tiffinfo={317: 2}),
    "TIFF, one plane": lambda: tiff({262: 1, 284: 2}, (8,), NUMBERS[:8]),
    "TIFF, associated alpha": lambda: tiff({262: 2, 338: 1}, (8,) * 4, b"\x10\x20\x30\x40" * 8),
    "TIFF, gray and associated alpha": lambda: tiff({262: 1, 338: 1}, (8,) * 2, b"\x10\x40" * 8),
    "DDS, red first": lambda: dds(4, 0, (0,) * 4, NUMBERS[:64], dxgi=28),
    "DDS, 16 bits": lambda: dds(0x40, 16, (0x7C00, 0x3E0, 0x1F, 0), b"\xff\x7f" * 16),
    "DDS, palette": lambda: dds(0x20, 24, (0,) * 4, NUMBERS * 8 + NUMBERS[:16]),
    "BMP, header of 52 bytes": bmp_with_masks,
    "BMP, palette": bmp_without_place_for_its_palette,
    "JPEG, CMYK 4:2:0": lambda: saved("CMYK", "JPEG", subsampling=2),
    "JPEG, CMYK of numbers": numbered_cmyk,
    "JPEG, RGB 4:2:2": lambda: with_adobe(saved("RGB", "JPEG", subsampling=1), 0),
    "JPEG, RGB 4:2:0": lambda: (
        with_adobe(saved("RGB", "JPEG", subsampling=2), None)
        .replace(b"\1\x22\0", b"R\x22\0")
        .replace(b"\2\x11\1\3\x11\1", b"G\x11\1B\x11\1")
        .replace(b"\1\0\2\x11\3\x11\0", b"R\0G\x11B\x11\0")
    ),
    "JPEG 2000, CMYK": lambda: saved("CMYK", "JPEG2000"),
    "JPEG 2000, CMYK of some precision": lambda: saved("CMYK", "JPEG2000").replace(
        b"colr\1\0\0", b"colr\1\2\1"
    ),
    "JPEG 2000, unnamed gray": lambda: jp2_with("LA", (0,)),
    "JPEG 2000, blue first": lambda: jp2_with("RGBA", (3, 2, 1)),
    "JPEG 2000, nine boxes of metadata": lambda: jp2_with_metadata(9),
    "PNG, one bit and transparency": lambda: saved("1", "PNG", transparency=1),
    "Sun raster": lambda: struct.pack(">8I", 0x59A66A95, 4, 2, 24, 24, 1, 0, 0) + NUMBERS[:24],
    "SGI, one row": lambda: struct.pack(">3H3H500x", 0x1DA, 1, 1, 24, 1, 1) + NUMBERS[:24],
    "ICO": lambda: saved("RGBA", "ICO", sizes=[(16, 10), (24, 16)]),
    "ICNS": lambda: saved("RGBA", "ICNS"),
    "CUR": cursor,
    "BLP": lambda: saved("P", "BLP", blp_version="BLP2"),
    "XBM": lambda: saved("1", "XBM"),
    "AVIF, alpha": lambda: saved("RGBA", "AVIF"),
    "AVIF, image and sequence": image_in_a_sequence,
    "AVIF, full range": lambda: make_in_idat(
        slopes(64, 48)[..., :3], struct.pack(">3HB", 2, 2, 2, 0x80)
    ),
}


@each("kind", FILES)
def test_images_that_ffmpeg_reads_wrongly_equal_pillows(kind: str) -> None:
    data = FILES[kind]()
    pixels = sm.load_image(data, pix_fmt="rgba").array
    np.testing.assert_array_equal(pixels, by_pillow(data))
    stream = sm.probe(data).video
    assert stream is not None
    assert (stream.height, stream.width) == pixels.shape[:2]


def test_a_tiff_of_12_bits_has_its_brightness() -> None:
    # With a predictor, FFmpeg does not decode it.
    values = np.array([[0, 1, 2048, 4095], [100, 100, 1000, 1000]])
    packed = bytes.fromhex("".join(f"{value:03x}" for value in values.flat))
    (found,) = sm.load_image(tiff({262: 1, 317: 2}, (12,), packed), pix_fmt="gray16le").array
    np.testing.assert_array_equal(found, values * 16 + values // 256)


def test_zero_is_white_in_a_tiff_of_16_bits_that_says_so() -> None:
    values = np.arange(0, 65536, 9000, dtype=np.uint16).reshape(2, 4)
    # Pillow reads it, because it does not state the rows of a strip, but does not invert it.
    data = tiff({262: 1, 278: 0}, (16,), values.tobytes())
    data = data.replace(struct.pack("<HHII", 262, 4, 1, 1), struct.pack("<HHII", 262, 4, 1, 0))
    (found,) = sm.load_image(data, pix_fmt="gray16le").array
    np.testing.assert_array_equal(found, 65535 - values)


def test_ffmpeg_reads_a_tiff_of_floats_with_a_predictor() -> None:
    # Pillow cannot read colours of floats.
    values = np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 12)
    # The most significant bytes of a row come first. Each byte is coded as the difference to its neighbour's.
    rows = values.astype(">f4").view(np.uint8).reshape(2, 12, 4).transpose(0, 2, 1).reshape(2, 48)
    rows[:, 3:] -= rows[:, :-3].copy()
    tags = {262: 2, 259: 8, 317: 3, 339: 3}
    frame = sm.decode_packets(sm.demux_image(tiff(tags, (32,) * 3, zlib.compress(rows))), None)
    np.testing.assert_array_equal(frame.planes[0].reshape(2, 12), values)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("compression", "code"), [(1, bytes), (8, zlib.compress)])
def test_pillow_reads_numbers_of_either_byte_order(
    order: Literal["<", ">"], compression: int, code: Callable[[bytes], bytes]
) -> None:
    values = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
    gray = code(values.astype(order + "f4").tobytes())
    data = tiff({262: 1, 259: compression, 339: 3}, (32,), gray, order=order)
    (found,) = sm.decode_packets(sm.demux_image(data), None).planes
    np.testing.assert_array_equal(found, values)
    planes = np.arange(32, dtype=np.uint8).reshape(4, 2, 4) * 8
    strips = [code((plane * 257).astype(order + "u2").tobytes()) for plane in planes.astype(int)]
    data = tiff({262: 2, 259: compression, 284: 2, 338: 2}, (16,) * 4, *strips, order=order)
    found = sm.load_image(data, pix_fmt="rgba").array
    np.testing.assert_array_equal(found, planes.transpose(1, 2, 0))
    data = tiff({262: 1, 259: compression, 284: 2}, (16,), strips[0], order=order)
    (found,) = sm.load_image(data, pix_fmt="gray16le").array
    np.testing.assert_array_equal(found, planes[0].astype(int) * 257)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_transparent_gray_of_a_png_is_transparent(bits: int) -> None:
    # Both libraries alone lose it, because they compare it with the gray of 8 bits.
    white = 2**bits - 1
    row = b"\0" + (1 << bits | white).to_bytes(1, "big")
    chunks = {
        b"IHDR": struct.pack(">II5B", 2, 1, bits, 0, 0, 0, 0),
        b"tRNS": b"\0\1",
        b"IDAT": zlib.compress(row if bits == 4 else row[:1] + bytes([row[1] << 4])),
        b"IEND": b"",
    }
    data = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks.items())
    gray = 255 // white
    pixels = sm.load_image(data, pix_fmt="rgba").array
    assert pixels.tolist() == [[[gray, gray, gray, 0], [255] * 4]]


def test_comments_among_the_numbers_of_a_pnm_are_no_numbers() -> None:
    rows = (
        (b"P1 2 2 0 1 # 1 1\n1 0\n", [255, 0, 0, 255]),
        (b"P2 2 2 9 0 9 # 5 5\n9 0\n", [0, 255, 255, 0]),
        (b"P3\n# by a program\n1 2 255 9 8 7 # 5\n9 8 7\n", [8, 8]),
    )
    for data, want in rows:
        assert sm.load_image(data).array[..., 1].ravel().tolist() == want, data


def test_a_jpeg_2000_cut_before_its_code_stream_needs_no_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = saved("RGB", "JPEG2000")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(sm.DecodeError):
        sm.load_image(data[: data.index(b"jp2c") - 4])


class OneWay(io.BytesIO):
    """A source that cannot seek, as a pipe."""

    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("kind", ["TIFF, tiles", "BMP, palette", "JPEG, CMYK 4:2:0", "ICO"])
def test_a_source_that_cannot_seek_gives_the_same_pixels(kind: str) -> None:
    data = FILES[kind]()
    np.testing.assert_array_equal(
        sm.load_image(OneWay(data), pix_fmt="rgba").array, by_pillow(data)
    )


def test_what_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gif, cursor = saved("P", "GIF"), FILES["CUR"]()
    damaged_animation = animation("PNG")[0].replace(b"IHDR\0", b"IHDR\1", 1)
    rows = (
        (gif[:6] + bytes(4) + gif[10:], "begins as a GIF, but FFmpeg cannot open it"),
        (
            saved("RGBA", "DDS", pixel_format="DXT1").replace(b"DXT1", b"ABCD"),
            "a DDS: Unimplemented",
        ),
        (b"\xff\x0a" + bytes(40), "begins as a JPEG XL"),
        (b"\0\0\0\x10ftypmif3avif" + bytes(40), "begins as a minimized HEIF or AVIF"),
        (
            tiff({262: 1, 339: 2}, (16,), bytes(16)),
            "signed or floating 16-bit numbers: its pixels are 32-bit integers",
        ),
        # FFmpeg takes three of them for floating numbers, without an error.
        (tiff({262: 2}, (32,) * 3, bytes(96)), "a TIFF of 32-bit integers"),
        (tiff({262: 2, 339: 3}, (32,) * 4, bytes(128)), "made of one of 4x2 rgbaf32"),
        (cursor[:100], "Pillow cannot decode a cursor"),
        (saved("P", "BLP", blp_version="BLP2")[:200], "Pillow cannot decode a BLP"),
        (damaged_animation, "an animated PNG: cannot identify image file$"),
    )
    for data, message in rows:
        with pytest.raises((sm.DemuxError, sm.DecodeError, sm.FilterError), match=message):
            sm.load_image(data)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(sm.MissingDependencyError, match="a cursor needs pillow"):
        sm.load_image(cursor)


def test_chroma_of_heic_lies_where_its_codec_says(rng: np.random.Generator) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    pixels = rng.integers(0, 256, (64, 64, 3), np.uint8)
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(file, quality=90, chroma="420")
    packets = sm.demux_image(file.getvalue())
    # A text that was joined is run as a graph, which reads the location from the frame.
    by_graph = sm.decode_packets(packets, "null," + sm.get_video_filter_desc(quality="accurate"))
    loaded = sm.to_numpy(sm.load_image(file.getvalue()))
    np.testing.assert_array_equal(loaded, sm.to_numpy(sm.convert_frames(by_graph)))


@pytest.mark.parametrize(("size", "mode"), [((7, 5), "RGB"), ((33, 21), "RGBA"), ((64, 48), "L")])
def test_heic_that_is_cropped_or_has_alpha(size: tuple[int, int], mode: str) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    picture = Image.fromarray(slopes(*size)).convert(mode)
    pillow_heif.from_pillow(picture).save(file, quality=90)
    pillow_heif.register_heif_opener()
    found = sm.load_image(file.getvalue(), pix_fmt="rgba").array
    wanted = by_pillow(file.getvalue())
    assert found.shape == wanted.shape
    assert np.abs(found.astype(int) - wanted).max() <= 2


def animation(format: str, **options: Any) -> tuple[bytes, list[Array]]:
    pictures = [np.roll(slopes(), 5 * index, axis=1) for index in range(4)]
    first, *others = map(Image.fromarray, pictures)
    file = io.BytesIO()
    first.save(
        file, format, save_all=True, append_images=others, duration=[40, 80, 40, 120], **options
    )
    return file.getvalue(), pictures


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("PNG", {}),
        ("PNG", {"disposal": 1, "blend": 1}),
        ("PNG", {"default_image": True}),
        ("WEBP", {"lossless": True, "exact": True}),
    ],
)
def test_animations_give_their_frames_at_their_times(format: str, options: dict[str, Any]) -> None:
    data, pictures = animation(format, **options)
    still = pictures[0]
    if options.get("default_image"):
        pictures = pictures[1:]
    if not options.get("blend"):
        frames = sm.load_video(data, pix_fmt="rgba", quality="accurate")
        np.testing.assert_array_equal(frames.array, pictures)
        np.testing.assert_array_equal(sm.load_image(data, pix_fmt="rgba").array, still)
    frames = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    assert len(frames) == len(pictures)
    steps = [40, 80, 40, 120][: len(frames)]
    assert np.diff(frames.timestamps) * 1000 == pytest.approx(steps[:-1])
    # The last one, too, is shown for its time.
    assert len(sm.load_video(data, frame_rate=25)) == sum(steps) // 40
    window = sm.demux_video(data, timestamp=(frames.timestamps[1], frames.timestamps[-1]))
    assert sm.decode_packets(window).timestamps == frames.timestamps[1:-1]
    assert len(sm.decode_packets(sm.demux_video(data), num_frames=2)) == 2


def test_images_of_a_gif_without_delays_are_frames() -> None:
    """FFmpeg takes them for one frame, and shows the first."""
    pictures = [np.roll(slopes()[..., 0], 5 * number, axis=1) for number in range(3)]
    files = []
    for picture in pictures:  # of one palette
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "GIF")
        files.append(file.getvalue())
    start = 13 + (3 << (files[0][10] & 7) + 1)
    first, second, third = (data[start:-1] for data in files)
    control = b"\x21\xf9\4\0\5\0\0\0"
    for images, seconds in (
        ((first, second, third), (0, 0.1, 0.2)),
        ((control, first, control, second, third), (0, 0.05, 0.1)),
        ((first, control, second, control, third), (0, 0.1, 0.15)),
    ):
        data = b"".join((files[0][:start], *images, b";"))
        frames = sm.decode_packets(sm.demux_video(data), sm.get_video_filter_desc(pix_fmt="gray"))
        np.testing.assert_array_equal([frame.planes[0] for frame in frames], pictures)
        assert frames.timestamps == pytest.approx(seconds)
        np.testing.assert_array_equal(sm.load_image(data).array[..., 1], pictures[0])


def test_orientation_and_sizes_are_those_of_other_images() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved("RGB", "TIFF", compression="jpeg", exif=exif)
    plain = by_pillow(saved("RGB", "TIFF", compression="jpeg"))[..., :3]
    np.testing.assert_array_equal(sm.load_image(data).array, np.rot90(plain, -1))
    assert sm.load_image(data, width=8, height=8).shape == (8, 8, 3)
    config = sm.decode_config(decoder="pillow")
    jpeg = sm.demux_image(saved("RGB", "JPEG", exif=exif))
    assert sm.decode_packets(jpeg, decode_config=config).width == 16
    assert sm.decode_packets(jpeg, filter_desc=None, decode_config=config).rotation == 90
    upright = sm.decode_config(decoder="pillow", orient=False)
    assert sm.decode_packets(jpeg, decode_config=upright).width == 24


def test_pillow_can_be_asked_for(tmp_path: Path) -> None:
    data = saved("RGB", "PNG")
    config = sm.decode_config(decoder="pillow")
    np.testing.assert_array_equal(
        sm.load_image(data, decode_config=config).array, slopes()[..., :3]
    )
    path = tmp_path / "text.jpg"
    path.write_bytes(b"\xff\xd8\xff" + bytes(50))
    with pytest.raises(
        sm.DecodeError, match=r"text\.jpg: Pillow cannot decode the image"
    ) as caught:
        sm.load_image(path, decode_config=config)
    assert caught.value.source == str(path)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved("RGB", "TIFF", compression="jpeg")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    wanted = r"a TIFF with compression 7 needs pillow.*pip install .*stills"
    with pytest.raises(sm.MissingDependencyError, match=wanted):
        sm.load_image(data)


def test_damage_is_an_error_that_names_the_source() -> None:
    data = saved("RGB", "TIFF", compression="jpeg")
    cut = data[: len(data) // 2] if data[4:8] == b"\x08\0\0\0" else data[:-40]
    with pytest.raises(sm.MediaError, match=f"bytes of length {len(cut)}"):
        sm.load_image(cut)


def test_one_demuxer_serves_many_reads_of_an_animation() -> None:
    data, pictures = animation("PNG")
    with sm.Demuxer(data) as demuxer:
        for _ in range(2):
            frames = sm.decode_packets(
                demuxer.demux_video(), sm.get_video_filter_desc(pix_fmt="rgba")
            )
            np.testing.assert_array_equal(sm.convert_frames(frames).array, pictures)
            assert len(sm.decode_packets(demuxer.demux_video((0.05, 0.13)))) == 1
    packets = pickle.loads(pickle.dumps(sm.demux_video(data)))
    assert len(sm.decode_packets(packets)) == len(pictures)
    with pytest.raises(sm.DecodeError, match=r"an animation whole.* load_video"):
        sm.VideoDecoder(sm.demux_video(data).codec)


@pytest.mark.parametrize("format", ["TIFF", "PNG"])
def test_probe_tells_the_size(format: str) -> None:
    data = saved("RGB", "TIFF", compression="jpeg") if format == "TIFF" else animation("PNG")[0]
    video = sm.probe(data).video
    assert video is not None
    assert (video.width, video.height) == (24, 16)


def test_gray_of_limited_range_is_spread() -> None:
    """FFmpeg's scaler assumes full range for gray formats, but an AVIF of one channel states its range."""
    file = io.BytesIO()
    levels = Image.fromarray(slopes(64, 48)).convert("L")
    levels.save(file, "AVIF", quality=100, subsampling="4:0:0", range="limited")
    frames = sm.decode_packets(sm.demux_image(file.getvalue()), filter_desc=None)
    assert (frames.pix_fmt, frames.color_range) == ("gray", "tv")
    found = sm.load_image(file.getvalue(), pix_fmt="gray").array[..., 0].astype(int)
    assert np.abs(found - np.asarray(levels)).max() <= 2
    small = sm.load_image(file.getvalue(), width=32, height=24).array
    assert abs(small.mean() - np.asarray(levels).mean()) < 1


def test_jpeg_2000_of_ycc_is_of_full_range() -> None:
    data = saved("YCbCr", "JPEG2000")
    frames = sm.decode_packets(sm.demux_image(data), filter_desc=None)
    assert (frames.pix_fmt, frames.color_range) == ("yuv444p", "pc")
    assert np.abs(sm.load_image(data).array.astype(int) - by_pillow(data)[..., :3]).max() <= 2


def test_filters_give_what_they_hold_back_at_the_end_of_a_window() -> None:
    packets = sm.demux_video(animation("PNG")[0], timestamp=(0, 0.1))
    assert len(sm.decode_packets(packets, sm.get_video_filter_desc(num_frames=5))) == 5


@pytest.mark.parametrize("mode", ["LA", "16 bits"])
def test_tga_of_16_bits_is_gray_and_alpha_or_five_bits_a_colour(mode: str, tmp_path: Path) -> None:
    data = saved("LA", "TGA")
    if mode == "16 bits":
        data = struct.pack("<3B9x2H2B", 0, 0, 2, 4, 4, 16, 32) + b"\xff\x7f\x1f\0" * 8
    path = tmp_path / "picture.tga"
    path.write_bytes(data)
    np.testing.assert_array_equal(sm.load_image(path, pix_fmt="rgba").array, by_pillow(data))


@pytest.mark.parametrize("make", [big_endian_tiles, lambda: animation("WEBP")[0]])
def test_an_image_that_pillow_reads_is_no_video_file(make: Callable[[], bytes]) -> None:
    with pytest.raises(sm.DemuxError, match="Pillow reads this image, so its frames have no index"):
        sm.VideoFile(make())
