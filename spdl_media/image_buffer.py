"""Images that wait in bytes until they are rows of a batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Unpack

from spdl_media.buffer import RELEASING, BufferMetadata, CPUBuffer
from spdl_media.image_frames import ImageFrames
from spdl_media.rows import FrameRows
from spdl_media.storage import Storage
from spdl_media.values import Values


class ImageBuffer(CPUBuffer):
    """A buffer of a decoded image, whose array is made when somebody asks for it.

    A batch does not ask: :func:`collate_images` writes the image to its row. So floats of an image are
    written once, and until then it is kept in bytes, a quarter of their size.

    Thread safety: safe.
    """

    __slots__ = ("_image", "_layout", "_lock", "_values")

    def __init__(
        self,
        image: ImageFrames,
        layout: Literal["NCHW", "NHWC"] | None,
        values: Values | None,
        **metadata: Unpack[BufferMetadata],
    ) -> None:
        # No array yet; None would be a released one.
        super().__init__((), **metadata)  # type: ignore[arg-type]
        self._image: ImageFrames | None = image
        self._layout, self._values = layout, values
        self._lock = threading.Lock()

    def _alive(self) -> Any:
        with self._lock:
            if self._image is not None:
                rows = self.rows(1, None)
                rows.put_image(0, self._image)
                self._array, self._image = rows.take().array[0], None
        return super()._alive()

    def __reduce__(self) -> tuple[Any, ...]:
        # Planes of FFmpeg's go to no other process: a copy has the array.
        return partial(CPUBuffer, self.array, **self.metadata), ()

    def release(self) -> None:
        """Give the memory back, as other buffers do."""
        # The outer lock first, as whoever asks for the array interface.
        with RELEASING, self._lock:
            self._image = None
            super().release()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self._alive()  # made before the lock of all buffers is taken
        return super().__array_interface__

    def rows(self, count: int, storage: Storage | None) -> FrameRows:
        """Rows for so many images like this one."""
        return FrameRows(count, storage, self._layout, self._values)

    def pending(self) -> tuple[ImageFrames, object] | None:
        """The image, and what others must share to be rows beside it; ``None``: it has become an array."""
        image = self._image
        if image is None:
            return None
        return image, (image.width, image.height, image.pix_fmt, self._layout, self._values)


def collate_images(images: Sequence[Any], storage: Storage | None) -> CPUBuffer | None:
    """Copy images to the rows of a buffer, each once.

    Returns:
        The buffer; ``None``: they are no such images, or not alike, or arrays already.
    """
    found = [one.pending() for one in images if type(one) is ImageBuffer]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < len(images) or len({kind for _, kind in pairs}) != 1:
        return None
    rows = images[0].rows(len(images), storage)
    for row, (image, _) in enumerate(pairs):
        rows.put_image(row, image)
    buffer: CPUBuffer = rows.take()
    if images[0].boxes is not None:
        buffer.boxes = tuple(box for one in images for box in one.boxes)
        buffer.flips = tuple(flip for one in images for flip in one.flips)
    return buffer
