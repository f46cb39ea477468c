"""Makes array files and archives as other programs write them, or by hand if no program writes them."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
GUID_END = bytes.fromhex("000000001000800000aa00389b71")


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), version=version, allow_pickle=True)
    return file.getvalue()


def npy_with_header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """Make an npy file with exactly this header."""
    encoded = text.encode("utf-8" if version == 3 else "latin-1")
    size = struct.pack("<H" if version == 1 else "<I", len(encoded))
    return b"\x93NUMPY" + bytes([version, 0]) + size + encoded + data


def npz(arrays: Mapping[str, Any], *, compressed: bool = False) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def chunk(name: bytes, data: bytes, *, size: int | None = None) -> bytes:
    return (
        name + struct.pack("<I", len(data) if size is None else size) + data + bytes(len(data) % 2)
    )


def wav_format(
    code: int, num_channels: int, bits: int, *, rate: int = 8000, sub_code: int | None = None
) -> bytes:
    align = num_channels * ((bits + 7) // 8)
    fields = struct.pack("<HHIIHH", code, num_channels, rate, rate * align, align, bits)
    if sub_code is None:
        return fields
    return fields + struct.pack("<HHIH", 22, bits, 0, sub_code) + GUID_END


def wav(
    format: bytes,
    data: bytes,
    *,
    before: bytes = b"",
    after: bytes = b"",
    kind: bytes = b"RIFF",
    size: int | None = None,
) -> bytes:
    body = b"WAVE" + before + chunk(b"fmt ", format) + chunk(b"data", data, size=size) + after
    riff_size = 0xFFFFFFFF if kind != b"RIFF" else len(body)
    return kind + struct.pack("<I", riff_size) + body


def tar(members: Mapping[str, bytes], format: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, encoding="utf-8") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def tar_header(name: bytes, size: int | bytes, kind: bytes = b"0", magic: bytes = b"") -> bytes:
    """Make a tar header with any fields and a correct checksum."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(
        name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0"
        + b" " * 8 + kind + bytes(100) + magic
    ).ljust(512, b"\0")  # fmt: skip
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def tar_member(name: bytes, data: bytes, kind: bytes = b"0") -> bytes:
    return tar_header(name, len(data), kind) + data + bytes(-len(data) % 512)
