"""The door: finds out who sends a request, by a session's cookie or a token, and signs in and out.

A valid token or session always passes. So a program that goes on with an old token keeps nobody
out, not even those who share its address. Wrong tokens are counted, by address and together; after
too many they are answered 429, and are not written to the log.

That limit bounds what guessing costs the server. What keeps a guess from being right is a token's
length: those that are made have 192 bits and more, and those of a file at least `LEAST_CHARACTERS`.
At a million guesses a second, 24 random hexadecimal digits last for 10^15 years.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable
from http import HTTPStatus

from starlette.requests import HTTPConnection

from coordinator.operate.http.access.sessions import Session, Sessions
from coordinator.operate.http.access.tokens import MOST_CHARACTERS, Holder, Role, Tokens
from coordinator.operate.http.refusal import RefusalError
from coordinator.service.admission.limits import Buckets, Rate

log = logging.getLogger(__name__)

ATTEMPTS = Rate(0.1, 10.0)
"""Attempts with a wrong token of one address."""
ALL_ATTEMPTS = Rate(1.0, 100.0)
"""Those of all addresses together."""
WARNINGS = Rate(1 / 60, 5.0)
MAX_ADDRESSES = 1_000
WAIT_S = 10
SIGN_IN = "sign in at /, or send a token: Authorization: Bearer TOKEN (docs/api-http.md)"


class Door:
    """Knows who may come in. For the server's thread; the links that sign in are for any."""

    def __init__(
        self,
        tokens: Tokens,
        sessions: Sessions,
        cookie: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cookie`: name of the cookie. Browsers send cookies to all ports of a machine, so it has
        the port in it."""
        self.tokens, self.sessions, self.cookie = tokens, sessions, cookie
        self.failures = 0
        """Attempts with a wrong token so far."""
        self._clock = clock
        self._each, self._all = Buckets(ATTEMPTS, MAX_ADDRESSES), Buckets(ALL_ATTEMPTS, 1)
        self._warnings = Buckets(WARNINGS, 1)

    def admit(self, request: HTTPConnection, wanted: Role) -> Holder:
        """Return who sent a request. Raises `RefusalError`."""
        holder = self._holder(request)
        if holder is None:
            raise RefusalError(HTTPStatus.UNAUTHORIZED, SIGN_IN)
        if not holder.role.includes(wanted):
            raise RefusalError(
                HTTPStatus.FORBIDDEN,
                f"{holder.name} may read, but not change anything: sign in with a token of the "
                "role operate",
            )
        return holder

    def session(self, request: HTTPConnection) -> Session | None:
        """Return the session that a request's cookie names, if there is one."""
        name = request.cookies.get(self.cookie)
        return None if name is None else self.sessions.find(name)

    def sign_in(self, request: HTTPConnection, token: str) -> tuple[str, Session]:
        """Begin a session for the holder of a token or a ticket. Raises `RefusalError`.

        The session that the browser had before ends: nobody could sign out of it any more.
        """
        holder = self._checked(request, token, lambda: self.tokens.redeem(token))
        self.sign_out(request)
        log.info("%s signed in from %s (%s)", holder.name, address(request), holder.role.value)
        return self.sessions.begin(holder)

    def sign_out(self, request: HTTPConnection) -> None:
        """End the session that a request's cookie names."""
        if (name := request.cookies.get(self.cookie)) is not None:
            self.sessions.end(name)

    def _holder(self, request: HTTPConnection) -> Holder | None:
        if (header := request.headers.get("authorization")) is not None:
            scheme, _, token = header.partition(" ")
            if scheme.lower() != "bearer":
                raise RefusalError(HTTPStatus.UNAUTHORIZED, SIGN_IN)
            return self._checked(request, token.strip())
        session = self.session(request)
        return None if session is None else session.holder

    def _checked(
        self,
        request: HTTPConnection,
        token: str,
        otherwise: Callable[[], Holder | None] = lambda: None,
    ) -> Holder:
        if 0 < len(token) <= MOST_CHARACTERS:
            holder = self.tokens.find(token) or otherwise()
            if holder is not None:
                return holder
        self.failures += 1
        now, host = self._clock(), network(address(request))
        if not (self._each.take(host, now) and self._all.take("", now)):
            raise RefusalError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many attempts with a wrong token: wait, then try again with a valid one",
                retry_s=WAIT_S,
            )
        if self._warnings.take("", now):
            log.warning("a wrong token from %s", address(request))
        raise RefusalError(
            HTTPStatus.UNAUTHORIZED,
            "this token is not valid here; a link signs in once, and a token is in the folder http "
            "of the run's, or in the file http.tokens names",
        )


def address(request: HTTPConnection) -> str:
    """Address of a request's sender; what a proxy says of another one is not believed."""
    return "?" if request.client is None else request.client.host


def network(host: str) -> str:
    """Return the part of an address that one sender can hardly vary: all of IPv4, half of IPv6."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)
