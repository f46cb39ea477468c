"""iter_samples: grouping of members, patterns of shards, and the division among workers."""

from __future__ import annotations

import array
import io
import itertools
import json
import mmap
import subprocess
import sys
from collections import UserList, deque
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from array_formats.made_files import tar
from effort import each

import spdl_media as sm
from spdl_media import shards as shards_module
from spdl_media.source import LocalDirectory


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


def without_url(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str) else bytes(value)
        for name, value in sample.items()
        if name != "__url__"
    }


def test_members_that_share_a_key_make_a_sample() -> None:
    data = tar(
        {
            "0001.jpg": b"picture 1",
            "0001.json": b"{}",
            "0001.cls": b"7",
            "train/0002.seg.PNG": b"mask",
            "train/0002.jpg": b"picture 2",
        }
    )
    first, second = sm.iter_samples(data)
    assert without_url(first) == {
        "__key__": "0001", "jpg": b"picture 1", "json": b"{}", "cls": b"7"
    }  # fmt: skip
    assert isinstance(first["jpg"], memoryview)
    assert first["__url__"] == f"bytes of length {len(data)}"
    assert without_url(second) == {
        "__key__": "train/0002", "seg.png": b"mask", "jpg": b"picture 2"
    }  # fmt: skip


@each(
    "name, key, ending",
    [
        ("a.jpg", "a", "jpg"),
        ("a.b.jpg", "a", "b.jpg"),
        ("./a.jpg", "./a", "jpg"),
        ("dir.with.dots/a.jpg", "dir.with.dots/a", "jpg"),
        ("../a.jpg", "../a", "jpg"),
        ("a\nb.jpg", "a\nb", "jpg"),
    ],
)
def test_keys_end_at_the_first_dot_of_the_name(name: str, key: str, ending: str) -> None:
    [sample] = sm.iter_samples(tar({name: b"x"}))
    assert without_url(sample) == {"__key__": key, ending: b"x"}


def test_names_without_key_or_ending_are_left_out() -> None:
    data = tar({"README": b"", ".hidden": b"", "dir/.hidden.jpg": b"", "a.": b"", "a.jpg": b"x"})
    assert keys(sm.iter_samples(data)) == ["a"]
    assert keys(sm.iter_samples(tar({"README": b""}))) == []


def test_folders_about_the_data_set_are_left_out() -> None:
    """As in WebDataset 1.0.2, which skips exactly the names that match ``__[^/]*__($|/)``."""
    names = ["__meta__/info.json", "__a__b__/c/d.txt", "____/e.txt", "__meta__", "0.jpg"]
    others = [
        "__x__.jpg",
        "__meta/a.jpg",
        "dir/__meta__/a.jpg",
        "_meta__/a.jpg",
        "./__meta__/a.jpg",
    ]
    data = tar(dict.fromkeys(names + others, b""))
    assert keys(sm.iter_samples(data)) == ["0", *(name.rsplit(".", 1)[0] for name in others)]


def test_samples_do_not_reach_over_shards() -> None:
    shards = [tar({"a.jpg": b"1", "b.jpg": b"2"}), tar({"b.cls": b"3"})]
    assert keys(sm.iter_samples(shards)) == ["a", "b", "b"]


def test_an_ending_twice() -> None:
    data = tar({"a.jpg": b"1", "b.jpg": b"2", "b.JPG": b"3"})
    samples = sm.iter_samples(data)
    assert next(samples)["__key__"] == "a"
    with pytest.raises(sm.ArrayFormatError, match="sample 'b' has 'jpg' twice") as caught:
        next(samples)
    assert caught.value.member == "b.JPG"
    assert caught.value.offset == 2048
    assert caught.value.source == f"bytes of length {len(data)}"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Make twelve shards with one sample each, whose key is the number of the shard."""
    for number in range(12):
        (tmp_path / f"train-{number:03}.tar").write_bytes(tar({f"{number}.cls": b"%d" % number}))
    return tmp_path


def test_patterns_of_numbers_and_words(shards: Path) -> None:
    assert keys(sm.iter_samples(f"{shards}/train-{{000..011}}.tar")) == [str(k) for k in range(12)]
    assert keys(sm.iter_samples(f"{shards}/train-0{{09..11}}.tar")) == ["9", "10", "11"]
    assert keys(sm.iter_samples(f"{shards}/train-{{003,001}}.tar")) == ["3", "1"]
    some = [shards / "train-005.tar", f"{shards}/train-{{000..001}}.tar", tar({"x.cls": b""})]
    assert keys(sm.iter_samples(some)) == ["5", "0", "1", "x"]


def test_any_sequence_of_shards(shards: Path) -> None:
    folder = LocalDirectory(shards, "*.tar")
    for some in (folder, folder[:], deque(folder), UserList(folder)):
        assert keys(sm.iter_samples(some)) == [str(k) for k in range(12)]
    data = tar({"a.jpg": b"1"})
    for memory in (data, bytearray(data), memoryview(data), array.array("b", data), mmap_of(data)):
        assert keys(sm.iter_samples(memory)) == ["a"]


def mmap_of(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    return memory


@each(
    "pattern, expected",
    [
        ("a", ["a"]),
        ("{0..3}", ["0", "1", "2", "3"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{000..001}x{1..2}", ["000x1", "000x2", "001x1", "001x2"]),
        ("s3://b/{train,val}-{0..1}.tar", [f"s3://b/{w}-{k}.tar" for w in ("train", "val") for k in (0, 1)]),
        ("{a,}", ["a", ""]),
        ("{01..100}", [f"{k:03}" for k in range(1, 101)]),
        ("{8..012}", ["008", "009", "010", "011", "012"]),
        ("{0..10}", [f"{k}" for k in range(11)]),
    ],
)  # fmt: skip
def test_expansion(pattern: str, expected: list[str]) -> None:
    assert shards_module._expanded(pattern) == expected


@each(
    "pattern, match",
    [
        ("{3..1}", r"the range \{3..1\} in .* runs backwards"),
        ("{0..99999999999}", "is too long"),
        ("{abc}", "is neither a range such as {000..099} nor words"),
        ("{}", "is neither a range"),
        ("{\u0660..\u0663}", "is neither a range"),
        ("{a,{b,c}}", "has braces inside of braces, or without their other half"),
        ("a{{0..1}}", "has braces inside of braces"),
        ("train-{000..099.tar", "without their other half"),
        ("train-000..099}.tar", "without their other half"),
        ("pipe:curl https://x/a.tar", "no command is run here"),
    ],
)
def test_invalid_patterns(pattern: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sm.iter_samples(pattern)


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "{0..3}.tar"
    path.write_bytes(tar({"a.cls": b""}))
    [sample] = sm.iter_samples(path)
    assert (sample["__key__"], sample["__url__"]) == ("a", str(path))


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (2, 3), (3, 4), (5, 2), (12, 1)])
def test_each_shard_goes_to_one_worker(shards: Path, world_size: int, num_workers: int) -> None:
    parts = [
        keys(
            sm.iter_samples(
                f"{shards}/train-{{000..011}}.tar",
                rank=rank,
                world_size=world_size,
                worker=worker,
                num_workers=num_workers,
            )
        )
        for rank in range(world_size)
        for worker in range(num_workers)
    ]
    assert all(parts)
    assert sorted(itertools.chain(*parts), key=int) == [str(k) for k in range(12)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


@each(
    "place, match",
    [
        ({"rank": 1}, "rank must be from 0 to below world_size, not rank=1 of 1"),
        ({"rank": -1}, "not rank=-1 of 1"),
        ({"world_size": 0}, "not rank=0 of 0"),
        ({"worker": 2, "num_workers": 2}, "worker must be .*, not worker=2 of 2"),
        ({"world_size": 2}, "1 shards cannot be shared by world_size=2 times num_workers=1"),
        ({"world_size": 1, "num_workers": 3}, "Write more shards, or use fewer workers"),
    ],
)
def test_invalid_places(place: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sm.iter_samples(tar({}), **place)


@pytest.mark.parametrize("place", [{"rank": "0"}, {"rank": 0.0}, {"num_workers": None}])
def test_a_place_is_a_whole_number(place: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"{next(iter(place))} must be an int, not "):
        sm.iter_samples(tar({}), **place)


def test_no_shards() -> None:
    with pytest.raises(ValueError, match="0 shards cannot be shared"):
        sm.iter_samples([])


def test_what_a_command_writes() -> None:
    program = "import sys; sys.stdout.buffer.write(bytes.fromhex(sys.argv[1]))"
    command = [sys.executable, "-c", program, tar({"a.cls": b"7"}).hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        [sample] = sm.iter_samples(process.stdout)
    assert sample["cls"] == b"7"


def test_files_are_called_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar({"a.cls": b"", "a.CLS": b""}))
    with path.open("rb") as file, pytest.raises(sm.ArrayFormatError, match="twice") as caught:
        next(sm.iter_samples(file))
    assert caught.value.source == f"BufferedReader {str(path)!r}"
    path.write_bytes(tar({"a.cls": b""}))
    with path.open("rb") as file:
        assert next(sm.iter_samples(file))["__url__"] == caught.value.source
    assert next(sm.iter_samples(f"file://{path}"))["__url__"] == f"file://{path}"


@pytest.mark.parametrize("command", ["raise SystemExit(3)", "import os; os.write(1, bytes(100))"])
def test_a_command_that_fails_is_an_archive_cut_short(command: str) -> None:
    arguments = [sys.executable, "-c", command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout
        with pytest.raises(
            sm.ArrayFormatError, match=r"not a tar archive: its header is cut short"
        ):
            list(sm.iter_samples(process.stdout))


def test_as_the_source_of_a_loader(shards: Path) -> None:
    def make() -> sm.DataLoader[Any]:
        return sm.DataLoader(
            # Closed below, because a generator that was not exhausted has a shard open.
            sources.enter_context(closing(sm.iter_samples(f"{shards}/train-{{000..011}}.tar"))),
            preprocessor=lambda sample: int(sample["cls"]),
            batch_size=5,
            output_order="input",
        )

    with ExitStack() as sources:
        loader = make()
        batches = iter(loader)
        first = next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        batches.close()
        resumed = make()
        resumed.load_state_dict(state)
        assert [first, *resumed] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_urls() -> None:
    fsspec = pytest.importorskip("fsspec")
    for number in range(3):
        fsspec.filesystem("memory").pipe(f"/shards/{number}.tar", tar({f"{number}.cls": b""}))
    samples = list(sm.iter_samples("memory://shards/{0..2}.tar"))
    assert keys(samples) == ["0", "1", "2"]
    assert samples[0]["__url__"] == "memory://shards/0.tar"


def test_errors_name_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "cut.tar"
    path.write_bytes(tar({"a.jpg": bytes(5000)})[:3000])
    with pytest.raises(sm.ArrayFormatError, match=r"member 'a.jpg': is cut short") as caught:
        list(sm.iter_samples([io.BytesIO(tar({})), path]))
    assert caught.value.source == str(path)
    with pytest.raises(sm.SourceError, match="No such file"):
        list(sm.iter_samples(tmp_path / "missing.tar"))
    with pytest.raises(TypeError, match="cannot read media from int"):
        list(sm.iter_samples([5]))  # type: ignore[list-item]
