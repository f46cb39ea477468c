"""The loaders that ``dataloader.py`` and ``memory.py`` compare: paths to batches of (images, labels).

A loader is a class. Its constructor takes a :class:`Job` and imports the library; iteration starts the work.
Each item is a pair: images ``(B, size, size, 3)`` uint8 in RGB, and labels ``(B,)`` int64. To add a loader,
write the class and add it to ``OURS`` or ``PEERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Sample = tuple[str, int]
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Job:
    """The data to load and the number of workers.

    Attributes:
        samples: Paths with their labels.
        size: Side of the images.
        batch: Samples per batch.
        workers: Threads or processes that load.
        arrays: Result type of the loaders that support both: PyTorch tensors or NumPy arrays.
    """

    samples: Sequence[Sample]
    size: int
    batch: int
    workers: int
    arrays: Literal["torch", "numpy"] = "torch"

    @property
    def batches(self) -> Iterator[Sequence[Sample]]:
        """The samples of each batch, in order."""
        for start in range(0, len(self.samples), self.batch):
            yield self.samples[start : start + self.batch]

    @property
    def ahead(self) -> int:
        """Number of prefetched batches: two per worker, as in PyTorch."""
        return 2 * self.workers


class Loader(Protocol):
    """Interface of the loaders below."""

    def __init__(self, job: Job) -> None: ...

    def __iter__(self) -> Iterator[Batch]: ...


def repeated(folder: Path, count: int) -> list[Sample]:
    """Repeat the JPEGs of a folder; the label is the index of the file in the folder."""
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise FileNotFoundError(f"there is no .jpg or .jpeg file in {folder}")
    return [(str(paths[index % len(paths)]), index % len(paths)) for index in range(count)]


# This library.


class OwnDataLoader:
    """This library's DataLoader: images are decoded one by one, and batched in reused memory."""

    quality: Literal["accurate", "fast"] = "accurate"

    def __init__(self, job: Job) -> None:
        import spdl_media as sm

        to_array: Callable[[Any], Any] = sm.to_torch if job.arrays == "torch" else sm.to_numpy
        labels_of = make_labels(job.arrays)
        filters = sm.get_video_filter_desc(
            scale_width=job.size, scale_height=job.size, scale_mode=None, quality=self.quality
        )
        # The prefetched batches, one in each thread, one at the caller and one on its way there.
        count = job.ahead + job.workers + 2
        pool = sm.StoragePool(job.batch * job.size**2 * 3, count, pin_memory=False)

        def decode(sample: Sample) -> tuple[sm.ImageFrames, int]:
            path, label = sample
            return sm.decode_packets(sm.demux_image(path), filters), label

        def gather(samples: Sequence[tuple[sm.ImageFrames, int]]) -> Batch:
            frames, labels = zip(*samples, strict=True)
            return to_array(sm.convert_frames(frames, pool)), labels_of(labels)

        self._loader = sm.DataLoader(
            job.samples,
            preprocessor=decode,
            batch_size=job.batch,
            aggregator=gather,
            buffer_size=job.ahead,
            num_threads=job.workers,
            output_order="input",
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of the samples."""
        return iter(self._loader)


class OwnDataLoaderFast(OwnDataLoader):
    """The same with ``quality="fast"``."""

    quality = "fast"


class OwnDataLoaderOfBatches:
    """This library's DataLoader over lists of paths: ``load_image_batch`` loads each batch in one thread."""

    def __init__(self, job: Job) -> None:
        import spdl_media as sm

        to_array: Callable[[Any], Any] = sm.to_torch if job.arrays == "torch" else sm.to_numpy
        labels_of = make_labels(job.arrays)
        # As for the DataLoader above.
        count = job.ahead + job.workers + 2
        pool = sm.StoragePool(job.batch * job.size**2 * 3, count, pin_memory=False)

        def load(samples: Sequence[Sample]) -> Batch:
            paths, labels = zip(*samples, strict=True)
            buffer = sm.load_image_batch(
                paths, width=job.size, height=job.size, scale_mode=None, storage=pool
            )
            return to_array(buffer), labels_of(labels)

        self._loader = sm.DataLoader(
            list(job.batches),
            preprocessor=load,
            buffer_size=job.ahead,
            num_threads=job.workers,
            output_order="input",
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of the samples."""
        return iter(self._loader)


def make_labels(arrays: str) -> Callable[[Sequence[int]], Any]:
    """Return the function that makes labels of one array type."""
    if arrays == "numpy":
        return lambda labels: np.asarray(labels, np.int64)
    import torch

    return lambda labels: torch.tensor(labels, dtype=torch.int64)


# SPDL, as in its documentation: the page on migrating from PyTorch, the docstring of its DataLoader, and
# the page on stages of pipelines.


class Spdl:
    """Common base of the three SPDL loaders."""

    def __init__(self, job: Job) -> None:
        import spdl.dataloader
        import spdl.io
        import spdl.pipeline

        self._job = job
        self._io, self._pipeline, self._dataloader = spdl.io, spdl.pipeline, spdl.dataloader
        self._to_array = spdl.io.to_torch if job.arrays == "torch" else spdl.io.to_numpy
        self._labels_of = make_labels(job.arrays)
        self._desc = spdl.io.get_video_filter_desc(
            scale_width=job.size, scale_height=job.size, scale_algo="bicubic", scale_mode=None
        )

    def _decode(self, sample: Sample) -> tuple[Any, int]:
        path, label = sample
        packets = self._io.demux_image(path)
        return self._io.decode_packets(packets, filter_desc=self._desc), label

    def _convert(self, items: Sequence[tuple[Any, int]]) -> Batch:
        frames, labels = zip(*items, strict=True)
        buffer = self._io.convert_frames(list(frames))
        return self._to_array(buffer), self._labels_of(labels)

    def _load(self, samples: Sequence[Sample]) -> Batch:
        paths, labels = zip(*samples, strict=True)
        buffer = self._io.load_image_batch(
            list(paths), width=None, height=None, filter_desc=self._desc
        )
        return self._to_array(buffer), self._labels_of(labels)


class SpdlPipeline(Spdl):
    """A pipeline that decodes images one by one, groups them, and makes a batch."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of the samples."""
        job = self._job
        pipeline = (
            self._pipeline.PipelineBuilder()
            .add_source(job.samples)
            .pipe(self._decode, concurrency=job.workers, output_order="input")
            .aggregate(job.batch)
            .pipe(self._convert)
            .add_sink(job.ahead)
            .build(num_threads=job.workers)
        )
        with pipeline.auto_stop():
            yield from pipeline


class SpdlBatches(Spdl):
    """A pipeline that groups paths; each worker loads a whole batch."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of the samples."""
        job = self._job
        pipeline = (
            self._pipeline.PipelineBuilder()
            .add_source(job.samples)
            .aggregate(job.batch)
            .pipe(self._load, concurrency=job.workers, output_order="input")
            .add_sink(job.ahead)
            .build(num_threads=job.workers)
        )
        with pipeline.auto_stop():
            yield from pipeline


class SpdlDataLoader(Spdl):
    """SPDL's DataLoader."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of their completion."""
        job = self._job
        yield from self._dataloader.DataLoader(
            job.samples,
            preprocessor=self._decode,
            batch_size=job.batch,
            aggregator=self._convert,
            buffer_size=job.ahead,
            num_threads=job.workers,
        )


# PyTorch.


@dataclass(frozen=True)
class Pictures:
    """A map-style dataset, which is sent to the processes of PyTorch's DataLoader."""

    samples: Sequence[Sample]
    load: Callable[[str], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.load(path), label


def load_with_pillow(path: str, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return (size, size, 3) uint8; Pillow's bicubic antialiases."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    # Copies, as torchvision's PILToTensor does, because PyTorch warns about read-only arrays.
    return np.array(small)


def load_with_torchvision(path: str, size: int) -> Any:
    """Return (3, size, size) uint8, with antialiased bicubic scaling."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2.functional import resize

    picture = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return resize(picture, [size, size], interpolation=3, antialias=True)


class TorchPillow:
    """PyTorch's DataLoader with processes that load with Pillow."""

    def __init__(self, job: Job) -> None:
        # Imported here, so that forked processes have it.
        import_module("PIL.Image")
        import torch.utils.data

        self._job = job
        self._make: Callable[..., Any] = torch.utils.data.DataLoader
        self._pictures = Pictures(job.samples, partial(load_with_pillow, size=job.size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of the samples."""
        job = self._job
        yield from self._make(self._pictures, batch_size=job.batch, num_workers=job.workers)


class TorchTorchvision(TorchPillow):
    """PyTorch's DataLoader with processes that load with torchvision."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import_module("torchvision.io")
        import_module("torchvision.transforms.v2.functional")
        self._pictures = Pictures(job.samples, partial(load_with_torchvision, size=job.size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order of the samples."""
        for images, labels in super().__iter__():
            yield images.permute(0, 2, 3, 1), labels


OURS: dict[str, type[Loader]] = {
    "spdl_media": OwnDataLoader,
    "spdl_media, fast": OwnDataLoaderFast,
    "spdl_media, whole batches": OwnDataLoaderOfBatches,
}
PEERS: dict[str, type[Loader]] = {
    "SPDL, pipeline": SpdlPipeline,
    "SPDL, batches": SpdlBatches,
    "SPDL, DataLoader": SpdlDataLoader,
    "torch, Pillow": TorchPillow,
    "torch, torchvision": TorchTorchvision,
}
LOADERS = OURS | PEERS
