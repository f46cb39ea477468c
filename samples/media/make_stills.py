"""Take the stills of this folder from the clip beside them.

The same PyAV writes the same bytes each time; another one may compress a little differently.

Command::

    python samples/media/make_stills.py [FOLDER]

FOLDER is where the stills go; the default is the folder of this file.

Output::

    technician.jpg         480x270  frame 200  JPEG, upright
    technician_turned.jpg  270x480  frame 200  JPEG that lies on its side; EXIF orientation 6 turns it back
    mirror_gray.png        480x270  frame 300  PNG of one component
    mirror.webp            240x135  frame 300  WebP without loss
    technician_odd.webp    239x135  frame 200  WebP with loss, odd width
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

HERE = Path(__file__).resolve().parent
CLIP = HERE / "nasa_13013.mp4"
LARGE_STREAM = 3  # 480x270; stream 0 is the same pictures at 320x180
TECHNICIAN, MIRROR = 200, 300

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def read_frames(numbers: set[int]) -> dict[int, Pixels]:
    """Frames of the clip by number, as RGB of shape (270, 480, 3), uint8."""
    frames = {}
    with av.open(CLIP) as clip:
        stream = clip.streams[LARGE_STREAM]
        assert isinstance(stream, av.VideoStream)
        stream.thread_count = 1
        for number, frame in enumerate(clip.decode(stream)):
            if number in numbers:
                frames[number] = to_rgb(frame)
            if number == max(numbers):
                break
    return frames


def to_rgb(frame: av.VideoFrame) -> Pixels:
    """The clip says BT.709, limited range."""
    rgb = frame.reformat(
        format="rgb24", src_colorspace="ITU709", src_color_range="MPEG", interpolation="BICUBIC"
    )
    return rgb.to_ndarray().astype(np.uint8, copy=False)


def encode(pixels: Pixels, codec: str, pix_fmt: str, options: dict[str, str]) -> bytes:
    """One picture as a file of its own."""
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    # Stills are BT.601; JPEG and gray PNG full range, lossy WebP limited.
    full_range = pix_fmt in ("yuvj420p", "gray")
    frame = frame.reformat(
        format=pix_fmt,
        dst_colorspace="ITU601",
        dst_color_range="JPEG" if full_range else "MPEG",
        interpolation="BICUBIC",
    )
    encoder = av.CodecContext.create(codec, "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, pix_fmt
    encoder.time_base = Fraction(1, 25)
    encoder.thread_count = 1
    # Without it the encoder writes its version into the file.
    encoder.options = {"flags": "+bitexact", **options}
    return b"".join(bytes(packet) for item in (frame, None) for packet in encoder.encode(item))


def jpeg(pixels: Pixels) -> bytes:
    """A baseline JPEG with half the colour resolution, as cameras write it."""
    return encode(
        pixels, "mjpeg", "yuvj420p", {"flags": "+bitexact+qscale", "global_quality": "354"}
    )


def turned_jpeg(pixels: Pixels) -> bytes:
    """A JPEG that shows ``pixels`` once it is turned 90 degrees clockwise, and says so."""
    data = jpeg(np.rot90(pixels))
    # TIFF header, one entry: tag 0x0112 (orientation), type SHORT, one value, 6.
    exif = b"Exif\0\0MM\0\x2a" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    start, rest = data[:2], data[2:]
    return start + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + rest


def gray_png(pixels: Pixels) -> bytes:
    """A PNG of one component."""
    return encode(pixels, "png", "gray", {"pred": "mixed"})


def lossless_webp(pixels: Pixels) -> bytes:
    """A WebP of a quarter of the pixels, without loss."""
    return encode(pixels[::2, ::2], "libwebp", "bgra", {"lossless": "1"})


def odd_webp(pixels: Pixels) -> bytes:
    """A WebP of odd width, with loss."""
    return encode(pixels[::2, :-2:2], "libwebp", "yuv420p", {"quality": "80"})


STILLS: tuple[tuple[str, int, str, Callable[[Pixels], bytes], str], ...] = (
    ("technician.jpg", TECHNICIAN, "480x270", jpeg, "JPEG, upright"),
    (
        "technician_turned.jpg",
        TECHNICIAN,
        "270x480",
        turned_jpeg,
        "JPEG that lies on its side; EXIF orientation 6 turns it back",
    ),
    ("mirror_gray.png", MIRROR, "480x270", gray_png, "PNG of one component"),
    ("mirror.webp", MIRROR, "240x135", lossless_webp, "WebP without loss"),
    ("technician_odd.webp", TECHNICIAN, "239x135", odd_webp, "WebP with loss, odd width"),
)


def main() -> None:
    """Write all stills."""
    parser = argparse.ArgumentParser(description="Take the stills of this folder from the clip.")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    frames = read_frames({number for _, number, *_ in STILLS})
    for name, number, size, make, what in STILLS:
        (folder / name).write_bytes(make(frames[number]))
        print(f"{name:<22} {size}  frame {number}  {what}")


if __name__ == "__main__":
    main()
