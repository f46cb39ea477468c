"""Check a folder of videos: list the damaged ones; write stills, a contact sheet and a cut of the others.

Every video is decoded to its end, in threads. ``OUT/damaged.tsv`` lists the damaged ones with the reasons.
For each of the others, ``OUT`` gets a folder with one frame per second as JPEG, a contact sheet, and a piece
of the video as MP4.

    python samples/clean_videos.py FOLDER OUT [--start 0] [--seconds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

import spdl_media as sm

SUFFIXES = {".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpg", ".ts", ".webm", ".wmv"}
WIDTH, HEIGHT, COLUMNS = 192, 108, 5


def main() -> int:
    """Check a folder, and return the exit status: 1 if a file is damaged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=float, default=0, help="of the piece, in seconds")
    parser.add_argument("--seconds", type=float, default=5, help="length of the piece")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    videos = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not videos:
        print(f"there are no videos in {arguments.folder}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    piece = (arguments.start, arguments.start + arguments.seconds)

    def clean(path: Path) -> str | None:
        reason = damage(path)
        if reason is None:
            name = "_".join(path.relative_to(arguments.folder).parts)
            reason = describe(path, arguments.out / name, piece)
        return reason

    with ThreadPoolExecutor(arguments.threads) as executor:
        reasons = list(executor.map(clean, videos))
    damaged = [(path, reason) for path, reason in zip(videos, reasons, strict=True) if reason]
    lines = [f"{path}\t{reason}\n" for path, reason in damaged]
    (arguments.out / "damaged.tsv").write_text("".join(lines), encoding="utf-8")
    print(f"{len(videos)} videos, {len(damaged)} damaged")
    for path, reason in damaged:
        print(f"{path}: {reason}")
    return 1 if damaged else 0


def damage(path: Path) -> str | None:
    """Return why a video cannot be decoded to its end, or ``None`` if it can."""
    try:
        with sm.Demuxer(path) as demuxer:
            # No conversion is needed, because the frames are discarded.
            decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
            for packets in demuxer.streaming_demux(num_packets=64):
                for _ in decoder.decode(packets):
                    pass
            for _ in decoder.flush():
                pass
    except sm.MediaError as error:
        return error.message
    return None


def describe(path: Path, out: Path, piece: tuple[float, float]) -> str | None:
    """Write stills, a contact sheet and a piece of a video. Return the reason if that fails."""
    out.mkdir(exist_ok=True)
    try:
        frames = sm.load_video(path, frame_rate=1).array
        for second, frame in enumerate(frames):
            sm.save_image(out / f"{second:05}.jpg", frame)
        sm.save_image(out / "sheet.jpg", contact_sheet(path))
        sm.cut(path, out / "piece.mp4", *piece)
    except (sm.MediaError, ValueError) as error:
        return str(getattr(error, "message", error))
    return None


def contact_sheet(path: Path) -> npt.NDArray[np.uint8]:
    """Return one small frame per second, arranged in rows: ``(H, W, 3)``."""
    frames = sm.load_video(path, frame_rate=1, width=WIDTH, height=HEIGHT).array
    missing = -len(frames) % COLUMNS
    frames = np.concatenate([frames, np.zeros((missing, *frames.shape[1:]), np.uint8)])
    rows = frames.reshape(-1, COLUMNS, HEIGHT, WIDTH, 3).swapaxes(1, 2)
    return rows.reshape(-1, COLUMNS * WIDTH, 3)


if __name__ == "__main__":
    sys.exit(main())
