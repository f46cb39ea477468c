"""Values on their way through the pipeline, with where they come from."""

from __future__ import annotations

from typing import Any

from spdl_media._dataloading.ledger import Tag
from spdl_media._dataloading.state import Pairs
from spdl_media.pipeline.failures import short_repr

__all__ = ("Batch", "Item", "Sample", "value_of")


class Item:
    """An item of the source, for the preprocessor.

    Attributes:
        position: Its position in the source.
        value: What the source gave.
        done: Offsets of those of its samples that are not to be made again.
    """

    __slots__ = ("done", "position", "value")

    def __init__(self, position: int, value: Any, done: Pairs = ()) -> None:
        self.position = position
        self.value = value
        self.done = done

    def __repr__(self) -> str:
        # Reports of failures name the user's item.
        return short_repr(self.value)


class Sample:
    """What the preprocessor made of an item, or one of several such."""

    __slots__ = ("offset", "position", "value")

    def __init__(self, position: int, offset: int | None, value: Any) -> None:
        self.position = position
        self.offset = offset
        self.value = value

    @property
    def tags(self) -> list[Tag]:
        """Where it comes from."""
        return [(self.position, self.offset)]

    def __repr__(self) -> str:
        return short_repr(self.value)


class Batch:
    """What was made of several samples. Holds on to none of them."""

    __slots__ = ("tags", "value")

    def __init__(self, tags: list[Tag], value: Any) -> None:
        self.tags = tags
        self.value = value

    def __repr__(self) -> str:
        return short_repr(self.value)


def value_of(tagged: Any) -> Any:
    """The user's value: of a list of samples the list of their values."""
    if isinstance(tagged, list):
        return [sample.value for sample in tagged]
    return tagged.value


def tags_of(tagged: Any) -> list[Tag]:
    """Where the samples in it come from."""
    if isinstance(tagged, list):
        return [(sample.position, sample.offset) for sample in tagged]
    tags: list[Tag] = tagged.tags
    return tags
