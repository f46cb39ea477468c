"""``spdl-media contact-sheet``: frames of a video at regular times, each with its time, in one image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media.cli.terminal import Refused, make_console, printable
from spdl_media.image_files import save_image
from spdl_media.video_file import VideoFile

_GAP = 4
_MOST_PIXELS = 100_000_000

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


def write_sheet(*, video: Path, output: Path, columns: int, rows: int, width: int) -> int:
    """Write the image; return the exit status.

    Raises:
        MediaError: The video cannot be read, or the image not be written.
        Refused: The video has no frame, or the image would be too large.
    """
    with VideoFile(video) as file:
        if not len(file):
            raise Refused(f"{printable(video)} has no video frame")
        height = max(1, round(width * file.height / file.width))
        if (columns * (width + _GAP)) * (rows * (height + _GAP)) > _MOST_PIXELS:
            raise Refused(
                f"{columns}x{rows} frames of {width}x{height} are more than 100 megapixels. Choose fewer "
                "--columns and --rows, or a smaller --width"
            )
        count = min(columns * rows, len(file))
        first = file.timestamps[0]
        # The middle of equal parts: the first frame and the last one are often black.
        times = [first + (file.end - first) * (n + 0.5) / count for n in range(count)]
        numbers = file.numbers_at(times)
        frames = file.load(numbers, width=width, height=height, scale_mode=None).array
        shown = [file.timestamps[number] for number in numbers]
        end = file.end
    columns = min(columns, count)
    sheet = np.full(
        (-(-count // columns) * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP, 3),
        24,
        np.uint8,
    )
    for place, (frame, seconds) in enumerate(zip(frames, shown, strict=True)):
        top, left = (
            _GAP + n * (side + _GAP)
            for n, side in zip(divmod(place, columns), (height, width), strict=True)
        )
        cell = sheet[top : top + height, left : left + width]
        cell[...] = frame
        _draw(cell, _clock(seconds, hours=end >= 3600))
    try:
        save_image(output, sheet)
    except ValueError as error:  # no encoder for this suffix
        raise Refused(f"{printable(output)}: {error}") from error
    size = f"{sheet.shape[1]}x{sheet.shape[0]}"
    text = f"{printable(output)}: {count} frames of {end:.1f} s, {size} pixels"
    make_console().print(text)
    return 0


def _clock(seconds: float, *, hours: bool) -> str:
    tenths = int(seconds * 10 + 1e-6)
    minutes, tenths = divmod(max(tenths, 0), 600)
    text = f"{minutes % 60 if hours else minutes:02}:{tenths // 10:02}.{tenths % 10}"
    return f"{minutes // 60}:{text}" if hours else text


def _draw(cell: npt.NDArray[Any], text: str) -> None:
    """Write white characters on black in the lower left corner, as large as there is room for."""
    bits = [np.pad(_GLYPHS[character], ((1, 1), (1, 0))) for character in text]
    picture = np.pad(np.concatenate(bits, axis=1), ((0, 0), (0, 1)))
    scale = max(1, cell.shape[1] // 100)
    picture = np.kron(picture, np.ones((scale, scale), int))[-cell.shape[0] :, : cell.shape[1]]
    height, width = picture.shape
    cell[-height:, :width] = (picture * 255)[:, :, None]
