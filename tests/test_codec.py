"""A decoder made from codec parameters equals the decoder of the stream itself; options are checked."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from audio_oracle import linear, samples_of
from effort import examples
from test_pickle_packets import AUDIO, SAMPLE_RATES, VIDEO, _audio, _encoders, _video

import spdl_media as sm
from spdl_media.codec import make_decoder, read_audio_codec, read_video_codec
from spdl_media.testing import index_planes, make_audio, make_image, make_tone, make_video

# Parameters of an open stream's decoder, which PyAV does not expose otherwise.
VIDEO_FACTS = (
    "name", "width", "height", "pix_fmt", "extradata", "codec_tag", "bits_per_coded_sample",
    "sample_aspect_ratio", "reorder_depth", "color_range", "colorspace", "color_primaries",
    "color_trc",
)  # fmt: skip
AUDIO_FACTS = ("name", "sample_rate", "extradata")


def _stream_planes(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.best("video")
        stream.codec_context.thread_count = 1
        return _rows(sm.VideoFrames(list(container.decode(stream))))


def _rows(frames: sm.VideoFrames) -> list[bytes]:
    """Return the planes of all frames, without the padding of rows."""
    return [plane.tobytes() for frame in frames for plane in frame.planes]


def _our_planes(data: bytes) -> list[bytes]:
    frames = sm.decode_packets(
        sm.demux_video(data), filter_desc=None, decode_config=sm.decode_config(on_corrupt="keep")
    )
    return _rows(frames)


@pytest.mark.parametrize("codec", _encoders(VIDEO))
def test_video_decoders_equal_those_of_the_stream(codec: str) -> None:
    data = _video(codec, VIDEO[codec])
    assert _our_planes(data) == _stream_planes(data)
    with av.open(io.BytesIO(data)) as container:
        theirs = container.streams.video[0].codec_context
        values = read_video_codec(container.streams.video[0])
        ours: Any = make_decoder(values, sm.decode_config(), "made")
        for fact in VIDEO_FACTS:
            assert getattr(ours, fact) == getattr(theirs, fact), fact


@pytest.mark.parametrize("codec", _encoders(AUDIO))
def test_audio_decoders_equal_those_of_the_stream(codec: str) -> None:
    data = _audio(codec, SAMPLE_RATES.get(codec, 48000))
    frames = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    np.testing.assert_array_equal(samples_of(frames), linear(data))
    with av.open(io.BytesIO(data)) as container:
        theirs = container.streams.audio[0].codec_context
        ours: Any = make_decoder(
            read_audio_codec(container.streams.audio[0]), sm.decode_config(), "made"
        )
        for fact in AUDIO_FACTS:
            # Of Opus, the packets state what to drop, in place of the extradata.
            if (codec, fact) != ("libopus", "extradata"):
                assert getattr(ours, fact) == getattr(theirs, fact), fact
        assert ours.layout.name == theirs.layout.name


def test_real_media(media_dir: Path) -> None:
    for path in sorted((media_dir / "video").iterdir()):
        if path.name != "truncated.mp4" and path.stat().st_size < 1_000_000:
            data = path.read_bytes()
            assert _our_planes(data) == _stream_planes(data), path.name
    for path in sorted((media_dir / "audio").iterdir()):
        frames = sm.decode_packets(sm.demux_audio(path), filter_desc=None)
        np.testing.assert_array_equal(samples_of(frames), linear(path.read_bytes()), path.name)


def test_numbered_codecs_of_avi() -> None:
    # PyAV cannot show AAC's number in AVI, 0xFF, as letters.
    data = make_audio(make_tone(48000, 48000), codec="aac", format="avi")
    frames = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    np.testing.assert_array_equal(samples_of(frames), linear(data))


@pytest.fixture(scope="module")
def h264() -> bytes:
    return make_video(index_planes(40, 64, 48), codec="libx264", format="mp4", max_b_frames=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thread": 4}, r"decoder 'h264' has no option 'thread'\. Did you mean .*'threads'"),
        ({"err_detct": "explode"}, r"no option 'err_detct'\. Did you mean 'err_detect'"),
        ({"zzz": 1, "yyy": 1}, "no option 'yyy', 'zzz'"),
    ],
)
def test_unknown_options_are_refused_before_opening(
    h264: bytes, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    monkeypatch.setattr("spdl_media.codec.CodecContext", _NotOpened(opened))
    with pytest.raises(ValueError, match=said):
        sm.decode_packets(
            sm.demux_video(h264), decode_config=sm.decode_config(decoder_options=options)
        )
    assert not opened


class _NotOpened:
    def __init__(self, opened: list[int]) -> None:
        self.opened = opened

    def create(self, *args: Any) -> None:
        self.opened.append(1)


def test_a_value_that_the_decoder_refuses(h264: bytes) -> None:
    config = sm.decode_config(decoder_options={"err_detect": "nonsense"})
    with pytest.raises((sm.DecodeError, ValueError), match=r"err_detect|cannot be opened"):
        sm.decode_packets(sm.demux_video(h264), decode_config=config)


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        ("h265", r"decoder='h265'\): this FFmpeg has no decoder of that name; the stream is h264"),
        ("hevc", r"decoder='hevc'\) decodes hevc, but the stream is h264, whose default decoder"),
        ("mp3", r"decoder='mp3'\) decodes mp3, but the stream is h264"),
        ("", r"decoder=''\): this FFmpeg has no decoder of that name"),
    ],
)
def test_decoders_of_other_codecs(h264: bytes, decoder: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sm.decode_packets(
            sm.demux_video(h264), decode_config=sm.decode_config(decoder=decoder)
        )  # fmt: skip


def test_another_decoder_of_the_same_codec() -> None:
    sound = make_audio(make_tone(48000, 48000), codec="libmp3lame", format="mp3")
    packets = sm.demux_audio(sound)
    default = sm.decode_packets(packets, filter_desc=None)
    fixed = sm.decode_packets(
        packets, filter_desc=None, decode_config=sm.decode_config(decoder="mp3")
    )
    assert (default.sample_fmt, fixed.sample_fmt) == ("fltp", "s16p")
    assert len(default) == len(fixed)
    clip = make_video(index_planes(8, 64, 48), codec="libvpx-vp9", format="webm")
    config = sm.decode_config(decoder="libvpx-vp9")
    frames = sm.decode_packets(sm.demux_video(clip), filter_desc=None, decode_config=config)
    assert _our_planes(clip) == _rows(frames)


@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4", "libvpx-vp9", "ffv1"])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_of_ffmpeg(codec: str, threads: int) -> None:
    data = make_video(index_planes(30, 64, 48), codec=codec, format="matroska")
    one = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    many = sm.decode_packets(
        sm.demux_video(data),
        filter_desc=None,
        decode_config=sm.decode_config(decoder_options={"threads": threads}),
    )
    assert one.timestamps == many.timestamps
    for a, b in zip(one, many, strict=True):
        for plane, other in zip(a.planes, b.planes, strict=True):
            np.testing.assert_array_equal(plane, other)


_DAMAGED = """
import sys
import numpy as np
import spdl_media as sm
from spdl_media.testing import index_planes, make_video

rng = np.random.default_rng(1)
errors = 0
for codec in ("libx264", "libx265"):
    data = make_video(index_planes(30, 128, 96), codec=codec, format="mpegts", max_b_frames=2)
    for turn in range(int(sys.argv[1])):
        damaged = np.frombuffer(data, np.uint8).copy()
        place = rng.integers(len(data) // 3, len(data), 40)
        damaged[place[place % 188 > 20]] ^= 0x55
        for on_corrupt in ("raise", "keep"):
            config = sm.decode_config(decoder_options={"threads": 4}, on_corrupt=on_corrupt)
            try:
                packets = sm.demux_video(damaged)
                sm.decode_packets(packets, decode_config=config)
                sm.decode_packets(packets, decode_config=config, num_frames=3)
            except sm.MediaError:
                errors += 1
assert errors, "no damage was noticed"
print("done")
"""


def test_threads_and_damaged_data_do_not_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DAMAGED, str(examples(40))], capture_output=True, check=False
    )
    assert done.stdout.strip() == b"done", done.stderr.decode()[-1000:]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: sm.demux_audio(make_audio(make_tone(4800, 48000))), sm.VideoDecoder),
        (lambda: sm.demux_image(make_image(np.zeros((8, 8, 3), np.uint8))), sm.AudioDecoder),
    ],
)
def test_decoders_take_their_own_kind(make: Callable[[], Any], wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{wrong.__name__} takes the codec of"):
        wrong(make().codec)


def test_codecs_are_values(h264: bytes) -> None:
    a, b = sm.demux_video(h264).codec, sm.demux_video(h264).codec
    assert a == b
    assert hash(a) == hash(b)
    assert "extradata" not in repr(a)


def test_monkeys_audio_opens() -> None:
    """The file has one frame of silence, and is written by hand, because FFmpeg has no encoder."""
    # Version, compression, flags (peak level, seek table), channels, rate; sizes of the WAV header and
    # trailer.
    head = struct.pack("<4sHHHHIII", b"MAC ", 3960, 2000, 0x16, 2, 44100, 0, 0)
    # Frames, samples of the last frame, peak, size and offset of the seek table; a checksum whose highest bit
    # says that flags follow; both channels are silent.
    rest = struct.pack("<IIIII", 1, 4410, 0, 1, 44) + struct.pack("<II", 1 << 31, 3) + bytes(12)
    sound = sm.load_audio(head + rest)
    assert sound.shape == (2, 4410)
    assert not np.asarray(sound).any()
