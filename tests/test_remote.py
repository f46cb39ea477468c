"""URLs through fsspec: bytes that are fetched for a window, errors, and cleanup."""

from __future__ import annotations

import collections
import http.client
import io
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from http_server import HTTPFiles, serve

import spdl_media as sm
from spdl_media import _remote as remote
from spdl_media._remote import ReadAhead
from spdl_media.config import demux_config
from spdl_media.errors import DemuxError, MissingDependencyError, SourceError
from spdl_media.inputs import open_input
from spdl_media.testing import make_audio

fsspec = pytest.importorskip("fsspec")
aiohttp = pytest.importorskip("aiohttp")

MIB = 1024 * 1024
GROUP_SIZE = 12
FRAME_RATE = 25


def _video_packets() -> list[tuple[bytes, bool]]:
    """Make one GOP of noisy frames: a key frame and eleven that depend on it, about 120 KB each."""
    encoder = av.CodecContext.create("mpeg4", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 320, 240, "yuv420p"
    encoder.time_base, encoder.gop_size, encoder.bit_rate = Fraction(1, 25), 100, 50_000_000
    rng = np.random.default_rng(0)
    packets = []
    for index in range(GROUP_SIZE):
        pixels = rng.integers(0, 256, (360, 320), np.uint8)
        frame = av.VideoFrame.from_ndarray(pixels, format="yuv420p")
        frame.pts = index
        packets += encoder.encode(frame)
    packets += encoder.encode(None)
    return [(bytes(packet), packet.is_keyframe) for packet in packets]


@pytest.fixture(scope="module")
def large_mp4() -> bytes:
    """Make 50 MB of interleaved video and audio, with the index at the end."""
    group = _video_packets()
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=FRAME_RATE)
        video.width, video.height, video.pix_fmt = 320, 240, "yuv420p"
        audio = container.add_stream("pcm_s16le", rate=48000)
        count = 50_000_000 // sum(len(data) for data, _ in group) + 1
        container.start_encoding()
        for index, (data, is_keyframe) in enumerate(group * count):
            packet = av.Packet(data)
            packet.stream, packet.time_base = video, Fraction(1, FRAME_RATE)
            packet.pts = packet.dts = index
            packet.is_keyframe = is_keyframe
            container.mux(packet)
            sound = av.Packet(bytes(1920 * 2 * 2))
            sound.stream, sound.time_base = audio, Fraction(1, 48000)
            sound.pts = sound.dts = index * 1920
            container.mux(sound)
    return out.getvalue()


@pytest.fixture(scope="module")
def server(large_mp4: bytes) -> Iterator[HTTPFiles]:
    with serve({"large.mp4": large_mp4, "empty.mp4": b"", "text.mp4": b"no media " * 99}) as files:
        yield files


@pytest.fixture(scope="module")
def small_clip() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "gray"
        for index in range(4):
            picture = np.full((16, 32), index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="gray")))
        container.mux(stream.encode(None))
    return out.getvalue()


def _index_size(mp4: bytes) -> int:
    return len(mp4) - mp4.rindex(b"moov") + 4


@pytest.mark.parametrize("start", [0, 7, 13])
def test_window_fetches_little_more_than_its_packets(
    server: HTTPFiles, large_mp4: bytes, start: int
) -> None:
    server.reset()
    wanted = 0
    with open_input(f"{server.url}/large.mp4") as source:
        container = source.open(demux_config())
        container.seek(start * 1_000_000)
        for packet in container.demux():
            wanted += packet.size
            if packet.stream.type == "video" and packet.pts * packet.time_base >= start + 1:
                break
    assert wanted > MIB
    allowed = _index_size(large_mp4) + wanted + MIB
    assert server.bytes_sent["large.mp4"] <= allowed
    assert server.requests["large.mp4"] <= 24


def test_linear_read_is_complete_and_takes_few_requests(
    server: HTTPFiles, large_mp4: bytes
) -> None:
    with av.open(io.BytesIO(large_mp4)) as container:
        expected = sum(packet.size for packet in container.demux())
    server.reset()
    with open_input(f"{server.url}/large.mp4") as source:
        read = sum(packet.size for packet in source.open(demux_config()).demux())
    assert read == expected
    assert server.bytes_sent["large.mp4"] <= len(large_mp4) + MIB
    assert server.requests["large.mp4"] <= len(large_mp4) // (MIB // 2) + 16


def test_read_all_is_two_requests(server: HTTPFiles, large_mp4: bytes) -> None:
    server.reset()
    with open_input(f"{server.url}/large.mp4") as source:
        assert source.name == f"{server.url}/large.mp4"
        assert source.seekable
        assert source.read_all() == large_mp4
    assert server.requests["large.mp4"] == 2
    with serve({"a.mp4": large_mp4}) as files:
        files.answer = lambda start, stop: (start, start)  # an empty answer does not tell the size
        with open_input(f"{files.url}/a.mp4") as source:
            assert source.read_all() == large_mp4
        assert files.bytes_sent["a.mp4"] == len(large_mp4)


def test_what_the_head_holds_is_not_fetched_again(server: HTTPFiles, large_mp4: bytes) -> None:
    for size, requests in ((65536, 1), (65537, 2)):
        with (
            serve({"a.bin": large_mp4[:size]}) as files,
            open_input(f"{files.url}/a.bin") as source,
        ):
            assert source.head(64) == large_mp4[:64]
            assert source.read_all() == large_mp4[:size]
            assert (files.requests["a.bin"], files.bytes_sent["a.bin"]) == (requests, size)


def test_of_a_range_that_arrives_in_part_the_rest_is_requested(large_mp4: bytes) -> None:
    with serve({"a.bin": large_mp4[:300_000]}) as files, open_input(f"{files.url}/a.bin") as source:
        files.answer = lambda start, stop: (start, min(stop, start + 30_000))
        assert source.head(64) == large_mp4[:64]
        assert source.read_all() == large_mp4[:300_000]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda start, stop: (start, start), "requested from byte 65536 on, but 0 arrived"),
        (
            lambda start, stop: (start - 4, stop - 4),
            "sent bytes 65532-200039/400044 when bytes 65536-",
        ),
    ],
)
def test_other_bytes_than_requested_are_an_error(
    answer: Callable[[int, int], tuple[int, int]], message: str
) -> None:
    """fsspec takes an empty answer for the end of the file, and any bytes for the requested ones."""
    with (
        serve({"a.wav": make_audio(np.zeros((200_000, 1), np.int16), 8000)}) as files,
        open_input(f"{files.url}/a.wav") as source,
    ):
        files.answer = answer
        with pytest.raises(SourceError, match=message):
            source.read_at(44, 200_000)


@pytest.mark.parametrize("content_range", ["", "Bytes {}-{}/{}", "bytes={}-{}/{}"])
def test_servers_that_state_ranges_otherwise_are_read(content_range: str) -> None:
    """The length of a first part without a Content-Range is not the size of the file."""
    content = bytes(range(256)) * 400
    with serve({"a.bin": content}) as files:
        files.content_range = content_range
        with open_input(f"{files.url}/a.bin") as source:
            assert source.read_at(0, 9) == content[:9]
            assert source.read_at(70_000, 90_000) == content[70_000:]


def test_a_file_that_changes_between_two_ranges_is_an_error() -> None:
    with serve({"a.wav": make_audio(np.zeros((200_000, 1), np.int16), 8000)}) as files:
        # A weak tag may differ for equal bytes, and servers behind one address may differ in strong ones.
        date = "Sat, 28 Nov 2026 12:00:00 GMT"
        for tag, modified, changes in (
            ('W/"1"', "", False),
            ('"1"', date, False),
            ('"1"', "", True),
        ):
            files.etag, files.modified = tag, modified
            with open_input(f"{files.url}/a.wav") as source:
                source.head(64)
                files.etag = tag.replace("1", "2")
                if not changes:
                    assert len(source.read_at(200_000, 9)) == 9
                    continue
                with pytest.raises(SourceError, match=r'changed on the server.*"1", now "2"'):
                    source.read_at(200_000, 9)


def test_a_server_that_compresses_although_it_is_told_not_to_is_read() -> None:
    """Its answer states the size of the compressed bytes, HEAD that of the file."""
    content = np.random.default_rng(0).bytes(500_000) + bytes(500_000)
    with serve({"a.bin": content}, ranges=False, sizes=True) as files:
        files.zips = True
        with open_input(f"{files.url}/a.bin") as source:
            assert bytes(source.read_at(900_000, 100)) == content[900_000:900_100]


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize(("page", "sizes"), [(b"<html>" * 5000, False), (b"<login/>" * 512, True)])
def test_a_page_in_place_of_a_range_is_an_error(page: bytes, *, sizes: bool, forward: bool) -> None:
    """Such as that of a login: fsspec took a short one for the range, and its text for data."""
    with serve({"a.tar": bytes(1 << 18)}) as files:
        source = remote.open_stream(f"{files.url}/a.tar", forward=forward)
        assert not isinstance(source, bytes | memoryview)
        assert source.read(10) == bytes(10)
        files.ranges, files.sizes, files.files["a.tar"] = False, sizes, page
        with pytest.raises(SourceError, match=r"the answer (has|ended).* 262144"):
            collections.deque(iter(lambda: source.read(65536), b""), maxlen=0)
        source.detach()


def test_a_response_of_urllib_that_breaks_off_is_an_error(large_mp4: bytes) -> None:
    """Its read() returns nothing then, as at the end of the file."""
    with serve({"a.ts": bytes(300_000)}, ranges=False, sizes=True) as files:
        files.cut = 200_000
        connection = http.client.HTTPConnection(files.url.removeprefix("http://"))
        connection.request("GET", "/a.ts")
        with (
            closing(connection),
            open_input(connection.getresponse()) as source,
            pytest.raises(SourceError, match=r"failed at byte 200000: .*it broke off"),
        ):
            source.head(300_000)


def test_messages_and_names_show_no_password(server: HTTPFiles) -> None:
    address = server.url.replace("//", "//me:secret@")
    with pytest.raises(SourceError, match=r"http://me:\*\*\*@127") as caught:
        sm.load_image(f"{address}/missing.jpg")
    link: BaseException | None = caught.value
    while link is not None:  # a traceback shows all of them
        assert "secret" not in repr(link)
        link = link.__cause__ or link.__context__
    with open_input(f"{address}/text.mp4") as source:
        assert source.name.startswith("http://me:***@127")
    with pytest.raises(ValueError, match=r"ftp://me:\*\*\*@host/a.png is a URL"):
        sm.save_image("ftp://me:secret@host/a.png", np.zeros((2, 2, 3), np.uint8))


def test_colons_in_a_web_address_are_no_chain() -> None:
    name = "a.bin?time=1::2"
    with serve({name: b"content"}) as files, open_input(f"{files.url}/{name}") as source:
        assert source.read_all() == b"content"


def test_head_costs_one_small_request(server: HTTPFiles, large_mp4: bytes) -> None:
    server.reset()
    with open_input(f"{server.url}/large.mp4") as source:
        assert source.head(64) == large_mp4[:64]
        assert source.head(4096) == large_mp4[:4096]
    assert server.bytes_sent["large.mp4"] == 65536


def test_server_without_ranges_is_a_stream(large_mp4: bytes) -> None:
    with serve({"large.mp4": large_mp4}, ranges=False) as files:
        with open_input(f"{files.url}/large.mp4") as source:
            assert not source.seekable
            assert source.head(8) == large_mp4[:8]
            with pytest.raises(DemuxError, match=r"index \(moov\) at the end.*faststart"):
                source.open(demux_config())
        with open_input(f"{files.url}/large.mp4") as source:
            assert source.head(8) == large_mp4[:8]
            # aiohttp returns the data that has arrived, so all of it takes several reads.
            assert len(source.read_all()) == len(large_mp4)


def test_of_a_server_that_ignores_ranges_the_file_is_held_whole(large_mp4: bytes) -> None:
    """Such as Python's ``http.server``: it sends the size, but always answers with the whole file."""
    with serve({"large.mp4": large_mp4}, ranges=False, sizes=True) as files:
        url = f"{files.url}/large.mp4"
        frames = sm.decode_packets(sm.demux_video(url, timestamp=(1.0, 1.2)), None)
        local = sm.decode_packets(sm.demux_video(large_mp4, timestamp=(1.0, 1.2)), None)
        assert len(frames) == len(local) == 5
        for one, other in zip(frames, local, strict=True):
            assert one.pts == other.pts
            np.testing.assert_array_equal(one.planes[0], other.planes[0])
        assert files.requests["large.mp4"] <= 4


def test_a_file_too_large_to_be_held_says_what_to_do(
    large_mp4: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MAX_WHOLE", MIB)
    with serve({"large.mp4": large_mp4}, ranges=False, sizes=True) as files:
        with open_input(f"{files.url}/large.mp4") as source:
            assert source.head(8) == large_mp4[:8]
            with pytest.raises(
                SourceError,
                match=r"no ranges, and no more than 1048576 of .* Download the file first",
            ) as e:
                source.open(demux_config())
        assert e.value.source == f"{files.url}/large.mp4"


def test_missing_file_is_an_error_with_its_cause(server: HTTPFiles) -> None:
    begin = time.perf_counter()
    server.reset()
    with pytest.raises(
        SourceError, match=r"cannot be opened: FileNotFoundError.*Check the addr"
    ) as e:
        open_input(f"{server.url}/missing.mp4")
    assert server.requests == {"missing.mp4": 1}
    assert isinstance(e.value.__cause__, FileNotFoundError)
    assert e.value.source == f"{server.url}/missing.mp4"
    assert time.perf_counter() - begin < 30  # connections have minutes, and imports take seconds


def test_refused_connection_is_an_error_with_its_cause() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        begin = time.perf_counter()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/clip.mp4"
        with pytest.raises(SourceError, match="server can be reached") as caught:
            open_input(url)
    assert isinstance(caught.value.__cause__, Exception)
    assert time.perf_counter() - begin < 30


def test_server_that_fails_while_reading(large_mp4: bytes) -> None:
    with serve({"large.mp4": large_mp4}) as files, open_input(f"{files.url}/large.mp4") as source:
        container = source.open(demux_config())
        del files.files["large.mp4"]
        with pytest.raises(SourceError, match=r"large.mp4: its read\(\) failed at byte.*404") as e:
            for _ in container.demux():
                pass
        assert e.value.__cause__ is not None
        with pytest.raises(SourceError, match="404"):
            source.check()


def test_after_a_failed_read_a_video_is_opened_again(server: HTTPFiles) -> None:
    """FFmpeg takes the failure for the end of the file, so later frames would be reported as missing."""
    url, cache = f"{server.url}/large.mp4", sm.VideoCache(2)
    video, demuxer = cache.open(url), sm.Demuxer(url)
    first = sm.convert_frames(video[[0]])
    server.busy = 1
    with pytest.raises(SourceError, match="503, message"):
        video[[200]]
    with pytest.raises(SourceError, match=r"an earlier read failed, so open it again .*503, mess"):
        video[[0]]
    np.testing.assert_array_equal(sm.convert_frames(cache.open(url)[[0]]), first)
    server.busy = 1
    for _ in range(2):
        with pytest.raises(SourceError, match="503, message"):
            demuxer.demux_video((8, 9))
    demuxer.close()
    cache.clear()


@pytest.mark.parametrize(
    ("path", "message"),
    [("text.mp4", "cannot open it as media"), ("empty.mp4", r"empty \(0 bytes\)")],
)
def test_content_that_is_not_media(server: HTTPFiles, path: str, message: str) -> None:
    with (
        open_input(f"{server.url}/{path}") as source,
        pytest.raises(DemuxError, match=f"{path}: .*{message}"),
    ):
        source.open(demux_config())


def test_memory_file_is_shared_and_not_copied(small_clip: bytes) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/inputs/clip.mkv", small_clip)
    url = "memory://inputs/clip.mkv"
    try:
        with open_input(url) as first, open_input(url) as second:
            packets = zip(
                first.open(demux_config()).demux(), second.open(demux_config()).demux(), strict=True
            )
            assert all(bytes(a) == bytes(b) for a, b in packets)
            assert bytes(first.read_all()) == small_clip
        with filesystem.open("/inputs/clip.mkv", "r+b") as file:
            file.seek(0, 2)
            file.write(b"more")  # BytesIO raises while its memory is in use
    finally:
        filesystem.rm("/inputs/clip.mkv")


_CHAINS = (
    ("simplecache::file://{folder}/clip.mkv", True),
    ("filecache::file://{folder}/clip.mkv", True),
    ("zip://clip.mkv::file://{folder}/clips.zip", True),
    ("tar://clip.mkv::file://{folder}/clips.tar", True),
    ("zip://clip.mkv::simplecache::{url}/clips.zip", False),
    ("simplecache::{url}/clip.mkv", False),
    ("blockcache::{url}/clip.mkv", False),
    ("simplecache::zip://clip.mkv::file://{folder}/clips.zip", True),
)


# The block cache of fsspec closes its file only by garbage collection.
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_chained_urls_are_read_and_sought_in(small_clip: bytes, tmp_path: Path) -> None:
    (tmp_path / "clip.mkv").write_bytes(small_clip)
    with zipfile.ZipFile(tmp_path / "clips.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("clip.mkv", small_clip)
    with tarfile.open(tmp_path / "clips.tar", "w") as archive:
        archive.add(tmp_path / "clip.mkv", "clip.mkv")
    expected = sm.decode_packets(sm.demux_video(small_clip), None)[3].planes[0]
    failed = {}
    served = {name: (tmp_path / name).read_bytes() for name in ("clip.mkv", "clips.zip")}
    with serve(served) as files:
        for chain, is_local in _CHAINS:
            url = chain.format(folder=tmp_path.as_posix(), url=files.url)
            cache = {"cache_storage": str(tmp_path / f"cache of {chain.count('::')}{is_local}")}
            config = demux_config(
                storage_options={name: cache for name in chain.split("::") if "cache" in name}
            )
            try:
                with sm.Demuxer(url, demux_config=config) as demuxer:
                    # It reads twice and from the end, so it has to seek.
                    for window in ((0.3, 0.4), (0.0, 0.1), (0.3, 0.4)):
                        frames = sm.decode_packets(demuxer.demux_video(window), None)
                np.testing.assert_array_equal(frames[0].planes[0], expected)
            except Exception as error:  # noqa: BLE001  # all chains are named at once
                failed[url] = repr(error)
    assert not failed


def test_of_an_archive_little_more_than_the_member_is_fetched(
    small_clip: bytes, large_mp4: bytes
) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("large.mp4", large_mp4[: 8 * MIB])
        archive.writestr("clip.mkv", small_clip)
        archive.writestr("large2.mp4", large_mp4[: 8 * MIB])
    with serve({"clips.zip": written.getvalue()}) as files:
        assert sm.load_video(f"zip://clip.mkv::{files.url}/clips.zip").shape[0] == 4
        assert files.bytes_sent["clips.zip"] < 2 * MIB


def test_a_tar_of_a_server_without_ranges_is_fetched_in_one_request() -> None:
    """All of it is needed to find a member. In smaller parts, such servers do not give it."""
    written, info = io.BytesIO(), tarfile.TarInfo("a.bin")
    info.size = MIB
    with tarfile.open(fileobj=written, mode="w") as archive:
        archive.addfile(info, io.BytesIO(bytes(MIB)))
    with (
        serve({"a.tar": written.getvalue()}, ranges=False, sizes=True) as files,
        open_input(f"tar://a.bin::{files.url}/a.tar") as source,
    ):
        assert len(source.read_all()) == MIB


def test_storage_options_reach_the_file_system(small_clip: bytes, tmp_path: Path) -> None:
    (tmp_path / "clip.mkv").write_bytes(small_clip)
    url, cache = f"simplecache::file://{(tmp_path / 'clip.mkv').as_posix()}", tmp_path / "cache"
    options = {"simplecache": {"cache_storage": str(cache)}}
    config = demux_config(storage_options=options)
    assert sm.load_video(url, demux_config=config).shape == (4, 16, 32, 3)
    assert [file.read_bytes() for file in cache.iterdir() if file.is_file()] == [small_clip]
    assert sm.probe(url, demux_config=config).video is not None
    with pytest.raises(SourceError, match=r"AttributeError.*access rights and options"):
        sm.load_video("zip://a", demux_config=demux_config(storage_options={"fo": 1}))


def test_a_server_that_does_not_answer_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        timeout = aiohttp.ClientTimeout(total=0.2)
        config = demux_config(storage_options={"client_kwargs": {"timeout": timeout}})
        with pytest.raises(SourceError, match="cannot be opened"):
            sm.load_video(f"http://127.0.0.1:{mute.getsockname()[1]}/a.mp4", demux_config=config)


def test_unknown_protocol() -> None:
    with pytest.raises(SourceError, match=r"nope://a\.mp4: cannot be opened: ValueError.*nope"):
        open_input("nope://a.mp4")


def test_ffmpegs_own_network_protocols_stay_off() -> None:
    with pytest.raises(SourceError, match=r"rtsp://127\.0\.0\.1/a: cannot be opened"):
        open_input("rtsp://127.0.0.1/a")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"memory://a.mp4.*pip install.*fsspec") as e:
        open_input("memory://a.mp4")
    assert e.value.name == "fsspec"


def test_backend_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3", name="s3fs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        MissingDependencyError, match=r"s3://b/a.mp4: .*Install s3fs.*pip install$"
    ) as caught:
        open_input("s3://b/a.mp4")
    assert caught.value.name == "s3fs"


def test_nothing_is_left_open_at_exit(server: HTTPFiles) -> None:
    code = (
        "import sys; from spdl_media.inputs import open_input; from spdl_media.config import *\n"
        "with open_input(sys.argv[1]) as source: source.open(demux_config())\n"
        "open_input(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, f"{server.url}/large.mp4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


class _Recorded(io.BytesIO):
    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    def read(self, size: int | None = -1) -> bytes:
        self.reads.append((self.tell(), -1 if size is None else size))
        return super().read(size)


def test_read_ahead_equals_the_file_and_grows(rng: np.random.Generator) -> None:
    data = rng.bytes(3 * MIB)
    file = _Recorded(data)
    ahead = ReadAhead(file)
    pieces = iter(lambda: ahead.read(5000), b"")
    assert b"".join(pieces) == data
    sizes = [size for _, size in file.reads]
    assert sizes[:5] == [65536, 131072, 262144, 524288, 524288]


def test_read_ahead_going_to_and_fro_fetches_nothing_twice(rng: np.random.Generator) -> None:
    data = rng.bytes(8 * MIB)
    file = _Recorded(data)
    ahead = ReadAhead(file)
    for step in range(0, MIB, 8192):
        for place in (0, 6 * MIB):
            assert ahead.seek(place + step) == place + step
            piece = ahead.read(8192)
            assert piece == data[place + step : place + step + len(piece)]
    starts = [start for start, _ in file.reads]
    assert len(starts) == len(set(starts)) <= 12


def test_read_ahead_of_headers_of_small_files_takes_few_requests(rng: np.random.Generator) -> None:
    file = _Recorded(rng.bytes(4 * MIB))
    ahead = ReadAhead(file)
    for start in range(0, 4 * MIB, 20_000):
        ahead.seek(start)
        assert ahead.read(512) == file.getvalue()[start : start + 512]
    assert len(file.reads) < 14


@pytest.mark.parametrize("whence", [0, 1, 2])
def test_read_ahead_seeks_as_files_do(rng: np.random.Generator, whence: int) -> None:
    data = rng.bytes(300_000)
    ahead, plain = ReadAhead(_Recorded(data)), io.BytesIO(data)
    lowest = 0 if whence == 0 else -100_000
    for offset in rng.integers(lowest, 200_000, 50).tolist():
        assert ahead.seek(offset, whence) == max(0, plain.seek(offset, whence))
        size = int(rng.integers(1, 70_000))
        expected = plain.read(size)
        piece = ahead.read(size)
        assert piece == expected[: len(piece)]
        assert bool(piece) == bool(expected)
        plain.seek(ahead.tell())
