"""Runs notebooks without Jupyter: each cell is executed, and the value of its last line is kept."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import textwrap
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Execute a cell; return its outputs in the form of notebooks."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)  # noqa: S102  # of this repository
        if last is not None:
            code = compile(ast.Expression(last.value), where, "eval")
            value = eval(code, names)  # noqa: S307  # of this repository
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if (html := getattr(value, "_repr_html_", None)) is not None:
            # Jupyter shows the HTML, so a long text is not needed.
            data["text/plain"] = [textwrap.shorten(repr(value), 80)]
            data["text/html"] = html().splitlines(keepends=True)
        outputs.append(
            {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def run(path: Path) -> dict[str, Any]:
    """Return a notebook with the outputs of all its cells."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["outputs"] = run_cell("".join(cell["source"]), names, f"{path.name}, cell {number}")
        cell["execution_count"] = number
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = number
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does."""
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        write(Path(name), run(Path(name)))
