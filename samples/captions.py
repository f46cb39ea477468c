"""Load batches of images with captions and audio: each item and each batch is a dictionary.

Command::

    python samples/captions.py

It makes ten JPEGs with audio files and captions in a temporary folder. The batches are PyTorch tensors if
PyTorch is installed, else NumPy arrays.

Output::

    image (4, 3, 64, 64), audio (4, 1, 32000) of 8000 to 32000 samples, 'image 0'
    image (4, 3, 64, 64), audio (4, 1, 32000) of 8000 to 32000 samples, 'image 4'
    image (2, 3, 64, 64), audio (2, 1, 16000) of 8000 to 16000 samples, 'image 8'

``load`` and ``loader`` do all of the loading. The audio files differ in length, so ``batch["audio"]`` has
``data`` and ``lengths``.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from made_media import make_photos, make_sounds

import spdl_media as sm

LIBRARY: Any = "torch" if importlib.util.find_spec("torch") else "numpy"
RECIPE = sm.ImageRecipe(64, random_crop=True, flip=0.5, dtype="float32", field="image")


def load(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Load the image as floats and the audio at 16 kHz; keep the caption."""
    audio = sm.load_audio(item["audio"], sample_rate=16000, num_channels=1)
    return {**RECIPE(item, rng), "audio": audio}


def loader(items: list[dict[str, Any]]) -> sm.DataLoader:
    """Make a loader of batches of four items."""
    return sm.DataLoader(
        items,
        preprocessor=load,
        batch_size=4,
        aggregator=functools.partial(sm.collate, pad={"audio": -1}),
        output_order="input",
        to=LIBRARY,
    )


def make_items(folder: Path) -> list[dict[str, Any]]:
    """Make ten images with captions and 0.5 to 2 seconds of audio."""
    images = make_photos(folder, 10)
    sounds = make_sounds(folder, [0.5 * (1 + index % 4) for index in range(10)])
    return [
        {"image": image, "audio": audio, "caption": f"image {index}"}
        for index, (image, audio) in enumerate(zip(images, sounds, strict=True))
    ]


def main() -> None:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        for batch in loader(make_items(Path(folder))):
            image, (audio, lengths) = batch["image"] - 0.5, batch["audio"]
            print(
                f"image {tuple(image.shape)}, audio {tuple(audio.shape)} of {int(lengths.min())} to "
                f"{int(lengths.max())} samples, {batch['caption'][0]!r}"
            )


if __name__ == "__main__":
    main()
