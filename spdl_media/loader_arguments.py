"""Check the arguments of a DataLoader, also against those of other ranks; map PyTorch's names to ours."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int, check_seconds, outer_frame
from spdl_media.epochs import order_of_ranks, place_of
from spdl_media.pipeline import PipeConfig, SourceConfig
from spdl_media.pipeline.executors import (
    ExecutorConfig,
    ProcessPoolExecutorConfig,
    kind_of,
    name_of,
)
from spdl_media.pipeline.failures import failure_limit
from spdl_media.source import MapIterator

AnySource: TypeAlias = Iterable[Any] | AsyncIterable[Any]

OnError: TypeAlias = Literal["skip", "raise", "replace"] | Callable[[Any, BaseException], Any]

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
# Number of loaders created at each line of the program.
_loaders: Counter[str] = Counter()

# For each argument of PyTorch's DataLoader that does not exist here: what to use instead.
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
    """Return the iterable of a source: the source itself, or a :class:`MapIterator` of a map-style dataset.

    Raises:
        TypeError: The source is neither iterable nor a map-style dataset.
    """
    if isinstance(source, Iterable | AsyncIterable):
        # SourceConfig refuses a single str or bytes, as in any pipeline.
        return SourceConfig(source).source
    # Map-style datasets of PyTorch have no __iter__.
    if not hasattr(source, "__getitem__"):
        raise TypeError(
            f"src must be an iterable, an async iterable or a map-style dataset, not {source!r}"
        )
    return MapIterator(source)


def usable_cores() -> int:
    """Return the number of cores this process may use, by its affinity and its container's cgroup 2 limit."""
    # Not `os.cpu_count`, which ignores the affinity that taskset or a scheduler sets.
    if hasattr(os, "process_cpu_count"):  # CPython 3.13
        count = os.process_cpu_count()
    else:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = math.inf
    # Without a limit the file says "max", which is not an int. Without cgroup 2 there is no such file.
    with suppress(OSError, ValueError):
        quota, period = CPU_LIMIT.read_text(encoding="ascii").split()
        limit = max(1, math.ceil(int(quota) / int(period)))
    return int(min(count or 1, limit))


def executor_of(loader: Any) -> Executor | ExecutorConfig | None:
    """Return the executor for the calls of a loader; ``None``: threads of this process."""
    if loader.num_processes is None:
        executor: Executor | ExecutorConfig | None = loader.executor
        return executor
    # As many threads in all processes as there are cores, but at least one in each.
    threads = loader.num_threads or -(-usable_cores() // loader.num_processes)
    return ProcessPoolExecutorConfig(loader.num_processes, num_threads=threads)


def rng_parameter(fn: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter ``rng`` of a function that can be passed; not the first one, which is the item."""
    # A bound keyword of a partial is still in its signature.
    if isinstance(fn, functools.partial) and "rng" in fn.keywords:
        return None
    try:
        _, *others = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # no signature, as some functions of C; or no parameters
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return next((one for one in others if one.name == "rng" and one.kind in by_name), None)


def check_arguments(loader: Any, fetch: Callable[[Any], Any] | None) -> None:
    """Check the arguments of a DataLoader, and their combinations.

    Args:
        loader: The loader.
        fetch: Returns the value for a key, if the source is a dataset.

    Raises:
        TypeError: An argument has the wrong type, or a function is of a kind that its stage cannot run.
        ValueError: An argument is out of range, or cannot be combined with another one.
        PipelineError: The preprocessor has to be pickled and cannot be.
    """
    for name in ("preprocessor", "aggregator", "transfer_fn"):
        if (fn := getattr(loader, name)) is not None:
            _check_function(name, fn)
    for name in ("batch_size", "buffer_size", "num_threads", "num_processes", "cache"):
        if name == "buffer_size" or getattr(loader, name) is not None:
            check_int(name, getattr(loader, name))
    if loader.batch_size is None and loader.drop_last:
        raise ValueError("drop_last=True leaves out a small last batch, so it needs batch_size")
    # Checked here, because the pipeline would check them only at the first iteration.
    check_seconds("timeout", loader.timeout)
    check_choice("output_order", loader.output_order, ("completion", "input"))
    failure_limit("max_failures", loader.max_failures)
    if loader.on_failure is not None:
        check_callable("on_failure", loader.on_failure)
    on_error = loader.on_error
    if not callable(on_error):
        choices, remedy = ("skip", "raise", "replace"), "A function does as well"
        check_choice("on_error", on_error, choices, remedy=remedy)
    elif (kind := kind_of(on_error)) != "function":
        raise TypeError(
            f"on_error must be a plain function f(item, error), and {name_of(on_error)} is of kind "
            f"{kind!r}"
        )
    if on_error == "raise" and loader.max_failures is not None:
        raise ValueError(
            "on_error='raise' ends the epoch with the first failure, so "
            f"max_failures={loader.max_failures!r} has no meaning; leave one of them out"
        )
    if loader.executor is not None and loader.num_processes is not None:
        raise ValueError(
            "num_processes= has processes of the loader's own make the calls, and executor= says where they "
            "are made; leave one of them out"
        )
    _check_calls(loader, fetch)


def _check_function(name: str, fn: Callable[..., Any]) -> None:
    check_callable(name, fn)
    kind = kind_of(fn)
    # One result per batch, because the tags of its samples are attached to it.
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


def _check_calls(loader: Any, fetch: Callable[[Any], Any] | None) -> None:
    """Check the combinations of ``on_error``, ``executor``, ``num_processes`` and ``cache``."""
    # With num_processes, the aggregator runs there if there is no other function to run.
    executor: Any = executor_of(loader)
    preprocessor, cache, on_error = loader.preprocessor, loader.cache, loader.on_error
    replaces = on_error == "replace" or callable(on_error)
    # These options cache, move or replace the sample of an item, so an item must have exactly one.
    is_single = replaces or executor is not None or cache is not None
    if is_single and preprocessor is not None and "generator" in kind_of(preprocessor):
        raise ValueError(
            f"executor=, num_processes=, cache= and on_error={on_error!r} are for one sample an item, and "
            f"{name_of(preprocessor)} is a generator; use a function, or leave them out"
        )
    has_items = fetch is not None or preprocessor is not None
    if executor is not None:
        called = fetch if preprocessor is None else preprocessor
        if called is None and loader.num_processes is not None:
            called = loader.aggregator
        if called is None:
            raise ValueError(
                "executor= is for a preprocessor or a dataset, and num_processes= for these or an "
                "aggregator; there is neither"
            )
        # Not checked for a dataset: it is pickled with the call when an epoch begins.
        PipeConfig(int if called is fetch else called, executor=executor)
    if cache is None:
        return
    if not has_items:
        raise ValueError("cache= is for a preprocessor or a dataset; there is neither")
    rng = None if preprocessor is None else rng_parameter(preprocessor)
    is_random = getattr(preprocessor, "is_random", False)
    if preprocessor is not None and rng and (is_random or rng.default is rng.empty):
        raise ValueError(
            f"cache= keeps one sample of an item for all epochs, and {name_of(preprocessor)} draws "
            "another in each; leave one of them out, or draw in the aggregator"
        )


def compare_ranks(loader: Any, source: Any, epoch: int, key: str) -> None:
    """Compare the order of an epoch with that of the ``torch.distributed`` rank that began it first.

    Args:
        loader: The loader.
        source: Its source. It is compared only if it is sharded over exactly these ranks.
        epoch: The epoch.
        key: Identifies the iteration; equal on all ranks.

    Raises:
        ValueError: The other rank has another order.
    """
    # Only if the program has imported it; torch is not imported for this check.
    torch = sys.modules.get("torch.distributed")
    rank, world_size = place_of(source)
    if world_size == 1 or torch is None or not torch.is_available() or not torch.is_initialized():
        return
    # A sampler may shard over a group of ranks instead of all ranks.
    if (rank, world_size) != (torch.get_rank(), torch.get_world_size()):
        return
    store = torch.distributed_c10d._get_default_store()
    # The MPI backend has no store.
    if store is None:
        return
    ours = {**order_of_ranks(source), "epoch": epoch}
    # If all ranks have equally many items, their batches must have the same size, too: otherwise one rank
    # would wait for another.
    if getattr(getattr(source, "sampler", source), "_uneven", "keep") != "keep":
        ours |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    # The first rank stores its order and the others compare with it, so no rank waits.
    first = store.compare_set(f"spdl_media/{key}", "", json.dumps([rank, ours]))
    other, theirs = json.loads(first)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if names:
        differences = ", ".join(f"{name} {ours.get(name)} and {theirs.get(name)}" for name in names)
        raise ValueError(
            f"ranks {rank} and {other} share out different epochs, so items would come twice or never, or "
            f"one would wait for the other: {differences}. Make the samplers and loaders of all ranks with "
            "the same arguments, over the same data, and set the same epoch"
        )


def origin_of_loader() -> str:
    """Return a name for the loader being created: the line of the program, and a number for that line.

    A number alone would not match between ranks, because one rank may create more loaders than others.
    """
    frame, _ = outer_frame()
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    # A line in a loop creates several loaders, in the same order on all ranks.
    _loaders[line] += 1
    return f"{line}/{_loaders[line]}"
