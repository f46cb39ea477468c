"""Crop, augment and overlay while decoding, with FFmpeg filters and with random crops that return boxes.

Command::

    python samples/filters.py [OUT.jpg]

It reads ``samples/media``. Without OUT.jpg, the image is written to a temporary folder.

Output::

    plain       480x270 rgb24
    squared     224x224 rgb24
    stylised    224x224 rgb24
    cropped     4 boxes inside 480x270: True
    the same boxes for a mask: True
    overlay     30 frames of 480x270
    sheet       672x352

The sheet shows a frame padded, cropped and stylised; below, four random crops with flips, and the overlay.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import spdl_media as sm

VIDEO = Path(__file__).resolve().parent / "media" / "nasa_13013.mp4"
PHOTO = VIDEO.with_name("technician_turned.jpg")


def decode(packets: sm.VideoPackets, filter_desc: str | None) -> np.ndarray:
    """Return the first frame after a filter."""
    return np.asarray(sm.convert_frames(sm.decode_packets(packets, filter_desc)[0]))


def picture_in_picture(packets: sm.VideoPackets) -> sm.VideoFrames:
    """Overlay the video with a small, flipped copy of itself, by a graph of two inputs."""
    graph = sm.FilterGraph(
        "[inset]scale=120:-2,hflip,drawbox=color=white[small];[main][small]overlay=W-w-8:8,format=rgb24"
    )
    frames = sm.decode_packets(packets, filter_desc=None)
    graph.add_frames(frames, key="main")
    graph.add_frames(frames, key="inset")
    graph.flush()
    result = graph.get_frames()
    assert isinstance(result, sm.VideoFrames)
    return result


def main(out: Path) -> None:
    """Run the program; see the module."""
    packets = sm.demux_video(VIDEO, timestamp=(9, 10))
    plain = decode(packets, "format=rgb24")
    print(f"plain       {plain.shape[1]}x{plain.shape[0]} rgb24")

    size = {"scale_width": 224, "scale_height": 224}
    squared = [
        decode(packets, sm.get_video_filter_desc(**size, scale_mode=mode))
        for mode in ("pad", "crop", None)
    ]
    print(f"squared     {squared[0].shape[1]}x{squared[0].shape[0]} rgb24")
    desc = sm.get_video_filter_desc(
        **size, scale_mode="crop", filter_desc="hue=s=0.3,gblur=sigma=1.5,vignette"
    )
    squared[2] = decode(packets, desc)
    print(f"stylised    {squared[2].shape[1]}x{squared[2].shape[0]} rgb24")

    views = {"width": 112, "height": 112, "scale_mode": None}
    crops = sm.load_image_batch(
        [PHOTO] * 4, **views, crops=sm.RandomResizedCrop(scale=(0.1, 0.6)), flips=0.5, rng=4
    )
    boxes = crops.boxes or ()
    inside = all(x + width <= 480 and y + height <= 270 for x, y, width, height in boxes)
    print(f"cropped     {len(boxes)} boxes inside 480x270: {inside}")
    masks = sm.load_image_batch(
        [PHOTO] * 4, **views, scale_algo="neighbor", crops=boxes, flips=crops.flips
    )
    print(f"the same boxes for a mask: {masks.boxes == crops.boxes}")

    overlay = picture_in_picture(packets)
    print(f"overlay     {len(overlay)} frames of {overlay.width}x{overlay.height}")

    sheet = np.zeros((352, 672, 3), np.uint8)
    sheet[:224] = np.concatenate(squared, axis=1)
    sheet[224:336, :448] = np.concatenate(list(np.asarray(crops)), axis=1)
    small = decode_overlay(overlay)
    sheet[224 : 224 + small.shape[0], 448:] = small
    sm.save_image(out, sheet)
    print(f"sheet       {sheet.shape[1]}x{sheet.shape[0]}")


def decode_overlay(frames: sm.VideoFrames) -> np.ndarray:
    """Scale one decoded frame to a width of 224 pixels with a graph."""
    graph = sm.FilterGraph("scale=224:-2,format=rgb24")
    graph.add_frames(frames[:1])
    graph.flush()
    small = graph.get_frames()
    assert isinstance(small, sm.VideoFrames)
    return np.asarray(sm.convert_frames(small[0]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "sheet.jpg")
