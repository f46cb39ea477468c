"""Load batches of video clips with audio: two random clips per video, cropped, flipped and normalised.

Command::

    python samples/video_clips.py

It makes 12 videos of 2 to 5 seconds with audio in a temporary folder.

Output::

    (8, 8, 3, 56, 56) float32, audio (8, 1, 20480), labels 0 0 1 1 2 2 3 3
    (8, 8, 3, 56, 56) float32, audio (8, 1, 20480), labels 4 4 5 5 0 0 1 1
    (8, 8, 3, 56, 56) float32, audio (8, 1, 20480), labels 2 2 3 3 4 4 5 5
    evaluation: 3 clips of 8 frames from 0.0, 0.4 and 0.8 s

A clip is 8 frames, every fourth frame of 32, with the audio of the 32 frames. Shorter videos repeat their
last frame.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from made_media import make_movies

import spdl_media as sm

NUM_CLIPS, NUM_CLASSES = 2, 6
FLOATS: dict[str, Any] = {"dtype": "float32", "mean": (0.43, 0.39, 0.37), "std": 0.22}
CLIP: dict[str, Any] = {"num_frames": 8, "step": 4, "on_short": "repeat_last", "layout": "NCHW"}
# Recently used videos stay open for the next epoch. Each thread decodes its own videos.
CACHE = sm.VideoCache(64)


def load(path: Path, rng: np.random.Generator) -> dict[str, Any]:
    """Load two random clips of a video, with its class."""
    clips = sm.sample_clips(
        CACHE.open(path),
        num_clips=NUM_CLIPS,
        rng=rng,
        audio=True,
        width=56,
        height=56,
        scale_mode=None,
        crops=sm.RandomResizedCrop(scale=(0.3, 1)),
        flips=0.5,
        **CLIP,
        **FLOATS,
    )
    labels = np.full(NUM_CLIPS, int(path.stem) % NUM_CLASSES)
    return {"video": clips.video, "audio": clips.audio, "label": labels}


def loader(paths: list[Path]) -> sm.DataLoader:
    """Make a loader of batches of four videos with all their clips."""
    return sm.DataLoader(
        paths,
        preprocessor=load,
        batch_size=4,
        aggregator=sm.collate,
        output_order="input",
        to="numpy",
    )


def main() -> None:
    """Make the videos, and load them once."""
    with tempfile.TemporaryDirectory() as folder:
        paths = make_movies(Path(folder), 12)
        for batch in loader(paths):
            # Concatenates the clips of all videos of the batch.
            video, audio, labels = (
                np.concatenate(batch[key]) for key in ("video", "audio", "label")
            )
            numbers = " ".join(map(str, labels.tolist()))
            print(f"{video.shape} {video.dtype}, audio {audio.shape}, labels {numbers}")
        evaluate = functools.partial(sm.sample_clips, num_clips=3, sampler="uniform", **CLIP)
        clips = evaluate(CACHE.open(paths[0]), width=56, height=56, scale_mode="crop")
        first, second, third = clips.timestamps[:, 0]
        print(
            f"evaluation: {clips.video.shape[0]} clips of {clips.video.shape[1]} frames from "
            f"{first:.1f}, {second:.1f} and {third:.1f} s"
        )
        CACHE.clear()


if __name__ == "__main__":
    main()
