"""The site is built, holds every page, asks no other host; its reference is that of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import api_docs, site_hooks
from tests.support.servers import ROOT

# Addresses that a page fetches by itself; an <a> is followed by a reader.
FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\s(?:href|src)=[\"']?([^\"'\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a link or page that is missing is an error of --strict."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    pages |= {Path(page).stem for page in site_hooks.OUTSIDE.values()}
    assert len(pages) > 20
    assert pages - {path.stem for path in site.glob("*.html")} == set()


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    found = {page.name: FETCHED.findall(page.read_text()) for page in site.rglob("*.html")}
    assert sum(map(len, found.values())) > 100
    foreign = {(page, url) for page, urls in found.items() for url in urls if "//" in url}
    assert foreign == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"@import|url\(['\"]?(?:https?:)?//", styles) == []


def test_pages_show_no_marks_and_no_raw_tables(site: Path) -> None:
    for page in site.glob("*.html"):
        text = re.sub(r"<!--.*?-->|<pre.*?</pre>|<code.*?</code>", "", page.read_text(), flags=re.S)
        assert "|---|" not in text, page.name
        assert "run: server" not in text, page.name


def test_reference_has_what_the_launch_installs() -> None:
    text = api_docs.PAGE.read_text()
    for wanted in (
        "`GET /v1/memory` | admin",
        "`GET /readyz` | public",
        "`POST /v1/scale`",
        "sgl-esft plan",
        "`UnknownAdapterError`",
    ):
        assert wanted in text


def test_links_out_of_docs_become_pages() -> None:
    text = "[a](../SECURITY.md#x) [b](data_flow.md) [c](https://a.org/../SECURITY.md)\n"
    assert site_hooks.with_site_links(text, "docs/a.md") == (
        "[a](security.md#x) [b](data_flow.md) [c](https://a.org/../SECURITY.md)\n"
    )
    assert site_hooks.with_site_links("[a](docs/b.md)", "SECURITY.md") == "[a](b.md)"
    assert site_hooks.with_site_links("[a](../docs/b.md)", "bench/README.md") == "[a](b.md)"
    fenced = "```json\n[a](../SECURITY.md)\n```\n"
    assert site_hooks.with_site_links(fenced, "docs/a.md") == fenced


def test_fetches_are_found() -> None:
    html = (
        '<link href="a.css"><script src="//b/c.js"></script><a href="https://d"></a><img src="e">'
    )
    assert FETCHED.findall(html) == ["a.css", "//b/c.js", "e"]
