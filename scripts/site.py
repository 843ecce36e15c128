"""Hooks of the site (mkdocs.yml): the project's other files become a part of it.

Pages of docs/ link to files outside, and the README is the first page. Links are rewritten, so that
both the folder and the site can be read; a link to a file that is not there fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Markdown outside docs/, and its place in the site."""
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages outside docs/, and every file that a page links to."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            place = _place(page.src_uri, match[2])
            target = ROOT / _source(page.src_uri, match[2])
            if files.get_file_from_path(place) is None and target.is_file():
                files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite links that leave docs/, or enter it."""
    uri = page.file.src_uri
    return LINK.sub(lambda match: match[1] + _place(uri, match[2]), markdown)


def _source(page: str, link: str) -> str:
    """Return the path of a link's target in the project."""
    folder = "" if page in PAGES.values() else "docs"
    return posixpath.normpath(posixpath.join(folder, posixpath.dirname(page), link))


def _place(page: str, link: str) -> str:
    """Return the place of a link's target in the site, relative to the page."""
    source = _source(page, link)
    place = PAGES.get(source, source.removeprefix("docs/"))
    return posixpath.relpath(place, posixpath.dirname(page) or ".")
