"""Ranks that share out the items of an epoch: whether they agree on what they share out."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from spdl_media.epochs import order_of_ranks, place_of

_PACKAGE = str(Path(__file__).parent) + os.sep
# Of loaders whose ranks get equally many items.
_BATCHES = ("batch_size", "drop_last")
# How many loaders were made at each line of the program.
_loaders: Counter[str] = Counter()


def compare_ranks(loader: Any, source: Any, epoch: int, key: str) -> None:
    """Compare the order of an epoch with that of the rank of ``torch.distributed`` that has begun it first.

    Args:
        loader: The loader.
        source: Its source. One that is not shared out over just these ranks is not compared.
        epoch: The epoch.
        key: The same on all ranks for the same iteration, and no other.

    Raises:
        ValueError: The other rank has another order.
    """
    # Asked if the program has imported it; nothing is imported for it.
    torch = sys.modules.get("torch.distributed")
    rank, world_size = place_of(source)
    if world_size == 1 or torch is None or not torch.is_available() or not torch.is_initialized():
        return
    # Groups of ranks may share out data otherwise than all of them.
    if (rank, world_size) != (torch.get_rank(), torch.get_world_size()):
        return
    store = torch.distributed_c10d._get_default_store()
    # MPI has none.
    if store is None:
        return
    ours = {**order_of_ranks(source), "epoch": epoch}
    # Other ranks give as many batches as this one if they make them of as many items.
    if getattr(getattr(source, "sampler", source), "_uneven", "keep") != "keep":
        ours |= {name: getattr(loader, name) for name in _BATCHES}
    # The first one writes down its own, and each other one reads that: nobody waits.
    first = store.compare_set(f"spdl_media/{key}", "", json.dumps([rank, ours]))
    other, theirs = json.loads(first)
    differences = [
        f"{name} {ours.get(name)} and {theirs.get(name)}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    if differences and differences[0].startswith(_BATCHES):
        raise ValueError(
            f"ranks {rank} and {other} make different batches of equally many items, so one would wait for "
            f"the other: {', '.join(differences)}. Make their loaders with the same arguments, or with "
            'uneven="keep" for ranks that need no equal number of batches'
        )
    if differences:
        raise ValueError(
            f"ranks {rank} and {other} share out different epochs, so some items would come twice and others "
            f"never: {', '.join(differences)}. Make the samplers of all ranks with the same arguments, over "
            "the same data, and set the same epoch"
        )


def origin_of_loader() -> str:
    """Name a loader that is being made by the line of the program, and its number at that line.

    Not by its number alone: one rank may make more loaders than the others.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    _loaders[line] += 1
    return f"{line}/{_loaders[line]}"
