"""Count the lines of the programs that the documentation shows with the usual tool and with this library.

    python samples/benchmarks/line_counts.py

It prints the table of ``docs/recipes.md``.

It counts the lines of the listings after "With ...:" and "Here...:", formatted by ``ruff format`` to 100
columns, without imports, comments and prints. Each pair is found by its heading. It needs ruff.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = r":\n\n(?:<!-- needs: [^\n]*-->\n)?```python\n(?P<{}>.*?)^```$"


@dataclass(frozen=True)
class Program:
    """A program in the documentation.

    Attributes:
        what: What it does.
        sample: The sample that runs it.
        tool: The usual tool for it.
        page: The page with both listings.
        heading: The heading above the listings.
        is_same: Whether the listings differ only in imports.
    """

    what: str
    sample: str
    tool: str
    page: str
    heading: str
    is_same: bool = False


PROGRAMS = (
    Program(
        "image classifier on a folder",
        "train_images.py",
        "PyTorch, torchvision",
        "migrating-torchvision.md",
        "Train a classifier",
    ),
    Program(
        "an existing `Dataset`",
        "torch_dataset.py",
        "PyTorch",
        "migrating.md",
        "From PyTorch's DataLoader",
        is_same=True,
    ),
    Program(
        "two ranks with damaged files",
        "train_ddp.py",
        "PyTorch, Pillow",
        "recipes.md",
        "Two ranks and a damaged file",
    ),
    Program(
        "random video clips with audio",
        "video_clips.py",
        "PyTorch, PyAV",
        "recipes.md",
        "Video clips with audio",
    ),
    Program(
        "windows of speech, padded",
        "speech.py",
        "PyTorch, soundfile, SciPy",
        "recipes.md",
        "Windows of speech",
    ),
    Program(
        "tar shards of images and captions",
        "caption_shards.py",
        "webdataset, Pillow",
        "migrating-webdataset.md",
        "Shards of images and captions",
    ),
    Program(
        "images, captions and audio",
        "captions.py",
        "PyTorch, Pillow, soundfile",
        "recipes.md",
        "Images, captions and audio",
    ),
    Program(
        "resume after Ctrl-C, with damaged files",
        "interrupted.py",
        "PyTorch, Pillow",
        "recipes.md",
        "An interrupted run",
    ),
)


def count_lines(code: str) -> int:
    """Return the number of lines after formatting."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not is_left_out(node)]
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100", "-"]
    plain = ast.unparse(tree)  # without comments and trailing commas, which force line breaks
    done = subprocess.run(command, input=plain, capture_output=True, text=True, check=True)  # noqa: S603
    return sum(bool(line.strip()) for line in done.stdout.splitlines())


def is_left_out(node: ast.stmt) -> bool:
    """Return whether a statement is an import or a print."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == "print"


def row(program: Program) -> str:
    """Return a row of the table."""
    text = (DOCS / program.page).read_text(encoding="utf-8")
    theirs = BLOCK.format("theirs")
    if program.is_same:
        found = re.search(theirs.removeprefix(r":\n\n"), text, re.MULTILINE | re.DOTALL)
    else:
        pair = rf"^## {re.escape(program.heading)}\n(?:(?!^## ).)*?With\s[^:]*{theirs}"
        pair += rf"\n\n^Here[^:]*{BLOCK.format('ours')}"
        found = re.search(pair, text, re.MULTILINE | re.DOTALL)
    assert found is not None, program.heading
    lines = [count_lines(found[side]) for side in ("theirs", *("ours",) * (not program.is_same))]
    anchor = re.sub(r"[^\w -]", "", program.heading.lower()).replace(" ", "-")
    target = f"{program.page if program.page != 'recipes.md' else ''}#{anchor}"
    return (
        f"| {program.what} | `{program.sample}` | {lines[-1]} | {program.tool} | {lines[0]} | "
        f"[{program.heading}]({target}) |"
    )


def main() -> None:
    """Print the rows."""
    for program in PROGRAMS:
        print(row(program))


if __name__ == "__main__":
    main()
