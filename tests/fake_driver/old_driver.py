"""Opens a stream on a driver without the function for it, and prints the error."""

from __future__ import annotations

import sys

from driver_build import Part

import spdl_media as sm
from spdl_media.cuda_driver import driver_version, new_stream

Part("cuda").version = 11040
try:
    new_stream(0)
except sm.TransferError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\n")
sys.stdout.write(driver_version())
