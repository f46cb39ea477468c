"""The benchmark of data formats runs, in short and without other libraries. Its figures are not checked."""

from __future__ import annotations

import importlib.util
import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from programs import BENCHMARKS, run_python

SCRIPT = BENCHMARKS / "data_formats.py"
TINY = ("--peers", "--rounds", "1", "--seconds", "0.002", "--bytes", "100000", "--repeat", "3")


def run(*arguments: object) -> CompletedProcess[str]:
    return run_python(SCRIPT, *TINY, "--workers", 1, 2, *arguments)


@pytest.mark.long
def test_figures_of_every_way(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    chart = tmp_path / "chart.png"
    draws = importlib.util.find_spec("matplotlib") is not None
    done = run("--json", result, *(("--chart", chart) if draws else ()))
    document = json.loads(result.read_text())
    assert set(document) == {"machine", "calls", "threads", "workers"}
    assert {"npy, view", "npz stored", "npz deflated, labels"} <= set(document["calls"])
    assert all(row["spdl_media"] > 0 for row in document["calls"].values())
    assert document["calls"]["npy, view"]["NumPy / spdl_media"] > 0
    assert all(row["two / one"] > 0 for row in document["threads"].values())
    assert list(document["workers"]) == [
        f"{format}, {way}"
        for format in ("npy", "npz", "npz deflated")
        for way in ("NumPy", "spdl_media")
    ]
    for row in document["workers"].values():
        assert set(row) == {f"{n} {mode}" for n in (1, 2) for mode in ("threads", "processes")}
    assert "microseconds a call" in done.stdout
    if draws:
        assert chart.read_bytes().startswith(b"\x89PNG")


def test_lost_items_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    items_a_second = runpy.run_path(str(SCRIPT))["items_a_second"]
    with ThreadPoolExecutor(1) as executor:
        assert items_a_second(executor, len, b"abc", 3, 1) > 0
        with pytest.raises(RuntimeError, match="0 of 3 items came out"):
            items_a_second(executor, lambda item: None, b"abc", 3, 1)  # None drops an item
