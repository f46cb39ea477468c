"""The parts of ``gpu_first_hour.sh``, by name. Without a GPU a part ends with the status 3."""

from __future__ import annotations

import importlib.metadata
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import spdl_media as sm
from spdl_media.cuda.decoder_pool import DECODERS
from spdl_media.testing import index_planes, make_image, make_video

SKIPPED, ENDINGS = 3, 5
PACKAGES = (
    "av numpy torch cupy-cuda12x cupy-cuda13x nvidia-dali-cuda120 nvidia-dali-cuda130".split()
)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Findings:
    """Prints the result of each check, and counts the failures."""

    def __init__(self) -> None:
        self.num_failed = 0

    def check(self, what: str, work: Callable[[], Any], holds: Callable[[Any], bool]) -> None:
        """Run a check and print its result or error."""
        try:
            found = work()
        except Exception as error:  # noqa: BLE001  # go on with the other checks
            found = f"{type(error).__name__}: {error}"
        good = holds(found)
        self.num_failed += not good
        say("ok  " if good else "BAD ", what, "->", found)

    def end(self) -> None:
        say(f"{self.num_failed} of these are not as they should be")
        sys.exit(1 if self.num_failed else 0)


def is_error(name: str) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, str) and found.startswith(name)


def no_error(found: Any) -> bool:
    return not isinstance(found, str)


def smi(*arguments: str) -> str:
    """Return the output of nvidia-smi, if it is installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def need(*capabilities: str) -> None:
    """Skip the part if one of these capabilities is missing."""
    found = sm.cuda_capabilities()
    for name in capabilities:
        one = getattr(found, name)
        if not one:
            missing = ", ".join(one.missing)
            say(f"skipped: no {name}: {missing} missing" if missing else f"skipped: {one.reason}")
            sys.exit(SKIPPED)


# --- hardware and software


def capabilities() -> None:
    say(sm.cuda_capabilities())
    for name in PACKAGES:
        try:
            say(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            say(name, "is not installed")
    say(smi() or "there is no nvidia-smi")
    need("transfer")
    say("a device can be used")


def tests() -> None:
    """Run the tests with the mark ``cuda``; the others have been run without a GPU."""
    # Other files would only take time to collect.
    files = [
        str(path)
        for path in Path("tests").rglob("test_*.py")
        if "mark.cuda" in path.read_text("utf-8")
    ]
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-n0", "-q", "-rs", "--tb=short"]
    done = subprocess.run([*command, "--long", *files], check=False)
    say(f"pytest ended with {done.returncode}")
    need("transfer")  # otherwise all of them were skipped
    sys.exit(done.returncode)


# --- the end of processes

_ENDINGS = {
    "copies, to PyTorch": (
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
        "import spdl_media as sm\n"
        "from spdl_media.testing import index_planes, make_video\n"
        "data = make_video(index_planes(60, 320, 240), codec='libx264')\n"
        "batches = sm.streaming_load_video_nvdec(data, 0, num_frames=4)\n"
        "kept = [next(batches), sm.load_video(data, cuda=0)]\n"
    ),
    "NVDEC in a thread": (
        "import threading, spdl_media as sm\n"
        "from spdl_media.testing import index_planes, make_video\n"
        "data = make_video(index_planes(60, 320, 240), codec='libx264')\n"
        "def work():\n"
        "    while True: sm.load_video(data, cuda=0)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "sm.load_video(data, cuda=0)\n"
    ),
}


def exits() -> None:
    """End processes with work under way; none may abort or hang."""
    need("transfer")
    findings = Findings()
    for what, script in _ENDINGS.items():
        for _ in range(ENDINGS):
            run = partial(_status, script)
            findings.check(what, run, lambda found: found == 0)
    findings.end()


def _status(script: str) -> int | str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return "Hangs: for more than 60 s"
    if done.returncode:
        say(done.stderr.strip()[-2000:])
    return done.returncode


# --- NVDEC against the CPU


def difference(data: bytes, **options: Any) -> tuple[int, float]:
    """Return the largest and the mean difference of values between GPU and CPU."""
    found = sm.load_video(data, cuda=0, decoder="nvdec", **options)
    want = sm.load_video(data, **options, quality="accurate").array.astype(np.int16)
    distance = np.abs(sm.transfer_buffer_cpu(found).array - want)  # type: ignore[arg-type]
    return int(distance.max()), round(float(distance.mean()), 3)


def clip(codec: str, format: str, size: tuple[int, int], count: int = 24, **options: Any) -> bytes:
    planes = index_planes(count, *size, options.get("pix_fmt", "yuv420p"))
    return make_video(planes, codec=codec, format=format, gop_size=8, frame_rate=25, **options)


GRAIN = {"svtav1-params": "film-grain=20"}
DEEP = {"pix_fmt": "yuv420p10le"}
VIDEOS: list[tuple[str, str, tuple[int, int], dict[str, Any]]] = [
    ("libx264", "mp4", (320, 240), {"max_b_frames": 2}),
    ("libx265", "mp4", (320, 240), {"max_b_frames": 2}),
    ("libx265", "mp4", (320, 240), DEEP),
    ("libx265", "mp4", (320, 240), {"pix_fmt": "yuv420p12le"}),
    ("libsvtav1", "mp4", (320, 240), {}),
    ("libsvtav1", "mp4", (320, 240), DEEP),
    ("libsvtav1", "mp4", (319, 239), {}),
    ("libvpx-vp9", "webm", (320, 240), {}),
    ("libvpx-vp9", "webm", (319, 240), {}),
    ("libvpx-vp9", "webm", (320, 239), {}),
]


def no_hardware(found: Any) -> bool:
    """Whether this device has no decoder for the codec, as those before Ampere have none for AV1."""
    return isinstance(found, str) and "NVDEC of this device does not decode" in found


def nvdec() -> None:
    need("nvdec")
    findings = Findings()
    for codec, format, size, options in VIDEOS:
        what = f"{codec} {size[0]}x{size[1]} {options.get('pix_fmt', '')}"
        work = partial(difference, clip(codec, format, size, **options))
        findings.check(
            what, work, lambda found: no_hardware(found) or (no_error(found) and found[0] <= 2)
        )
    grain = clip("libsvtav1", "mp4", (320, 240), options=GRAIN)
    findings.check(
        "AV1 with film grain, in the mean",
        partial(difference, grain),
        lambda found: no_hardware(found) or (no_error(found) and found[1] <= 1),
    )
    film = clip("libx264", "mp4", (1280, 720), 60)
    findings.check("windows", partial(difference, film, timestamp=(0.5, 1.1)), no_error)
    DECODERS.clear()  # the memory of idle ones would be freed and used
    with nearly_full():
        findings.check(
            "a device that is full", partial(difference, film), is_error("TransferError")
        )
    findings.check("and when there is room again", partial(difference, film), no_error)
    findings.end()


@contextmanager
def nearly_full(left: int = 32 << 20) -> Iterator[None]:
    """Return a context manager in which almost all device memory is allocated by PyTorch or CuPy."""
    try:
        import torch

        free, _ = torch.cuda.mem_get_info(0)
        kept: Any = torch.empty(max(0, free - left), dtype=torch.uint8, device="cuda:0")
    except ImportError:
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
        kept = cupy.cuda.alloc(max(0, free - left))
    yield
    del kept
    for name in ("torch", "cupy"):
        module: Any = sys.modules.get(name)
        if name == "torch" and module is not None:
            module.cuda.empty_cache()
        elif module is not None:
            module.get_default_memory_pool().free_all_blocks()


# --- time of clips


def timed(work: Callable[[], Any], rounds: int = 20) -> str:
    """Time a call in milliseconds: median, minimum and maximum of the rounds."""
    spans = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work().synchronize()
        spans.append(1e3 * (time.perf_counter() - begin))
    return f"{statistics.median(spans):.2f} ms ({min(spans):.2f}-{max(spans):.2f})"


def clips(rounds: int = 20) -> None:
    need("nvdec")
    for codec in ("libx264", "libx265", "libvpx-vp9"):
        for size in ((320, 240), (1280, 720), (1920, 1080)):
            format = "webm" if codec == "libvpx-vp9" else "mp4"
            load = partial(sm.load_video, clip(codec, format, size, 16), cuda=0, decoder="nvdec")

            def anew(load: Callable[[], Any] = load) -> Any:
                DECODERS.clear()
                return load()

            what = f"{codec} {size[0]}x{size[1]}, 16 frames:"
            say(what, "new decoder", timed(anew, rounds), "- kept decoder", timed(load, rounds))
    _beside_a_training(rounds)
    say("measured")


def _beside_a_training(rounds: int) -> None:
    try:
        import torch

        square = torch.ones((4096, 4096), device="cuda:0")
    except (ImportError, RuntimeError, AssertionError) as error:
        say("no training can be put beside it:", error)
        return
    load = partial(sm.load_video, clip("libx264", "mp4", (1280, 720), 16), cuda=0, decoder="nvdec")
    streams = {"default stream": torch.cuda.default_stream(0), "own stream": torch.cuda.Stream(0)}
    for name, stream in streams.items():

        def busy(stream: Any = stream) -> Any:
            with torch.cuda.stream(stream):
                for _ in range(40):
                    torch.mm(square, square)
            return load()

        say(f"libx264 1280x720 beside a training on the {name}:", timed(busy, rounds))
        torch.cuda.synchronize()


# --- JPEG


def jpegs(count: int = 64) -> list[bytes]:
    """Make JPEGs with some detail, of several sizes."""
    chance, found = np.random.default_rng(0), []
    for number in range(count):
        height, width = 375 + 16 * (number % 5), 500 + 16 * (number % 7)
        coarse = chance.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3))
        picture = np.kron(coarse, np.ones((8, 8, 1), int))[:height, :width]
        noise = chance.integers(-12, 12, picture.shape)
        found.append(make_image((picture + noise).clip(0, 255).astype(np.uint8), codec="mjpeg"))
    return found


def used() -> str:
    """Return the used memory of the device, of all processes."""
    return smi("--query-gpu=memory.used", "--format=csv,noheader", "-i", "0") or "unknown"


def jpeg(rounds: int = 20) -> None:
    need("nvjpeg")
    pictures = jpegs()
    _alone(pictures, rounds)
    size = {"width": 224, "height": 224}
    for share in (0.0, 0.25, 0.5, 0.65, 0.8, 1.0):
        load = partial(sm.load_image_batch_nvjpeg, pictures, cuda=0, hw_decoder_load=share, **size)
        say(
            f"{len(pictures)} JPEGs, {share} of them by the JPEG engine:",
            timed(load, rounds),
            used(),
        )
    for count in (1, 8, 32, 64, 128):
        batch = (pictures * 2)[:count]
        load = partial(sm.load_image_batch, batch, cuda=0, decoder="dali", **size)
        say(f"a batch of {count}:", timed(load, rounds), used())
    for threads in (1, 2, 3, 4, 8):
        load = partial(sm.load_image_batch, pictures, cuda=0, decoder="dali", **size)
        say(
            f"{threads} threads: {_per_second(load, threads, rounds) * len(pictures):.0f}/s", used()
        )
    one = partial(sm.load_image, pictures[0], cuda=0, **size)
    say("one picture:", timed(one, rounds), used())
    say("measured")


def _alone(pictures: list[bytes], rounds: int) -> None:
    """Time NVIDIA's decoder without DALI, at the original sizes."""
    try:
        from nvidia import nvimgcodec

        decoder = nvimgcodec.Decoder()
        decoder.decode(pictures)
    except Exception as error:  # noqa: BLE001  # DALI may still work
        say("nvImageCodec alone cannot be used:", error)
        return
    begin = time.perf_counter()
    for _ in range(rounds):
        kept = decoder.decode(pictures)
    del kept
    rate = rounds * len(pictures) / (time.perf_counter() - begin)
    say(f"nvImageCodec alone: {rate:.0f}/s", used())


def _per_second(load: Callable[[], Any], threads: int, rounds: int) -> float:
    def work(_: int) -> None:
        for _ in range(rounds):
            load().synchronize()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))  # warm up each thread
        begin = time.perf_counter()
        list(pool.map(work, range(threads)))
    return threads * rounds / (time.perf_counter() - begin)


# --- media for the benchmark


def media(folder: str = "media") -> None:
    """Make images and a video for the benchmark."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(jpegs(128)):
        (where / f"{number:03}.jpg").write_bytes(data)
    (where / "clip.mp4").write_bytes(clip("libx264", "mp4", (1280, 720), 120))
    say(f"made in {where}")


PARTS: dict[str, Callable[..., None]] = {
    "capabilities": capabilities,
    "tests": tests,
    "exits": exits,
    "nvdec": nvdec,
    "clips": clips,
    "jpeg": jpeg,
    "media": media,
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
