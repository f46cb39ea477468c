"""Train on two ranks with damaged files, stop in the middle of an epoch, and resume with one rank.

Commands::

    python samples/train_ddp.py
    torchrun --nproc-per-node=2 samples/train_ddp.py

The first command makes 101 JPEGs in a temporary folder, five of them truncated, and runs the second command
twice: with two ranks, which stop, and with one rank, which resumes. They train a linear classifier with
DistributedDataParallel over gloo, without a GPU. It needs PyTorch.

Output::

    2 ranks, epoch 0: 7 batches each, 100 images, 5 replaced, none on two ranks
    2 ranks, epoch 1: 3 batches each, 48 images, 3 replaced, none on two ranks
    stopped and saved
    1 rank, epoch 1: 7 batches each, 53 images, 2 replaced, none on two ranks
    the ranks have the same weights, and epoch 1 had each of the 96 good images

The ranks split the epoch, which is shuffled by one seed. All ranks have the same number of batches: the 101st
image is dropped, and ``on_error="replace"`` replaces a damaged image with a good image of the same rank. With
a batch less, the other rank would wait forever. Each rank saves its ``state_dict()``. Any number of ranks can
load the states of all ranks, and each remaining sample of the epoch comes once.

Exit status: 0, or 1 if the ranks differ or an image is missing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# DistributedDataParallel imports this module, too. If that comes after init_process_group(), defaults of its
# functions keep the process group, and the group's threads may abort Python at its end.
import torch.distributed.nn
from made_media import COLORS, cut_short, make_photos

import spdl_media as sm

SIDE, NUM_EPOCHS, NUM_DAMAGED = 16, 2, 5
RECIPE = sm.ImageRecipe(SIDE, random_crop=True, flip=0.5, dtype="float32")


def load(item: tuple[str, int], rng: np.random.Generator) -> tuple[Any, int, int]:
    """Load an image, with its class and its number, which identifies it below."""
    path, label = item
    return RECIPE(path, rng), label, int(Path(path).stem)


def loader(folder: Path, **ranks: int) -> sm.DataLoader:
    """Make the loader. The rank and world size come from ``torch.distributed`` by default."""
    return sm.DataLoader(
        sm.ImageFolder(folder, shuffle=True, seed=0, uneven="drop", **ranks),
        preprocessor=load,
        batch_size=8,
        output_order="input",
        to="torch",
        on_error="replace",
    )


def train(folder: Path, stop_after: int | None) -> bool:
    """Train one rank. Return whether all checks passed."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, len(COLORS)))
    batches, saved = loader(folder / "photos"), folder / "checkpoint.pt"
    given: set[int] = set()
    if saved.exists():
        checkpoint = torch.load(saved)
        layers.load_state_dict(checkpoint["weights"])
        batches.load_state_dict(checkpoint["states"])  # of all ranks of the earlier run
        given = checkpoint["given"]
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_right = True
    for epoch in range(batches.epoch, NUM_EPOCHS):
        numbers, num_batches, num_replaced = [], 0, 0
        is_last = epoch == NUM_EPOCHS - 1
        for images, labels, which in itertools.islice(batches, stop_after if is_last else None):
            if not num_batches:
                check_shapes(images)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            numbers += which.tolist()
            num_batches += 1
            num_replaced += len(batches.replaced)
        ranks = gathered((numbers, num_batches, num_replaced))
        different = [set(one) for one, _, _ in ranks]
        is_apart = len(set().union(*different)) == sum(map(len, different))
        is_right &= is_apart and len({count for _, count, _ in ranks}) == 1
        given = given.union(*different) if is_last else given
        say(
            f"{len(ranks)} rank{'s' * (len(ranks) > 1)}, epoch {epoch}: {num_batches} batches each, "
            f"{sum(len(one) for one, _, _ in ranks)} images, {sum(one for _, _, one in ranks)} replaced, "
            f"{'none' if is_apart else 'some'} on two ranks"
        )
    weights = gathered(layers.state_dict())
    is_right &= all(torch.equal(one[name], weights[0][name]) for one in weights for name in one)
    states = gathered(batches.state_dict())
    if stop_after is not None:
        if dist.get_rank() == 0:
            torch.save({"weights": weights[0], "states": states, "given": given}, saved)
        say("stopped and saved")
    elif saved.exists():
        good = len(list((folder / "photos").rglob("*.jpg"))) - NUM_DAMAGED
        is_right &= len(given) == good
        say(f"the ranks have the same weights, and epoch 1 had each of the {good} good images")
    # PyTorch 2.13 may abort a rank that exits while gloo's threads release what it gathered last. It hangs if
    # the model is the last to hold the process group then.
    del model
    dist.barrier()
    dist.destroy_process_group()
    return is_right


def check_shapes(batch: torch.Tensor) -> None:
    """Raise on all ranks if the item shapes differ between ranks; collectives could hang or fail on them.

    Raises:
        ValueError: The shapes differ in more than the number of items.
    """
    shapes = gathered(tuple(batch.shape[1:]))
    if len(set(shapes)) > 1:
        told = ", ".join(f"rank {rank} has {shape}" for rank, shape in enumerate(shapes))
        raise ValueError(f"items differ between ranks: {told}. Give all loaders the same size")


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(text: str) -> None:
    """Print on one rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def make(folder: Path) -> None:
    """Write the images, some of them truncated."""
    for path in make_photos(folder / "photos", 101)[::21]:
        cut_short(path)


def run(folder: Path, num_ranks: int, *stop_after: str) -> int:
    """Run this program in several processes with torchrun."""
    options = ["--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, str(folder)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, *stop_after], env=environment, check=False).returncode  # noqa: S603


def main() -> int:
    """Run the program; see the module."""
    if len(sys.argv) > 1:  # a rank of run()
        return not train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    with tempfile.TemporaryDirectory() as name:
        if "RANK" not in os.environ:
            make(Path(name))
            return run(Path(name), 2, "3") or run(Path(name), 1)
        # Each rank of torchrun makes the same images, because ranks need not share a disk.
        make(Path(name))
        return not train(Path(name), None)


if __name__ == "__main__":
    sys.exit(main())
