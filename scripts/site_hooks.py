"""What mkdocs calls while it builds the site: the documents outside docs/ become pages too.

    SECURITY.md, CONTRIBUTING.md, ... --[on_files]--> security.md, contributing.md, ...
    a page's links to them            --[on_page_markdown]--> links to those pages

So that links work both in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Path in the repository -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "requirements/README.md": "requirements.md",
}
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not below docs/."""
    from mkdocs.structure.files import File

    for path, page in OUTSIDE.items():
        if files.get_file_from_path(page) is None:
            text = (ROOT / path).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page's text with the links it needs on the site."""
    sources = {site: path for path, site in OUTSIDE.items() if path != "README.md"}
    uri: str = page.file.src_uri
    return with_site_links(markdown, sources.get(uri, f"docs/{uri}"))


def with_site_links(markdown: str, path: str) -> str:
    """`markdown` of the repository's file `path`, its links as those of a page of the site."""
    parts = _FENCED.split(markdown)
    folder = posixpath.dirname(path)
    parts[::2] = (_LINK.sub(lambda found: _on_site(found, folder), part) for part in parts[::2])
    return "".join(parts)


def _on_site(found: re.Match[str], folder: str) -> str:
    before, target, anchor, after = found.groups()
    if "://" in target or target.startswith("mailto:"):
        return found[0]
    wanted = posixpath.normpath(posixpath.join(folder, target))
    if wanted in OUTSIDE:
        target = OUTSIDE[wanted]
    elif wanted.startswith("docs/"):
        target = wanted.removeprefix("docs/")
    return f"{before}{target}{anchor or ''}{after}"
