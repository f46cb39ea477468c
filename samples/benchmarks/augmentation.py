"""Augment after decoding, in threads, in processes and in the training loop, with varying thread counts.

    python samples/benchmarks/augmentation.py --images DIR [--json FILE]

    way        nothing          only a random crop of each JPEG to 224x224, with a random flip
               Albumentations   the same, then colours and a rotation of each image in the preprocessor
               torchvision      the same with transforms.v2
               Kornia           the same on float batches in the loop that consumes them
    where      the loader's threads, its processes, or the loop
    own        threads of OpenCV and PyTorch: the default, or 1 (in the loader's processes PyTorch has 1)
    ms         CPU milliseconds per image over all threads; unknown for processes, which include their imports
    images/s   like ms, measured from the first batch on, so that start-up and imports are excluded
    x default  ratio to the same with the default threads, in the same round

Each figure comes from a fresh process. One round runs all of them; the next round runs in reverse order. The
output shows medians with minimum and maximum. A library that is not installed is skipped.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from importlib.util import find_spec
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
from processes import main_or_cell, run_fresh

import spdl_media as sm
from spdl_media.pipeline import ProcessPoolExecutorConfig

SIZE = 224
CUT = sm.ImageRecipe(SIZE, random_crop=True, flip=0.5, layout="NHWC")
PLANES = sm.ImageRecipe(SIZE, random_crop=True, flip=0.5)
FLOATS = sm.ImageRecipe(SIZE, random_crop=True, flip=0.5, dtype="float32")
this_thread = threading.local()
WAYS = [
    ("nothing", "threads"),
    ("Albumentations", "threads"),
    ("Albumentations", "processes"),
    ("torchvision", "threads"),
    ("torchvision", "processes"),
    ("Kornia", "loop"),
]
FIGURES = {"ms": ("ms", 1), "images/s": ("rate", 0)}
PACKAGES = {"Albumentations": "albumentations", "torchvision": "torchvision", "Kornia": "kornia"}


def albumentations_of(path: str, rng: np.random.Generator) -> Any:
    """Augment one image with the thread's own augmentation."""
    import albumentations as A  # noqa: N812  # as its users call it

    if not hasattr(this_thread, "augment"):
        this_thread.augment = A.Compose([A.ColorJitter(p=1.0), A.Affine(rotate=(-10, 10), p=1.0)])
    this_thread.augment.set_random_seed(int(rng.integers(2**31)))
    return this_thread.augment(image=np.array(CUT(path, rng)))["image"]


def torchvision_of(path: str, rng: np.random.Generator) -> Any:
    """Augment one image as a tensor."""
    from torchvision.transforms import v2

    if not hasattr(this_thread, "augment"):
        jitter = v2.ColorJitter(0.2, 0.2, 0.2, 0.1)
        this_thread.augment = v2.Compose([jitter, v2.RandomRotation(10)])
    return this_thread.augment(sm.to_torch(PLANES(path, rng)))


PREPROCESSORS: dict[str, Any] = {
    "nothing": CUT,
    "Albumentations": albumentations_of,
    "torchvision": torchvision_of,
    "Kornia": FLOATS,
}


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Load all images once, in the fresh process."""
    in_processes, augment = cell["where"] == "processes", None
    setup = limit_threads if cell["own"] == "1" else None
    if setup is not None:
        setup()
    if cell["way"] == "Kornia":
        import kornia.augmentation as K  # noqa: N812  # as its users call it

        augment = K.AugmentationSequential(
            K.ColorJitter(0.2, 0.2, 0.2, 0.1), K.RandomRotation(10.0), data_keys=["input"]
        )
    loader = sm.DataLoader(
        [path for path, _ in repeated(Path(cell["images"]), cell["count"])],
        preprocessor=PREPROCESSORS[cell["way"]],
        batch_size=cell["batch"],
        num_threads=cell["workers"],
        to="torch" if cell["way"] in ("torchvision", "Kornia") else "numpy",
        executor=ProcessPoolExecutorConfig(cell["workers"], initializer=setup)
        if in_processes
        else None,
    )
    begin = cpu = 0.0
    count = 0
    for batch in loader:
        images = batch if augment is None else augment(batch)
        if begin:
            count += len(images)
        else:
            begin, cpu = time.perf_counter(), time.process_time()
    return {
        "rate": count / (time.perf_counter() - begin),
        "ms": None if in_processes else 1000 * (time.process_time() - cpu) / count,
    }


def limit_threads() -> None:
    """Set OpenCV and PyTorch to one thread, if they are installed."""
    if find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)


def main() -> None:
    """Measure, print the table, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEGs")
    parser.add_argument(
        "--ways", nargs="+", choices=list(PREPROCESSORS), default=list(PREPROCESSORS)
    )
    parser.add_argument("--count", type=int, default=512, help="images per run; files are repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    add_output_options(parser, chart=False, markdown=True)
    options = parser.parse_args()
    try:
        repeated(options.images, 1)
    except OSError as error:
        parser.error(str(error))
    common = {"images": str(options.images)}
    common |= {name: getattr(options, name) for name in ("count", "workers", "batch")}
    cells = [
        {**common, "way": way, "where": where, "own": own}
        for way, where in WAYS
        if way in options.ways and (way == "nothing" or find_spec(PACKAGES[way]))
        for own in ("default", "1")
    ]
    found: list[list[dict[str, Any]]] = [[] for _ in cells]
    for order in alternating(range(len(cells)), options.rounds):
        print(f"round {len(found[0]) + 1} of {options.rounds}", file=sys.stderr)
        for index in order:
            found[index].append(run_fresh(__file__, cells[index]))
    head, rows, results = ["way", "where", "own"], [], []
    for name in FIGURES:
        head += [name, "x default"]
    for index, cell in enumerate(cells):
        figures = {}
        row = [cell["way"], cell["where"], cell["own"]]
        for key, digits in FIGURES.values():
            values = [each[key] for each in found[index]]
            if None in values:
                row += ["", ""]
                continue
            by_default = [each[key] for each in found[index - index % 2]]
            figures[key], ratio = spread(values), over(values, by_default)
            row += [with_range(figures[key], digits), with_range(ratio, 2)]
        rows.append(row)
        results.append({**cell, **figures})
    show(head, rows, markdown=options.markdown)
    names = "albumentations opencv-python-headless torch torchvision kornia".split()
    write_json({"machine": machine(*names), "results": results}, options.json)


if __name__ == "__main__":
    main_or_cell(main, run_cell)
