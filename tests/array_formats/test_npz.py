"""load_npz: arrays by name, uncompressed as views or compressed, and damaged archives."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import npy, npz
from effort import each
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import spdl_media as sm

# Private, to choose the decompression library; users choose it by what they install.
from spdl_media.array_formats import npz as npz_module

ARRAYS = {
    "image": np.arange(3 * 64 * 48, dtype=np.uint8).reshape(3, 64, 48),
    "labels": np.repeat(np.arange(12, dtype=">i4"), 5000).reshape(200, 300),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3)),
    "text": np.array(["a", "größe"]),
    "records": np.zeros(3, [("a", "i4"), ("b", "f8")]),
}


@pytest.fixture(params=["zlib", "isal"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with each decompression library."""
    module = {"zlib": "zlib", "isal": "isal.isal_zlib"}[request.param]
    chosen = pytest.importorskip(module)
    monkeypatch.setattr(npz_module, "_library", lambda: chosen)
    return


def zip_of(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, **kwargs) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def entry_of(data: bytes, index: int = 0) -> int:
    """Return the offset of a member's entry in the directory."""
    offset = data.index(b"PK\x01\x02")
    for _ in range(index):
        offset = data.index(b"PK\x01\x02", offset + 4)
    return offset


def changed(data: bytes, offset: int, format: str, *values: int) -> bytes:
    buffer = bytearray(data)
    struct.pack_into(format, buffer, offset, *values)
    return bytes(buffer)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("compressed", [False, True])
def test_round_trip(compressed: bool) -> None:
    data = npz(ARRAYS, compressed=compressed)
    loaded = sm.load_npz(data)
    expected = np.load(io.BytesIO(data))
    assert loaded.files == expected.files
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(loaded[name], expected[name])
        assert loaded[name].flags.f_contiguous == np.asarray(array).flags.f_contiguous


@pytest.mark.usefixtures("library")
@given(
    hnp.arrays(st.sampled_from(["u1", "<i4", ">f8"]), hnp.array_shapes(min_side=0, max_side=30)),
    st.booleans(),
)
def test_any_array_comes_back(array: np.ndarray[Any, Any], compressed: bool) -> None:
    loaded = sm.load_npz(npz({"a": array}, compressed=compressed))["a"]
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.usefixtures("library")
@each("size", [1, 2**18 - 128, 2**18, 2**20 - 129, 2**20 - 128, 2**20 + 1, 3_000_000])
@each("what", ["zeros", "noise"])
def test_inflating_across_the_pieces(size: int, what: str, rng: np.random.Generator) -> None:
    noise = rng.integers(0, 256, size, np.uint8)
    array = noise if what == "noise" else noise * np.uint8(0)
    np.testing.assert_array_equal(sm.load_npz(npz({"a": array}, compressed=True))["a"], array)


def test_it_is_a_mapping() -> None:
    loaded = sm.load_npz(npz({"a": np.arange(3), "b": np.arange(4)}))
    assert isinstance(loaded, Mapping)
    assert len(loaded) == 2
    assert list(loaded) == list(loaded.keys()) == loaded.files == ["a", "b"]
    assert [len(value) for value in loaded.values()] == [3, 4]
    assert {name: len(value) for name, value in loaded.items()} == {"a": 3, "b": 4}
    assert "a" in loaded
    assert "a.npy" in loaded
    assert "c" not in loaded
    assert 5 not in loaded
    assert len(loaded["b.npy"]) == 4
    assert loaded.get("c") is None
    assert repr(loaded) == "<NpzFile: a, b>"
    with pytest.raises(KeyError, match="'c'; there are 'a', 'b'"):
        loaded["c"]
    with pytest.raises(KeyError, match="5; there are 'a', 'b'"):
        loaded[5]  # type: ignore[index]
    assert loaded.get(5) is None  # type: ignore[call-overload]


def test_names_that_end_in_npy_are_told_apart() -> None:
    loaded = sm.load_npz(npz({"a": np.arange(1), "a.npy": np.arange(2)}))
    assert {name: len(value) for name, value in loaded.items()} == {"a": 1, "a.npy": 2}
    members = {"a": npy(np.arange(1)), "a.npy": npy(np.arange(2)), "b.npy": npy(np.arange(3))}
    loaded = sm.load_npz(zip_of(members))
    assert {name: len(value) for name, value in loaded.items()} == {"a": 1, "a.npy": 2, "b.npy": 3}
    assert "b" in loaded
    assert len(loaded["b"]) == 3


def test_an_empty_archive() -> None:
    loaded = sm.load_npz(zip_of({}))
    assert len(loaded) == 0
    assert repr(loaded) == "<NpzFile: empty>"
    with pytest.raises(KeyError, match="there are none"):
        loaded["a"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_stored_members_are_views(kind: Any) -> None:
    source = kind(npz({"a": np.arange(1000)}))
    array = sm.load_npz(source)["a"]
    assert array.flags.writeable is (kind is bytearray)
    assert np.shares_memory(array, np.frombuffer(source, np.uint8))


def test_deflated_members_are_new_and_writable() -> None:
    loaded = sm.load_npz(npz({"a": np.arange(1000)}, compressed=True))
    first, second = loaded["a"], loaded["a"]
    first[0] = 99
    assert second[0] == 0


def test_names_are_text_and_nothing_else() -> None:
    loaded = sm.load_npz(zip_of({"../../etc/passwd.npy": npy(np.arange(3))}))
    assert loaded.files == ["../../etc/passwd"]
    np.testing.assert_array_equal(loaded["../../etc/passwd"], np.arange(3))


def test_names_that_are_not_ascii() -> None:
    data = zip_of({"größe.npy": npy(np.arange(3)), "b.npy": npy(np.arange(4))})
    assert sm.load_npz(data).files == ["größe", "b"]
    in_cp437 = data.replace("größe".encode(), b"gr\x94\xe1ess")
    for place in (0, entry_of(data) + 2):
        in_cp437 = changed(in_cp437, place + 6, "<H", 0)
    loaded = sm.load_npz(bytearray(in_cp437))
    np.testing.assert_array_equal(loaded["größess"], np.arange(3))
    assert len(loaded["b"]) == 4


def test_zip64_and_streamed_archives() -> None:
    class NoSeek(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += data
            return len(data)

    array = np.arange(100)
    file = NoSeek()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as member,
    ):
        member.write(npy(array))
    data = bytes(file.data)
    np.testing.assert_array_equal(sm.load_npz(data)["a"], array)
    np.testing.assert_array_equal(sm.load_npz(as_zip64(data))["a"], array)


def as_zip64(data: bytes) -> bytes:
    """Convert an archive of one member to 64-bit sizes."""
    end = data.rindex(b"PK\x05\x06")
    entry = data.index(b"PK\x01\x02")
    fields = list(struct.unpack_from("<4s6H3L5H2L", data, entry))
    name = data[entry + 46 : entry + 46 + fields[10]]
    sizes = struct.pack("<HHQQQ", 1, 24, fields[9], fields[8], fields[16])
    other = struct.pack("<HH4s", 0x9999, 4, b"else")
    fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
    fields[11] = len(other) + len(sizes)
    directory = struct.pack("<4s6H3L5H2L", *fields) + name + other + sizes
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(directory), entry)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, entry + len(directory), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, *[0xFFFFFFFF] * 2, 0)
    assert data[end:].startswith(b"PK\x05\x06")
    return data[:entry] + directory + end64 + locator + last


def test_an_archive_with_a_comment() -> None:
    data = zip_of({"a.npy": npy(np.arange(3))})
    data = data[:-2] + struct.pack("<H", 7) + b"comment"
    np.testing.assert_array_equal(sm.load_npz(data)["a"], np.arange(3))


# A ZIP bomb: a megabyte of zeros in a kilobyte.
BOMB = npz({"small": np.zeros(10), "zeros": np.zeros(1_000_000, np.uint8)}, compressed=True)


def test_the_limit_counts_what_is_deflated() -> None:
    total = 1_000_128 + 128 + 80
    np.testing.assert_array_equal(
        sm.load_npz(BOMB, max_uncompressed_bytes=total)["zeros"], np.zeros(1_000_000)
    )
    with pytest.raises(
        sm.ArrayFormatError, match=f"are {total} bytes, and {total - 1} are"
    ) as caught:
        sm.load_npz(BOMB, max_uncompressed_bytes=total - 1)
    assert caught.value.member == "zeros.npy"
    stored = npz({"a": np.zeros(1000)})
    assert len(sm.load_npz(stored, max_uncompressed_bytes=0)["a"]) == 1000
    with pytest.raises(ValueError, match="must be at least 0 bytes, not -1"):
        sm.load_npz(stored, max_uncompressed_bytes=-1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("size", "match"),
    [
        (1_000_127, "hold more than the 1000127 bytes stated"),
        (1_000_129, "end after 1000128 of 1000129 bytes"),
        (100_000_000, "cannot hold 100000000: the most is"),
        (0, "hold more than the 0 bytes stated"),
    ],
)
def test_a_size_that_is_a_lie(size: int, match: str) -> None:
    data = changed(BOMB, entry_of(BOMB, 1) + 24, "<L", size)
    with pytest.raises(sm.ArrayFormatError, match=match) as caught:
        sm.load_npz(data)["zeros"]
    assert caught.value.member == "zeros.npy"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("compressed", [False, True])
def test_flipped_bits_in_the_data(compressed: bool) -> None:
    data = bytearray(npz({"a": np.arange(5000) * 7919 % 5003}, compressed=compressed))
    data[3000] ^= 4
    with pytest.raises(
        sm.ArrayFormatError, match=r"member 'a.npy': .*(damaged|end|stated)"
    ) as caught:
        sm.load_npz(bytes(data))["a"]
    assert caught.value.offset is not None


@pytest.mark.usefixtures("library")
def test_deflated_data_that_do_not_fill_their_room() -> None:
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = packed.compress(npy(np.arange(9))) + packed.flush()
    raw = npy(np.arange(9))
    for extra, match in ((b"tail", "end before the bytes"), (b"", None)):
        data = one_member(body + extra, len(raw), zlib.crc32(raw))
        if match is None:
            np.testing.assert_array_equal(sm.load_npz(data)["a"], np.arange(9))
            continue
        with pytest.raises(sm.ArrayFormatError, match=match):
            sm.load_npz(data)["a"]
    with pytest.raises(sm.ArrayFormatError, match="end after"):
        sm.load_npz(one_member(body[:-1], len(raw), zlib.crc32(raw)))["a"]


def one_member(body: bytes, size: int, crc: int) -> bytes:
    common = (0, 8, 0, 0, crc, len(body), size, 5)
    local = struct.pack("<4sH4H3L2H", b"PK\x03\x04", 20, *common, 0) + b"a.npy" + body
    directory = struct.pack("<4s2H4H3L5H2L", b"PK\x01\x02", 20, 20, *common, 0, 0, 0, 0, 0, 0)
    directory += b"a.npy"
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(directory), len(local), 0)
    return local + directory + end


PLAIN = zip_of({"a.npy": npy(np.arange(3)), "b.npy": npy(np.arange(4))})
ENTRY, ENTRY_B, END = entry_of(PLAIN), entry_of(PLAIN, 1), PLAIN.rindex(b"PK\x05\x06")


@pytest.mark.parametrize("compressed", [False, True])
def test_every_cut_is_noticed(compressed: bool) -> None:
    data = npz({"a": np.arange(9), "b": np.arange(20) % 2}, compressed=compressed)
    for size in range(len(data)):
        with pytest.raises(sm.ArrayFormatError, match=r"not an npz file|is cut short|runs past"):
            sm.load_npz(data[:size])


DAMAGED = "is cut short, or its directory is damaged"


@each("data, match", [
        (b"", "is not an npz file"),
        (b"RIFF" + PLAIN, "it begins with b'RIFF"),
        (PLAIN[:-1], DAMAGED),
        (PLAIN[: len(PLAIN) // 2], DAMAGED),
        (changed(PLAIN, END + 4, "<H", 1), DAMAGED),
        (changed(PLAIN, END + 8, "<2H", 1, 2), DAMAGED),
        (changed(PLAIN, END + 8, "<2H", 1, 1), f"{DAMAGED}: its 1 members end at"),
        (changed(PLAIN, END + 8, "<2H", 3, 3), f"{DAMAGED}: it ends within a member"),
        (changed(PLAIN, END + 16, "<L", 2**32 - 2), "at 4294967294 are not all before"),
        (changed(PLAIN, END + 12, "<L", 2**32 - 2), "in 4294967294 bytes at .* are not all before"),
        (changed(PLAIN, END + 8, "<2HL", 1, 1, (END - ENTRY) // 2), "are not all before"),
        (changed(PLAIN, END + 8, "<2HL", 0, 0, 0), "0 members in 0 bytes at .* are not all before"),
        (changed(PLAIN, END + 8, "<2H2L", 0, 0, 0, 0), "0 members in 0 bytes at 0 are not all"),
        (changed(PLAIN, END + 8, "<2H2L", 0, 0, 0, END), "the member at 0 is not in it"),
        (changed(PLAIN, ENTRY, "<L", 0), f"{DAMAGED}: b'.*' stands there"),
        (changed(PLAIN, ENTRY + 8, "<H", 1), "member 'a.npy': is encrypted"),
        (changed(PLAIN, ENTRY + 10, "<H", 12), "compressed by method 12; stored and deflated ones"),
        (changed(PLAIN, ENTRY + 24, "<L", 9), "is stored in .* bytes, and is said to have 9"),
        (changed(PLAIN, ENTRY + 20, "<2L", *[2**30] * 2), "member 'a.npy': overlaps what follows"),
        (changed(PLAIN, ENTRY_B + 42, "<L", 8), "member 'a.npy': overlaps what follows at 8"),
        (changed(PLAIN, ENTRY_B + 42, "<L", 2**31), "member 'b.npy': overlaps what follows"),
        (changed(PLAIN, ENTRY_B + 42, "<L", 2**32 - 1), "member 'b.npy': overlaps what follows"),
        (changed(PLAIN, ENTRY + 42, "<L", 2), "the member at 0 is not in it, but the one at 2"),
        (changed(PLAIN, ENTRY + 28, "<H", 60000), f"{DAMAGED}: it ends within a member"),
        (changed(PLAIN, ENTRY_B + 46, "<B", ord("a")), "member 'a.npy': is there twice"),
        (changed(changed(PLAIN, ENTRY_B + 8, "<H", 0x800), ENTRY_B + 46, "<B", 0xFF), "can't decode"),
    ])  # fmt: skip
def test_invalid_archives(data: bytes, match: str) -> None:
    with pytest.raises(sm.ArrayFormatError, match=match) as caught:
        sm.load_npz(data)
    assert caught.value.source == f"bytes of length {len(data)}"
    assert caught.value.offset is not None


@each("data, match", [
        (changed(PLAIN, 0 + 26, "<H", 60000), "run into what follows"),
        (changed(PLAIN, 28, "<H", 30), "run into what follows"),
        (changed(PLAIN, 6, "<H", 1), "its own header says otherwise: .* flags=0x1"),
        (changed(PLAIN, 8, "<H", 8), "its own header says otherwise: method=8"),
        (changed(PLAIN, ENTRY + 16, "<L", 0), "is damaged: its CRC-32 is .*, not 00000000"),
    ])  # fmt: skip
def test_invalid_members(data: bytes, match: str) -> None:
    with pytest.raises(sm.ArrayFormatError, match=match) as caught:
        sm.load_npz(data)["a"]
    assert (caught.value.member, caught.value.offset is None) == ("a.npy", False)


def test_a_header_that_is_not_where_the_directory_says() -> None:
    loaded = sm.load_npz(changed(PLAIN, PLAIN.rindex(b"PK\x03\x04"), "<L", 0))
    with pytest.raises(sm.ArrayFormatError, match=r"has no header: b'\\x00.*' stands there"):
        loaded["b"]


def test_members_that_are_no_arrays() -> None:
    loaded = sm.load_npz(zip_of({"notes.txt": b"hello", "o.npy": npy(np.array([None]))}))
    with pytest.raises(sm.ArrayFormatError, match=r"member 'notes.txt': is not an npy file"):
        loaded["notes.txt"]
    with pytest.raises(
        sm.ArrayFormatError, match=r"member 'o.npy': the type .* holds Python objects"
    ):
        loaded["o"]
    loaded = sm.load_npz(zip_of({"a.npy": npy(np.arange(3)) + b"behind"}))
    with pytest.raises(sm.ArrayFormatError, match=r"has 6 bytes behind an array of \(3,\) int64"):
        loaded["a"]


def test_without_isal_zlib_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "isal", None)
    assert npz_module._library.__wrapped__() is zlib


def test_with_isal_it_does_the_work() -> None:
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert npz_module._library() is isal_zlib


def test_what_is_not_memory() -> None:
    with pytest.raises(TypeError, match="an npz file is read from bytes"):
        sm.load_npz("a.npz")  # type: ignore[arg-type]


@pytest.mark.parametrize("compressed", [False, True])
def test_damage_goes_unnoticed_where_nothing_is_verified(*, compressed: bool) -> None:
    array = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    data = bytearray(npz({"a": array}, compressed=compressed))
    np.testing.assert_array_equal(sm.load_npz(data, verify=False)["a"], array)
    data[5000] ^= 1  # deflate stores noise uncompressed
    with pytest.raises(sm.ArrayFormatError, match="is damaged: its CRC-32 is"):
        sm.load_npz(data)["a"]
    assert (sm.load_npz(data, verify=False)["a"] != array).sum() == 1
    with pytest.raises(sm.ArrayFormatError, match="is cut short"):
        sm.load_npz(bytes(data[:5000]), verify=False)
