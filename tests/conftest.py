"""Fixtures of all tests: real media if available, seeded random numbers, clips that are made once."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import effort
import hypothesis
import left_behind
import numpy as np
import pytest
import real_cuda

from spdl_media.testing import index_planes, make_video

# The AV1 encoder writes to stderr, not to FFmpeg's log, unless this is set before its first use.
os.environ.setdefault("SVT_LOG", "1")
# JAX allocates three quarters of a device's memory at its first use, unless this is set.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# NumPy starts a thread for each core otherwise, in each of the hundreds of processes of the tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

CHECKOUT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="also run the tests marked `long`, and four times as many examples of each property",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set options before test modules are imported, such as the effort of property tests."""
    # A shell ignores SIGINT for background jobs, and child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    effort.LONG = config.getoption("--long")
    # No deadline, because busy machines are slow at times; pytest's timeout ends tests that hang.
    settings = hypothesis.settings(
        deadline=None, max_examples=effort.examples(100), print_blob=True
    )
    if os.environ.get("CI"):
        settings = hypothesis.settings(settings, derandomize=True, database=None)
    hypothesis.settings.register_profile("spdl_media", settings)
    hypothesis.settings.load_profile("spdl_media")
    if not hasattr(config, "workerinput"):
        # Tests start hundreds of processes. With PYTHONDONTWRITEBYTECODE, each of them compiles the package.
        compileall.compile_dir(CHECKOUT / "spdl_media", quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while tests are collected: nearly all objects stay, and it takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use one worker more than cores, because tests of processes, servers and timeouts often wait."""
    # Tests on a GPU run one at a time, and each worker would start CUDA and import its packages.
    if config.getoption("markexpr") == "cuda":
        return 0
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else 3


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Run tests on a real GPU one at a time, also those of other workers: some look at all of its memory."""
    # Around the plugin of timeouts, which does not count the time until its turn.
    if item.get_closest_marker("cuda") is None or real_cuda.why_not():
        return (yield)
    with real_cuda.turn():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Exclude all objects from the collections of pytest and CPython at the end, which take seconds."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip long tests without ``--long``, and ``@pytest.mark.cuda("torch")`` without a GPU."""
    if not effort.LONG and item.get_closest_marker("long"):
        pytest.skip("a long test; --long runs it")
    for mark in item.iter_markers("cuda"):
        real_cuda.check(*mark.args)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Exclude objects that exist before a module's tests from garbage collections.

    These are mostly torch, DALI and pytest's items, over which a collection takes half a second. After the
    module, collect its cycles: a pipeline that is held by the traceback of a caught error would keep running,
    and tests of other modules would find its threads.
    """
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
    for thread in threading.enumerate():
        if thread.name.startswith("spdl_media pipeline"):
            thread.join(10)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Let no garbage collection come while an interrupt is due: what it drops may lose the interrupt.

    CPython 3.11 crashes if it collects before it calls a profiler, and the profiler ends meanwhile.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves processes or shared memory."""
    yield from left_behind.watch()


@pytest.fixture(scope="session")
def media_dir() -> Path:
    """Return the folder of real media: ``SPDL_MEDIA_TEST_MEDIA``, or ``shared/media`` beside the checkout."""
    named = os.environ.get("SPDL_MEDIA_TEST_MEDIA")
    folder = Path(named) if named else CHECKOUT.parent / "shared" / "media"
    if not folder.is_dir():
        pytest.skip("no folder of real media; SPDL_MEDIA_TEST_MEDIA names none")
    return folder


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A random generator that is the same in each run of a test, and differs between tests."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


NUM_FRAMES, WIDTH, HEIGHT = 30, 64, 48


@pytest.fixture(scope="session")
def index_clip_frames() -> list[tuple[np.ndarray, ...]]:
    """The planes of the frames of ``index_clips``, bit for bit: 30 frames of 64 x 48, ``yuv420p``."""
    return index_planes(NUM_FRAMES, WIDTH, HEIGHT)


@pytest.fixture(scope="session")
def index_clips(index_clip_frames: list[tuple[np.ndarray, ...]]) -> dict[str, bytes]:
    """Clips by container: lossless, 10 frames per second, with B-frames, a key frame every 8 frames."""
    return {
        format: make_video(
            index_clip_frames, codec="libx265", format=format, max_b_frames=2, gop_size=8
        )
        for format in ("mp4", "matroska", "mpegts")
    }
