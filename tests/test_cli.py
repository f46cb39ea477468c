"""The command spdl-media as users run it: in a pipe, in a terminal, and with bad input."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from effort import each
from rich.progress import Progress
from still_metadata import gray_tiff
from terminal import Terminal

import spdl_media as sm
from spdl_media.cli import check, main
from spdl_media.cli.bench import Measured, Setting, best_of, search
from spdl_media.cli.check import check_file
from spdl_media.cli.files import open_state
from spdl_media.testing import index_frames, make_image, make_tone, make_video

CHECKOUT = Path(__file__).resolve().parent.parent
MEDIA = CHECKOUT / "samples" / "media"
COMMAND = [sys.executable, "-m", "spdl_media"]
# Use the package of this checkout, and no settings of colours and widths from the environment.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")},
    "PYTHONPATH": str(CHECKOUT),
}


def run(*arguments: object, cwd: Path, status: int = 0, **options: object) -> tuple[bytes, str]:
    """Run the command without a terminal; return stdout and stderr."""
    command = [*COMMAND, *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, check=False, **streams)
    errors = done.stderr.decode()
    assert done.returncode == status, errors
    assert "Traceback" not in errors
    return done.stdout or b"", errors


@pytest.fixture
def run_here(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[bytes, str]]:
    """Return a function like :func:`run` that runs the command in this process and folder."""

    def run_it(*arguments: object, status: int = 0) -> tuple[bytes, str]:
        found = main(list(map(str, arguments)))
        printed = capfdbinary.readouterr()
        assert found == status, printed
        assert b"Traceback" not in printed.err
        return printed.out, printed.err.decode()

    return run_it


def show(*arguments: object, cwd: Path, columns: int, status: int) -> Terminal:
    """Run the command in a terminal."""
    program = "import os, sys; os.chdir(sys.argv.pop(1)); from spdl_media.cli import main; sys.exit(main())"
    terminal = Terminal([sys.executable, "-c", program, cwd, *arguments], columns, ENVIRONMENT)
    assert terminal.wait() == status, terminal.text()
    assert "Traceback" not in terminal.text()
    return terminal


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains a folder with all kinds of odd entries."""
    top = tmp_path_factory.mktemp("odd")
    folder, outside = top / "data", top / "outside"
    (folder / "sub").mkdir(parents=True)
    outside.mkdir()
    photo = (MEDIA / "technician.jpg").read_bytes()
    for name in ("data/sub/good.jpg", "data/sub/copy.png", "outside/other.jpg"):
        (top / name).write_bytes(photo)
    # Names with a line break, invalid UTF-8, rich markup, and a terminal control code.
    Path(os.fsdecode(os.fsencode(folder) + b"/[red]\xff\n\x1b[2J.jpg")).write_bytes(photo[:9000])
    (folder / "empty.mp4").touch()
    (folder / "notes.txt").write_text("no media")
    (folder / "subtitles.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n")
    (folder / ".hidden.jpg").write_text("left out")
    sm.save_audio(folder / "tone.mp4", make_tone(8000, 8000).T, 8000)
    frames = index_frames(9, 64, 48)
    (folder / "sound.mp4").write_bytes(make_video(frames, codec="libx264", format="mp4"))
    for name, drop in (("whole.mkv", 0), ("short.mkv", 400)):
        content = make_video(frames, codec="ffv1", format="matroska", pix_fmt="bgr0")
        (folder / name).write_bytes(content[: len(content) - drop])
    (folder / "loop").symlink_to(".")
    (folder / "sub" / "up").symlink_to("../../data")
    (folder / "sub" / "beside").symlink_to("../../outside")
    (folder / "twice").symlink_to("../outside")
    (folder / "itself").symlink_to("itself")
    (folder / "broken.jpg").symlink_to("nothing.jpg")
    os.mkfifo(folder / "pipe")
    return top


# Kind, name relative to the folder, and a part of the reason.
FOUND = [
    ("damaged", b"[red]\xff\n\x1b[2J.jpg", "the mjpeg data is cut short"),
    ("damaged", b"empty.mp4", r"the source is empty \(0 bytes\)"),
    ("damaged", b"short.mkv", "cut short"),
    ("unreadable", b"broken.jpg", "a link that leads nowhere"),
    ("unreadable", b"itself", "Too many levels of symbolic links"),
    ("odd", b"loop", "a link to a folder that it lies in; not followed"),
    ("odd", b"pipe", "neither a file nor a folder; not opened"),
    ("odd", b"sub/copy.png", r"an image of the format mjpeg, and named \.png"),
    ("odd", b"sub/up", "a link to a folder that it lies in; not followed"),
    ("odd", b"tone.mp4", r"has no video, and is named \.mp4"),
    ("duplicate", b"sub/good.jpg", r"the same bytes as data/sub/(copy\.png|beside/other\.jpg)"),
]


def check_rows(rows: list[dict[str, str]]) -> None:
    found = {(row["kind"], os.fsencode(row["path"])): row["reason"] for row in rows}
    # Which of two links leads to a folder depends on the file system.
    found = {key: value for key, value in found.items() if b"other.jpg" not in key[1]}
    if duplicate := found.pop(("duplicate", b"data/sub/copy.png"), None):
        assert "other.jpg" in duplicate
    assert sorted(found) == sorted((kind, b"data/" + name) for kind, name, _ in FOUND)
    for kind, name, reason in FOUND:
        if kind != "duplicate":
            assert re.search(reason, found[kind, b"data/" + name])


def test_check_reports_all_that_is_wrong_in_each_form(
    odd_folder: Path,
    run_here: Callable[..., tuple[bytes, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(odd_folder)
    output, errors = run_here("check", "data", "--json", status=1)
    report = json.loads(output)
    assert errors == ""
    assert report["complete"]
    assert (report["sound"], report["other"], report["unchecked"]) == (4, 2, 0)
    check_rows(report["files"])

    output, errors = run_here("check", "data", "-o", "report.csv", status=1)
    text = (odd_folder / "report.csv").read_text(encoding="utf-8", errors="surrogateescape")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    check_rows(rows)
    assert errors == ""
    summary = r"14 files in \d+\.\d s: 4 sound, 3 damaged, 2 unreadable, 5 odd, 2 duplicate; not media: 2\n"
    assert re.fullmatch(summary, output.decode())

    # Not a terminal: a line for each file, without colours.
    lines = run("check", "data", cwd=odd_folder, status=1)[0].decode().splitlines()
    assert len(lines) == len(rows) + 1
    assert "\x1b" not in "".join(lines)
    assert lines[0].startswith(
        "damaged: data/[red]\\xff\\n\\x1b[2J.jpg: the mjpeg data is cut short"
    )


def test_check_leaves_out_warnings_of_pillow_which_name_no_file(
    tmp_path: Path,
    run_here: Callable[..., tuple[bytes, str]],
    recwarn: pytest.WarningsRecorder,
) -> None:
    # Pillow reads TIFFs without rows per strip. The value of a tag is missing.
    image = gray_tiff(index_frames(1, 64, 48)[0, ..., 0], rows_per_strip=48)
    image = image.replace(struct.pack("<HHII", 278, 4, 1, 48), struct.pack("<HHII", 278, 4, 1, 0))
    tag = struct.pack("<HHII", 285, 2, 400, len(image))
    (tmp_path / "page.tif").write_bytes(image.replace(struct.pack("<HHII", 274, 4, 1, 1), tag))
    run_here("check", tmp_path)
    assert not recwarn.list


@pytest.mark.parametrize("columns", [40, 80])
def test_check_in_a_terminal(odd_folder: Path, columns: int) -> None:
    terminal = show("check", "data", cwd=odd_folder, columns=columns, status=1)
    lines = terminal.lines()
    joined = " ".join(" ".join(lines).split())
    # The progress bar is gone, and no text is lost by wrapping.
    assert joined.startswith("damaged: data/[red]\\xff\\n\\x1b[2J.jpg: the mjpeg data is cut short")
    assert " bad " not in joined
    assert "a link to a folder that it lies in; not followed" in joined
    assert joined.endswith("not media: 2")
    assert b" 0 bad " in terminal.output
    assert b"\x1b[31mdamaged" in terminal.output


def test_what_cannot_be_written_is_a_sentence(
    odd_folder: Path,
    run_here: Callable[..., tuple[bytes, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    for arguments in (["check", "data", "--csv"], ["probe", "data/sound.mp4"]):
        with Path("/dev/full").open("wb") as full:
            _, errors = run(*arguments, cwd=odd_folder, status=2, stdout=full)
        assert re.fullmatch(r"spdl-media: .*: No space left on device.*\n", errors)
    # The results, which may have taken hours, are still printed.
    monkeypatch.chdir(odd_folder)
    output, errors = run_here("check", "data", "--json", "-o", "/dev/full", status=2)
    assert errors == "spdl-media: /dev/full: No space left on device. Free some space\n"
    assert output.startswith(b"damaged: data/")
    _, errors = run_here("check", "data", "--state", "/dev/full", status=2)
    assert "/dev/full cannot be used: database or disk is full. Free some space" in errors


# Runs commands as user nobody if the tests run as root, who may read everything. All modules are imported
# before, because nobody may not be allowed to read Python's own files.
AS_NOBODY = """
import json, os, pwd, sys
from spdl_media.cli import main
folder, *commands = json.loads(sys.argv[1])
main(["check", folder, "-o", os.devnull])
main(["probe", folder])
main(["bench", folder, "--chart", "missing/chart.svg"])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(pwd.getpwnam("nobody").pw_gid)
    os.setuid(pwd.getpwnam("nobody").pw_uid)
print("here it begins", flush=True)
print("here it begins", file=sys.stderr, flush=True)
print([main(command) for command in commands])
"""


def test_without_permission_a_file_is_a_row_and_a_folder_a_sentence(tmp_path: Path) -> None:
    pwd = pytest.importorskip("pwd")
    if os.geteuid() == 0 and "nobody" not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip("root may read everything, and there is no user called nobody")
    (tmp_path / "data" / "folder").mkdir(parents=True)
    (tmp_path / "first").mkdir()
    for name in ("data/good.jpg", "data/locked.jpg", "data/folder/any.jpg", "first/good.jpg"):
        shutil.copy(MEDIA / "technician.jpg", tmp_path / name)
    (tmp_path / "old.state").touch()
    # Whatever the umask: nobody may read the folders and the good image.
    for name, mode in {".": 0o555, "data": 0o755, "data/good.jpg": 0o644}.items():
        (tmp_path / name).chmod(mode)
    (tmp_path / "data" / "locked.jpg").chmod(0)
    (tmp_path / "data" / "folder").chmod(0)
    commands = [
        ["check", "data"],
        ["check", "data/folder"],
        ["check", "data", "-o", "report.csv"],
        ["check", "data", "--state", "new.state"],
        ["check", "data", "--state", "old.state"],
        ["probe", "data/locked.jpg"],
        ["bench", "data", "--chart", "chart.svg"],
    ]
    arguments = json.dumps([str(tmp_path / "first"), *commands])
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, arguments],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        tmp_path.chmod(0o755)
        (tmp_path / "data" / "folder").chmod(0o755)
    output, errors = (
        text.split("here it begins\n")[1].splitlines() for text in (done.stdout, done.stderr)
    )
    rows, summary, statuses = output[:-2], output[-2], output[-1]
    folder, file = sorted(rows)
    assert folder == "unreadable: data/folder: Permission denied"
    assert file.startswith("unreadable: data/locked.jpg: cannot be read: Permission denied. Check")
    assert re.search("1 sound, 0 damaged, 2 unreadable", summary)
    assert statuses == "[1, 2, 2, 2, 2, 1, 2]"
    expected = [
        "Directory 'data/folder' is not readable",
        "report.csv: Permission denied. Name another file or folder",
        "new.state cannot be used: unable to open database file. Please name another file by --state",
        "old.state cannot be used: ",  # SQLite's reason depends on its version
        "data/locked.jpg: cannot be read: Permission denied",
        "chart.svg: Permission denied. Name another file or folder",
    ]
    assert [part in line for part, line in zip(expected, errors, strict=True)] == [True] * 6, errors


def refusal(capfd: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    """Run the command in this process, and return its one line of error."""
    assert main([str(one) for one in arguments]) == status
    errors = capfd.readouterr().err
    assert errors.startswith("spdl-media: ")
    assert errors.count("\n") == 1
    return errors


def test_sentences_of_refusal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, other, state = tmp_path / "empty", tmp_path / "other", tmp_path / "a.state"
    empty.mkdir()
    other.mkdir()
    (empty / "labels.csv").write_text("a,b")
    assert re.search("no media in .*empty, which has 1 other", refusal(capfd, "check", empty))
    assert "is the state of" not in refusal(capfd, "check", empty, "--state", state)
    assert re.search(
        "a.state is the state of .*empty, and not of .*other",
        refusal(capfd, "check", other, "--state", state),
    )
    assert "file is not a database" in refusal(
        capfd, "check", empty, "--state", empty / "labels.csv"
    )
    assert "unable to open" in refusal(capfd, "check", empty, "--state", tmp_path)
    assert "--json or --csv, not both" in refusal(capfd, "check", empty, "--json", "--csv")
    missing = tmp_path / "missing" / "report.csv"
    assert re.search(
        r"missing/report.csv: No such file or directory\. Name another",
        refusal(capfd, "check", empty, "-o", missing),
    )
    assert "does not exist. See: spdl-media check --help" in refusal(capfd, "check", missing)
    for command in ("check", "bench"):
        assert "labels.csv' is a file. See: " in refusal(capfd, command, empty / "labels.csv")
    assert f"argument ({missing}). See: " in refusal(capfd, "contact-sheet", missing, missing)
    # Newer versions of click add a suggestion.
    assert re.search(
        r"No such command 'chek'\.( Did you mean 'check'\?)? See: ", refusal(capfd, "chek")
    )
    assert "No such file" in refusal(capfd, "probe", missing, status=1)
    assert "No such file" in refusal(capfd, "contact-sheet", missing)
    clip = MEDIA / "nasa_13013.mp4"
    assert "13 is not in the range 1<=x<=12" in refusal(capfd, "contact-sheet", clip, "--rows", 13)
    wrong = tmp_path / "sheet.nothing"
    assert re.search(
        "sheet.nothing: there is no image encoder for the suffix '.nothing'. Use .jpg",
        refusal(capfd, "contact-sheet", clip, "-o", wrong),
    )
    assert main(["check", str(missing), "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err
    assert "range 0<x<=3600" in refusal(capfd, "bench", empty, "--seconds", 0)
    assert "above 0, not nan" in refusal(capfd, "bench", empty, "--seconds", "nan")
    chart = tmp_path / "chart.svg"
    assert f"no media files in {empty}" in refusal(capfd, "bench", empty, "--chart", chart)
    monkeypatch.setattr("spdl_media.cli.bench._LOOKED_AT", 1)
    assert "no media files in the first 1 files of" in refusal(capfd, "bench", empty)
    assert not chart.exists()
    address = "http://127.0.0.1:1/clip.mp4"
    assert f"spdl-media: {address}: cannot" in refusal(capfd, "contact-sheet", address)


def test_check_without_stdout_writes_its_report(
    odd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon has none. The suffix of the report is in capitals."""
    report = tmp_path / "REPORT.CSV"
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["check", str(odd_folder / "data"), "-o", str(report)]) == 1
    sys.stdout.close()  # what main has opened instead
    assert report.read_bytes().startswith(b"kind,path,reason\n")


def test_help_has_examples_and_fits(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 0
    commands = re.findall(r"^  ([a-z-]+) {2,}\S", capfd.readouterr().out, re.MULTILINE)
    for command in commands[commands.index("bench") :]:
        assert main([command, "--help"]) == 0
        assert f"Examples:\n    spdl-media {command}" in capfd.readouterr().out
    lines = show("check", "-h", cwd=tmp_path, columns=40, status=0).lines()
    assert "  report damaged, unreadable, odd and" in lines


def test_without_its_libraries_the_command_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert re.search(r'needs rich, .*Install it: pip install "\.\[cli\]"', refusal(capfd, "doctor"))


def test_two_checks_do_not_share_a_state(
    odd_folder: Path,
    tmp_path: Path,
    run_here: Callable[..., tuple[bytes, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = tmp_path / "a.state"
    arguments = ["check", "data", "--state", state]
    with open_state(state, odd_folder / "data"):
        _, errors = run(*arguments, cwd=odd_folder, status=2)
        assert re.fullmatch(r"spdl-media: .*a\.state is in use by another check\. Wait.*\n", errors)
    monkeypatch.chdir(odd_folder)
    run_here(*arguments, status=1)


def test_check_continues_after_ctrl_c_and_decodes_only_what_is_new(tmp_path: Path) -> None:
    folder, state = tmp_path / "data", tmp_path / "a.state"
    folder.mkdir()
    count = 1500
    photo = make_image(index_frames(1, 64, 48)[0], codec="mjpeg")
    for number in range(count):
        # Files of one size, but all different: data after the end of a JPEG is ignored.
        (folder / f"{number}.jpg").write_bytes(photo + number.to_bytes(4, "big"))
    command = [*COMMAND, "check", folder, "--state", state, "--threads", 1]
    terminal = Terminal(command, 80, ENVIRONMENT)
    terminal.read_until(lambda text: re.search(r" [1-9][\d]{2,}/1500", text) is not None)
    terminal.press(b"\x03")
    assert terminal.wait() == 130
    text = " ".join(terminal.text().split())
    (left,) = map(int, re.findall(r"interrupted: (\d+) files were found but not checked", text))
    assert 0 < left < count
    assert "Run it again to continue" in text

    # Known results are taken from the state, even if they are outdated, because size and time are unchanged.
    (checked,) = map(int, re.findall(r"(\d[\d,]*) files in", text.replace(",", "")))
    assert checked == count - left
    import sqlite3

    with sqlite3.connect(state) as database:
        paths = [
            os.fsdecode(p)
            for (p,) in database.execute("SELECT path FROM files WHERE kind = 'sound'")
        ]
    database.close()
    for path, nanoseconds in ((paths[0], 0), (paths[1], 1_000_000_000)):
        status = (folder / path).stat()
        (folder / path).write_bytes(bytes(status.st_size))
        os.utime(folder / path, ns=(status.st_atime_ns, status.st_mtime_ns + nanoseconds))
    (folder / paths[2]).unlink()
    output, _ = run("check", folder, "--state", state, "--json", cwd=tmp_path, status=1)
    report = json.loads(output)
    assert (report["sound"], report["damaged"], report["unchecked"]) == (count - 2, 1, 0)
    assert report["duplicate"] == 0  # both are zeros now, but only one was read again
    assert report["files"][0]["path"] == str(folder / paths[1])


def test_a_check_that_is_killed_leaves_a_state_to_continue_from(tmp_path: Path) -> None:
    folder, state = tmp_path / "data", tmp_path / "a.state"
    folder.mkdir()
    photo = (MEDIA / "technician.jpg").read_bytes()
    for number in range(200):
        (folder / f"{number}.jpg").write_bytes(photo)
    terminal = Terminal([*COMMAND, "check", folder, "--state", state], 80, ENVIRONMENT)
    terminal.read_until(lambda text: "/200" in text)
    terminal.kill(signal.SIGKILL)
    output, _ = run("check", folder, "--state", state, "--json", cwd=tmp_path, status=1)
    report = json.loads(output)
    assert (report["sound"], report["duplicate"], report["complete"]) == (200, 199, True)


def test_results_are_saved_while_a_long_file_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("long", "short"):
        (tmp_path / name).write_text(name)
    was_saved = threading.Event()

    def decode(path: Path) -> tuple[str, None]:
        # The long file ends when the result of the other one has been saved.
        is_sound = path.name == "short" or was_saved.wait(60)
        return "sound" if is_sound else "damaged", None

    monkeypatch.setattr(check, "check_file", decode)
    with open_state(None, tmp_path) as files, Progress(disable=True) as progress:
        save = files.save
        monkeypatch.setattr(files, "save", lambda *result: save(*result) or was_saved.set())
        check.check_folder(tmp_path, files, 2, progress)
        assert files.counts() == {"sound": 2}


def test_a_check_never_holds_a_whole_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = index_frames(300, 64, 48)
    (tmp_path / "long.mkv").write_bytes(make_video(frames, format="matroska", codec="ffv1"))
    sizes = []

    class Watched(sm.VideoDecoder):
        def decode(self, packets: sm.VideoPackets) -> Any:
            for chunk in super().decode(packets):
                sizes.append(len(chunk))
                yield chunk

    monkeypatch.setattr("spdl_media.cli.check.VideoDecoder", Watched)
    assert check_file(tmp_path / "long.mkv") == ("sound", None)
    assert sum(sizes) > 290  # the last ones are those of flush()
    assert max(sizes) == 8


def test_check_of_a_single_pixel_and_of_audio_under_the_name_of_an_image(tmp_path: Path) -> None:
    sm.save_image(tmp_path / "dot.png", np.zeros((1, 1, 3), np.uint8))
    sm.save_audio(tmp_path / "tone.mp4", make_tone(8000, 8000).T, 8000)
    (tmp_path / "tone.mp4").rename(tmp_path / "tone.png")
    assert check_file(tmp_path / "dot.png") == ("odd", "an image of one pixel")
    assert check_file(tmp_path / "tone.png") == ("odd", "has audio, and is named .png")


@pytest.mark.long
def test_memory_of_a_check_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from spdl_media.cli import main; main(sys.argv[1:]);"
        # Not ru_maxrss, which includes the process that started this one.
        "status = pathlib.Path('/proc/self/status').read_text();"
        "print(status.partition('VmHWM:')[2].split()[0])"
    )
    peaks = []
    for count in (1000, 40_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            # All files are damaged, so the report has the maximum length.
            (folder / f"{number:0100}.jpg").touch()
        command = [sys.executable, "-c", program, "check", folder, "-o", tmp_path / "report.json"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
        report = json.loads((tmp_path / "report.json").read_bytes())
        assert report["damaged"] == len(report["files"]) == count
    # The names alone are 4 MB, and would take some 10 MB as Python objects.
    assert peaks[1] - peaks[0] < 6000


def test_probe(run_here: Callable[..., tuple[bytes, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MEDIA)
    names = ["nasa_13013.mp4", "technician_turned.jpg"]
    output, errors = run_here("probe", *names, "README.md", "--json", status=1)
    video, photo = json.loads(output)
    assert re.fullmatch(r"spdl-media: README\.md: .*\n", errors)
    assert (video["file"], video["duration"], video["streams"][3]["frame_rate"]) == (
        names[0],
        sm.probe(MEDIA / names[0]).duration,
        "30000/1001",
    )
    assert [stream["kind"] for stream in video["streams"]] == ["video", "audio", "subtitle"] * 2
    assert [stream["codec"] for stream in video["streams"]] == ["h264", "aac", "mov_text"] * 2
    assert (photo["is_still"], photo["streams"][0]["rotation"]) == (True, 90)
    lines = run_here("probe", *names)[0].decode().splitlines()
    assert lines[0].split() == "file stream codec size format rate seconds turn colour".split()
    assert (
        lines[4].split()
        == "nasa_13013.mp4 video 3 h264 480x270 yuv420p 29.97 fps 13.013 - bt709 tv".split()
    )
    assert lines[3].split() == "nasa_13013.mp4 subtitle 2 mov_text - - - - - -".split()
    assert len({line.index("h264") for line in lines if "h264" in line}) == 1
    # Too narrow for the table: a paragraph for each stream.
    lines = show("probe", *names, cwd=MEDIA, columns=40, status=0).lines()
    assert lines[:3] == [
        "nasa_13013.mp4",
        "  stream video 0, codec h264, size",
        "  320x180, format yuv420p, rate 25 fps,",
    ]


def test_doctor(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capfd.readouterr().out)}
    names = "Python av numpy FFmpeg decoders encoders torch cores pinned_memory nvdec dali nvjpeg".split()
    assert set(names) <= set(rows)
    assert "/dev/shm" not in rows  # noqa: S108  # nothing uses it
    assert rows["numpy"]["found"] == np.__version__
    assert {row["status"] for row in rows.values()} <= {"ok", "optional", "note"}
    for row in rows.values():
        # A missing package is shown with the command that installs it.
        assert "not installed;" not in row["found"] or row["fix"].startswith("pip install")
    capabilities = sm.cuda_capabilities()
    assert (rows["nvdec"]["status"] == "ok") == bool(capabilities.nvdec)
    # In a narrow terminal, and with few files allowed.
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])));"
        # This takes seconds, and was tested above.
        "from spdl_media.cli import main, show; show._cuda = lambda: (); sys.exit(main(['doctor']))"
    )
    for most, remedy in (("1024", "ulimit -n 1024"), ("256", "raise the limit as root (of a")):
        terminal = Terminal([sys.executable, "-c", program, most], 40, ENVIRONMENT)
        assert terminal.wait() == 0
        lines = terminal.lines()
        assert f"  numpy, {np.__version__}" in lines
        first = lines.index(f"  open files, 256 (at most {int(most):,})")
        assert lines[first + 1] == f"  -> {remedy}"


def test_contact_sheet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clip, sheet = MEDIA / "nasa_13013.mp4", tmp_path / "sheet.png"
    assert (
        main(["contact-sheet", str(clip), "-o", str(sheet), "--columns", "3", "--rows", "2"]) == 0
    )
    assert capfd.readouterr().out == f"{sheet}: 6 frames of 13.0 s, 976x372 pixels\n"
    image = sm.load_image(sheet).array
    assert image.shape == (4 + 2 * 184, 4 + 3 * 324, 3)
    with sm.VideoFile(clip) as video:
        numbers = video.numbers_at([video.end * (n + 0.5) / 6 for n in range(6)])
        frames = video.load(numbers, width=320, height=180, scale_mode=None).array
    cells = [
        image[top : top + 180, left : left + 320] for top in (4, 188) for left in (4, 328, 652)
    ]
    labels = []
    for cell, frame in zip(cells, frames, strict=True):
        assert (cell[:-30] == frame[:-30]).all()
        differs = (cell != frame).any(axis=2)
        rows, columns = np.nonzero(differs)
        assert rows.min() >= 180 - 21
        assert columns.max() < 3 * (9 * 4 + 1)
        labels.append(cell[-21:, :111, 0])
    # The texts 0:00:01.0 and 0:00:03.2 agree in the first six characters, and differ in the seventh.
    alike = (labels[0] == labels[1]).all(axis=0)
    assert alike[: 6 * 12].all()
    assert not alike[6 * 12 : 7 * 12].all()
    # More cells than frames, and a file without video.
    few = tmp_path / "few.mkv"
    few.write_bytes(
        make_video(index_frames(3, 64, 48), codec="ffv1", format="matroska", pix_fmt="bgr0")
    )
    assert main(["contact-sheet", str(few), "-o", str(sheet), "--width", "48"]) == 0
    assert "3 frames" in capfd.readouterr().out
    data = bytearray(few.read_bytes())
    data[-200] ^= 1
    few.write_bytes(data)
    said = refusal(capfd, "contact-sheet", few)
    assert "damaged ffv1 data" in said
    assert "decode_config" not in said
    sm.save_audio(tmp_path / "tone.wav", make_tone(800, 8000).T, 8000)
    assert "tone.wav" in refusal(capfd, "contact-sheet", tmp_path / "tone.wav")


def reached(rate_of: Callable[[Setting], float], cores: int) -> float:
    """Return the rate of the found setting relative to the best of a grid, with 3 % noise in measurements."""
    noise = np.random.default_rng(cores)

    def run(setting: Setting) -> Measured:
        return Measured(int(1000 * rate_of(setting) * noise.uniform(0.97, 1.03)), 1000, 1, {})

    found = search(run, cores)
    assert len(found) <= 14
    counts = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    grid = [Setting(n) for n in counts]
    grid += [Setting(n, is_processes=True) for n in counts if n <= 2 * cores]
    return rate_of(best_of(found)) / max(map(rate_of, grid))


@each("cores", [1, 2, 4, 6, 8, 16, 24, 48])
def test_settings_are_within_a_tenth_of_the_best_of_a_grid(cores: int) -> None:
    def decoding(setting: Setting) -> float:
        """Work that uses all cores; more threads disturb each other, and processes copy their results."""
        busy = min(setting.number, cores)
        crowd = max(0, setting.number - cores)
        return 300 * busy / (1 + 0.004 * crowd) * (0.8 if setting.is_processes else 1)

    def computing(setting: Setting) -> float:
        """Work that holds the GIL."""
        return (
            100 * min(setting.number, cores) if setting.is_processes else 110 - setting.number / 2
        )

    def waiting(setting: Setting) -> float:
        """Storage that answers after 20 ms, 2,000 times a second at most."""
        return min(50.0 * setting.number, 2000)

    for rate_of in (decoding, computing, waiting):
        assert reached(rate_of, cores) >= 0.9, rate_of.__name__


def test_bench_of_a_function_that_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.jpg", "b.jpg", "c.jpg", "c.wav"):
        (tmp_path / "data" / name).write_bytes(b"any")
    # A function that cannot be pickled is measured only in threads.
    (tmp_path / "far_storage.py").write_text(
        "import time, numpy as np\nload = lambda path: time.sleep(0.03) or np.zeros(4, np.uint8)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    command = ["bench", "data", "--preprocessor", "far_storage:load", "--seconds", "0.1"]
    assert main([*command, "--batch-size", "4"]) == 0
    output = capfd.readouterr().out
    assert output.startswith("3 files of data, by load\n")
    (milliseconds,) = re.findall(r"^decode +(\d+\.\d+) +\d+%$", output, re.MULTILINE)
    assert float(milliseconds) >= 30
    assert "processes need functions that can be pickled: not measured" in output
    assert re.search(
        r"^Bottleneck: decode, \d+% of a sample's time; waiting for \d+% of it",
        output,
        re.MULTILINE,
    )
    (number,) = map(int, re.findall(r"num_threads=(\d+),", output))
    assert number >= 4  # also on a busy machine
    # The printed code is complete.
    code = output[output.index("import spdl_media") : output.index("Chart: ")]
    names: dict[str, Any] = {}
    exec(code.replace("[...]", "['data/a.jpg'] * 6"), names)  # noqa: S102  # what users copy
    batches = list(names["loader"])
    assert sorted(batch.shape for batch in batches) == [(2, 4), (4, 4)]
    assert names["loader"].num_threads == number
    svg = ET.parse(tmp_path / "spdl-media-bench.svg")  # noqa: S314  # our own
    assert f"num_threads={number}" in "".join(svg.getroot().itertext())

    assert "these files cannot be loaded: " in refusal(capfd, "bench", "data")
    assert "no video files in data" in refusal(capfd, "bench", "data", "--kind", "video")
    for wrong, reason in (
        ("far_storage", "takes MODULE:FUNCTION, not 'far_storage'"),
        ("far_storage:save", "cannot be imported: cannot import name 'save'"),
    ):
        assert reason in refusal(capfd, "bench", "data", "--preprocessor", wrong)
    assert "missing/a.svg: No such" in refusal(capfd, "bench", "data", "--chart", "missing/a.svg")


def test_bench_prints_the_loader_that_it_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(MEDIA / "technician.jpg", tmp_path / "1.jpg")
    shutil.copy(MEDIA / "nasa_13013.mp4", tmp_path / "1.mp4")
    sm.save_audio(tmp_path / "1.wav", make_tone(8000, 8000).T, 8000)
    settings = {
        "image": (Setting(1), (2, 3, 32, 32)),
        "video": (Setting(2), (2, 16, 32, 32, 3)),
        "audio": (Setting(2, is_processes=True), (2, 1, 48_000)),
    }
    monkeypatch.setattr(sm, "transfer_buffer", lambda buffer, cuda_config: buffer)
    for kind, (best, shape) in settings.items():

        def one(run: Callable[[Setting], Measured], cores: int, best: Setting = best) -> Any:
            assert cores >= 1
            found = {setting: run(setting) for setting in (Setting(1), best)}
            return {**found, best: Measured(10**9, 1, 1, {})} if best != Setting(1) else found

        monkeypatch.setattr("spdl_media.cli.bench.search", one)
        # As where there is a device, but for the copy.
        has_device = SimpleNamespace(transfer=kind == "video")
        monkeypatch.setattr(
            "spdl_media.cli.bench.cuda_capabilities", lambda found=has_device: found
        )
        options = ["--kind", kind, "--seconds", "0.05", "--size", "32", "--batch-size", "2"]
        chart = str(tmp_path / "chart.svg")
        assert main(["bench", str(tmp_path), *options, "--chart", chart]) == 0
        output = capfd.readouterr().out
        code = output[output.index("import ") : output.index("Chart: ")]
        path = next(tmp_path.glob(f"1.{'jpg mp4 wav'.split()[list(settings).index(kind)]}"))
        names: dict[str, Any] = {}
        exec(code.replace("[...]", repr([str(path)] * 2)), names)  # noqa: S102  # what users copy
        assert [batch.shape for batch in names["loader"]] == [shape]
        assert ("transfer_fn=" in code) == (kind == "video")
        assert re.search(
            rf"^transfer +{r'[0-9]' if kind == 'video' else '- +no CUDA'}", output, re.MULTILINE
        )
        option = "num_processes" if best.is_processes else "num_threads"
        assert f"    {option}={best.number},\n)" in code


@pytest.mark.long
def test_bench_shows_what_it_knows_after_ctrl_c(tmp_path: Path) -> None:
    command = [*COMMAND, "bench", MEDIA, "--seconds", 0.5, "--chart", tmp_path / "chart.svg"]
    terminal = Terminal(command, 80, ENVIRONMENT)
    terminal.read_until(lambda text: "measuring num_threads=2" in text)
    terminal.press(b"\x03")
    assert terminal.wait() == 130
    assert re.search(r"\nnum_threads=1 +[\d.]+ images/s +\d+%", terminal.text())


def test_the_reader_may_leave_a_program_that_calls_main() -> None:
    program = """
import os, sys
from spdl_media.cli import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.stderr.write(str(main(["probe", sys.argv[1]])))
"""
    command = [sys.executable, "-c", program, next(MEDIA.glob("*.jpg"))]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stderr == "1"


def test_the_reader_may_leave(odd_folder: Path) -> None:
    program = f"{sys.executable} -m spdl_media check data | head -1; echo ${{PIPESTATUS[0]}}"
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    done = subprocess.run(
        [bash, "-c", program],
        cwd=odd_folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1] == "1"
    assert done.stderr == ""
