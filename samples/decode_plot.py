"""Decode an image, a video and its audio, convert them to arrays, and plot them.

Command::

    python samples/decode_plot.py [OUT.png]

It reads ``samples/media``, and needs matplotlib. Without OUT.png, the plot is written to a temporary folder.

Output::

    image     ImageFrames    270x480 yuvj420p as stored, rotation 90
    -> array  (270, 480, 3) uint8
    video     VideoFrames    30 frames 480x270 yuv420p, 1.001 s to 1.969 s
    -> array  (30, 270, 480, 3) uint8
    audio     AudioFrames    16000 samples fltp at 16000 Hz
    -> array  (2, 16000) float32
    plotted: the image, the first and last frame with their luma, and the audio

Frames keep the decoder's planes. ``convert_frames`` copies them into the array; this is the only copy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import spdl_media as sm

MEDIA = Path(__file__).resolve().parent / "media"


def main(out: Path) -> None:
    """Run the program; see the module."""
    packets = sm.demux_image(MEDIA / "technician_turned.jpg")
    stored = sm.decode_packets(packets, filter_desc=None)
    upright = sm.decode_packets(packets)
    image = sm.convert_frames(upright)
    print(
        f"image     ImageFrames    {stored.width}x{stored.height} {stored.pix_fmt} as stored, "
        f"rotation {stored.rotation}"
    )
    print(f"-> array  {image.shape} {image.dtype}")

    clip = sm.demux_video(MEDIA / "nasa_13013.mp4", timestamp=(1, 2))
    planes = sm.decode_packets(clip, filter_desc=None)
    frames = sm.convert_frames(sm.decode_packets(clip))
    first, last = planes.timestamps[0], planes.timestamps[-1]
    print(
        f"video     VideoFrames    {len(planes)} frames {planes.width}x{planes.height} "
        f"{planes.pix_fmt}, {first:.3f} s to {last:.3f} s"
    )
    print(f"-> array  {frames.shape} {frames.dtype}")

    audio = sm.decode_packets(sm.demux_audio(MEDIA / "nasa_13013.mp4", timestamp=(1, 2)))
    wave = sm.convert_frames(audio)
    print(
        f"audio     AudioFrames    {len(audio)} samples {audio.sample_fmt} at {audio.sample_rate} Hz"
    )
    print(f"-> array  {wave.shape} {wave.dtype}")

    figure = Figure(figsize=(10, 6), layout="constrained")
    grid = figure.add_gridspec(3, 3)
    pictures = {
        "the image, upright": (np.asarray(image), (0, 0)),
        f"{first:.3f} s": (np.asarray(frames)[0], (0, 1)),
        f"{last:.3f} s": (np.asarray(frames)[-1], (0, 2)),
        "its luma, as decoded": (planes[0].planes[0], (1, 1)),
        "its luma, as decoded ": (planes[-1].planes[0], (1, 2)),
        "blue-difference chroma": (planes[0].planes[1], (1, 0)),
    }
    for title, (pixels, place) in pictures.items():
        axes = figure.add_subplot(grid[place], title=title.strip(), xticks=[], yticks=[])
        axes.imshow(pixels, cmap="gray")
    axes = figure.add_subplot(grid[2, :], title="the audio", xlabel="seconds")
    axes.plot(
        audio.timestamp + np.arange(len(audio)) / audio.sample_rate, np.asarray(wave)[0], lw=0.5
    )
    figure.savefig(out)
    print("plotted: the image, the first and last frame with their luma, and the audio")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "decoded.png")
