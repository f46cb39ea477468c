"""iter_tarfile compared with the tarfile module, from memory, files, URLs and pipes; damaged archives."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import lzma
import os
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import tar, tar_header, tar_member
from effort import LONG, each
from http_server import serve
from hypothesis import given
from hypothesis import strategies as st
from left_behind import descriptors

import spdl_media as sm

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
MEMBERS = {
    "a.txt": b"hello",
    "dir/empty": b"",
    "exactly one block": bytes(512),
    "dir/b.bin": os.urandom(3000),
    "big": bytes(range(256)) * 2000,
    "d" * 90 + "/" + "n" * 80: b"a long path",
}
END = bytes(1024)


def contents(src: Any) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in sm.iter_tarfile(src)}


def of_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    """Return the members that tarfile finds, which are the expected ones."""
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as archive:
        found = [(member, archive.extractfile(member)) for member in archive if member.isreg()]
        return [(member.name, file.read()) for member, file in found if file]


class OneByteAtATime:
    """A stream that returns one byte per call, and has no method except ``read``."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, 7))


@pytest.fixture
def path_of(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "archive.tar"
        path.write_bytes(data)
        return path

    return write


KINDS = [
    "bytes",
    "bytearray",
    "view",
    "array",
    "path",
    "str",
    "file",
    "raw file",
    "BytesIO",
    "slow",
]


@pytest.fixture(params=KINDS)
def as_source(
    request: pytest.FixtureRequest, path_of: Callable[[bytes], Path]
) -> Iterator[Callable[[bytes], Any]]:
    """Return a function that converts bytes to one kind of source."""
    opened: list[Any] = []

    def make(data: bytes) -> Any:
        ways: dict[str, Callable[[], Any]] = {
            "bytes": lambda: data,
            "bytearray": lambda: bytearray(data),
            "view": lambda: memoryview(data),
            "array": lambda: np.frombuffer(data, np.uint8),
            "path": lambda: path_of(data),
            "str": lambda: str(path_of(data)),
            "file": lambda: path_of(data).open("rb"),
            "raw file": lambda: path_of(data).open("rb", buffering=0),
            "BytesIO": lambda: io.BytesIO(data),
            "slow": lambda: OneByteAtATime(data),
        }
        source = ways[request.param]()
        opened.append(source)
        return source

    yield make
    for source in opened:
        if hasattr(source, "close"):
            source.close()


@each("format", FORMATS)
def test_round_trip(format: str, as_source: Callable[[bytes], Any]) -> None:
    members = dict(MEMBERS)
    if format != "ustar":
        members["x" * 300] = b"longer than ustar can say"
        members["größe.txt"] = b"not ASCII"
    data = tar(members, FORMATS[format])
    assert contents(as_source(data)) == members == dict(of_tarfile(data))


@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1),
        st.binary(max_size=2000),
        max_size=5,
    ),
    st.sampled_from(["gnu", "pax"]),
)
def test_any_members_come_back(members: dict[str, bytes], format: str) -> None:
    data = tar(members, FORMATS[format])
    assert list(contents(data).items()) == of_tarfile(data) == list(members.items())


@pytest.mark.parametrize("format", FORMATS)
def test_only_regular_files(format: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[format], encoding="utf-8") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"kind {kind!r}")
            info.type, info.linkname = kind, "l" * 200 if format != "ustar" else "target"
            archive.addfile(info)
        info = tarfile.TarInfo("file")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    assert contents(file.getvalue()) == {"file": b"abc"}


def test_links_with_a_size_have_no_data() -> None:
    data = tar_header(b"link", 4096, b"1") + tar_member(b"file", b"abc") + END
    assert contents(data) == {"file": b"abc"} == dict(of_tarfile(data))


def test_kinds_that_nobody_knows_are_left_out_with_their_data() -> None:
    data = tar_member(b"unknown", bytes(1000), b"Z") + tar_member(b"file", b"abc") + END
    assert contents(data) == {"file": b"abc"}
    assert contents(io.BytesIO(data)) == {"file": b"abc"}


def test_archives_of_the_time_before_ustar() -> None:
    data = tar_member(b"old", b"abc", b"\0") + tar_header(b"folder/", 0, b"\0") + END
    assert contents(data) == {"old": b"abc"} == dict(of_tarfile(data))


def test_sizes_in_binary() -> None:
    data = tar_header(b"big", b"\x80" + (5).to_bytes(11, "big")) + b"hello".ljust(512, b"\0") + END
    assert contents(data) == {"big": b"hello"} == dict(of_tarfile(data))


def test_pax_headers_of_all_and_of_one() -> None:
    def pax(kind: bytes, *records: bytes) -> bytes:
        lines = b"".join(b"%d %b\n" % (len(r) + 2 + len(str(len(r) + 4)), r) for r in records)
        return tar_member(b"pax", lines, kind)

    data = (
        pax(b"g", b"comment=for all")
        + pax(b"x", b"path=renamed", b"size=3")
        + tar_header(b"a", 0) + b"abc".ljust(512, b"\0")
        + tar_member(b"b", b"def")
        + pax(b"g", b"path=everyone")
        + tar_member(b"c", b"ghi")
        + pax(b"x", b"path=own")
        + tar_member(b"d", b"jkl")
        + END
    )  # fmt: skip
    expected = {"renamed": b"abc", "b": b"def", "everyone": b"ghi", "own": b"jkl"}
    assert contents(data) == expected == dict(of_tarfile(data))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../b", "-rf", "caf\udce9"])
def test_names_are_text_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tar_member(name.encode("utf-8", "surrogateescape"), b"abc") + END
    assert contents(data) == {name: b"abc"}
    assert list(tmp_path.iterdir()) == []


def test_members_of_memory_are_views_of_it() -> None:
    source = bytearray(tar({"a": b"abc"}))
    [(_, view)] = sm.iter_tarfile(source)
    assert isinstance(view, memoryview)
    view[0] = ord("x")
    assert b"xbc" in source
    [(_, view)] = sm.iter_tarfile(bytes(source))
    assert isinstance(view, memoryview)
    assert view.readonly


def test_members_of_streams_are_bytes(path_of: Callable[[bytes], Path]) -> None:
    data = tar({"a": b"abc", "b": bytes(600_000)})
    for source in (io.BytesIO(data), path_of(data)):
        assert [type(content) for _, content in sm.iter_tarfile(source)] == [bytes, bytes]


def test_a_stream_is_read_from_where_it_is() -> None:
    file = io.BytesIO(b"something before" + tar({"a": b"abc"}))
    file.seek(16)
    assert contents(file) == {"a": b"abc"}


def test_an_archive_in_an_archive() -> None:
    outer = tar({"inner.tar": tar(MEMBERS)})
    with tarfile.open(fileobj=io.BytesIO(outer), encoding="utf-8") as archive:
        inner = archive.extractfile("inner.tar")  # a BufferedReader over a file without fileno
        assert contents(inner) == MEMBERS


@pytest.mark.parametrize("error", [OSError, ValueError, AttributeError, None])
def test_a_buffered_stream_without_a_descriptor(error: type[Exception] | None) -> None:
    class Raw(io.BytesIO):
        def fileno(self) -> int:
            if error is not None:
                raise error("no descriptor")
            return None  # type: ignore[return-value]  # wrong on purpose

    reader = io.BufferedReader(Raw(tar(MEMBERS)))  # type: ignore[arg-type]  # it wants a RawIOBase
    assert contents(reader) == MEMBERS


def test_a_pipe_is_asked_for_no_more_than_must_be_there() -> None:
    """Each member must arrive before the next one is written: an additional read would block forever."""
    reading, writing = os.pipe()
    taken = threading.Semaphore(1)
    members = [tar_member(b"%d" % k, b"x" * 700 * k) for k in range(5)]

    def write() -> None:
        with open(writing, "wb", buffering=0) as file:
            for member in members:
                assert taken.acquire(timeout=100)
                file.write(member)
            assert taken.acquire(timeout=100)
            file.write(END)

    writer = threading.Thread(target=write)
    writer.start()
    with open(reading, "rb", buffering=0) as file:
        for index, (name, data) in enumerate(sm.iter_tarfile(file)):
            assert (name, len(data)) == (str(index), 700 * index)
            taken.release()
    writer.join()
    assert index == 4


def test_a_named_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = tar(MEMBERS)
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    assert contents(path) == MEMBERS
    writer.join()


def test_urls() -> None:
    fsspec = pytest.importorskip("fsspec")
    data = tar(MEMBERS)
    fsspec.filesystem("memory").pipe("/tars/a.tar", data)
    assert contents("memory://tars/a.tar") == MEMBERS
    fsspec.filesystem("memory").pipe("/tars/a.tar", data[:100])
    with pytest.raises(sm.ArrayFormatError, match=r"memory://tars/a\.tar: is not a tar archive"):
        contents("memory://tars/a.tar")


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("sizes", [True, False])
def test_urls_of_servers_with_and_without_ranges(ranges: bool, sizes: bool) -> None:
    pytest.importorskip("aiohttp")
    members = {f"{k}.bin": os.urandom(30_000) for k in range(20)}
    with serve({"a.tar": tar(members)}, ranges=ranges, sizes=sizes) as server:
        assert contents(f"{server.url}/a.tar") == members


def test_a_url_whose_server_ends_early() -> None:
    pytest.importorskip("aiohttp")
    data = tar({f"{k}.bin": os.urandom(30_000) for k in range(20)})[:400_000]
    with (
        serve({"a.tar": data}, ranges=False, sizes=True) as server,
        pytest.raises(sm.ArrayFormatError, match=r"member '13.bin': is cut short") as caught,
    ):
        contents(f"{server.url}/a.tar")
    assert caught.value.source == f"{server.url}/a.tar"


def test_a_file_is_closed_when_the_iteration_is(path_of: Callable[[bytes], Path]) -> None:
    path = path_of(tar(MEMBERS))
    gc.collect()
    before = descriptors()
    members = sm.iter_tarfile(path)
    next(members)
    members.close()
    assert descriptors() <= before


def test_what_follows_the_end_is_left_out() -> None:
    data = tar({"a": b"abc"}) + tar({"b": b"def"})
    assert contents(data) == {"a": b"abc"} == dict(of_tarfile(data))
    stream = io.BytesIO(data)
    assert contents(stream) == {"a": b"abc"}
    assert stream.tell() == 2 * 512 + 512  # one member and one block of zeros


@pytest.mark.parametrize("blocks", [1, 2, 20])
def test_an_archive_without_members(blocks: int) -> None:
    assert contents(bytes(512 * blocks)) == {}


CUT = tar_member(b"first", b"x" * 700) + tar_member(b"second", b"y" * 10) + END


@each(
    "size, match, member",
    [
        (0, "is not a tar archive: its header is cut short after 0 bytes", None),
        (
            511,
            "is not a tar archive: its header is cut short after 511 bytes; it begins with b'first",
            None,
        ),
        (512, "member 'first': is cut short: 0 of 700 bytes", "first"),
        (1211, "member 'first': is cut short: 699 of 700 bytes", "first"),
        (
            1212,
            "member 'first': the header behind it is missing: .* cut short, without an end mark",
            "first",
        ),
        (
            1536,
            "member 'first': the header behind it is missing: .* cut short, without an end mark",
            "first",
        ),
        (1540, "member 'first': the header behind it is cut short after 4 bytes", "first"),
        (2048, "member 'second': is cut short: 0 of 10 bytes", "second"),
        (
            2560,
            "member 'second': the header behind it is missing: the archive is cut short",
            "second",
        ),
    ],
)
def test_every_cut_is_noticed_and_named(
    size: int, match: str, member: str | None, as_source: Callable[[bytes], Any]
) -> None:
    with pytest.raises(sm.ArrayFormatError, match=match) as caught:
        contents(as_source(CUT[:size]))
    assert caught.value.member == member
    assert caught.value.offset is not None
    assert caught.value.source


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_no_cut_goes_unnoticed(format: str) -> None:
    data = tar({"first": b"x" * 700, "n" * 150: b"long", "größe": b"y"}, FORMATS[format])
    whole = (
        len(data.rstrip(b"\0")) // 512 * 512 + 2 * 512
    )  # the last member, and one block of zeros
    assert len(contents(data[:whole])) == 3
    near = (512 * block + k for block in range(whole // 512) for k in (-1, 0, 1))
    sizes = range(whole) if LONG else {*range(0, whole, 7), *near} - {-1}
    for size in sizes:
        for source in (data[:size], io.BytesIO(data[:size])):
            with pytest.raises(sm.ArrayFormatError, match=r"cut short|not a tar archive"):
                contents(source)


@pytest.mark.parametrize("format", ["gnu", "pax"])
@pytest.mark.parametrize("first", [{}, {"whole.txt": b"ab"}])
def test_a_cut_in_what_stands_before_a_member_is_not_in_the_one_before(
    format: str, first: dict[str, bytes]
) -> None:
    place = len(first) * 1024
    data = tar({**first, "n" * 150: b"long"}, FORMATS[format])
    size = int(data[place + 124 : place + 135], 8)
    behind = "member 'whole.txt': the header behind it " if first else "a header "
    for there in range(size):
        match = f"{behind}is cut short: {there} of {size} bytes of a pax header or long name"
        with pytest.raises(sm.ArrayFormatError, match=match) as caught:
            contents(data[: place + 512 + there])
        assert (caught.value.member, caught.value.offset) == (next(iter(first), None), place)
    match = behind + "is missing: the archive is cut short, without an end mark"
    with pytest.raises(sm.ArrayFormatError, match=match):
        contents(data[: place + 512 + -(-size // 512) * 512])


@pytest.mark.parametrize(("packer", "name"), [(gzip, "gzip"), (bz2, "bz2"), (lzma, "lzma")])
def test_packed_archives_of_less_than_a_header(packer: Any, name: str) -> None:
    data = packer.compress(tar({"a": b"abc"}))
    assert len(data) < 512
    for source in (data, io.BytesIO(data)):
        with pytest.raises(sm.ArrayFormatError, match=f"is packed by {name}; unpack it"):
            contents(source)


def test_one_block_of_zeros_ends_an_archive() -> None:
    assert list(contents(CUT[:-512])) == ["first", "second"]


def with_field(start: int, value: bytes, kind: bytes = b"0") -> bytes:
    """Make a header with an overwritten field and a correct checksum."""
    block = bytearray(tar_header(b"name", 0, kind))
    block[start : start + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


GOOD = tar_member(b"good", b"abc")


@each("data, match", [
        (b"garbage" * 1000, "is not a tar archive: its header has a wrong.*; it begins with b'garbage"),
        (gzip.compress(CUT) + END, r"is packed by gzip; unpack it on the way in, as with gzip.open"),
        (bz2.compress(CUT) + END, "is packed by bz2"),
        (lzma.compress(CUT) + END, "is packed by lzma"),
        (GOOD + b"garbage" * 1000, "member 'good': the header behind it has a wrong checksum, so it"),
        (GOOD + CUT[:100] + b"?" + CUT[101:], "has a wrong checksum"),
        (GOOD + with_field(124, b"00000000009\0"), "where a number of octal digits is due"),
        (GOOD + with_field(124, b"-0000000001\0"), "where a number of octal digits is due"),
        (GOOD + with_field(124, b"\xff" * 12), "where a number of octal digits is due"),
        (GOOD + with_field(124, b"77777777777\0"), "0 of 8589934591 bytes are there"),
        (GOOD + with_field(124, b"\x80" + b"\xff" * 11), "0 of 309485009821345068724781055 bytes"),
        (GOOD + with_field(124, b"\x80" + b"\xff" * 11, b"Z"), "0 of 309485009821345068724781055 "),
        (GOOD + with_field(124, b"77777777777\0", b"L"), "a pax header or long name of 8589934591"),
        (GOOD + with_field(124, b"00000000777\0", b"x"), "0 of 511 bytes of a pax header or long"),
        (with_field(124, b"-0000000001\0"), "its header has b'-0000000001.x00' where a number of octal"),
        (GOOD + with_field(156, b"S"), "member 'name': is a sparse file"),
        (GOOD + with_field(156, b"M"), "member 'name': goes on from another volume"),
        (GOOD + tar_member(b"p", b"13 path=long\n", b"x") + END,
         "member 'good': the pax header or long name behind it belongs to no member"),
        (tar_member(b"p", b"long", b"L") + END, "pax header or long name belongs to no member"),
        (GOOD + tar_member(b"p", b"x 3", b"x") + END, "pax header that cannot be read from b'x 3'"),
        (GOOD + tar_member(b"p", b"0 a=b\n", b"x") + END, "pax header that cannot be read"),
        (GOOD + tar_member(b"p", b"6 a=b", b"x") + END, "pax header that cannot be read"),
        (GOOD + tar_member(b"p", b"99 a=b\n", b"x") + END, "pax header that cannot be read"),
        (GOOD + tar_member(b"p", b"6 abc\n", b"x") + END, "pax header that cannot be read"),
        (GOOD + tar_member(b"p", b"10 size=x\n", b"x") + tar_member(b"n", b""), "the size b'x'"),
        (GOOD + tar_member(b"p", b"22 GNU.sparse.major=1\n", b"x") + tar_member(b"n", b""),
         "member 'n': is a sparse file"),
    ])  # fmt: skip
def test_invalid_archives(data: bytes, match: str, as_source: Callable[[bytes], Any]) -> None:
    with pytest.raises(sm.ArrayFormatError, match=match):
        contents(as_source(data))


def test_sparse_files_of_pax() -> None:
    records = b"22 GNU.sparse.major=1\n"
    data = tar_member(b"p", records, b"x") + tar_member(b"n", b"abc") + END
    with pytest.raises(sm.ArrayFormatError, match="member 'n': is a sparse file") as caught:
        contents(data)
    assert caught.value.member == "n"


@pytest.mark.parametrize("key", [b"path", b"GNU.sparse.name"])
def test_sparse_files_are_named_as_they_were(key: bytes) -> None:
    records = b"22 GNU.sparse.major=1\n" + b"%d %b=real\n" % (len(key) + 9, key)
    data = tar_member(b"p", records, b"x") + tar_member(b"GNUSparseFile.0/real", b"abc") + END
    with pytest.raises(sm.ArrayFormatError, match="member 'real': is a sparse file"):
        contents(data)


def test_a_pax_header_for_all_may_be_the_last() -> None:
    assert contents(tar_member(b"p", b"11 path=ab\n", b"g") + END) == {}


@pytest.mark.parametrize(
    "field",
    [b"5\0garbage".ljust(12, b"!"), b"   5 " + b"\0" + b"123456", b"00000005\0\xff\xff\xff"],
)
def test_what_stands_behind_the_end_of_a_number(field: bytes) -> None:
    data = tar_header(b"name", field) + b"12345".ljust(512, b"\0") + END
    assert contents(data) == {"name": b"12345"} == dict(of_tarfile(data))


@pytest.mark.parametrize("source", [5, None, object()])
def test_what_is_not_a_source(source: Any) -> None:
    with pytest.raises(TypeError, match="cannot read media from"):
        contents(source)


def test_text_files() -> None:
    with pytest.raises(TypeError, match="is open in text mode"):
        contents(io.StringIO("abc"))


@pytest.mark.parametrize(
    ("path", "match"), [("missing.tar", "No such file"), ("", "cannot be read"), ("a\0b", "null")]
)
def test_paths_that_cannot_be_read(path: str, match: str) -> None:
    with pytest.raises(sm.SourceError, match=match) as caught:
        contents(path)
    assert caught.value.source == path


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(sm.SourceError, match="Is a directory"):
        contents(tmp_path)


def test_a_stream_that_fails() -> None:
    class Broken(OneByteAtATime):
        def read(self, size: int = -1) -> bytes:
            if self._file.tell() > 600:
                raise OSError("the line is dead")
            return super().read(size)

    with pytest.raises(sm.SourceError, match=r"its read\(\) failed .*the line is dead"):
        contents(Broken(CUT))


def test_a_stream_that_is_interrupted() -> None:
    class Interrupted(OneByteAtATime):
        def read(self, size: int = -1) -> bytes:
            if self._file.tell() > 600:
                raise KeyboardInterrupt
            return super().read(size)

    with pytest.raises(KeyboardInterrupt):
        contents(Interrupted(CUT))


@pytest.mark.parametrize("as_given", ["path", "memory"])
def test_a_size_that_is_not_there_takes_no_memory(
    as_given: str, path_of: Callable[[bytes], Path]
) -> None:
    data = with_field(124, b"\x80" + (8 << 40).to_bytes(11, "big")) + bytes(8 << 20)
    source = data if as_given == "memory" else path_of(data)
    tracemalloc.start()
    try:
        with pytest.raises(sm.ArrayFormatError, match="8388608 of 8796093022208 bytes are there"):
            contents(source)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_is_asked_for_pieces_whatever_the_header_says() -> None:
    class Recorder(OneByteAtATime):
        largest = 0

        def read(self, size: int = -1) -> bytes:
            self.largest = max(self.largest, size)
            return super().read(size)

    stream = Recorder(GOOD + with_field(124, b"77777777777\0") + bytes(2000))
    with pytest.raises(sm.ArrayFormatError, match="2000 of 8589934591 bytes are there"):
        contents(stream)
    assert stream.largest <= 16 * 1024 * 1024


def test_large_members_in_pieces() -> None:
    members = {**MEMBERS, "large": bytes(range(256)) * 150_000}  # three pieces
    assert contents(io.BytesIO(tar(members))) == members
