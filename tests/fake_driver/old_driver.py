"""Opens NVDEC and a stream on a driver without the functions that they need, and prints the errors."""

from __future__ import annotations

import sys

from driver_build import Part

import spdl_media as sm
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda.nvdec import open_on_device
from spdl_media.cuda_driver import driver_version, new_stream
from spdl_media.testing import index_planes, make_video

Part("cuda").version = 11040
packets = sm.demux_video(make_video(index_planes(2, 64, 48), codec="libx264"))
for call in (
    lambda: open_on_device(packets.codec, DEFAULT_DECODE_CONFIG, "x", 0),
    lambda: new_stream(0),
):
    try:
        call()
    except sm.TransferError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
sys.stdout.write(driver_version())
