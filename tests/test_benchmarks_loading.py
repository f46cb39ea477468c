"""The benchmarks of loading run, in short, on made media. Figures are not checked."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import numpy as np
import pytest
from programs import BENCHMARKS, run_python

from spdl_media.testing import make_image

OURS = ["spdl_media", "spdl_media, fast", "spdl_media, whole batches"]
# The library beyond PyTorch that a loader needs.
PEERS = {
    "SPDL, pipeline": "spdl",
    "SPDL, batches": "spdl",
    "SPDL, DataLoader": "spdl",
    "torch, Pillow": "PIL",
    "torch, torchvision": "torchvision",
}
DRAWS = importlib.util.find_spec("matplotlib") is not None
SPREAD = {"median", "lowest", "highest"}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def run(*command: object, status: int = 0) -> CompletedProcess[str]:
    done = run_python(*command, status=status, path=[BENCHMARKS])
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three gray images of two sizes, and a file that is not an image."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for index, (width, height) in enumerate([(64, 48), (48, 64), (64, 48)]):
        gray = np.full((height, width, 3), 60 * index + 40, np.uint8)
        (pictures / f"{index}.jpg").write_bytes(make_image(gray, codec="mjpeg"))
    (pictures / "notes.txt").write_text("no picture")
    return pictures


@pytest.fixture(params=["figures", "processes", "memory", "loaders"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import a module of the benchmarks as the scripts do."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module(request.param)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def only(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shared", [name], indirect=True)


# Batches of each loader.

SHOW = """
import json, pathlib, sys
from loaders import LOADERS, Job, repeated
if __name__ == "__main__":
    folder, arrays, *names = sys.argv[1:]
    job = Job(repeated(pathlib.Path(folder), 7), size=32, batch=2, workers=2, arrays=arrays)
    for name in names:
        batches = [
            (type(x).__module__, list(x.shape), str(x.dtype), x.reshape(len(y), -1).tolist(), y.tolist())
            for x, y in LOADERS[name](job)
        ]
        print(json.dumps(batches))
"""


def check_batches(names: list[str], folder: Path, arrays: str) -> None:
    script = folder.parent / "show.py"
    script.write_text(SHOW)
    lines = run(script, folder, arrays, *names).stdout.splitlines()
    for name, line in zip(names, lines, strict=True):
        kinds, shapes, types, pixels, labels = zip(*json.loads(line), strict=True)
        assert set(kinds) == {arrays}, name
        assert sorted(shapes) == [[1, 32, 32, 3], *[[2, 32, 32, 3]] * 3], name
        assert {text.removeprefix("torch.") for text in types} == {"uint8"}, name
        # Labels stay with their pictures.
        for rows, places in zip(pixels, labels, strict=True):
            grays = np.median(rows, axis=1)
            assert np.abs(grays - (60 * np.asarray(places) + 40)).max() <= 3, name
        flat = [label for places in labels for label in places]
        assert sorted(flat) == [0, 0, 0, 1, 1, 2, 2], name
        if name != "SPDL, DataLoader":  # which gives batches in order of completion
            assert flat == [0, 1, 2, 0, 1, 2, 0], name


def test_our_loaders_give_arrays_of_numpy(folder: Path) -> None:
    check_batches(OURS, folder, "numpy")


@pytest.mark.long  # processes that import torch
def test_loaders_give_images_and_labels_as_tensors(folder: Path) -> None:
    pytest.importorskip("torch")
    # Those of torch come first: they fork, which is safe before other loaders start threads.
    found = [name for name in reversed(PEERS) if importlib.util.find_spec(PEERS[name])]
    check_batches([*found, OURS[0]], folder, "torch")


@only("loaders")
def test_every_loader_is_tested(shared: ModuleType) -> None:
    assert list(shared.OURS) == OURS
    assert list(shared.PEERS) == list(PEERS)


# dataloader.py

TINY = ("--num-images", "6", "--size", "32", "--batch", "2", "--arrays", "numpy")
ONE = ("--workers", "1", "--rounds", "1", "--memory-rounds", "1")


@pytest.mark.long
def test_dataloader_writes_figures_of_every_cell(folder: Path, tmp_path: Path) -> None:
    result, chart = tmp_path / "result.json", tmp_path / "chart.png"
    options = ("--json", result, *(("--chart", chart) if DRAWS else ()))
    script = BENCHMARKS / "dataloader.py"
    done = run(script, "--images", folder, "--peers", "none", *TINY, *ONE, *options)
    assert not DRAWS or chart.read_bytes().startswith(b"\x89PNG")
    document = json.loads(result.read_text())
    assert document["settings"]["num_images"] == 6
    assert document["machine"]["cores"] == os.cpu_count()
    assert [row["loader"] for row in document["results"]] == OURS
    head, *lines = done.stdout.splitlines()
    assert head.split()[:3] == ["loader", "batch", "workers"]
    assert [line.split("  ")[0] for line in lines] == OURS
    for row in document["results"]:
        assert (row["batch"], row["workers"]) == (2, 1)
        for key in ("images_per_second", "first_batch_ms"):
            assert set(row[key]) == SPREAD
            assert 0 < row[key]["lowest"] <= row[key]["median"] <= row[key]["highest"]
        assert row["ratio_to"] == {}
        if sys.platform == "linux":
            assert 1 < row["imported_mib"]["median"] < row["peak_mib"]["median"] + 1 < 10_000


@pytest.mark.long
def test_dataloader_compares_with_torch(folder: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    script, peers = BENCHMARKS / "dataloader.py", ("--peers", "torch, Pillow")
    options = ("--workers", "1", "--rounds", "1", "--memory-rounds", "0", "--markdown")
    done = run(script, "--images", folder, *peers, *TINY, *options)
    head, rule, *rows = (
        [cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()
    )
    assert head[1:-1][:5] == ["loader", "batch", "workers", "images/s", "x Pillow"]
    assert rule[1:-1] == ["---", *["---:"] * 6]
    assert [row[1] for row in rows] == [*OURS, "torch, Pillow"]
    assert rows[-1][5] == "1.00 (1.00-1.00)"


@pytest.mark.long
def test_ipc_writes_figures_of_every_way(tmp_path: Path) -> None:
    small = ("--rounds", "1", "--batches", "4", "--megabytes", "2", "--items", "20")
    done = run(BENCHMARKS / "ipc.py", *small, "--json", tmp_path / "ipc.json")
    assert "DataLoader, num_processes=2" in done.stdout
    results = json.loads((tmp_path / "ipc.json").read_text())["results"]
    assert set(results) == {"landed", "collated", "copied", "GIL held"}
    assert all(row["rate"] > 0 for rows in results.values() for row in rows.values())
    assert results["landed"]["spdl_media"]["ratio"] == 1.0


def test_dataloader_says_what_is_wrong(tmp_path: Path) -> None:
    script = BENCHMARKS / "dataloader.py"
    assert "no .jpg" in run(script, "--images", tmp_path, status=2).stderr
    assert "No such file" in run(script, "--images", tmp_path / "none", status=2).stderr
    (tmp_path / "a.jpg").touch()
    assert "none of SPDL" in run(script, "--images", tmp_path, "--peers", "SDPL", status=2).stderr


# memory.py

SMALL = ("--num-images", "24", "--settle", "8", "--batch", "4", "--size", "32")


@linux_only
def test_memory_exits_with_what_it_found(folder: Path, tmp_path: Path) -> None:
    result, chart = tmp_path / "result.json", tmp_path / "chart.png"
    command = (BENCHMARKS / "memory.py", "--images", folder, *SMALL, "--json", result)
    done = run(*command, "--tolerance", "1000", *(("--chart", chart) if DRAWS else ()))
    assert not DRAWS or chart.read_bytes().startswith(b"\x89PNG")
    (row,) = json.loads(result.read_text())["results"].values()
    assert [count for count, _ in row["sizes"]] == [4, 8, 12, 16, 20, 24]
    assert all(size > 1 for _, size in row["sizes"])
    assert row["flat"] is True
    assert done.stdout.splitlines()[1].split()[0::5] == ["spdl_media", "yes"]
    # No real process meets this limit.
    assert run(*command, "--tolerance", "-1", status=1).stdout.splitlines()[1].endswith("no")


def test_memory_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    script = BENCHMARKS / "memory.py"
    assert "no .jpg" in run(script, "--images", tmp_path, status=2).stderr
    assert "at least 3000" in run(script, "--images", folder, "--num-images", "9", status=2).stderr
    assert "--batch must" in run(script, "--images", folder, "--batch", "1001", status=2).stderr


@only("memory")
def test_memory_sees_what_grows(shared: ModuleType) -> None:
    steps = range(10, 1001, 10)
    filling = [(count, 50 + min(count, 100) / 10) for count in steps]
    assert shared.judge(filling, settle=100, tolerance=0)["flat"] is True
    # 5 KiB per image, from 195 images in window 1 to 945 in the last one.
    leaking = [(count, 50 + count * 5 / 1024) for count in steps]
    verdict = shared.judge(leaking, settle=100, tolerance=3.9)
    assert verdict["flat"] is False
    assert verdict["rise_mib"] == pytest.approx(800 * 5 / 1024)
    assert shared.judge(leaking, settle=100, tolerance=4.0)["flat"] is True
    # A whole window that is higher counts as growth, even if it is gone at the end; a single sample does not.
    hump = [(count, 60 + 5 * (400 < count <= 500)) for count in steps]
    assert shared.judge(hump, settle=100, tolerance=4)["flat"] is False
    peak = [(count, 60 + 5 * (count == 400)) for count in steps]
    assert shared.judge(peak, settle=100, tolerance=4) | {"flat": None} == {
        "after_the_first_mib": 60,
        "end_mib": 60,
        "highest_mib": 65,
        "rise_mib": 0,
        "flat": None,
    }


# Shared modules.

FAMILY = """
import json, os, subprocess, sys, time
block = bytearray(b"1") * (32 << 20)
child = "block = bytearray(b'1') * (64 << 20); print(flush=True); input()"
with subprocess.Popen([sys.executable, "-c", child], stdin=-1, stdout=-1, text=True) as process:
    process.stdout.readline()
    from processes import family_mib, resident_mib
    both, inside = family_mib(os.getpid()), resident_mib()
    print("ready", flush=True)
    while not os.path.exists(json.loads(sys.argv[2])["looked"]):
        time.sleep(0.01)
    process.communicate("")
sizes = {"both": both, "inside": inside, "alone": resident_mib()}
print(json.dumps({"options": json.loads(sys.argv[2]), **sizes}))
"""


@linux_only
@only("processes")
def test_memory_of_all_processes_is_counted(
    shared: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    looked = tmp_path / "looked"

    def look(pid: int) -> float | None:
        mib: float | None = real(pid)
        looked.touch()
        return mib

    # The process ends after the first look, even on a busy machine.
    real = shared.family_mib
    monkeypatch.setattr(shared, "family_mib", look)
    options = {"looked": str(looked)}
    found = shared.run_fresh(str(script), options, watch_memory=0.001)
    assert found["options"] == options
    assert 96 <= found["both"] < 200
    assert 96 <= found["inside"] < 200
    assert 32 <= found["alone"] < 96
    assert found["peak_mib"] >= 32
    assert "peak_mib" not in shared.run_fresh(str(script), options)


@only("processes")
def test_a_process_that_fails_is_reported(shared: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('it cannot be')")
    with pytest.raises(RuntimeError, match=r"(?s)\{'a': 1\} ended with status 1:.*it cannot be"):
        shared.run_fresh(str(script), {"a": 1})


@only("figures")
def test_figures_are_written_with_their_range(shared: ModuleType) -> None:
    value = shared.over([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert value == {"median": 2.0, "lowest": 1.0, "highest": 3.0}
    assert shared.with_range(value, 1) == "2.0 (1.0-3.0)"
    rows = [("long name", "1"), ("b", "200")]
    assert shared.plain_table(("x", "y"), rows) == "x            y\nlong name    1\nb          200"
    assert shared.markdown_table(("x", "y"), rows).splitlines() == [
        "| x | y |",
        "| --- | ---: |",
        "| long name | 1 |",
        "| b | 200 |",
    ]


@only("figures")
def test_versions_are_those_that_are_installed(shared: ModuleType) -> None:
    found = shared.machine("numpy", "no-such-package")
    assert found["numpy"] == np.__version__
    assert "no-such-package" not in found
