"""Load images and captions from tar shards, in random order, split over ranks.

Command::

    python samples/caption_shards.py

It makes three shards of 16 JPEGs with captions in a temporary folder, and reads them as two ranks. The
batches are PyTorch tensors if PyTorch is installed, else NumPy arrays.

Output::

    rank 0 of 2: 24 samples in 3 batches of jpg (8, 3, 64, 64) float32
    rank 1 of 2: 24 samples in 3 batches of jpg (8, 3, 64, 64) float32
    each sample once: True
    2 ranks stop after a batch, 3 resume: 8 + 8 samples, then 10 + 11 + 11
    each sample once: True

Exit status: 0, or 1 if a sample is repeated or missing.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import spdl_media as sm
from spdl_media.testing import make_image

LIBRARY: Any = "torch" if importlib.util.find_spec("torch") else "numpy"


def loader(folder: Path, rank: int, world_size: int, *, equal_length: bool = True) -> sm.DataLoader:
    """Make the loader. Samples are dictionaries; the recipe converts ``jpg`` to floats and keeps the rest."""
    shards = sm.Shards(
        f"{folder}/{{000..002}}.tar",
        shuffle_shards=True,
        shuffle_buffer=1000,
        rank=rank,  # both are optional if torch.distributed is initialised
        world_size=world_size,
        equal_length=equal_length,
    )
    recipe = sm.ImageRecipe(
        64, dtype="float32", mean=sm.IMAGENET_MEAN, std=sm.IMAGENET_STD, field="jpg"
    )
    return sm.DataLoader(
        shards, preprocessor=recipe, batch_size=8, output_order="input", to=LIBRARY
    )


def make_shards(folder: Path) -> None:
    """Write shards of noise images with captions."""
    rng = np.random.default_rng(0)
    for number in range(3):
        with tarfile.open(folder / f"{number:03}.tar", "w") as archive:
            for index in range(16):
                picture = make_image(rng.integers(0, 256, (96, 128, 3), np.uint8), codec="mjpeg")
                caption = f"picture {index} of shard {number}".encode()
                for ending, content in (("jpg", picture), ("txt", caption)):
                    member = tarfile.TarInfo(f"{number:03}{index:02}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def keys(batches: list[dict[str, Any]]) -> list[str]:
    """Return the names of the samples in batches."""
    return [key for batch in batches for key in batch["__key__"]]


def main() -> int:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder)
        ranks = [list(loader(folder, rank, 2)) for rank in range(2)]
        for rank, batches in enumerate(ranks):
            jpg = batches[0]["jpg"]
            kind = str(jpg.dtype).removeprefix("torch.")
            print(
                f"rank {rank} of 2: {len(keys(batches))} samples in {len(batches)} batches of jpg "
                f"{tuple(jpg.shape)} {kind}"
            )
        every = sorted(key for batches in ranks for key in keys(batches))
        once = len(set(every)) == len(every) == 48
        print(f"each sample once: {once}")

        begun = [loader(folder, rank, 2) for rank in range(2)]
        first = [keys([next(iter(each))]) for each in begun]
        states = [each.state_dict() for each in begun]
        rest = []
        for rank in range(3):
            resumed = loader(folder, rank, 3, equal_length=False)
            resumed.load_state_dict(states)
            rest.append(keys(list(resumed)))
        print(
            f"2 ranks stop after a batch, 3 resume: {' + '.join(str(len(one)) for one in first)} samples, "
            f"then {' + '.join(str(len(one)) for one in rest)}"
        )
        again = sorted(itertools.chain(*first, *rest)) == every
        print(f"each sample once: {again}")
    return 0 if once and again else 1


if __name__ == "__main__":
    sys.exit(main())
