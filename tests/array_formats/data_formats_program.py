"""SPDL's benchmark of data formats with this library's modules, as a separate program.

    python tests/array_formats/data_formats_program.py [REPEAT [MOST_WORKERS]]

Each line of output is: format, compressed, library, mode, workers, items per second. As in SPDL's program,
each measurement makes an executor, which is only shut down at interpreter exit.
"""

# No deferred annotations, as in SPDL's program: Pipeline[...] is evaluated at run time.

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from io import BytesIO
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

import spdl_media
from spdl_media.pipeline import Pipeline, PipelineBuilder

try:
    import torch
except ImportError:
    torch = None

T = TypeVar("T")
Arrays = dict[str, NDArray[np.uint8]]

WORKERS = (1, 2, 4, 8, 16, 32)
CONFIGS = (
    ("torch", False, "torch"),
    ("npy", False, "np"),
    ("npy", False, "spdl_media"),
    ("npz", False, "np"),
    ("npz", True, "np"),
    ("npz", False, "spdl_media"),
    ("npz", True, "spdl_media"),
)


class DataSource(Generic[T]):
    """A source that repeats one item a fixed number of times."""

    def __init__(self, data: T, repeat: int) -> None:
        self.data = data
        self.repeat = repeat

    def __iter__(self) -> Iterator[T]:
        return (self.data for _ in range(self.repeat))


def get_pipeline(
    src: Iterable[T], load_fn: Callable[[T], list[NDArray]], num_workers: int, mode: str
) -> Pipeline:
    kinds: dict[str, Callable[[int], Executor]] = {
        "mt": ThreadPoolExecutor,
        "mp": ProcessPoolExecutor,
    }
    executor = kinds[mode](num_workers)
    return (
        PipelineBuilder()
        .add_source(src)
        .pipe(load_fn, concurrency=num_workers, executor=executor)
        .add_sink(buffer_size=1)
        .build(num_threads=1)
    )


def run_pipeline(pipeline: Pipeline[...]) -> tuple[int, float]:
    begin = time.monotonic()
    with pipeline.auto_stop():
        num_items = sum(1 for _ in pipeline)
    return num_items + num_unparsed(pipeline), time.monotonic() - begin


def num_unparsed(pipeline: Pipeline[...]) -> int:
    """Return how many items failed in NumPy's reader because CPython's parser was not thread-safe before
    3.11.8.

    See https://github.com/python/cpython/issues/106905.
    """
    errors = [record.exception for record in pipeline.failures]
    known = "AST constructor recursion depth mismatch"
    return sum(isinstance(error, SystemError) and known in str(error) for error in errors)


def load_torch(item: bytes) -> list[NDArray]:
    return list(torch.load(BytesIO(item)).values())


def load_npy(items: list[bytes]) -> list[NDArray]:
    return [np.load(BytesIO(item), allow_pickle=False) for item in items]


def load_npy_ours(items: list[bytes]) -> list[NDArray]:
    return [spdl_media.load_npy(item) for item in items]


def load_npz(item: bytes) -> list[NDArray]:
    return list(np.load(BytesIO(item)).values())


def load_npz_ours(item: bytes) -> list[NDArray]:
    return list(spdl_media.load_npz(item).values())


LOADERS: dict[tuple[str, str], Callable[[Any], list[NDArray]]] = {
    ("torch", "torch"): load_torch,
    ("npy", "np"): load_npy,
    ("npy", "spdl_media"): load_npy_ours,
    ("npz", "np"): load_npz,
    ("npz", "spdl_media"): load_npz_ours,
}


def make_arrays() -> Arrays:
    """Make an image and the labels of its pixels."""
    rng = np.random.default_rng()
    return {
        "img": rng.integers(256, size=(3, 640, 480), dtype=np.uint8),
        "lbl": rng.integers(256, size=(640, 480), dtype=np.uint8),
    }


def dump(format: str, compressed: bool, arrays: Arrays) -> Any:
    """Return the content of one file, or of two files for npy, which holds only one array."""
    if format == "npy":
        return tuple(_written(np.save, array, allow_pickle=False) for array in arrays.values())
    if format == "npz":
        save = np.savez_compressed if compressed else np.savez
        return _written(save, **arrays)
    with BytesIO() as file:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
        return file.getvalue()


def _written(save: Callable[..., None], *args: Any, **kwargs: Any) -> bytes:
    with BytesIO() as file:
        save(file, *args, **kwargs)
        return file.getvalue()


def main(repeat: int = 1000, most_workers: int = 32) -> None:
    for format, compressed, library in CONFIGS:
        if format == "torch" and torch is None:
            continue
        src = DataSource(dump(format, compressed, make_arrays()), repeat)
        for mode in ("mp", "mt"):
            for num_workers in [count for count in WORKERS if count <= most_workers]:
                pipeline = get_pipeline(src, LOADERS[format, library], num_workers, mode)
                num_items, elapsed = run_pipeline(pipeline)
                if num_items != repeat:
                    raise RuntimeError(f"{num_items} of {repeat} items: {pipeline.failures}")
                rate = num_items / elapsed
                print(f"{format},{compressed},{library},{mode},{num_workers},{rate}")  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
