"""load_npy: every kind of array that NumPy writes, as a view, and files that must be rejected."""

from __future__ import annotations

import gc
import io
import time
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import npy, npy_with_header
from effort import LONG, each
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import spdl_media as sm

PLAIN_TYPES = [
    *("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "g", "F", "D", "G"),
    *(">i2", ">u4", ">f8", ">c16", "<U5", ">U3", "S7", "V6", "S0", "U0"),
    *("<M8[ns]", ">M8[D]", "M8[25s]", "m8[ms]", "m8", "M8", "M8[us]"),
]
RECORD_TYPES = [
    np.dtype([("a", "<i4"), ("b", ">f8", (2, 3)), ("c", "U4")]),
    np.dtype([(("a title", "name"), "i2"), ("with 'quotes' and \\", "f4")]),
    np.dtype({"names": ["x", "y"], "formats": ["f4", "u1"], "offsets": [4, 16], "itemsize": 32}),
    np.dtype([("outer", [("inner", "<i2", (2,)), ("t", "M8[s]")], (3,))]),
    np.dtype([("größe", "f4"), ("長さ", "i8")]),
    np.dtype([("i1", "i1"), ("f8", "f8")], align=True),
    np.dtype([]),
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3), (0, 4), (2, 3, 4), (1,) * 20]


def of_type(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Make an array with small, different values, valid for any dtype."""
    dtype = np.dtype(dtype)
    out = np.zeros(shape, dtype) if dtype.itemsize else np.ndarray(shape, dtype, b"")
    if dtype.kind in "biufcmM" and out.size:
        flat = out.reshape(-1)
        flat[...] = (np.arange(out.size) % 100).astype(dtype)
    elif dtype.kind in "SU" and dtype.itemsize and out.size:
        out.reshape(-1)[...] = [f"{k % 1000}" for k in range(out.size)]
    return out


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    assert one.dtype == other.dtype
    assert one.dtype.str == other.dtype.str
    assert one.shape == other.shape
    assert one.tobytes("A") == other.tobytes("A")


@each("shape", SHAPES)
@each("dtype", [*PLAIN_TYPES, *RECORD_TYPES])
@pytest.mark.filterwarnings("ignore:Stored array in format:UserWarning")
@pytest.mark.filterwarnings("ignore:metadata on a dtype:UserWarning")
def test_round_trip(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    data = npy(of_type(dtype, shape))
    # NumPy reads the padding of structured dtypes from files alone; of a stream, it is whatever memory held.
    path = tmp_path / "array.npy"
    path.write_bytes(data)
    expected = np.load(path) if np.dtype(dtype).itemsize else of_type(dtype, shape)
    loaded = sm.load_npy(data)
    same(loaded, expected)
    assert loaded.dtype.fields == expected.dtype.fields
    copied = sm.load_npy(data, copy=True)
    same(copied, loaded)  # including the padding of structured dtypes
    assert (copied.strides, copied.flags.writeable) == (loaded.strides, True)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("copy", [False, True])
def test_memory_order_is_kept(order: Any, copy: bool) -> None:
    array = np.asarray(np.arange(24, dtype=">u2").reshape(2, 3, 4), order=order)
    loaded = sm.load_npy(npy(array), copy=copy)
    np.testing.assert_array_equal(loaded, array)
    assert loaded.strides == array.strides


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_the_format(version: tuple[int, int]) -> None:
    array = np.arange(6).reshape(2, 3)
    same(sm.load_npy(npy(array, version)), array)


@given(
    hnp.arrays(
        st.one_of(hnp.scalar_dtypes(), hnp.array_dtypes(max_size=3), hnp.nested_dtypes()).filter(
            lambda dtype: not dtype.hasobject
        ),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
        fill=st.nothing(),
    ),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whatever_numpy_writes_comes_back(array: np.ndarray[Any, Any], fortran: bool) -> None:
    array = np.asarray(array, order="F" if fortran else "C")
    data = npy(array)
    expected = np.load(io.BytesIO(data)) if array.dtype.itemsize else array
    same(sm.load_npy(data), expected)


@each("kind", [bytes, bytearray, memoryview, "mutable view", "array", "array.array"])
def test_views_share_the_memory_and_its_mutability(kind: Any) -> None:
    original = np.arange(1000, dtype=np.int32)
    data = npy(original)
    writable = bytearray(data)
    source: Any = {
        "mutable view": lambda: memoryview(writable),
        "array": lambda: np.frombuffer(writable, np.uint8),
        "array.array": lambda: array("B", data),
    }.get(kind, lambda: kind(data))()
    loaded = sm.load_npy(source)
    np.testing.assert_array_equal(loaded, original)
    read_only = kind in (bytes, memoryview)
    assert loaded.flags.writeable is not read_only
    assert not loaded.flags.owndata
    content = np.frombuffer(source, np.uint8)
    assert np.shares_memory(loaded, content)


def test_a_copy_is_writable_and_apart() -> None:
    data = npy(np.arange(10))
    copied = sm.load_npy(data, copy=True)
    copied[0] = 99
    assert not np.shares_memory(copied, np.frombuffer(data, np.uint8))
    assert sm.load_npy(data)[0] == 0


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("behind", [b"", b"bytes behind"])
def test_a_copy_of_records_has_the_gaps_of_the_file(order: Any, behind: bytes) -> None:
    dtype = np.dtype([("x", "u1"), ("y", "<f8")], align=True)
    content = np.random.default_rng(0).bytes(6 * dtype.itemsize)
    head = npy(np.zeros((2, 3), dtype, order=order))[: -len(content)]
    copied = sm.load_npy(head + content + behind, copy=True)
    assert copied.tobytes("A") == content


@pytest.mark.parametrize("depth", [1, 16, 32, 90])
def test_records_in_records(depth: int) -> None:
    dtype = np.dtype("<i2")
    for _ in range(depth):
        dtype = np.dtype([("inner", dtype)])
    data = npy(np.arange(3, dtype="<i2").view(dtype))
    same(sm.load_npy(data), np.load(io.BytesIO(data)))


@each("num_dimensions", [31, 32, 33, 64, 65])
@each("dtype", ["|i1", ("|i1", (1,))])
@each("kind", [bytes, bytearray])
def test_as_many_dimensions_as_numpy_has(num_dimensions: int, dtype: Any, kind: Any) -> None:
    """NumPy 1.26 has at most 32 dimensions, NumPy 2.0 has 64; a usual header has room for more than 32."""
    shape = f"({'1,' * num_dimensions})"
    text = f"{{'descr':{dtype!r},'fortran_order':False,'shape':{shape}}}".ljust(117) + "\n"
    data = kind(npy_with_header(text, b"x"))
    try:
        expected = np.ndarray((1,) * num_dimensions, dtype, b"x")
    except ValueError:
        with pytest.raises(
            sm.ArrayFormatError, match=r"NumPy has no array of|at most 64 "
        ) as caught:
            sm.load_npy(data)
        assert (caught.value.source, caught.value.offset) == (f"bytes of length {len(data)}", 0)
    else:
        same(sm.load_npy(data), expected)


def test_a_copy_of_empty_text_allocates_nothing() -> None:
    data = npy_with_header("{'descr': '|S0', 'fortran_order': False, 'shape': (1099511627776,), }")
    copied = sm.load_npy(data, copy=True)
    assert (copied.nbytes, copied.dtype.str) == (0, "|S0")
    assert copied.flags.writeable


def test_the_view_keeps_the_memory_alive() -> None:
    class Owner(bytearray):
        pass

    owner = Owner(npy(np.arange(5)))
    gone = weakref.ref(owner)
    loaded = sm.load_npy(owner)
    del owner
    gc.collect()
    np.testing.assert_array_equal(loaded, np.arange(5))
    assert gone() is not None
    del loaded
    gc.collect()
    assert gone() is None


def test_a_tensor_of_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.frombuffer(bytearray(npy(np.arange(5))), dtype=torch.uint8)
    np.testing.assert_array_equal(sm.load_npy(tensor), np.arange(5))


def test_bytes_behind_the_array_are_ignored_as_numpy_does() -> None:
    data = npy(np.arange(5)) + b"another"
    same(sm.load_npy(data), np.load(io.BytesIO(data)))


def test_records_share_no_type() -> None:
    data = npy(np.zeros(3, [("a", "i4"), ("b", "i4")]))
    first, second = sm.load_npy(data), sm.load_npy(data)
    first.dtype.names = ("x", "y")
    assert second.dtype.names == ("a", "b")


def test_arrays_of_records_in_a_type_share_none() -> None:
    text = "{'descr': ([('a', '<i4')], (2,)), 'fortran_order': False, 'shape': (1,), }"
    data = npy_with_header(text.ljust(117) + "\n", bytes(8))
    first, second = sm.load_npy(data), sm.load_npy(data)
    first.dtype.names = ("x",)
    assert second.dtype.names == ("a",)


@each("dtype", ["|u1", "|b1", "|S5", ">f4", "<c16", "<U5", "<M8[ns]", "|V3"])
@each("shape", [(), (0,), (3, 640, 480), (12,) * 3])
@each("fortran", [False, True])
def test_heads_of_numpy_are_read_as_all_others(
    dtype: str, shape: tuple[int, ...], fortran: bool
) -> None:
    data = npy(np.zeros(shape, dtype, order="F" if fortran else "C"))
    body = data[128:]
    fields = str({"shape": shape, "fortran_order": b"fortran_order': True" in data, "descr": dtype})
    usual, unusual = sm.load_npy(data), sm.load_npy(npy_with_header(fields, body))
    same(usual, unusual)
    assert usual.strides == unusual.strides


def test_heads_of_old_versions_of_numpy() -> None:
    text = "{'descr': '<i2', 'fortran_order': False, 'shape': (3,), }"
    data = npy_with_header(text.ljust(69) + "\n", np.arange(3, dtype="<i2").tobytes())
    np.testing.assert_array_equal(sm.load_npy(data), [0, 1, 2])


@each(
    "text",
    [
        "{'shape': (2, 3), 'descr': '<i2', 'fortran_order': False}",
        '{"descr": "<i2", "fortran_order": False, "shape": (2, 3)}',
        "{'descr': '<i2', 'fortran_order': False, 'shape': (2L, 3L), }      \n",
        "{u'descr': u'<i2', u'fortran_order': False, u'shape': (2,3,),}",
        "{ 'descr' :'<i2' ,'fortran_order':False,'shape':(2,3)}\n",
        "{'d\\x65scr': '\\u003ci2', 'fortran_order': False, 'shape': ((2), 3)}",
        "{'descr': ('<i2', (3,)), 'fortran_order': False, 'shape': (2,)}",
    ],
)
def test_headers_of_other_writers(text: str) -> None:
    array = np.arange(6, dtype="<i2").reshape(2, 3)
    data = npy_with_header(text, array.tobytes())
    np.testing.assert_array_equal(sm.load_npy(data), array)


HEADER = "{{'descr': {}, 'fortran_order': {}, 'shape': {}}}"


def header(descr: str = "'<i2'", fortran: str = "False", shape: str = "(2,)") -> str:
    return HEADER.format(descr, fortran, shape)


@each("text, match", [
        (header(shape="(-2,)"), r"shape \(at most 64 whole numbers from 0\), not .*'shape': \(-2,\)"),
        (header(shape="(2)"), "whole numbers from 0.*'shape': 2"),
        (header(shape="(True,)"), "whole numbers from 0.*'shape': .True,."),
        (header(shape="('2',)"), "at most 64 whole numbers"),
        (header(shape="(1.5,)"), "at most 64 whole numbers"),
        (header(shape="(4294967296, 4294967296)"), "is cut short: .* 4 follow"),
        (header(shape="(0, 4294967296, 4294967296)"), "NumPy has no array of shape"),
        (header(shape="(999999999999999999999,)"), "is cut short: .* 4 follow"),
        (header(shape="(" + 70 * "1, " + ")"), "at most 64 whole numbers"),
        (header(shape="(3,)"), r"is cut short: shape \(3,\) of int16 is 6 bytes, and 4 follow"),
        (header(fortran="0"), r"fortran_order \(True or False\).*'fortran_order': 0"),
        (header(fortran="None"), "'fortran_order': None"),
        (header("'|O'"), "holds Python objects, which are stored as a pickle"),
        (header("'O'"), "holds Python objects"),
        (header("[('a', '<i4'), ('b', '|O')]"), "holds Python objects"),
        (header("'<f3'"), "'<f3' is not a NumPy type"),
        (header("'|T16'"), "is not a NumPy type"),
        (header("'|S9999999999'"), "is not a NumPy type"),
        (header("'|S4294967297'"), "is not a NumPy type"),
        (header("'<U1073741825'"), "is not a NumPy type"),
        (header("7"), "7 is not a NumPy type"),
        (header("('<i2', -1)"), "is not a NumPy type"),
        (header("('<i2', (99999999999,))"), "is not a NumPy type"),
        (header("[('a', '<i2'), ('a', '<i2')]"), "is not a NumPy type"),
        (header("[('a',)]"), "is not a NumPy type"),
        (header("[5]"), "is not a NumPy type"),
        (header("()"), "is not a NumPy type"),
        (header("('<i2',)"), "is not a NumPy type"),
        (header("[('a', ('<i2',))]"), "is not a NumPy type"),
        (header("[(5, '<i2')]"), "is not a NumPy type"),
        ("{'descr': '<i2', 'shape': (2,)}", "must be a dictionary of .*, not {'descr'"),
        ("{'descr': '<i2', 'fortran_order': False, 'shape': (2,), 'x': 1}", "must be a dictionary"),
        ("{1: 2}", "the header must be a dictionary of .* not {1: 2}"),
        ("[1, 2]", r"not \[1, 2\]"),
        ("", "the header cannot be read: invalid syntax"),
        ("{'descr': ", "the header cannot be read"),
        (header() + "x", "the header cannot be read"),
        ("{'a' 'b'}", "must be a dictionary of .* not {'ab'}"),
        ("__import__('os')", "the header cannot be read: malformed"),
        (1000 * "(" + 1000 * ")", "the header cannot be read: too many nested"),
        (1000 * "-" + "1", "the header cannot be read"),
        (header(30 * "(" + "'<i2'" + 30 * ", (2,))"), "is not a NumPy type"),
        (header("'\\U00110000'"), "the header cannot be read"),
        (header(66 * "(" + "'<i2'" + 66 * ", (1,))"), "is not a NumPy type|NumPy has no"),
    ])  # fmt: skip
def test_invalid_headers(text: str, match: str) -> None:
    data = npy_with_header(text, b"\1\0\2\0")
    with pytest.raises(sm.ArrayFormatError, match=match) as caught:
        sm.load_npy(data)
    assert caught.value.source == f"bytes of length {len(data)}"
    assert caught.value.offset == 0
    assert isinstance(caught.value, sm.DecodeError)


@each("descr", [
        "'<m8[s/0]'", "'M8[D/00]'", "b'm8[s/0]'", "'m8[s\\x2f0]'", "'i4,m8[s/0]'", "'timedelta64[2s/0]'",
        "('|V8', 'm8[s/0]')", "('<m8[s/0]', (2,))", "[('a', '<i2'), ('b', '<M8[s/0]')]",
        "('|V8', {'a': ('m8[s/0]', 0)})", "'<m8[0s]'", "'<M8[00us]'", "[('a', 'datetime64[0D]')]",
    ])  # fmt: skip
def test_units_of_time_by_which_numpy_divides_by_zero(descr: str) -> None:
    # NumPy would crash the process, either at once or when the array is converted.
    with pytest.raises(sm.ArrayFormatError, match=r"is not a NumPy type: a unit of time"):
        sm.load_npy(npy_with_header(header(descr), bytes(64)))


@each("unit", ["s", "25s", "us", "M", "generic", "10Y"])
def test_units_of_time_that_numpy_writes(unit: str) -> None:
    array = np.zeros(2, f"M8[{unit}]")
    assert sm.load_npy(npy(array)).dtype == array.dtype
    record = np.zeros(2, [("a [km/h]", f"m8[{unit}]")])
    assert sm.load_npy(npy(record)).dtype == record.dtype


# The argument is a share of a megabyte, the longest header that is read.
LONG_HEADERS: dict[str, Callable[[float], str]] = {
    "shape": lambda part: header(shape="(" + int(49_000 * part) * "9223372036854775807," + ")"),
    "shape of a field": lambda part: header("[('a', '<i2', (" + int(490_000 * part) * "1," + "))]"),
    "fields": lambda part: header("[" + int(70_000 * part) * "('a', '<i2')," + "]"),
    "cut": lambda part: header("'" + int(900_000 * part) * "f" + "'"),
    "type": lambda part: header(
        "[" + ",".join(f"('{k}','<i2')" for k in range(int(50_000 * part))) + "]"
    ),
    "order": lambda part: header(fortran="[" + int(400_000 * part) * "1," + "]"),
    "keys": lambda part: "{" + ",".join(f"'{k:06}': 0" for k in range(int(80_000 * part))) + "}",
}


@pytest.mark.parametrize("kind", LONG_HEADERS)
def test_long_headers_make_short_errors(kind: str) -> None:
    part = 1.0 if LONG else 0.25
    data = npy_with_header(LONG_HEADERS[kind](part), version=2)
    started = time.thread_time()
    with pytest.raises(sm.ArrayFormatError) as caught:
        sm.load_npy(data)
    assert time.thread_time() - started < 5 * part
    assert len(str(caught.value)) < 1000


@each("size", [0, 1, 5, 6, 7, 8, 9, 10, 50, 127, 128, 129, 147])
def test_every_cut_is_noticed(size: int) -> None:
    data = npy(np.arange(5, dtype=np.int32))[:size]
    with pytest.raises(sm.ArrayFormatError, match=r"cut short|not an npy file"):
        sm.load_npy(data)


def test_an_array_of_objects_is_never_unpickled() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("unpickled",)

    data = npy(np.array([Bomb()], object))
    with pytest.raises(sm.ArrayFormatError, match="Nothing is unpickled here"):
        sm.load_npy(data)


@each(
    "data, match",
    [
        (b"RIFF" + bytes(200), "it begins with b'RIFF"),
        (b"\x93NUMPY\x04\x00" + bytes(200), "has version 4.0 of the format"),
        (b"\x93NUMPY\x01\x01" + bytes(200), "has version 1.1 of the format"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(200), "the header has 4294967295 bytes"),
        (b"\x93NUMPY\x02\x00\x00\x00\x11\x00" + bytes(0x110000), "more than 1048576 are not read"),
        (b"\x93NUMPY\x03\x00\x02\x00\x00\x00\xff\xff", "the header is not UTF-8"),
    ],
)
def test_what_is_not_npy(data: bytes, match: str) -> None:
    with pytest.raises(sm.ArrayFormatError, match=match):
        sm.load_npy(data)


@pytest.mark.parametrize("data", ["a.npy", io.BytesIO(), None, 5])
def test_what_is_not_memory(data: Any) -> None:
    with pytest.raises(TypeError, match=r"read from bytes.*Read the file first"):
        sm.load_npy(data)


def test_memory_with_gaps() -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        sm.load_npy(memoryview(bytes(10))[::2])
