"""The documentation builds as a site, without broken links, and with every page in the navigation."""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.kit.axe import violations
from tests.kit.browser import chromium

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / ".tools" / "site" / "bin" / "mkdocs"

pytestmark = pytest.mark.full


class References(HTMLParser):
    """A page's links and anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.add(value)
            elif name in ("id", "name") and value:
                self.names.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("mkdocs is not installed: `make site` does it")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [MKDOCS, "build", "--site-dir", folder], cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_every_link_and_picture_of_the_built_pages_is_there(site: Path) -> None:
    pages = {page: References(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert len(pages) > 50
    broken = []
    for page, references in pages.items():
        for target in references.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            has_name = path not in pages or not parts.fragment or unquote(parts.fragment) in pages[path].names
            if not path.exists() or not has_name:
                broken.append(f"{page.relative_to(site)}: {target}")
    assert broken == []


def test_pages_from_outside_docs_link_to_the_site_and_not_to_the_repository(site: Path) -> None:
    for page in sorted((site / "repository").glob("*.html")):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'href="[^"#:]*\.(md|py)["#]', text), page.name
    assert "../configuration.html" in (site / "repository" / "readme.html").read_text(encoding="utf-8")


def test_pages_open_without_a_server_and_ask_no_other_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', text) == [], page.name


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_have_nothing_serious_for_axe(site: Path, width: int) -> None:
    """Of each kind of page one: the start, a how-to, one with tables and pictures, a reference, one from outside."""
    pages = ["index.html", "start/torchrun.html", "analyze.html", "configuration.html", "repository/readme.html"]
    found = []
    with chromium() as browser:
        opened = browser.new_context(viewport={"width": width, "height": 900}, offline=True).new_page()
        for page in pages:
            opened.goto((site / page).as_uri())
            found += [f"{page}: {said}" for said in violations(opened) if "(serious)" in said or "(critical)" in said]
    assert found == []
