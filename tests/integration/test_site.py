"""The site is built from the pages as they stand, and is read without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import coordinator
import edge_sdk

ROOT = Path(__file__).resolve().parents[2]


def test_site(tmp_path: Path) -> None:
    # A broken link, or a page that mkdocs.yml does not list, fails a strict build.
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").is_file()
    assert "Federated learning that fits the device" in (tmp_path / "index.html").read_text()
    assert_loads_nothing_from_elsewhere(tmp_path)
    assert_reference_has_every_public_name(tmp_path)


def assert_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]*", text)
        assert loaded
        assert not [each for each in loaded if "//" in each], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(?:https?:)?//|@import", style.read_text()), style


def assert_reference_has_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text()
    found = set(re.findall(r"<h3 id=\"((?:edge_sdk|coordinator)\.\w+)\"", text))
    names = {f"edge_sdk.{name}" for name in edge_sdk.__all__}
    assert found == names | {f"coordinator.{name}" for name in coordinator.__all__}
