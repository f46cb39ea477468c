"""Whether an H.264 stream may hold interlaced pictures, read from its header.

A decoder gives one frame for two fields; who counts pictures as they are coded counts two. One bit of the
sequence parameter set, ``frame_mbs_only_flag``, says that there are no fields.

See:
    ITU-T H.264, 7.3.2.1.1 (sequence parameter set) and 9.1 (Exp-Golomb codes); ISO/IEC 14496-15, 5.3.3.1
    (AVCDecoderConfigurationRecord).
"""

from __future__ import annotations

from collections.abc import Iterator

from spdl_media.codec import VideoCodec

_SPS = 7
# Profiles whose parameter set says more of chroma and bit depth.
_HIGH_PROFILES = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})


def may_be_interlaced(codec: VideoCodec) -> bool:
    """Whether pictures may be coded as two fields, as far as the header in ``codec.extradata`` tells.

    Returns:
        True for H.264 unless each parameter set says that all pictures are whole frames, so also where there
        is none. False for other codecs: their decoders give each coded field as a frame of its own.
    """
    if codec.name != "h264":
        return False
    sets = list(_parameter_sets(codec.extradata or b""))
    return not sets or not all(map(_only_frames, sets))


def _parameter_sets(extradata: bytes) -> Iterator[bytes]:
    """The sequence parameter sets, in either form: with lengths (MP4), or with start codes."""
    if extradata[:1] != b"\1":
        units = extradata.split(b"\0\0\1")
        yield from (unit for unit in units if unit and unit[0] & 0x1F == _SPS)
        return
    position = 6
    for _ in range(extradata[5] & 0x1F if len(extradata) > 5 else 0):
        length = int.from_bytes(extradata[position : position + 2], "big")
        yield extradata[position + 2 : position + 2 + length]
        position += 2 + length


class _Bits:
    """Reads a parameter set bit by bit."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def read(self, count: int) -> int:
        """The next bits as a number.

        Raises:
            ValueError: There are not so many.
        """
        self._left -= count
        if self._left < 0:
            raise ValueError("the parameter set ends too early")
        return self._value >> self._left & ((1 << count) - 1)

    def golomb(self) -> int:
        """The next unsigned Exp-Golomb code."""
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)

    def signed(self) -> int:
        """The next signed Exp-Golomb code."""
        code = self.golomb()
        return (code + 1) // 2 if code % 2 else -(code // 2)


def _only_frames(unit: bytes) -> bool:
    # Three zero bytes cannot stand in a unit, so a 3 is put between them.
    bits = _Bits(unit.replace(b"\0\0\3", b"\0\0"))
    try:
        bits.read(8)
        profile = bits.read(8)
        bits.read(16)
        bits.golomb()
        if profile in _HIGH_PROFILES:
            _skip_format(bits)
        _skip_order_and_size(bits)
        return bool(bits.read(1))
    except ValueError:
        return False


def _skip_format(bits: _Bits) -> None:
    chroma_format = bits.golomb()
    if chroma_format == 3:
        bits.read(1)
    bits.golomb()
    bits.golomb()
    bits.read(1)
    if bits.read(1):
        for index in range(12 if chroma_format == 3 else 8):
            if bits.read(1):
                _skip_scaling_list(bits, 16 if index < 6 else 64)


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.signed()) % 256
        last = following or last


def _skip_order_and_size(bits: _Bits) -> None:
    bits.golomb()
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.read(1)
        bits.signed()
        bits.signed()
        for _ in range(bits.golomb()):
            bits.signed()
    bits.golomb()
    bits.read(1)
    bits.golomb()
    bits.golomb()
