"""End runs early: breaks, two loaders at once, exceptions, Ctrl-C, and an exit in the middle of an epoch.

Command::

    python samples/interrupted.py

It makes 40 JPEGs in a temporary folder, one of them truncated, and loads them several times.

Output::

    WARNING: first failure of stage 'ImageRecipe': DecodeError: blue/003.jpg
    WARNING: failures of this epoch: 1 of 40 in 'ImageRecipe'
    39 images, and the threads have ended: True
    left after 2 batches, and the threads have ended: True
    two loaders at once: 8 and 8 images
    the loop failed with 'loss is nan', and the threads have ended: True
    Ctrl-C after 16 images, and 23 after the resume, each once: True
    the program exits while a loader is running

Ctrl-C raises ``KeyboardInterrupt`` in the loop, so you can save the loader's state there. Nothing has to be
closed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_media import cut_short, make_photos

import spdl_media as sm

RECIPE = sm.ImageRecipe(16)


def loader(paths: list[str]) -> sm.DataLoader:
    """Make a loader of batches of eight images with their paths."""
    samples = [(path, path) for path in paths]
    return sm.DataLoader(
        samples, preprocessor=RECIPE, batch_size=8, output_order="input", to="numpy"
    )


def have_ended() -> bool:
    """Return whether only the main thread is running, as at the start."""
    return threading.active_count() == 1


def train(batches: Any, done: list[str], *, nan_at: int = -1, ctrl_c_at: int = -1) -> None:
    """Simulate a training that fails or is interrupted after some batches."""
    for number, (_, paths) in enumerate(batches, 1):
        done += paths
        if number == nan_at:
            raise FloatingPointError("loss is nan")
        if number == ctrl_c_at:
            signal.raise_signal(signal.SIGINT)


def main() -> Iterator[Any]:
    """Run the program; see the module. Return an unfinished iterator."""
    # Failures are logged with their inputs.
    logging.basicConfig(format="%(levelname)s: %(message).63s", stream=sys.stdout)
    paths = [str(path) for path in make_photos(Path(), 40)]
    cut_short(Path(paths[3]))

    done: list[str] = []
    train(loader(paths), done)
    print(f"{len(done)} images, and the threads have ended: {have_ended()}")
    logging.disable()

    train(itertools.islice(loader(paths), 2), [])
    print(f"left after 2 batches, and the threads have ended: {have_ended()}")

    for (one, _), (other, _) in zip(loader(paths[8:16]), loader(paths[16:24]), strict=True):
        print(f"two loaders at once: {len(one)} and {len(other)} images")

    try:
        train(loader(paths), [], nan_at=2)
    except FloatingPointError as error:
        message = str(error)
    print(f"the loop failed with {message!r}, and the threads have ended: {have_ended()}")

    batches = loader(paths)
    before: list[str] = []
    try:
        train(batches, before, ctrl_c_at=2)
    except KeyboardInterrupt:
        state = batches.state_dict()
    after: list[str] = []
    resumed = loader(paths)
    resumed.load_state_dict(state)
    train(resumed, after)
    once = before + after == done
    print(
        f"Ctrl-C after {len(before)} images, and {len(after)} after the resume, each once: {once}"
    )

    print("the program exits while a loader is running")
    at_work = iter(loader(paths))
    next(at_work)
    return at_work


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        at_work = main()
