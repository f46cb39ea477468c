"""FFmpeg's log messages: not on stderr by default, shown on request, and quoted in the error they explain."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import av.logging
import effort
import numpy as np
import pytest
from damage import VIDEO, container, flipped, overwritten
from programs import run_code

import spdl_media as sm

# Private: an error of the public functions shows only the messages of one step of a call.
from spdl_media._ffmpeg import LogState, describe, ffmpeg_log

READ_ALL = (
    "import pathlib, sys, spdl_media as sm\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
    "from damage import read_everything\n"
    "files = sorted(pathlib.Path(sys.argv[1]).glob('*.dat'))\n"
    "{setup}\n"
    "for path in files:\n"
    "    read_everything(path); read_everything(path.read_bytes())\n"
    "with ThreadPoolExecutor(4) as threads:\n"
    "    list(threads.map(read_everything, files))\n"
    "print('done')\n"
)


@pytest.fixture(scope="module")
def damaged_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    names = ("jpeg", "png", "h264", "hevc", "mpeg4", "ffv1", "aac", "flac", "mp3", "av1")
    for name in names:
        for number, data in enumerate([*flipped(name), *overwritten(name)][::8]):
            (folder / f"{name}-{number}.dat").write_bytes(data)
    for name in ("mp4, index in front", "ogg, opus", "mpeg-ts", "wav"):
        data = container(name)
        (folder / f"cut-{name[:3]}.dat").write_bytes(data[: len(data) // 2])
        (folder / f"flip-{name[:3]}.dat").write_bytes(data[:5000] + b"\0\1\2\3" + data[5004:])
    (folder / "text.dat").write_bytes(b"no media at all\n" * 99)
    return folder


def run(folder: Path, setup: str = "") -> CompletedProcess[str]:
    done = run_code(READ_ALL.format(setup=setup), folder)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return done


# For tests in which one file with messages is enough.
FFV1 = "files = [path for path in files if path.name.startswith('ffv1')]\n"


def test_nothing_reaches_stderr(damaged_files: Path) -> None:
    assert run(damaged_files).stderr == ""


def test_nothing_reaches_stderr_when_threads_decode(damaged_files: Path) -> None:
    """FFmpeg's own threads log as well, outside of any call of this library."""
    setup = (
        "import damage\n"
        "make = sm.decode_config\n"
        "sm.decode_packets = lambda packets, real=sm.decode_packets: real(\n"
        "    packets, None, make(decoder_options={'threads': 2}))\n"
        "files = [path for path in files if path.name[:4] in ('h264', 'hevc', 'mpeg', 'ffv1')]\n"
    )
    assert run(damaged_files, setup).stderr == ""


ABANDON = (
    "import pathlib, sys, spdl_media as sm\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
    "config = sm.decode_config(decoder_options={'threads': 2})\n"
    "def read(path):\n"
    "    try:\n"
    "        packets = sm.demux_video(path)\n"
    "        decoder = sm.VideoDecoder(packets.codec, decode_config=config, num_frames=1)\n"
    "        next(decoder.decode(packets), None)\n"
    "        sm.decode_packets(packets, None, config, num_frames=2)\n"
    "        sm.decode_packets(sm.demux_image(path), None, config)\n"
    "    except sm.MediaError:\n"
    "        pass\n"
    "names = ('h264', 'hevc', 'mpeg', 'ffv1')\n"
    "files = [p for p in pathlib.Path(sys.argv[1]).glob('*.dat') if p.name[:4] in names]\n"
    "with ThreadPoolExecutor(4) as threads:\n"
    "    list(threads.map(read, files * int(sys.argv[2])))\n"
    "print('done')\n"
)


def test_decoders_with_threads_can_be_left_half_way(damaged_files: Path) -> None:
    """A logging FFmpeg thread waits for the GIL, so the GIL must be released while its decoder is freed."""
    done = run_code(ABANDON, damaged_files, 40 if effort.LONG else 10)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_lines_reach_stderr_when_asked(damaged_files: Path) -> None:
    said = run(damaged_files, FFV1 + "sm.set_log_level('error')").stderr
    assert "slice CRC mismatch" in said
    assert "Traceback" not in said


def test_lines_stay_away_again(damaged_files: Path) -> None:
    setup = FFV1 + "sm.set_log_level('error'); sm.set_log_level('quiet')"
    assert run(damaged_files, setup).stderr == ""


def test_a_program_s_own_logging_is_used_when_asked(damaged_files: Path) -> None:
    setup = FFV1 + (
        "import logging; sm.set_log_level('error')\n"
        "logging.basicConfig(format='%(name)s says', level='ERROR', force=True)\n"
        "logging.getLogger('libav').handlers.clear()\n"
    )
    said = run(damaged_files, setup).stderr
    assert "libav.ffv1 says" in said
    assert "CRC" not in said


@pytest.fixture
def level() -> Iterator[None]:
    yield
    sm.set_log_level("quiet")
    for handler in list(logging.getLogger("libav").handlers):
        if isinstance(handler, logging.StreamHandler):
            logging.getLogger("libav").removeHandler(handler)


@pytest.mark.usefixtures("level")
def test_lines_go_to_the_logger_libav(caplog: pytest.LogCaptureFixture) -> None:
    data = next(iter(flipped("ffv1")))
    for asked in ("error", "quiet"):
        sm.set_log_level(asked)
        caplog.clear()
        with pytest.raises(sm.DecodeError):
            sm.decode_packets(sm.demux_video(data))
        lines = [r for r in caplog.records if "CRC mismatch" in r.getMessage()]
        assert bool(lines) == (asked == "error")
        assert all(r.name.startswith("libav") and r.levelno == logging.ERROR for r in lines)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["quiet", "error", "warning", "info", "verbose", "debug"])
def test_every_level_can_be_set(name: str) -> None:
    sm.set_log_level(name)
    expected = av.logging.ERROR if name == "quiet" else getattr(av.logging, name.upper())
    assert av.logging.get_level() == expected


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level must be one of.*'quiet'.*not 'loud'"):
        sm.set_log_level("loud")


FAILURES: dict[str, Callable[[], sm.Packets]] = {
    "png": lambda: sm.demux_image(next(iter(flipped("png")))),
    "aac": lambda: sm.demux_audio(next(iter(overwritten("aac")))),
    "mov": lambda: sm.demux_video(container("mp4, index at the end")[:20000]),
}


def failure(name: str) -> str:
    with pytest.raises(sm.MediaError) as caught:
        sm.decode_packets(FAILURES[name]())
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_errors_quote_the_last_line_of_their_own_call() -> None:
    """Also while other threads fail with other errors."""
    alone = {name: failure(name) for name in FAILURES}
    assert "(moov atom not found)" in alone["mov"]
    assert "(inflate returned error" in alone["png"]
    names = list(FAILURES) * 60
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(failure, names)) == [alone[name] for name in names]


def test_lines_since_a_mark_are_those_of_one_step_and_thread() -> None:
    def say(text: str) -> None:
        av.logging.log(av.logging.ERROR, "test", text)

    with ffmpeg_log() as lines:
        say("of the first packet")
        mark = len(lines)
        with ThreadPoolExecutor(1) as other:
            other.submit(say, "of another thread").result()
        assert lines[mark:] == []
        assert describe(ValueError("refused"), lines[mark:]) == "refused"
        say("of the second packet")
        assert describe(ValueError("refused"), lines[mark:]) == "refused (of the second packet)"
    assert [text for _, _, text in lines] == ["of the first packet", "of the second packet"]


def is_heard() -> bool:
    """Whether PyAV takes the GIL for FFmpeg's messages."""
    with av.logging.Capture() as lines:
        av.logging.log(av.logging.ERROR, "test", "something")
    return bool(lines)


@pytest.mark.usefixtures("level")
def test_ffmpeg_is_heard_only_where_its_lines_are_wanted() -> None:
    sm.load_image(sm.testing.make_image(np.zeros((8, 8, 3), np.uint8), codec="mjpeg"))
    assert not is_heard()
    with ffmpeg_log(), ffmpeg_log():
        assert is_heard()
    assert not is_heard()
    for name in FAILURES:
        failure(name)
        assert not is_heard()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(failure, list(FAILURES) * 20))
    assert not is_heard()
    sm.set_log_level("error")
    assert is_heard()
    sm.set_log_level("quiet")
    assert not is_heard()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("make", [VIDEO["vp9"], lambda: container("mp4, index in front")])
def test_no_error_is_shown_for_a_video_that_has_none(
    make: Callable[[], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """FFmpeg logs one for each decoder that it may not open."""
    sm.set_log_level("error")
    sm.load_video(make())
    assert not caplog.messages


def raw_hevc(params: str = "hash=0") -> bytes:
    options = {"x265-params": f"{params}:log-level=none:pools=none"}
    frames = sm.testing.index_frames(1, 64, 48)
    return sm.testing.make_video(frames, codec="libx265", format="hevc", options=options)


@pytest.mark.parametrize(
    ("make", "tells"),
    [
        (lambda: container("mp4, index in front"), False),
        (VIDEO["hevc"], False),
        (VIDEO["hevc with hashes"], True),
        (lambda: raw_hevc() + b"\0\0\1\x7c\1\x19\x80", True),  # with metadata of Dolby Vision
        (lambda: raw_hevc() + raw_hevc("hash=1"), True),
    ],
)
def test_a_video_is_loaded_without_hearing_ffmpeg_if_no_checksum_fails_in_the_log_alone(
    make: Callable[[], bytes], tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing H.264 logs a line for each slice, at each of which threads would wait for each other."""
    blocks: list[int] = []
    monkeypatch.setattr(LogState, "update", lambda: blocks.append(LogState.num_open))
    assert sm.load_video(make()).shape[0] > 0
    assert (blocks != []) == tells


@pytest.mark.parametrize("name", ["mjpeg", "ffv1", "hevc with hashes"])
def test_a_video_that_cannot_be_loaded_has_ffmpeg_s_reason(name: str) -> None:
    data = next(iter(overwritten(name)))
    with pytest.raises(sm.DecodeError) as wanted:
        sm.decode_packets(sm.demux_video(data))
    with pytest.raises(sm.DecodeError) as caught:
        sm.load_video(data)
    assert str(caught.value) == str(wanted.value)


def test_a_program_that_has_set_a_level_of_pyav_hears_ffmpeg_always() -> None:
    code = """
import av.logging
av.logging.set_level(av.logging.WARNING)
import spdl_media as sm
from spdl_media._ffmpeg import ffmpeg_log
with ffmpeg_log():
    pass
with av.logging.Capture() as lines:
    av.logging.log(av.logging.WARNING, "test", "something")
print(av.logging.get_level(), lines)
"""
    assert run_code(code).stdout == f"{av.logging.WARNING} [(24, 'test', 'something')]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_child_that_is_forked_in_a_block_of_another_thread_decodes() -> None:
    code = """
import os, sys, threading, warnings
from spdl_media import _ffmpeg
warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork, since CPython 3.12
entered, leave = threading.Event(), threading.Event()
def hold():
    with _ffmpeg.ffmpeg_log(), _ffmpeg.LogState.lock:
        entered.set()
        leave.wait()
    print("left")
thread = threading.Thread(target=hold)
thread.start()
entered.wait()
if child := os.fork():
    leave.set()
    thread.join()
    sys.exit(os.waitpid(child, 0)[1])
with _ffmpeg.ffmpeg_log():
    pass
os._exit(_ffmpeg.LogState.num_open)
"""
    done = run_code(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
