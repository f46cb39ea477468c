"""Opened videos that are kept, for data sets of many."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from functools import partial
from typing import Any

from spdl_media._checks import check_int
from spdl_media.video_file import VideoFile

__all__ = ("VideoCache",)


class VideoCache:
    """Opened videos, the ones last used, so that further clips of one open nothing.

    A video that falls out of the cache stays usable for whoever holds it, and closes with its last user. One
    that was closed is opened anew; of one that is written anew under its name, the old one may be kept.

    Args:
        max_videos: How many are kept.
        max_bytes: What they may take together, by :attr:`VideoFile.nbytes`; ``None``: no limit. The last one
            is kept whatever it takes.
        **options: Of each :class:`VideoFile`.

    Raises:
        ValueError: A limit is below 1.

    Thread safety: safe. Threads that ask for one video get the same one, and their calls wait for each other.
    A copy in another process begins empty.

    Example::

        cache = sm.VideoCache(64)

        def load(path):
            return sm.sample_clips(cache.open(path), num_clips=4, num_frames=16, width=224, height=224)
    """

    def __init__(
        self, max_videos: int = 16, *, max_bytes: int | None = None, **options: Any
    ) -> None:
        self._max_videos = check_int("max_videos", max_videos)
        self._max_bytes = None if max_bytes is None else check_int("max_bytes", max_bytes)
        self._options = options
        self._videos: OrderedDict[str, VideoFile] = OrderedDict()
        self._lock = threading.RLock()

    def open(self, src: str | os.PathLike[str]) -> VideoFile:
        """The opened video of a path or URL, which is opened if it is not kept.

        Raises:
            SourceError: It cannot be opened; and what else :class:`VideoFile` raises.
            TypeError: It is no path or URL.
        """
        key = os.fspath(src)
        if not isinstance(key, str):
            raise TypeError(f"a VideoCache opens paths and URLs, not {type(key).__name__}")
        with self._lock:
            video = self._videos.pop(key, None)
            if video is not None and not video.closed:
                self._videos[key] = video
                return video
        # Without the lock: opening may take long, and other threads have videos of their own.
        opened = VideoFile(src, **self._options)
        with self._lock:
            video = self._videos.setdefault(key, opened)
            self._videos.move_to_end(key)
            most = math.inf if self._max_bytes is None else self._max_bytes
            while len(self) > 1 and (len(self) > self._max_videos or self.nbytes > most):
                self._videos.popitem(last=False)
        return video

    @property
    def nbytes(self) -> int:
        """Bytes that the kept videos take, about."""
        with self._lock:
            return sum(video.nbytes for video in self._videos.values())

    def clear(self) -> None:
        """Forget all videos."""
        with self._lock:
            self._videos.clear()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._videos)

    def __reduce__(self) -> tuple[Any, ...]:
        new = partial(VideoCache, max_bytes=self._max_bytes, **self._options)
        return new, (self._max_videos,)
