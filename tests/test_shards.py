"""Shards: the samples of iter_samples by position, shuffled, divided among ranks, and read only once."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import signal
import tarfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import tar
from effort import examples
from http_server import serve
from hypothesis import given, settings
from hypothesis import strategies as st

import spdl_media as sm
from spdl_media import _remote as remote
from spdl_media import shards as shards_module
from spdl_media.source import DistributedRandomSampler, MapIterator

ALONE: Any = {"rank": 0, "world_size": 1}


def shard(first: int, count: int) -> bytes:
    members: dict[str, bytes] = {}
    for number in range(first, first + count):
        members[f"s/{number:04}.cls"] = b"%d" % number
        members[f"s/{number:04}.jpg"] = bytes([number % 256]) * (number * 37 % 1200)
    return tar(members)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make four shards of 10, 5, 0 and 15 samples, numbered from 0 to 29."""
    for index, (first, count) in enumerate([(0, 10), (10, 5), (15, 0), (15, 15)]):
        (tmp_path / f"train-{index:03}.tar").write_bytes(shard(first, count))
    return tmp_path


def numbers(samples: Any) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def numbers_of(source: sm.Shards, epoch: int) -> list[int]:
    source.set_epoch(epoch)
    return numbers(source)


def test_ctrl_c_does_not_wait_for_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()
    waited: list[bool] = []

    def download(*_: object) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        waited.append(leave.wait(5))

    monkeypatch.setattr(shards_module, "download", download)
    with pytest.raises(KeyboardInterrupt):
        sm.Shards("https://example.org/0.tar", cache=tmp_path)
    assert waited == []
    leave.set()


def test_gives_what_iter_samples_gives(folder: Path) -> None:
    pattern = f"{folder}/train-{{000..003}}.tar"
    expected = list(sm.iter_samples(pattern))
    assert len(expected) == 30
    for urls in (
        pattern,
        f"{folder}/train-*.tar",
        f"{folder}/**/train-00[0-9].tar",
        f"file://{folder}/train-???.tar",
        [f"{folder}/train-{{000,001}}.tar", folder / "train-002.tar", folder / "train-003.tar"],
    ):
        source = sm.Shards(urls, **ALONE)
        assert list(source) == expected
        assert (len(source), source.num_samples, len(source.urls)) == (30, 30, 4)
        assert list(pickle.loads(pickle.dumps(source))) == expected  # our own


def test_all_kinds_of_archives(tmp_path: Path) -> None:
    """The shards have long names, pax headers, members of no sample, and a sample at the very end."""
    long, members = "d" * 150, {}
    for number in range(3):
        members[f"{long}{number}/a.cls"] = b"%d" % number
        members[f"__meta__/{number}.json"] = b"{}"
        members[f"{long}{number}/a.txt"] = "é".encode() * 300 * number
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=format) as archive:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(content), 0.5
                archive.addfile(member, io.BytesIO(content))
                archive.addfile(tarfile.TarInfo("no_ending"))
        path = tmp_path / "a.tar"
        path.write_bytes(file.getvalue())
        assert list(sm.Shards(path, **ALONE)) == list(sm.iter_samples(path))


@settings(max_examples=examples(100))
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    world_size=st.integers(1, 9),
    shuffle_shards=st.booleans(),
    shuffle_buffer=st.sampled_from([0, 1, 3, 1000]),
    equal_length=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_ranks_have_runs_of_one_order(
    counts: list[int],
    world_size: int,
    shuffle_shards: bool,
    shuffle_buffer: int,
    equal_length: bool,
    seed: int,
    epoch: int,
) -> None:
    total = sum(counts)

    def order(rank: int, world_size: int, **others: Any) -> list[int]:
        options: Any = {
            "shuffle_shards": shuffle_shards,
            "shuffle_buffer": shuffle_buffer,
            "seed": seed,
            **others,
        }
        sampler = shards_module._ShardOrder(
            total, (rank, world_size), "drop" if equal_length else "keep"
        )
        sampler.counts = np.array(counts)
        sampler.__dict__.update(options)
        sampler.set_epoch(epoch)
        given = list(sampler)
        assert list(sampler.begin_by_position(epoch)) == given
        assert len(sampler) == len(given)
        return given

    if total < world_size and equal_length:
        with pytest.raises(ValueError, match=f"{total} samples are fewer than {world_size} ranks"):
            order(0, world_size)
        return
    whole = order(0, 1)
    assert sorted(whole) == list(range(total))
    ranks = [order(rank, world_size) for rank in range(world_size)]
    lengths = {len(given) for given in ranks}
    end = total // world_size * world_size if equal_length else total
    assert list(itertools.chain(*ranks)) == whole[:end]
    assert len(lengths) == 1 if equal_length else max(lengths) - min(lengths) <= 1
    # Without the buffer, shards are not mixed, and are in order unless they are shuffled.
    unmixed = order(0, 1, shuffle_buffer=0)
    starts = np.cumsum(counts) - counts
    runs = [list(range(start, start + n)) for start, n in zip(starts, counts, strict=True) if n]
    assert sorted(unmixed) == list(range(total))
    found = [unmixed[unmixed.index(run[0]) :][: len(run)] for run in runs]
    assert found == runs
    if not shuffle_shards:
        assert unmixed == list(range(total))
    # No sample moves by the length of the buffer or more.
    moved = np.argsort(whole)[unmixed] - np.arange(total)
    assert np.abs(moved).max() < max(1, shuffle_buffer)


def test_orders_change_with_seed_and_epoch(folder: Path) -> None:
    def make(**options: Any) -> sm.Shards:
        return sm.Shards(f"{folder}/*.tar", shuffle_buffer=1000, **options, **ALONE)

    source = make()
    first, second = numbers(source), numbers(source)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert numbers_of(make(), 1) == second
    assert numbers(make(seed=1)) != first
    # With a buffer much larger than the number of samples, all positions are equally likely.
    places = Counter(numbers_of(source, epoch).index(0) // 10 for epoch in range(300))
    assert min(places.values()) > 70


def test_a_loader_resumes_without_reading_what_is_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> sm.DataLoader:
        source = sm.Shards(
            f"{folder}/*.tar", shuffle_shards=True, shuffle_buffer=8, cache=folder / "c", **ALONE
        )
        return sm.DataLoader(
            source, aggregator=numbers, batch_size=4, output_order="input", num_threads=2
        )

    whole = list(make())
    loader = make()
    head = list(itertools.islice(loader, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["order"] == {
        "sampler": "_ShardOrder",
        "seed": 0,
        "shuffle_shards": True,
        "shuffle_buffer": 8,
        **ALONE,
    }
    opened: list[str] = []
    open_input = shards_module.open_input
    monkeypatch.setattr(
        shards_module,
        "open_input",
        lambda *a, **k: (opened.append(k["name"]), open_input(*a, **k))[1],
    )
    resumed = make()
    assert opened == []  # offsets of samples are in the cache
    resumed.load_state_dict(state)
    assert head + list(resumed) == whole
    assert len(opened) == 30 - 12


def test_other_ranks_take_over(folder: Path) -> None:
    def make(rank: int, world_size: int) -> sm.DataLoader:
        source = sm.Shards(
            f"{folder}/*.tar",
            shuffle_buffer=5,
            equal_length=False,
            rank=rank,
            world_size=world_size,
        )
        return sm.DataLoader(source, preprocessor=lambda sample: int(sample["cls"]))

    loaders = [make(rank, 3) for rank in range(3)]
    done = [n for at, loader in enumerate(loaders) for n in itertools.islice(loader, 2 + 3 * at)]
    states = [loader.state_dict() for loader in loaders]
    left = []
    for rank in range(5):  # more ranks than shards
        loader = make(rank, 5)
        loader.load_state_dict(states)
        left.append(list(loader))
    assert sorted(itertools.chain(done, *left)) == list(range(30))
    assert {len(one) for one in left} == {3}


def test_random_access_serves_other_sources(folder: Path) -> None:
    source = sm.Shards(f"{folder}/*.tar", **ALONE)
    every_third = MapIterator(source.mapping, range(0, 30, 3))
    assert numbers(every_third) == list(range(0, 30, 3))
    mixed = sm.Mix([source, MapIterator(source.mapping, DistributedRandomSampler(30, **ALONE))])
    assert Counter(numbers(mixed)) == Counter([*range(30)] * 2)


def test_samples_are_numbered_from_0(folder: Path) -> None:
    mapping = sm.Shards(f"{folder}/*.tar", **ALONE).mapping
    assert numbers(mapping[number] for number in (0, 29)) == [0, 29]
    for number in (-1, 30):
        with pytest.raises(IndexError, match=f"no sample {number}: .* from 0 to 29"):
            mapping[number]


def test_the_cache_knows_when_a_file_has_changed(folder: Path) -> None:
    path, cache = folder / "train-001.tar", folder / "cache" / "of shards"

    def make() -> list[int]:
        return numbers(sm.Shards(path, cache=cache, **ALONE))

    assert make() == list(range(10, 15))
    (index,) = cache.iterdir()
    before = index.stat().st_mtime_ns
    assert make() == list(range(10, 15))
    assert [file.stat().st_mtime_ns for file in cache.iterdir()] == [before]
    path.write_bytes(shard(20, 4))
    assert make() == [20, 21, 22, 23]
    # An index that was not written completely is made again.
    for length in (100, 0):
        for file in cache.iterdir():
            file.write_bytes(file.read_bytes()[:length])
        assert make() == [20, 21, 22, 23]


class TestDamage:
    def test_a_cut_shard_is_named_at_once(self, folder: Path) -> None:
        path = folder / "train-003.tar"
        data = path.read_bytes()
        at = data.index(b"s/0022.jpg")
        for size, message in [
            (at + 612, r"train-003.tar: member 's/0022.jpg': is cut short: 100 of 814 bytes"),
            (
                at,
                r"train-003.tar: member 's/0022.cls': the header behind it is missing",
            ),
            (0, "train-003.tar: is not a tar archive: its header is cut short after 0 bytes"),
        ]:
            path.write_bytes(data[:size])
            with pytest.raises(sm.ArrayFormatError, match=message):
                sm.Shards(f"{folder}/*.tar", **ALONE)

    def test_a_damaged_header_is_named_with_its_place(self, folder: Path) -> None:
        path = folder / "train-001.tar"
        data = bytearray(path.read_bytes())
        at = data.index(b"s/0012.jpg")
        data[at + 20] ^= 1
        path.write_bytes(data)
        message = rf"'s/0012.cls': the header behind it has a wrong checksum.*\(at byte {at}\)"
        with pytest.raises(sm.ArrayFormatError, match=message):
            sm.Shards(f"{folder}/*.tar", **ALONE)

    def test_what_changes_in_mid_epoch_is_a_failure_of_its_samples(self, folder: Path) -> None:
        source = sm.Shards(f"{folder}/*.tar", **ALONE)
        (folder / "train-001.tar").write_bytes(shard(10, 1))
        (folder / "train-003.tar").unlink()
        loader = sm.DataLoader(source, max_failures=float("inf"), output_order="input")
        assert numbers(loader) == [*range(10), 10]
        texts = [str(failure.exception) for failure in loader.failures]
        assert len(texts) == 19
        assert all("train-001.tar" in text or "No such file" in text for text in texts)

    def test_a_sample_twice_in_one(self, folder: Path) -> None:
        path = folder / "twice.tar"
        path.write_bytes(tar({"a.JPG": b"1", "a.jpg": b"2", "b.jpg": b"3"}))
        source = sm.Shards(path, **ALONE)
        with pytest.raises(sm.ArrayFormatError, match=r"twice.tar.*sample 'a' has 'jpg' twice"):
            source.mapping[0]
        assert source.mapping[1]["jpg"] == b"3"

    def test_a_header_for_all_members(self, tmp_path: Path) -> None:
        path = tmp_path / "all.tar"
        with tarfile.open(path, "w", pax_headers={"path": "x"}) as archive:
            archive.addfile(tarfile.TarInfo("a.cls"))
        with pytest.raises(sm.ArrayFormatError, match=r"pax header that renames.*by iter_samples"):
            sm.Shards(path, **ALONE)


def test_values_that_are_not_shards(folder: Path) -> None:
    bad: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (f"{folder}/none-*.tar", {}, FileNotFoundError, r"no file matches '.*none-\*.tar'"),
        (f"{folder}/train-{{000..", {}, ValueError, "without their other half"),
        (f"{folder}/train-{{3..1}}.tar", {}, ValueError, "runs backwards"),
        (f"{folder}/none.tar", {}, sm.SourceError, "none.tar: cannot be read: No such file"),
        (folder, {}, sm.SourceError, "Is a directory. Give one of the files in it"),
        (b"bytes", {}, TypeError, "a path or a URL, not bytes; .*memory to iter_samples"),
        (iter(["a.tar"]), {}, TypeError, "not list_iterator; pass several as a list"),
        ([], {}, ValueError, "no samples in 0 shards"),
        (f"{folder}/train-002.tar", {}, ValueError, r"no samples in 1 shards: .'.*train-002.tar'"),
        (
            f"{folder}/*.tar",
            {"world_size": 31},
            ValueError,
            "30 samples are fewer than 31 ranks.*pass equal_length=False",
        ),
        (f"{folder}/*.tar", {"rank": 3}, ValueError, "rank 3 of 1 processes"),
        (f"{folder}/*.tar", {"shuffle_buffer": -1}, ValueError, "shuffle_buffer must be"),
        (f"{folder}/*.tar", {"seed": 1.5}, TypeError, "seed must be"),
        (f"{folder}/*.tar", {"storage_options": 3}, TypeError, "storage_options must be a mapping"),
    ]
    for urls, options, error, message in bad:
        with pytest.raises(error, match=message):
            sm.Shards(urls, **{**ALONE, **options})


def test_a_pipe_cannot_be_read_from_any_place(tmp_path: Path) -> None:
    path = tmp_path / "pipe.tar"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)  # a writer, so that opening does not block
    try:
        with pytest.raises(sm.SourceError, match=r"pipe.tar: cannot seek: a pipe, or"):
            sm.Shards(path, **ALONE)
    finally:
        os.close(keep)


class TestRemote:
    @pytest.fixture(autouse=True)
    def no_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("aiohttp")
        monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0))

    FILES = {"a-0.tar": shard(0, 8), "a-1.tar": shard(8, 4)}  # noqa: RUF012

    def test_samples_are_fetched_or_copied(self, tmp_path: Path) -> None:
        with serve(self.FILES) as server:
            urls = f"{server.url}/a-{{0..1}}.tar"
            expected = list(sm.iter_samples(urls))
            server.reset()
            assert list(sm.Shards(urls, **ALONE)) == expected
            fetched = sm.Shards(urls, cache=tmp_path / "a", keep_copies=False, **ALONE)
            assert list(fetched) == expected
            server.reset()
            assert fetched.mapping[9] == expected[9]
            assert server.requests == {"a-1.tar": 1}
            server.reset()
            copied = sm.Shards(urls, cache=tmp_path / "b", **ALONE)
            assert list(copied) == list(pickle.loads(pickle.dumps(copied))) == expected
            assert server.requests == {"a-0.tar": 1, "a-1.tar": 1}
        # Everything is in the folder now, so the server can be gone.
        assert list(sm.Shards(urls, cache=tmp_path / "b", **ALONE)) == expected
        assert len(list((tmp_path / "b").iterdir())) == 4
        assert len(list((tmp_path / "a").iterdir())) == 2

    def test_samples_of_a_server_without_sizes_need_copies(self, tmp_path: Path) -> None:
        with serve(self.FILES, ranges=False) as server:
            url = f"{server.url}/a-1.tar"
            with pytest.raises(sm.SourceError, match=r"a-1.tar: cannot seek: .* Use cache="):
                sm.Shards(url, **ALONE)
            assert numbers(sm.Shards(url, cache=tmp_path, **ALONE)) == [8, 9, 10, 11]

    def test_a_copy_that_is_missing_is_fetched_again(self, tmp_path: Path) -> None:
        with serve(self.FILES) as server:
            urls = f"{server.url}/a-{{0..1}}.tar"
            sm.Shards(urls, cache=tmp_path, **ALONE)
            for path in tmp_path.glob("*.tar"):
                path.unlink()
            server.reset()
            loader = sm.DataLoader(sm.Shards(urls, cache=tmp_path, **ALONE), num_threads=8)
            assert sorted(numbers(loader)) == list(range(12))
            assert server.requests == {"a-0.tar": 1, "a-1.tar": 1}

    def test_fsspecs_own_caches_are_links_of_the_url(self, tmp_path: Path) -> None:
        options = {"simplecache": {"cache_storage": str(tmp_path)}}
        with serve(self.FILES) as server:
            urls = [f"simplecache::{server.url}/{name}" for name in self.FILES]
            source = sm.Shards(urls, storage_options=options, **ALONE)
            server.reset()
            assert numbers(source) == list(range(12))
            assert not server.requests

    def test_a_busy_server_is_asked_again(self) -> None:
        # After the first part, fsspec asks twice for the size, and then takes the file for a missing one.
        with serve(self.FILES) as server:
            server.busy = 4
            assert numbers(sm.Shards(f"{server.url}/a-1.tar", **ALONE)) == [8, 9, 10, 11]
            server.busy = 9
            with pytest.raises(sm.SourceError, match=r"FileNotFoundError: .*Error: 503, message"):
                sm.Shards(f"{server.url}/a-1.tar", **ALONE)
            server.busy = 2
            with pytest.raises(sm.SourceError, match="Error: 404, message"):
                sm.Shards(f"{server.url}/b.tar", **ALONE)

    def test_a_server_that_limits_the_requests_is_asked_once_and_then_later(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[float] = []
        monkeypatch.setattr("time.sleep", pauses.append)
        with serve(self.FILES) as server:
            server.busy, server.refusal = 2, 429
            assert numbers(sm.Shards(f"{server.url}/a-1.tar", **ALONE)) == [8, 9, 10, 11]
            assert len(pauses) == 2
            server.busy = 3
            with pytest.raises(sm.SourceError, match="ClientResponseError: 429"):
                sm.Shards(f"{server.url}/a-1.tar", **ALONE)

    def test_what_fails_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        http = pytest.importorskip("fsspec.implementations.http").HTTPFileSystem
        calls = []
        get_file = http._get_file

        def fail(path: str) -> None:
            calls.append(path)
            if len(calls) < 3:
                Path(path).write_bytes(b"a part")
                raise TimeoutError

        async def fail_twice(self: Any, url: str, path: str, **options: Any) -> None:
            fail(path)
            await get_file(self, url, path, **options)

        monkeypatch.setattr(http, "_get_file", fail_twice)
        http.clear_instance_cache()  # they keep the method that they were made with
        with serve(self.FILES) as server:
            url = f"{server.url}/a-1.tar"
            assert numbers(sm.Shards(url, cache=tmp_path, **ALONE)) == [8, 9, 10, 11]
            assert len(calls) == 3
            with pytest.raises(sm.SourceError, match="FileNotFoundError"):
                sm.Shards(f"{server.url}/b.tar", cache=tmp_path, **ALONE)
            assert len(calls) == 4
            calls.clear()
            monkeypatch.setattr(remote, "_PAUSES", (0.0,))
            with pytest.raises(sm.SourceError, match=r"a-0\.tar: cannot be opened: FSTimeoutError"):
                sm.Shards(f"{server.url}/a-0.tar", cache=tmp_path, **ALONE)
        assert len(list(tmp_path.iterdir())) == 2  # no incomplete copy is left
