"""All kinds of sources give the same packets, are left as they were, and fail with a reason."""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import io
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pytest
from effort import each
from left_behind import descriptors

import spdl_media as sm
from spdl_media.config import DemuxConfig, demux_config
from spdl_media.errors import DemuxError, SourceError
from spdl_media.inputs import Input, open_input
from spdl_media.testing import make_audio

DEFAULT = demux_config()


def encode(out: Any, format: str, codec: str = "ffv1", **options: str) -> None:
    """Encode eight gray frames, each with its own number, and an optional title."""
    title = options.pop("title", "")
    with av.open(out, "w", format=format, options=options) as container:
        container.metadata["title"] = title
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = 160, 120
        stream.pix_fmt = "gray" if codec == "ffv1" else "yuv420p"
        rng = np.random.default_rng(1)
        for _ in range(8):
            picture = rng.integers(0, 256, (120, 160), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="gray")))
        container.mux(stream.encode(None))


def encoded(format: str, codec: str = "ffv1", **options: str) -> bytes:
    out = io.BytesIO()
    encode(out, format, codec, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def clip() -> bytes:
    return encoded("matroska")


@pytest.fixture(scope="module")
def mp4() -> bytes:
    """Make an MP4 with its index at the end."""
    return encoded("mp4", "mpeg4")


@pytest.fixture(scope="module")
def faststart_mp4(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("inputs") / "faststart.mp4"
    encode(str(path), "mp4", "mpeg4", movflags="faststart")
    return path.read_bytes()


def packets(source: Input, config: DemuxConfig = DEFAULT) -> list[bytes]:
    return [bytes(packet) for packet in source.open(config).demux() if packet.size]


def expected(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data)) as container:
        return [bytes(packet) for packet in container.demux() if packet.size]


class Stream:
    """A file object that cannot seek, and returns at most ``limit`` bytes at a time."""

    def __init__(self, data: bytes, limit: int = 1 << 30) -> None:
        self._file = io.BytesIO(data)
        self._limit = limit

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, self._limit))


class Broken(io.BytesIO):
    """A file object whose ``read`` or ``seek`` raises from its ``count``-th call on."""

    def __init__(self, data: bytes, error: BaseException, method: str, count: int) -> None:
        super().__init__(data)
        self.error, self.method, self.count = error, method, count

    def _fail(self, method: str) -> None:
        if method == self.method:
            self.count -= 1
            if self.count < 0:
                raise self.error

    def read(self, size: int | None = -1) -> bytes:
        self._fail("read")
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._fail("seek")
        return super().seek(offset, whence)


def _as_mmap(data: bytes) -> mmap.mmap:
    mapped = mmap.mmap(-1, len(data))
    mapped.write(data)
    mapped.seek(3)
    return mapped


BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "numpy": lambda data: np.frombuffer(data, np.uint8),
    "array": lambda data: array.array("B", data),
    "ctypes": lambda data: (ctypes.c_ubyte * len(data)).from_buffer_copy(data),
    "rows": lambda data: memoryview(data[: len(data) // 2 * 2]).cast("B", (len(data) // 2, 2)),
    "mmap": _as_mmap,
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_memory(clip: bytes, kind: str) -> None:
    clip = clip + b"\0" * (len(clip) % 2)
    with open_input(BUFFERS[kind](clip)) as source:
        assert source.name == f"bytes of length {len(clip)}"
        assert source.seekable
        assert source.head(20) == clip[:20]
        assert packets(source) == expected(clip)
        assert packets(source) == expected(clip)
        assert bytes(source.read_all()) == clip


def test_bytes_are_given_back_as_they_are(clip: bytes) -> None:
    with open_input(clip) as source:
        assert source.read_all() is clip


@pytest.mark.parametrize("kind", ["bytearray", "numpy", "array"])
def test_memory_is_shared_not_copied(clip: bytes, kind: str) -> None:
    data = bytearray(clip)
    src = np.frombuffer(data, np.uint8) if kind == "numpy" else data
    src = array.array("H", bytes(clip[: len(clip) // 2 * 2])) if kind == "array" else src
    with open_input(src) as source:
        view = source.read_all()
        assert isinstance(view, memoryview)
        assert (view.format, view.ndim, view.nbytes) == ("B", 1, len(memoryview(src).cast("B")))
        assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(src, np.uint8))


def test_tensor(clip: bytes) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.frombuffer(bytearray(clip), dtype=torch.uint8)
    with open_input(tensor) as source:
        assert packets(source) == expected(clip)
        view = np.frombuffer(source.read_all(), np.uint8)
        assert view.ctypes.data == tensor.data_ptr()
    with pytest.raises(TypeError, match=r"1-D uint8, this is a Tensor of float32"):
        open_input(torch.zeros(4))
    with pytest.raises(ValueError, match="not contiguous; copy it with"):
        open_input(tensor[::2])


def test_a_bytearray_can_be_resized_after_close(clip: bytes) -> None:
    data = bytearray(clip)
    with open_input(data) as source:
        container = source.open(DEFAULT)
        next(container.demux())
        with pytest.raises(BufferError, match=r"re-?size"):
            data.append(0)
    data.append(0)
    assert len(data) == len(clip) + 1


def test_memory_held_by_another_survives_close(clip: bytes) -> None:
    with open_input(bytearray(clip)) as source:
        view = source.read_all()
    assert bytes(view) == clip


class _Array(np.ndarray[Any, Any]):
    """An array that supports weak references."""


def test_nothing_keeps_the_source_alive_after_close(clip: bytes) -> None:
    array = np.frombuffer(clip, np.uint8).view(_Array)
    file = Broken(clip, RuntimeError(), "", 0)
    alive = weakref.ref(array), weakref.ref(file)
    inputs = [open_input(array), open_input(file)]
    containers = [source.open(DEFAULT) for source in inputs]
    for source in inputs:
        source.close()
    del array, file
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    del containers


class _OnGPU:
    __cuda_array_interface__: ClassVar[dict[str, object]] = {}


class _Picture:
    """Has what Pillow's images have, which Hugging Face's datasets give instead of bytes."""

    __array_interface__: ClassVar[dict[str, object]] = {}


class _Upload:
    """A file object of web servers, such as FastAPI's."""

    async def read(self, size: int = -1) -> bytes:
        return b""

    async def seek(self, offset: int) -> None:
        pass


@each(
    "src, error, message",
    [
        (
            np.zeros(4, np.int16),
            TypeError,
            r"1-D uint8, this is a ndarray of int16 with shape \(4,\)",
        ),
        (np.zeros((2, 2), np.uint8), ValueError, r"1-D uint8, .* with shape \(2, 2\)"),
        (np.zeros(8, np.uint8)[::2], ValueError, "not contiguous; copy it with numpy.ascont"),
        (memoryview(bytes(8))[::2], ValueError, "memoryview is not C-contiguous .*bytes"),
        (_OnGPU(), TypeError, r"_OnGPU is in the memory of a GPU; copy it with .cpu\(\)"),
        (io.StringIO("text"), TypeError, r"text mode. Open it in binary mode \('rb'\)"),
        (42, TypeError, "cannot read media from int. A source is a path, a URL, bytes"),
        (None, TypeError, "cannot read media from NoneType"),
        (_Picture(), TypeError, r"_Picture\. .* decoded already.*Image\(decode=False\)"),
        (_Upload(), TypeError, r"_Upload object: its read\(\) is asynchronous\. .*await"),
        (("a.mp4", 3), TypeError, r"from tuple. .* source alone, or use ImageRecipe\(field=\)"),
    ],
)
def test_what_is_not_a_source(src: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_input(src)


@pytest.mark.parametrize("mode", ["r", "wb"])
def test_files_open_in_the_wrong_mode(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "clip.mkv"
    path.touch()
    with path.open(mode) as file, pytest.raises(TypeError, match="'rb'"):
        open_input(file)


def test_closed_file(tmp_path: Path) -> None:
    (tmp_path / "clip.mkv").touch()
    with (tmp_path / "clip.mkv").open("rb") as file:
        pass
    with pytest.raises(ValueError, match=r"BufferedReader '.*clip.mkv' is closed"):
        open_input(file)


@pytest.mark.parametrize("name", ["clip.mkv", "a:b.mkv", "http:c.mkv", "100%03d.mkv", "ä [1]*.mkv"])
@pytest.mark.parametrize("kind", [str, Path, "file://{}".format])
def test_path(tmp_path: Path, clip: bytes, name: str, kind: Callable[[Path], Any]) -> None:
    path = tmp_path / name
    path.write_bytes(clip)
    with open_input(kind(path)) as source:
        assert source.name == str(path)
        assert source.seekable
        assert source.head(9) == clip[:9]
        assert packets(source) == expected(clip)
        assert source.read_all() == clip


def test_relative_path_with_a_colon(
    tmp_path: Path, clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipe:0").write_bytes(clip)
    with open_input("pipe:0") as source:
        assert packets(source) == expected(clip)


def test_a_path_is_not_a_pattern(tmp_path: Path) -> None:
    pictures = [_picture(value) for value in (10, 200)]
    for name, data in zip(("img%03d.png", "img001.png"), pictures, strict=True):
        (tmp_path / name).write_bytes(data)
    with open_input(tmp_path / "img%03d.png") as source:
        assert packets(source) == [pictures[0]]
    config = demux_config(format="image2", format_options={"pattern_type": "sequence"})
    with open_input(tmp_path / "img%03d.png") as source:
        assert packets(source, config) == [pictures[1]]


def _picture(value: int) -> bytes:
    encoder = av.CodecContext.create("png", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 8, 8, "gray", 1
    frame = av.VideoFrame.from_ndarray(np.full((8, 8), value, np.uint8), format="gray")
    return bytes(encoder.encode(frame)[0])


@pytest.mark.parametrize("load", [sm.demux_image, sm.load_image, sm.probe])
def test_an_image_on_disk_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], object]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"opened once more: {args}")

    path = tmp_path / "picture.png"
    path.write_bytes(_picture(7))
    opened: list[int] = []
    system_open = os.open
    monkeypatch.setattr(io, "FileIO", refuse)
    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "open", lambda *args: opened.append(system_open(*args)) or opened[-1])
    load(path)
    monkeypatch.undo()
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_path_is_closed_with_its_input(tmp_path: Path, clip: bytes) -> None:
    path = tmp_path / "clip.mkv"
    path.write_bytes(clip)
    gc.collect()
    before = descriptors()
    with open_input(path) as source:
        assert source.head(4) == clip[:4]
        assert source.missing_end() is None
        assert packets(source) == expected(clip)
        assert source.read_all() == clip
    assert descriptors() <= before


def test_named_pipe(tmp_path: Path, clip: bytes) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(clip,))
    writer.start()
    with open_input(path) as source:
        assert not source.seekable
        assert source.head(10) == clip[:10]
        assert packets(source) == expected(clip)
    writer.join()


@pytest.mark.parametrize("position", [0, 7, 10_000_000])
def test_a_seekable_file_is_left_where_it_was(clip: bytes, position: int) -> None:
    file = io.BytesIO(clip)
    file.seek(position)
    with open_input(file) as source:
        assert source.name == "BytesIO object"
        assert source.head(10) == clip[:10]
        assert packets(source) == expected(clip)
        assert source.head(30) == clip[:30]
        assert source.read_all() == clip
        assert packets(source) == expected(clip)
    assert file.tell() == position
    assert not file.closed


def test_a_file_is_left_where_it_was_after_errors() -> None:
    file = io.BytesIO(b"no media at all " * 100)
    file.seek(5)
    with pytest.raises(DemuxError, match="BytesIO object: "), open_input(file) as source:
        source.open(DEFAULT)
    assert file.tell() == 5


def test_a_file_that_its_owner_has_closed_can_be_closed(clip: bytes) -> None:
    file = io.BytesIO(clip)
    source = open_input(file)
    file.close()
    source.close()
    source.close()


@each("limit", [1 << 30, 100, 7])
@each("format", ["matroska", "mpegts", "nut"])
def test_stream(format: str, limit: int) -> None:
    data = encoded(format, "mpeg4" if format == "mpegts" else "ffv1")
    with open_input(Stream(data, limit)) as source:
        assert not source.seekable
        assert source.head(100) == data[:100]
        assert source.head(10) == data[:10]
        assert packets(source) == expected(data)
        with pytest.raises(ValueError, match="cannot seek, so it can be opened only once"):
            source.open(DEFAULT)
        with pytest.raises(ValueError, match=r"cannot seek\. Ask before opening it"):
            source.head(len(data))


def test_stream_read_as_a_whole(clip: bytes) -> None:
    with open_input(Stream(clip)) as source:
        assert source.head(100) == clip[:100]
        assert source.read_all() == clip
        with pytest.raises(ValueError, match="it cannot seek, and some of it has been read"):
            source.read_all()


def test_a_file_object_whose_seek_only_fails_is_read_forward(clip: bytes) -> None:
    """Wrappers of pipes have all methods, but need not have seekable(), which tells that they fail."""

    class Pipe(Stream):
        def tell(self) -> int:
            return self._file.tell()

        def seek(self, *_: int) -> int:
            raise io.UnsupportedOperation("seek")

    with open_input(Pipe(clip)) as source:
        assert not source.seekable
        assert packets(source) == expected(clip)
    lost = type("Lost", (Pipe,), {"tell": lambda _: int("lost")})
    with pytest.raises(
        SourceError, match=r"<?Lost object>?: its tell\(\) failed: ValueError: inval"
    ):
        open_input(lost(clip))


def test_read_and_seek_are_all_that_a_file_object_needs(mp4: bytes) -> None:
    class ReadAndSeek:
        def __init__(self, file: io.BytesIO) -> None:
            self.read, self.seek = file.read, file.seek

    file = io.BytesIO(mp4)
    file.seek(7)
    # The index is at the end, so FFmpeg has to seek.
    with open_input(ReadAndSeek(file)) as source:
        assert packets(source) == expected(mp4)
    assert file.tell() == 7


def test_short_reads_of_a_seekable_file(faststart_mp4: bytes) -> None:
    class Short(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(50 if size is None or size < 0 else min(size, 50))

    with open_input(Short(faststart_mp4)) as source:
        assert source.head(1000) == faststart_mp4[:1000]
        assert source.read_all() == faststart_mp4
        assert packets(source) == expected(faststart_mp4)


def test_a_whole_file_object_is_not_sought_in_again(clip: bytes) -> None:
    """A compressed one would be decompressed once more."""
    places = []

    class Sought(io.BytesIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            places.append((offset, whence))
            return super().seek(offset, whence)

    with open_input(Sought(clip)) as source:
        assert source.read_all() == clip
    assert set(places) == {(0, io.SEEK_SET), (0, io.SEEK_END)}


def test_a_stream_is_not_read_after_its_end() -> None:
    """A terminal or named pipe would wait for more, and aiohttp's stream warns of an endless loop."""
    ends = []

    class Ending(Stream):
        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            ends.extend([len(data)] * (not data))
            return data

    sm.load_audio(Ending(make_audio(np.zeros((10, 1), np.int16), 8000)))
    assert len(ends) == 1


def test_file_that_gives_other_buffers(clip: bytes) -> None:
    class Views:
        def __init__(self) -> None:
            self.left = memoryview(bytearray(clip))

        def read(self, size: int = -1) -> memoryview:
            piece, self.left = self.left[:size], self.left[size:]
            return piece

    with open_input(Views()) as source:
        assert packets(source) == expected(clip)


def test_mp4_with_its_index_at_the_end(mp4: bytes, faststart_mp4: bytes) -> None:
    with open_input(Stream(faststart_mp4, 1000)) as source:
        assert packets(source) == expected(mp4)
    with open_input(io.BytesIO(mp4)) as source:
        assert packets(source) == expected(mp4)
    message = r"pipe: this MP4 has its index \(moov\) at the end.*as a path.*-movflags \+faststart"
    with (
        open_input(Stream(mp4), name="pipe") as source,
        pytest.raises(DemuxError, match=message),
    ):
        source.open(DEFAULT)


@each(
    "head, is_last",
    [
        (b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x08mdat", True),
        (b"\0\0\0\x08wide\0\0\0\0mdat", True),
        (b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x08moov\0\0\0\0mdat", False),
        (b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x08moof\0\0\0\0mdat", False),
        (b"\0\0\0\x10ftypavif\0\0\0\0\0\0\0\x08meta\0\0\0\0mdat", False),
        (b"\0\0\0\0ftyp" * 9, False),
        (b"\0\0\0\x07free" * 9, False),
        (b"RIFF\0\0\0\0WAVE", False),
    ],
)
def test_an_index_at_the_end_is_told_from_the_first_boxes(head: bytes, is_last: bool) -> None:
    text = ""
    with open_input(Stream(head)) as source:
        try:
            source.open(DemuxConfig())
        except DemuxError as error:
            text = str(error)
    assert ("index (moov) at the end" in text) is is_last


@pytest.mark.parametrize("method", ["read", "seek"])
def test_a_file_object_that_fails_while_it_is_opened(
    mp4: bytes, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for count in range(3):
        error = RuntimeError("the tape tore")
        file = Broken(mp4, error, method, count)
        with (
            open_input(file) as source,
            pytest.raises(
                SourceError, match=rf"Broken object: its {method}\(\) failed .*tape"
            ) as e,
        ):
            source.open(DEFAULT)
        assert e.value.__cause__ is error
    assert capfd.readouterr() == ("", "")


def test_a_file_object_that_fails_while_it_is_demuxed(
    faststart_mp4: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    error = OSError(errno.EIO, "the disk is gone")
    file = Broken(faststart_mp4, error, "read", 10_000)
    with open_input(file) as source:
        container = source.open(demux_config(buffer_size=1024))
        file.count = 2
        with pytest.raises(SourceError, match=r"read\(\) failed at byte \d+: OSError") as caught:
            list(container.demux())
        assert caught.value.__cause__ is error
        assert caught.value.errno == errno.EIO
        with pytest.raises(SourceError, match="the disk is gone"):
            source.check()
    assert capfd.readouterr() == ("", "")


def test_head_and_read_all_of_a_file_object_that_fails(clip: bytes) -> None:
    with open_input(Broken(clip, OSError("gone"), "read", 0)) as source:
        with pytest.raises(SourceError, match=r"its read\(\) failed at byte 0: OSError: gone"):
            source.head(5)
        with pytest.raises(SourceError, match=r"its read\(\) failed at byte 0: OSError: gone"):
            source.read_all()


def test_interrupt_while_ffmpeg_reads(faststart_mp4: bytes) -> None:
    file = Broken(faststart_mp4, KeyboardInterrupt(), "read", 1)
    with open_input(file) as source, pytest.raises(KeyboardInterrupt):
        source.open(demux_config(buffer_size=1024))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("text", TypeError, r"must give bytes from read\(\), this one gave str.*'rb'"),
        (None, SourceError, "BlockingIOError"),
        (bytes(1 << 20), SourceError, r"ValueError: read\(\d+\) gave 1048576 bytes"),
    ],
)
def test_a_read_that_gives_something_else(given: Any, error: type[Exception], message: str) -> None:
    class Odd:
        def read(self, size: int = -1) -> Any:
            return given

    with open_input(Odd()) as source, pytest.raises(error, match=message):
        source.open(DEFAULT)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run without the rights of root, to whom file modes do not apply."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_url_in_a_path_is_told_what_it_lost() -> None:
    with pytest.raises(SourceError, match=r"a URL is a str with '://', of which pathlib removes"):
        open_input(Path("https://example.org/clip.mp4"))


def test_a_path_from_the_home_folder_needs_its_name() -> None:
    """As for open(). The shell expands it, so the same path works there."""
    with pytest.raises(SourceError, match=r"Check the path; '~' is not expanded: os.path.expand"):
        open_input("~/no/such/clip.mp4")


def test_missing_path() -> None:
    message = "/no/such/clip.mp4: cannot be read: No such file.*Check the path; a relative one"
    with pytest.raises(SourceError, match=message) as caught:
        open_input("/no/such/clip.mp4")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.source == "/no/such/clip.mp4"
    assert isinstance(caught.value.__cause__, OSError)


def test_directory(tmp_path: Path) -> None:
    with (
        open_input(tmp_path) as source,
        pytest.raises(SourceError, match=r"Is a directory\. Give one of the files in it") as caught,
    ):
        source.open(DEFAULT)
    assert caught.value.errno == errno.EISDIR


def test_no_permission(tmp_path: Path, clip: bytes) -> None:
    path = tmp_path / "clip.mkv"
    path.write_bytes(clip)
    path.chmod(0)
    message = r"Permission denied\. Check the owner and mode"
    with as_nobody(), pytest.raises(SourceError, match=message) as caught:
        open_input(path)
    assert caught.value.errno == errno.EACCES


def test_path_with_a_null_byte() -> None:
    with pytest.raises(SourceError, match=r"is not a path: .*embedded null") as caught:
        open_input("a\0b.mp4")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("format", [None, "s16le"])
@pytest.mark.parametrize("kind", ["path", "bytes", "bytearray", "file", "stream"])
def test_empty(tmp_path: Path, kind: str, format: str | None) -> None:
    (tmp_path / "empty").touch()
    sources: dict[str, Any] = {
        "path": tmp_path / "empty",
        "bytes": b"",
        "bytearray": bytearray(),
        "file": io.BytesIO(),
        "stream": Stream(b""),
    }
    with open_input(sources[kind]) as source:
        assert source.head(5) == b""
        with pytest.raises(DemuxError, match=r"the source is empty \(0 bytes\)"):
            source.open(demux_config(format=format))


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_not_media(tmp_path: Path, kind: str) -> None:
    data = b"just some words\n" * 64
    (tmp_path / "words").write_bytes(data)
    message = r"Invalid data found.*demux_config\(format=...\)"
    with (
        open_input(tmp_path / "words" if kind == "path" else data, name="the source") as source,
        pytest.raises(DemuxError, match=f"the source: .*{message}") as caught,
    ):
        source.open(DEFAULT)
    assert isinstance(caught.value.__cause__, av.error.InvalidDataError)
    assert caught.value.source == "the source"


def test_format_given(clip: bytes) -> None:
    with open_input(bytes(8000)) as source:
        container = source.open(demux_config(format="s16le", format_options={"sample_rate": 8000}))
        assert container.streams.audio[0].rate == 8000
        assert container.duration == 500_000


@pytest.mark.parametrize("format", ["matrosk", "webp", "s16le:pcm_s16le", ""])
def test_unknown_format(clip: bytes, format: str) -> None:
    with (
        open_input(clip) as source,
        pytest.raises(ValueError, match=f"cannot read a format named {format!r}"),
    ):
        source.open(DemuxConfig(format=format))


@pytest.mark.parametrize("format", ["matrosca", "mkv"])
def test_unknown_format_is_told_of_close_ones(format: str, clip: bytes) -> None:
    with (
        open_input(clip) as source,
        pytest.raises(ValueError, match=r"Did you mean.*'matroska'"),
    ):
        source.open(DemuxConfig(format=format))


@pytest.mark.parametrize("format", [None, "matroska"])
def test_unknown_format_option(clip: bytes, format: str | None) -> None:
    config = demux_config(format=format, format_options={"sample_rates": 8000})
    with (
        open_input(clip) as source,
        pytest.raises(ValueError, match=r"format 'matroska.*' has no option 'sample_rates'"),
    ):
        source.open(config)


@pytest.mark.parametrize(
    ("format", "name", "value"),
    [
        ("s16le", "sample_rate", "many"),
        ("s16le", "sample_rate", "-5"),
        ("s16le", "probesize", "large"),
        ("rawvideo", "video_size", "big"),
        (None, "fflags", "nonsense"),
    ],
)
@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_bad_value_of_an_option(
    tmp_path: Path, clip: bytes, kind: str, format: str | None, name: str, value: str
) -> None:
    (tmp_path / "clip").write_bytes(clip)
    config = demux_config(format=format, format_options={name: value})
    for _ in range(2):
        with (
            open_input(tmp_path / "clip" if kind == "path" else clip) as source,
            pytest.raises(
                ValueError, match=f"{name!r} does not take the value {value!r}"
            ) as caught,
        ):
            source.open(config)
        assert not isinstance(caught.value, DemuxError)
        assert isinstance(caught.value.__cause__, av.FFmpegError)


def _playlist(path: str) -> bytes:
    lines = ("#EXTM3U", "#EXT-X-TARGETDURATION:10", "#EXTINF:10,", path, "#EXT-X-ENDLIST", "")
    return "\n".join(lines).encode()


SCRIPTS: dict[str, tuple[Callable[[str], bytes], DemuxConfig]] = {
    "ffconcat": (
        lambda path: f"ffconcat version 1.0\nfile '{path}'\n".encode(),
        demux_config(format_options={"safe": 0}),
    ),
    "hls": (_playlist, demux_config(format="hls")),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_script_in_bytes_opens_no_local_file(
    tmp_path: Path, mp4: bytes, script: str, kind: str
) -> None:
    (tmp_path / "private.mp4").write_bytes(mp4)
    write, config = SCRIPTS[script]
    data = write(str(tmp_path / "private.mp4"))
    src = data if kind == "bytes" else io.BytesIO(data)
    with open_input(src) as source, pytest.raises(DemuxError, match="cannot open it as media"):
        source.open(config)
    allowed = {**config.format_options, "protocol_whitelist": "file"}
    with open_input(src) as source:
        container = source.open(demux_config(format=config.format, format_options=allowed))
        assert len(container.streams) == 1


def test_a_script_at_a_path_opens_its_neighbours_only_as_files(tmp_path: Path, mp4: bytes) -> None:
    (tmp_path / "part.mp4").write_bytes(mp4)
    script = tmp_path / "all.ffconcat"
    script.write_text("ffconcat version 1.0\nfile 'part.mp4'\n")
    with open_input(script) as source:
        assert packets(source) == expected(mp4)
    script.write_text("ffconcat version 1.0\nfile 'http://127.0.0.1:9/part.mp4'\n")
    config = demux_config(format_options={"safe": 0})
    with open_input(script) as source, pytest.raises(DemuxError, match="Impossible to open 'http"):
        source.open(config)


def test_metadata_that_is_not_utf_8(clip: bytes) -> None:
    data = encoded("matroska", title="TITLE-OF-CLIP")
    broken = data.replace(b"TITLE-OF-CLIP", b"TITLE-\xff\xfe-CLIP")
    assert broken != data
    with open_input(broken) as source:
        container = source.open(DEFAULT)
        assert container.metadata["title"].startswith("TITLE-")
        assert len([packet for packet in container.demux() if packet.size]) == 8


def test_opening_again_closes_the_container_before(clip: bytes) -> None:
    with open_input(clip) as source:
        first = source.open(DEFAULT)
        second = source.open(DEFAULT)
        with pytest.raises((AssertionError, ValueError)):
            next(first.demux())
        assert len([packet for packet in second.demux() if packet.size]) == 8


def test_closed_input(clip: bytes) -> None:
    source = open_input(io.BytesIO(clip))
    source.close()
    for use in (lambda: source.head(1), source.read_all, lambda: source.open(DEFAULT)):
        with pytest.raises(ValueError, match="BytesIO object: the input is closed"):
            use()


def test_what_is_read_without_waiting_for_a_disk(tmp_path: Path) -> None:
    data = bytes(300_000)
    (tmp_path / "audio").write_bytes(data)
    for src, size, wanted in (
        (data, 0, True),
        (tmp_path / "audio", 300_000, True),
        (tmp_path / "audio", 299_999, False),
        (io.BytesIO(data), 300_000, False),
    ):
        with open_input(src) as source:
            assert source.in_memory(size) == wanted, src
    (tmp_path / "audio").write_bytes(data[:200_000])
    with open_input(tmp_path / "audio") as source:
        assert not source.in_memory(0)
        source.head(4)  # reads a small file whole
        assert source.in_memory(0)


def test_real_media_from_all_kinds(media_dir: Path) -> None:
    for path in sorted((media_dir / "video").glob("*320x240*")):
        data = path.read_bytes()
        with open_input(path) as source:
            wanted = packets(source)
        assert len(wanted) > 10
        for src in (data, bytearray(data), io.BytesIO(data)):
            with open_input(src) as source:
                assert packets(source) == wanted, path
