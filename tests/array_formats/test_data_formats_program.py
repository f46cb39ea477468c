"""SPDL's example of data formats with the modules renamed: torch, npy and npz in threads and processes."""

# Annotations are evaluated here, as in that example: Pipeline[...] must be one at run time.

import io
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from array_formats.made_files import npy, tar
from numpy.typing import NDArray

import spdl_media as sm

pipeline_module = pytest.importorskip("spdl_media.pipeline", reason="the pipeline is not there yet")
Pipeline, PipelineBuilder = pipeline_module.Pipeline, pipeline_module.PipelineBuilder

T = TypeVar("T")
Load = Callable[[Any], list[NDArray[Any]]]
IMAGE, LABELS = (3, 640, 480), (640, 480)
REPEAT = 5


def load_torch(item: bytes) -> list[NDArray[Any]]:
    import torch

    return [tensor.numpy() for tensor in torch.load(io.BytesIO(item)).values()]


def load_npy(items: tuple[bytes, bytes]) -> list[NDArray[Any]]:
    return [np.load(io.BytesIO(item), allow_pickle=False) for item in items]


def load_npy_ours(items: tuple[bytes, bytes]) -> list[NDArray[Any]]:
    return [sm.load_npy(item) for item in items]


def load_npz(item: bytes) -> list[NDArray[Any]]:
    return list(np.load(io.BytesIO(item)).values())


def load_npz_ours(item: bytes) -> list[NDArray[Any]]:
    return list(sm.load_npz(item).values())


class Repeated(Generic[T]):
    """The same item again and again."""

    def __init__(self, item: T, repeat: int) -> None:
        self.item = item
        self.repeat = repeat

    def __iter__(self) -> Iterator[T]:
        for _ in range(self.repeat):
            yield self.item


def build(src: Iterable[Any], load: Load, num_workers: int, executor: Executor) -> Pipeline:
    return (
        PipelineBuilder()
        .add_source(src)
        .pipe(load, concurrency=num_workers, executor=executor)
        .add_sink(buffer_size=1)
        .build(num_threads=1)
    )


def run_pipeline(pipeline: Pipeline[...]) -> tuple[list[list[NDArray[Any]]], float]:
    start = time.monotonic()
    with pipeline.auto_stop():
        items = list(pipeline)
    return items, time.monotonic() - start


def make_item(format: str, arrays: dict[str, NDArray[np.uint8]]) -> Any:
    file = io.BytesIO()
    if format == "npy":
        files = []
        for array in arrays.values():
            np.save(one := io.BytesIO(), array, allow_pickle=False)
            files.append(one.getvalue())
        return tuple(files)
    if format == "torch":
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    elif format == "npz":
        np.savez(file, **arrays)
    else:
        np.savez_compressed(file, **arrays)
    return file.getvalue()


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    """One pool for all tests: its processes import PyTorch, which takes seconds."""
    # Not fork: the process that runs the tests has threads.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize(("mode", "num_workers"), [("mt", 1), ("mt", 2), ("mp", 1), ("mp", 2)])
@pytest.mark.parametrize(
    ("format", "load"),
    [
        ("torch", load_torch),
        ("npy", load_npy),
        ("npy", load_npy_ours),
        ("npz", load_npz),
        ("npz", load_npz_ours),
        ("npz deflated", load_npz),
        ("npz deflated", load_npz_ours),
    ],
)
def test_every_configuration(
    format: str,
    load: Load,
    mode: str,
    num_workers: int,
    rng: np.random.Generator,
    processes: Executor,
) -> None:
    arrays = {
        "img": rng.integers(0, 256, IMAGE, np.uint8),
        "lbl": rng.integers(0, 256, LABELS, np.uint8),
    }
    src = Repeated(make_item(format, arrays), repeat=REPEAT)
    with ThreadPoolExecutor(num_workers) as threads:
        executor = threads if mode == "mt" else processes
        items, seconds = run_pipeline(build(src, load, num_workers, executor))
    assert len(items) == REPEAT
    assert seconds > 0
    for image, labels in items:
        np.testing.assert_array_equal(image, arrays["img"])
        np.testing.assert_array_equal(labels, arrays["lbl"])


def test_samples_of_shards_are_a_source() -> None:
    shards = [tar({f"{k}.npy": npy(np.arange(k)), f"{k}.cls": b"%d" % k}) for k in range(4)]

    def load(sample: dict[str, Any]) -> tuple[int, int]:
        return int(sample["cls"]), len(sm.load_npy(sample["npy"]))

    pipeline = (
        PipelineBuilder()
        .add_source(sm.iter_samples(shards, rank=1, world_size=2))
        .pipe(load, concurrency=2, output_order="input")
        .add_sink(2)
        .build(num_threads=2)
    )
    with pipeline.auto_stop():
        assert list(pipeline) == [(1, 1), (3, 3)]
