"""The sample of a training, run as users run it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from programs import SAMPLES, run_python

SCRIPT = SAMPLES / "train_images.py"


def without_figures(text: str) -> list[str]:
    """Remove accuracy and time, which differ between machines."""
    return [re.sub(r"\d+% right|\d+ ms", "...", line).strip() for line in text.splitlines()]


@pytest.mark.long
def test_prints_what_its_docstring_shows(tmp_path: Path) -> None:
    done = run_python("-W", "error", SCRIPT, cwd=tmp_path)
    said = (
        "first failure of stage 'ImageRecipe': DecodeError: ",
        "failures of this epoch: 1 of 240 in 'ImageRecipe'",
        "failures of this epoch, which ended early: 1 of ",
    )
    assert all(line.startswith(said) for line in done.stderr.splitlines()), done.stderr
    docstring = ast.get_docstring(ast.parse(SCRIPT.read_text(encoding="utf-8")))
    assert docstring is not None
    shown = re.search(r"Output .*?::\n\n(.*?)\n\n", docstring, re.DOTALL)
    assert shown is not None
    assert without_figures(done.stdout) == without_figures(shown[1])
    assert [int(part) for part in re.findall(r"(\d+)% right", done.stdout)][-1] > 90
    assert list(tmp_path.iterdir()) == []
