"""Memory of frames that are gone, kept by the C library for the next ones."""

from __future__ import annotations

from functools import cache

import numpy as np

_BLOCK = 4 << 20


@cache
def keep_freed_memory() -> None:
    """Let glibc's allocator keep some megabytes that were freed, once in a process.

    It gives the end of its heap back to the system when that is larger than a limit, at first 128 KiB, which
    the frames of one small picture exceed, and takes it anew for the next: 24 to 33 page faults a picture,
    and 6% of the time in which JPEGs of 500x375 are loaded into a pool. When a block is freed that was larger
    than the limit, glibc raises it to twice its size. So one is freed here, whose pages are never touched.
    Other allocators take no notice.

    See:
        mallopt(3), ``M_MMAP_THRESHOLD`` and its dynamic adjustment
    """
    np.empty(_BLOCK, np.uint8)
