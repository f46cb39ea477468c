"""Compares this library with others on folders of real media, file by file. It is not part of the test run.

    python tests/differential.py DIR... [--jobs 2] [--windows 100] [--json FILE]

Each file is read in a worker process with limits of time and memory, by this library and by other installed
ones: images by Pillow (HEIF and AVIF by pillow-heif), audio by soundfile and PyAV, video by PyAV and
torchcodec. In addition, random windows of each audio and video file must equal the same part of the whole
decode.

    agree        both results are the same: equal samples, or pixels within the tolerance between decoders
    differ       both decode the file, but the results differ
    only ours    the other library rejects the file
    only theirs  this library rejects the file
    neither      both reject the file

The exit status is 1 if any worker died or ran out of time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import resource
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

import spdl_media as sm

Result = dict[str, Any]
Array = np.ndarray[Any, Any]

IMAGES = frozenset(
    "apng avif bmp cur dds dib dpx exr gif hdr heic heif ico icns j2c j2k jfif jls jp2 jpeg jpf jpg jps jpx "
    "jxl pam pbm pcx pfm pgm pgx pic png pnm ppm psd qoi ras sgi rgb rgba sun tga tif tiff wbmp webp xbm "
    "xpm xwd".split()
)
SOUNDS = frozenset(
    "aac ac3 aif aifc aiff amr ape au caf dts eac3 flac m4a mka mp2 mp3 oga ogg opus ra snd spx tak tta voc "
    "w64 wav wma wv".split()
)
VIDEOS = frozenset(
    "264 3g2 3gp 265 asf avi dv f4v flv h264 h265 hevc ivf m2ts m2v m4v mkv mov mp4 mpeg mpg mts mxf nut "
    "obu ogv rm ts vob webm wmv y4m".split()
)

NOISY = {
    "aac": "noise substitution and its generator's state (PNS)",
    "ac3": "dither",
    "eac3": "dither",
    "mp2": "dither of the last bit",
    "atrac3p": "noise bands",
    "twinvq": "noise",
    "wmavoice": "noise",
    "amrnb": "comfort noise and state over all of the stream",
    "amrwb": "comfort noise and state over all of the stream",
}
"""Decoders whose output depends on more than a window's packets: only the counts of windows are compared."""

LOSSY = frozenset("avif heic heif jfif jp2 j2k j2c jpeg jpf jpg jpx jps jxl webp".split())
"""Images whose decoders may round differently."""

MAX_FRAMES = 400
"""Maximum number of frames of a video, to limit the time for long ones."""

CHUNK = 16
"""Number of frames of a video that are held as RGB at once."""

MAX_COLOUR = 2.0
"""Allowed difference of the means of blocks, in levels."""


# Comparison of one file, in the worker


def compare_image(path: Path, rng: random.Random, windows: int) -> Result:
    """Compare this library with Pillow."""
    mine, error = attempt(lambda: np.asarray(sm.load_image(path, pix_fmt="rgba")))
    try:
        theirs, theirs_error = attempt(lambda: by_pillow(path))
    except ImportError:
        return {"ours": error, "others": {}}
    verdict = {"theirs": theirs_error, "verdict": one_sided(error, theirs_error)}
    if mine is not None and theirs is not None:
        verdict |= pixel_verdict(mine, theirs, path.suffix.lower()[1:] in LOSSY)
    return {"ours": error, "others": {"Pillow": verdict}}


def by_pillow(path: Path) -> Array:
    """Load the first image by Pillow, upright, as 8-bit RGBA."""
    from PIL import Image, ImageOps

    try:
        import pillow_heif
    except ImportError:
        pass
    else:
        pillow_heif.register_heif_opener()
    with Image.open(path) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):
            gray = (np.asarray(upright).astype(np.uint32) + 128) // 257
            upright = Image.fromarray(gray.astype(np.uint8))
        elif upright.mode in ("I", "F"):
            raise ValueError(f"pixels of mode {upright.mode} have no range")
        return np.asarray(upright.convert("RGBA"))


def pixel_verdict(mine: Array, theirs: Array, lossy: bool) -> Result:
    """Compare two RGBA images; the colour of transparent pixels is ignored."""
    if mine.shape != theirs.shape:
        return {"verdict": "differ", "detail": f"{size_of(mine)} here, {size_of(theirs)} there"}
    seen = np.maximum(mine[..., 3:], theirs[..., 3:]) > 0
    apart = np.abs(mine.astype(np.int16) - theirs)
    apart[..., :3] *= seen
    mean, high = float(apart.mean()), float(np.quantile(apart, 0.995))
    same = mean <= 1.5 and high <= 16 if lossy else high <= 1
    return {
        "verdict": "agree" if same else "differ",
        "detail": f"levels apart: {mean:.2f} in the mean, {high:.0f} at 99.5%, {apart.max()} at most",
    }


def size_of(image: Array) -> str:
    return f"{image.shape[1]}x{image.shape[0]}"


def compare_sound(path: Path, rng: random.Random, windows: int) -> Result:
    """Compare audio with soundfile and PyAV, and windows with the whole decode."""
    whole, error = attempt(lambda: sm.decode_packets(sm.demux_audio(path), filter_desc=None))
    mine = None if whole is None or len(whole) == 0 else as_floats(whole)
    others = {}
    for name, read in (("soundfile", by_soundfile), ("PyAV", by_pyav_sound)):
        try:
            theirs, theirs_error = attempt(lambda read=read: read(path))  # type: ignore[misc]
        except ImportError:
            continue
        others[name] = {"theirs": theirs_error, "verdict": one_sided(error, theirs_error)}
        if mine is not None and theirs is not None:
            others[name] |= sound_verdict(mine, theirs)
    result: Result = {"ours": error, "others": others}
    if whole is not None and mine is not None:
        result["windows"] = sound_windows(path, whole, mine, rng, windows)
    return result


def as_floats(frames: Any) -> Array:
    """Return samples as ``(channels, samples)``, in the decoder's own numbers."""
    chunks = [
        np.stack(chunk.planes) if len(chunk.planes) > 1 or chunk.planes[0].ndim == 1
        else chunk.planes[0].T
        for chunk in frames.chunks
    ]  # fmt: skip
    return np.concatenate(chunks, axis=1)


def by_soundfile(path: Path) -> Array:
    import soundfile

    samples: Array = soundfile.read(path, dtype="float64", always_2d=True)[0].T
    return samples


def by_pyav_sound(path: Path) -> Array:
    """Decode audio by PyAV, as ``(channels, samples)``."""
    chunks = []
    with av.open(str(path)) as container:
        stream = container.streams.best("audio")
        if stream is None:
            raise ValueError("there is no audio stream")
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            values = frame.to_ndarray()
            if not frame.format.is_planar:
                values = values.reshape(-1, frame.layout.nb_channels).T
            chunks.append(values)
    return np.concatenate(chunks, axis=1)


def sound_verdict(mine: Array, theirs: Array) -> Result:
    """Compare two audio arrays, with a full scale of 1."""
    detail = f"{mine.shape[1]} samples here, {theirs.shape[1]} there"
    if mine.shape != theirs.shape:
        return {"verdict": "differ", "detail": f"{detail}; {len(mine)} and {len(theirs)} channels"}
    apart = float(np.abs(full_scale(mine) - full_scale(theirs)).max(initial=0))
    return {"verdict": "agree" if apart < 2e-4 else "differ", "detail": f"{apart:.2g} apart"}


def full_scale(samples: Array) -> Array:
    if samples.dtype == np.uint8:
        return samples / 128.0 - 1
    if samples.dtype.kind == "i":
        return samples / float(-np.iinfo(samples.dtype).min)
    return samples.astype(np.float64)


def sound_windows(path: Path, whole: Any, samples: Array, rng: random.Random, count: int) -> Result:
    """Compare random windows with the same samples of the whole decode."""
    rate = whole.sample_rate
    starts = [round(time * rate) for time in whole.timestamps]
    at = np.concatenate(
        [
            np.arange(start, start + len(chunk))
            for start, chunk in zip(starts, whole.chunks, strict=True)
        ]
    )
    noise = NOISY.get(sm.demux_audio(path).codec.name)
    failed = []
    for _ in range(count):
        start = rng.randrange(max(int(at[0]), 0), int(at[-1]) + 1)
        stop = start + rng.randrange(1, 2 * rate)
        wanted = samples[:, (at >= start) & (at < stop)]
        window = (Fraction(start, rate), Fraction(stop, rate))

        def read(window: Any = window) -> Any:
            return sm.decode_packets(sm.demux_audio(path, timestamp=window), filter_desc=None)

        frames, error = attempt(read)
        if frames is None:
            failed.append(f"[{start}, {stop}): {error}")
            continue
        found = as_floats(frames) if len(frames) else samples[:, :0]
        if found.shape != wanted.shape:
            failed.append(f"[{start}, {stop}): {found.shape[1]} samples of {wanted.shape[1]}")
        elif noise is None and not np.array_equal(found, wanted):
            failed.append(f"[{start}, {stop}): other samples")
    return {"count": count, "failed": failed, "noise": noise}


def compare_video(path: Path, rng: random.Random, windows: int) -> Result:
    """This library against PyAV's loop and torchcodec, and windows against the whole."""
    mine, error = attempt(lambda: planes_of(path))
    others = {}
    for name, compare in (("PyAV", beside_pyav), ("torchcodec", beside_torchcodec)):
        try:
            found, theirs = attempt(lambda compare=compare: compare(path, mine))  # type: ignore[misc]
        except ImportError:
            continue
        others[name] = {"theirs": theirs, "verdict": one_sided(error, theirs)}
        if mine is not None and found is not None:
            others[name] |= {"verdict": "differ" if found else "agree", "detail": found}
    result: Result = {"ours": error, "others": others}
    if mine:
        result["windows"] = video_windows(path, mine, rng, windows)
    return result


def planes_of(path: Path, window: Any = None) -> list[tuple[float, int]]:
    """Time and checksum of the planes of each frame, as the decoder gave them."""
    packets = sm.demux_video(path, timestamp=window)
    limit = None if window else MAX_FRAMES
    frames = sm.decode_packets(packets, filter_desc=None, num_frames=limit)
    times = frames.timestamps
    return [(time, checksum(frame.planes)) for time, frame in zip(times, frames, strict=True)]


def checksum(planes: Sequence[Array]) -> int:
    total = 0
    for plane in planes:
        total = zlib.crc32(np.ascontiguousarray(plane), total)
    return total


def beside_pyav(path: Path, mine: Sequence[tuple[float, int]] | None) -> str:
    """What differs between these planes and those that PyAV's own loop gives."""
    found: list[int] = []
    with av.open(str(path)) as container:
        stream = container.streams.best("video")
        if stream is None:
            raise ValueError("there is no video stream")
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            found.append(checksum(sm.VideoFrames([frame])[0].planes))
            if len(found) == MAX_FRAMES:
                break
    if mine is None or found == [planes for _, planes in mine]:
        return ""
    return f"{len(mine)} frames here, {len(found)} there, or other planes"


def beside_torchcodec(path: Path, mine: Sequence[tuple[float, int]] | None) -> str:
    """What differs in the number, the times and the colours of the frames."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(str(path), seek_mode="exact", dimension_order="NHWC")
    count = min(len(decoder), MAX_FRAMES)
    # All are decoded, also where there is nothing to compare them with: the verdict is on the file.
    starts = range(0, count, CHUNK)
    chunks = (decoder.get_frames_in_range(at, min(at + CHUNK, count)) for at in starts)
    theirs = [
        (time, colours(picture))
        for chunk in chunks
        for time, picture in zip(chunk.pts_seconds.tolist(), chunk.data.numpy(), strict=True)
    ]
    if mine is None:
        return ""
    if len(mine) != count:
        return f"{len(mine)} frames here, {count} there"
    # Here the time is that of the file, there that of the stream's clock, which MPEG-TS starts anywhere.
    shift = mine[0][0] - theirs[0][0] if mine else 0.0
    wrong = [
        one[0]
        for one, (time, _) in zip(mine, theirs, strict=True)
        if abs(one[0] - time - shift) > 0.001
    ]
    if wrong:
        return f"other times, first {wrong[0]} s"
    for (at, wanted), picture in zip(theirs, pictures_of(path), strict=False):
        found = colours(picture)
        if found.shape != wanted.shape or np.abs(found - wanted).max() > MAX_COLOUR:
            return f"other colours at {at} s"
    return ""


def pictures_of(path: Path) -> Iterator[Array]:
    with sm.Demuxer(path) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, num_frames=CHUNK)
        for packets in demuxer.streaming_demux(num_packets=CHUNK):
            for frames in decoder.decode(packets):
                yield from np.asarray(sm.convert_frames(frames))
        for frames in decoder.flush():
            yield from np.asarray(sm.convert_frames(frames))


def colours(picture: Array) -> Array:
    """The means of some 8 x 8 blocks, beside the size."""
    height, width = picture.shape[:2]
    rows, columns = (
        np.unique(np.linspace(0, size, 8, endpoint=False).astype(int)) for size in (height, width)
    )
    sums = np.add.reduceat(np.add.reduceat(picture.astype(np.float64), rows, 0), columns, 1)
    areas = np.outer(np.diff([*rows, height]), np.diff([*columns, width]))
    return np.concatenate([(sums / areas[:, :, None]).ravel(), [float(height), float(width)]])


def video_windows(
    path: Path, whole: Sequence[tuple[float, int]], rng: random.Random, count: int
) -> Result:
    """Compare random windows with the same frames of the whole decode."""
    times = [time for time, _ in whole]
    if not all(time == time for time in times):
        return {"count": 0, "failed": [], "noise": "the file has no timestamps"}
    # There may be more frames than were compared.
    end = max(times) + 0.04 if len(whole) < MAX_FRAMES else max(times)
    failed = []
    for _ in range(count):
        start = round(rng.uniform(min(times), end), 3)
        stop = round(min(start + rng.uniform(0.001, 2), end), 3)
        if start >= stop:
            continue
        wanted = [frame for frame in whole if start <= frame[0] < stop]
        found, error = attempt(lambda window=(start, stop): planes_of(path, window))  # type: ignore[misc]
        if found is None:
            failed.append(f"[{start}, {stop}): {error}")
        elif found != wanted:
            same = "other times or pixels" if len(found) == len(wanted) else f"of {len(wanted)}"
            failed.append(f"[{start}, {stop}): {len(found)} frames, {same}")
    return {"count": count, "failed": failed, "noise": None}


def attempt(read: Callable[[], Any]) -> tuple[Any, str | None]:
    """Call a function; return its result, or the error in one line. A missing library is raised."""
    try:
        return read(), None
    except Exception as error:  # any error of a library counts as rejection
        if isinstance(error, ImportError) and not isinstance(error, sm.MediaError):
            raise
        text = str(error).strip().partition("\n")[0]
        return None, f"{type(error).__name__}: {text}"[:300]


def one_sided(ours: str | None, theirs: str | None) -> str:
    """Return the verdict if at most one of both libraries has decoded the file."""
    if ours is None:
        return "only ours" if theirs is not None else "agree"
    return "neither" if theirs is not None else "only theirs"


COMPARE = (
    (IMAGES, "image", compare_image),
    (SOUNDS, "sound", compare_sound),
    (VIDEOS, "video", compare_video),
)


def kind_of(path: Path) -> str | None:
    """Return the kind of media by the name of a file, or ``None``."""
    suffix = path.suffix.lower()[1:]
    return next((kind for suffixes, kind, _ in COMPARE if suffix in suffixes), None)


def serve(windows: int, memory: int) -> None:
    """Compare each path that is read from stdin; write one line of JSON each to stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    answers = os.fdopen(os.dup(1), "w")
    # Output of C libraries must not get between the answers.
    os.dup2(2, 1)
    by_kind = {kind: compare for _, kind, compare in COMPARE}
    for line in sys.stdin:
        path = Path(json.loads(line))
        kind = kind_of(path)
        assert kind is not None
        count = windows if kind == "sound" else windows // 5
        rng = random.Random(path.name)  # noqa: S311  # no secret
        result, error = attempt(lambda: by_kind[kind](path, rng, count))  # noqa: B023  # called now
        answers.write(json.dumps(result or {"ours": f"comparison: {error}", "others": {}}) + "\n")
        answers.flush()


# Comparison of all files, in workers that may die


class Worker:
    """A process that compares files one by one, and is replaced when it dies or takes too long."""

    def __init__(self, windows: int, seconds: float, memory: int) -> None:
        options = ["--serve", "--windows", str(windows), "--memory", str(memory)]
        self._command = [sys.executable, __file__, *options]
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def compare(self, path: Path) -> Result:
        """Return the worker's answer, or how it ended."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        begin = time.monotonic()
        timer = threading.Timer(self._seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(str(path)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timer.cancel()
        if answer:
            result: Result = json.loads(answer)
            return result
        status = process.wait()
        self._process = None
        over = time.monotonic() - begin >= self._seconds
        return {"died": "took too long" if over else f"exit status {status}", "others": {}}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def compare_all(paths: Sequence[Path], jobs: int, make: Callable[[], Worker]) -> dict[Path, Result]:
    """Compare all files in ``jobs`` workers."""
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for path in paths:
        waiting.put(path)
    results: dict[Path, Result] = {}

    def work() -> None:
        worker = make()
        try:
            while True:
                path = waiting.get_nowait()
                results[path] = worker.compare(path)
                if len(results) % 100 == 0:
                    print(f"{len(results)} of {len(paths)}", file=sys.stderr)
        except queue.Empty:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {path: results[path] for path in paths}


VERDICTS = ("agree", "differ", "only ours", "only theirs", "neither")


def report(results: dict[Path, Result]) -> Iterator[str]:
    """Yield the counts, then each file that differs."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    lines = []
    windows: collections.Counter[str] = collections.Counter()
    for path, result in results.items():
        if "died" in result:
            lines.append(f"DIED  {path}: {result['died']}")
        for name, other in result["others"].items():
            verdict = other["verdict"]
            counts[f"{kind_of(path)}s, {name}"][verdict] += 1
            if verdict in ("differ", "only theirs"):
                why = other.get("detail") or result["ours"]
                lines.append(f"{verdict:12} {name:10} {path}: {why}")
        if found := result.get("windows"):
            kind = kind_of(path)
            windows[f"{kind}: windows"] += found["count"]
            windows[f"{kind}: windows that differ"] += len(found["failed"])
            if found["failed"]:
                first = found["failed"][0]
                lines.append(f"windows      {path}: {len(found['failed'])}, such as {first}")
    width = max(map(len, counts), default=0)
    yield f"{'':{width}}  " + "  ".join(f"{verdict:>11}" for verdict in VERDICTS)
    for name, row in sorted(counts.items()):
        yield f"{name:{width}}  " + "  ".join(f"{row[verdict]:11}" for verdict in VERDICTS)
    for name, number in sorted(windows.items()):
        yield f"{name}: {number}"
    yield ""
    yield from sorted(lines)


def main() -> int:
    """Run the comparison as a program, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--windows", type=int, default=100, help="of a sound; a fifth of a video")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one file may take")
    parser.add_argument("--memory", type=int, default=6 << 30, help="bytes of a worker")
    parser.add_argument("--json", metavar="FILE", help="write all results here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.windows, options.memory)
        return 0
    found = (path for folder in options.folders for path in sorted(folder.rglob("*")))
    paths = [path for path in found if path.is_file() and kind_of(path)]
    results = compare_all(
        paths, options.jobs, lambda: Worker(options.windows, options.seconds, options.memory)
    )
    for line in report(results):
        print(line)
    if options.json:
        document = {str(path): result for path, result in results.items()}
        Path(options.json).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return int(any("died" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
