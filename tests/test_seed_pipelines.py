"""Pipelines and loaders of SPDL's documentation, with the modules renamed and errors in them corrected.

Parts that the programs leave open (downloads, a training step) use images made here. Without a GPU,
``transfer_tensor`` and the transfer are the identity.
"""

from __future__ import annotations

import asyncio
import glob
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import spdl_media
from spdl_media import CPUBuffer, ImageFrames
from spdl_media.pipeline import PipelineBuilder, ProcessPoolExecutorConfig, profile_pipeline
from spdl_media.source import DistributedRandomSampler
from spdl_media.testing import index_frames, make_image

T = TypeVar("T")

NUM_IMAGES = 11
# The programs set a higher concurrency than threads, which is allowed, with a warning.
IDLE = "ignore:.*concurrency"


@pytest.fixture
def root_dir(tmp_path: Path) -> Path:
    """Write images whose pixels show their index as JPEG, in the folders of their classes."""
    for index, picture in enumerate(index_frames(NUM_IMAGES, 64, 48)):
        folder = tmp_path / f"class{index % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index:02}.JPEG").write_bytes(make_image(picture, codec="mjpeg"))
    return tmp_path


@pytest.fixture
def image_urls(root_dir: Path) -> list[str]:
    return sorted(map(str, root_dir.glob("**/*.JPEG")), key=lambda url: Path(url).name)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def download(url: str) -> bytes:
    return Path(url).read_bytes()


def decode_image(data: bytes) -> np.ndarray:
    return np.asarray(spdl_media.load_image(data, width=32, height=32))


def transfer_tensor(batch: T) -> T:
    """Stand in for the copy to a GPU."""
    return batch


def picture_number(picture: Any, urls: list[str]) -> int:
    """Return the number of the image to which it is closest."""
    expected = np.stack([decode_image(download(url)).astype(int) for url in urls])
    return int(abs(expected - np.asarray(picture)).mean(axis=(1, 2, 3)).argmin())


class TestBuildingDataLoaders:
    """Seed 000."""

    def build_data_pipeline(
        self,
        catalog: list[str],
        sampler: Iterable[int],
        *,
        load_fn: Callable[[str], Any],
        preprocess_fn: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any],
        batch_size: int,
        drop_last: bool = False,
        num_io_workers: int = 16,
        num_cpu_workers: int = 8,
        buffer_size: int = 10,
    ) -> PipelineBuilder[Any]:
        builder = (
            PipelineBuilder()
            .add_source(sampler)
            # Stage 1: I/O operations (high concurrency)
            .pipe(
                lambda idx: load_fn(catalog[idx]),
                concurrency=num_io_workers,
                output_order="completion",  # Don't wait for slow requests
            )
        )
        # Stage 2: CPU processing (moderate concurrency, if provided)
        if preprocess_fn is not None:
            builder.pipe(
                preprocess_fn,
                concurrency=num_cpu_workers,
                output_order="input",  # Maintain order
            )
        # Stage 3: Batching and collation
        builder.aggregate(batch_size, drop_last=drop_last)
        builder.pipe(collate_fn)
        # Stage 4: GPU transfer (serial execution)
        builder.pipe(transfer_tensor)
        # Prefetch buffer
        builder.add_sink(buffer_size)
        return builder

    def builder(self, catalog: list[str]) -> PipelineBuilder[Any]:
        torch = pytest.importorskip("torch")

        def collate_batch(items: list[np.ndarray]) -> Any:
            return torch.stack([torch.tensor(item) for item in items])

        return self.build_data_pipeline(
            catalog,
            DistributedRandomSampler(len(catalog)),
            load_fn=download,
            preprocess_fn=decode_image,
            collate_fn=collate_batch,
            batch_size=4,
            num_io_workers=16,
            num_cpu_workers=8,
        )

    @pytest.mark.filterwarnings(IDLE)
    def test_a_pipeline(self, image_urls: list[str]) -> None:
        pipeline = self.builder(image_urls).build(num_threads=1)
        batches = []
        with pipeline.auto_stop():
            for batch in pipeline:
                batches.append(batch)  # noqa: PERF402  # as in the documentation
        assert [tuple(batch.shape) for batch in batches] == [(4, 32, 32, 3)] * 2 + [(3, 32, 32, 3)]
        seen = [picture_number(picture, image_urls) for batch in batches for picture in batch]
        assert sorted(seen) == list(range(NUM_IMAGES))

    def test_idle_concurrency_is_warned_of(self, image_urls: list[str]) -> None:
        builder = self.builder(image_urls)
        with pytest.warns(UserWarning, match=r"16.*num_threads"):
            builder.build(num_threads=1)

    @pytest.mark.filterwarnings(IDLE)
    def test_a_profile(self, image_urls: list[str]) -> None:
        profile = profile_pipeline(self.builder(image_urls).get_config(), num_iterations=100)
        assert {"decode_image", "transfer_tensor"} <= {stage.name for stage in profile.stages}

    @pytest.mark.filterwarnings(IDLE)
    def test_statistics_of_a_training(self, image_urls: list[str]) -> None:
        pipeline = self.builder(image_urls).build(num_threads=1, report_stats_interval=5.0)
        with pipeline.auto_stop():
            assert len(list(pipeline)) == 3

    @pytest.mark.filterwarnings(IDLE)
    def test_a_class_in_the_style_of_pytorch(self, image_urls: list[str]) -> None:
        torch = pytest.importorskip("torch")
        build_data_pipeline = self.build_data_pipeline

        class DataLoader:
            """A PyTorch-style DataLoader built on a pipeline."""

            def __init__(
                self,
                data_source: list[str],
                *,
                load_fn: Callable[[str], Any],
                preprocess_fn: Callable[[Any], Any] | None = None,
                collate_fn: Callable[[list[Any]], Any],
                batch_size: int,
                drop_last: bool = False,
                num_io_workers: int = 8,
                num_cpu_workers: int = 4,
                buffer_size: int = 10,
            ):
                self.batch_size = batch_size
                self.drop_last = drop_last
                # Create sampler once for distributed training support
                self._sampler = DistributedRandomSampler(len(data_source))
                # Compute and cache the number of batches
                num_samples = len(self._sampler)
                if drop_last:
                    self._num_batches = num_samples // batch_size
                else:
                    self._num_batches = (num_samples + batch_size - 1) // batch_size
                self._builder = build_data_pipeline(
                    data_source,
                    self._sampler,
                    load_fn=load_fn,
                    preprocess_fn=preprocess_fn,
                    collate_fn=collate_fn,
                    batch_size=batch_size,
                    drop_last=drop_last,
                    num_io_workers=num_io_workers,
                    num_cpu_workers=num_cpu_workers,
                    buffer_size=buffer_size,
                )

            def __len__(self) -> int:
                """Return the number of batches in the dataloader."""
                return self._num_batches

            def __iter__(self) -> Iterator[Any]:
                # Build a fresh pipeline for each iteration
                pipeline = self._builder.build(num_threads=1)
                with pipeline.auto_stop():
                    yield from pipeline

        def preprocess_image(data: bytes) -> np.ndarray:
            return decode_image(data)

        def collate_images(images: list[np.ndarray]) -> Any:
            return torch.stack([torch.from_numpy(img) for img in images])

        dataloader = DataLoader(
            data_source=image_urls,
            load_fn=download,
            preprocess_fn=preprocess_image,
            collate_fn=collate_images,
            batch_size=4,
            num_io_workers=16,
            num_cpu_workers=8,
        )
        epochs = []
        for _ in range(2):
            batches = list(dataloader)
            assert len(batches) == len(dataloader) == 3
            numbers = [picture_number(picture, image_urls) for b in batches for picture in b]
            assert sorted(numbers) == list(range(NUM_IMAGES))
            epochs.append(numbers)
        assert epochs[0] != epochs[1]

    @pytest.mark.filterwarnings(IDLE)
    def test_an_async_download(self) -> None:
        aiohttp = pytest.importorskip("aiohttp")
        from http_server import serve

        async def async_load(url: str) -> bytes:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return await response.read()

        with serve({"a": b"first", "b": b"second"}) as files:
            builder = PipelineBuilder().add_source([f"{files.url}/a", f"{files.url}/b"])
            builder.pipe(
                async_load,
                concurrency=32,  # Can handle many concurrent requests
            )
            builder.add_sink(10)
            pipeline = builder.build(num_threads=1)
            with pipeline.auto_stop():
                assert sorted(pipeline) == [b"first", b"second"]


class ImageNet:
    """A stand-in for torchvision's class of this name."""

    def __init__(self, root: Path, loader: Callable[[str], Any], transform: Any = None) -> None:
        self.samples = [
            (str(path), int(path.parent.name.removeprefix("class")))
            for path in sorted(root.glob("**/*.JPEG"), key=lambda path: path.name)
        ]
        self.loader = loader
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, target = self.samples[index]
        sample = self.loader(path)
        return (sample if self.transform is None else self.transform(sample)), target


CLASSES = [index % 3 for index in range(NUM_IMAGES)]


class TestMigratingFromPyTorch:
    """Seed 001, which imports the builder from the module of the loader."""

    num_workers = 4
    prefetch_factor = 2

    def test_decoding_in_threads(self, root_dir: Path) -> None:
        from spdl_media.dataloader import PipelineBuilder

        dataset = ImageNet(root_dir, loader=lambda path: decode_image(download(path)))
        pipeline = (
            PipelineBuilder()
            .add_source(range(len(dataset)))
            .pipe(
                dataset.__getitem__,
                concurrency=self.num_workers,
                output_order="input",
            )
            .add_sink(self.prefetch_factor)
            .build(num_threads=self.num_workers)
        )
        items = []
        with pipeline.auto_stop():
            for batch, classes in pipeline:
                items.append((batch, classes))
        assert [classes for _, classes in items] == CLASSES
        for (image, _), (path, _) in zip(items, dataset.samples, strict=True):
            np.testing.assert_array_equal(image, decode_image(download(path)))

    def test_batching(self, root_dir: Path) -> None:
        torch = pytest.importorskip("torch")
        from spdl_media.dataloader import PipelineBuilder

        dataset = ImageNet(
            root_dir,
            loader=lambda path: decode_image(download(path)),
            transform=lambda image: torch.from_numpy(image).permute(2, 0, 1),
        )
        pipeline = (
            PipelineBuilder()
            .add_source(range(len(dataset)))
            .pipe(
                dataset.__getitem__,
                concurrency=self.num_workers,
                output_order="input",
            )
            .aggregate(4)
            .pipe(torch.utils.data.default_collate)
            .add_sink(self.prefetch_factor)
            .build(num_threads=self.num_workers)
        )
        with pipeline.auto_stop():
            batches = list(pipeline)
        assert [tuple(images.shape) for images, _ in batches] == [
            *[(4, 3, 32, 32)] * 2,
            (3, 3, 32, 32),
        ]
        assert torch.cat([classes for _, classes in batches]).tolist() == CLASSES

    def test_switching_to_spdl_media(self, root_dir: Path) -> None:
        pytest.importorskip("torch")
        from spdl_media.dataloader import PipelineBuilder

        filter_desc = spdl_media.get_video_filter_desc(
            scale_width=224,
            scale_height=224,
        )

        def decode_image(path: str) -> ImageFrames:
            packets = spdl_media.demux_image(path)
            return spdl_media.decode_packets(packets, filter_desc=filter_desc)

        dataset = ImageNet(
            root_dir,
            loader=decode_image,
        )

        def convert(items: list[tuple[ImageFrames, int]]) -> tuple[Any, Any]:
            frames, clsses = list(zip(*items, strict=True))
            buffer = spdl_media.convert_frames(frames)
            tensor = spdl_media.to_torch(buffer).permute(0, 3, 1, 2)
            return tensor, clsses

        pipeline = (
            PipelineBuilder()
            .add_source(range(len(dataset)))
            .pipe(
                dataset.__getitem__,
                concurrency=self.num_workers,
                output_order="input",
            )
            .aggregate(4)
            .pipe(convert)
            .add_sink(self.prefetch_factor)
            .build(num_threads=self.num_workers)
        )
        with pipeline.auto_stop():
            batches = list(pipeline)
        assert [target for _, classes in batches for target in classes] == CLASSES
        paths = [path for path, _ in dataset.samples]
        expected = spdl_media.load_image_batch(paths, width=224, height=224, layout="NCHW")
        np.testing.assert_array_equal(
            np.concatenate([images.numpy() for images, _ in batches]), np.asarray(expected)
        )


class TestDataLoader:
    """Seed 002. Its aggregators share one storage, and run at the same time."""

    @pytest.mark.filterwarnings("ignore:memory cannot be pinned")
    @pytest.mark.filterwarnings("ignore::spdl_media.StorageInUseWarning")
    def test_the_example(self, root_dir: Path) -> None:
        pytest.importorskip("torch")
        from spdl_media.dataloader import DataLoader

        def source(root_dir: str) -> Iterable[str]:
            # Iterate the directory and find images.
            yield from glob.iglob(f"{root_dir}/**/*.JPEG", recursive=True)  # noqa: PTH207

        width, height, batch_size = 224, 224, 4

        # Filter description that scales the image and convert to RGB
        filter_desc = spdl_media.get_filter_desc(
            scale_width=width, scale_height=height, pix_fmt="rgb24"
        )

        decoded: dict[int, str] = {}
        lock = threading.Lock()

        def decode_image(path: str) -> ImageFrames:
            # Decode image and resize
            packets = spdl_media.demux_image(path)
            frames = spdl_media.decode_packets(packets, filter_desc=filter_desc)
            with lock:
                decoded[id(frames)] = path
                kept.append(frames)
            return frames

        kept: list[ImageFrames] = []
        size = width * height * batch_size * 3
        storage = spdl_media.cpu_storage(size, pin_memory=True)
        batches_of_paths: dict[int, list[str]] = {}

        def batchify(data: list[ImageFrames]) -> CPUBuffer:
            # Merge the decoded frames into the pre-allocated pinned-memory.
            buffer = spdl_media.convert_frames(data, storage=storage)
            batches_of_paths[id(buffer)] = [decoded[id(frames)] for frames in data]
            return buffer

        given: list[tuple[Any, list[str]]] = []

        def transfer(cpu_buffer: CPUBuffer) -> Any:
            return spdl_media.to_torch(cpu_buffer), batches_of_paths[id(cpu_buffer)]

        dataloader = DataLoader(
            src=source(str(root_dir)),
            preprocessor=decode_image,
            batch_size=batch_size,
            aggregator=batchify,
            transfer_fn=transfer,
        )
        for batch in dataloader:
            given.append(batch)  # noqa: PERF402  # as in the documentation
        assert sorted(path for _, paths in given for path in paths) == sorted(
            map(str, root_dir.glob("**/*.JPEG"))
        )
        for images, paths in given:
            expected = spdl_media.load_image_batch(paths, width=width, height=height)
            np.testing.assert_array_equal(images.numpy(), np.asarray(expected))


class TestPipelineStages:
    """Seed 003."""

    def test_sources(self, root_dir: Path, image_urls: list[str], tmp_path: Path) -> None:
        from spdl_media.dataloader import PipelineBuilder

        listing = tmp_path / "paths.txt"
        listing.write_text("\n\n".join(image_urls) + "\n")

        def load_path_from_file(input_path: str) -> Iterator[str]:
            with open(input_path) as f:
                for line in f:
                    if path := line.strip():
                        yield path

        def find_files(path: Path, ext: str) -> Iterator[Path]:
            yield from path.glob(f"**/*{ext}")

        async def list_bucket(bucket: str) -> AsyncIterator[str]:
            for route in await asyncio.to_thread(lambda: [*Path(bucket).glob("**/*.JPEG")]):
                yield str(route)

        for source in (
            load_path_from_file(str(listing)),
            find_files(root_dir, ".JPEG"),
            list_bucket(str(root_dir)),
        ):
            pipeline = PipelineBuilder().add_source(source).add_sink(4).build()
            assert sorted(map(str, pipeline)) == sorted(image_urls)

    def test_a_pipeline(self, image_urls: list[str]) -> None:
        pytest.importorskip("torch")
        from spdl_media.dataloader import PipelineBuilder

        def source() -> Iterator[str]:
            """Returns the list of URLs to fetch data from"""
            yield from image_urls

        async def download(url: str) -> bytes:
            """Download data from the given URL"""
            return await asyncio.to_thread(Path(url).read_bytes)

        async def process(data: list[bytes]) -> Any:
            """Given raw image data, decode, resize, batch"""
            buffer = await spdl_media.async_load_image_batch(
                data,
                width=224,
                height=224,
            )
            return spdl_media.to_torch(buffer)

        pipeline = (
            PipelineBuilder()
            .add_source(source())
            .pipe(download)
            .aggregate(32)
            .pipe(process)
            .add_sink(4)
            .build()
        )
        with pipeline.auto_stop():
            (tensor,) = pipeline
        expected = spdl_media.load_image_batch(image_urls, width=224, height=224)
        np.testing.assert_array_equal(tensor.numpy(), np.asarray(expected))


def cube(number: int) -> int:
    return number**3


class TestExecutors:
    """The table at the end of seed 000: threads, processes, async functions."""

    def test_a_thread_pool(self) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="mine") as executor:
            pipeline = (
                PipelineBuilder()
                .add_source(range(8))
                .pipe(
                    lambda n: (n, threading.current_thread().name), concurrency=2, executor=executor
                )
                .add_sink()
                .build(num_threads=1)
            )
            given = sorted(pipeline)
        assert [number for number, _ in given] == list(range(8))
        assert all(name.startswith("mine") for _, name in given)

    def test_processes(self) -> None:
        pipeline = (
            PipelineBuilder()
            .add_source(range(20))
            .pipe(cube, concurrency=2, executor=ProcessPoolExecutorConfig(max_workers=2))
            .add_sink()
            .build(num_threads=1)
        )
        assert sorted(pipeline) == [number**3 for number in range(20)]
