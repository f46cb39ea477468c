"""The samples of speech, of captions and of shards, run as their users run them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["speech", "captions", "caption_shards"])
def test_prints_what_its_docstring_shows(name: str, tmp_path: Path) -> None:
    script = CHECKOUT / "samples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert docstring is not None
    shown = re.search(r"Output::\n\n(.*?)\n\n", docstring, re.DOTALL)
    assert shown is not None
    assert [line.strip() for line in shown[1].splitlines()] == done.stdout.splitlines()
