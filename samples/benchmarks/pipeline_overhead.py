"""Measure the overhead of a pipeline per item: stages that do nothing, in this pipeline and in SPDL's.

One round runs a case through both, in an order that alternates from round to round, so that a change of the
machine's speed affects both. The source is a range, the sink holds 3 items, and everything else has its
default: failures are checked, statistics counted. The output shows the median rate of each, and the median
ratio of the rounds. SPDL is skipped with a message if it is not installed.

    python samples/benchmarks/pipeline_overhead.py [--rounds 5] [--seconds 1.0] [--json result.json]
    python samples/benchmarks/pipeline_overhead.py --ten-million

The second form runs a source of ten million integers and prints how the memory grows.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from figures import add_output_options, alternating, machine, write_json

from spdl_media.pipeline import PipelineBuilder


def no_op(item: Any) -> Any:
    """A stage that does nothing."""
    return item


async def async_no_op(item: Any) -> Any:
    """An asynchronous stage that does nothing."""
    return item


@dataclass(frozen=True)
class Case:
    """A chain of stages."""

    threads: int
    stages: int
    fn: Callable[[Any], Any] | None = no_op
    order: str = "completion"

    @property
    def name(self) -> str:
        """The name in the table."""
        if self.fn is None:
            return "aggregate(32)"
        kind = "async" if self.fn is async_no_op else "sync"
        order = ", in order" if self.order == "input" else ""
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{kind}, {stages}, concurrency {self.threads}{order}"


CASES = [
    *(Case(threads, stages) for threads in (1, 4, 8) for stages in (1, 3)),
    *(Case(threads, 3, order="input") for threads in (1, 4, 8)),
    *(Case(concurrency, 1, async_no_op) for concurrency in (1, 8)),
    Case(1, 1, None),
]


def build(builder_class: Any, case: Case, source: Iterable[int]) -> Any:
    """Return the pipeline of a case."""
    builder = builder_class().add_source(source)
    for _ in range(case.stages):
        if case.fn is None:
            builder.aggregate(32)
        else:
            builder.pipe(case.fn, concurrency=case.threads, output_order=case.order)
    return builder.add_sink(3).build(num_threads=case.threads)


def seconds_for(builder_class: Any, case: Case, count: int) -> float:
    """Return the seconds from the first to the last item, without start and stop."""
    pipeline = build(builder_class, case, range(count))
    gc.collect()
    with pipeline.auto_stop():
        begin = time.perf_counter()
        for _ in pipeline:
            pass
        return time.perf_counter() - begin


def measure(builders: dict[str, Any], case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the items per second of each, and the ratios."""
    counts = {}
    for name, builder in builders.items():
        # Enough items for the requested time, estimated by a short run.
        counts[name] = max(500, int(1000 / seconds_for(builder, case, 1000) * seconds))
    rates: dict[str, list[float]] = {name: [] for name in builders}
    for names in alternating(builders, rounds):
        for name in names:
            rates[name].append(counts[name] / seconds_for(builders[name], case, counts[name]))
    result: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    if len(builders) == 2:
        ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
        result |= {
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return result


def ten_million() -> None:
    """Run a long source and print the memory at intervals."""
    count = 10_000_000
    pipeline = build(PipelineBuilder, Case(4, 1), range(count))
    begin = time.perf_counter()
    with pipeline.auto_stop():
        for number, _ in enumerate(pipeline, 1):
            if number % 1_000_000 == 0:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                rate = number / (time.perf_counter() - begin)
                print(
                    f"{number:>12,} items{rate:>12,.0f}/s   peak memory {peak:.1f} MiB", flush=True
                )


def find_spdl() -> Any:
    """Return SPDL's builder, or ``None``."""
    try:
        return importlib.import_module("spdl.pipeline").PipelineBuilder
    except ImportError:
        return None


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time per pipeline and round")
    add_output_options(parser, chart=False, markdown=False)
    parser.add_argument("--ten-million", action="store_true", help="a long source instead")
    options = parser.parse_args()
    if options.ten_million:
        ten_million()
        return
    builders: dict[str, Any] = {"spdl_media": PipelineBuilder}
    if (spdl := find_spdl()) is not None:
        builders["spdl"] = spdl
    else:
        print("SPDL is left out: it is not installed", file=sys.stderr)
    results = {}
    print(f"{'items a second':40}{'spdl_media':>12}{'SPDL':>10}{'ratio':>8}   lowest-highest")
    for case in CASES:
        row = results[case.name] = measure(builders, case, options.rounds, options.seconds)
        line = f"{case.name:40}{row['spdl_media']:>12,.0f}"
        if spdl is not None:
            spread = f"{row['lowest']:.1f}-{row['highest']:.1f}"
            line += f"{row['spdl']:>10,.0f}{row['ratio']:>8.1f}   {spread:>14}"
        print(line, flush=True)
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    write_json({"machine": machine(), "settings": settings, "results": results}, options.json)


if __name__ == "__main__":
    main()
