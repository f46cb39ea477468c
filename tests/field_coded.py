"""Writes field-coded H.264, which no FFmpeg encoder writes: each frame is two pictures of PCM macroblocks.

See:
    ITU-T H.264, 7.3 (syntax), 7.4.1.2.4 (the second field of an IDR picture), 9.1 (numbers).
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

_I_PCM = 25


def _ue(*numbers: int) -> str:
    """Encode numbers as Exp-Golomb codes, as a string of bits."""
    return "".join(f"{'0' * ((n + 1).bit_length() - 1)}{n + 1:b}" for n in numbers)


def _unit(header: int, bits: str, blocks: Sequence[bytes] = ()) -> bytes:
    """Make a NAL unit with a start code. Each block is byte-aligned after its macroblock type."""
    data = b""
    for block in blocks:
        bits += _ue(_I_PCM)
        bits += "0" * (-len(bits) % 8)
        data, bits = data + int(bits, 2).to_bytes(len(bits) // 8, "big") + block, ""
    bits += "1"
    bits += "0" * (-len(bits) % 8)
    data += int(bits, 2).to_bytes(len(bits) // 8, "big")
    return b"\0\0\0\1" + bytes([header]) + re.sub(rb"\0\0(?=[\0-\3])", b"\0\0\3", data)


def _headers(width: int, height: int) -> bytes:
    """Make SPS and PPS: Main profile, fields allowed, a reorder depth of one frame."""
    size = _ue(width // 16 - 1, height // 32 - 1)
    timing = f"1{1:032b}{50:032b}1"
    restriction = "1" + "1" + _ue(0, 0, 10, 10, 1, 2)
    usability = "0000" + timing + "000" + restriction
    sequence = f"{77:08b}{0:08b}{30:08b}" + _ue(0, 0, 0, 4, 2) + "0" + size + "0" + "0" + "1" + "01"
    pictures = _ue(0, 0) + "00" + _ue(0, 0, 0) + "000" + _ue(0, 0, 0) + "000"
    return _unit(0x67, sequence + usability) + _unit(0x68, pictures)


def _blocks(planes: Sequence[Any]) -> list[bytes]:
    """Return the macroblocks of a field, each with 16x16 luma and twice 8x8 chroma samples."""
    rows, columns = planes[0].shape[0] // 16, planes[0].shape[1] // 16
    return [
        b"".join(
            np.ascontiguousarray(
                plane[y * size : (y + 1) * size, x * size : (x + 1) * size]
            ).tobytes()
            for plane, size in zip(planes, (16, 8, 8), strict=True)
        )
        for y in range(rows)
        for x in range(columns)
    ]


def field_coded(
    frames: Sequence[Sequence[Any]], gop_size: int = 6, *, reorder: bool = True
) -> list[tuple[int, bytes]]:
    """Code yuv420p planes as pairs of fields. The width must be a multiple of 16, the height of 32.

    Returns:
        Number and bytes of each frame in decoding order. With ``reorder``, every other frame is not a
        reference, and is decoded after the frame that it precedes.
    """
    height, width = frames[0][0].shape
    coded = []
    for start in range(0, len(frames), gop_size):
        group = list(range(start, min(start + gop_size, len(frames))))
        order = group[:1]
        for first, second in zip(group[1::2], group[2::2], strict=False):
            order += [second, first] if reorder else [first, second]
        order += group[len(order) :]
        frame_num = 0
        for number in order:
            is_key = number == start
            is_reference = is_key or not reorder or (number - start) % 2 == 0
            data = _headers(width, height) if is_key else b""
            for parity in (0, 1):
                is_idr = is_key and parity == 0
                header = _ue(0, 7, 0) + f"{frame_num % 16:04b}" + f"1{parity}"
                header += _ue(start // gop_size % 2) if is_idr else ""
                header += f"{2 * (number - start) + parity:08b}"
                header += ("00" if is_idr else "0") if is_reference else ""
                kind = 0x65 if is_idr else 0x61 if is_reference else 0x01
                planes = [plane[parity::2] for plane in frames[number]]
                data += _unit(kind, header + _ue(0), _blocks(planes))
            frame_num += is_reference
            coded.append((number, data))
    return coded


def field_coded_file(
    frames: Sequence[Sequence[Any]], format: str, *, is_split: bool = False, **options: Any
) -> bytes:
    """Write a file of such frames; each packet has both fields, or with ``is_split`` one."""
    coded = field_coded(frames, **options)
    raw = b"".join(data for _, data in coded)
    if format == "h264":
        return raw
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(raw), format="h264") as source,
        av.open(file, "w", format=format) as out,
    ):
        stream = out.add_stream_from_template(source.streams.video[0])
        stream.time_base = unit = Fraction(1, 50)
        for place, (number, data) in enumerate(coded):
            cut = data.rindex(b"\0\0\0\1")
            for shift, field in enumerate([data[:cut], data[cut:]] if is_split else [data]):
                packet = av.Packet(field)
                packet.stream, packet.time_base = stream, unit
                packet.pts, packet.dts = 2 * number + shift, 2 * (place - 1) + shift
                packet.is_keyframe = field[4] == 0x67
                out.mux(packet)
    return file.getvalue()
