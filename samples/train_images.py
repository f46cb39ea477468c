"""Train a small classifier on a folder of classes, stop in the middle of an epoch, and resume.

Command::

    python samples/train_images.py

It makes 240 JPEGs of reddish, greenish and bluish noise in a temporary folder, one of them truncated, and 60
more for validation. It trains softmax regression in NumPy to classify their colour. For a PyTorch model, use
the loaders with ``to="torch"``.

Output (the milliseconds differ)::

    epoch 0: 240 images, 1 replaced, 100% right of 60, 96 ms
    epoch 1: 240 images, 1 replaced, 100% right of 60, 84 ms
    epoch 2: 240 images, 1 replaced, 100% right of 60, 84 ms
    epoch 2: stopped after 3 batches, resumed with 5
    the weights are the same

The order of an epoch depends only on the seed and the number of the epoch; the crops also depend on the
image's position in the epoch. So a training that is stopped, and resumed by a new loader from the saved
state, ends with exactly the weights of an uninterrupted training. The program checks this.

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
from made_media import COLORS, cut_short, make_photos

import spdl_media as sm

SIDE, NUM_EPOCHS, LEARNING_RATE = 16, 3, 0.5
VALUES: dict[str, Any] = {"dtype": "float32", "mean": sm.IMAGENET_MEAN, "std": sm.IMAGENET_STD}


def train_loader(folder: Path) -> sm.DataLoader:
    """Make the training loader. Only its state depends on earlier training."""
    return sm.DataLoader(
        sm.ImageFolder(folder / "train", shuffle=True, seed=1),
        preprocessor=sm.ImageRecipe(SIDE, random_crop=True, flip=0.5, **VALUES),
        batch_size=32,
        to="numpy",
        output_order="input",
        on_error="replace",
        seed=1,
    )


def validation_loader(folder: Path) -> sm.DataLoader:
    """Make a loader of the centre of each validation image."""
    return sm.DataLoader(
        sm.ImageFolder(folder / "validation"),
        preprocessor=sm.ImageRecipe(SIDE, **VALUES),
        batch_size=32,
        to="numpy",
    )


class Classifier:
    """Softmax regression over the pixels."""

    def __init__(self) -> None:
        self.weights = np.zeros((3 * SIDE * SIDE + 1, len(COLORS)))

    def scores(self, inputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return a score for each image and class."""
        scores: npt.NDArray[np.float64] = inputs @ self.weights
        return scores

    def train(self, batches: Iterable[Any]) -> int:
        """Take a step for each batch. Return the number of batches."""
        count = 0
        for images, labels in batches:
            inputs = with_ones(images)
            scores = self.scores(inputs)
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            errors = chances / chances.sum(axis=1, keepdims=True) - np.eye(len(COLORS))[labels]
            self.weights -= LEARNING_RATE / len(labels) * inputs.T @ errors
            count += 1
        return count

    def right(self, batches: Iterable[Any]) -> float:
        """Return the share of correctly classified images."""
        found = [self.scores(with_ones(images)).argmax(1) == labels for images, labels in batches]
        return float(np.concatenate(found).mean())


def with_ones(images: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Flatten each image to a row, and append a 1 for the bias."""
    return np.hstack([images.reshape(len(images), -1), np.ones((len(images), 1))])


def train(folder: Path) -> Classifier:
    """Train three epochs without a stop."""
    loader, validation, model = train_loader(folder), validation_loader(folder), Classifier()
    for epoch in range(NUM_EPOCHS):
        start = time.perf_counter()
        model.train(loader)
        milliseconds = 1000 * (time.perf_counter() - start)
        right = model.right(validation)
        print(
            f"epoch {epoch}: {len(loader.src)} images, {sum(loader.failure_counts.values())} replaced, "
            f"{right:.0%} right of {len(validation.src)}, {milliseconds:.0f} ms"
        )
    return model


def train_with_a_stop(folder: Path) -> Classifier:
    """Train three epochs, stop in the last one, and resume with a new loader and a saved state."""
    loader, model = train_loader(folder), Classifier()
    for _ in range(NUM_EPOCHS - 1):
        model.train(loader)
    num_before = model.train(itertools.islice(loader, 3))
    saved = folder / "state.json"
    saved.write_text(json.dumps(loader.state_dict()), encoding="utf-8")

    resumed = train_loader(folder)
    resumed.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
    epoch, num_after = resumed.epoch, model.train(resumed)
    print(f"epoch {epoch}: stopped after {num_before} batches, resumed with {num_after}")
    return model


def main() -> int:
    """Train twice, once with a stop, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cut_short(make_photos(folder / "train", 240)[20])
        make_photos(folder / "validation", 60)
        whole, stopped = train(folder), train_with_a_stop(folder)
    if not np.array_equal(whole.weights, stopped.weights):
        print("the weights differ", file=sys.stderr)
        return 1
    print("the weights are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
