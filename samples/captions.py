"""Batches of images with their captions and sounds: one dictionary an item, one of tensors a batch.

Command::

    python samples/captions.py

It makes ten JPEGs, sounds and captions in a temporary folder. The batches are PyTorch's tensors where that is
installed, else NumPy's arrays.

Output::

    image (4, 3, 64, 64) float32, audio (4, 1, 32000) float32 of 8000 to 32000 samples, 'picture 0'
    image (4, 3, 64, 64) float32, audio (4, 1, 32000) float32 of 8000 to 32000 samples, 'picture 4'
    image (2, 3, 64, 64) float32, audio (2, 1, 16000) float32 of 8000 to 16000 samples, 'picture 8'
    resumed after 1 batch: the same

Exit status: 0, or 1 if a loader that resumed gives other batches.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import spdl_media as sm
from spdl_media.testing import make_audio, make_image

LIBRARY: Any = "torch" if importlib.util.find_spec("torch") else "numpy"


def load(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The image as floats, the sound at 16 kHz, and the caption as it is."""
    return {
        "image": sm.load_image(
            item["image"],
            width=64,
            height=64,
            crops=sm.RandomResizedCrop(),
            flips=0.5,
            rng=rng,
            layout="NCHW",
            dtype="float32",
        ),
        "audio": sm.load_audio(item["audio"], sample_rate=16000, num_channels=1),
        "caption": item["caption"],
    }


def loader(items: list[dict[str, Any]]) -> sm.DataLoader:
    """Sounds differ in length, so ``batch["audio"]`` has ``data`` and ``lengths``."""
    return sm.DataLoader(
        items,
        preprocessor=load,
        batch_size=4,
        aggregator=functools.partial(sm.collate, pad={"audio": -1}),
        output_order="input",
        to=LIBRARY,
    )


def make_items(folder: Path) -> list[dict[str, Any]]:
    """Write noise to look at and to hear."""
    rng, items = np.random.default_rng(0), []
    for index in range(10):
        image, audio = folder / f"{index}.jpg", folder / f"{index}.flac"
        picture = rng.integers(0, 256, (96, 128, 3), dtype=np.uint8)
        sound = rng.integers(-999, 999, (4000 * (1 + index % 4), 2), dtype=np.int16)
        image.write_bytes(make_image(picture, codec="mjpeg"))
        audio.write_bytes(make_audio(sound, 8000, codec="flac", format="flac"))
        items.append({"image": image, "audio": audio, "caption": f"picture {index}"})
    return items


def main() -> int:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        items = make_items(Path(folder))
        batches = list(loader(items))
        for batch in batches:
            image, (audio, lengths) = batch["image"] - 0.5, batch["audio"]
            print(
                f"image {tuple(image.shape)} {str(image.dtype).removeprefix('torch.')}, audio "
                f"{tuple(audio.shape)} {str(audio.dtype).removeprefix('torch.')} of {int(lengths.min())} to "
                f"{int(lengths.max())} samples, {batch['caption'][0]!r}"
            )
        begun = loader(items)
        next(iter(begun))
        resumed = loader(items)
        resumed.load_state_dict(begun.state_dict())
        rest = list(resumed)
        same = len(rest) == 2 and all(
            bool((one["image"] == other["image"]).all()) and one["caption"] == other["caption"]
            for one, other in zip(batches[1:], rest, strict=True)
        )
        print(f"resumed after 1 batch: {'the same' if same else 'others'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
