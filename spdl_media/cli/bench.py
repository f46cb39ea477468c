"""``spdl-media bench``: how fast a folder loads on this machine, what limits it, and which settings fit."""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from spdl_media.cli.app import (
    FILE,
    FOLDER,
    NUMBER,
    Refused,
    make_console,
    printable,
    show_table,
)
from spdl_media.cli.files import find_files, named_kind
from spdl_media.cuda.capabilities import cuda_capabilities
from spdl_media.dataloader import DataLoader
from spdl_media.loader_arguments import usable_cores
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

_TIMEOUT = 120
"""Seconds after which a loader that gives nothing is given up."""

_MOST_THREADS = 64
# A setting that gains less than this is not worth its threads, and is within the noise of a measurement.
_GAIN = 1.04
_CANDIDATES, _ROUNDS = 4, 2


@dataclass(frozen=True)
class _Plan:
    """What is measured, as code that the user gets.

    Attributes:
        imports: What stands before the loader.
        arguments: Of the loader, by their names.
        unit: What is counted, and how many of it a sample has.
    """

    imports: str
    arguments: Mapping[str, str]
    unit: tuple[str, int]

    def options(self) -> dict[str, Any]:
        """The arguments' values.

        Raises:
            Refused: ``--preprocessor`` cannot be imported.
        """
        names: dict[str, Any] = {}
        # Modules in the current folder, as for `python -m`.
        sys.path.insert(0, str(Path.cwd()))
        try:
            exec(self.imports, names)  # noqa: S102  # lines of below
        except (ImportError, SyntaxError) as error:
            problem = f"--preprocessor cannot be imported: {error}. Write MODULE:FUNCTION"
            raise Refused(problem) from error
        return {name: eval(value, names) for name, value in self.arguments.items()}  # noqa: S307

    def code(self, folder: Path, best: Setting) -> str:
        """The loader with a setting, ready to be copied."""
        arguments = {**self.arguments, best.option: str(best.number)}
        lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
        paths = f"paths = [...]  # of {printable(folder)}"
        return f"{self.imports}\n{paths}\nloader = sm.DataLoader(\n    paths,\n{lines})\n"


@click.command("bench", short_help="Find settings for a DataLoader.")
@FOLDER
@click.option("--kind", type=click.Choice([*_UNITS]), help="Else the most.")
@click.option("--size", **NUMBER, default=224, help="Side of images and frames.")
@click.option("--batch-size", **NUMBER, help="Else 32, and of videos 8.")
@click.option("--preprocessor", metavar="M:F", help="Module and function, from path to sample.")
@click.option("--seconds", type=float, metavar="S", default=1.0, help="Time of each run.")
@click.option("--chart", **FILE, default="spdl-media-bench.svg", help="SVG to write.")
def bench_command(
    *, folder: Path, kind: str | None, seconds: float, chart: Path, **options: Any
) -> int:
    """Measure loading here, name the bottleneck, and print a DataLoader with settings that fit.

    \b
    Examples:
      spdl-media bench train/
      spdl-media bench clips/ --kind video --size 112 --chart clips.svg
      spdl-media bench train/ --preprocessor mypackage.data:load
    """
    # Better now than after minutes of work.
    chart.open("a", encoding="utf-8").close()
    kind, paths = _sample(folder, kind)
    plan = _make_plan(kind, **options)
    console = make_console()
    console.print(f"{len(paths)} files of {printable(folder)}, by {plan.arguments['preprocessor']}")
    found: dict[Setting, Measured] = {}
    try:
        _measure_all(plan, paths, seconds, found)
    finally:
        # After Ctrl-C, what is known so far.
        if found:
            _show(plan, found)
    best = best_of(found)
    console.print(f"\nBottleneck: {_bottleneck(found, best)}")
    decode, convert, *_ = _steps(found).values()
    convert_at = math.ceil(best.number * convert / decode)
    stages = f"decode {best.number}, convert {convert_at}, transfer 1"
    console.print(f"Concurrency by stage, for a PipelineBuilder: {stages}\n")
    console.print(plan.code(folder, best))
    chart.write_text(_svg([*_bars(plan, found)]), encoding="utf-8")
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


def _make_plan(kind: str, *, size: int, batch_size: int | None, preprocessor: str | None) -> _Plan:
    imports, unit = "import spdl_media as sm\n", _UNITS[kind]
    arguments = {
        "preprocessor": _PREPROCESSORS[kind].format(size=size),
        "batch_size": str(batch_size or (8 if kind == "video" else 32)),
        "to": '"numpy"',
    }
    # A function of the user's may give anything, so nothing is said of transfers.
    if preprocessor is not None:
        module, _, arguments["preprocessor"] = preprocessor.partition(":")
        imports += f"from {module} import {arguments['preprocessor']}\n"
        unit = ("samples", 1)
    # The copy to the device is a step of its own, and measured as such.
    elif cuda_capabilities().transfer:
        arguments |= _TO_DEVICE
    if "functools." in str(arguments):
        imports = f"import functools\n\n{imports}"
    return _Plan(imports, arguments, unit)


def _measure_all(
    plan: _Plan, paths: list[Path], seconds: float, found: dict[Setting, Measured]
) -> None:
    """Search for the best setting, and keep what is measured meanwhile."""
    options = plan.options()
    status = make_console(sys.stderr).status("measuring")

    def run(setting: Setting) -> Measured:
        status.update(f"measuring {setting}")
        found[setting] = measure(paths, options, setting, seconds)
        return found[setting]

    try:
        with status:
            found |= search(run, usable_cores())
    except PipelineFailure as failure:
        problem = f"these files cannot be loaded: {failure.exceptions[0]}. See: spdl-media check"
        raise Refused(problem) from failure
    except TimeoutError as error:
        raise Refused(f"no batch of {options['batch_size']} came within {_TIMEOUT} s") from error


def _steps(found: Mapping[Setting, Measured]) -> dict[str, float]:
    """Seconds of each step for a sample, in one thread."""
    return dict(zip(_STEPS, found[Setting(1)].stages.values(), strict=False))


def _bars(plan: _Plan, found: Mapping[Setting, Measured]) -> Iterator[tuple[str, str, float]]:
    """Each setting with its rate, and the part of the best one's."""
    most = max(one.rate for one in found.values())
    for setting in sorted(found, key=lambda setting: setting[::-1]):
        rate = found[setting].rate
        yield str(setting), f"{rate * plan.unit[1]:,.1f} {plan.unit[0]}/s", rate / most


def _show(plan: _Plan, found: Mapping[Setting, Measured]) -> None:
    steps = _steps(found)
    total = sum(steps.values())
    rows = [(name, f"{one * 1e3:.3f}", f"{one / total:.0%}") for name, one in steps.items()]
    rows += [(name, "-", "no CUDA device") for name in _STEPS[len(steps) :]]
    show_table(("step", "ms/sample", "share"), rows, right=("ms/sample",))
    make_console().print()
    rows = [(name, rate, f"{part:.0%}") for name, rate, part in _bars(plan, found)]
    show_table(("setting", "rate", "of best"), rows, right=("rate", "of best"))
    if not any(setting.is_processes for setting in found):
        make_console().print("(processes need functions that can be pickled: not measured)")


def _bottleneck(found: Mapping[Setting, Measured], best: Setting) -> str:
    """Name the step that takes most, and what it waits for."""
    steps, one, cores = _steps(found), found[Setting(1)], usable_cores()
    step = max(steps, key=lambda name: steps[name])
    total, at_best = sum(steps.values()), found[best]
    # Of one thread: what is not the processor's time was spent waiting.
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


def _svg(bars: list[tuple[str, str, float]]) -> str:
    """A chart of bars, each with a name, what it stands for, and its length, at most 1.0."""
    lines = "".join(
        f'<text x="10" y="{y}">{name}</text>'
        f'<rect x="170" y="{y - 13}" width="{300 * part:.0f}" height="16" fill="#2962ff"/>'
        f'<text x="{180 + 300 * part:.0f}" y="{y}">{text}</text>\n'
        for y, (name, text, part) in zip(itertools.count(28, 24), bars, strict=False)
    )
    size = f'width="640" height="{24 * len(bars) + 20}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="14">\n'
        f'<rect {size} fill="white"/>\n{lines}</svg>\n'
    )


class Setting(NamedTuple):
    """How many calls run at a time, and where: ``num_threads=`` or ``num_processes=`` of the loader."""

    number: int
    is_processes: bool = False

    @property
    def option(self) -> str:
        """Its argument of the loader."""
        return "num_processes" if self.is_processes else "num_threads"

    def __str__(self) -> str:
        return f"{self.option}={self.number}"


@dataclass(frozen=True)
class Measured:
    """A run with one setting.

    Attributes:
        items: Samples that were made.
        seconds: In which time.
        cpu: Seconds of this process's cores in that time.
        stages: Seconds in each function, for one sample, by its name.
    """

    items: int
    seconds: float
    cpu: float
    stages: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.items / self.seconds

    def __add__(self, other: Measured) -> Measured:
        """Two runs as one."""
        seconds, cpu = self.seconds + other.seconds, self.cpu + other.cpu
        return Measured(self.items + other.items, seconds, cpu, self.stages)


def measure(
    paths: Sequence[Path], options: Mapping[str, Any], setting: Setting, seconds: float
) -> Measured:
    """Run a loader for some seconds, after its first batches.

    Raises:
        PipelineFailure: More than half of the files cannot be loaded.
        PipelineError: The preprocessor cannot be pickled, and processes need that.
    """
    number: dict[str, Any] = {setting.option: setting.number}
    # Without end: a run lasts as long as it is to last, however few files there are.
    loader = DataLoader(itertools.cycle(paths), timeout=_TIMEOUT, **number, **options)
    begin, start, at_start, cpu = time.monotonic(), 0.0, 0, 0.0
    for _ in loader:
        now = time.monotonic()
        statistics = loader.statistics()
        assert statistics is not None
        stages = [stage for stage in statistics.stages if not stage.name.startswith("aggregate(")]
        # Of the first stage: batches come in bursts.
        items = stages[0].calls.number - stages[0].failures
        if not start and now - begin >= seconds / 4:
            start, at_start, cpu = now, items, time.process_time()
        elif start and now - start >= seconds and items > at_start:
            break
    sizes = [1, *[options["batch_size"]] * len(stages)]
    per_item = {
        one.name: one.calls.average / size for one, size in zip(stages, sizes, strict=False)
    }
    return Measured(items - at_start, now - start, time.process_time() - cpu, per_item)


def search(run: Callable[[Setting], Measured], cores: int) -> dict[Setting, Measured]:
    """Measure settings until the best is found; see :func:`best_of`.

    Args:
        run: Measures a setting; for processes it may raise a PipelineError.
        cores: How many there are.

    Returns:
        What was measured: threads before processes, few before many.

    Raises:
        Exception: What ``run`` raises for threads.
    """
    found: dict[Setting, Measured] = {}

    def rate(setting: Setting) -> float:
        if setting not in found:
            found[setting] = run(setting)
        return found[setting].rate

    _climb(rate)
    with suppress(PipelineError):
        # Beyond the cores, processes only cost memory.
        rate(Setting(cores, is_processes=True))
    for _ in range(_ROUNDS):
        # One after the other, so that what else this machine does meets all of them.
        for setting in sorted(found, key=rate, reverse=True)[:_CANDIDATES]:
            found[setting] += run(setting)
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def _climb(rate: Callable[[Setting], float]) -> None:
    """Double the number of threads until that gains nothing twice, then try numbers next to the best one."""
    number, top, best, misses = 1, 1, 0.0, 0
    while number <= _MOST_THREADS and misses < 2:
        this = rate(Setting(number))
        misses = 0 if this > best * _GAIN else misses + 1
        best, top = max((best, top), (this, number))
        number *= 2
    for beside in {max(1, top * 3 // 4), min(math.ceil(top * 1.5), _MOST_THREADS)}:
        rate(Setting(beside))


def best_of(found: Mapping[Setting, Measured]) -> Setting:
    """The first setting that is as fast as any."""
    most = max(one.rate for one in found.values())
    # Threads before processes, few before many: what is as fast with less is better.
    return next(setting for setting, one in found.items() if one.rate * _GAIN >= most)
