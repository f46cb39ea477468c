"""``spdl-media bench``: measure how fast a folder loads on this machine, and find the best settings."""

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

from spdl_media.cli.app import FILE, FOLDER, NUMBER, Refused, make_console, printable, show_table
from spdl_media.cli.files import find_files, named_kind
from spdl_media.cuda.capabilities import cuda_capabilities
from spdl_media.dataloader import DataLoader
from spdl_media.pipeline import PipelineError, PipelineFailure
from spdl_media.pipeline.executors import usable_cores

_LOOKED_AT, _USED = 20_000, 256
_STEPS = ("decode", "convert", "transfer")
_IDLE, _BUSY = 0.5, 0.75  # parts of a core's time
_FRAMES = 16

# Arguments of the measured DataLoader as code, which is evaluated here and shown to the user.
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

# Seconds without a batch after which a measurement fails.
_TIMEOUT = 120

_SECONDS = click.FloatRange(0, 3600, min_open=True)
_MOST_THREADS = 64
# A gain below this factor is within the noise of a measurement, and not worth more threads.
_GAIN = 1.04
_CANDIDATES, _ROUNDS = 4, 2


@dataclass(frozen=True)
class _Plan:
    """The measured loader, as code that is shown to the user.

    Attributes:
        imports: The import statements.
        arguments: Code of the loader's arguments, by name.
        unit: Name of the unit that is counted, and number of units per sample.
    """

    imports: str
    arguments: Mapping[str, str]
    unit: tuple[str, int]

    def options(self) -> dict[str, Any]:
        """Evaluate the arguments of the loader.

        Raises:
            Refused: ``--preprocessor`` cannot be imported.
        """
        names: dict[str, Any] = {}
        # Find modules in the current folder, as `python -m` does.
        sys.path.insert(0, str(Path.cwd()))
        try:
            exec(self.imports, names)  # noqa: S102  # written by _make_plan
        except (ImportError, SyntaxError) as error:
            raise Refused(f"--preprocessor cannot be imported: {error}") from error
        return {name: eval(value, names) for name, value in self.arguments.items()}  # noqa: S307

    def code(self, folder: Path, best: Setting) -> str:
        """Return the code of the loader with a setting, ready to be copied."""
        arguments = {**self.arguments, best.option: str(best.number)}
        lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
        paths = f"paths = [...]  # of {printable(folder)}"
        return f"{self.imports}\n{paths}\nloader = sm.DataLoader(\n    paths,\n{lines})\n"


@click.command("bench", short_help="Find settings for a DataLoader.")
@FOLDER
@click.option("--kind", type=click.Choice([*_UNITS]), help="Default: the most frequent.")
@click.option("--size", **NUMBER, default=224, help="Side of images and frames.")
@click.option("--batch-size", **NUMBER, help="Default: 32, for videos 8.")
@click.option("--preprocessor", metavar="M:F", help="Module and function, from path to sample.")
@click.option("--seconds", type=_SECONDS, metavar="S", default=1.0, help="Time of each run.")
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

    \f
    Raises:
        Refused: The folder holds no media, its files cannot be loaded, or ``preprocessor``
            cannot be imported.
        OSError: The folder cannot be read, or the chart cannot be written.
    """
    if math.isnan(seconds):  # Click's range accepts it.
        raise Refused("--seconds must be a number above 0, not nan")
    kind, paths = _sample(folder, kind)
    # Fail now rather than after minutes of work.
    chart.open("a", encoding="utf-8").close()
    plan = _make_plan(kind, **options)
    console = make_console()
    console.print(f"{len(paths)} files of {printable(folder)}, by {plan.arguments['preprocessor']}")
    found: dict[Setting, Measured] = {}
    try:
        _measure_all(plan, paths, seconds, found)
    finally:
        # Also after Ctrl-C, show the measurements so far.
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
    """Return the kind of media and a random sample of its files, the same in each run."""
    by_kind: dict[str, list[Path]] = defaultdict(list)
    entries = [*itertools.islice(find_files(folder), _LOOKED_AT)]
    for entry in entries:
        path = folder / os.fsdecode(entry.path)
        named = named_kind(path)
        if entry.size and named and kind in (None, named):
            by_kind[named].append(path)
    if not by_kind:
        where = f"the first {_LOOKED_AT:,} files of " if len(entries) == _LOOKED_AT else ""
        raise Refused(f"no {kind or 'media'} files in {where}{printable(folder)}")
    kind, paths = max(by_kind.items(), key=lambda item: len(item[1]))
    return kind, random.Random(0).sample(sorted(paths), min(len(paths), _USED))  # noqa: S311  # no secret


def _make_plan(kind: str, *, size: int, batch_size: int | None, preprocessor: str | None) -> _Plan:
    imports, unit = "import spdl_media as sm\n", _UNITS[kind]
    arguments = {
        "preprocessor": _PREPROCESSORS[kind].format(size=size),
        "batch_size": str(batch_size or (8 if kind == "video" else 32)),
        "to": '"numpy"',
    }
    # The user's function may return anything, so its results are not transferred to a device.
    if preprocessor is not None:
        module, _, arguments["preprocessor"] = preprocessor.partition(":")
        if not (module and arguments["preprocessor"]):
            raise Refused(f"--preprocessor takes MODULE:FUNCTION, not {preprocessor!r}")
        imports += f"from {module} import {arguments['preprocessor']}\n"
        unit = ("samples", 1)
    # The copy to the device is measured as a step of its own.
    elif cuda_capabilities().transfer:
        arguments |= _TO_DEVICE
    if "functools." in str(arguments):
        imports = f"import functools\n\n{imports}"
    return _Plan(imports, arguments, unit)


def _measure_all(
    plan: _Plan, paths: list[Path], seconds: float, found: dict[Setting, Measured]
) -> None:
    """Search for the best setting, and add all measurements to ``found``."""
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
    """Return the seconds of each step per sample, in one thread."""
    return dict(zip(_STEPS, found[Setting(1)].stages.values(), strict=False))


def _bars(plan: _Plan, found: Mapping[Setting, Measured]) -> Iterator[tuple[str, str, float]]:
    """Yield each setting, its rate as text, and its rate as a part of the best one."""
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
    """Describe the slowest step and what limits it."""
    steps, one, cores = _steps(found), found[Setting(1)], usable_cores()
    step = max(steps, key=lambda name: steps[name])
    total, at_best = sum(steps.values()), found[best]
    # With one thread, the time that is not CPU time was spent waiting.
    busy = one.cpu / one.items / total
    if best.is_processes:
        why = "processes are faster than threads, as where Python code holds the interpreter's lock"
    elif busy < _IDLE:
        why = f"waiting for {1 - busy:.0%} of it, as for storage: more threads than cores help"
    elif at_best.cpu / at_best.seconds > _BUSY * cores:
        why = f"the {cores} cores are busy: only less work helps"
    else:
        why = "cores are left over: a lock, memory or other programs hold it back"
    return f"{step}, {steps[step] / total:.0%} of a sample's time; {why}"


def _svg(bars: list[tuple[str, str, float]]) -> str:
    """Return a bar chart as SVG. Each bar has a name, a text, and a length of at most 1.0."""
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
    """Number of threads or processes: ``num_threads=`` or ``num_processes=`` of the loader."""

    number: int
    is_processes: bool = False

    @property
    def option(self) -> str:
        """Name of the loader's argument."""
        return "num_processes" if self.is_processes else "num_threads"

    def __str__(self) -> str:
        return f"{self.option}={self.number}"


@dataclass(frozen=True)
class Measured:
    """Result of a run with one setting.

    Attributes:
        items: Number of samples that were loaded.
        seconds: Duration of the run.
        cpu: CPU seconds of this process during the run.
        stages: Seconds per sample in each function, by name.
    """

    items: int
    seconds: float
    cpu: float
    stages: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.items / self.seconds

    def __add__(self, other: Measured) -> Measured:
        """Combine two runs with the same setting."""
        seconds, cpu = self.seconds + other.seconds, self.cpu + other.cpu
        return Measured(self.items + other.items, seconds, cpu, self.stages)


def measure(
    paths: Sequence[Path], options: Mapping[str, Any], setting: Setting, seconds: float
) -> Measured:
    """Run a loader for some seconds, after a warm-up.

    Raises:
        PipelineFailure: More than half of the files cannot be loaded.
        PipelineError: ``setting`` uses processes, and the preprocessor cannot be pickled.
    """
    number: dict[str, Any] = {setting.option: setting.number}
    # Repeat the files without end, so that the run can last long enough with few files.
    loader = DataLoader(itertools.cycle(paths), timeout=_TIMEOUT, **number, **options)
    begin, start, at_start, cpu = time.monotonic(), 0.0, 0, 0.0
    for _ in loader:
        now = time.monotonic()
        found = loader.statistics().stages
        stages = [stage for stage in found if not stage.name.startswith("aggregate(")]
        # Count at the first stage, because batches come in bursts.
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
    """Measure settings until the best one is found; see :func:`best_of`.

    Args:
        run: Measures a setting; for processes it may raise a ``PipelineError``.
        cores: Number of cores.

    Returns:
        All measurements: threads before processes, few before many.

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
        # More processes than cores would only cost memory.
        rate(Setting(cores, is_processes=True))
    for _ in range(_ROUNDS):
        # Alternate between the settings, so that other load on the machine affects all of them.
        for setting in sorted(found, key=rate, reverse=True)[:_CANDIDATES]:
            found[setting] += run(setting)
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def _climb(rate: Callable[[Setting], float]) -> None:
    """Double the number of threads until there is no gain twice, then try numbers next to the best one."""
    number, top, best, misses = 1, 1, 0.0, 0
    while number <= _MOST_THREADS and misses < 2:
        this = rate(Setting(number))
        misses = 0 if this > best * _GAIN else misses + 1
        best, top = max((best, top), (this, number))
        number *= 2
    for beside in {max(1, top * 3 // 4), min(math.ceil(top * 1.5), _MOST_THREADS)}:
        rate(Setting(beside))


def best_of(found: Mapping[Setting, Measured]) -> Setting:
    """Return the first setting that is as fast as the fastest, within the noise.

    Raises:
        ValueError: Nothing was measured.
    """
    most = max(one.rate for one in found.values())
    # The order is threads before processes, few before many: equally fast with less is better.
    return next(setting for setting, one in found.items() if one.rate * _GAIN >= most)
