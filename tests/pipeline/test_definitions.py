"""Definitions can be printed, drawn and pickled."""

from __future__ import annotations

import functools
import pickle
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from effort import each

import spdl_media.pipeline
from spdl_media.pipeline import (
    PipeConfig,
    PipelineBuilder,
    PipelineError,
    ProcessPoolExecutorConfig,
    SourceConfig,
)


def double(item: int) -> int:
    return 2 * item


def parity(item: int) -> int:
    return item % 2


def twice(item: int) -> Iterator[int]:
    yield item
    yield item


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def load(self, item: int) -> int:
        return item

    def accumulate(self, item: Any) -> Any:
        return item

    def flush(self) -> None:
        return None


def everything() -> PipelineBuilder[Any]:
    return (
        PipelineBuilder()
        .add_source(range(6))
        .pipe(double, concurrency=4, executor=ProcessPoolExecutorConfig(2), timeout=1.5)
        .merge(PipelineBuilder().add_source(iter([7]), continuous=False))
        .path_variants(parity, [PipelineBuilder().pipe(twice, output_order="input"), []])
        .aggregate(4, drop_last=True)
        .pipe(double, name='a "b" <c>', max_failures=0.1)
        .add_sink(2)
    )


def test_a_continuous_source_is_marked() -> None:
    config = PipelineBuilder().add_source([1, 2], continuous=True).get_config()
    assert str(config) == 'flowchart TD\n    n0(["list of 2, continuous"])'


def test_a_drawing_joins_all_parts() -> None:
    assert everything().get_config().to_mermaid().splitlines() == [
        "flowchart TD",
        '    n0(["range of 6"])',
        '    n1["double<br/>concurrency=4, ProcessPoolExecutorConfig"]',
        "    n0 --> n1",
        '    n2(["list_iterator"])',
        '    n3{{"merge"}}',
        "    n1 --> n3",
        "    n2 --> n3",
        '    n4{"parity"}',
        "    n3 --> n4",
        "    n5(( ))",
        "    n4 -->|0| n5",
        '    n6["twice<br/>concurrency=1"]',
        "    n5 --> n6",
        "    n7(( ))",
        "    n4 -->|1| n7",
        '    n8["aggregate(4)"]',
        "    n6 --> n8",
        "    n7 --> n8",
        '    n9["a #quot;b#quot; #lt;c#gt;<br/>concurrency=1"]',
        "    n8 --> n9",
        '    n10(["sink: buffer of 2"])',
        "    n9 --> n10",
    ]


def test_a_name_cannot_break_a_drawing() -> None:
    builder = PipelineBuilder().add_source([1]).pipe(double, name='`a`\n%% "b" &lt; <c> #d')
    chart = builder.get_config().to_mermaid().splitlines()

    label = "#96;a#96; %% #quot;b#quot; #amp;lt; #lt;c#gt; #35;d"
    assert chart[2] == f'    n1["{label}<br/>concurrency=1"]'
    assert len(chart) == 4


def test_a_repr_does_not_hold_the_items() -> None:
    assert (
        repr(SourceConfig(list(range(10**6))))
        == "SourceConfig(<list of 1000000>, continuous=False)"
    )


def test_definitions_are_equal_after_pickling() -> None:
    config = (
        PipelineBuilder()
        .add_source(range(6))
        .pipe(double, executor=ProcessPoolExecutorConfig(2, "spawn", double, (1,)))
        .pipe(functools.partial(double), output_order="input", name="again")
        .merge(PipelineBuilder().add_source([1]))
        .path_variants(parity, [double, twice])
        .aggregate(3)
        .disaggregate()
        .add_sink()
        .get_config()
    )
    again = pickle.loads(pickle.dumps(config))
    again_partial, partial = (list(one.functions())[1].fn for one in (again, config))
    assert again_partial.func is partial.func  # type: ignore[attr-defined]  # partials equal only themselves
    assert str(again) == str(config)
    assert again.pipes == config.pipes
    assert again.sink == config.sink


@each(
    "make, message",
    [
        (
            lambda b: b.pipe(lambda item: item),
            r"The function of stage 'lambda' cannot be pickled: ",
        ),
        (
            lambda b: b.pipe(Locked().load, name="load"),
            r"function of stage 'load'.*cannot pickle '_thread",
        ),
        (
            lambda b: b.pipe(double, executor=ProcessPoolExecutorConfig(initializer=lambda: 0)),
            r"The executor of stage 'double' cannot be pickled",
        ),
        (lambda b: b.aggregate(Locked()), r"The aggregator of stage 'Locked' cannot be pickled"),
        (
            lambda b: b.path_variants(lambda item: 0, [double], name="route"),
            r"The router of stage 'route' cannot be pickled",
        ),
        (lambda b: b.path_variants(parity, [lambda item: 0]), r"The function of stage 'lambda'"),
        (
            lambda b: b.merge(PipelineBuilder().add_source(twice(1))),
            r"The source of the pipeline cannot be pickled: .*generator",
        ),
    ],
)
def test_what_cannot_be_pickled_is_named(make: Any, message: str) -> None:
    config = make(PipelineBuilder().add_source(range(3)).pipe(parity)).get_config()
    with pytest.raises(PipelineError, match=message):
        pickle.dumps(config)


def test_a_running_executor_cannot_be_pickled() -> None:
    with ThreadPoolExecutor(1) as executor:
        config = PipelineBuilder().add_source([1]).pipe(double, executor=executor).get_config()
        with pytest.raises(
            PipelineError,
            match=r"Stage 'double' cannot be pickled, because it holds a running ThreadPoolExecutor\. "
            r"Give executor= a description",
        ):
            pickle.dumps(config)


def test_definitions_are_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'concurrency'"):
        PipeConfig(double).concurrency = 2  # type: ignore[misc]


def test_each_public_name_is_in_the_table_of_the_page() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "pipeline.md"
    table = page.read_text(encoding="utf-8").partition("\n## Names\n")[2]
    named = re.findall(
        r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines() if "|" in row)
    )
    assert sorted(named) == sorted(spdl_media.pipeline.__all__)
