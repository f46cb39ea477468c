"""Train in two processes that stay in step, though files are damaged: each rank gives as many batches.

Command::

    python samples/train_ddp.py

It makes 100 JPEGs in a temporary folder, five of them cut short, and trains a linear classifier by
DistributedDataParallel over gloo, without a GPU. It needs PyTorch.

Output::

    rank 0: 2 epochs of 7 batches, 100 images, 3 replaced
    rank 1: 2 epochs of 7 batches, 100 images, 7 replaced
    the same weights: True

``on_error="replace"`` puts a good image of the rank's own share in the place of a damaged one. Where it is
left out instead, a rank may have a batch less, and the other waits for it without end.

Exit status: 0, or 1 if the weights of the ranks differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from made_media import COLORS, cut_short, make_photos

import spdl_media as sm

SIDE, NUM_RANKS, NUM_EPOCHS = 16, 2, 2


def loader(folder: Path, **ranks: int) -> sm.DataLoader:
    """Rank and world size are those of ``torch.distributed``, unless said otherwise."""
    return sm.DataLoader(
        sm.ImageFolder(folder, shuffle=True, seed=0, **ranks),
        preprocessor=sm.ImageRecipe(SIDE, random_crop=True, flip=0.5, dtype="float32"),
        batch_size=8,
        output_order="input",
        to="torch",
        on_error="replace",
    )


def train(rank: int, folder: Path) -> None:
    """What a rank does."""
    meeting = f"file://{folder.parent}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, len(COLORS)))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, num_batches, num_images, num_replaced = loader(folder), 0, 0, 0
    for _ in range(NUM_EPOCHS):  # each iteration is the next epoch, as by set_epoch
        for images, labels in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            num_batches += 1
            num_images += len(labels)
            num_replaced += len(batches.replaced)
    line = (
        f"rank {rank}: {NUM_EPOCHS} epochs of {num_batches // NUM_EPOCHS} batches, "
        f"{num_images} images, {num_replaced} replaced"
    )
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, (line, layers.state_dict()))
    dist.destroy_process_group()
    if rank == 0:
        print(*(line for line, _ in found), sep="\n")
        (_, first), (_, second) = found
        same = all(torch.equal(first[name], second[name]) for name in first)
        print(f"the same weights: {same}")
        sys.exit(0 if same else 1)


def main() -> None:
    """Run the program; see the module."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "photos"
        for path in make_photos(folder, 100)[::21]:
            cut_short(path)
        torch.multiprocessing.spawn(train, (folder,), NUM_RANKS)


if __name__ == "__main__":
    main()
