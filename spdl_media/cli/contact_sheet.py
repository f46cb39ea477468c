"""``spdl-media contact-sheet``: frames of a video at regular times, each with its time, in one image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from spdl_media.cli.terminal import FILE, Refused, make_console, printable
from spdl_media.image_files import save_image
from spdl_media.video_file import VideoFile

_GAP, _GRAY = 4, 24

# Three columns and five rows of a character, from the top, the left bit first. The wheels' FFmpeg has no
# drawtext, and a font of a library would be one more thing to install.
_GLYPHS = {
    character: [[int(bit) for bit in f"{int(row, 8):03b}"] for row in rows]
    for character, rows in zip(
        "0123456789:.",
        "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717 02020 00002".split(),
        strict=True,
    )
}


@click.command("contact-sheet", short_help="Put frames of a video into one image.")
@click.argument("video", type=Path)
@click.option("-o", "--output", **FILE, default="sheet.jpg", help="The image to write.")
@click.option("--columns", type=click.IntRange(1, 12), metavar="N", default=4)
@click.option("--rows", type=click.IntRange(1, 12), metavar="N", default=4)
@click.option("--width", type=click.IntRange(48, 960), metavar="N", default=320, help="Of a frame.")
def command(*, video: Path, output: Path, columns: int, rows: int, width: int) -> int:
    """Put frames of a video at regular times, with their times, into one image.

    \b
    Examples:
      spdl-media contact-sheet movie.mp4
      spdl-media contact-sheet movie.mp4 -o sheet.png --columns 6 --rows 5
    """
    with VideoFile(video) as file:
        if not len(file):
            raise Refused(f"{printable(video)} has no video frame")
        height = max(1, round(width * file.height / file.width))
        count = min(columns * rows, len(file))
        first, end = file.timestamps[0], file.end
        # The middle of equal parts: the first frame and the last one are often black.
        times = [first + (end - first) * (n + 0.5) / count for n in range(count)]
        numbers = file.numbers_at(times)
        frames = file.load(numbers, width=width, height=height, scale_mode=None).array
        columns = min(columns, count)
        rows = -(-count // columns)
        tall, wide = height + _GAP, width + _GAP
        sheet = np.full((rows * tall + _GAP, columns * wide + _GAP, 3), _GRAY, np.uint8)
        for place, (frame, number) in enumerate(zip(frames, numbers, strict=True)):
            _draw(frame, file.timestamps[number])
            top, left = place // columns * tall + _GAP, place % columns * wide + _GAP
            sheet[top : top + height, left : left + width] = frame
    try:
        save_image(output, sheet)
    except ValueError as error:  # no encoder for this suffix
        raise Refused(f"{printable(output)}: {error}") from error
    size = f"{sheet.shape[1]}x{sheet.shape[0]}"
    make_console().print(f"{printable(output)}: {count} frames of {end:.1f} s, {size} pixels")
    return 0


def _draw(frame: npt.NDArray[Any], seconds: float) -> None:
    """Write a time in white on black into the lower left corner, as large as there is room for."""
    tenths = max(int(seconds * 10 + 1e-6), 0)
    minutes = tenths // 600
    text = f"{minutes // 60}:{minutes % 60:02}:{tenths // 10 % 60:02}.{tenths % 10}"
    bits = [np.pad(_GLYPHS[character], ((1, 1), (1, 0))) for character in text]
    picture = np.pad(np.concatenate(bits, axis=1), ((0, 0), (0, 1)))
    scale = max(1, frame.shape[1] // 100)
    picture = np.kron(picture, np.ones((scale, scale), int))[-frame.shape[0] :, : frame.shape[1]]
    height, width = picture.shape
    frame[-height:, :width] = (picture * 255)[:, :, None]
