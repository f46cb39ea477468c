"""Which of the processes of a distributed training this is."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from spdl_media._checks import check_int

__all__ = ("Place", "find_place")


class Place(NamedTuple):
    """A process among those that train together."""

    rank: int
    world_size: int


def find_place(rank: int | None, world_size: int | None) -> Place:
    """What the caller says, else what PyTorch says, else the environment, else that it is the only one.

    PyTorch is asked if the caller's program has imported it and joined a process group; nothing is imported.

    Raises:
        ValueError: One of the two is given without the other, or they do not fit each other.
    """
    if rank is not None or world_size is not None:
        return _checked(rank, world_size, "the arguments", "pass both, or neither")
    return _of_torch() or _of_environment() or Place(0, 1)


def _of_torch() -> Place | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Place(distributed.get_rank(), distributed.get_world_size())


def _of_environment() -> Place | None:
    rank, world_size = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    if not rank and not world_size:
        return None
    remedy = "set both variables (torchrun does), unset both, or pass rank= and world_size="
    return _checked(
        _number("RANK", rank), _number("WORLD_SIZE", world_size), "RANK and WORLD_SIZE", remedy
    )


def _number(name: str, text: str) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be a whole number, not {text!r}"
        ) from None


def _checked(rank: int | None, world_size: int | None, where: str, remedy: str) -> Place:
    if rank is None or world_size is None:
        raise ValueError(f"{where} give rank {rank} and world size {world_size}; {remedy}")
    place = Place(
        check_int("rank", rank, at_least=0), check_int("world_size", world_size, at_least=1)
    )
    if place.rank >= place.world_size:
        raise ValueError(
            f"{where} give rank {place.rank} of {place.world_size} processes; ranks count from 0 to "
            f"{place.world_size - 1}"
        )
    return place
