"""Errors: their base classes and messages, and that pickling keeps all their fields."""

from __future__ import annotations

import copy
import errno
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from effort import each

from spdl_media import errors
from spdl_media.errors import (
    ArrayFormatError,
    ConvertError,
    DecodeError,
    DemuxError,
    EncodeError,
    FilterError,
    MediaError,
    MissingDependencyError,
    PictureSizeError,
    SourceError,
    StorageTooSmallError,
    TransferError,
    WriteError,
)

# One error of each class, with all fields set to non-default values.
SAMPLES = {
    MediaError: MediaError("no idea", source="a.mp4"),
    SourceError: SourceError("no such file", source="a.mp4", errno=errno.ENOENT),
    DemuxError: DemuxError("no stream 7; there are 0 to 2", source="bytes of length 9"),
    DecodeError: DecodeError("damaged", source="a.mp4", pts_seconds=1.5, packet_index=7),
    ArrayFormatError: ArrayFormatError("cut short", source="a.tar", member="b", offset=7),
    FilterError: FilterError("no filter 'skale'", source="a.mp4", filter_desc="skale=2:2"),
    PictureSizeError: PictureSizeError("too thin", source="a.png", filter_desc="scale=-1:9"),
    ConvertError: ConvertError("they differ", source="a.mp4"),
    StorageTooSmallError: StorageTooSmallError("144 bytes, but 143", source="a.mp4"),
    TransferError: TransferError("no device", source="a.mp4"),
    EncodeError: EncodeError("another size", source="a.mp4"),
    WriteError: WriteError("no space", source="a.mp4", errno=errno.ENOSPC),
    MissingDependencyError: MissingDependencyError("pip install x", source="s3://a", name="x"),
}
BUILTINS = {
    SourceError: OSError,
    DemuxError: ValueError,
    DecodeError: ValueError,
    ArrayFormatError: DecodeError,
    FilterError: ValueError,
    PictureSizeError: FilterError,
    ConvertError: ValueError,
    StorageTooSmallError: ConvertError,
    TransferError: RuntimeError,
    EncodeError: ValueError,
    WriteError: OSError,
    MissingDependencyError: ImportError,
}
FIELDS = (
    "source",
    "errno",
    "pts_seconds",
    "packet_index",
    "filter_desc",
    "name",
    "member",
    "offset",
)


def _fields(error: BaseException) -> dict[str, object]:
    return {name: getattr(error, name) for name in FIELDS if hasattr(error, name)}


def _raise(name: str) -> None:
    """Runs in the other process."""
    raise SAMPLES[getattr(errors, name)]


def _same(one: BaseException, other: BaseException) -> bool:
    return (
        type(one) is type(other)
        and one.args == other.args
        and str(one) == str(other)
        and _fields(one) == _fields(other)
    )


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


def test_samples_show_every_error_of_the_module() -> None:
    public = {getattr(errors, name) for name in errors.__all__}
    assert set(SAMPLES) == {value for value in public if issubclass(value, MediaError)}


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_comes_back_whole_from_another_process(
    kind: type[MediaError], process: ProcessPoolExecutor
) -> None:
    with pytest.raises(kind) as caught:
        process.submit(_raise, kind.__name__).result(timeout=100)
    assert _same(caught.value, SAMPLES[kind])
    # The pool still works: an error that cannot be unpickled would have broken it.
    assert process.submit(abs, -1).result(timeout=100) == 1


@each("kind", SAMPLES)
@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_with_all_fields(kind: type[MediaError], protocol: int) -> None:
    error = SAMPLES[kind]
    assert _same(pickle.loads(pickle.dumps(error, protocol)), error)


@each("kind", SAMPLES)
def test_copies_with_all_fields(kind: type[MediaError]) -> None:
    assert _same(copy.deepcopy(SAMPLES[kind]), SAMPLES[kind])


@each("kind", SAMPLES)
def test_pickles_fields_that_users_add(kind: type[MediaError]) -> None:
    error = kind("damaged")
    error.clip_number = 3  # type: ignore[attr-defined]  # as a user's code may
    error.add_note("while reading clip 3")
    back = pickle.loads(pickle.dumps(error))
    assert back.clip_number == 3
    assert back.__notes__ == ["while reading clip 3"]


@each("kind, builtin", BUILTINS.items())
def test_is_the_builtin_as_well(kind: type[MediaError], builtin: type[Exception]) -> None:
    assert issubclass(kind, MediaError)
    with pytest.raises(builtin, match="damaged"):
        raise kind("damaged")


@each("kind", SAMPLES)
def test_str_names_the_source_first(kind: type[MediaError]) -> None:
    assert str(kind("damaged", source="clip.mp4")) == "clip.mp4: damaged"
    assert str(kind("damaged")) == "damaged"
    assert str(kind()) == ""


@each("kind", SAMPLES)
def test_repr_names_the_class_the_source_and_the_message(kind: type[MediaError]) -> None:
    assert repr(kind("damaged")) == f"{kind.__name__}('damaged')"
    assert repr(kind("damaged", source="a.mp4")) == f"{kind.__name__}('a.mp4: damaged')"


def test_fields_default_to_none() -> None:
    for kind in SAMPLES:
        assert set(_fields(kind("damaged")).values()) == {None}


def test_source_error_has_the_number_of_the_system() -> None:
    error = SourceError("no such file", errno=errno.ENOENT)
    assert error.errno == errno.ENOENT
    assert SourceError("refused").errno is None


def test_missing_dependency_has_the_name_of_the_package() -> None:
    assert MissingDependencyError("needs torch", name="torch").name == "torch"


def test_cause_is_kept_within_the_process() -> None:
    def fail() -> None:
        try:
            raise KeyError("key")
        except KeyError as cause:
            raise DemuxError("damaged") from cause

    with pytest.raises(DemuxError, match="damaged") as caught:
        fail()
    assert isinstance(caught.value.__cause__, KeyError)


class _RecordError(DecodeError):
    """A user's own subclass with a field of its own."""

    record: int | None = None


def test_subclass_pickles_with_its_own_fields() -> None:
    error = _RecordError("damaged", source="a.mp4", pts_seconds=0.5, packet_index=1)
    error.record = 12
    back = pickle.loads(pickle.dumps(error))
    assert _same(back, error)
    assert back.record == 12
