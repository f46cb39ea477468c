"""Ranks that share out the items of an epoch: whether they agree on what they share out."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

from spdl_media._epochs import order_of_ranks, place_of

LOG = logging.getLogger("spdl_media.pipeline")

# A rank that begins an epoch later than that is slow, or iterates another number of times.
ANSWER_SECONDS = 60.0

_PACKAGE = str(Path(__file__).parent) + os.sep
# Of loaders whose ranks get equally many items.
_BATCHES = ("batch_size", "drop_last")
# How many loaders were made at each line of the program.
_loaders: Counter[str] = Counter()


class RankCheck:
    """Compares the order of an epoch with those of the other ranks, without waiting for them.

    Each rank writes down its own in the store of ``torch.distributed``, and looks for those of the others
    whenever a batch is handed out, until it has seen all. Ranks whose steps are synchronised have begun the
    epoch when one of them asks for its second batch.
    """

    def __init__(
        self, store: Any, key: str, rank: int, world_size: int, order: dict[str, Any]
    ) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._order = order
        self._waiting = [other for other in range(world_size) if other != rank]
        self._deadline = monotonic() + ANSWER_SECONDS
        store.set(f"{self._key}/{rank}", json.dumps(order))

    def look(self) -> None:
        """Compare with the ranks that have begun since.

        Raises:
            ValueError: One of them has another order.
        """
        while self._waiting and self._store.check([f"{self._key}/{self._waiting[0]}"]):
            other = self._waiting.pop(0)
            theirs = json.loads(self._store.get(f"{self._key}/{other}"))
            differences = [
                f"{name} {self._order.get(name)} and {theirs.get(name)}"
                for name in {**self._order, **theirs}
                if self._order.get(name) != theirs.get(name)
            ]
            if differences and differences[0].startswith(_BATCHES):
                raise ValueError(
                    f"ranks {self._rank} and {other} make different batches of equally many items, so one "
                    f"would wait for the other: {', '.join(differences)}. Make their loaders with the same "
                    'arguments, or with uneven="keep" for ranks that need no equal number of batches'
                )
            if differences:
                raise ValueError(
                    f"ranks {self._rank} and {other} share out different epochs, so some items would come "
                    f"twice and others never: {', '.join(differences)}. Make the samplers of all ranks with "
                    "the same arguments, over the same data, and set the same epoch"
                )
        if self._waiting and monotonic() > self._deadline:
            LOG.warning(
                "rank %d has not begun this epoch within %.0f s, so its seed and length were not compared "
                "with those of rank %d",
                *(self._waiting[0], ANSWER_SECONDS, self._rank),
            )
            self._waiting = []


def check_of_ranks(loader: Any, source: Any, epoch: int, key: str) -> RankCheck | None:
    """Write down the order of an epoch for the other ranks of ``torch.distributed``.

    Args:
        loader: The loader.
        source: Its source.
        epoch: The epoch.
        key: The same on all ranks for the same iteration, and no other.

    Returns:
        What compares it with theirs; ``None`` where the source is not shared out over just these ranks.
    """
    # Asked if the program has imported it; nothing is imported for it.
    torch = sys.modules.get("torch.distributed")
    rank, world_size = place_of(source)
    if world_size == 1 or torch is None or not torch.is_available() or not torch.is_initialized():
        return None
    # Groups of ranks may share out data otherwise than all of them.
    if (rank, world_size) != (torch.get_rank(), torch.get_world_size()):
        return None
    store = torch.distributed_c10d._get_default_store()
    # MPI has none.
    if store is None:
        return None
    order = {**order_of_ranks(source), "epoch": epoch}
    # Other ranks give as many batches as this one if they make them of as many items.
    if getattr(getattr(source, "sampler", source), "_uneven", "keep") != "keep":
        order |= {name: getattr(loader, name) for name in _BATCHES}
    return RankCheck(store, f"spdl_media/{key}", rank, world_size, order)


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
