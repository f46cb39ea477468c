"""ImageFolder: folders of classes as sources."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spdl_media as sm
from spdl_media.source import LocalDirectory

TREE = (
    "cat/b.jpg cat/a.JPG cat/x/y/e.png cat/x/c.png cat/x-y/d.jpg dog/e.webp dog/notes.txt stray.jpg"
)


def tree(root: Path, files: str = TREE) -> Path:
    for name in files.split():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def names(source: Any, root: Path) -> list[tuple[str, int]]:
    return [(os.path.relpath(path, root), label) for path, label in source]


def test_pairs_are_those_of_torchvision(tmp_path: Path) -> None:
    folder = sm.ImageFolder(tree(tmp_path))
    # Folders are sorted by their whole path: "-" comes before "/".
    expected = "cat/a.JPG cat/b.jpg cat/x/c.png cat/x-y/d.jpg cat/x/y/e.png dog/e.webp".split()
    assert names(folder, tmp_path) == [(name, int("dog" in name)) for name in expected]
    assert (folder.classes, folder.class_to_idx) == (["cat", "dog"], {"cat": 0, "dog": 1})
    assert folder.targets.tolist() == [0, 0, 0, 0, 0, 1]
    assert folder.samples[5] == (str(tmp_path / "dog" / "e.webp"), 1)
    assert list(folder.samples[3:]) == list(folder.samples)[3:]
    assert len(folder) == 6
    assert repr(folder) == "ImageFolder(6 files in 2 classes)"
    assert type(folder.samples[0][1]) is int


def test_torchvision_agrees(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    root = tree(tmp_path)
    assert list(sm.ImageFolder(root).samples) == datasets.ImageFolder(str(root)).samples


def test_ranks_share_out_an_order_of_each_epoch(tmp_path: Path) -> None:
    tree(tmp_path, " ".join(f"{k}/{n}.png" for k in "abc" for n in range(4)))
    ranks = [sm.ImageFolder(tmp_path, shuffle=True, seed=5, rank=r, world_size=2) for r in (0, 1)]
    first, second = ([list(rank) for rank in ranks] for _ in range(2))
    whole = sorted(sm.ImageFolder(tmp_path))
    assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == whole
    assert first != second
    assert [rank.epoch for rank in ranks] == [2, 2]
    ranks[1].set_epoch(0)
    assert list(pickle.loads(pickle.dumps(ranks[1]))) == first[1]


def test_a_loader_resumes_in_mid_epoch(tmp_path: Path) -> None:
    tree(tmp_path, " ".join(f"{k}/{n}.png" for k in "ab" for n in range(10)))

    def loader() -> sm.DataLoader:
        folder = sm.ImageFolder(tmp_path, shuffle=True, rank=1, world_size=2)
        return sm.DataLoader(folder, batch_size=3, output_order="input")

    whole, stopped, resumed = list(loader()), loader(), loader()
    begun = list(itertools.islice(stopped, 2))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert begun + list(resumed) == whole
    assert sum(map(len, whole)) == 10


def test_other_files_and_classes_without_any(tmp_path: Path) -> None:
    tree(tmp_path, "one/a.WAV two/b.jpg")
    folder = sm.ImageFolder(tmp_path, extensions=[".wav"], allow_empty=True)
    assert names(folder, tmp_path) == [("one/a.WAV", 0)]
    assert folder.classes == ["one", "two"]


def test_links_are_followed(tmp_path: Path) -> None:
    outside = tree(tmp_path / "outside", "z.jpg")
    root = tree(tmp_path / "root", "cat/a.jpg")
    (root / "dog").symlink_to(outside)
    (root / "cat" / "b.jpg").symlink_to(outside / "z.jpg")
    expected = [("cat/a.jpg", 0), ("cat/b.jpg", 0), ("dog/z.jpg", 1)]
    assert names(sm.ImageFolder(root), root) == expected


def dangling(root: Path) -> None:
    tree(root)
    for number in range(7):
        (root / "cat" / f"gone{number}.jpg").symlink_to(root / "nowhere")


def circle(root: Path) -> None:
    (tree(root) / "cat" / "x" / "up").symlink_to(root / "cat")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda root: tree(root, "a.jpg"), {}, "has no folders, each of which would be a class"),
        (
            lambda root: tree(root, "one/a.txt two/b.jpg six/c.txt"),
            {},
            "end.* in '.avif', .*: one, six. Pass extensions= .* or allow_empty=True",
        ),
        (dangling, {}, r": .*gone0.jpg, .*gone4.jpg, and 2 more\. Remove them"),
        (circle, {}, r"lead nowhere or in circles: .*cat/x/up\. Remove"),
        (tree, {"extensions": ["jpg"]}, r"endings such as .*, not \['jpg'\]"),
        (tree, {"extensions": ".jpg"}, "endings such as .*, not '.jpg'"),
        (tree, {"extensions": []}, r"endings such as .*, not \[\]"),
        (lambda root: root.touch(), {}, "root. is not a folder$"),
    ],
)
def test_bad_folders(
    tmp_path: Path, make: Callable[[Path], object], arguments: dict[str, Any], message: str
) -> None:
    root = tmp_path / "root"
    make(root)
    with pytest.raises((OSError, ValueError), match=message):
        sm.ImageFolder(root, **arguments)


@pytest.mark.parametrize("source", [sm.ImageFolder, LocalDirectory])
def test_a_folder_that_is_missing_is_told_with_the_place_where_it_was_searched(
    source: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotADirectoryError, match=rf"^'{tmp_path}/train' is not a folder"):
        source("train")
