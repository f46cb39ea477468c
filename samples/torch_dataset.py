"""Load an existing PyTorch Dataset in threads: only the import of DataLoader changes.

Command::

    python samples/torch_dataset.py

It makes 18 JPEGs in a temporary folder, and loads them with both loaders, in random order for two epochs. It
needs PyTorch.

Output::

    8 batches of (4, 3, 64, 64) float32 and (4,) int64
    the same as PyTorch's: True

Exit status: 0, or 1 if the batches differ.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from made_media import COLORS, make_photos
from torch.utils.data import Dataset, RandomSampler

import spdl_media as sm
from spdl_media.torch import DataLoader


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Images with the index of their folder."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        image = sm.load_image(path, width=64, height=64, layout="NCHW", dtype="float32")
        return sm.to_torch(image), COLORS.index(path.parent.name)


def collate(samples: Sequence[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the images and the labels."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def loader(kind: Any, paths: Sequence[Path], num_workers: int) -> Any:
    """Make a loader of either kind, with PyTorch's arguments."""
    photos = Photos(paths)
    return kind(
        photos,
        batch_size=4,
        sampler=RandomSampler(photos, generator=torch.Generator().manual_seed(0)),
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
    )


def main() -> int:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        paths = make_photos(Path(folder), 18)
        ours, theirs = (
            [batch for _ in range(2) for batch in one]
            for one in (loader(DataLoader, paths, 2), loader(torch.utils.data.DataLoader, paths, 0))
        )
    images, labels = (
        f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in ours[0]
    )
    print(f"{len(ours)} batches of {images} and {labels}")
    pairs = (zip(one, other, strict=True) for one, other in zip(ours, theirs, strict=True))
    same = all(torch.equal(*pair) for pair_of_batches in pairs for pair in pair_of_batches)
    print(f"the same as PyTorch's: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
