"""SPDL's benchmark of data formats runs with this library's modules, in threads and in processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import effort
import numpy as np
import pytest
from array_formats import data_formats_program as program
from array_formats.made_files import npy, tar
from programs import run_python

import spdl_media as sm
from spdl_media.pipeline import PipelineBuilder

CHECKOUT = Path(__file__).resolve().parent.parent.parent
REPEAT = 5

CONFIGS = [
    pytest.param(
        *config,
        marks=pytest.mark.skipif(
            config[0] == "torch" and program.torch is None, reason="torch is not installed"
        ),
    )
    for config in program.CONFIGS
]


def test_the_program() -> None:
    # With --long, it starts 400 processes.
    most_workers = 32 if effort.LONG else 1
    done = run_python(program.__file__, REPEAT, most_workers)
    lines = [line.split(",") for line in done.stdout.splitlines()]
    assert [tuple(line[:5]) for line in lines] == [
        (format, str(compressed), library, mode, str(num_workers))
        for format, compressed, library in program.CONFIGS
        if format != "torch" or program.torch is not None
        for mode in ("mp", "mt")
        for num_workers in (1, 2, 4, 8, 16, 32)
        if num_workers <= most_workers
    ]
    assert all(float(line[5]) > 0 for line in lines)


@pytest.mark.parametrize(("format", "compressed", "library"), CONFIGS)
def test_what_comes_out_is_what_was_written(format: str, compressed: bool, library: str) -> None:
    arrays = program.make_arrays()
    src = program.DataSource(program.dump(format, compressed, arrays), REPEAT)
    pipeline = program.get_pipeline(src, program.LOADERS[format, library], 2, "mt")
    with pipeline.auto_stop():
        items = list(pipeline)
    assert len(items) + program.num_unparsed(pipeline) == REPEAT
    for image, labels in items:
        np.testing.assert_array_equal(image, arrays["img"])
        np.testing.assert_array_equal(labels, arrays["lbl"])


def test_samples_of_shards_are_a_source() -> None:
    shards = [tar({f"{k}.npy": npy(np.arange(k)), f"{k}.cls": b"%d" % k}) for k in range(4)]

    def load(sample: dict[str, Any]) -> tuple[int, int]:
        return int(sample["cls"]), len(sm.load_npy(sample["npy"]))

    pipeline = (
        PipelineBuilder()
        .add_source(sm.iter_samples(shards, rank=1, world_size=2))
        .pipe(load, concurrency=2, output_order="input")
        .add_sink(2)
        .build(num_threads=2)
    )
    with pipeline.auto_stop():
        assert list(pipeline) == [(1, 1), (3, 3)]
