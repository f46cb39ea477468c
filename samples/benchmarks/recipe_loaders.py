"""The loaders that ``recipes.py`` compares, written as in the libraries' documentation.

A loader is a function of a :class:`Job`. It imports its library, and returns an iterable of batches of (data,
labels). To add a loader, write the function and add it to ``LOADERS``.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RATE, SECONDS = 16000, 3
# Size of the shuffle buffer of shards, in samples.
SHUFFLED = 1000


@dataclass(frozen=True)
class Job:
    """The data to load and the number of workers.

    Attributes:
        samples: Paths and labels of images, paths and starts of windows, or paths of shards.
        batch: Samples per batch.
        workers: Threads or processes that load.
        size: Side of the images.
        is_torch: Whether this library returns PyTorch tensors instead of NumPy arrays.
    """

    samples: Sequence[Any]
    batch: int
    workers: int
    size: int
    is_torch: bool


Loader = Callable[[Job], Iterable[Any]]

# Random generator of the peers. Forked processes share its state, which does not affect speed.
CHANCE = np.random.default_rng(0)


# This library.


def own(job: Job, source: Any, preprocessor: Callable[..., Any]) -> Any:
    """Make this library's DataLoader, with as many prefetched batches as PyTorch's."""
    import spdl_media as sm

    return sm.DataLoader(
        source,
        preprocessor=preprocessor,
        batch_size=job.batch,
        to="torch" if job.is_torch else "numpy",
        output_order="input",
        num_threads=job.workers,
        buffer_size=2 * job.workers,
    )


def own_recipe(job: Job, *, downscale: bool = False, quality: Any = "accurate") -> Any:
    """Return the recipe for images."""
    import spdl_media as sm

    if downscale:
        import_module("simplejpeg")
    return sm.ImageRecipe(
        job.size,
        random_crop=True,
        flip=0.5,
        dtype="float32",
        mean=MEAN,
        std=STD,
        quality=quality,
        decode_config=sm.decode_config(downscale="dct") if downscale else None,
    )


def own_images(job: Job, **options: Any) -> Any:
    """Load paths to floats."""
    return own(job, job.samples, own_recipe(job, **options))


def own_window(sample: tuple[str, float]) -> tuple[Any, float]:
    """Load a window of three seconds as 16 kHz mono."""
    import spdl_media as sm

    path, start = sample
    window = (start, start + SECONDS)
    return sm.load_audio(path, window, sample_rate=RATE, num_channels=1), start


def own_windows(samples: Sequence[tuple[str, float]]) -> Any:
    """Load a batch of windows, with their starts."""
    import spdl_media as sm

    return sm.collate([own_window(sample) for sample in samples])


def own_sounds(job: Job) -> Any:
    """Load paths to windows."""
    return own(job, job.samples, own_window)


def in_processes(job: Job, source: Iterable[Any], preprocessor: Callable[..., Any]) -> Any:
    """Make this library's DataLoader with processes, each of which makes whole batches."""
    import spdl_media as sm

    return sm.DataLoader(
        Batches(source, job.batch),
        preprocessor=preprocessor,
        to="torch" if job.is_torch else "numpy",
        output_order="input",
        num_processes=job.workers,
        num_threads=1,
        buffer_size=2 * job.workers,
    )


@dataclass(frozen=True)
class Batches:
    """Lists of samples, each for one batch."""

    samples: Iterable[Any]
    size: int

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the next samples, until there are none."""
        samples = iter(self.samples)
        while batch := list(itertools.islice(samples, self.size)):
            yield batch


def own_batch(recipe: Any, samples: Sequence[Any], rng: Any) -> Any:
    """Load a batch of images, with their labels."""
    import spdl_media as sm

    return sm.collate([recipe(sample, rng) for sample in samples])


def own_images_in_processes(job: Job) -> Any:
    """Load paths to floats, in processes."""
    return in_processes(job, job.samples, partial(own_batch, own_recipe(job)))


def own_sounds_in_processes(job: Job) -> Any:
    """Load paths to windows, in processes."""
    return in_processes(job, job.samples, own_windows)


def own_shards(job: Job) -> Any:
    """Load shards to floats and captions."""
    return own(job, mixed_shards(job), partial(own_pair, captioned_recipe(job)))


def own_shards_in_processes(job: Job) -> Any:
    """Load shards to floats and captions, in processes. One thread reads the shards."""
    return in_processes(job, mixed_shards(job), partial(own_pairs, captioned_recipe(job)))


def mixed_shards(job: Job) -> Any:
    """Return the samples of all shards, shuffled."""
    import spdl_media as sm

    return sm.Shards(job.samples, shuffle_shards=True, shuffle_buffer=SHUFFLED)


def captioned_recipe(job: Job) -> Any:
    """Return a recipe that scales the shorter side and crops the centre."""
    import spdl_media as sm

    return sm.ImageRecipe(job.size, resize_size=job.size, dtype="float32", mean=MEAN, std=STD)


def own_pair(recipe: Any, sample: dict[str, Any]) -> tuple[Any, str]:
    """Load an image with its caption."""
    return recipe(sample["jpg"]), sample["txt"].decode()


def own_pairs(recipe: Any, samples: Sequence[dict[str, Any]]) -> Any:
    """Load a batch of images with their captions."""
    import spdl_media as sm

    return sm.collate([own_pair(recipe, sample) for sample in samples])


# SPDL, with the stages of its page on migrating from PyTorch.


def spdl_images(job: Job) -> Iterator[Any]:
    """Decode single images, crop them with FFmpeg's filter, and convert batches to floats with PyTorch."""
    import spdl.io
    import spdl.pipeline
    import torch

    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def decode(sample: tuple[str, int]) -> tuple[Any, int]:
        packets = spdl.io.demux_image(sample[0])
        x, y, w, h = random_box(packets.width, packets.height)
        mirror = ",hflip" if CHANCE.random() < 0.5 else ""
        scale = f"scale={job.size}:{job.size}:flags=bicubic"
        desc = f"crop={w}:{h}:{x}:{y}:exact=1,{scale}{mirror},format=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=desc), sample[1]

    def convert(items: Sequence[tuple[Any, int]]) -> Any:
        frames, labels = zip(*items, strict=True)
        pixels = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
        floats = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(mean).div_(std), torch.tensor(labels)

    yield from spdl_pipeline(job, decode, convert)


def spdl_sounds(job: Job) -> Iterator[Any]:
    """Cut windows with FFmpeg's filters, which also pad those at the start of an MP3."""
    import spdl.io
    import torch

    def decode(sample: tuple[str, float]) -> tuple[Any, float]:
        path, start = sample
        window = (start, start + SECONDS)
        desc = spdl.io.get_audio_filter_desc(
            timestamp=window, sample_rate=RATE, num_channels=1, num_frames=SECONDS * RATE
        )
        # It cannot seek to the start of an MP3.
        packets = spdl.io.demux_audio(path, timestamp=window if start else None)
        return spdl.io.decode_packets(packets, filter_desc=desc), start

    def convert(items: Sequence[tuple[Any, float]]) -> Any:
        frames, starts = zip(*items, strict=True)
        return spdl.io.to_torch(spdl.io.convert_frames(list(frames))), torch.tensor(starts)

    yield from spdl_pipeline(job, decode, convert)


def spdl_pipeline(job: Job, decode: Callable[..., Any], convert: Callable[..., Any]) -> Any:
    """Return batches in the order of the samples."""
    import spdl.pipeline

    pipeline = (
        spdl.pipeline.PipelineBuilder()
        .add_source(job.samples)
        .pipe(decode, concurrency=job.workers, output_order="input")
        .aggregate(job.batch)
        .pipe(convert, concurrency=job.workers, output_order="input")
        .add_sink(2 * job.workers)
        .build(num_threads=job.workers)
    )
    with pipeline.auto_stop():
        yield from pipeline


# PyTorch.


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Return a box ``(x, y, width, height)`` with the distribution of torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * CHANCE.uniform(0.08, 1)
        ratio = math.exp(CHANCE.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return *CHANCE.integers(0, (width - w + 1, height - h + 1)).tolist(), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


@dataclass(frozen=True)
class Samples:
    """A map-style dataset, which is sent to the processes of PyTorch's DataLoader."""

    samples: Sequence[Any]
    load: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        source, label = self.samples[index]
        return self.load((source, label)), label


def torch_loader(job: Job, load: Callable[[Any], Any]) -> Any:
    """Make PyTorch's DataLoader with processes."""
    import torch.utils.data

    dataset: Any = Samples(job.samples, load)
    return torch.utils.data.DataLoader(dataset, batch_size=job.batch, num_workers=job.workers)


def with_pillow(source: tuple[Any, Any], size: int, *, draft: bool = False) -> Any:
    """Crop, scale and flip with Pillow.

    Args:
        source: A path or bytes, with its label.
        size: Side of the result.
        draft: Whether libjpeg shrinks the image while it decodes, as far as the box allows.
    """
    from PIL import Image

    data = source[0]
    with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
        whole = image.size
        x, y, w, h = random_box(*whole)
        if draft:
            image.draft("RGB", (-(-whole[0] * size // w), -(-whole[1] * size // h)))
        across, down = image.width / whole[0], image.height / whole[1]
        box = (x * across, y * down, (x + w) * across, (y + h) * down)
        small = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box=box)
    if CHANCE.random() < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return as_floats(small)


def as_floats(image: Any) -> Any:
    """Convert to floats, as torchvision's ToTensor and Normalize do."""
    import torch

    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return pixels.sub_(mean).div_(std)


def pillow_images(job: Job, *, draft: bool = False) -> Any:
    """Load paths to floats."""
    import_module("PIL.Image")
    return torch_loader(job, partial(with_pillow, size=job.size, draft=draft))


def with_torchvision(source: tuple[str, Any], transform: Callable[[Any], Any]) -> Any:
    """Decode with torchvision's libjpeg-turbo."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return transform(decode_jpeg(read_file(source[0]), mode=ImageReadMode.RGB))


def torchvision_images(job: Job) -> Any:
    """Load paths to floats with torchvision's transforms ``v2``."""
    import torch
    import torchvision.io
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(
                job.size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True
            ),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    assert torchvision.io.decode_jpeg
    return torch_loader(job, partial(with_torchvision, transform=transform))


def with_torchcodec(sample: tuple[str, float]) -> Any:
    """Load a window; windows at the start of an MP3 are some hundred samples short."""
    from torch.nn.functional import pad
    from torchcodec.decoders import AudioDecoder

    path, start = sample
    decoder = AudioDecoder(path, sample_rate=RATE, num_channels=1)
    samples = decoder.get_samples_played_in_range(start, start + SECONDS).data
    missing = SECONDS * RATE - samples.shape[1]
    return pad(samples, (0, missing)) if missing else samples


def torchcodec_sounds(job: Job) -> Any:
    """Load paths to windows."""
    import_module("torchcodec.decoders")
    return torch_loader(job, with_torchcodec)


def with_soundfile(sample: tuple[str, float]) -> Any:
    """Load a window of a file that is already 16 kHz mono."""
    import soundfile
    import torch

    path, start = sample
    with soundfile.SoundFile(path) as file:
        file.seek(round(start * RATE))
        samples = file.read(SECONDS * RATE, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T)


def soundfile_sounds(job: Job) -> Any:
    """Load paths to windows."""
    import_module("soundfile")
    return torch_loader(job, with_soundfile)


def webdataset_shards(job: Job) -> Any:
    """Load shards to floats and captions with Pillow."""
    import webdataset

    dataset = (
        webdataset.WebDataset(list(job.samples), shardshuffle=len(job.samples))
        .shuffle(SHUFFLED)
        .to_tuple("jpg", "txt")
        .map(partial(shard_sample, size=job.size))
        .batched(job.batch, collation_fn=import_module("torch.utils.data").default_collate)
    )
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=job.workers)


def shard_sample(sample: tuple[bytes, bytes], size: int) -> tuple[Any, str]:
    """Scale the shorter side, crop the centre, and decode the text."""
    from PIL import Image

    with Image.open(io.BytesIO(sample[0])) as image:
        scale = size / min(image.size)
        width, height = (round(side * scale) for side in image.size)
        whole = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    x, y = (width - size) // 2, (height - size) // 2
    return as_floats(whole.crop((x, y, x + size, y + size))), sample[1].decode()


LOADERS: dict[str, dict[str, Loader]] = {
    "photos": {
        "spdl_media": own_images,
        "spdl_media, fast": partial(own_images, quality="fast"),
        "spdl_media, processes": own_images_in_processes,
        "SPDL": spdl_images,
        "torch, torchvision": torchvision_images,
        "torch, Pillow": pillow_images,
    },
    "photos_hd": {
        "spdl_media": own_images,
        "spdl_media, dct": partial(own_images, downscale=True),
        "SPDL": spdl_images,
        "torch, torchvision": torchvision_images,
        "torch, Pillow, draft": partial(pillow_images, draft=True),
        "torch, Pillow": pillow_images,
    },
    "FLAC": {
        "spdl_media": own_sounds,
        "spdl_media, processes": own_sounds_in_processes,
        "SPDL": spdl_sounds,
        "torch, soundfile": soundfile_sounds,
        "torch, torchcodec": torchcodec_sounds,
    },
    "MP3": {
        "spdl_media": own_sounds,
        "spdl_media, processes": own_sounds_in_processes,
        "SPDL": spdl_sounds,
        "torch, soundfile": soundfile_sounds,
        "torch, torchcodec": torchcodec_sounds,
    },
    "shards": {
        "spdl_media": own_shards,
        "spdl_media, processes": own_shards_in_processes,
        "webdataset, Pillow": webdataset_shards,
    },
}
"""By recipe; the last of each recipe is what the others are compared with first."""
