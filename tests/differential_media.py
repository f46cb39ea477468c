"""Writes media of many formats and options, by Pillow, pillow-heif, soundfile and PyAV, for differential.py.

    python tests/differential_media.py FOLDER [--count 2000] [--seed 0]

Combinations that an encoder rejects are left out; the last line shows the number of files. The same seed
makes the same files.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

Array = np.ndarray[Any, Any]
Write = Callable[[Path], None]

SIZES = ((1, 1), (7, 5), (16, 16), (63, 47), (64, 64), (129, 65), (451, 461))
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F")


def pixels(width: int, height: int, rng: np.random.Generator) -> Array:
    """Make RGBA with gradients and a little noise, so that swapped channels or axes are visible."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    image = np.stack([x, y, 1 - x * y, 0.25 + 0.75 * (x + y) / 2], axis=-1)
    return (image * 245 + rng.uniform(0, 10, image.shape)).astype(np.uint8)


def make_image(size: tuple[int, int], mode: str, rng: np.random.Generator) -> Any:
    from PIL import Image

    image = Image.fromarray(pixels(*size, rng))
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode == "LAB":
        from PIL import ImageCms

        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        return ImageCms.profileToProfile(image.convert("RGB"), *profiles, outputMode="LAB")
    if mode in ("RGBA", "LA"):
        return image.convert(mode)
    return image.convert("RGB").convert(mode)


IMAGE_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "png": [{}, {"optimize": True}, {"bits": 4}, {"transparency": 3}],
    "jpg": [
        {"quality": quality, "subsampling": sampling, "progressive": progressive}
        for quality, sampling, progressive in itertools.product((50, 95), (0, 1, 2), (False, True))
    ]
    + [{"keep_rgb": True}, {"restart_marker_blocks": 2}],
    "webp": [{"lossless": True}, {"quality": 80}, {"quality": 50, "method": 0}],
    "tif": [
        {"compression": compression, "big_tiff": big}
        for compression, big in itertools.product(
            (None, "tiff_lzw", "jpeg", "tiff_adobe_deflate", "packbits", "group3", "group4", "lzma",
             "zstd", "tiff_ccitt"),
            (False, True),
        )
    ],
    "gif": [{}, {"interlace": 0}, {"transparency": 5}],
    "bmp": [{}],
    "dib": [{}],
    "ico": [{}, {"sizes": [(16, 16), (48, 48), (32, 32)]}, {"bitmap_format": "bmp"}],
    "icns": [{}],
    "pcx": [{}],
    "ppm": [{}],
    "pgm": [{}],
    "pbm": [{}],
    "pfm": [{}],
    "sgi": [{}, {"bpc": 2}],
    "tga": [{}, {"compression": "tga_rle"}, {"orientation": -1}],
    "xbm": [{}],
    "dds": [{}, {"pixel_format": "DXT1"}, {"pixel_format": "DXT5"}, {"pixel_format": "BC5"}],
    "jp2": [{}, {"irreversible": True}, {"tile_size": (32, 32)}, {"num_resolutions": 2}],
    "j2k": [{}, {"progression": "RLCP"}],
    "avif": [{"quality": 90}, {"subsampling": "4:4:4"}, {"subsampling": "4:0:0"}, {"range": "limited"}],
    "qoi": [{}],
    "heic": [{"quality": 90}, {"quality": -1}, {"chroma": 444}],
}  # fmt: skip


def images(rng: np.random.Generator) -> Iterator[tuple[str, Write]]:
    """Yield images of each format in all modes, sizes and options, and in each orientation."""
    from PIL import Image

    try:
        import pillow_heif
    except ImportError:
        pass
    else:
        pillow_heif.register_heif_opener()
    exif = Image.Exif()

    def writer(size: tuple[int, int], mode: str, options: dict[str, Any], turn: int) -> Write:
        def write(path: Path) -> None:
            more = dict(options)
            if turn > 1:
                exif[0x0112] = turn
                more["exif"] = exif.tobytes()
            make_image(size, mode, rng).save(path, **more)

        return write

    for suffix, all_options in IMAGE_OPTIONS.items():
        for mode, size, options in itertools.product(MODES, SIZES, all_options):
            yield (
                f"{mode.replace(';', '')}_{size[0]}x{size[1]}.{suffix}",
                writer(size, mode, options, 1),
            )
        if suffix in ("jpg", "png", "webp", "tif", "avif", "heic"):
            for turn, size in itertools.product(range(2, 9), SIZES[1:]):
                yield f"turned{turn}_{size[0]}.{suffix}", writer(size, "RGB", all_options[0], turn)


def animations(rng: np.random.Generator) -> Iterator[tuple[str, Write]]:
    """Yield files with several images, with all disposal methods."""

    def writer(size: tuple[int, int], mode: str, options: dict[str, Any]) -> Write:
        def write(path: Path) -> None:
            first, *others = (make_image(size, mode, rng) for _ in range(4))
            first.save(
                path, save_all=True, append_images=others, duration=[40, 80, 40, 120], **options
            )

        return write

    kinds = {
        "png": [{"disposal": d, "blend": b, "default_image": i}
                for d, b, i in itertools.product((0, 1, 2), (0, 1), (False, True))],
        "gif": [{"disposal": disposal} for disposal in (0, 1, 2, 3)],
        "webp": [{"lossless": True}, {"minimize_size": True}],
        "tif": [{}],
    }  # fmt: skip
    for suffix, all_options in kinds.items():
        for options, size, mode in itertools.product(all_options, SIZES[1:5], ("P", "RGB", "RGBA")):
            yield f"animated_{mode}_{size[0]}.{suffix}", writer(size, mode, options)


def waveform(channels: int, rate: int, seconds: float, rng: np.random.Generator) -> Array:
    """Make samples ``(samples, channels)`` within 0.9: noise, clicks, and a different tone per channel."""
    time = np.arange(round(rate * seconds)) / rate
    tones = 0.4 * np.sin(2 * np.pi * time[:, None] * 110 * (1 + np.arange(channels)))
    noise = 0.05 * rng.standard_normal((len(time), channels))
    noise[rng.integers(0, len(time), 8)] += 0.4
    return np.clip(tones + noise, -0.9, 0.9)


def sounds(rng: np.random.Generator) -> Iterator[tuple[str, Write]]:
    """Yield audio files that libsndfile writes and that FFmpeg encodes."""
    try:
        import soundfile
    except ImportError:
        pass
    else:

        def by_soundfile(
            channels: int, rate: int, format: str, subtype: str, seconds: float
        ) -> Write:
            samples = waveform(channels, rate, seconds, rng)
            return lambda path: soundfile.write(path, samples, rate, subtype, format=format)

        suffixes = {"OGG": "ogg", "AIFF": "aiff", "MP3": "mp3", "FLAC": "flac", "WAV": "wav", "W64": "w64",
                    "AU": "au", "CAF": "caf", "VOC": "voc", "WAVEX": "wav", "RF64": "wav"}  # fmt: skip
        for format, suffix in suffixes.items():
            for subtype in soundfile.available_subtypes(format):
                for channels, rate in itertools.product((1, 2, 6, 8), (8000, 16000, 44100, 48000)):
                    name = f"{format}_{subtype}_{channels}x{rate}.{suffix}"
                    yield name, by_soundfile(channels, rate, format, subtype, 1.7)

    coded = {
        "mp3": ("libmp3lame", "s16p"), "m4a": ("aac", "fltp"), "aac": ("aac", "fltp"),
        "opus": ("libopus", "flt"), "ogg": ("libvorbis", "fltp"), "flac": ("flac", "s16"),
        "ac3": ("ac3", "fltp"), "eac3": ("eac3", "fltp"), "mp2": ("mp2", "s16"),
        "wma": ("wmav2", "fltp"), "mka": ("alac", "s16p"), "caf": ("alac", "s32p"), "wv": ("wavpack", "s16p"),
        "tta": ("tta", "s16"), "webm": ("libopus", "flt"), "mov": ("pcm_s24le", "s32"),
    }  # fmt: skip
    layouts = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}
    for (suffix, (codec, format)), channels, rate in itertools.product(
        coded.items(), layouts, (8000, 16000, 22050, 44100, 48000)
    ):
        samples = waveform(channels, rate, 2.3, rng)
        layout = layouts[channels]
        # Audio only, also if the suffix is that of a video.
        name = f"{codec}_{layout}_{rate}.{'mka' if suffix in ('webm', 'mov') else suffix}"
        yield name, _encode_sound(codec, format, layout, rate, samples)


def _encode_sound(codec: str, format: str, layout: str, rate: int, samples: Array) -> Write:
    def write(path: Path) -> None:
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream(codec, rate=rate, layout=layout)
            frame = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(samples.T, dtype=np.float32), format="fltp", layout=layout
            )
            frame.sample_rate = rate
            frame.time_base = Fraction(1, rate)
            frame.pts = 0
            resampler = av.AudioResampler(
                format, layout, rate, stream.codec_context.frame_size or 1024
            )
            for part in (*resampler.resample(frame), *resampler.resample(None)):
                container.mux(stream.encode(part))
            container.mux(stream.encode(None))

    return write


def videos(rng: np.random.Generator) -> Iterator[tuple[str, Write]]:
    """Yield videos of FFmpeg's encoders in several containers, with and without B-frames."""
    kinds = [
        ("libx264", ("mp4", "mkv", "ts", "mov", "avi", "flv", "mxf", "h264"),
         ("yuv420p", "yuv422p", "yuv444p", "yuv420p10le"),
         ({"bf": "0"}, {"bf": "2"}, {"flags": "+ildct+ilme"})),
        ("libx265", ("mp4", "mkv", "ts"), ("yuv420p", "yuv444p10le"), ({}, {"bf": "0"})),
        ("libvpx", ("webm", "mkv"), ("yuv420p",), ({}, {"auto-alt-ref": "1", "lag-in-frames": "8"})),
        ("libvpx-vp9", ("webm", "mp4"), ("yuv420p", "yuv444p"), ({}, {"lossless": "1"})),
        ("libsvtav1", ("mkv", "mp4"), ("yuv420p", "yuv420p10le"), ({},)),
        ("mpeg4", ("avi", "mp4", "mkv", "3gp"), ("yuv420p",), ({"bf": "0"}, {"bf": "2"})),
        ("mpeg2video", ("mpg", "ts", "mxf", "mkv"), ("yuv420p", "yuv422p"), ({"bf": "0"}, {"bf": "2"})),
        ("mjpeg", ("avi", "mov"), ("yuvj420p", "yuvj444p"), ({},)),
        ("ffv1", ("mkv", "avi"), ("yuv420p", "yuv444p16le", "gray", "bgr0"), ({},)),
        ("huffyuv", ("avi",), ("yuv422p", "rgb24"), ({},)),
        ("prores_ks", ("mov",), ("yuv422p10le", "yuva444p10le"), ({},)),
        ("png", ("mov", "mkv"), ("rgb24", "rgba"), ({},)),
        ("h263p", ("3gp", "avi"), ("yuv420p",), ({},)),
    ]  # fmt: skip
    for codec, suffixes, formats, all_options in kinds:
        for suffix, format, options, size, rate in itertools.product(
            suffixes,
            formats,
            all_options,
            ((64, 48), (130, 98), (176, 144)),
            (25, Fraction(30000, 1001)),
        ):
            name = f"{codec}_{format}_{size[0]}_{'_'.join(options.values()) or 'plain'}.{suffix}"
            yield (
                name.replace("+", ""),
                _encode_video(codec, format, options, size, Fraction(rate), rng),
            )


def _encode_video(
    codec: str, format: str, options: dict[str, str], size: tuple[int, int], rate: Fraction,
    rng: np.random.Generator,
) -> Write:  # fmt: skip
    def write(path: Path) -> None:
        image = pixels(*size, rng)
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream(codec, rate=rate, options={"g": "8", **options})
            stream.width, stream.height, stream.pix_fmt = *size, format
            for index in range(30):
                frame = av.VideoFrame.from_ndarray(np.roll(image, 3 * index, axis=1), "rgba")
                frame.pts, frame.time_base = index, 1 / rate
                container.mux(stream.encode(frame.reformat(format=format)))
            container.mux(stream.encode(None))

    return write


def main() -> int:
    """Write a sample of all combinations."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(options.seed)
    shares = {images: 0.5, animations: 0.05, sounds: 0.25, videos: 0.2}
    written = refused = 0
    for make, share in shares.items():
        candidates = list(make(rng))
        random.Random(options.seed).shuffle(candidates)  # noqa: S311  # no secret
        wanted = written + round(options.count * share)
        for number, (name, write) in enumerate(candidates):
            if written == wanted:
                break
            path = options.folder / f"{make.__name__}_{number:05}_{name}"
            try:
                write(path)
            # An encoder may raise any error for a combination that it does not support.
            except Exception:  # noqa: BLE001
                path.unlink(missing_ok=True)
                refused += 1
            else:
                written += 1
    print(f"{written} files in {options.folder}; {refused} combinations were refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
