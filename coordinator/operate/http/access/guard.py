"""The guard: checks that every request passes, and headers that every answer has.

- `Host` must be a name of this page. A page of somebody else's whose name was made to point here
  (DNS rebinding) sends its own name. Addresses are no names, so they pass.
- A request that changes something must have an `Origin` that is this page's, or a token in a
  header, which a browser never adds by itself. So no other page can let a browser act here.
- A body is bounded before it is read.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.operate.http.refusal import RefusalError

MAX_BODY_BYTES = 16_384
SAFE = frozenset({"GET", "HEAD"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NO_STORE = "no-store"


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """`names`: those of the page, besides `localhost` and addresses."""
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and let the app answer it."""
        if scope["type"] != "http":
            return
        started = False

        async def send_safely(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", NO_STORE)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, _bounded(receive), send_safely)
        except RefusalError as refusal:
            if started:
                raise
            await refuse(refusal, send_safely)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise RefusalError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the name in this address is not one of this page: open it by its address, or add "
                "the name to names in [http]",
            )
        if origins and (len(origins) > 1 or not _same_place(origins[0], hosts[0])):
            raise RefusalError(
                HTTPStatus.FORBIDDEN,
                "this request comes from another page (Origin). A proxy in front must pass Host on "
                "unchanged",
            )
        if scope["method"] in SAFE:
            return
        if not origins and "authorization" not in headers:
            raise RefusalError(
                HTTPStatus.FORBIDDEN,
                "a request that changes something must say where it comes from (Origin), or send "
                "its token in the header Authorization",
            )
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY_BYTES:
            raise _too_large()

    def _is_ours(self, host: str) -> bool:
        name = _hostname(f"//{host}")
        if name is None:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _hostname(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises for one that is none
        wrong = parts.path or parts.query or parts.fragment or parts.username is not None
        return None if wrong else parts.hostname
    except ValueError:
        return None


def _same_place(origin: str, host: str) -> bool:
    scheme, separator, place = origin.partition("://")
    known = scheme in ("http", "https") and bool(separator)
    return known and _hostname(f"//{place}") is not None and place.lower() == host.lower()


def _bounded(receive: Receive) -> Receive:
    size = 0

    async def receive_some() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise _too_large()
        return message

    return receive_some


def _too_large() -> RefusalError:
    return RefusalError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MAX_BODY_BYTES} bytes"
    )


async def refuse(refusal: RefusalError, send: Send) -> None:
    """Answer a request with an error."""
    body = json.dumps({"error": str(refusal)}).encode()
    given = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **refusal.headers,
    }
    if refusal.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        given["Connection"] = "close"  # the rest of the body is not read
    headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": refusal.status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
