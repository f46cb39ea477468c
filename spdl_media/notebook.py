"""Small images of frames and arrays, as notebooks show them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from html import escape
from itertools import islice
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

# Of a batch or a video, so many are shown, none larger than this.
NUM_SHOWN, LONGEST_SIDE = 8, 160
# Audio is an array, too: no image is narrower than it has channels.
_SHORTEST_SIDE = 9

_Labelled: TypeAlias = tuple[npt.NDArray[np.uint8], str]


def gallery(caption: str, images: Iterable[_Labelled]) -> str:
    """Return images beside each other, each with its label, below what ``repr`` says."""
    shown = "".join(
        '<figure style="display:inline-block;margin:4px;text-align:center">'
        f'<img alt="{escape(label)}" src="data:image/png;base64,'
        f'{base64.b64encode(_png(image)).decode()}"><figcaption>{escape(label)}</figcaption></figure>'
        for image, label in images
    )
    return f"<div><code>{escape(caption)}</code><div>{shown}</div></div>"


def of_frames(frames: Sequence[av.VideoFrame], labels: Sequence[str]) -> Iterable[_Labelled]:
    """Small RGB images of frames, (H, W, 3), from first to last; none of those that FFmpeg cannot convert."""
    # A frame keeps a reformatter of its own, which no two threads may use at once.
    reformatter = VideoReformatter()
    for index in np.unique(np.linspace(0, len(frames) - 1, NUM_SHOWN).astype(int)):
        frame = frames[index]
        scale = min(1.0, LONGEST_SIDE / max(frame.width, frame.height))
        width, height = (max(1, round(side * scale)) for side in (frame.width, frame.height))
        with suppress(av.error.FFmpegError, ValueError):
            small: Any = reformatter.reformat(frame, width, height, "rgb24").to_ndarray()
            yield small, labels[index]


def of_array(array: npt.NDArray[Any]) -> Iterable[_Labelled]:
    """Small images of the first images of an array, channels last or first; of other arrays none."""
    if array.ndim < 3 or array.dtype.kind not in "uif":
        return
    if array.shape[-1] not in (1, 3, 4):
        # Not moved when the channels are neither first nor last: then it holds no images.
        array = np.moveaxis(array, -3, -1)
    height, width, channels = array.shape[-3:]
    if channels not in (1, 3, 4) or min(height, width) < _SHORTEST_SIDE:
        return
    step = -(-max(height, width) // LONGEST_SIDE)
    for place in islice(np.ndindex(array.shape[:-3]), NUM_SHOWN):
        yield _levels(array[place][::step, ::step]), ", ".join(map(str, place))


def _levels(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """An image as bytes; floats from their least to their greatest value, for they may be normalised."""
    if image.dtype == np.uint8:
        return image
    values = image.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    if image.dtype.kind != "f":
        low, high = 0.0, float(np.iinfo(image.dtype).max)
    scaled = (values - low) * (255 / (high - low or 1.0))
    return np.clip(np.nan_to_num(scaled), 0, 255).astype(np.uint8)


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    """Encode (H, W, C) of 1, 3 or 4 channels."""
    pix_fmt = {1: "gray", 3: "rgb24", 4: "rgba"}[image.shape[-1]]
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), pix_fmt, channel_last=True)
    encoder = av.VideoCodecContext.create("png", "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, pix_fmt
    encoder.time_base = Fraction(1)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
