"""``spdl-media bench``: how fast a folder loads on this machine, what limits it, and which settings fit."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import math
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from spdl_media._loader_arguments import usable_cores
from spdl_media.cli.files import find_files, named_kind
from spdl_media.cli.terminal import Refused, make_console, printable, show_table, writing
from spdl_media.cli.tuning import TIMEOUT, Measured, Setting, best_of, measure, search
from spdl_media.cuda.capabilities import cuda_capabilities
from spdl_media.pipeline import PipelineError, PipelineFailure

_LOOKED_AT, _USED = 20_000, 256
_STEPS = ("decode", "convert", "transfer")
_IDLE, _BUSY = 0.5, 0.75  # parts of a core's time
_FRAMES = 16

# What is measured, as the user gets it: the arguments of the DataLoader are evaluated from this text.
_PREPROCESSORS = {
    "image": (
        'sm.ImageRecipe({size}, random_crop=True, flip=0.5, dtype="float32", '
        "mean=sm.IMAGENET_MEAN, std=sm.IMAGENET_STD)"
    ),
    "video": (
        f"functools.partial(sm.load_video, num_frames={_FRAMES}, width={{size}}, height={{size}}, "
        'on_short="repeat_last")'
    ),
    "audio": (
        "functools.partial(sm.load_audio, num_samples=48000, sample_rate=16000, num_channels=1, "
        'on_short="zeros")'
    ),
}
_UNITS = {"image": ("images", 1), "video": ("frames", _FRAMES), "audio": ("windows", 1)}
_TO_DEVICE = {
    "to": "None",
    "aggregator": "sm.collate",
    "transfer_fn": "functools.partial(sm.transfer_buffer, cuda_config=0)",
}


@dataclass(frozen=True)
class _Results:
    """What was measured, and with what.

    Attributes:
        imports: Lines of code before the loader.
        arguments: Of the loader, as code.
        unit: What is counted, and how many of it a sample has.
        found: By setting.
    """

    imports: str
    arguments: Mapping[str, str]
    unit: tuple[str, int]
    found: Mapping[Setting, Measured]

    def steps(self) -> dict[str, float]:
        """Seconds of each step for a sample, in one thread."""
        return dict(zip(_STEPS, self.found[Setting(1)].stages.values(), strict=False))

    def rates(self) -> dict[Setting, float]:
        """What is counted, a second."""
        return {setting: one.rate * self.unit[1] for setting, one in self.found.items()}


def bench_folder(
    *,
    folder: Path,
    kind: str | None,
    size: int,
    batch_size: int | None,
    preprocessor: str | None,
    seconds: float,
    chart: Path,
) -> int:
    """Measure, and print what was found; return the exit status.

    Raises:
        Refused: There are no such files, most cannot be loaded, or the chart cannot be written.
    """
    with writing(chart), chart.open("a", encoding="utf-8"):
        pass
    kind, paths = _sample(folder, kind)
    batch_size = batch_size or (8 if kind == "video" else 32)
    code = _PREPROCESSORS[kind].format(size=size)
    arguments = {"preprocessor": code, "batch_size": str(batch_size), "to": '"numpy"'}
    imports, unit = "import functools\n\nimport spdl_media as sm", _UNITS[kind]
    names: dict[str, Any] = {"functools": functools, "sm": importlib.import_module("spdl_media")}
    if preprocessor is not None:
        module, _, function = preprocessor.partition(":")
        names[function] = _imported(module, function)
        imports, unit = f"{imports}\nfrom {module} import {function}", ("samples", 1)
        arguments["preprocessor"] = function
    elif cuda_capabilities().transfer:
        arguments |= _TO_DEVICE
    options = {name: eval(value, names) for name, value in arguments.items()}  # noqa: S307  # of above
    status = make_console(sys.stderr).status("measuring")
    found: dict[Setting, Measured] = {}

    def run(setting: Setting) -> Measured:
        status.update(f"measuring {setting}")
        try:
            found[setting] = measure(paths, options, setting, seconds)
        except PipelineError as error:
            if setting.is_processes:
                console.print(f"(processes cannot be used: {error})")
            raise
        return found[setting]

    results = _Results(imports, arguments, unit, found)
    console = make_console()
    console.print(f"{len(paths)} files of {printable(folder)}, by {arguments['preprocessor']}")
    try:
        with status:
            results = _Results(imports, arguments, unit, search(run, usable_cores()))
    except PipelineFailure as failure:
        problem = failure.exceptions[0]
        raise Refused(
            f"these files cannot be loaded: {problem}. See: spdl-media check"
        ) from failure
    except TimeoutError as error:
        raise Refused(f"no batch of {batch_size} came within {TIMEOUT} s") from error
    except KeyboardInterrupt:
        if Setting(1) in found:
            _show(console, results)
        raise
    _show(console, results)
    best = best_of(results.found)
    console.print(f"\nBottleneck: {_bottleneck(results, best)}")
    console.print(_advice(results, best, folder))
    _save_chart(chart, results, best)
    console.print(f"Chart: {printable(chart)}")
    return 0


def _sample(folder: Path, kind: str | None) -> tuple[str, list[Path]]:
    """Some files of a kind, at random, the same ones each time."""
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for entry in itertools.islice(find_files(folder), _LOOKED_AT):
        path = folder / os.fsdecode(entry.path)
        named = named_kind(path)
        if entry.size and named and kind in (None, named):
            by_kind[named].append(path)
    if not by_kind:
        raise Refused(f"no {kind or 'media'} files in {printable(folder)}")
    kind, paths = max(by_kind.items(), key=lambda item: len(item[1]))
    return kind, random.Random(0).sample(sorted(paths), min(len(paths), _USED))  # noqa: S311  # no secret


def _imported(module: str, function: str) -> Any:
    # The current folder, as for `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        what = f"--preprocessor {module}:{function} cannot be imported"
        raise Refused(f"{what}: {error}. Write MODULE:FUNCTION") from error


def _show(console: Console, results: _Results) -> None:
    steps, rates = results.steps(), results.rates()
    rows = [
        (name, f"{seconds * 1e3:.3f}", f"{seconds / sum(steps.values()):.0%}")
        for name, seconds in steps.items()
    ]
    rows += [(name, "-", "no CUDA device") for name in _STEPS[len(steps) :]]
    show_table(console, ("step", "ms/sample", "share"), rows, right=("ms/sample",))
    console.print()
    most, unit = max(rates.values()), f"{results.unit[0]}/s"
    rows = [(str(setting), f"{rate:,.1f}", f"{rate / most:.0%}") for setting, rate in rates.items()]
    show_table(console, ("setting", unit, "of best"), rows, right=(unit, "of best"))


def _bottleneck(results: _Results, best: Setting) -> str:
    """Name the step that takes most, and what it waits for."""
    steps, one, cores = results.steps(), results.found[Setting(1)], usable_cores()
    step = max(steps, key=lambda name: steps[name])
    total, at_best = sum(steps.values()), results.found[best]
    busy = one.cpu / one.items / total
    if best.is_processes:
        why = "processes are faster than threads, as where Python code holds the interpreter's lock"
    elif busy < _IDLE:
        why = f"waiting for {1 - busy:.0%} of it, as for storage: more threads than cores help"
    elif at_best.cpu / at_best.seconds > _BUSY * cores:
        why = f"the {cores} cores are busy: only less work helps"
    else:
        why = "cores are left over: a lock, memory or other programs hold it back"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if load > 2 * cores:
        why += f". Other programs were at work (load {load:.1f}): repeat it when they are not"
    return f"{step}, {steps[step] / total:.0%} of a sample's time; {why}"


def _advice(results: _Results, best: Setting, folder: Path) -> str:
    """The settings as code, and those of a pipeline's stages."""
    imports, arguments = results.imports, dict(results.arguments)
    if best.is_processes:
        imports += "\nfrom spdl_media.pipeline import ProcessPoolExecutorConfig"
        arguments["executor"] = f"ProcessPoolExecutorConfig(max_workers={best.number})"
    arguments["num_threads"] = str(best.number)
    if "functools." not in str(arguments):
        imports = imports.removeprefix("import functools\n\n")
    lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    decode, convert, *_ = results.steps().values()
    stages = f"decode {best.number}, convert {max(1, math.ceil(best.number * convert / decode))}"
    return (
        f"Concurrency by stage, for a PipelineBuilder: {stages}, transfer 1\n\n{imports}\n\n"
        f"paths = [...]  # of {printable(folder)}\nloader = sm.DataLoader(\n    paths,\n{lines})\n"
    )


def _save_chart(path: Path, results: _Results, best: Setting) -> None:
    rates, steps = results.rates(), results.steps()
    table = Table(f"{results.unit[0]}/s", "", "", box=None)
    for setting, rate in rates.items():
        color = "green" if setting == best else "blue"
        table.add_row(str(setting), Bar(max(rates.values()), 0, rate, color=color), f"{rate:,.1f}")
    table.add_section()
    for name, seconds in steps.items():
        share = seconds / sum(steps.values())
        table.add_row(name, Bar(1, 0, share, color="yellow"), f"{share:.0%} of a sample's time")
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(table)
    # Without the address of a font, which browsers would ask for.
    svg = re.sub(
        r"@font-face {.*?}", "", console.export_svg(title="spdl-media bench"), flags=re.DOTALL
    )
    with writing(path):
        path.write_text(svg, encoding="utf-8")
