"""Decode each input of a batch, in one thread or several, with failures reported by position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from spdl_media.arguments import OnError
from spdl_media.buffer import Failure
from spdl_media.errors import (
    ConvertError,
    DecodeError,
    DemuxError,
    MediaError,
    PictureSizeError,
    SourceError,
    with_message,
)

# Errors of one input. All others come from the arguments, and end the batch whatever on_error says.
_OF_ONE_INPUT = (SourceError, DemuxError, DecodeError, ConvertError, PictureSizeError)

# What one input is decoded to.
Decoded = TypeVar("Decoded")
_Taken_contra = TypeVar("_Taken_contra", contravariant=True)


class Collector(Protocol[_Taken_contra]):
    """Takes decoded inputs and failures from :func:`decode_each`, in any order and from any thread."""

    failures: list[Failure]

    def add(self, position: int, decoded: _Taken_contra, /) -> None: ...


class Stopped(Exception):  # noqa: N818  # not an error: whoever asked for it knows
    """The load was cancelled."""


def decode_each(
    srcs: Sequence[Any],
    decode: Callable[[Any, int], Decoded],
    batch: Collector[Decoded],
    *,
    on_error: OnError,
    stopped: Callable[[], bool],
    num_threads: int = 1,
) -> None:
    """Decode inputs, and add what becomes of each to the batch.

    Args:
        srcs: The inputs.
        decode: Gives what an input at a position is decoded to.
        batch: Where images and failures go.
        on_error: With ``"raise"``, the first failure is raised, and names the input and its position. With
            several threads that is the one of the lowest position among those that were seen.
        stopped: Asked before each input; decoding ends with :class:`Stopped` when it says so.
        num_threads: How many threads take part. All have ended when the function returns or raises.

    Raises:
        Stopped: ``stopped`` said so.
        MediaError: An input cannot be loaded, with ``on_error="raise"``.
        TypeError: An input is no source.
        ValueError: An option does not suit an input.
    """

    def decode_one(position: int) -> None:
        if stopped():
            raise Stopped
        try:
            decoded = decode(srcs[position], position)
        except _OF_ONE_INPUT as error:
            if on_error == "raise":
                raise _placed(error, position, len(srcs)) from error
            name = type(srcs[position]).__name__ if error.source is None else error.source
            batch.failures.append(Failure(position, name, _without_tracebacks(error)))
        except (MediaError, TypeError, ValueError) as error:
            raise _placed(error, position, len(srcs)) from error
        else:
            batch.add(position, decoded)

    num_threads = min(num_threads, len(srcs))
    if num_threads > 1:
        _in_threads(decode_one, len(srcs), num_threads)
        return
    for position in range(len(srcs)):
        decode_one(position)


def _in_threads(decode_one: Callable[[int], None], count: int, num_threads: int) -> None:
    """Call a function with each position, in the calling thread and in others beside it."""
    positions, lock = iter(range(count)), threading.Lock()
    errors: dict[int, BaseException] = {}

    def work() -> None:
        # One failure ends all threads, each after its current input.
        while not errors:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            try:
                decode_one(position)
            except BaseException as error:  # noqa: BLE001  # raised below, in the calling thread
                errors[position] = error

    # Threads of this call alone: they cost 0.1 ms, and a pool that stays would have to survive forks.
    with ThreadPoolExecutor(num_threads - 1, "spdl_media_batch") as pool:
        for _ in range(num_threads - 1):
            pool.submit(work)
        work()
    if errors:
        # An interrupt of the calling thread is not to be hidden by an input that failed meanwhile.
        worst = min(errors, key=lambda at: (isinstance(errors[at], Exception), at))
        error = errors[worst]
        errors.clear()
        try:
            raise error
        finally:
            # The traceback holds this frame, which would hold the error: inputs would stay alive.
            del error


def _placed(error: Exception, position: int, count: int) -> Exception:
    """The same kind of error, with the position of its input in the message."""
    where = f"input {position} of the batch of {count}"
    if isinstance(error, MediaError):
        # Its text names the source as well, and so does that of the copy.
        return with_message(error, f"{where}: {error.message}")
    # Subclasses may want other arguments. Of some, the first argument is a mere number.
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")


def _without_tracebacks(error: MediaError) -> MediaError:
    """The error, without what its tracebacks hold: inputs, packets and frames."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
