"""The lines of programs that are written twice in the documentation: with the usual tool, and here.

    python samples/benchmarks/line_counts.py

    prints the table of ``docs/recipes.md``

Lines are those of the listings under "With ...:" and "Here...:", laid out by ``ruff format`` in 100 columns,
without imports, comments and prints. A pair is found by its heading. It needs ruff.
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
    """A program, and where it stands.

    Attributes:
        what: What it does.
        sample: The sample that runs it.
        tool: What people use for it.
        page: The page of both sides.
        heading: What stands above them.
        is_same: Whether all but the imports is the same on both sides.
    """

    what: str
    sample: str
    tool: str
    page: str
    heading: str
    is_same: bool = False


PROGRAMS = (
    Program(
        "classifier of a folder of images",
        "train_images.py",
        "PyTorch, torchvision",
        "migrating-torchvision.md",
        "Train a classifier",
    ),
    Program(
        "a `Dataset` that is there already",
        "torch_dataset.py",
        "PyTorch",
        "migrating.md",
        "From PyTorch's DataLoader",
        is_same=True,
    ),
    Program(
        "two ranks, a damaged file",
        "train_ddp.py",
        "PyTorch, Pillow",
        "recipes.md",
        "Two ranks and a damaged file",
    ),
    Program(
        "random clips of videos, with sound",
        "video_clips.py",
        "PyTorch, PyAV",
        "recipes.md",
        "Clips of videos with sound",
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
        "images, captions and sounds",
        "captions.py",
        "PyTorch, Pillow, soundfile",
        "recipes.md",
        "Images, captions and sounds",
    ),
    Program(
        "Ctrl-C, damage, resume",
        "interrupted.py",
        "PyTorch, Pillow",
        "recipes.md",
        "A run that is cut off",
    ),
)


def count_lines(code: str) -> int:
    """Lines of code, whoever laid it out."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not is_left_out(node)]
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100", "-"]
    plain = ast.unparse(tree)  # no comments, no trailing commas that ask for a line each
    done = subprocess.run(command, input=plain, capture_output=True, text=True, check=True)  # noqa: S603
    return sum(bool(line.strip()) for line in done.stdout.splitlines())


def is_left_out(node: ast.stmt) -> bool:
    """Whether it is an import or a print."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) == "print"


def row(program: Program) -> str:
    """A row of the table."""
    text = (DOCS / program.page).read_text(encoding="utf-8")
    theirs = BLOCK.format("theirs")
    if program.is_same:
        found = re.search(theirs.removeprefix(r":\n\n"), text, re.MULTILINE | re.DOTALL)
    else:
        pair = rf"^## {re.escape(program.heading)}\n(?:(?!^## ).)*?With [^:]*{theirs}"
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
