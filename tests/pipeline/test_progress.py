"""The progress bar of a pipeline: its total, its updates, and the error without tqdm."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from spdl_media.pipeline import MissingPackageError, PipelineBuilder


class FakeBar:
    """Stands in for tqdm's bar, and records its arguments."""

    made: list[FakeBar] = []  # noqa: RUF012  # emptied by the fixture

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.counted = 0
        self.is_closed = False
        self.made.append(self)

    def update(self, number: int = 1) -> None:
        self.counted += number

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[FakeBar]:
    module = types.ModuleType("tqdm.auto")
    module.tqdm = FakeBar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    monkeypatch.setattr(FakeBar, "made", [])
    return FakeBar.made


@pytest.fixture
def no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)


def twice(item: int) -> Iterator[int]:
    yield item
    yield item


class Pairs:
    def accumulate(self, item: Any) -> Any:
        return item

    def flush(self) -> None:
        return None


class OfNoLength:
    """Has ``__len__`` that raises, like a wrapper of an iterable without a length."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __len__(self) -> int:
        raise self._error("no length")

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def source(number: int = 10) -> PipelineBuilder[Any]:
    return PipelineBuilder().add_source(range(number))


@pytest.mark.parametrize(
    ("builder", "number"),
    [
        (source(), 10),
        (source(0), 0),
        (source().pipe(str).pipe(str), 10),
        (source().aggregate(4), 3),
        (source().aggregate(4, drop_last=True), 2),
        (source().aggregate(5).pipe(str), 2),
        (source().pipe(twice), None),
        (source().aggregate(4).disaggregate(), None),
        (source().aggregate(Pairs()), None),
        (source().merge(source(3)), None),
        (source().path_variants(lambda item: 0, [str, []]), None),
        (PipelineBuilder().add_source(iter([1])), None),
        (PipelineBuilder().add_source(OfNoLength(TypeError)), None),
    ],
)
def test_number_of_items_that_are_expected(
    builder: PipelineBuilder[Any], number: int | None, bars: list[FakeBar]
) -> None:
    for _ in builder.build(progress=True):
        break
    assert bars[0].options["total"] == number


@pytest.mark.parametrize("error", [TypeError, NotImplementedError])
def test_a_source_whose_length_raises_runs_and_is_drawn(
    error: type[Exception], bars: list[FakeBar]
) -> None:
    builder = PipelineBuilder().add_source(OfNoLength(error))

    assert list(builder.build(progress=True)) == [0, 1, 2]
    assert bars[0].options["total"] is None
    assert '(["OfNoLength"])' in builder.get_config().to_mermaid()


def test_a_bar_is_labelled(bars: list[FakeBar]) -> None:
    assert list(source(3).build(progress="train")) == [0, 1, 2]
    assert bars[0].options == {"desc": "train", "total": 3, "unit": "item", "miniters": 1}
    assert bars[0].counted == 3
    assert bars[0].is_closed
    list(source(3).build(progress=True))
    assert bars[1].options["desc"] is None


@pytest.mark.parametrize("progress", [None, 1, 2.5])
def test_a_progress_of_another_type_is_refused(progress: Any) -> None:
    with pytest.raises(TypeError, match="progress must be True, False or a label for the bar, not"):
        source().build(progress=progress)


@pytest.mark.usefixtures("no_tqdm")
def test_a_missing_package_is_named_with_its_pip_line() -> None:
    source().build(progress=False)
    for progress in (True, "train", ""):
        with pytest.raises(
            MissingPackageError, match=r"A progress bar needs tqdm, .*: pip install tqdm$"
        ) as info:
            source().build(progress=progress)
        assert isinstance(info.value, ImportError)


def test_a_pipeline_shows_its_progress(bars: list[FakeBar]) -> None:
    pipeline = source().aggregate(4).build(progress="train")
    with pipeline.auto_stop():
        assert sum(map(len, pipeline)) == 10
    assert [bar.options["total"] for bar in bars] == [3]
    assert bars[0].counted == 3
    assert bars[0].is_closed


def test_a_bar_is_closed_when_iteration_breaks_off(bars: list[FakeBar]) -> None:
    pipeline = source().build(progress=True)
    with pipeline.auto_stop():
        for _ in pipeline:
            break
    assert bars[0].counted == 1
    assert bars[0].is_closed


def test_the_real_bar_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    before = set(threading.enumerate())
    assert list(source(3).build(progress="train")) == [0, 1, 2]
    assert set(threading.enumerate()) <= before
    assert "train: 100%" in capsys.readouterr().err
