"""How far an epoch has come, as a value that can be written down and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

__all__ = ("Pairs", "Snapshot", "State")

VERSION = 1

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open intervals ``start <= number < stop``, in order and apart from each other."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source said of itself behind the item before ``position``."""

    position: int
    state: Any


@dataclass(frozen=True, slots=True)
class State:
    """How far an epoch has come.

    Attributes:
        epoch: The epoch.
        seed: Of the loader.
        done: Positions in the source whose samples have all been handed out, dropped or failed.
        partly_done: By position, of items of which some samples are done, the offsets of those.
        snapshot: The source's own state at or before the first position that is not done, of
            sources that have one.
        source_length: Items of an epoch, if the source knows it.
    """

    epoch: int
    seed: int
    done: Pairs = ()
    partly_done: tuple[tuple[int, Pairs], ...] = ()
    snapshot: Snapshot | None = None
    source_length: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the epoch is done."""
        return not self.done and not self.partly_done

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and dictionaries, but for what the source's own state is made of."""
        leading = self.done[0][1] if self.done and self.done[0][0] == 0 else 0
        beyond = self.done[1:] if leading else self.done
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "seed": self.seed,
            "num_done": leading,
            "done_beyond": [list(pair) for pair in beyond],
            "partly_done": [
                [position, [list(pair) for pair in offsets]]
                for position, offsets in self.partly_done
            ],
            "source": None
            if self.snapshot is None
            else {"position": self.snapshot.position, "state": self.snapshot.state},
            "source_length": self.source_length,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Read what :meth:`to_dict` wrote.

        Raises:
            TypeError: It is no mapping.
            ValueError: It was not written by a DataLoader, or by a later release.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state must be a mapping, as state_dict() returns, not {type(state).__name__}"
            )
        if state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this release reads version {VERSION}; "
                "pass what state_dict() of a spdl_media.DataLoader returned"
            )
        try:
            return cls._read(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the state is incomplete or damaged ({type(error).__name__}: {error}); pass what "
                "state_dict() of a spdl_media.DataLoader returned"
            ) from error

    @classmethod
    def _read(cls, state: Mapping[str, Any]) -> State:
        leading = _count(state["num_done"])
        done = ((0, leading),) if leading else ()
        source = state["source"]
        length = state["source_length"]
        return cls(
            epoch=_count(state["epoch"]),
            seed=_count(state["seed"]),
            done=_pairs([*done, *state["done_beyond"]]),
            partly_done=tuple(
                (_count(position), _pairs(offsets)) for position, offsets in state["partly_done"]
            ),
            snapshot=None
            if source is None
            else Snapshot(_count(source["position"]), source["state"]),
            source_length=None if length is None else _count(length),
        )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _pairs(intervals: Any) -> Pairs:
    pairs = tuple((_count(start), _count(stop)) for start, stop in intervals)
    bounds = [bound for pair in pairs for bound in pair]
    if any(left >= right for left, right in pairwise(bounds)):
        raise ValueError(f"{pairs} are no intervals in order")
    return pairs
