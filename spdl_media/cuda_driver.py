"""NVIDIA's driver API through ctypes: streams, events, memory, copies and kernels.

PyTorch, CuPy and DALI use the primary context of a device, in which the address of a stream or an event is
valid for all of them. So the driver API suffices to work with any of them, and none must be installed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

from spdl_media._threads import when_dropped
from spdl_media.errors import TransferError

LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2
"""Addresses of the default streams. 0 is the legacy one, too."""

REMEDY = (
    "Start processes with the method 'spawn' or 'forkserver' (multiprocessing.get_context), or use CUDA "
    "first in the children"
)

_NOT_INITIALIZED, _UNSUPPORTED_PTX, _NOT_READY = 3, 222, 600
_BLOCKING_WITHOUT_TIME, _NON_BLOCKING, _HOST_MEMORY, _MEMORY_TYPE = 3, 1, 1, 2
_RELEASE_THRESHOLD = 4

# Prefixes of functions that take about a microsecond, which are called with the GIL held: releasing it takes
# as long, and getting it back takes milliseconds if other threads want it.
_QUICK = (
    *("cuCtxGet", "cuCtxP", "cuEventC", "cuEventD", "cuEventQ", "cuEventR", "cuGet", "cuPointer"),
    *("cuStreamGet", "cuStreamWait"),
)


class DriverError(TransferError):
    """The driver refuses a call: the device or the stream is invalid or has failed."""


class CUDAHistory:
    """Whether this process, or the one that it was forked from, has used CUDA.

    Attributes:
        used: Whether this process has used CUDA.
        lost: Whether this process was forked after its parent had used CUDA, so that it cannot use it.
    """

    def __init__(self) -> None:
        self.used = False
        self.lost = False

    def check(self, purpose: str, or_else: str = "") -> None:
        """Raise if CUDA cannot be used, because of a fork.

        Args:
            purpose: The feature that needs CUDA, for the message.
            or_else: What to do without CUDA, for the message.

        Raises:
            TransferError: CUDA cannot be used in this process.
        """
        if self.lost:
            raise TransferError(
                f"{purpose} cannot use CUDA in this process: it was forked from one that had used CUDA, and "
                f"no driver survives that. {REMEDY}{or_else}"
            )

    def before_fork(self) -> None:
        """Note in the parent, before a fork, whether CUDA was used, even if not by this package."""
        self.used = self.used or driver_is_up()

    def after_fork(self) -> None:
        """Note in the child, after a fork, that it cannot use CUDA if its parent had used it."""
        self.lost, self.used = self.used or self.lost, False


def driver_is_up(load: Callable[..., Any] = ctypes.CDLL) -> bool:
    """Whether any library in this process has initialized NVIDIA's driver.

    Args:
        load: Function that opens a shared library.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        # RTLD_NOLOAD, because loading the driver would itself be a use of CUDA.
        loaded = load(LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return int(loaded.cuDeviceGetCount(byref(c_int()))) != _NOT_INITIALIZED


HISTORY = CUDAHistory()

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=HISTORY.before_fork, after_in_child=HISTORY.after_fork)


class _Functions:
    """The driver's functions by name; they accept Python integers.

    Raises:
        OSError: No driver is installed.
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
            # All integers are passed as 64 bits, as pointers and sizes are. An int takes the lower half.
            return int(function(*[c_size_t(a) if isinstance(a, int) else a for a in arguments]))

        setattr(self, name, call)
        return call


@lru_cache(maxsize=1)
def driver() -> Any:
    """Initialize the driver, and return its functions.

    Raises:
        OSError: No driver is installed.
    """
    functions = _Functions()
    # The status is ignored: the first call that needs a device fails with the same one.
    functions.cuInit(0)
    return functions


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        DriverError: The call fails; the message has the driver's text. Or no driver is installed.
    """
    try:
        status = getattr(driver(), name)(*arguments)
    except OSError as error:
        raise DriverError(f"NVIDIA's driver is missing: {error}") from error
    if status:
        raise DriverError(_failure(name, status))


def _given(kind: type[c_int | c_void_p], name: str, *arguments: Any) -> int:
    """Call a function of the driver that writes its result where the first argument points."""
    result = kind()
    call(name, byref(result), *arguments)
    return result.value or 0


def error_name(status: int) -> str:
    """Return the driver's name and text of an error.

    Raises:
        OSError: There is no driver.
    """
    words = []
    for ask in (driver().cuGetErrorName, driver().cuGetErrorString):
        # The text is static memory of the driver's, which must not be freed.
        text = c_char_p()
        ask(status, byref(text))
        words.append((text.value or b"unknown").decode())
    return f"{words[0]} ({words[1]})"


def _failure(name: str, status: int) -> str:
    hint = ""
    if status == _UNSUPPORTED_PTX:
        hint = f". The driver (CUDA {driver_version()}) is too old for this package's kernels (CUDA 11.8)"
    return f"NVIDIA's driver refuses {name}: {error_name(status)}{hint}"


def driver_version() -> str:
    """Return the newest CUDA version that the driver supports, such as ``"12.4"``; empty without a driver."""
    version = c_int()
    with suppress(OSError):
        driver().cuDriverGetVersion(byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""


@lru_cache(maxsize=32)
def _primary_context(index: int) -> int:
    # Never released, because all libraries of the process share it.
    return _given(c_void_p, "cuDevicePrimaryCtxRetain", _given(c_int, "cuDeviceGet", index))


class current:  # noqa: N801  # used like a function; a generator takes half as long again
    """Make a device current in a ``with`` block, without initializing other devices.

    Raises:
        DriverError: The driver refuses, or none is installed.
    """

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        # Push and pop, because the caller may be in the middle of another library's work on another device.
        call("cuCtxPushCurrent_v2", _primary_context(self._index))

    def __exit__(self, *_: object) -> None:
        driver().cuCtxPopCurrent_v2(byref(c_void_p()))


def one_name(stream: int) -> int:
    """Return the address of a stream; for the legacy default stream, 1 instead of 0."""
    return stream or LEGACY_DEFAULT


def new_stream(index: int) -> int:
    """Create a stream that does not synchronize with the default streams, and return its address.

    Raises:
        DriverError: The driver refuses, or none is installed.
    """
    with current(index):
        return _given(c_void_p, "cuStreamCreate", _NON_BLOCKING)


def allocate(nbytes: int, index: int, stream: int) -> int:
    """Allocate memory in stream order from the driver's pool, and return its address.

    The memory may be used by work that is queued on the stream afterwards.

    Raises:
        DriverError: The device is out of memory.
    """
    with current(index):
        _keep_memory(index)
        return _given(c_void_p, "cuMemAllocAsync", nbytes, stream)


@lru_cache(maxsize=32)
def _keep_memory(index: int) -> None:
    # By default, the pool returns all free memory to the system at every synchronization of the device.
    pool = _given(c_void_p, "cuDeviceGetDefaultMemPool", _given(c_int, "cuDeviceGet", index))
    call("cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, byref(c_uint64(2**64 - 1)))


def free(address: int, index: int, stream: int) -> None:
    """Free memory of :func:`allocate` after the work that is queued on the stream."""
    # Errors are ignored: the next use of a device that has failed raises one, too.
    with suppress(DriverError), current(index):
        driver().cuMemFreeAsync(address, stream)


class Event:
    """A CUDA event. Waiting for it on the host takes no CPU time.

    Args:
        index: Index of the device.
        stream: Address of a stream of the device. The event is reached after all work queued on it so far.

    Raises:
        TransferError: The stream or the device is invalid.

    Thread safety: safe.
    """

    __slots__ = ("_address", "_end", "_index")

    def __init__(self, index: int, stream: int) -> None:
        self._index = index
        with current(index):
            self._address = _given(c_void_p, "cuEventCreate", _BLOCKING_WITHOUT_TIME)
            # Before cuEventRecord, so that the event is destroyed even if the stream is invalid.
            self._end = when_dropped(_destroy, index, self._address)
            call("cuEventRecord", self._address, stream)

    def is_done(self) -> bool:
        """Whether the event was reached.

        Raises:
            TransferError: Work queued before the event failed.
        """
        with current(self._index):
            # Not by call(), because "not ready" is not an error here.
            status = driver().cuEventQuery(self._address)
        if status not in (0, _NOT_READY):
            raise DriverError(_failure("cuEventQuery", status))
        return not status

    def synchronize(self) -> None:
        """Wait on the host until the event is reached, in any thread.

        Raises:
            TransferError: Work queued before the event failed.
        """
        with current(self._index):
            call("cuEventSynchronize", self._address)

    def delay(self, stream: int) -> None:
        """Make later work on a stream of the device wait for the event; the host does not wait.

        Raises:
            DriverError: The stream is invalid.
        """
        with current(self._index):
            call("cuStreamWaitEvent", stream, self._address, 0)


def _destroy(index: int, event: int) -> None:
    # The driver frees the event once it is reached. A forked child cannot call the driver.
    if not HISTORY.lost:
        with suppress(Exception), current(index):
            driver().cuEventDestroy_v2(event)


def wait_for(index: int, stream: int, others: Iterable[int]) -> None:
    """Make later work on a stream wait for the work queued on other streams; the host does not wait.

    Raises:
        DriverError: The driver is missing.
    """
    try:
        for other in {one_name(one) for one in others} - {one_name(stream)}:
            Event(index, other).delay(stream)
    except TransferError:  # a stream no longer exists, so wait for all work of the device
        with current(index):
            driver().cuCtxSynchronize()


def device_of_stream(address: int) -> int | None:
    """Return the index of the device of a stream; ``None`` for a default stream, or if it is unknown.

    Args:
        address: Address of a ``cudaStream_t``. The driver does not check whether it is one.
    """
    context, device = c_void_p(), c_int()
    with suppress(OSError):
        # The default streams belong to the device that is current.
        if address > PER_THREAD_DEFAULT and not driver().cuStreamGetCtx(address, byref(context)):
            if driver().cuCtxPushCurrent_v2(context):
                return None
            status = driver().cuCtxGetDevice(byref(device))
            driver().cuCtxPopCurrent_v2(byref(context))
            return None if status else device.value
    return None


def is_pinned(index: int, address: int) -> bool:
    """Whether the host memory at an address is pinned, so that copies are asynchronous.

    Raises:
        DriverError: No driver is installed.
    """
    kind = c_int()
    with current(index):
        status = driver().cuPointerGetAttribute(byref(kind), _MEMORY_TYPE, address)
    # An error means that the driver does not know the memory: it is pageable.
    return not status and kind.value == _HOST_MEMORY


_LOADING = threading.Lock()


# The device is part of the key, because a module belongs to one context.
@lru_cache(maxsize=256)
def _function(_index: int, ptx: bytes, name: str) -> int:
    """Load PTX into the current context, which must be that of the device, and return a function in it."""
    module = _given(c_void_p, "cuModuleLoadData", ptx)
    return _given(c_void_p, "cuModuleGetFunction", module, name.encode())


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
        index: Index of the device.
        stream: Address of the stream on which the kernel is queued.
        kernel: PTX, which the driver compiles for the device at its first use, and the function's name.
        grid: Number of blocks along x, y and z.
        block: Number of threads in a block along x, y and z.
        argument: A NumPy array that contains the struct.

    Raises:
        TransferError: The driver refuses the launch.
    """
    # The driver copies the struct during the call, so it may be freed afterwards.
    arguments = (c_void_p * 1)(argument.ctypes.data)
    with current(index):
        with _LOADING:  # so that threads do not compile the PTX at the same time
            function = _function(index, *kernel)
        call("cuLaunchKernel", function, *grid, *block, 0, stream, arguments, None)
