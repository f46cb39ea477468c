"""The loaders that ``dataloader.py`` and ``memory.py`` compare: paths to batches of (images, labels).

A loader is a function of a :class:`Job`. It imports its library, and returns an iterable, whose iteration
starts the work. Each item is a pair: images ``(B, size, size, 3)`` uint8 in RGB, and labels ``(B,)`` int64.
To add a loader, write the function and add it to ``OURS`` or ``PEERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

Sample = tuple[str, int]
Batch = tuple[Any, Any]
Quality = Literal["accurate", "fast"]


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


def repeated(folder: Path, count: int) -> list[Sample]:
    """Repeat the JPEGs of a folder; the label is the index of the file in the folder."""
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise FileNotFoundError(f"there is no .jpg or .jpeg file in {folder}")
    return [(str(paths[index % len(paths)]), index % len(paths)) for index in range(count)]


def labels_of(job: Job, labels: Sequence[int]) -> Any:
    """Make labels of the job's array type."""
    if job.arrays == "numpy":
        return np.asarray(labels, np.int64)
    return import_module("torch").tensor(labels, dtype=import_module("torch").int64)


# This library.


def own_pool(job: Job) -> Any:
    """Return memory for the prefetched batches, one in each thread, one at the caller and one on its way."""
    import spdl_media as sm

    count = job.ahead + job.workers + 2
    return sm.StoragePool(job.batch * job.size**2 * 3, count, pin_memory=False)


def own_loader(job: Job, samples: Any, **options: Any) -> Iterable[Batch]:
    """Make this library's DataLoader; it yields batches in the order of the samples."""
    import spdl_media as sm

    return sm.DataLoader(
        samples,
        buffer_size=job.ahead,
        num_threads=job.workers,
        output_order="input",
        **options,
    )


def own_images(job: Job, quality: Quality = "accurate") -> Iterable[Batch]:
    """Decode images one by one, and batch them in reused memory."""
    import spdl_media as sm

    filters = sm.get_video_filter_desc(
        scale_width=job.size, scale_height=job.size, scale_mode=None, quality=quality
    )
    to_array: Any = sm.to_torch if job.arrays == "torch" else sm.to_numpy
    pool = own_pool(job)

    def decode(sample: Sample) -> tuple[sm.ImageFrames, int]:
        path, label = sample
        return sm.decode_packets(sm.demux_image(path), filters), label

    def gather(samples: Sequence[tuple[sm.ImageFrames, int]]) -> Batch:
        frames, labels = zip(*samples, strict=True)
        return to_array(sm.convert_frames(frames, pool)), labels_of(job, labels)

    options = {"preprocessor": decode, "batch_size": job.batch, "aggregator": gather}
    return own_loader(job, job.samples, **options)


def own_batches(job: Job) -> Iterable[Batch]:
    """Load each list of paths by ``load_image_batch`` in one thread."""
    import spdl_media as sm

    to_array: Any = sm.to_torch if job.arrays == "torch" else sm.to_numpy
    pool = own_pool(job)

    def load(samples: Sequence[Sample]) -> Batch:
        paths, labels = zip(*samples, strict=True)
        size = {"width": job.size, "height": job.size, "scale_mode": None}
        return to_array(sm.load_image_batch(paths, storage=pool, **size)), labels_of(job, labels)

    return own_loader(job, list(job.batches), preprocessor=load)


# SPDL, as in its documentation: the page on migrating from PyTorch, the docstring of its DataLoader, and
# the page on stages of pipelines.


class Spdl:
    """The functions that the three SPDL loaders share."""

    def __init__(self, job: Job) -> None:
        import spdl.io

        self._job, self._io = job, spdl.io
        self._to_array = spdl.io.to_torch if job.arrays == "torch" else spdl.io.to_numpy
        self._desc = spdl.io.get_video_filter_desc(
            scale_width=job.size, scale_height=job.size, scale_algo="bicubic", scale_mode=None
        )

    def decode(self, sample: Sample) -> tuple[Any, int]:
        """Decode one image."""
        path, label = sample
        packets = self._io.demux_image(path)
        return self._io.decode_packets(packets, filter_desc=self._desc), label

    def convert(self, items: Sequence[tuple[Any, int]]) -> Batch:
        """Make a batch of decoded images."""
        frames, labels = zip(*items, strict=True)
        buffer = self._io.convert_frames(list(frames))
        return self._to_array(buffer), labels_of(self._job, labels)

    def load(self, samples: Sequence[Sample]) -> Batch:
        """Load a batch."""
        paths, labels = zip(*samples, strict=True)
        buffer = self._io.load_image_batch(
            list(paths), width=None, height=None, filter_desc=self._desc
        )
        return self._to_array(buffer), labels_of(self._job, labels)


def spdl_run(job: Job, builder: Any) -> Iterator[Batch]:
    """Run a pipeline of SPDL's."""
    pipeline = builder.add_sink(job.ahead).build(num_threads=job.workers)
    with pipeline.auto_stop():
        yield from pipeline


def spdl_images(job: Job) -> Iterable[Batch]:
    """Decode images one by one, group them, and make a batch, in the order of the samples."""
    import spdl.pipeline

    steps, builder = Spdl(job), spdl.pipeline.PipelineBuilder().add_source(job.samples)
    builder.pipe(steps.decode, concurrency=job.workers, output_order="input")
    return spdl_run(job, builder.aggregate(job.batch).pipe(steps.convert))


def spdl_batches(job: Job) -> Iterable[Batch]:
    """Group paths; each worker loads a whole batch, in the order of the samples."""
    import spdl.pipeline

    steps, builder = Spdl(job), spdl.pipeline.PipelineBuilder().add_source(job.samples)
    builder.aggregate(job.batch)
    return spdl_run(job, builder.pipe(steps.load, concurrency=job.workers, output_order="input"))


def spdl_dataloader(job: Job) -> Iterable[Batch]:
    """Use SPDL's DataLoader, which yields batches in the order of their completion."""
    import spdl.dataloader

    steps = Spdl(job)
    loader: Iterable[Batch] = spdl.dataloader.DataLoader(
        job.samples,
        preprocessor=steps.decode,
        batch_size=job.batch,
        aggregator=steps.convert,
        buffer_size=job.ahead,
        num_threads=job.workers,
    )
    return loader


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


def torch_pillow(job: Job) -> Iterable[Batch]:
    """Use PyTorch's DataLoader with processes that load with Pillow."""
    import_module("PIL.Image")  # here, so that forked processes have it
    return torch_loader(job, partial(load_with_pillow, size=job.size))


def torch_loader(job: Job, load: Callable[[str], Any]) -> Any:
    """Make PyTorch's DataLoader."""
    data: Any = import_module("torch.utils.data")
    pictures = Pictures(job.samples, load)
    return data.DataLoader(pictures, batch_size=job.batch, num_workers=job.workers)


def torch_torchvision(job: Job) -> Iterable[Batch]:
    """Use PyTorch's DataLoader with processes that load with torchvision."""
    import_module("torchvision.io")
    import_module("torchvision.transforms.v2.functional")
    loader = torch_loader(job, partial(load_with_torchvision, size=job.size))

    def batches() -> Iterator[Batch]:
        for images, labels in loader:
            yield images.permute(0, 2, 3, 1), labels

    return batches()


Loader = Callable[[Job], Iterable[Batch]]
OURS: dict[str, Loader] = {
    "spdl_media": own_images,
    "spdl_media, fast": partial(own_images, quality="fast"),
    "spdl_media, whole batches": own_batches,
}
PEERS: dict[str, Loader] = {
    "SPDL, pipeline": spdl_images,
    "SPDL, batches": spdl_batches,
    "SPDL, DataLoader": spdl_dataloader,
    "torch, Pillow": torch_pillow,
    "torch, torchvision": torch_torchvision,
}
LOADERS = OURS | PEERS
