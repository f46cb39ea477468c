"""How an array is handed from the stream that fills it to those that read it."""

from __future__ import annotations

from collections.abc import Callable

from spdl_media._devices.device import Device, one_name
from spdl_media._devices.forks import HISTORY
from spdl_media._devices.memory import Event


class Handover:
    """When an array is ready, and who reads it.

    Args:
        device: The stream that fills it.
        event: Behind the work that does.
        used_on: To be told of each stream that is going to read it.

    Thread safety: safe.
    """

    __slots__ = ("_device", "_event", "_used_on", "device_index")

    def __init__(self, device: Device, event: Event, used_on: Callable[[int], object]) -> None:
        self._device = device
        self._event = event
        self._used_on = used_on
        self.device_index = device.index

    @property
    def stream(self) -> int | None:
        """The stream to wait for; ``None``: the array is ready."""
        return None if self.is_done() else one_name(self._device.stream)

    def is_done(self) -> bool:
        """Whether the array is ready."""
        return self._device.is_done(self._event)

    def synchronize(self) -> None:
        """Wait on the host until it is."""
        self._device.wait(self._event)

    def hand_to(self, stream: int) -> None:
        """Let later work on this stream find the array ready, and keep its memory for that work."""
        if one_name(stream) != one_name(self._device.stream):
            self._device.make_wait(stream, self._event)
            self._used_on(stream)

    def __del__(self) -> None:
        if HISTORY.lost:
            HISTORY.parents.append(self._event)

    def keep_for(self, stream: int) -> None:
        """Keep the memory for work on this stream, which waits by itself."""
        self._used_on(stream)
