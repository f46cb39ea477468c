"""Show how failures are skipped, replaced, filled with zeros or raised, and how they are reported.

Command::

    python samples/failures.py

It makes 20 JPEGs in a temporary folder. One is truncated, one is empty, one is text, and one is missing.

Output::

    WARNING first failure of stage 'ImageRecipe'
    WARNING failures of this epoch
    skipped: 16 of 20 images, 4 failures
    003.jpg   DecodeError  the mjpeg data is cut short: the data ends
    007.jpg   DemuxError   the source is empty (0 bytes)
    011.jpg   DemuxError   the name says mjpeg, but the content is not
    gone.jpg  SourceError  cannot be read: No such file or directory
    replaced: 20 of 20 images, 4 of them replacements
    filled: 4 rows, valid [True, True, True, False]
    raised: stage ImageRecipe, DecodeError of 003.jpg
    too many: the epoch ends when more than 10 % fail: True
    a damaged video: DecodeError
    with on_corrupt="keep", some of its frames are marked as damaged: True
    with on_corrupt="drop", some are dropped: True
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from made_media import cut_short, make_photos

import spdl_media as sm
from spdl_media.pipeline import PipelineFailure
from spdl_media.testing import index_frames, make_video

RECIPE = sm.ImageRecipe(32)


def damaged_photos() -> list[str]:
    """Return twenty paths, four of them bad."""
    paths = make_photos(Path(), 20)
    cut_short(paths[3])
    paths[7].write_bytes(b"")
    paths[11].write_text("this is a text")
    paths[15].unlink()
    paths[15] = Path("gone.jpg")
    return [str(path) for path in paths]


def epoch(paths: list[str], **options: Any) -> tuple[sm.DataLoader, int]:
    """Iterate over a loader. Return it and the number of images."""
    loader = sm.DataLoader(
        paths, preprocessor=RECIPE, batch_size=4, output_order="input", to="numpy", **options
    )
    return loader, sum(map(len, loader))


def main() -> None:
    """Run the program; see the module."""
    paths = damaged_photos()
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger().handlers[0].addFilter(shorten)
    loader, number = epoch(paths)
    print(
        f"skipped: {number} of {len(paths)} images, {loader.failure_counts['ImageRecipe']} failures"
    )
    errors = [one.exception for one in loader.failures if isinstance(one.exception, sm.MediaError)]
    for error in sorted(errors, key=lambda error: Path(error.source).name):
        # The message continues with the remedy.
        reason = re.split(r"(?<=ends)|(?<=is not)|\. ", error.message)[0]
        print(f"{Path(error.source).name:8}  {type(error).__name__:11}  {reason}")
    logging.disable()

    loader = sm.DataLoader(
        paths,
        preprocessor=RECIPE,
        batch_size=4,
        output_order="input",
        on_error="replace",
        to="numpy",
    )
    number = replacements = 0
    for batch in loader:
        number += len(batch)
        replacements += len(loader.replaced)
    print(f"replaced: {number} of {len(paths)} images, {replacements} of them replacements")

    batch = sm.load_image_batch(paths[:4], width=32, height=32, on_error="fill")
    print(f"filled: {len(batch)} rows, valid {batch.valid.tolist()}")

    try:
        epoch(paths, on_error="raise")
    except PipelineFailure as error:
        cause = error.exceptions[0]
        assert isinstance(cause, sm.MediaError)
        print(f"raised: stage {error.stage}, {type(cause).__name__} of {Path(cause.source).name}")
    ended = False
    try:
        epoch(paths, max_failures=0.1)
    except PipelineFailure:
        ended = True
    print(f"too many: the epoch ends when more than 10 % fail: {ended}")

    # A video with a block of zeros: the decoder fills the gap, and reports the damaged frames.
    data = bytearray(make_video(index_frames(30, 64, 48), codec="mpeg4", format="mpegts"))
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    video = sm.demux_video(bytes(data))
    try:
        sm.decode_packets(video)
    except sm.DecodeError as error:
        print(f"a damaged video: {type(error).__name__}")
    kept, dropped = (
        sm.decode_packets(video, decode_config=sm.decode_config(on_corrupt=what))
        for what in ("keep", "drop")
    )
    print(
        f'with on_corrupt="keep", some of its frames are marked as damaged: {any(kept.is_corrupt)}'
    )
    print(f'with on_corrupt="drop", some are dropped: {dropped.num_dropped > 0}')


def shorten(record: logging.LogRecord) -> bool:
    """Shorten log lines to their part before the details."""
    record.msg, record.args = record.getMessage().partition(":")[0], ()
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        main()
