"""Read arrays from bytes in memory: this library compared with NumPy, the standard library and SPDL.

It prints three tables. "calls": time of one call in one thread; the compared ways alternate, so that a change
of the machine's speed favours none. "threads": the work of two threads of this library over that of one, for
8 MiB arrays that are copied, checked, inflated or converted; a round counts only if hashlib did twice as much
in two threads before and after it. "workers": items per second of arrays in PyTorch, npy and npz files,
through a pipeline with 1 to N threads or processes.

    python samples/benchmarks/data_formats.py [--json FILE] [--chart FILE.png] [--workers 1 2 4 8]

Ways whose library is not installed are skipped with a message. An item is an image of 3x640x480 with its
labels of 640x480, uint8: noise, as in SPDL's own benchmark, and for some rows a photograph with labels in
smooth regions. Figures are medians of the rounds.

Expected: a view of an npy file in less than a microsecond, more than 50 times as fast as NumPy's copy; with
isal installed, npz members at four times SPDL's rate if stored, and faster than SPDL if deflated; tar members
at four to seven times the rate of tarfile.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import os
import statistics
import struct
import sys
import tarfile
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from clocks import two_over_one
from figures import add_output_options, alternating, machine, make_figure, write_json

import spdl_media as sm
from spdl_media.pipeline import FailureRecord, PipelineBuilder

Array = np.ndarray[Any, Any]
Call = Callable[[], object]
Table = dict[str, dict[str, float]]

OURS, PLAIN, SPDL = "spdl_media", "NumPy", "SPDL"
PHOTO = Path(__file__).resolve().parent.parent / "media" / "technician.jpg"
NUM_MEMBERS, MEMBER_SIZE = 1000, 10_000


# Files, in memory.


def to_npy(array: Array) -> bytes:
    """Write one array."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def to_npz(arrays: dict[str, Array], *, compressed: bool = False) -> bytes:
    """Write several arrays."""
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def to_torch(arrays: dict[str, Array]) -> bytes:
    """Write several arrays as PyTorch does."""
    import torch

    file = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    return file.getvalue()


def to_wav(code: int, bits: int, data: bytes) -> bytes:
    """Write two channels of samples."""
    align = 2 * bits // 8
    head = struct.pack("<HHIIHH", code, 2, 48000, 48000 * align, align, bits)
    body = (
        b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def to_tar() -> bytes:
    """Write many small files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(NUM_MEMBERS):
            info = tarfile.TarInfo(f"{number:06}.jpg")
            info.size = MEMBER_SIZE
            archive.addfile(info, io.BytesIO(os.urandom(MEMBER_SIZE)))
    return file.getvalue()


def noise() -> dict[str, Array]:
    """Return an incompressible image with labels."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (3, 640, 480), np.uint8)
    return {"img": picture, "lbl": rng.integers(0, 256, (640, 480), np.uint8)}


def photo() -> dict[str, Array]:
    """Return a photograph, with its regions of similar brightness as labels."""
    picture = np.asarray(sm.load_image(PHOTO, width=480, height=640))
    labels = (picture.astype(np.int32).sum(axis=2) // 40).astype(np.uint8)
    return {"img": np.ascontiguousarray(picture.transpose(2, 0, 1)), "lbl": labels}


# Ways to load an item. Processes import them by name.


def load_torch(item: bytes) -> list[Array]:
    """Load PyTorch's file format."""
    import torch

    return [tensor.numpy() for tensor in torch.load(io.BytesIO(item)).values()]


def load_npy(items: tuple[bytes, bytes]) -> list[Array]:
    """Use NumPy."""
    return [np.load(io.BytesIO(item), allow_pickle=False) for item in items]


def load_npy_ours(items: tuple[bytes, bytes]) -> list[Array]:
    """Use this library."""
    return [sm.load_npy(item) for item in items]


def load_npy_spdl(items: tuple[bytes, bytes]) -> list[Array]:
    """Use SPDL."""
    import spdl.io

    return [spdl.io.load_npy(item) for item in items]


def load_npz(item: bytes) -> list[Array]:
    """Use NumPy."""
    return list(np.load(io.BytesIO(item)).values())


def load_npz_ours(item: bytes) -> list[Array]:
    """Use this library."""
    return list(sm.load_npz(item).values())


def load_npz_spdl(item: bytes) -> list[Array]:
    """Use SPDL."""
    import spdl.io

    return list(spdl.io.load_npz(item).values())


def load_wave(item: bytes) -> Array:
    """Use the ``wave`` module."""
    with wave.open(io.BytesIO(item)) as reader:
        frames = reader.readframes(reader.getnframes())
        return np.frombuffer(frames, "<i2").reshape(-1, reader.getnchannels())


def count_tarfile(item: bytes | str) -> int:
    """Use the ``tarfile`` module."""
    count = 0
    with (
        tarfile.open(item) if isinstance(item, str) else tarfile.open(fileobj=io.BytesIO(item))
    ) as archive:
        for member in archive:
            if file := archive.extractfile(member):
                count += len(file.read()) == MEMBER_SIZE
    return count


def count_members(iterate: Callable[[Any], Any], item: bytes | str) -> int:
    """Use the iterator of either library."""
    if isinstance(item, str) and iterate is not sm.iter_tarfile:
        with open(item, "rb") as file:
            return sum(len(data) == MEMBER_SIZE for _, data in iterate(file))
    return sum(len(data) == MEMBER_SIZE for _, data in iterate(item))


# Tables.


def calls(folder: str, peers: set[str]) -> dict[str, dict[str, Call]]:
    """Return the measured calls in one thread, by row and way."""
    rows: dict[str, dict[str, Call]] = {}

    def add(row: str, item: Any, **ways: Callable[[Any], object]) -> None:
        rows[row] = {
            {"ours": OURS, "plain": PLAIN, "spdl": SPDL}[way]: partial(load, item)
            for way, load in ways.items()
            if way != "spdl" or SPDL in peers
        }

    def spdl_io(name: str, *args: Any, **kwargs: Any) -> object:
        import spdl.io

        return getattr(spdl.io, name)(*args, **kwargs)

    arrays, real = noise(), photo()
    picture = to_npy(arrays["img"])
    npy: dict[str, Any] = {
        "plain": lambda x: np.load(io.BytesIO(x), allow_pickle=False),
        "spdl": partial(spdl_io, "load_npy"),
    }
    add("npy, view", picture, ours=sm.load_npy, **npy)
    npy["spdl"] = lambda x: spdl_io("load_npy", x, copy=True)
    add("npy, copy", picture, ours=lambda x: sm.load_npy(x, copy=True), **npy)
    npz: dict[str, Any] = {"ours": load_npz_ours, "plain": load_npz, "spdl": load_npz_spdl}
    add("npz stored", to_npz(arrays), **npz)
    add("npz deflated, noise", to_npz(arrays, compressed=True), **npz)
    add("npz deflated, photo", to_npz(real, compressed=True), **npz)
    add("npz deflated, labels", to_npz({"lbl": real["lbl"]}, compressed=True), **npz)
    sound = np.random.default_rng(0).bytes(48000 * 12)
    spdl_wav = lambda x: np.asarray(spdl_io("load_wav", x))  # noqa: E731
    add("wav, 16 bits", to_wav(1, 16, sound), ours=sm.load_wav, plain=load_wave, spdl=spdl_wav)
    add("wav, 24 bits", to_wav(1, 24, sound), ours=sm.load_wav)
    add("wav, A-law", to_wav(6, 8, sound), ours=sm.load_wav)
    archive, path = to_tar(), str(Path(folder) / "members.tar")
    Path(path).write_bytes(archive)
    tar: dict[str, Any] = {
        "ours": partial(count_members, sm.iter_tarfile),
        "plain": count_tarfile,
        "spdl": lambda x: count_members(partial(spdl_io, "iter_tarfile"), x),
    }
    add(f"tar, {NUM_MEMBERS} members", archive, **tar)
    add(f"tar file, {NUM_MEMBERS} members", path, **tar)
    return rows


def microseconds(call: Call, seconds: float) -> float:
    """Return the time of one call, averaged over as many as fit in the time."""
    count, each = 0, 1
    begin = now = time.perf_counter()
    while now - begin < seconds:
        for _ in range(each):
            call()
        count, now = count + each, time.perf_counter()
        each = max(each, count // 4)  # reads the clock rarely
    return (now - begin) / count * 1e6


def measure_calls(rows: dict[str, dict[str, Call]], rounds: int, seconds: float) -> Table:
    """Return medians, and medians of the ratios of each round."""
    table: Table = {}
    for row, ways in rows.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for order in alternating(ways, rounds):
            for way in order:
                times[way].append(microseconds(ways[way], seconds))
        table[row] = {way: statistics.median(values) for way, values in times.items()}
        for way in set(ways) - {OURS}:
            ratios = [other / own for other, own in zip(times[way], times[OURS], strict=True)]
            table[row][f"{way} / {OURS}"] = statistics.median(ratios)
    return table


def touching(size: int) -> dict[str, Call]:
    """Return the calls of this library that process all data, on data large enough for thread switches."""
    random = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    picture = np.resize(photo()["img"], random.shape)
    sound = bytes(size // 6 * 6)
    npy, wav_24, a_law = to_npy(random), to_wav(1, 24, sound), to_wav(6, 8, sound)
    stored = to_npz({"a": random})
    noisy, real = (to_npz({"a": array}, compressed=True) for array in (random, picture))
    return {
        "npy, copy": lambda: sm.load_npy(npy, copy=True),
        "npz stored (CRC)": lambda: load_npz_ours(stored),
        "npz deflated, noise": lambda: load_npz_ours(noisy),
        "npz deflated, photo": lambda: load_npz_ours(real),
        "wav, 24 bits": lambda: sm.load_wav(wav_24),
        "wav, A-law": lambda: sm.load_wav(a_law),
    }


def measure_threads(size: int, rounds: int, seconds: float) -> Table:
    """Return the work of two threads over that of one."""
    table: Table = {}
    for row, call in touching(size).items():
        figures, counted = two_over_one(call, rounds, seconds)
        table[row] = {"two / one": figures["ratio"]["median"], "rounds that counted": counted}
    return table


def workers(peers: set[str]) -> dict[str, tuple[Callable[[Any], list[Array]], Any]]:
    """Return the calls for threads and processes."""
    arrays = noise()
    npy = to_npy(arrays["img"]), to_npy(arrays["lbl"])
    stored, deflated = to_npz(arrays), to_npz(arrays, compressed=True)
    ways: dict[str, tuple[Callable[[Any], list[Array]], Any]] = {}
    if "PyTorch" in peers:
        ways["torch"] = load_torch, to_torch(arrays)
    for name, item, plain, ours, spdl in (
        ("npy", npy, load_npy, load_npy_ours, load_npy_spdl),
        ("npz", stored, load_npz, load_npz_ours, load_npz_spdl),
        ("npz deflated", deflated, load_npz, load_npz_ours, load_npz_spdl),
    ):
        ways[f"{name}, {PLAIN}"] = plain, item
        if SPDL in peers:
            ways[f"{name}, {SPDL}"] = spdl, item
        ways[f"{name}, {OURS}"] = ours, item
    return ways


def items_a_second(
    executor: Executor, load: Callable[[Any], object], item: Any, repeat: int, num_workers: int
) -> float:
    """Return the rate of a pipeline of one stage."""
    executor.submit(load, item).result()  # starts the workers before the measurement
    pipeline = (
        PipelineBuilder()
        .add_source(itertools.repeat(item, repeat))
        .pipe(load, concurrency=num_workers, executor=executor)
        .add_sink(2)
        .build(num_threads=1)
    )
    begin = time.perf_counter()
    with pipeline.auto_stop():
        count = sum(1 for _ in pipeline)
    seconds = time.perf_counter() - begin
    if count + num_unparsed(pipeline.failures) < repeat:
        raise RuntimeError(f"{count} of {repeat} items came out of the pipeline")
    return repeat / seconds


def num_unparsed(failures: Sequence[FailureRecord]) -> int:
    """Return how many items NumPy's reader failed to parse: CPython's parser fails in threads before 3.11.8.

    See https://github.com/python/cpython/issues/106905.
    """
    known = "AST constructor recursion depth mismatch"
    errors = [failure.exception for failure in failures]
    return sum(isinstance(error, SystemError) and known in str(error) for error in errors)


def measure_workers(peers: set[str], counts: Sequence[int], repeat: int) -> Table:
    """Return items per second, by way, mode and number of workers."""
    table: Table = {}
    modes = {"threads": ThreadPoolExecutor, "processes": ProcessPoolExecutor}
    for name, (load, item) in workers(peers).items():
        table[name] = {}
        for mode, kind in modes.items():
            for count in counts:
                with kind(count) as executor:
                    rate = items_a_second(executor, load, item, repeat, count)
                table[name][f"{count} {mode}"] = rate
    return table


# Output.


def as_text(title: str, table: Table) -> str:
    """Format a table as lines."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    width = max(12, *(len(column) + 2 for column in columns))
    lines = [f"{title:26}" + "".join(f"{column:>{width}}" for column in columns)]
    for name, row in table.items():
        cells = [f"{row[c]:>{width}.4g}" if c in row else f"{'-':>{width}}" for c in columns]
        lines.append(f"{name:26}" + "".join(cells))
    return "\n".join(lines)


def draw(table: Table, counts: Sequence[int], path: str) -> None:
    """Plot items per second over workers, threads next to processes."""
    figure = make_figure(10, 5)
    if figure is None:
        return
    for axes, mode in zip(
        figure.subplots(1, 2, sharey=True), ("threads", "processes"), strict=True
    ):
        for name, row in table.items():
            rates = [row[f"{count} {mode}"] for count in counts]
            axes.plot(counts, rates, marker="o", label=name)
        axes.set(title=mode, xlabel="workers", xscale="log", yscale="log")
        axes.set_xticks(counts, labels=map(str, counts))
        axes.set_xticks([], minor=True)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("items a second")
    figure.axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def find_peers(wanted: Sequence[str]) -> set[str]:
    """Return the installed libraries, and print the others to stderr."""
    modules = {SPDL: "spdl", "PyTorch": "torch"}
    found = {name for name in wanted if importlib.util.find_spec(modules[name])}
    for name in sorted(set(wanted) - found):
        print(f"{name} is left out: it is not installed", file=sys.stderr)
    return found


def main() -> None:
    """Measure, print the tables, and write the JSON and the chart."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="*", choices=[SPDL, "PyTorch"], default=[SPDL, "PyTorch"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--bytes", type=int, default=1 << 23, help="size of the arrays for two threads"
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="time per way and round")
    parser.add_argument(
        "--repeat", type=int, default=1000, help="items through the workers; 0: none"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    add_output_options(parser, chart=True, markdown=False)
    options = parser.parse_args()
    peers = find_peers(options.peers)
    document: dict[str, Any] = {"machine": machine("numpy", "isal", "spdl-io", "torch")}
    with tempfile.TemporaryDirectory() as folder:
        rows = calls(folder, peers)
        document["calls"] = measure_calls(rows, options.rounds, options.seconds)
        print(as_text("microseconds a call", document["calls"]), flush=True)
        document["threads"] = measure_threads(options.bytes, options.rounds, 2 * options.seconds)
        print(as_text("two threads over one", document["threads"]), flush=True)
    if options.repeat:
        document["workers"] = measure_workers(peers, options.workers, options.repeat)
        print(as_text("items a second", document["workers"]))
    if options.chart and options.repeat:
        draw(document["workers"], options.workers, options.chart)
    write_json(document, options.json)


if __name__ == "__main__":
    main()
