"""Builds the documentation: ``python -m sphinx -W docs build/docs``.

The pages are the Markdown files of this folder. The table of contents is made from the links in
``index.md``, the pages of ``api/`` from docstrings and the tables in ``reference.md`` and ``pipeline.md``,
and the pages of ``samples/`` from the programs and their docstrings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

DOCS = Path(__file__).resolve().parent
SAMPLES = DOCS.parent / "samples"

project = "spdl_media"
copyright = "the authors of spdl_media"
release = version = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"][
    "version"
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Links to headings, such as dataloader.md#sources.
myst_heading_anchors = 4
myst_links_external_new_tab = False

# The order of the source is the order of the data flow.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Members inherited from Python and PyTorch are documented there.
FOREIGN = (
    "object",
    "tuple",
    "str",
    "dict",
    "BaseException",
    "BaseExceptionGroup",
    "Generic",
    "Protocol",
)
autodoc_default_options = {
    "members": True,
    "inherited-members": ",".join((*FOREIGN, "DataLoader")),
    "show-inheritance": True,
}
maximum_signature_line_length = 88
# List attributes of dataclasses, because autodoc already makes entries of them.
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"spdl_media {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_theme_options = {"navigation_with_keys": True}

# A row of a table of names: one or more names, and their description.
ROW = re.compile(r"^\| (?P<names>`[\w.]+`(?:, `[\w.]+`)*) \| (?P<what>\S.*) \|$", re.MULTILINE)
# Modules whose names are in no table.
MODULES = ("spdl_media.dataloader", "spdl_media.source", "spdl_media.torch")


def sections(text: str) -> list[tuple[str, str]]:
    """Return the headings of the second level, each with its text."""
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return [(part.partition("\n")[0].strip(), part.partition("\n")[2]) for part in parts]


def slug(heading: str) -> str:
    """Return the name of the page for a heading."""
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def entry(module: str, name: str, what: str) -> str:
    """Return the directive that documents a name."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        return f".. autoclass:: {module}.{name}\n"
    if inspect.isfunction(value):
        return f".. autofunction:: {module}.{name}\n"
    # Aliases of types and constants have their docstrings in other modules.
    what = what.replace("`", "``")
    return f".. py:data:: {name}\n\n   {what}\n"


def page(title: str, module: str, rows: list[tuple[str, str]]) -> str:
    """Return a page with the docstrings of some names."""
    parts = [title, "=" * len(title), "", f".. currentmodule:: {module}", ""]
    return "\n".join([*parts, *(entry(module, name, what) for name, what in rows)])


def names_of(table: str) -> list[tuple[str, str]]:
    """Return the names in a table, each with its description."""
    return [
        (name, match["what"])
        for match in ROW.finditer(table)
        for name in re.findall(r"`([\w.]+)`", match["names"])
    ]


def api_pages() -> dict[str, str]:
    """Return all pages of ``api/``, by name."""
    pages = {}
    for heading, text in sections((DOCS / "reference.md").read_text(encoding="utf-8")):
        rows = names_of(text)
        own = [row for row in rows if "." not in row[0]]
        if own:
            pages[slug(heading)] = page(heading, "spdl_media", own)
        for module in sorted({name.rpartition(".")[0] for name, _ in rows} - {""}):
            full = f"spdl_media.{module}"
            rest = [
                (name.rpartition(".")[2], what) for name, what in rows if name.startswith(module)
            ]
            pages[slug(heading)] = page(f"{heading}: {full}", full, rest)
    pipeline = dict(sections((DOCS / "pipeline.md").read_text(encoding="utf-8")))["Names"]
    pages["pipeline"] = page("spdl_media.pipeline", "spdl_media.pipeline", names_of(pipeline))
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # PyTorch
            continue
        rows = [(one, "") for one in module.__all__ if documented_in(module, one)]
        pages[name.rpartition(".")[2]] = page(name, name, rows)
    return pages


def documented_in(module: Any, name: str) -> bool:
    """Return whether a name of a module is documented on the module's own page."""
    value = getattr(module, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    elsewhere = [importlib.import_module(one) for one in ("spdl_media", "spdl_media.pipeline")]
    if module.__name__ == "spdl_media.dataloader":
        elsewhere.append(importlib.import_module("spdl_media.source"))
    return not any(getattr(one, name, None) is value for one in elsewhere)


def sample_pages() -> dict[str, str]:
    """Return all pages of ``samples/``: the docstring, an image if there is one, and the program."""
    pages = {}
    for path in sorted(SAMPLES.glob("*.py")):
        docstring = ast.parse(path.read_text(encoding="utf-8")).body[0]
        picture = f"pictures/{path.stem}.jpg"
        parts = [f"{path.name}\n{'=' * len(path.name)}", ".. highlight:: none"]
        # The program continues after the last line of the docstring.
        parts.append(inspect.cleandoc(docstring.value.value))
        if (DOCS / picture).exists():
            parts.append(f".. image:: /{picture}\n   :alt: output of the program")
        lines = f"   :language: python\n   :lines: {docstring.end_lineno + 1}-"
        parts += [
            "The program\n-----------",
            f".. literalinclude:: /../samples/{path.name}\n{lines}",
        ]
        pages[f"{path.stem}.rst"] = "\n\n".join(parts) + "\n"
    for path in sorted(SAMPLES.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        pages[f"{path.stem}.md"] = "\n\n".join(part for cell in cells for part in cell_parts(cell))
    return pages


def cell_parts(cell: dict[str, Any]) -> list[str]:
    """Return a cell of a notebook as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", [])})
        kind = "{raw} html" if "text/html" in data else "text"
        text = "".join(data.get("text/html", data["text/plain"])).rstrip()
        parts.append(f"```{kind}\n{text}\n```")
    return parts


def write_pages(_: object) -> None:
    """Write changed pages, and remove pages that no longer exist."""
    api = {f"{name}.rst": text for name, text in api_pages().items()}
    for name, pages in (("api", api), ("samples", sample_pages())):
        folder = DOCS / name
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name not in pages:
                path.unlink()
        for file, text in pages.items():
            path = folder / file
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def add_to_page(_: object, docname: str, content: list[str]) -> None:
    """Add what the Markdown, which is also read without Sphinx, cannot have."""
    if docname == "index":
        # Each heading with links is a section of the table of contents.
        for heading, text in sections(content[0]):
            # The words of the link are shorter than the page titles.
            links = {
                page: words for words, page in re.findall(r"\[([^]]+)\]\(([\w/-]+)\.md\)", text)
            }
            if links:
                pages = (f"{words} <{page}>" for page, words in links.items())
                lines = [f":caption: {heading}", ":hidden:", "", *pages]
                content[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"
    elif docname in ("reference", "pipeline"):
        module = "spdl_media" if docname == "reference" else "spdl_media.pipeline"
        content[0] = ROW.sub(lambda row: linked(row, module), content[0])
    if docname == "samples":
        content[0] = re.sub(r"\]\(\.\./samples/(\w+)\.\w+\)", r"](samples/\1)", content[0])
    if docname in ("reference", "samples"):
        folder = {"reference": "api"}.get(docname, docname)
        content[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{folder}/*\n```\n"


def linked(row: re.Match[str], module: str) -> str:
    """Return a row of a table of names, with links to their docstrings."""
    names = re.sub(
        r"`([\w.]+)`", lambda name: f"{{py:obj}}`{name[1]} <{module}.{name[1]}>`", row["names"]
    )
    return f"| {names} | {row['what']} |"


def show_all_arguments(_: object) -> None:
    """Hide the overloads of ``load_*``, so that their pages list the arguments and defaults of all."""
    for module in ("spdl_media.load", "spdl_media.video_file"):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        for name, overloads in list(analyzer.overloads.items()):
            if "Unpack" in str(overloads):
                del analyzer.overloads[name]


def parsable(*event: Any) -> tuple[str | None, str | None]:
    """Write an empty mapping for a default that Sphinx cannot parse."""
    *_, signature, result = event
    return signature and signature.replace("<factory>", "{}"), result


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("builder-inited", show_all_arguments)
    app.connect("autodoc-process-signature", parsable)
    app.connect("source-read", add_to_page)
