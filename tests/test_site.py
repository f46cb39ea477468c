"""The documentation site builds without warnings, has no broken links, and needs no network.

Skipped without the extra ``docs``.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import spdl_media

ROOT = Path(__file__).resolve().parent.parent
# Each test parses the whole site or waits for its build: 20 s, on a busy machine minutes.
pytestmark = pytest.mark.long


@dataclass
class Page(HTMLParser):
    """The links, the loaded resources and the anchors of a page."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") == "stylesheet":
            self.loads.append(values["href"])
        elif "src" in values:
            self.loads.append(values["src"])


def read(folder: Path) -> dict[Path, Page]:
    """Read all pages of a site."""
    pages = {}
    for path in folder.rglob("*.html"):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def broken(pages: dict[Path, Page]) -> list[str]:
    """Return the broken links within a site."""
    wrong = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            url, place = urldefrag(link)
            if urlsplit(url).scheme:
                continue
            target = (path.parent / unquote(urlsplit(url).path)).resolve() if url else path
            if not target.exists() or (
                place and target in pages and unquote(place) not in pages[target].ids
            ):
                wrong.append(f"{path.name}: {link}")
    return wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "auto"]
    done = subprocess.run(
        [*command, "docs", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = read(site)
    assert len(pages) > 80
    assert broken(pages) == []
    loads = {one for page in pages.values() for one in page.loads}
    assert not [one for one in loads if one.startswith(("http:", "https:", "//"))]


def test_every_public_name_leads_to_its_docstring(site: Path) -> None:
    links = set(read(site)[site / "reference.html"].links)
    places = defaultdict(set)
    for link in links:
        url, place = urldefrag(link)
        places[place].add(url)
    missing = [
        name
        for name in spdl_media.__all__
        if name != "__version__" and not places[f"spdl_media.{name}"]
    ]
    assert not missing


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("ImageArguments", id="arguments without their names and defaults"),
        pytest.param("&lt;factory&gt;", id="a signature that Sphinx cannot parse"),
        pytest.param(">Type<", id="a sentence that Napoleon takes for the type of a property"),
    ],
)
def test_docstrings_are_read_as_they_are_meant(site: Path, wrong: str) -> None:
    assert [path.name for path in (site / "api").iterdir() if wrong in path.read_text()] == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y">1</a><a href="b.html#z">2</a><a href="c.html">3</a>'
        '<a href="#x">4</a><a href="https://example.org/c">5</a><img src="d.png">'
    )
    (tmp_path / "b.html").write_text('<p id="y">')
    assert broken(read(tmp_path)) == ["a.html: b.html#z", "a.html: c.html", "a.html: d.png"]
