"""Orientation in all kinds of metadata, and the filters that apply it, compared with NumPy."""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from av.codec.context import CodecContext
from effort import each
from hypothesis import given
from hypothesis import strategies as st
from still_metadata import (
    exif_block,
    gray_tiff,
    jpeg_with_exif,
    png_chunk,
    png_with_exif,
    riff_chunk,
    webp_form,
    webp_with_exif,
)

import spdl_media as sm
from spdl_media.geometry import (
    UPRIGHT_FILTERS,
    is_mirrored,
    matrix_orientation,
    rotation,
    swaps_sides,
)
from spdl_media.still_headers import exif_orientation
from spdl_media.testing import make_image

ALL = range(1, 9)

# The definition of Exif: the visual positions of row 0 and column 0 of the stored image.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: lambda a: np.rot90(a, 1),
}

GRAY = np.arange(15, dtype=np.uint8).reshape(3, 5) * 16

# Display matrices with 16.16 fixed-point entries, by which a pixel (p, q) is multiplied.
ONE = 1 << 16
MATRICES = {
    1: (ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30),
    2: (-ONE, 0, 0, 0, ONE, 0, 5 * ONE, 0, 1 << 30),
    3: (-ONE, 0, 0, 0, -ONE, 0, 5 * ONE, 3 * ONE, 1 << 30),
    4: (ONE, 0, 0, 0, -ONE, 0, 0, 3 * ONE, 1 << 30),
    5: (0, ONE, 0, ONE, 0, 0, 0, 0, 1 << 30),
    6: (0, ONE, 0, -ONE, 0, 0, 3 * ONE, 0, 1 << 30),
    7: (0, -ONE, 0, -ONE, 0, 0, 3 * ONE, 5 * ONE, 1 << 30),
    8: (0, -ONE, 0, ONE, 0, 0, 0, 5 * ONE, 1 << 30),
}


def image(codec: str) -> bytes:
    return make_image(np.repeat(GRAY[:, :, None], 3, axis=2), codec=codec)


def filtered(gray: np.ndarray, chain: str) -> np.ndarray:
    graph = av.filter.Graph()
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(gray), format="gray")
    last = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base="1/1"
    )
    for step in filter(None, chain.split(",")):
        name, _, args = step.partition("=")
        following = graph.add(name, args)
        last.link_to(following)
        last = following
    last.link_to(graph.add("buffersink"))
    graph.configure()
    graph.push(frame)
    return graph.pull().to_ndarray()


@each("orientation", ALL)
def test_filters_turn_upright(orientation: int) -> None:
    np.testing.assert_array_equal(
        filtered(GRAY, UPRIGHT_FILTERS[orientation]), UPRIGHT[orientation](GRAY)
    )


@each("orientation", ALL)
def test_rotation_after_mirroring_turns_upright(orientation: int) -> None:
    mirrored = GRAY[:, ::-1] if is_mirrored(orientation) else GRAY
    turned = np.rot90(mirrored, -rotation(orientation) // 90)
    np.testing.assert_array_equal(turned, UPRIGHT[orientation](GRAY))
    assert swaps_sides(orientation) == (turned.shape != GRAY.shape)


@each("function", [rotation, is_mirrored, swaps_sides])
@each("value", [0, 9, -1])
def test_other_numbers_are_refused(function: Callable[[int], object], value: int) -> None:
    with pytest.raises(ValueError, match=f"one of 1 to 8, as in Exif, not {value}"):
        function(value)


def test_filters_are_read_only() -> None:
    assert sorted(UPRIGHT_FILTERS) == list(ALL)
    with pytest.raises(TypeError, match="does not support item assignment"):
        UPRIGHT_FILTERS[1] = "hflip"  # type: ignore[index]


@each("orientation", ALL)
def test_matrix(orientation: int) -> None:
    matrix = MATRICES[orientation]
    a, b, _, c, d, _, x, y, _ = (value >> 16 for value in matrix)
    seen = np.zeros_like(UPRIGHT[orientation](GRAY))
    for (q, p), value in np.ndenumerate(GRAY):
        # The matrix maps corners, so a mirrored pixel is one to the left of its corner, or above it.
        column, row = a * p + c * q + x - (a + c < 0), b * p + d * q + y - (b + d < 0)
        seen[row, column] = value
    np.testing.assert_array_equal(seen, UPRIGHT[orientation](GRAY))
    assert matrix_orientation(matrix) == orientation


@each("orientation", ALL)
def test_matrix_with_scale(orientation: int) -> None:
    scaled = [
        value * 3 if index < 3 else value // 2 for index, value in enumerate(MATRICES[orientation])
    ]
    assert matrix_orientation(scaled) == orientation


def rotated(degrees: float) -> list[int]:
    """Return the matrix of a clockwise rotation."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [round(v * ONE) for v in (cos, sin, 0, -sin, cos, 0, 0, 0, 1 << 14)]


@each(
    "degrees, orientation",
    [
        (0.9, 1),
        (-0.9, 1),
        (90.9, 6),
        (89.1, 6),
        (180.5, 3),
        (269.5, 8),
        (1.1, 1),
        (45, 1),
        (91.1, 1),
    ],
)
def test_matrix_near_a_quarter_turn(degrees: float, orientation: int) -> None:
    assert matrix_orientation(rotated(degrees)) == orientation


@pytest.mark.parametrize("matrix", [(0,) * 9, (ONE, 0, 0, ONE, 0, 0, 0, 0, 0)])
def test_matrix_without_an_orientation(matrix: tuple[int, ...]) -> None:
    assert matrix_orientation(matrix) == 1


@each("order", ["<", ">"])
@each("orientation", ALL)
def test_files(orientation: int, order: str) -> None:
    exif = exif_block(orientation, order)
    files = {
        "jpeg": jpeg_with_exif(image("mjpeg"), exif),
        "png": png_with_exif(image("png"), exif),
        "png, after the pixels": png_with_exif(image("png"), exif, after_pixels=True),
        "png, with the prefix of JPEG": png_with_exif(image("png"), b"Exif\0\0" + exif),
        "webp": webp_with_exif(image("libwebp"), exif, 5, 3),
        "webp, with the prefix of JPEG": webp_with_exif(image("libwebp"), b"Exif\0\0" + exif, 5, 3),
        "tiff": gray_tiff(GRAY, orientation=orientation, order=order),
        "bare Exif": exif,
    }
    assert {name: exif_orientation(data) for name, data in files.items()} == dict.fromkeys(
        files, orientation
    )


@each("orientation", ALL)
def test_made_files_decode(orientation: int) -> None:
    """Images with hand-written metadata can still be decoded."""
    exif = exif_block(orientation)
    files = {
        "png": png_with_exif(image("png"), exif),
        "webp": webp_with_exif(image("libwebp"), exif, 5, 3),
        "tiff": gray_tiff(GRAY, orientation=orientation),
    }
    for codec, data in files.items():
        context = CodecContext.create(codec, "r")
        frames = [*context.decode(av.Packet(data)), *context.decode(None)]
        np.testing.assert_allclose(frames[0].to_ndarray(format="gray"), GRAY, atol=8)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description %s</x:xmpmeta>'


def _with_xmp(suffix: str, xmp: bytes, exif: bytes | None = None) -> bytes:
    """Make a file with XMP, followed by Exif if it is given."""
    if suffix == "jpg":
        data = image("mjpeg") if exif is None else jpeg_with_exif(image("mjpeg"), exif)
        segment = b"http://ns.adobe.com/xap/1.0/\0" + xmp
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]
    if suffix.startswith("png"):
        data = image("png") if exif is None else png_with_exif(image("png"), exif)
        text = b"\1\0en\0\0" + zlib.compress(xmp) if suffix == "pngz" else b"\0\0\0\0" + xmp
        return data[:33] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0" + text) + data[33:]
    if suffix == "webp":
        data = webp_with_exif(image("libwebp"), exif or exif_block(1), *GRAY.shape[::-1])
        chunks = data[12:] if exif else data[12 : data.index(b"EXIF")]
        # The flags say that both exist.
        return webp_form(chunks[:8] + b"\x0c" + chunks[9:], riff_chunk(b"XMP ", xmp))
    order = "<"
    tags = [(274, 3, 1, exif[18])] if exif else []
    tags.append((700, 1, len(xmp), 8 + 2 + 12 * (len(tags) + 1) + 4))
    directory = b"".join(struct.pack(f"{order}HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + directory + bytes(4) + xmp


@each("suffix", ["jpg", "png", "pngz", "webp", "tif"])
def test_xmp_counts_where_exif_does_not_speak_of_it(suffix: str) -> None:
    for text in (b'tiff:Orientation="6"/>', b"><tiff:Orientation>6</tiff:Orientation>"):
        assert exif_orientation(_with_xmp(suffix, XMP % text)) == 6
        assert exif_orientation(_with_xmp(suffix, XMP % text, exif_block(3))) == 3
        # Exif with another tag only.
        other = exif_block(3).replace(struct.pack("<H", 274), struct.pack("<H", 305), 1)
        if suffix != "tif":
            assert exif_orientation(_with_xmp(suffix, XMP % text, other)) == 6
    for text in (b'tiff:Orientation="9"/>', b"/>"):
        assert exif_orientation(_with_xmp(suffix, XMP % text)) == 1


@each("suffix", ["jpg", "png", "pngz", "webp"])
def test_images_stand_as_their_xmp_says(suffix: str) -> None:
    data = _with_xmp(suffix, XMP % b'tiff:Orientation="6"/>')
    frames = sm.decode_packets(sm.demux_image(data))
    codec = {"jpg": "mjpeg", "webp": "libwebp"}.get(suffix, "png")
    plain = sm.decode_packets(sm.demux_image(image(codec)))
    np.testing.assert_array_equal(frames.planes[0], np.rot90(plain.planes[0], 3))
    pillow = pytest.importorskip("PIL.ImageOps")
    with pillow.Image.open(io.BytesIO(data)) as reference:
        assert pillow.exif_transpose(reference).size == (frames.width, frames.height)


@each("order", ["<", ">"])
def test_any_integer_type_states_the_orientation(order: str) -> None:
    """Some writers state it as a LONG or a signed number; other readers take these, too."""
    for kind, code in {1: "Bxxx", 3: "Hxx", 4: "I", 6: "bxxx", 8: "hxx", 9: "i"}.items():
        entry = struct.pack(f"{order}HHI{code}", 274, kind, 1, 6)
        exif = exif_block(1, order)[:10] + entry + bytes(4)
        assert exif_orientation(jpeg_with_exif(image("mjpeg"), exif)) == 6, kind


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt"])
def test_exif_that_imagemagick_writes_as_text_counts(kind: bytes) -> None:
    block = exif_block(6)
    lines = b"\n".join(block.hex()[i : i + 72].encode() for i in range(0, 2 * len(block), 72))
    text = b"\nexif\n%8d\n" % len(block) + lines + b"\n"
    packed = b"\0" + zlib.compress(text) if kind == b"zTXt" else text

    def orientation(content: bytes) -> int:
        chunk = png_chunk(kind, b"Raw profile type exif\0" + content)
        return exif_orientation(data[:33] + chunk + data[33:])

    data = image("png")
    assert orientation(packed) == 6
    assert orientation(packed[:2] + b"?") == 1  # no digits, or no compressed data


def test_first_exif_segment_counts_and_empty_xmp_is_passed_over() -> None:
    jpeg = jpeg_with_exif(jpeg_with_exif(image("mjpeg"), exif_block(3)), exif_block(6))
    assert exif_orientation(jpeg) == 6
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x/>"
    segment = b"\xff\xe1" + struct.pack(">H", len(xmp) + 2) + xmp
    assert exif_orientation(jpeg[:2] + segment + jpeg[2:]) == 6


def test_no_metadata() -> None:
    for codec in ("mjpeg", "png", "libwebp", "bmp", "gif", "tiff", "ppm"):
        assert exif_orientation(image(codec)) == 1
    for data in (b"", b"\xff", b"RIFF", b"RIFF\0\0\0\0WAVEfmt ", b"no picture at all"):
        assert exif_orientation(data) == 1


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_values_beyond_the_standard_are_upright(value: int) -> None:
    assert exif_orientation(exif_block(value)) == 1


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_kinds_of_bytes(kind: Callable[[bytes], bytes]) -> None:
    assert exif_orientation(kind(exif_block(7))) == 7


def test_directory_past_the_end() -> None:
    assert exif_orientation(b"II*\0" + struct.pack("<I", 0xFFFFFFF0) + bytes(32)) == 1
    # More entries than fit into the data, before the orientation.
    assert exif_orientation(b"II*\0" + struct.pack("<IH", 8, 65535) + bytes(64)) == 1


def _samples() -> list[bytes]:
    exif = exif_block(6)
    return [
        jpeg_with_exif(image("mjpeg"), exif),
        png_with_exif(image("png"), exif),
        webp_with_exif(image("libwebp"), exif, 5, 3),
        gray_tiff(GRAY, orientation=6, order=">"),
        webp_form(),
    ]


SAMPLES = _samples()


@pytest.mark.parametrize("data", SAMPLES)
def test_cut_metadata_are_upright_or_known(data: bytes) -> None:
    whole = exif_orientation(data)
    assert {exif_orientation(data[:length]) for length in range(len(data))} <= {1, whole, 8}


@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8),
)
def test_damaged_metadata_never_raise(data: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(data)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    assert exif_orientation(damaged) in ALL


def test_real_photographs(media_dir: Path) -> None:
    folder = media_dir / "images_odd"
    found = [exif_orientation((folder / f"exif_orientation_{n}.jpg").read_bytes()) for n in ALL]
    assert found == list(ALL)
