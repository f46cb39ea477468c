"""NVIDIA's driver through ctypes: streams, events, memory, copies and kernels.

PyTorch, CuPy and DALI work in the primary context of a device, where a stream or an event has one address
for all of them. So none of them is needed for what they have in common.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

from spdl_media.errors import TransferError

LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2
"""Addresses of the default streams. The first is 0, too."""

REMEDY = (
    "Start processes with the method 'spawn' or 'forkserver' (multiprocessing.get_context), or use CUDA "
    "first in the children"
)

_NOT_INITIALIZED, _UNSUPPORTED_PTX, _NOT_READY = 3, 222, 600
_BLOCKING_WITHOUT_TIME, _NON_BLOCKING, _HOST_MEMORY, _MEMORY_TYPE = 3, 1, 1, 2
_RELEASE_THRESHOLD = 4

# Functions that take a microsecond. To let go of the GIL would cost as much, and milliseconds where other
# threads want it.
_QUICK = (
    *("cuCtxGet", "cuCtxP", "cuEventC", "cuEventD", "cuEventQ", "cuEventR", "cuGet", "cuPointer"),
    *("cuStreamGet", "cuStreamWait"),
)


class DriverError(TransferError):
    """What the driver says when it refuses a call: the device is gone or has failed, or a stream is."""


class CUDAHistory:
    """What this process, and the one that it was forked from, have done with CUDA.

    Attributes:
        used: CUDA was used in this process.
        lost: This process was forked after its parent had used CUDA, so it has neither.
    """

    def __init__(self) -> None:
        self.used = False
        self.lost = False

    def check(self, purpose: str, or_else: str = "") -> None:
        """Refuse to use CUDA after a fork.

        Args:
            purpose: What is going to use it.
            or_else: What can be done without it, for the message.

        Raises:
            TransferError: It cannot be used.
        """
        if self.lost:
            raise TransferError(
                f"{purpose} cannot use CUDA in this process: it was forked from one that had used CUDA, and "
                f"no driver survives that. {REMEDY}{or_else}"
            )

    def before_fork(self) -> None:
        """Called in the parent, which may have used CUDA without this package."""
        self.used = self.used or driver_is_up()

    def after_fork(self) -> None:
        """Called in the child."""
        self.lost, self.used = self.used or self.lost, False


def driver_is_up(load: Callable[..., Any] = ctypes.CDLL) -> bool:
    """Whether anything in this process has started NVIDIA's driver, whichever library it was.

    Args:
        load: Opens a shared library.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        # To load it would be a first use of CUDA where nobody asked for one.
        loaded = load(LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:  # nobody has loaded it
        return False
    return int(loaded.cuDeviceGetCount(byref(c_int()))) != _NOT_INITIALIZED


HISTORY = CUDAHistory()

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=HISTORY.before_fork, after_in_child=HISTORY.after_fork)


class _Functions:
    """The driver's functions by name, for Python's numbers.

    Raises:
        OSError: There is no driver.
    """

    def __init__(self) -> None:
        self._slow, self._quick = ctypes.CDLL(LIBRARY), ctypes.PyDLL(LIBRARY)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._quick if name.startswith(_QUICK) else self._slow, name, None)

        def call(*arguments: Any) -> int:
            if function is None:
                raise DriverError(
                    f"NVIDIA's driver, which is of CUDA {driver_version()}, lacks {name}, which the wheel of "
                    "spdl_media calls. Install a newer driver, or leave cuda= out"
                )
            # With the 64 bits of pointers and sizes; who takes an int looks at the lower half of them.
            return int(function(*(c_size_t(a) if isinstance(a, int) else a for a in arguments)))

        setattr(self, name, call)
        return call


@lru_cache(maxsize=1)
def driver() -> Any:
    """The driver's functions, started.

    Raises:
        OSError: There is none.
    """
    functions = _Functions()
    # What it says is said again by the first call that needs a device.
    functions.cuInit(0)
    return functions


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        DriverError: It fails; the message has the driver's own words. Or there is no driver.
    """
    try:
        status = getattr(driver(), name)(*arguments)
    except OSError as error:
        raise DriverError(f"NVIDIA's driver is missing: {error}") from error
    if status:
        raise DriverError(_failure(name, status))


def _failure(name: str, status: int) -> str:
    words = []
    for ask in (driver().cuGetErrorName, driver().cuGetErrorString):
        # The text is the driver's, and is never freed.
        text = c_char_p()
        ask(status, byref(text))
        words.append((text.value or b"unknown").decode())
    hint = ""
    if status == _UNSUPPORTED_PTX:
        hint = f". The driver (CUDA {driver_version()}) is too old for this package's kernels (CUDA 11.8)"
    return f"NVIDIA's driver refuses {name}: {words[0]} ({words[1]}){hint}"


def driver_version() -> str:
    """The newest CUDA that the driver serves, such as ``"12.4"``; empty without a driver."""
    version = c_int()
    with suppress(OSError):
        driver().cuDriverGetVersion(byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""


@lru_cache(maxsize=32)
def _primary_context(index: int) -> int:
    device, context = c_int(), c_void_p()
    call("cuDeviceGet", byref(device), index)
    # Never released: all libraries of the process share it until its end.
    call("cuDevicePrimaryCtxRetain", byref(context), device.value)
    return context.value or 0


@contextmanager
def current(index: int) -> Iterator[None]:
    """A block in which the device of this number is the current one, and no other is started for it.

    Raises:
        DriverError: The driver refuses, or there is none.
    """
    # Pushed and popped, since the thread may be in the middle of another library's work.
    call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        driver().cuCtxPopCurrent_v2(byref(c_void_p()))


def one_name(stream: int) -> int:
    """The address of a stream, of which the default one has two."""
    return stream or LEGACY_DEFAULT


def new_stream(index: int) -> int:
    """The address of a new stream, which waits for no default stream.

    Raises:
        DriverError: The driver refuses, or there is none.
    """
    stream = c_void_p()
    with current(index):
        call("cuStreamCreate", byref(stream), _NON_BLOCKING)
    return stream.value or 0


def allocate(nbytes: int, index: int, stream: int) -> int:
    """The address of memory that may be used behind all that stands on a stream, from the driver's pool.

    Raises:
        DriverError: There is not enough.
    """
    address = c_void_p()
    with current(index):
        _keep_memory(index)
        call("cuMemAllocAsync", byref(address), nbytes, stream)
    return address.value or 0


@lru_cache(maxsize=32)
def _keep_memory(index: int) -> None:
    # Or the pool would give all that is free back to the system whenever somebody waits for the device.
    device, pool = c_int(), c_void_p()
    call("cuDeviceGet", byref(device), index)
    call("cuDeviceGetDefaultMemPool", byref(pool), device.value)
    call("cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, byref(c_uint64(2**64 - 1)))


def free(address: int, index: int, stream: int) -> None:
    """Give memory of :func:`allocate` back behind all that stands on the stream."""
    # What a device that has failed says of it is said to whoever uses that next.
    with suppress(DriverError), current(index):
        driver().cuMemFreeAsync(address, stream)


class Event:
    """A point in the work of a stream. To wait for it on the host takes no CPU time.

    Args:
        index: Number of the device.
        stream: Address of a stream of it; the event stands behind all that was put there.

    Raises:
        TransferError: The stream is gone, or the device.

    Thread safety: safe.
    """

    __slots__ = ("_address", "_index")

    def __init__(self, index: int, stream: int) -> None:
        address = c_void_p()
        self._address: int | None = None
        self._index = index
        with current(index):
            call("cuEventCreate", byref(address), _BLOCKING_WITHOUT_TIME)
            # Before it is recorded, or an event whose stream is gone would never be destroyed.
            self._address = address.value
            call("cuEventRecord", self._address, stream)

    def is_done(self) -> bool:
        """Whether it was reached.

        Raises:
            TransferError: Work before it failed.
        """
        with current(self._index):
            # Not by call: that it is not reached yet is an answer, not an error.
            status = driver().cuEventQuery(self._address)
        if status not in (0, _NOT_READY):
            raise DriverError(_failure("cuEventQuery", status))
        return not status

    def synchronize(self) -> None:
        """Wait on the host until it is reached, in any thread.

        Raises:
            TransferError: Work before it failed.
        """
        with current(self._index):
            call("cuEventSynchronize", self._address)

    def delay(self, stream: int) -> None:
        """Let later work on a stream of the device wait for it; the host does not wait.

        Raises:
            DriverError: The stream is gone.
        """
        with current(self._index):
            call("cuStreamWaitEvent", stream, self._address, 0)

    def __del__(self) -> None:
        # The driver's own is kept until it is reached. A forked child has no driver.
        if self._address is not None and not HISTORY.lost:
            with suppress(Exception), current(self._index):
                driver().cuEventDestroy_v2(self._address)


def wait_for(index: int, stream: int, others: Iterable[int]) -> None:
    """Let later work on a stream wait for what stands on others of the device; the host does not wait."""
    try:
        for other in {one_name(one) for one in others} - {one_name(stream)}:
            Event(index, other).delay(stream)
    except TransferError:  # a stream is gone, and what stood on it cannot be named
        with current(index):
            driver().cuCtxSynchronize()


def device_of_stream(address: int) -> int | None:
    """Number of the device that a stream was made for; ``None``: any, or the driver does not say.

    Args:
        address: Of a ``cudaStream_t``. The driver takes it at its word.
    """
    context, device = c_void_p(), c_int()
    with suppress(OSError):
        # The default streams belong to whatever device is the current one.
        if address > PER_THREAD_DEFAULT and not driver().cuStreamGetCtx(address, byref(context)):
            if driver().cuCtxPushCurrent_v2(context):
                return None
            status = driver().cuCtxGetDevice(byref(device))
            driver().cuCtxPopCurrent_v2(byref(context))
            return None if status else device.value
    return None


def is_pinned(index: int, address: int) -> bool:
    """Whether the driver knows the host memory at an address, so that it is copied in the background.

    Raises:
        DriverError: There is no driver.
    """
    kind = c_int()
    with current(index):
        status = driver().cuPointerGetAttribute(byref(kind), _MEMORY_TYPE, address)
    # An error means memory that the driver has never seen: it is pageable.
    return not status and kind.value == _HOST_MEMORY


_LOADING = threading.Lock()


# The device is part of the key, because a module belongs to one context.
@lru_cache(maxsize=256)
def _function(_index: int, ptx: bytes, name: str) -> int:
    """A function of a module that is loaded into the current context, that of the device."""
    module, function = c_void_p(), c_void_p()
    call("cuModuleLoadData", byref(module), ptx)
    call("cuModuleGetFunction", byref(function), module, name.encode())
    return function.value or 0


def launch(
    index: int,
    stream: int,
    kernel: tuple[bytes, str],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    argument: Any,
) -> None:
    """Run a kernel that takes one struct by value.

    Args:
        index: Number of the device.
        stream: Where it stands in line.
        kernel: PTX, which the driver compiles for the device at its first use, and the function's name.
        grid: Blocks.
        block: Threads of each.
        argument: A NumPy array with the struct.

    Raises:
        TransferError: The driver refuses it.
    """
    # The driver copies the struct at once, so it may go when this returns.
    arguments = (c_void_p * 1)(argument.ctypes.data)
    with current(index):
        with _LOADING:  # or threads would compile it at the same time
            function = _function(index, *kernel)
        call("cuLaunchKernel", function, *grid, *block, 0, stream, arguments, None)
