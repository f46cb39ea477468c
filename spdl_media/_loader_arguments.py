"""The arguments of a DataLoader: their checks, and what those of PyTorch's are called here."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int
from spdl_media.pipeline import PipeConfig
from spdl_media.pipeline.executors import (
    ExecutorConfig,
    ProcessPoolExecutorConfig,
    kind_of,
    name_of,
)
from spdl_media.pipeline.stages import source_length
from spdl_media.source import MapIterator

AnySource: TypeAlias = Iterable[Any] | AsyncIterable[Any]

OnError: TypeAlias = Literal["skip", "raise", "replace"] | Callable[[Any, BaseException], Any]

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

# What the arguments of PyTorch's DataLoader are called here.
TORCH_NAMES = {
    "dataset": "Use src=dataset",
    "collate_fn": "Use aggregator=collate_fn; without one, to='torch' collates",
    "num_workers": "Use num_threads=, or num_processes= for Python code that holds the GIL",
    "shuffle": "Use src=MapIterator(dataset, DistributedRandomSampler(len(dataset))) of spdl_media.source",
    "sampler": "Use src=MapIterator(dataset, sampler) of spdl_media.source",
    "batch_sampler": "Use src=MapIterator(dataset, sampler) of spdl_media.source with batch_size=",
    "pin_memory": "Use storage=cpu_storage(...) where batches are made, and transfer_fn=transfer_tensor",
    "prefetch_factor": "Use buffer_size=, the finished batches that wait",
    "in_order": "Use output_order='input'",
    "generator": "Use seed=",
    "worker_init_fn": "Leave it out: threads share all that is set up before",
    "multiprocessing_context": "Leave it out: threads load, or use executor=ProcessPoolExecutorConfig(...)",
    "persistent_workers": "Leave it out: threads start quickly",
}


def checked_source(source: Any) -> AnySource:
    """Return what is iterated: the source, or a map-style dataset's :class:`MapIterator`.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(source, str | bytes | bytearray):
        raise TypeError(
            f"src must be an iterable of items, not a single {type(source).__name__}, which would be "
            "taken apart into characters; pass a list of one"
        )
    if isinstance(source, Iterable | AsyncIterable):
        return source
    # A map-style dataset of PyTorch has no __iter__.
    if not hasattr(source, "__getitem__"):
        raise TypeError(
            f"src must be an iterable, an async iterable or a map-style dataset, not {source!r}"
        )
    return MapIterator(source)


def check_functions(**functions: Callable[..., Any] | None) -> None:
    """Check the functions of a loader by the names of their arguments.

    Raises:
        TypeError: One is no function, or of a kind that its stage cannot run.
    """
    for name, fn in functions.items():
        if fn is None:
            continue
        check_callable(name, fn)
        kind = kind_of(fn)
        if name != "preprocessor" and "generator" in kind:
            raise TypeError(
                f"{name} must return one batch, and {name_of(fn)} is a generator; do what gives several "
                "samples in the preprocessor"
            )
        if name == "transfer_fn" and kind == "async":
            raise TypeError(
                "transfer_fn must be a plain function, which runs in a thread of its own, and "
                f"{name_of(fn)} is a coroutine function; await in the aggregator"
            )


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and the limit of its container (cgroup 2)."""
    if hasattr(os, "process_cpu_count"):  # CPython 3.13
        count = os.process_cpu_count()
    else:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = math.inf
    # Without a limit the file says "max".
    with suppress(OSError, ValueError):
        quota, period = CPU_LIMIT.read_text(encoding="ascii").split()
        limit = max(1, math.ceil(int(quota) / int(period)))
    return int(min(count or 1, limit))


def rng_parameter(fn: Callable[..., Any]) -> inspect.Parameter | None:
    """The free parameter of a function that is named ``rng``; not its first, which is the item."""
    if isinstance(fn, functools.partial) and "rng" in fn.keywords:
        return None
    try:
        _, *others = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # no signature, as some functions of C; or no parameters
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return next((one for one in others if one.name == "rng" and one.kind in by_name), None)


def check_policy(on_error: object, max_failures: object) -> None:
    """Check ``on_error``, and whether it goes with ``max_failures``.

    Raises:
        TypeError: It is neither a word nor a plain function.
        ValueError: The word is unknown, or does not go with ``max_failures``.
    """
    if callable(on_error):
        if (kind := kind_of(on_error)) != "function":
            raise TypeError(
                f"on_error must be a plain function f(item, error), and {name_of(on_error)} is of kind "
                f"{kind!r}"
            )
    else:
        check_choice(
            "on_error", on_error, ("skip", "raise", "replace"), remedy="A function does as well"
        )
    if on_error == "raise" and max_failures is not None:
        raise ValueError(
            f"on_error='raise' ends the epoch with the first failure, so max_failures={max_failures!r} "
            "has no meaning; leave one of them out"
        )


def executor_of(
    executor: Executor | ExecutorConfig | None, num_processes: int | None, num_threads: int | None
) -> Executor | ExecutorConfig | None:
    """Where a loader makes its calls; ``None``: in threads here.

    Raises:
        TypeError: ``num_processes`` is no whole number.
        ValueError: It is below 1, or both are given.
    """
    if num_processes is None:
        return executor
    check_int("num_processes", num_processes)
    if executor is not None:
        raise ValueError(
            "num_processes= has processes of the loader's own make the calls, and executor= says where they "
            "are made; leave one of them out"
        )
    # Beyond the cores, processes only cost memory; each has one thread at least.
    threads = num_threads or -(-usable_cores() // num_processes)
    return ProcessPoolExecutorConfig(num_processes, num_threads=threads)


def num_batches(
    source: object,
    preprocessor: Callable[..., Any] | None,
    batch_size: int | None,
    *,
    drop_last: bool,
) -> int:
    """The batches of an epoch in which nothing is dropped or fails; without ``batch_size``, the samples.

    Raises:
        TypeError: The source has no length, or the preprocessor is a generator.
    """
    if preprocessor is not None and "generator" in kind_of(preprocessor):
        raise TypeError(
            "the loader has no length: its preprocessor is a generator, so an item may give any "
            "number of samples"
        )
    length = source_length(source)
    if length is None:
        raise TypeError(
            f"the loader has no length, because its source, a {type(source).__name__}, has none"
        )
    if batch_size is None:
        return length
    return length // batch_size if drop_last else -(-length // batch_size)


def check_calls(
    fetch: Callable[[Any], Any] | None,
    preprocessor: Callable[..., Any] | None,
    on_error: OnError,
    executor: Executor | ExecutorConfig | None,
    cache: int | None,
    aggregator: Callable[[Any], Any] | None = None,
) -> None:
    """Check whether samples can be replaced, made in an executor, and kept for later epochs.

    An aggregator that is given may be called in the executor, if nothing else is.

    Raises:
        TypeError: It is no executor, or the bytes of the cache are no whole number.
        ValueError: There are no such calls, the preprocessor is of a kind that does not go with that, or the
            cache is too small.
        PipelineError: The preprocessor cannot be pickled, and would have to be.
    """
    replaces = on_error == "replace" or callable(on_error)
    is_single = replaces or executor is not None or cache is not None
    if is_single and preprocessor is not None and "generator" in kind_of(preprocessor):
        raise ValueError(
            f"executor=, num_processes=, cache= and on_error={on_error!r} are for one sample an item, and "
            f"{name_of(preprocessor)} is a generator; use a function, or leave them out"
        )
    has_items = fetch is not None or preprocessor is not None
    if cache is not None and not has_items:
        raise ValueError("cache= is for a preprocessor or a dataset; there is neither")
    if executor is not None:
        if not has_items and aggregator is None:
            raise ValueError(
                "executor= is for a preprocessor or a dataset, and num_processes= for these or an "
                "aggregator; there is neither"
            )
        PipeConfig(preprocessor or (None if has_items else aggregator) or int, executor=executor)
    if cache is not None:
        check_int("cache", cache, unit=" byte")
        rng = None if preprocessor is None else rng_parameter(preprocessor)
        is_random = getattr(preprocessor, "is_random", False)
        if preprocessor is not None and rng and (is_random or rng.default is rng.empty):
            raise ValueError(
                f"cache= keeps one sample of an item for all epochs, and {name_of(preprocessor)} draws "
                "another in each; leave one of them out, or draw in the aggregator"
            )
