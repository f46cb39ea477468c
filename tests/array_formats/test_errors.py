"""ArrayFormatError: its message, its attributes after pickling, and its base classes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import spdl_media as sm
from spdl_media.errors import with_message

FIELDS = ("source", "member", "offset", "pts_seconds", "packet_index", "args")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "is damaged"),
        ({"source": "a.tar"}, "a.tar: is damaged"),
        ({"offset": 7}, "is damaged (at byte 7)"),
        ({"member": "x"}, "member 'x': is damaged"),
        (
            {"source": "a.tar", "member": "x", "offset": 0},
            "a.tar: member 'x': is damaged (at byte 0)",
        ),
    ],
)
def test_text_and_pickle(fields: dict[str, Any], text: str) -> None:
    error = sm.ArrayFormatError("is damaged", **fields)
    assert str(error) == text
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is sm.ArrayFormatError
        assert str(again) == text
        assert [getattr(again, name) for name in FIELDS] == [
            getattr(error, name) for name in FIELDS
        ]
    assert str(with_message(error, "other")) == text.replace("is damaged", "other")


def test_place_in_the_tree() -> None:
    assert issubclass(sm.ArrayFormatError, sm.DecodeError)
    assert issubclass(sm.ArrayFormatError, ValueError)
    assert str(sm.ArrayFormatError()) == ""
