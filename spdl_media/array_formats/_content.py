"""The memory that a reader of this folder is given."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

from spdl_media.readers import memory_of

Content: TypeAlias = bytes | memoryview
"""A whole file in memory: ``bytes``, or a flat view of another buffer."""


def content_of(data: Any, format: str) -> Content:
    """The memory behind the argument of a public function, without a copy.

    Raises:
        TypeError: It is no memory.
        ValueError: It is not contiguous.
    """
    content = None if isinstance(data, str | os.PathLike) else memory_of(data)
    if content is None:
        raise TypeError(
            f"{format} is read from bytes, another contiguous buffer or a 1-D uint8 array, not "
            f"{type(data).__name__}. Read the file first: pathlib.Path(...).read_bytes(), or mmap."
        )
    return content


def name_of(content: Content) -> str:
    """What errors call such a source."""
    return f"bytes of length {len(content)}"
