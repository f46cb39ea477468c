"""Train a small classifier on pictures, stop in the middle of an epoch, and go on.

Command::

    python samples/train_images.py

It makes 240 JPEGs of reddish, greenish and bluish noise in a temporary folder, one of them cut short,
and learns to tell their colour with softmax regression in NumPy.

Output (the milliseconds differ)::

    epoch 0: 239 pictures, 87% right, failed: 020.jpg, 74 ms
    epoch 1: 239 pictures, 100% right, failed: 020.jpg, 71 ms
    epoch 2: 239 pictures, 100% right, failed: 020.jpg, 70 ms
    epoch 2: stopped after 3 batches, resumed with 5
    the weights are the same

What it shows: the order of an epoch depends on its seed and number alone, the crops on those and the
place of the picture in the epoch. So the training that was stopped and resumed, by a loader that knows
nothing but the state, ends with the very weights of one that was not; the program checks that it does.

Exit status: 0, or 1 if the weights differ.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import spdl_media as sm
from spdl_media.source import DistributedRandomSampler, LocalDirectory, MapIterator
from spdl_media.testing import make_image

COLORS = ("red", "green", "blue")
NUM_PICTURES, WIDTH, HEIGHT = 240, 96, 64
BATCH_SIZE, SIDE = 32, 16
NUM_EPOCHS, LEARNING_RATE = 3, 0.5


def make_pictures(folder: Path) -> None:
    """Write pictures into folders that are named after their colour."""
    rng = np.random.default_rng(0)
    for index in range(NUM_PICTURES):
        color = index % len(COLORS)
        picture = rng.integers(0, 200, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        picture[:, :, color] += 30
        path = folder / COLORS[color] / f"{index:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        data = make_image(picture, codec="mjpeg")
        path.write_bytes(data[: len(data) // 2] if index == 20 else data)


def load(path: Path, rng: np.random.Generator) -> tuple[sm.CPUBuffer, int]:
    """Decode a part of a picture that is chosen by chance, mirrored by chance; and its label."""
    crop = sm.RandomResizedCrop(scale=(0.3, 1.0))
    image = sm.load_image(
        path,
        width=SIDE,
        height=SIDE,
        scale_mode=None,
        crops=crop,
        flips=0.5,
        rng=rng,
        dtype="float32",
        mean=0.5,
    )
    return image, COLORS.index(path.parent.name)


def make_loader(folder: Path, failed: set[str]) -> sm.DataLoader:
    """The same loader each time: all it knows of a training is what its state says."""
    files = LocalDirectory(folder, "**/*.jpg")
    return sm.DataLoader(
        MapIterator(files, DistributedRandomSampler(len(files), seed=1)),
        preprocessor=load,
        batch_size=BATCH_SIZE,
        to="numpy",
        output_order="input",
        num_threads=4,
        on_failure=lambda _, path: failed.add(path.name),
        seed=1,
    )


class Classifier:
    """Softmax regression over the pixels."""

    def __init__(self) -> None:
        self.weights = np.zeros((SIDE * SIDE * 3 + 1, len(COLORS)))
        self.num_seen = self.num_right = 0

    def train(self, batches: Iterable[Any]) -> int:
        """Take a step for each batch; gives their number."""
        count = 0
        for images, labels in batches:
            self._step(images, labels)
            count += 1
        return count

    def _step(self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> None:
        pixels = images.reshape(len(images), -1)
        inputs = np.hstack([pixels, np.ones((len(pixels), 1))])
        scores = inputs @ self.weights
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        self.num_seen += len(labels)
        self.num_right += int((scores.argmax(axis=1) == labels).sum())
        errors = chances - np.eye(len(COLORS))[labels]
        self.weights -= LEARNING_RATE / len(labels) * inputs.T @ errors

    def report(self) -> str:
        """How many pictures it saw since the last report, and which part of them it told right."""
        text = f"{self.num_seen} pictures, {self.num_right / self.num_seen:.0%} right"
        self.num_seen = self.num_right = 0
        return text


def train(folder: Path) -> Classifier:
    """Three epochs without a stop."""
    failed: set[str] = set()
    loader, model = make_loader(folder, failed), Classifier()
    for epoch in range(NUM_EPOCHS):
        start = time.perf_counter()
        model.train(loader)
        milliseconds = 1000 * (time.perf_counter() - start)
        print(
            f"epoch {epoch}: {model.report()}, failed: {', '.join(failed)}, {milliseconds:.0f} ms"
        )
        failed.clear()
    return model


def train_with_a_stop(folder: Path) -> Classifier:
    """Three epochs, of which the last one is stopped; another loader goes on from a file."""
    loader, model = make_loader(folder, set()), Classifier()
    for _ in range(NUM_EPOCHS - 1):
        model.train(loader)
    num_before = model.train(itertools.islice(loader, 3))
    saved = folder / "state.json"
    saved.write_text(json.dumps(loader.state_dict()), encoding="utf-8")

    resumed = make_loader(folder, set())
    resumed.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
    epoch, num_after = resumed.epoch, model.train(resumed)
    print(f"epoch {epoch}: stopped after {num_before} batches, resumed with {num_after}")
    return model


def main() -> int:
    """Train twice, once with a stop, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_pictures(folder)
        whole, stopped = train(folder), train_with_a_stop(folder)
    if not np.array_equal(whole.weights, stopped.weights):
        print("the weights differ", file=sys.stderr)
        return 1
    print("the weights are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
