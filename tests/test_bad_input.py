"""Sources that are not media, have false headers, or lack what is requested raise the right error."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import av
import numpy as np
import pytest
from damage import CONTAINERS, HUGE, STILLS, container, made, read_everything
from effort import each
from left_behind import descriptors
from programs import run_code

import spdl_media as sm
from spdl_media.testing import AudioTrack, VideoTrack, index_frames, make_image, make_media

DEMUXERS: dict[str, Callable[..., object]] = {
    "demux_image": sm.demux_image,
    "demux_video": sm.demux_video,
    "demux_audio": sm.demux_audio,
    "probe": sm.probe,
}
NOT_MEDIA = {
    "text": b"This is a text, and not a short one; it has commas, and it ends.\n" * 50,
    "html": b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>Not found</body></html>\n"
    * 9,
    "json": b'{"error": "not found", "code": 404}' * 20,
    "random": np.random.default_rng(11).bytes(20000),
    "zeros": bytes(5000),
    "one byte": b"x",
    "zip": b"PK\x03\x04" + np.random.default_rng(12).bytes(500),
    "elf": b"\x7fELF\x02\x01\x01" + bytes(900),
    "archive": (b"0001.jpg".ljust(512, b"\0") + made("jpeg"))
    * 9,  # which FFmpeg reads as Motion JPEG
}


@contextmanager
def within_five_seconds() -> Iterator[None]:
    # Of CPU time, which a busy machine does not stretch.
    start = time.process_time()
    yield
    assert time.process_time() - start < 5


def sources(data: bytes, path: Path) -> list[object]:
    path.write_bytes(data)
    return [data, path, str(path), memoryview(data)]


def named(error: sm.MediaError, source: object) -> bool:
    name = str(source) if isinstance(source, str | Path) else f"bytes of length {len(source)}"  # type: ignore[arg-type]
    return error.source == name and str(error).startswith(name)


@each("reader", DEMUXERS)
@each("what", NOT_MEDIA)
def test_not_media(reader: str, what: str, tmp_path: Path) -> None:
    for source in sources(NOT_MEDIA[what], tmp_path / "file"):
        with (
            pytest.raises(sm.DemuxError, match=r"demux_config\(format=") as caught,
            within_five_seconds(),
        ):
            DEMUXERS[reader](source)
        assert named(caught.value, source)
        assert (caught.value.__cause__ is None) == (what == "archive")


@pytest.mark.parametrize("reader", DEMUXERS)
@pytest.mark.parametrize("what", ["text", "html", "random", "archive"])
def test_name_does_not_make_media(reader: str, what: str, tmp_path: Path) -> None:
    for suffix in ("jpg", "png", "webp", "mp4", "mp3", "wav", "mkv", "ts", "gif", "tiff"):
        path = tmp_path / f"file.{suffix}"
        path.write_bytes(NOT_MEDIA[what])
        with (
            pytest.raises(sm.MediaError, match=r"demux_config\(format=") as caught,
            within_five_seconds(),
        ):
            DEMUXERS[reader](path)
        assert isinstance(caught.value, sm.DemuxError), suffix
        assert named(caught.value, path), suffix


@pytest.mark.parametrize("reader", DEMUXERS)
@pytest.mark.parametrize("suffix", ["", ".jpg", ".mp4", ".raw"])
def test_empty(reader: str, suffix: str, tmp_path: Path) -> None:
    for source in sources(b"", tmp_path / f"empty{suffix}"):
        with pytest.raises(sm.DemuxError, match=r"is empty \(0 bytes\)") as caught:
            DEMUXERS[reader](source)
        assert named(caught.value, source)


@pytest.mark.parametrize("reader", DEMUXERS)
def test_missing_file(reader: str, tmp_path: Path) -> None:
    for name in ("none.mp4", "none.jpg", "none", "folder/none.png"):
        with pytest.raises(
            sm.SourceError, match=r"No such file or directory.*Check the path"
        ) as caught:
            DEMUXERS[reader](tmp_path / name)
        assert caught.value.errno == errno.ENOENT
        assert caught.value.__cause__ is not None
        assert named(caught.value, tmp_path / name)


@pytest.mark.parametrize("reader", DEMUXERS)
def test_directory(reader: str, tmp_path: Path) -> None:
    folder = tmp_path / "clip.mp4"
    folder.mkdir()
    with pytest.raises(
        sm.SourceError, match=r"Is a directory.*Give one of the files in it"
    ) as caught:
        DEMUXERS[reader](folder)
    assert caught.value.errno == errno.EISDIR
    assert caught.value.__cause__ is not None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has no such permissions")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.mp4"
    path.write_bytes(container("matroska"))
    path.chmod(0)
    if os.geteuid() != 0:
        for reader in DEMUXERS.values():
            with pytest.raises(
                sm.SourceError, match=r"Permission denied.*Check the owner and mode"
            ) as caught:
                reader(path)
            assert caught.value.errno == errno.EACCES
        return
    # The superuser may read everything, so test as user nobody in a new process.
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o755)
    code = (
        "import os, sys, spdl_media as sm\n"
        "path, *readers = sys.argv[1:]\n"
        "os.setuid(65534)\n"
        "for reader in readers:\n"
        "    try:\n"
        "        getattr(sm, reader)(path)\n"
        "    except sm.SourceError as error:\n"
        "        print(error.errno, error.source == path, error.__cause__ is not None, error)\n"
    )
    done = run_code(code, path, *DEMUXERS)
    lines = done.stdout.splitlines()
    assert len(lines) == len(DEMUXERS), done.stdout + done.stderr
    for line in lines:
        assert line.startswith("13 True True")
        assert "Permission denied. Check the owner and mode" in line


@pytest.mark.parametrize("name", HUGE)
def test_header_that_claims_too_much(name: str, tmp_path: Path) -> None:
    data = HUGE[name]()
    for source in sources(data, tmp_path / "huge"):
        for on_corrupt in ("raise", "keep", "drop"):
            packets = sm.demux_image(source)
            with pytest.raises(sm.DecodeError, match=r"\w+") as caught, within_five_seconds():
                sm.decode_packets(packets, decode_config=sm.decode_config(on_corrupt=on_corrupt))
            assert named(caught.value, source)


@each("name", HUGE)
def test_header_that_claims_too_much_read_as_video(name: str) -> None:
    with within_five_seconds(), pytest.raises((sm.DecodeError, sm.DemuxError)):
        sm.decode_packets(sm.demux_video(HUGE[name]()))


def test_headers_that_claim_too_much_take_no_memory(tmp_path: Path) -> None:
    """Run in a new process that may allocate 1 GiB."""
    pytest.importorskip("resource")
    for name in HUGE:
        (tmp_path / f"{name}.dat").write_bytes(HUGE[name]())
    code = (
        "import pathlib, resource, sys, spdl_media as sm\n"
        "from damage import read_everything\n"
        "start = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (start + 2**30,) * 2)\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.dat')):\n"
        "    read_everything(path.read_bytes())\n"
        "    read_everything(path)\n"
        # Not ru_maxrss, which includes the process that started this one.
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(status.partition('VmHWM:')[2].split()[0])\n"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    done = run_code(code, tmp_path)
    assert done.stderr == ""
    assert int(done.stdout) < 400_000


@pytest.mark.parametrize("codec", ["gif", "libwebp", "png", "mjpeg"])
def test_a_limit_of_pixels_holds_before_memory_is_allocated(codec: str) -> None:
    data = make_image(np.zeros((40, 60, 3), np.uint8), codec=codec)
    for most, message in ((9000, None), (2399, "60x40 exceeds specified max pixel count")):
        config = sm.decode_config(decoder_options={"max_pixels": most})
        with pytest.raises(sm.DecodeError, match=message) if message else nullcontext():
            assert sm.load_image(data, decode_config=config).shape == (40, 60, 3)


@pytest.fixture(scope="module")
def large_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "image.png"
    path.write_bytes(make_image(np.zeros((5000, 10000), np.uint8), codec="png", pix_fmt="gray"))
    return path


@pytest.mark.parametrize(
    ("filter_desc", "megabytes", "message"),
    [
        (None, 32, r"bytes of length \d+: there is too little memory to decode"),
        (None, 100, r"\[Errno \d+\] Cannot allocate memory"),
        ("scale=9000:9000", 100, r"\[Errno \d+\] Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_no_damage(
    filter_desc: str | None, megabytes: int, message: str, large_image: Path
) -> None:
    """A batch would skip an image whose error only says that FFmpeg cannot allocate memory."""
    pytest.importorskip("resource")
    options = {"filter_desc": filter_desc} if filter_desc else {}
    small = large_image.with_name("small.png")
    small.write_bytes(make_image(np.zeros((8, 8), np.uint8), codec="png", pix_fmt="gray"))
    code = (
        "import pathlib, resource, sys, numpy as np, spdl_media as sm\n"
        "image = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "sm.load_image(sys.argv[2])\n"
        "start = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (start + {megabytes} * 2**20,) * 2)\n"
        "config = sm.decode_config(on_corrupt='drop')\n"
        f"sm.load_image_batch([image], on_error='skip', decode_config=config, **{options})\n"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    last = run_code(code, large_image, small, status=1).stderr.splitlines()[-1]
    assert re.search(f"MemoryError: {message}", last), last


def test_no_such_stream() -> None:
    data = container("matroska")
    with pytest.raises(sm.DemuxError, match="there is no stream 7; the streams are 0: video"):
        sm.demux_video(data, stream_index=7)
    with pytest.raises(sm.DemuxError, match="there is no stream -1; the streams are 0: video"):
        sm.demux_video(data, stream_index=-1)
    with pytest.raises(sm.DemuxError, match="there is no audio stream; the streams are 0: video"):
        sm.demux_audio(data)
    with pytest.raises(sm.DemuxError, match="stream 0 is video, not audio"):
        sm.demux_audio(data, stream_index=0)
    for demux in (sm.demux_video, sm.demux_image):
        with pytest.raises(
            sm.DemuxError, match="there is no video stream; the streams are 0: audio"
        ):
            demux(container("wav"))
    with pytest.raises(TypeError, match="stream_index must be an int, not '0'"):
        sm.demux_video(data, stream_index="0")  # type: ignore[arg-type]


@each("name", ["matroska", "mp4, index in front", "mpeg-ts", "avi", "wav", "flac", "mp3"])
@each("window", [(5, 6), (100, None), (1e9, 2e9), (-9, -3), (None, -1)])
def test_window_outside_the_file_is_empty(name: str, window: tuple[float, float]) -> None:
    is_video = CONTAINERS[name][0] == "video"
    demux = sm.demux_video if is_video else sm.demux_audio
    for filter_desc in (None, "null" if is_video else "anull"):
        packets = demux(container(name), timestamp=window)
        frames = sm.decode_packets(packets, filter_desc)
        assert len(frames) == 0
        assert frames.timestamps == () if is_video else True


@each(
    "filter_desc",
    ["skale=2:2", "scale=w=abc", "scale=nosuch=1", "scale=2:2,", "crop=9999:1", "split"],
)
def test_bad_filter(filter_desc: str) -> None:
    for packets in (sm.demux_image(made("png")), sm.demux_video(container("matroska"))):
        with pytest.raises(sm.FilterError) as caught, within_five_seconds():
            sm.decode_packets(packets, filter_desc)
        assert caught.value.filter_desc
        assert str(caught.value)


def test_unknown_names_are_refused_before_anything_is_opened() -> None:
    data = container("matroska")
    with pytest.raises(ValueError, match="matroskaa"):
        sm.demux_video(data, demux_config=sm.demux_config(format="matroskaa"))
    with pytest.raises(ValueError, match="has no option 'fast'"):
        sm.demux_video(data, demux_config=sm.demux_config(format_options={"fast": 1}))
    packets = sm.demux_video(data)
    with pytest.raises(ValueError, match=r"no decoder of that name.*default decoder is 'h264'"):
        sm.decode_packets(packets, decode_config=sm.decode_config(decoder="h264x"))
    with pytest.raises(ValueError, match="decodes png, but the stream is h264"):
        sm.decode_packets(packets, decode_config=sm.decode_config(decoder="png"))
    with pytest.raises(ValueError, match=r"has no option 'thread'. Did you mean 'threads'"):
        sm.decode_packets(packets, decode_config=sm.decode_config(decoder_options={"thread": 1}))


def hostile() -> Iterator[bytes]:
    """Yield headers of real files with noise, which parsers read for a while before they fail."""
    rng = np.random.default_rng(21)
    for data in [*map(made, STILLS), *map(container, CONTAINERS)]:
        for share in (0.02, 0.2):
            damaged = bytearray(data[:30000])
            for place in rng.integers(4, min(len(damaged), 2000), 12):
                damaged[place] = rng.integers(256)
            yield bytes(damaged[: max(40, int(len(damaged) * (1 - share)))])


def test_hostile_files_crash_nothing(tmp_path: Path) -> None:
    for number, data in enumerate(hostile()):
        (tmp_path / f"{number:03}.dat").write_bytes(data)
    code = (
        "import faulthandler, pathlib, sys; faulthandler.enable()\n"
        "from damage import read_everything\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.dat')):\n"
        "    read_everything(path); read_everything(path.read_bytes())\n"
        "print('alive')\n"
    )
    done = run_code(code, tmp_path)
    assert (done.stdout, done.stderr) == ("alive\n", "")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_errors_leak_nothing(tmp_path: Path) -> None:
    files = []
    for number, data in enumerate([*hostile(), *NOT_MEDIA.values(), b"", container("wav")[:5000]]):
        files.append(tmp_path / f"{number}.dat")
        files[-1].write_bytes(data)
    files += [tmp_path / "none", tmp_path]

    def round() -> None:
        for path in files:
            read_everything(path)

    round()
    round()
    gc.collect()
    before, memory = descriptors(), resident()
    for _ in range(3):
        round()
    assert descriptors() <= before
    # Allow 1 MiB of growth per 500 failures; a leaked decoder or packet per failure would be far more.
    assert resident() - memory < 12 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_size_that_an_index_states_is_not_read_into_memory(tmp_path: Path) -> None:
    path, size = tmp_path / "long.mp4", 256 << 20  # a sparse file
    with path.open("wb") as file:
        file.write(
            struct.pack(">I4s4s12x", 24, b"ftyp", b"isom") + struct.pack(">I4s", size, b"moov")
        )
        file.truncate(24 + size)
    tracemalloc.start()
    try:
        with pytest.raises(sm.DemuxError, match="there is no audio stream"):
            sm.load_audio(path)
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()


def test_an_encrypted_mp4_names_what_it_needs() -> None:
    """FFmpeg gives the encrypted packets to the decoders: some find no frame, some report damage."""
    key = "00112233445566778899aabbccddeeff"
    tracks = [
        VideoTrack(frames=index_frames(6, 64, 48), codec="libx265"),
        AudioTrack(samples=np.sin(np.arange(24000) / 20)[:, None].astype(np.float32), codec="aac"),
    ]
    secret = {"encryption_scheme": "cenc-aes-ctr", "encryption_key": key, "encryption_kid": key}
    data, clear = (make_media(tracks, format="mp4", options=options) for options in (secret, {}))
    with_key = sm.demux_config(format_options={"decryption_key": key})
    for load in (sm.load_video, sm.load_audio):
        for window in (None, (0.1, 0.2)):
            with pytest.raises(sm.DemuxError, match=r"^bytes .* is encrypted .*'decryption_key'"):
                load(data, window)
            found = load(data, window, demux_config=with_key).array
            np.testing.assert_array_equal(found, load(clear, window).array)


def test_an_encrypted_webm_is_refused() -> None:
    """FFmpeg gives the encrypted packets to the decoders: that of Opus finds samples in any bytes."""
    tone, file = np.sin(np.arange(9600) / 20, dtype=np.float32)[None], io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", 48000, layout="mono")
        stream.metadata["title"] = "N" * 100
        frame = av.AudioFrame.from_ndarray(tone, "flt", "mono")
        frame.sample_rate = 48000
        container.mux([*stream.encode(frame), *stream.encode(None)])

    def element(name: str, content: bytes) -> bytes:
        return bytes.fromhex(name) + bytes([0x80 | len(content)]) + content

    # In place of the track's name: an encoding of type 1 (encryption), by AES, with the ID of a key.
    key = element("5035", element("47e1", b"\5") + element("47e2", b"k" * 16))
    encoding = element("6d80", element("6240", element("5033", b"\1") + key))
    name = element("536e", b"N" * 100)
    padded = encoding + element("ec", bytes(len(name) - len(encoding) - 2))
    clear, secret = file.getvalue(), file.getvalue().replace(name, padded)
    assert len(sm.load_audio(clear).array[0]) > 9000
    for load in (sm.load_audio, sm.demux_audio):
        with pytest.raises(sm.DemuxError, match=r"^bytes .* is encrypted.* Decrypt the file$"):
            load(secret)
