"""Decodes on the driver, then ends the process in the way given by the argument."""

from __future__ import annotations

import sys
import threading
from typing import Any

from nvdec_checks import Device, packets_of
from nvdec_stand_in import clip_of

from spdl_media.cuda.nvdec import DECODERS, DeviceDecoder
from spdl_media.cuda.videos import streaming_load_video_nvdec
from spdl_media.packets import av_packets
from spdl_media.testing import index_planes, make_video


def device() -> Device:
    """Make a device that uses the decoder pool of the process, which is cleared at exit."""
    found = Device()
    found.decoders = DECODERS
    return found


def decode_for_ever() -> None:
    packets = packets_of("libx264", count=4)
    while True:
        clip_of(packets, device())


def main(way: str) -> None:
    """End while decoders and frames exist."""
    data = make_video(index_planes(40, 64, 64), codec="libx264")
    batches: Any = streaming_load_video_nvdec(data, device(), num_frames=4)
    next(batches)
    clip_of(packets_of("libx265"), device())
    if way == "holds frames":
        packets = packets_of("libx264")
        decoder = DeviceDecoder(device().open_decoder(packets.codec))
        decoder.begin(packets.codec, "x", 1)
        sys.kept = [f for p in av_packets(packets) for f in decoder.decode(p) if f.planes]  # type: ignore[attr-defined]
    if way == "in a thread":
        threading.Thread(target=decode_for_ever, daemon=True).start()
        next(batches)
    if way == "raises":
        raise RuntimeError("the end")
    sys.exit(7 if way == "exits" else 0)


if __name__ == "__main__":
    main(sys.argv[1])
