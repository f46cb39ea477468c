"""Checks on a GPU what stand-ins cannot show, within six minutes: ``python tests/gpu_check.py [PART ...]``.

Each part is a process with a limit of time. It prints each result as it comes, and the next part runs in any
case. Without a GPU each part says what is missing, and the status is 3.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import real_cuda

import spdl_media as sm
from spdl_media.cuda import cuvid
from spdl_media.cuda.nvdec import DECODERS
from spdl_media.cuda_driver import driver
from spdl_media.testing import index_planes, make_video

SKIPPED = 3
TESTS = Path(__file__).resolve().parent
VIDEO = TESTS.parent / "samples" / "media" / "nasa_13013.mp4"  # H.264, 390 frames of 480x270


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def need(*packages: str) -> None:
    """End the process if there is no device, or one of these packages or libraries is missing."""
    if reason := real_cuda.why_not(*packages):
        say("skipped:", reason)
        sys.exit(SKIPPED)


def load() -> Any:
    return sm.load_video(VIDEO, cuda=0, decoder="nvdec")


# --- parts


def capabilities() -> None:
    need()
    say(sm.cuda_capabilities())


def tests() -> None:
    """Run the tests with the mark ``cuda``, those of videos first."""
    need()
    # Other files would only take time to collect.
    files = [path for path in TESTS.rglob("test_*.py") if "mark.cuda" in path.read_text("utf-8")]
    files.sort(key=lambda path: ("video" not in path.name, path.name))
    options = "-m cuda --long -n0 -v -rs --tb=short --durations=9 -p no:cacheprovider".split()
    sys.exit(
        subprocess.run([sys.executable, "-m", "pytest", *options, *files], check=False).returncode
    )


def threads(rounds: int = 8) -> None:
    """Decode in several threads, then time NVIDIA's calls in one thread and in eight."""
    need("libnvcuvid.so.1")
    num_frames = load().shape[0]

    def measure(count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            work = partial(pool.map, lambda _: load().synchronize())
            list(work(range(count)))  # each thread needs a stream and a decoder
            begin, cpu = time.perf_counter(), time.process_time()
            list(work(range(count * rounds)))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        total = count * rounds * num_frames
        say(
            f"{count} threads: {total / seconds:.0f} frames/s, {1e6 * cpu / total:.0f} us of CPU each"
        )

    for count in (1, 2, 4, 8, 16):
        measure(count)
    spans = time_calls()
    for count in (1, 8):
        measure(count)
        for name, found in sorted(spans.items(), key=lambda item: -sum(item[1])):
            mean, most = 1e6 * statistics.mean(found), 1e6 * max(found)
            share = len(found) / (count * (rounds + 1) * num_frames)
            say(f"  {name}: {mean:.1f} us, at most {most:.0f}, {share:.2f} times a frame")
        spans.clear()


def time_calls() -> dict[str, list[float]]:
    """Note from now on the seconds that each call takes; without the GIL, with those to get it back."""
    spans = defaultdict(list)

    def timed(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            status = function(*arguments)
            spans[name].append(time.perf_counter() - begin)
            return status

        return call

    video = "DecodePicture MapVideoFrame64 UnmapVideoFrame64 GetDecodeStatus ParseVideoData".split()
    video += "CreateVideoParser DestroyVideoParser CreateDecoder".split()
    for library, kind in zip(cuvid.library(), ("without", "with"), strict=True):
        for name in (f"cuvid{one}" for one in video):
            setattr(library, name, timed(f"{name} {kind} the GIL", getattr(library, name)))
    for name in "CtxPushCurrent_v2 EventRecord LaunchKernel MemAllocAsync StreamWaitEvent".split():
        setattr(driver(), f"cu{name}", timed(f"cu{name}", getattr(driver(), f"cu{name}")))
    return spans


def training(rounds: int = 8) -> None:
    """Time a video alone and beside matrix products on PyTorch's default stream and on another one."""
    need("torch", "libnvcuvid.so.1")
    import torch

    square = torch.ones((4096, 4096), device="cuda:0")
    streams = {"default": torch.cuda.default_stream(0), "side": torch.cuda.Stream(0), "no": None}
    for name, stream in streams.items():
        spans = []
        for _ in range(rounds):
            with torch.cuda.stream(stream):
                for _ in range(40 if stream else 0):
                    torch.mm(square, square)
            begin = time.perf_counter()
            load().synchronize()
            spans.append(1e3 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
        say(
            f"training on {name} stream: {statistics.median(spans):.1f} ms, at most {max(spans):.1f}"
        )


def full() -> None:
    """Decode on a device whose memory is full, and again when there is room."""
    need("torch", "libnvcuvid.so.1")
    film = make_video(index_planes(60, 1280, 720), codec="libx264")
    for with_room in (False, True):
        DECODERS.clear()  # the memory of idle ones would be freed and used
        with contextlib.nullcontext() if with_room else nearly_full():
            try:
                found: object = sm.load_video(film, cuda=0, decoder="nvdec").synchronize()
            except sm.TransferError as error:
                found = error
        say("there is room:" if with_room else "the device is full:", found)
        assert isinstance(found, sm.TransferError) != with_room


@contextlib.contextmanager
def nearly_full(left: int = 32 << 20) -> Iterator[None]:
    """Fill the memory of the device in a ``with`` block."""
    import torch

    kept = [torch.empty(torch.cuda.mem_get_info(0)[0] - left, dtype=torch.uint8, device="cuda:0")]
    yield
    kept.clear()
    torch.cuda.empty_cache()


ENDINGS = {
    "copies to PyTorch": (
        "import numpy as np, spdl_media as sm, torch\n"
        "source = sm.convert_array(np.zeros(1 << 28, np.uint8), sm.StoragePool(1 << 28, 1))\n"
        "kept = [sm.transfer_buffer(source, cuda_config=0) for _ in range(8)]\n"
    ),
    "copies that nobody keeps": (
        "import numpy as np, spdl_media as sm\n"
        "source = np.zeros(1 << 26, np.uint8)\n"
        "for _ in range(8): sm.transfer_buffer(sm.convert_array(source), cuda_config=0)\n"
    ),
    "NVDEC in the midst": (
        "import gpu_check, spdl_media as sm\n"
        "batches = sm.streaming_load_video_nvdec(gpu_check.VIDEO, 0, num_frames=4)\n"
        "kept = [next(batches), gpu_check.load()]\n"
    ),
    "NVDEC in a thread": (
        "import threading, gpu_check\n"
        "def work():\n"
        "    while True: gpu_check.load()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "gpu_check.load()\n"
    ),
}


def exits(seconds: float = 40) -> None:
    """End processes with work under way, four of each kind at once; none may abort or hang."""
    need()
    end, num_bad = time.monotonic() + seconds, 0
    command = [sys.executable, "-c"]
    started = [(what, start([*command, code])) for what, code in ENDINGS.items() for _ in range(4)]
    for what, process in started:
        word = ended(process, end - time.monotonic())
        num_bad += word != "done"
        say(what, word)
    sys.exit(min(num_bad, 1))


# --- processes


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, so that its children are ended with it."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path])
    # Without buffers, or a part that is cut off would lose what it has printed.
    environment = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)


def ended(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for a process, at most so long, and return how it ended."""
    try:
        status = process.wait(max(0, seconds))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "cut off"
    return {0: "done", SKIPPED: "skipped"}.get(status, f"failed with {status}")


PARTS: dict[str, tuple[Callable[[], None], int]] = {
    "capabilities": (capabilities, 40),
    "tests": (tests, 150),
    "threads": (threads, 70),
    "training": (training, 30),
    "full": (full, 20),
    "exits": (exits, 45),
}


def main(*names: str) -> int:
    """Run the parts, and return the status of the process."""
    words = {}
    for name in names or PARTS:
        say(f"--- {name}")
        begin = time.monotonic()
        code = f"import gpu_check; gpu_check.{name}()"
        words[name] = ended(start([sys.executable, "-c", code]), PARTS[name][1])
        say(f"--- {name}: {words[name]} after {time.monotonic() - begin:.0f} s")
    say("; ".join(f"{name} {word}" for name, word in words.items()))
    left = set(words.values()) - {"done"}
    return (SKIPPED if left == {"skipped"} else 1) if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
