"""Load images and videos to a GPU, and copy to it: this library compared with others, in one run.

    python samples/benchmarks/gpu.py --images DIR --video FILE [--video FILE ...] [--json FILE] [--markdown]

Every way to load images takes the same JPEGs in memory and leaves the same result on the device: a batch of
uint8 in RGB, ``size`` x ``size``, stretched with an antialiased bicubic kernel. Every way to load videos
takes the same files and leaves their first frames on the device, at their own size. One round measures all
cells in turn; the next round runs in reverse order, so that a change of the machine's speed favours none. The
output shows the median of the rounds with the minimum and the maximum; each measured rate is also printed at
once, to stderr. ``--cells NVDEC`` measures only the ways with this in their names.

    difference  mean absolute difference, in levels of 255, from this library's result on the CPU
    x NAME      ratio to the way of this name, in the same round
    Python      with ``--counting``: the speed of a thread that counts in pure Python next to the way, as a
                share of its speed alone, that is, the share of the GIL left for training; measured after the
                round
    raw         cudaMemcpyAsync of the same bytes, from the same kind of memory, into existing memory

This library and PyTorch's workers use ``--threads`` threads or processes; torchvision decodes a list of
images in one call with its own threads. A cell ends when the device has finished its last result. Prefetched
batches of PyTorch's workers are taken before the clock starts, and the workers are idle before the next cell.
Ways that are not available, or that fail in a round, are skipped with the reason.

Without a GPU, it measures nothing, prints what is missing, and exits with status 3.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from figures import (
    add_output_options,
    machine,
    markdown_table,
    over,
    plain_table,
    spread,
    with_range,
    write_json,
)
from processes import reason_of

import spdl_media as sm

NO_GPU = 3
COPIES = 16
STEP = 20  # matrix products per training step: some milliseconds on a large device
Kind = Literal["images", "frames", "bytes"]
RAW = "raw cudaMemcpyAsync"


@dataclass(frozen=True)
class Job:
    """The data to load and the device.

    Attributes:
        images: JPEGs in memory, in batches.
        videos: Paths.
        size: Side of the images.
        frames: Number of frames to load of each video.
        threads: Number of loading threads.
        nbytes: Bytes of one copy.
        device: Name of the device in PyTorch's form.
    """

    images: Sequence[Sequence[bytes]]
    videos: Sequence[str]
    size: int
    frames: int
    threads: int
    nbytes: int
    device: str = "cuda:0"

    @property
    def index(self) -> int:
        """Number of the device."""
        return int(self.device.rpartition(":")[2])


@dataclass
class Cell:
    """One way, with its measurements.

    Attributes:
        kind: What it loads.
        load: Loads the batch of a number, and returns the result on the device.
        count: Number of items in the batch of a number.
        wait: Waits until the device has finished a result.
        to_host: Returns the values of a result.
        wanted: The expected values; ``None``: not checked.
        threads: Number of threads that load at the same time.
        begin: Called before the first batch of a round, outside of the clock.
        end: Called after a round, so that nothing of it runs during the next cell.
        rates: Measured rates per second.
        counted: Share of its speed that a counting thread kept.
        difference: Difference from ``wanted``.
    """

    kind: Kind
    load: Callable[[int], Any]
    count: Callable[[int], int]
    wait: Callable[[Any], None]
    to_host: Callable[[Any], Any]
    wanted: Callable[[], Any] | None = None
    threads: int = 1
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    rates: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)
    difference: float | None = None


# The ways. Each maker imports its library, and raises if it is not installed.


def pictures(load: Callable[[Sequence[bytes]], sm.CUDABuffer], job: Job) -> Cell:
    """Return a cell of this library that loads images."""
    return Cell(
        "images",
        lambda number: load(job.images[number % len(job.images)]),
        lambda number: len(job.images[number % len(job.images)]),
        lambda buffer: buffer.synchronize(),
        lambda buffer: sm.transfer_buffer_cpu(buffer).array,
        partial(_on_cpu, job),
        job.threads,
    )


def _on_cpu(job: Job) -> Any:
    options: Any = {"width": job.size, "height": job.size, "scale_mode": None}
    return sm.load_image_batch(job.images[0], **options).array


def cpu_and_transfer(job: Job) -> Cell:
    """Decode and scale on the CPU, into pinned memory, and copy."""
    nbytes = max(map(len, job.images)) * job.size * job.size * 3
    pool = sm.StoragePool(nbytes, 2 * job.threads, on_exhausted="wait", timeout=60)

    def load(batch: Sequence[bytes]) -> sm.CUDABuffer:
        on_cpu = sm.load_image_batch(
            batch, width=job.size, height=job.size, scale_mode=None, storage=pool
        )
        return sm.transfer_buffer(on_cpu, cuda_config=job.index)

    return pictures(load, job)


def on_device(decoder: str, job: Job) -> Cell:
    """Call ``load_image_batch(cuda=)`` once."""

    def load(batch: Sequence[bytes]) -> sm.CUDABuffer:
        return sm.load_image_batch(  # type: ignore[return-value]  # with cuda=
            batch,
            width=job.size,
            height=job.size,
            scale_mode=None,
            cuda=job.index,
            decoder=decoder,  # type: ignore[arg-type]  # one of its decoders
        )

    return pictures(load, job)


def torchvision(job: Job) -> Cell:
    """Decode and scale on the device with torchvision."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    coded = [
        [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in batch]
        for batch in job.images
    ]

    def load(number: int) -> Any:
        decoded = decode_jpeg(
            coded[number % len(coded)], mode=ImageReadMode.RGB, device=torch.device(job.device)
        )
        size = [job.size, job.size]
        scaled = [resize(one, size, interpolation=3, antialias=True) for one in decoded]
        return torch.stack(scaled).permute(0, 2, 3, 1)

    return tensors(load, job)


def tensors(load: Callable[[int], Any], job: Job) -> Cell:
    """Return a cell that gives PyTorch tensors."""
    import torch

    def wait(_: Any) -> None:
        if job.device != "cpu":
            torch.cuda.synchronize(job.index)

    return Cell(
        "images",
        load,
        lambda number: len(job.images[number % len(job.images)]),
        wait,
        lambda tensor: tensor.cpu().numpy(),
        partial(_on_cpu, job),
    )


class Pictures:
    """A PyTorch dataset of images, decoded and scaled by Pillow."""

    def __init__(self, images: Sequence[bytes], size: int) -> None:
        self._images, self._size = images, size

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        picture = Image.open(io.BytesIO(self._images[index])).convert("RGB")
        picture = picture.resize((self._size, self._size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(picture))


class Endless:
    """The indices of the batches, repeated until stopped, so that workers are started only once."""

    def __init__(self, batches: Sequence[Sequence[bytes]]) -> None:
        ends = np.cumsum([len(batch) for batch in batches]).tolist()
        self._batches = [
            list(range(end - len(batch), end)) for batch, end in zip(batches, ends, strict=True)
        ]
        self.is_stopped = False

    def __iter__(self) -> Any:
        self.is_stopped = False
        while True:
            for batch in self._batches:
                if self.is_stopped:
                    return
                yield batch


class Rounds:
    """The batches of a DataLoader in a round. Batches made outside of the clock are not counted.

    Args:
        loader: Iterates over batches, and prefetches.
        sampler: The source of the loader's indices.
        ahead: Number of prefetched batches.

    Attributes:
        size: Size of the last batch.
    """

    def __init__(self, loader: Any, sampler: Endless, ahead: int) -> None:
        self._loader, self._sampler, self._ahead = loader, sampler, ahead
        self._batches: Any = None
        self.size = 0

    def begin(self) -> None:
        """Restart, and take the prefetched batches, so that later ones come as fast as they are made."""
        self.end()
        for _ in range(self._ahead):
            self.next()

    def next(self) -> Any:
        """Return the next batch."""
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        self.size = len(batch)
        return batch

    def end(self) -> None:
        """Let the workers finish the batches that they have begun."""
        self._sampler.is_stopped = True
        batches, self._batches = self._batches, None
        if batches is not None:  # which has no length to ask
            for _ in batches:
                pass


def torch_loader(job: Job) -> Cell:
    """Use a plain PyTorch DataLoader with processes and pinned memory, and an asynchronous copy."""
    import torch
    from torch.utils.data import DataLoader

    is_gpu = job.device != "cpu"
    images = [data for batch in job.images for data in batch]
    sampler = Endless(job.images)
    loader = DataLoader(
        Pictures(images, job.size),  # type: ignore[arg-type]  # has the methods of a dataset
        batch_sampler=sampler,  # type: ignore[arg-type]  # an iterable of lists
        num_workers=job.threads,
        pin_memory=is_gpu,
        # A process that has used CUDA must not fork.
        multiprocessing_context="spawn" if job.threads else None,
        persistent_workers=job.threads > 0,
    )
    rounds = Rounds(loader, sampler, job.threads * (loader.prefetch_factor or 0))

    def load(_: int) -> Any:
        return rounds.next().to(torch.device(job.device), non_blocking=True)

    cell = tensors(load, job)
    cell.count = lambda _: rounds.size
    cell.begin, cell.end = rounds.begin, rounds.end
    return cell


def videos(load: Callable[[str], sm.CUDABuffer], job: Job) -> Cell:
    """Return a cell of this library that loads videos."""
    counts = {path: len(sm.load_video(path, num_frames=job.frames)) for path in job.videos}

    def path_of(number: int) -> str:
        return job.videos[number % len(job.videos)]

    return Cell(
        "frames",
        lambda number: load(path_of(number)),
        lambda number: counts[path_of(number)],
        lambda buffer: buffer.synchronize(),
        lambda buffer: sm.transfer_buffer_cpu(buffer).array,
        lambda: sm.load_video(path_of(0), num_frames=job.frames).array,
        job.threads,
    )


def video_on(decoder: str, job: Job) -> Cell:
    """Load videos in one call; the CPU decodes, or NVDEC, through DALI or not."""
    return videos(
        lambda path: sm.load_video(  # type: ignore[return-value]  # with cuda=
            path,
            num_frames=job.frames,
            cuda=job.index,
            decoder=decoder,  # type: ignore[arg-type]  # one of its decoders
        ),
        job,
    )


def new_decoders(job: Job) -> Cell:
    """Load videos without keeping NVDEC decoders for the next video."""
    from spdl_media.cuda.nvdec import DECODERS

    cell = video_on("nvdec", job)
    load = cell.load

    def load_anew(number: int) -> Any:
        DECODERS.clear()
        return load(number)

    cell.load = load_anew
    return cell


def beside_training(job: Job) -> Cell:
    """Load videos, and start a training step on PyTorch's default stream before each video."""
    import torch

    device = torch.device(job.device)
    square = torch.ones((4096, 4096), device=device)
    cell = video_on("nvdec", job)
    load = cell.load

    def load_beside(number: int) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            for _ in range(STEP):
                torch.mm(square, square)
        return load(number)

    cell.load = load_beside
    return cell


def transfer(job: Job) -> Cell:
    """Copy with this library, each time into new memory."""
    pool = sm.StoragePool(job.nbytes, 1)
    source = sm.convert_array(np.zeros(job.nbytes, np.uint8), pool)

    def load(_: int) -> Any:
        for _ in range(COPIES):
            buffer = sm.transfer_buffer(source, cuda_config=job.index)
        return buffer

    return Cell(
        "bytes",
        load,
        lambda _: COPIES * job.nbytes,
        lambda buffer: buffer.synchronize(),
        lambda buffer: sm.transfer_buffer_cpu(buffer).array,
    )


def raw_copies(job: Job) -> Cell:
    """Copy with only the CUDA runtime, on a separate stream."""
    runtime = Runtime()
    source = sm.convert_array(np.zeros(job.nbytes, np.uint8), sm.StoragePool(job.nbytes, 1)).array
    runtime.select(job.index)
    target, stream = runtime.allocate(job.nbytes), runtime.new_stream()

    def load(_: int) -> Any:
        runtime.select(job.index)
        for _ in range(COPIES):
            runtime.copy(target, source.ctypes.data, job.nbytes, stream)
        return source

    return Cell(
        "bytes",
        load,
        lambda _: COPIES * job.nbytes,
        lambda _: runtime.wait(stream),
        lambda array: array,
    )


class Runtime:
    """NVIDIA's runtime library, from the wheels of PyTorch or CuPy, or from the system.

    Raises:
        OSError: The library is not installed.
    """

    NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._library = self._found(load)

    def _found(self, load: Callable[[str], Any]) -> Any:
        for name in self.NAMES:
            try:
                return load(name)
            except OSError as error:
                last = error
        raise OSError(f"the CUDA runtime is not there: none of {', '.join(self.NAMES)}") from last

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} failed: cudaError {status}")

    def select(self, index: int) -> None:
        """Make a device the current one of this thread."""
        self._call("cudaSetDevice", ctypes.c_int(index))

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the device."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value or 0

    def new_stream(self) -> int:
        """Return a stream that does not wait for the default stream."""
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(1))
        return stream.value or 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Start a copy to the device."""
        to_device = ctypes.c_int(1)
        addresses = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self._call(
            "cudaMemcpyAsync",
            *addresses,
            ctypes.c_size_t(nbytes),
            to_device,
            ctypes.c_void_p(stream),
        )

    def wait(self, stream: int) -> None:
        """Wait for the stream."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(stream))


IMAGE_PEERS = {"torchvision, cuda": torchvision, "torch DataLoader, pinned": torch_loader}
CELLS: Mapping[str, Callable[[Job], Cell]] = {
    "CPU + transfer": cpu_and_transfer,
    "nvJPEG through DALI": partial(on_device, "dali"),
    **IMAGE_PEERS,
    "video: CPU + transfer": partial(video_on, "cpu"),
    "video: NVDEC through DALI": partial(video_on, "dali"),
    "video: NVDEC": partial(video_on, "nvdec"),
    "video: NVDEC, new decoders": new_decoders,
    "video: NVDEC, beside training": beside_training,
    "transfer_buffer": transfer,
    RAW: raw_copies,
}
BASES: Mapping[Kind, Sequence[str]] = {
    "images": tuple(IMAGE_PEERS),
    "frames": ("video: CPU + transfer",),
    "bytes": (RAW,),
}
"""What the others of a kind are compared with."""

TITLES: Mapping[Kind, str] = {"images": "images/s", "frames": "frames/s", "bytes": "GB/s"}


def make_cells(
    job: Job, makers: Mapping[str, Callable[[Job], Cell]]
) -> tuple[dict[str, Cell], dict[str, str]]:
    """Return the available cells, each tried once, and the reasons of the others."""
    cells, left_out = {}, {}
    for name, make in makers.items():
        if name.startswith("video: ") and not job.videos:
            left_out[name] = "no --video is given"
            continue
        try:
            cell = make(job)
            cell.difference = tried(cell)
        except Exception as error:  # noqa: BLE001  # whatever a library raises, the others are measured
            left_out[name] = reason_of(error)
            continue
        cells[name] = cell
    return cells, left_out


def tried(cell: Cell) -> float | None:
    """Load the first batch, and return its difference from the expected values.

    Raises:
        ValueError: It has another shape.
    """
    result = cell.load(0)
    cell.wait(result)
    values = np.asarray(cell.to_host(result))
    if cell.wanted is None:
        return None
    wanted = np.asarray(cell.wanted())
    if values.shape != wanted.shape:
        raise ValueError(f"it gives {values.shape}, and {wanted.shape} is wanted")
    return float(np.abs(values.astype(np.int16) - wanted).mean())


# Measurements.


def rate_of(cell: Cell, seconds: float) -> float:
    """Measure the rate of all threads together. Each thread loads whole batches until the time is over."""
    rates: list[float] = []
    errors: list[BaseException] = []
    start = threading.Barrier(cell.threads)

    def work(turn: int) -> None:
        try:
            cell.begin()
            result = cell.load(turn)  # creates the streams and decoders of the thread
            cell.wait(result)
            start.wait()
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                result = cell.load(turn)
                count, turn = count + cell.count(turn), turn + cell.threads
            cell.wait(result)
            rates.append(count / (time.perf_counter() - begin))
        except BaseException as error:  # noqa: BLE001  # raised again below, in the main thread
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(cell.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cell.end()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return sum(rates)


def counted(work: Callable[[], object]) -> float:
    """Return how far a thread counts in pure Python per second, while other work runs."""
    is_over, count = threading.Event(), 0

    def run() -> None:
        nonlocal count
        while not is_over.is_set():
            count += 1

    thread, begin = threading.Thread(target=run), time.perf_counter()
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    return count / (time.perf_counter() - begin)


def measure(
    cells: dict[str, Cell], rounds: int, seconds: float, *, counting: bool = False
) -> dict[str, str]:
    """Run the rounds, alternately forwards and backwards.

    Returns:
        The reasons of cells that fail in a round. They are removed, and the others are measured.
    """
    failed = {}
    for number in range(rounds):
        order = list(cells)
        for name in order if number % 2 == 0 else order[::-1]:
            try:
                cell = cells[name]
                cell.rates.append(rate_of(cell, seconds))
                rate = f"{cell.rates[-1]:.4g} {cell.kind}/s"
                print(f"round {number + 1}, {name}: {rate}", file=sys.stderr, flush=True)
                if counting:
                    alone = counted(partial(time.sleep, seconds / 2))
                    cell.counted.append(counted(partial(rate_of, cell, seconds)) / alone)
            except Exception as error:  # noqa: BLE001  # whatever a library raises, the others are measured
                failed[name] = f"in round {number + 1}: {reason_of(error)}"
                del cells[name]
    return failed


# Output.


def summary(cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    """Return the measurements by cell."""
    results = {}
    for name, cell in cells.items():
        bases = [base for base in BASES[cell.kind] if base in cells and base != name]
        results[name] = {
            "kind": cell.kind,
            "per_second": spread(cell.rates),
            "difference": cell.difference,
            "counted": spread(cell.counted) if cell.counted else None,
            "ratios": {base: over(cell.rates, cells[base].rates) for base in bases},
        }
    return results


def tables(results: Mapping[str, Mapping[str, Any]], *, markdown: bool = False) -> str:
    """Return one table for each kind."""
    texts = []
    for kind, title in TITLES.items():
        rows = {name: row for name, row in results.items() if row["kind"] == kind}
        if not rows:
            continue
        bases = [base for base in BASES[kind] if base in rows]
        head = [kind, "difference", title, "Python", *(f"x {base}" for base in bases)]
        lines = [
            _line(name, row, bases, 1e-9 if kind == "bytes" else 1.0) for name, row in rows.items()
        ]
        texts.append((markdown_table if markdown else plain_table)(head, lines))
    return "\n\n".join(texts)


def _line(name: str, row: Mapping[str, Any], bases: Sequence[str], unit: float) -> list[str]:
    per_second = {key: value * unit for key, value in row["per_second"].items()}
    ratios = [row["ratios"].get(base) for base in bases]
    return [
        name,
        "-" if row["difference"] is None else f"{row['difference']:.2f}",
        with_range(per_second, 0 if unit == 1 else 2),
        with_range(row["counted"], 2) if row["counted"] else "-",
        *("-" if ratio is None else with_range(ratio, 2) for ratio in ratios),
    ]


def arguments() -> argparse.ArgumentParser:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEGs")
    parser.add_argument("--video", action="append", default=[], help="a video; may be given again")
    parser.add_argument(
        "--cells", metavar="PART", default="", help="only ways with this in the name"
    )
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="time per cell and round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--frames", type=int, default=120, help="frames per video")
    parser.add_argument("--copy", type=int, default=64 << 20, help="bytes per copy")
    add_output_options(parser, chart=False, markdown=True)
    parser.add_argument("--counting", action="store_true", help="also with a counting thread")
    return parser


def main() -> None:
    """Measure, print the tables, and write the file."""
    parser = arguments()
    options = parser.parse_args()
    paths = sorted(p for p in options.images.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        parser.error(f"there is no .jpg or .jpeg file in {options.images}")
    makers = {name: make for name, make in CELLS.items() if options.cells in name}
    if not makers:
        parser.error(f"--cells: {options.cells!r} is in none of {'; '.join(CELLS)}")
    capabilities = sm.cuda_capabilities(options.device)
    if not capabilities.transfer:
        print(f"no GPU can be used, so nothing is measured\n{capabilities}", file=sys.stderr)
        sys.exit(NO_GPU)
    images = [path.read_bytes() for path in paths]
    batches = [images[k : k + options.batch] for k in range(0, len(images), options.batch)]
    job = Job(
        batches,
        options.video,
        options.size,
        options.frames,
        options.threads,
        options.copy,
        f"cuda:{options.device}",
    )
    cells, left_out = make_cells(job, makers)
    say(left_out)
    failed = measure(cells, options.rounds, options.seconds, counting=options.counting)
    say(failed)
    left_out |= failed
    results = summary(cells)
    print(tables(results, markdown=options.markdown))
    write_json(document(options, len(images), str(capabilities), results, left_out), options.json)


def say(left_out: Mapping[str, str]) -> None:
    """Print the cells without figures."""
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)


def document(
    options: argparse.Namespace,
    count: int,
    capabilities: str,
    results: Mapping[str, Any],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """Return the figures with the machine and the settings."""
    packages = "av numpy torch torchvision cupy-cuda12x cupy-cuda13x pillow".split()
    dali = "nvidia-dali-cuda120 nvidia-dali-cuda130".split()
    names = "video device threads rounds seconds batch size frames copy".split()
    return {
        "machine": {**machine(*packages, *dali), "gpu": device_name(options.device)},
        "capabilities": capabilities.splitlines(),
        "settings": {"images": count, **{name: getattr(options, name) for name in names}},
        "results": results,
        "left_out": left_out,
    }


def device_name(index: int) -> str | None:
    """Return the name of the GPU, if PyTorch or CuPy reports it."""
    try:
        import torch

        return str(torch.cuda.get_device_name(index))
    except (ImportError, RuntimeError, AssertionError):  # not installed, or built without CUDA
        pass
    try:
        import cupy
    except ImportError:
        return None
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


if __name__ == "__main__":
    main()
