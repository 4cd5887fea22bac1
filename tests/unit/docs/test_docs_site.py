"""The documentation builds strictly, and its pages load nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[3]
LOADS = {"src", "srcset", "data", "poster", "background", "action"}
"""Attributes whose address a browser fetches, or sends to, by itself or at a press."""


class Page(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.classes: set[str] = set()
        self.components: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            value = value or ""
            if name in LOADS or (name in ("href", "xlink:href") and tag not in ("a", "area")):
                self.loads.append(value)
            elif name == "style":
                self.loads += re.findall(r"url\(([^)]*)\)", value)
            elif name == "href":
                self.links.append(value)
            elif name == "id":
                self.ids.add(value)
            elif name == "class":
                self.classes |= set(value.split())
            elif name == "data-md-component":
                self.components.add(value)


def external(address: str) -> bool:
    address = address.strip("\"' ")
    return bool(re.match(r"(?:[a-z][a-z0-9+.-]*:)?//", address, re.IGNORECASE)) and not address.startswith("data:")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install 'rollspec[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {p: Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}


def test_every_page_is_there(pages: dict[Path, Page]) -> None:
    names = {p.name for p in pages}
    written = {p.with_suffix(".html").name for p in (ROOT / "docs").glob("*.md")}
    assert written | {"contributing.html", "changelog.html", "example.html"} <= names


def test_pages_load_nothing_external(pages: dict[Path, Page]) -> None:
    for path, found in pages.items():
        assert [a for a in found.loads if external(a)] == [], path.name
        assert found.loads, "no page of this theme loads nothing"


def test_styles_load_nothing_external(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        loads = re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s+([^;]*)", text)
        assert [a for a in loads if external(a)] == [], sheet.name


def test_nothing_on_a_page_makes_the_theme_fetch(pages: dict[Path, Page]) -> None:
    """The theme's script fetches a library for diagrams, and numbers about the repository, where it sees these."""
    for path, found in pages.items():
        assert not found.classes & {"mermaid", "arithmatex", "giscus"}, path.name
        assert not found.components & {"source", "consent", "outdated"}, path.name


def test_links_between_pages_lead_somewhere(pages: dict[Path, Page]) -> None:
    for path, found in pages.items():
        if path.name == "404.html":  # its addresses are from the root of a server
            continue
        for target, anchor in _inner(found.links):
            file = (path.parent / target).resolve() if target else path
            assert file in pages or (file.suffix != ".html" and file.is_file()), f"{path.name}: {target}"
            assert not anchor or anchor in pages[file].ids, f"{path.name}: {target}#{anchor}"


def _inner(links: list[str]) -> Iterator[tuple[str, str]]:
    for link in links:
        if not external(link) and not link.startswith("mailto:"):
            target, anchor = urldefrag(link)
            yield unquote(target), unquote(anchor)


def test_pictures_are_inline(site: Path) -> None:
    text = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert text.count('<figure class="diagram"><svg') == 2 and "img/step.svg" not in text


def test_the_check_of_addresses_sees_them() -> None:
    assert external("https://example.org/a.js") and external("//example.org/a.css") and external("'http://x/y'")
    assert not external("assets/a.js") and not external("data:image/svg+xml;utf8,<svg") and not external("../x.html")
    found = Page('<script src="https://a/b.js"></script><img src=c.png><a href="https://d">e</a><link href="//f">')
    assert [a for a in found.loads if external(a)] == ["https://a/b.js", "//f"]
