"""The examples of the documentation run as they are printed, and its links and tables are right."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from effort import each

import spdl_media

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))]
MEDIA = ROOT / "samples" / "media"

# A block of code, and an optional mark before it that excludes it, or names the packages that it needs.
BLOCK = re.compile(
    r"^(?:<!-- (?:no-run: (?P<reason>[^\n]+)|needs: (?P<packages>\w+(?: \w+)*)) -->\n\n?)?"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# A print on its own line, followed by the printed text as a comment.
PRINTED = re.compile(r"^ *print\(.*\)  # (?P<text>.+)$", re.MULTILINE)
# A command whose output depends on its files alone, and the lines that it prints.
COMMAND = re.compile(
    r"^    \$ spdl-media ((?:probe|contact-sheet) .+)\n((?:    .+\n)+)", re.MULTILINE
)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    """A block of code to run."""

    line: int
    code: str
    packages: frozenset[str] = frozenset()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["reason"] is None:
            line = text.count("\n", 0, match.start("code"))
            yield Block(line, match["code"], frozenset((match["packages"] or "").split()))


def run(block: Block, names: dict[str, object], page: str) -> None:
    """Run a block. Line numbers of errors are those of the page."""
    code = compile("\n" * block.line + block.code, page, "exec", dont_inherit=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, names)  # noqa: S102  # the examples of this repository
    expected = [match["text"] for match in PRINTED.finditer(block.code)]
    if expected:
        assert output.getvalue().splitlines() == expected, f"{page}, block at line {block.line}"


@pytest.fixture
def example_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the files that the examples read, and return it."""
    shutil.copy(MEDIA / "nasa_13013.mp4", tmp_path / "clip.mp4")
    shutil.copy(MEDIA / "technician_turned.jpg", tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLAIN = [page for page in PAGES if any(not one.packages for one in blocks(page))]


@pytest.mark.usefixtures("example_folder")
@pytest.mark.parametrize("page", PLAIN, ids=name_of)
def test_examples_run_and_print_what_stands_behind_them(page: Path) -> None:
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks(page):
        if not block.packages:
            run(block, names, name_of(page))


EXAMPLES = [
    path
    for path in sorted((ROOT / "spdl_media").rglob("*.py"))
    if re.search(r">>> (?!.*\+SKIP)", path.read_text(encoding="utf-8"))
]


@pytest.mark.usefixtures("example_folder")
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_of_docstrings_give_what_they_show(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = pytest.importorskip(name, exc_type=ImportError)
    names = {"sm": spdl_media, "np": np}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed


NEEDED = sorted(
    {
        (page, " ".join(sorted(one.packages)))
        for page in PAGES
        for one in blocks(page)
        if one.packages
    }
)


@pytest.mark.usefixtures("example_folder")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of webdataset, by its shards
# Of Dask, without a network.
@pytest.mark.filterwarnings("ignore:Couldn't detect a suitable IP address:RuntimeWarning")
@pytest.mark.parametrize(("page", "packages"), NEEDED, ids=lambda one: getattr(one, "name", one))
def test_examples_beside_other_packages_run_where_they_are(
    page: Path, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise it looks for a later release of itself on the network.
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    needed = packages.split()
    for package in needed:
        pytest.importorskip(package)
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks(page):
        if block.packages <= set(needed):
            run(block, names, name_of(page))


@pytest.mark.long  # of type checks without a cache: 20 s
def test_the_readme_and_usual_calls_pass_strict_type_checks(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    first, *others = (block.code for block in blocks(ROOT / "README.md"))
    (chunks,) = (block.code for block in blocks(ROOT / "docs" / "howto" / "long-videos.md"))
    indices = (
        "import numpy as np, spdl_media as sm\nvideo = sm.VideoFile('clip.mp4')[np.arange(9)][::2]"
    )
    indices += "\nprint(video[np.int64(1)].pix_fmt, video[np.arange(2)].timestamps)"
    indices += "\nimages = sm.load_image_batch(['a.jpg'], crops=(0, 0, 8, 8), dtype=np.float32)"
    indices += "\nx, y, w, h = images.boxes[0]\nprint(x + w, not images.flips[0])"
    # The first block is independent; the others use names of the blocks before.
    for number, code in enumerate((first, "".join(others), chunks, indices)):
        page = tmp_path / f"page_{number}.py"
        page.write_text(code, encoding="utf-8")
        options = ["--strict", f"--cache-dir={tmp_path}", f"--config-file={os.devnull}"]
        output, errors, _ = api.run([*options, str(page)])
        assert output.startswith("Success"), output + errors


@each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each("page", PAGES)
def test_links_name_headings_that_there_are(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    named = [(page.parent / target if target else page, place) for target, place in links]
    missing = [
        f"{target.name}#{place}"
        for target, place in named
        if target.suffix == ".md" and place not in anchors(target)
    ]
    assert not missing


@each("page", PAGES)
def test_every_fence_is_seen(page: Path) -> None:
    """A block that the pattern above does not match would never be run."""
    text = page.read_text(encoding="utf-8")
    assert text.count("```python") == len(BLOCK.findall(text))
    assert text.count("```") % 2 == 0
    marks = re.findall(r"<!-- (?:no-run|needs)\b", text)
    marked = [match for match in BLOCK.finditer(text) if match["reason"] or match["packages"]]
    assert len(marks) == len(marked)


def test_commands_print_what_stands_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others of the page depend on the machine, or on files that the clone does not have."""
    main = pytest.importorskip("spdl_media.cli").main
    for name in ("nasa_13013.mp4", "technician_turned.jpg"):
        shutil.copy(MEDIA / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = COMMAND.findall((DOCS / "cli.md").read_text(encoding="utf-8"))
    assert [command.split()[0] for command, _ in shown] == ["probe", "contact-sheet"]
    for command, output in shown:
        assert main(command.split()) == 0
        assert capfd.readouterr().out == textwrap.dedent(output)


def test_a_wrong_output_is_noticed() -> None:
    run(Block(0, "print(1 + 1)  # 2\n"), {}, "page")
    with pytest.raises(AssertionError, match="page, block at line 7"):
        run(Block(7, "print(1 + 1)  # 3\n"), {}, "page")


def test_readme_has_the_two_commands_and_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'python -m pip install ".[cli]" && spdl-media check samples/media\n' in readme
    assert 'python -m pip install -e ".[test]" && python -m pytest\n' in readme
    assert 'packets = sm.demux_video("clip.mp4", timestamp=(1.5, 3.0))\n' in readme


def test_the_reference_has_one_line_for_each_public_name_and_no_other() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:\w+\.)*?(\w+)` \| (?P<what>\S.*) \|$", reference, re.MULTILINE)
    apart = set(re.findall(r"^\| `testing\.(\w+)`", reference, re.MULTILINE))
    names = [name for name, _ in rows if name not in apart]
    assert sorted(names) == sorted(set(spdl_media.__all__) - {"__version__"})
    assert apart == set(__import__("spdl_media.testing").testing.__all__)


def test_the_lines_of_programs_are_those_that_are_counted() -> None:
    pytest.importorskip("ruff")
    script = ROOT / "samples" / "benchmarks" / "line_counts.py"
    rows = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert rows in table
    assert all((ROOT / "samples" / name).exists() for name in re.findall(r"`(\w+\.py)`", rows))


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        name = page.relative_to(DOCS).as_posix()
        assert name == "index.md" or f"({name})" in index, f"docs/index.md does not mention {name}"


def test_every_sample_is_in_the_page_of_samples() -> None:
    page = (DOCS / "samples.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\(\.\./samples/([\w.]+)\)", page)
    folder = ROOT / "samples"
    assert sorted(listed) == sorted(
        path.name for path in folder.iterdir() if path.suffix in (".py", ".ipynb")
    )


def test_the_diagrams_are_those_that_are_drawn() -> None:
    drawn = runpy.run_path(str(DOCS / "diagrams" / "draw.py"))["DIAGRAMS"]
    files = {path.stem: path.read_text("utf-8") for path in (DOCS / "diagrams").glob("*.svg")}
    assert files == {name: draw().svg() for name, draw in drawn.items()}
