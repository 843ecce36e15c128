"""The page's files: read once, served by exact name, with an ETag each.

They are asked for again with the ETag every time, which costs nothing, so a browser never runs an
old page against a new coordinator.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from coordinator.operate.http.refusal import RefusalError

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {
    "": "text/plain; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".ts": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
"""Types by ending. Files with others are not served."""
PACKED = ("text/", "image/svg", "application/json")
LEAST_PACKED_BYTES = 512


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page."""

    content: bytes
    packed: bytes | None
    """The content, compressed by gzip; None: that would not make it smaller."""
    kind: str
    tag: str


@cache
def read_page() -> dict[str, PageFile]:
    """Read all files of the page, by their path in its folder."""
    folder = FOLDER
    files: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (kind := TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            packed = None
            if kind.startswith(PACKED) and len(content) >= LEAST_PACKED_BYTES:
                packed = gzip.compress(content, mtime=0)
            tag = hashlib.sha256(content).hexdigest()[:32]
            name = path.relative_to(folder).as_posix()
            files[name] = PageFile(content, packed, kind, f'"{tag}"')
    return files


class Pages:
    """Answers with files of the page."""

    def __init__(self, files: Mapping[str, PageFile]) -> None:
        self._files = files

    async def index(self, request: Request) -> Response:
        """Answer with the page."""
        return self._send(request, INDEX)

    async def file(self, request: Request) -> Response:
        """Answer with a file that the page needs."""
        return self._send(request, request.path_params["path"])

    def _send(self, request: Request, name: str) -> Response:
        if (file := self._files.get(name)) is None:
            raise RefusalError(HTTPStatus.NOT_FOUND, "the page has no such file")
        headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        known = request.headers.get("if-none-match", "")
        if file.tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        accepted = request.headers.get("accept-encoding", "")
        codings = [each.partition(";")[0].strip() for each in accepted.split(",")]
        if file.packed is not None and "gzip" in codings:
            headers["Content-Encoding"] = "gzip"
            return Response(file.packed, headers=headers, media_type=file.kind)
        return Response(file.content, headers=headers, media_type=file.kind)
