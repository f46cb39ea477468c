"""Run typical training recipes, from files to batches: this library compared with the usual tools.

    python samples/benchmarks/recipes.py [--photos DIR] [--photos-hd DIR] [--audio FILE] [--json FILE]

    photos     the ImageNet recipe: a random box of each JPEG stretched to 224x224 (bicubic, antialiased),
               flipped at random, and normalised: batches (64, 3, 224, 224) float32 and labels int64
    photos_hd  the same with larger JPEGs
    FLAC, MP3  windows of 3 s at random positions of 16 kHz mono: batches (64, 1, 48000) float32
    shards     images and captions from four tar files: the same JPEGs, the shorter side scaled to 224
               (bicubic, antialiased), the centre cropped, and normalised; the files in random order, and a
               shuffle buffer of 1,000 samples

    ms         CPU milliseconds per item, over all threads and processes of the loader, without imports
    items/s    items of the whole run over its seconds, from the start of the loader to its last batch
    x ...      advantage over another loader in the same round, in CPU time and in items per second

Comparability:

- Each figure comes from a fresh process. A round runs all loaders of a recipe; the next round runs in reverse
  order. The output shows medians with minimum and maximum.
- All read the same files from the page cache, in the same order, with equally many workers (threads here and
  in SPDL, processes in PyTorch) and two prefetched batches per worker. "processes" uses as many processes of
  this library instead, each of which makes whole batches.
- The main process takes the batches, and checks their shape and dtype.
- Random boxes and flips have the same distribution, but different numbers.

``--audio`` is any audio file: 30 s of it (repeated) are written as 16 kHz mono FLAC and MP3 to a temporary
folder, as are the shards. A loader whose library is not installed is skipped with a message.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
from figures import (
    add_output_options,
    alternating,
    machine,
    over,
    show,
    spread,
    with_range,
    write_json,
)
from loaders import repeated
from processes import MISSING, main_or_cell, reason_of, run_fresh
from recipe_loaders import LOADERS, RATE, SECONDS, Job

NUM_SHARDS, AUDIO_SECONDS = 4, 30
# The loaders that others are compared with, by recipe.
BASES = {
    "photos": ("torch, Pillow", "torch, torchvision"),
    "photos_hd": ("torch, Pillow", "torch, torchvision"),
    "FLAC": ("torch, torchcodec", "torch, soundfile", "SPDL"),
    "MP3": ("torch, torchcodec", "torch, soundfile", "SPDL"),
    "shards": ("webdataset, Pillow",),
}
PACKAGES = (
    "av numpy simplejpeg spdl-io pillow soundfile torch torchcodec torchvision webdataset".split()
)


# In the fresh process.


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Run one loader once. ``missing`` names a library that is not installed."""
    samples = json.loads(Path(cell["samples"]).read_text(encoding="utf-8"))
    job = Job(samples, cell["batch"], cell["workers"], cell["size"], cell["is_torch"])
    try:
        batches = LOADERS[cell["recipe"]][cell["loader"]](job)
        iterator = None
        begin, cpu = time.perf_counter(), cpu_seconds()
        iterator = iter(batches)
        count = 0
        for data, labels in iterator:
            end = time.perf_counter()
            count += len(labels)
            check_batch(data, len(labels), cell)
    except MISSING as error:
        if not cell["is_trial"]:
            raise
        return {"missing": reason_of(error)}
    # Its workers have ended by then, so their CPU time is counted.
    del iterator, batches
    wait_for_workers()
    if count != cell["count"]:
        raise SystemExit(f"{cell['loader']} gave {count} items, not {cell['count']}")
    return {"seconds": end - begin, "cpu": cpu_seconds() - cpu}


def wait_for_workers() -> None:
    """Wait for this library's workers and their server, if there are any, because their CPU time counts."""
    for process in multiprocessing.active_children():
        with suppress(ValueError):  # already closed by the library
            process.join()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def check_batch(data: Any, count: int, cell: dict[str, Any]) -> None:
    """Raise if a batch differs from what all loaders must return."""
    is_sound = cell["recipe"] in ("FLAC", "MP3")
    shape = (1, SECONDS * RATE) if is_sound else (3, cell["size"], cell["size"])
    if tuple(data.shape) != (count, *shape) or not str(data.dtype).endswith("float32"):
        raise SystemExit(
            f"{cell['loader']} gave {tuple(data.shape)} {data.dtype}, not {(count, *shape)} float32"
        )


# In the process that measures.


def samples_of(options: argparse.Namespace, folder: Path) -> dict[str, list[Any]]:
    """Return the samples for the loaders of each recipe."""
    found: dict[str, list[Any]] = {}
    if options.photos:
        found["photos"] = repeated(options.photos, options.count)
        found["shards"] = write_shards(found["photos"], folder)
    if options.photos_hd:
        found["photos_hd"] = repeated(options.photos_hd, options.count // 4)
    if options.audio:
        starts = np.random.default_rng(0).integers(0, 64 * (AUDIO_SECONDS - SECONDS), options.count)
        for kind, path in write_sounds(options.audio, folder).items():
            # Multiples of 1/64, which are exact.
            found[kind] = [(path, start / 64) for start in starts.tolist()]
    return {name: found[name] for name in options.recipes if name in found}


def write_shards(samples: Sequence[tuple[str, int]], folder: Path) -> list[str]:
    """Write tar files of the images and captions."""
    paths = [str(folder / f"{number}.tar") for number in range(NUM_SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as shard:
            for index in range(number, len(samples), NUM_SHARDS):
                image, label = samples[index]
                for ending, data in (("jpg", Path(image).read_bytes()), ("txt", b"%d" % label)):
                    member = tarfile.TarInfo(f"{index:08}.{ending}")
                    member.size = len(data)
                    shard.addfile(member, BytesIO(data))
    return paths


def write_sounds(source: Path, folder: Path) -> dict[str, str]:
    """Write 16 kHz mono, as in LibriSpeech."""
    import spdl_media as sm
    from spdl_media.testing import make_audio

    whole = sm.to_numpy(sm.load_audio(source, sample_rate=RATE, num_channels=1, sample_fmt="s16"))
    samples = np.resize(whole, (AUDIO_SECONDS * RATE, 1))
    found = {}
    # The block size of the program flac; FFmpeg's default is a quarter of it.
    for kind, codec, extra in (("FLAC", "flac", {"frame_size": "4096"}), ("MP3", "libmp3lame", {})):
        path = folder / f"sound.{kind.lower()}"
        path.write_bytes(make_audio(samples, RATE, codec=codec, format=kind.lower(), options=extra))
        found[kind] = str(path)
    return found


def measure(recipe: str, common: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds of a recipe, alternately forwards and backwards."""
    wanted = [n for n in LOADERS[recipe] if options.peers == "all" or n.startswith("spdl_media")]
    found: dict[str, dict[str, list[float]]] = {}
    for name in wanted:
        result = run_fresh(__file__, {**common, "loader": name, "is_trial": True})
        if "missing" in result:
            print(f"{recipe}: {name} is left out: {result['missing']}", file=sys.stderr)
        else:
            found[name] = {"ms": [], "rate": []}
    for number, names in enumerate(alternating(found, options.rounds), 1):
        print(f"{recipe}: round {number} of {options.rounds}", file=sys.stderr)
        for name in names:
            result = run_fresh(__file__, {**common, "loader": name, "is_trial": False})
            found[name]["ms"].append(1000 * result["cpu"] / common["count"])
            found[name]["rate"].append(common["count"] / result["seconds"])
    bases = [base for base in BASES[recipe] if base in found]
    return {
        name: {
            "cpu_ms": spread(figures["ms"]),
            "items_per_second": spread(figures["rate"]),
            # Inverted, because less CPU time is better.
            "cpu_over": {base: over(found[base]["ms"], figures["ms"]) for base in bases},
            "rate_over": {base: over(figures["rate"], found[base]["rate"]) for base in bases},
        }
        for name, figures in found.items()
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a recipe as text."""
    bases = list(next(iter(results.values()))["cpu_over"])
    head = ["loader", "ms", *(f"x {base}" for base in bases)]
    head += ["items/s", *(f"x {base}" for base in bases)]
    rows = [
        [
            name,
            with_range(row["cpu_ms"], 2),
            *(with_range(row["cpu_over"][base], 2) for base in bases),
            with_range(row["items_per_second"]),
            *(with_range(row["rate_over"][base], 2) for base in bases),
        ]
        for name, row in results.items()
    ]
    return head, rows


def main() -> None:
    """Measure, print the tables, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--photos", type=Path, help="folder of JPEGs")
    parser.add_argument("--photos-hd", type=Path, help="folder of larger JPEGs")
    parser.add_argument("--audio", type=Path, help="an audio file")
    parser.add_argument("--recipes", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    parser.add_argument("--peers", choices=("all", "none"), default="all")
    parser.add_argument("--count", type=int, default=2048, help="items per run; files are repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    add_output_options(parser, chart=False, markdown=True)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            all_samples = samples_of(options, Path(folder))
        except OSError as error:
            parser.error(str(error))
        if not all_samples:
            parser.error("nothing to measure: pass --photos, --photos-hd or --audio")
        for recipe, samples in all_samples.items():
            # In a file, because it may exceed the size of an argument.
            list_of_samples = Path(folder) / f"{recipe}.json"
            list_of_samples.write_text(json.dumps(samples), encoding="utf-8")
            common = {
                "recipe": recipe,
                "samples": str(list_of_samples),
                "count": options.count if recipe == "shards" else len(samples),
                "batch": options.batch,
                "workers": options.workers,
                "size": options.size,
                "is_torch": find_spec("torch") is not None,
            }
            results[recipe] = measure(recipe, common, options)
            print(f"\n{recipe}\n")
            show(*table(results[recipe]), markdown=options.markdown)
    settings = {name: getattr(options, name) for name in "count rounds workers batch size".split()}
    document = {"machine": machine(*PACKAGES), "settings": settings, "results": results}
    write_json(document, options.json)


if __name__ == "__main__":
    main_or_cell(main, run_cell)
