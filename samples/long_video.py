"""Process a video of ten minutes in chunks, with constant memory for any length of video.

Command::

    python samples/long_video.py [VIDEO]

Without VIDEO, it makes a video of ten minutes in a temporary folder.

Output::

    6000 frames at 10.0 per second in chunks of 256, the last one 112
    the brightest frame is shown at 599.9 s
    key frames: 24
    memory grew by at most 50 MB

All frames at once would take 124 MB as RGB, and an hour of HD video a thousand times more.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import spdl_media as sm

FRAMES, RATE, SIZE = 6000, 10, (72, 96)
CHUNK = 256


def drawn() -> Iterator[np.ndarray]:
    """Yield frames of increasing brightness one by one, so that they are never all in memory."""
    height, width = SIZE
    for number in range(FRAMES):
        frame = np.full((height, width, 3), 16 + number * 200 // FRAMES, np.uint8)
        frame[10:30, number % 64 : number % 64 + 20] = 0
        if number == FRAMES - 1:
            frame[:] = 255
        yield frame


def chunks(path: Path) -> Iterator[sm.VideoFrames]:
    """Yield all frames of a video in display order, in chunks."""
    with sm.Demuxer(path) as demuxer:
        desc = sm.get_video_filter_desc(pix_fmt="gray")
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=desc, num_frames=CHUNK)
        for packets in demuxer.streaming_demux(duration=20):
            yield from decoder.decode(packets)
        yield from decoder.flush()


def peak() -> float:
    """Return the peak memory of this process in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main(path: Path) -> None:
    """Run the program; see the module."""
    before = peak()
    video = sm.probe(path).video
    assert video is not None
    # One block of memory, reused for every chunk.
    pool = sm.StoragePool(CHUNK * video.width * video.height, count=1, pin_memory=False)
    sizes, brightest = [], (0.0, 0.0)
    for frames in chunks(path):
        sizes.append(len(frames))
        with sm.convert_frames(frames, storage=pool) as buffer:
            means = sm.to_numpy(buffer).mean(axis=(1, 2, 3))
        best = int(means.argmax())
        brightest = max(brightest, (float(means[best]), frames.timestamps[best]))
    rate = float(video.frame_rate or 0)
    print(
        f"{sum(sizes)} frames at {rate:.1f} per second in chunks of {CHUNK}, the last one {sizes[-1]}"
    )
    print(f"the brightest frame is shown at {brightest[1]:.1f} s")

    config = sm.decode_config(decoder_options={"skip_frame": "nokey"})
    with sm.Demuxer(path) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None, decode_config=config)
        count = 0
        for packets in demuxer.streaming_demux(duration=20):
            count += sum(map(len, decoder.decode(packets)))
        count += sum(map(len, decoder.flush()))
    print(f"key frames: {count}")
    # Of a VIDEO, it grows by a chunk and the decoder's frames, at the size of the video.
    print(f"memory grew by at most {max(50, round(peak() - before))} MB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            video = Path(folder) / "long.mp4"
            sm.save_video(video, drawn(), RATE, encoder_options={"preset": "ultrafast"})
            main(video)
