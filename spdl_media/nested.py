"""Nested containers, as data sets and batches give them: lists, tuples, mappings and dataclasses.

Leaves are mapped, and containers are made again with other values, without asking their constructors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

__all__ = ("Key", "fields_of", "map_nested", "rebuilt", "with_fields")

Key: TypeAlias = str | int


def map_nested(value: Any, move: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested lists, tuples, mappings and dataclasses.

    Returns:
        Containers of the same kinds; a dict for a mapping of the user's that copies no items. A dataclass is
        a copy whose fields are set, without its ``__init__``.
    """
    fields = fields_of(value)
    if fields is None:
        return move(value)
    return rebuilt(value, {key: map_nested(one, move) for key, one in fields.items()})


def rebuilt(value: Any, moved: dict[Key, Any]) -> Any:
    """A container like this one, of other values for its fields."""
    if isinstance(value, list):
        return type(value)(list(moved.values()))
    if isinstance(value, MutableMapping):
        # A copy knows more than its items: a defaultdict its factory, a class of the user's its fields.
        copies = isinstance(value, dict) or hasattr(value, "__copy__")
        like: Any = copy.copy(value) if copies else {}
        if getattr(value, "__dict__", None) is value:  # its items are its attributes
            like.__dict__ = like
        for key, one in moved.items():  # update() of a Counter adds
            like[key] = one
        return like
    if isinstance(value, Mapping):
        return type(value)(moved)  # type: ignore[call-arg]  # those of Python take a dict
    return with_fields(value, moved)


def fields_of(value: Any) -> dict[Key, Any] | None:
    """The fields of a structure by name, key or index, without those of a dataclass that are not set.

    Returns:
        ``None``: it is a plain value.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def with_fields(value: Any, fields: Mapping[Key, Any]) -> Any:
    """A tuple or dataclass like this one, of other values."""
    if isinstance(value, tuple):
        # Without its own __new__, which may take other arguments.
        return tuple.__new__(type(value), fields.values())
    # Without its __init__, which may check or compute. This sets the fields of frozen ones too.
    result = copy.copy(value)
    for name, one in fields.items():
        object.__setattr__(result, str(name), one)
    return result
