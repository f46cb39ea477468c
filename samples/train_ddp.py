"""Train in ranks that stay in step, stop in the middle of an epoch, and go on with another number of them.

Commands::

    python samples/train_ddp.py
    torchrun --nproc-per-node=2 samples/train_ddp.py

The first one makes 101 JPEGs in a temporary folder, five of them cut short, and runs the second one twice:
with two ranks, which stop, and with one, which goes on. Each trains a linear classifier by
DistributedDataParallel over gloo, without a GPU. It needs PyTorch.

Output::

    2 ranks, epoch 0: 7 batches each, 100 images, 5 replaced, none on two ranks
    2 ranks, epoch 1: 3 batches each, 48 images, 3 replaced, none on two ranks
    stopped and saved
    1 rank, epoch 1: 7 batches each, 53 images, 2 replaced, none on two ranks
    the ranks have the same weights, and epoch 1 had each of the 96 good images

What it shows: the ranks share out an epoch that is shuffled anew each time, by one seed. All have as many
batches: the 101st image is left out, and ``on_error="replace"`` puts a good image of the rank's own share in
the place of a damaged one. If a rank had a batch less, the other would wait for it without end. Each rank's
``state_dict()`` says what it has done; any number of ranks takes the states of all, and what is left of the
epoch comes once.

Exit status: 0, or 1 if the ranks differ or an image did not come.
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
from made_media import COLORS, cut_short, make_photos

import spdl_media as sm

SIDE, NUM_EPOCHS, NUM_DAMAGED = 16, 2, 5
RECIPE = sm.ImageRecipe(SIDE, random_crop=True, flip=0.5, dtype="float32")


def load(item: tuple[str, int], rng: np.random.Generator) -> tuple[Any, int, int]:
    """An image, its class, and its number, which tells below what came."""
    path, label = item
    return RECIPE(path, rng), label, int(Path(path).stem)


def loader(folder: Path, **ranks: int) -> sm.DataLoader:
    """Rank and world size are those of ``torch.distributed``, unless said otherwise."""
    return sm.DataLoader(
        sm.ImageFolder(folder, shuffle=True, seed=0, uneven="drop", **ranks),
        preprocessor=load,
        batch_size=8,
        output_order="input",
        to="torch",
        on_error="replace",
    )


def train(folder: Path, stop_after: int | None) -> bool:
    """What a rank does; tells whether all is right."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, len(COLORS)))
    batches, saved = loader(folder / "photos"), folder / "checkpoint.pt"
    given: set[int] = set()
    if saved.exists():
        checkpoint = torch.load(saved)
        layers.load_state_dict(checkpoint["weights"])
        batches.load_state_dict(checkpoint["states"])  # of all ranks that there were
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
    dist.destroy_process_group()
    return is_right


def check_shapes(batch: torch.Tensor) -> None:
    """Have all ranks fail where one has items of another shape, which collectives would hang or go wrong on.

    Raises:
        ValueError: The shapes differ, but for the number of items.
    """
    shapes = gathered(tuple(batch.shape[1:]))
    if len(set(shapes)) > 1:
        told = ", ".join(f"rank {rank} has {shape}" for rank, shape in enumerate(shapes))
        raise ValueError(f"items differ between ranks: {told}. Give all loaders the same size")


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(text: str) -> None:
    """Print once, whatever the number of ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def make(folder: Path) -> None:
    """Write the images, some of them cut short."""
    for path in make_photos(folder / "photos", 101)[::21]:
        cut_short(path)


def run(folder: Path, num_ranks: int, *stop_after: str) -> int:
    """Run this program in several processes, as torchrun does."""
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
        # Each rank of torchrun makes the same images: no two need to share a disk.
        make(Path(name))
        return not train(Path(name), None)


if __name__ == "__main__":
    sys.exit(main())
