"""Functions and values can be shared between threads, and FFmpeg works without the GIL."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from decoded import indices
from programs import BENCHMARKS, run_python

import spdl_media as sm
from spdl_media import _checks
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_planes,
    index_samples,
    make_audio,
    make_image,
    make_media,
)

FRAMES = index_planes(30, 64, 48)
THREADS = 8


@pytest.fixture(scope="module", params=["libx265", "libx264", "libvpx-vp9", "ffv1", "libsvtav1"])
def movie(request: pytest.FixtureRequest) -> bytes:
    planes = index_planes(30, 64, 64) if request.param == "libsvtav1" else FRAMES
    video = VideoTrack(frames=planes, codec=request.param, gop_size=8)
    sound = AudioTrack(samples=index_samples(144000, 2), codec="flac")
    return make_media([video, sound], format="matroska")


def at_once(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Run ``work(k)`` in all threads at once; return the results."""
    barrier = threading.Barrier(threads)

    def run(number: int) -> Any:
        barrier.wait(20)
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


def bytes_of(frames: sm.VideoFrames) -> list[bytes]:
    return [b"".join(plane.tobytes() for plane in frame.planes) for frame in frames]


def test_the_same_packets_in_eight_threads(movie: bytes) -> None:
    packets = sm.demux_video(movie)
    want = bytes_of(sm.decode_packets(packets))
    for got in at_once(lambda k: bytes_of(sm.decode_packets(packets))):
        assert got == want


def test_the_same_audio_in_eight_threads(movie: bytes) -> None:
    packets = sm.demux_audio(movie, timestamp=(0.5, 2))
    for got in at_once(lambda k: sm.decode_packets(packets, "aformat=sample_fmts=s16")):
        blocks = np.concatenate([chunk.planes[0] for chunk in got.chunks])
        assert np.array_equal(blocks, index_samples(144000, 2)[24000:96000])


def test_the_same_bytes_demuxed_in_eight_threads(movie: bytes) -> None:
    def work(number: int) -> list[float]:
        packets = sm.demux_video(movie, timestamp=(number / 10, number / 10 + 1))
        return list(sm.decode_packets(packets, None).timestamps)

    for number, times in enumerate(at_once(work)):
        assert times == [(number + k) / 10 for k in range(10)]


def test_the_same_image_packets_in_eight_threads() -> None:
    packets = sm.demux_image(make_image(FRAMES[0][0], codec="mjpeg"))
    want = sm.decode_packets(packets).planes[0]
    for image in at_once(lambda k: sm.decode_packets(packets)):
        assert np.array_equal(image.planes[0], want)


def test_frames_are_read_by_eight_threads(movie: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(movie))
    want = indices(frames)
    work = lambda k: indices(frames)  # noqa: E731
    assert at_once(work) == [want] * THREADS


def test_a_decoder_shared_by_threads_serves_one_or_says_so(movie: bytes) -> None:
    """The second thread gets an error at once, and no frame is lost or repeated."""
    packets = sm.demux_video(movie)
    decoder = sm.VideoDecoder(packets.codec, filter_desc=None, num_frames=1)
    list(decoder.decode(packets[:0]))

    def work(number: int) -> tuple[int, int]:
        frames = refused = 0
        for _ in range(20):
            try:
                for chunk in decoder.decode(packets[:0]):
                    # One step at a time, because another thread may come in between.
                    frames += len(chunk)
            except RuntimeError as error:
                assert "in use by another thread" in str(error)  # noqa: PT017
                refused += 1
        return frames, refused

    decoder.decode(packets)
    results = at_once(work)
    left = sum(len(chunk) for chunk in decoder.flush())
    assert sum(frames for frames, _ in results) + left == 30


def test_a_demuxer_shared_by_threads_serves_one_or_says_so(movie: bytes) -> None:
    with sm.Demuxer(movie) as demuxer:

        def work(number: int) -> int:
            served = 0
            for _ in range(30):
                try:
                    packets = demuxer.demux_video((number / 10, number / 10 + 0.5))
                except RuntimeError as error:
                    assert "in use by another thread" in str(error)  # noqa: PT017
                else:
                    assert len(packets.get_timestamps()) == 5
                    served += 1
            return served

        assert sum(at_once(work)) > 0
        assert len(demuxer.demux_video()) == 30


def test_errors_stay_in_their_thread() -> None:
    """The error of each thread quotes FFmpeg's messages of that thread."""
    good = make_image(FRAMES[0][0], codec="png")

    def work(number: int) -> str:
        if number % 2:
            return sm.decode_packets(sm.demux_image(good)).pix_fmt
        with pytest.raises(sm.DemuxError) as raised:
            sm.demux_video(b"no media, only text " * 30, name=f"source {number}")
        return raised.value.source or ""

    for _ in range(5):
        results = at_once(work)
        assert results == [f"source {k}" if k % 2 == 0 else "rgb24" for k in range(THREADS)]


def test_other_threads_run_while_one_decodes() -> None:
    """A thread that counts in Python is not stopped, because FFmpeg works without the GIL."""
    planes = index_planes(8, 1280, 720)
    track = VideoTrack(frames=planes, codec="ffv1", gop_size=8)
    packets = sm.demux_video(make_media([track]))

    def count_while_decoding() -> int:
        done = threading.Event()

        def decode() -> None:
            sm.decode_packets(packets)
            done.set()

        thread = threading.Thread(target=decode)
        thread.start()
        ticks = 0
        while not done.is_set():
            ticks += 1
        thread.join()
        return ticks

    # Millions, if this thread gets a core. For about a second, the system may keep both threads on one core
    # (seen with hashlib in the other as well); if the GIL were held, no attempt would get there.
    deadline = time.monotonic() + 30
    while count_while_decoding() <= 2000:
        assert time.monotonic() < deadline, "no attempt got there"


@pytest.mark.long
class Stuck(io.BytesIO):
    """A file object whose second half is read only when the test allows it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.arrived, self.goes_on = threading.Event(), threading.Event()
        self.half = len(data) // 2

    def read(self, size: int | None = -1) -> bytes:
        if self.half < self.tell() < 2 * self.half - 65536:  # not its end, which is read first
            self.arrived.set()
            self.goes_on.wait()
        return super().read(size)


def test_audio_that_waits_for_its_source_keeps_nobody_from_decoding() -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (48000 * 20, 2)).astype(np.float32)
    data = make_audio(noise, 48000, format="mp4", codec="aac")
    stuck = Stuck(data)
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(sm.load_audio, stuck)
        try:
            assert stuck.arrived.wait(30)
            # AAC is decoded by one thread at a time, but a thread that waits for its file does not block
            # others.
            now = threads.submit(sm.load_audio, data).result(30)
            assert not late.done()
        finally:
            stuck.goes_on.set()
        assert np.array_equal(late.result(), now)


def test_two_threads_that_warn_of_one_topic_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(_checks, "warn_caller", lambda message, _: warnings.append(message))
    monkeypatch.setattr(_checks, "warned_of", {})
    together = threading.Barrier(2)

    class Topic(str):
        """A topic that both threads look up before either adds it."""

        __slots__ = ()

        def __hash__(self) -> int:
            together.wait(20)
            return super().__hash__()

    at_once(lambda _: _checks.warn_once(Topic("topic"), "said"), threads=2)
    assert warnings == ["said"]


def test_loaders_made_at_one_line_have_different_names() -> None:
    """Ranks compare loaders by these names. Without the GIL, threads count them at once."""
    names = at_once(lambda _: {sm.DataLoader([1])._origin for _ in range(600)})
    assert len(set().union(*names)) == 600 * THREADS


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "words"), [(["--json", "-"], '"ratio"'), (["--beside-python"], "0.2 ms")]
)
def test_the_benchmark_runs(options: list[str], words: str) -> None:
    script = BENCHMARKS / "decode_threads.py"
    run = run_python(script, "--rounds", 1, "--seconds", 0.005, *options)
    assert words in run.stdout
