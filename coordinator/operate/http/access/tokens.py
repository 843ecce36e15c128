"""Tokens: who may read, who may operate.

A token is compared by its hash, and with all that there are, so time tells nothing about them.
Tokens are given in a file of the operator's, or made once and kept beside the run, readable by its
account alone. A ticket is a token that works once: a link that signs in carries it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from coordinator.errors import ConfigError
from edge_sdk.program.files import make_folder, write_whole

FOLDER = "http"
LEAST_CHARACTERS = 24
"""Of a token in an operator's file: shorter ones can be guessed."""
MOST_CHARACTERS = 256
TICKET_S = 24 * 3600.0
MAX_TICKETS = 16


class Role(str, Enum):
    """A right: to look, or to change the run as well."""

    READ = "read"
    OPERATE = "operate"

    def includes(self, other: Role) -> bool:
        """True if this role may do what the other may."""
        return self is Role.OPERATE or other is Role.READ


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a token."""

    role: Role
    name: str


class Tokens:
    """All tokens, and the tickets that have not been used. Any thread may use it."""

    def __init__(
        self, holders: dict[str, Holder], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`holders`: by token."""
        self._holders = {_digest(token): holder for token, holder in holders.items()}
        self._tickets: dict[bytes, tuple[Holder, float]] = {}
        self._lock = threading.Lock()
        self._clock = clock

    def find(self, token: str) -> Holder | None:
        """Return the holder of a token; None: it is none of ours."""
        given, found = _digest(token), None
        for digest, holder in self._holders.items():
            if hmac.compare_digest(digest, given):
                found = holder
        return found

    def issue(self, holder: Holder) -> str:
        """Return a new ticket. Of too many, the oldest is void."""
        ticket = secrets.token_urlsafe(24)
        with self._lock:
            while len(self._tickets) >= MAX_TICKETS:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[_digest(ticket)] = holder, self._clock() + TICKET_S
        return ticket

    def redeem(self, ticket: str) -> Holder | None:
        """Return the holder of a ticket, which is then used up; None: it is no ticket of ours."""
        given, found = _digest(ticket), None
        with self._lock:
            for digest in self._tickets:
                if hmac.compare_digest(digest, given):
                    found = digest
            if found is None:
                return None
            holder, until = self._tickets.pop(found)
        return holder if self._clock() < until else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(path: Path) -> dict[str, Holder]:
    """Read an operator's file of tokens. Raises `ConfigError`, which never quotes a token."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(
                    f"{path}: other accounts can read these tokens: chmod 600 {path.name}"
                )
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"http.tokens: {path} cannot be read: {reason}") from error
    holders: dict[str, Holder] = {}
    for number, line in enumerate(lines, 1):
        if not (words := line.split("#")[0].split()):
            continue
        where = f"{path}, line {number}"
        if len(words) != 3 or words[0] not in list(Role):
            raise ConfigError(f"{where}: must be ROLE NAME TOKEN, where ROLE is read or operate")
        role, name, token = words
        if not name.isprintable() or len(name) > 64:
            raise ConfigError(f"{where}: the name must be printable, and at most 64 characters")
        if not (token.isascii() and LEAST_CHARACTERS <= len(token) <= MOST_CHARACTERS):
            raise ConfigError(
                f"{where}: the token must be {LEAST_CHARACTERS} to {MOST_CHARACTERS} characters of "
                "ASCII; openssl rand -hex 32 makes one"
            )
        if token in holders:
            raise ConfigError(f"{where}: {holders[token].name} has the same token")
        holders[token] = Holder(Role(role), name)
    if not holders:
        raise ConfigError(f"{path}: no tokens: add a line ROLE NAME TOKEN")
    return holders


def token_path(folder: Path, role: Role) -> Path:
    """File of the token that is made for a role; `folder` is the run's."""
    return folder / FOLDER / f"{role.value}.token"


def make_tokens(folder: Path) -> dict[str, Holder]:
    """Return the run's own token of each role, making those that are missing."""
    make_folder(folder / FOLDER, mode=0o700)
    holders: dict[str, Holder] = {}
    for role, name in ((Role.READ, "reader"), (Role.OPERATE, "operator")):
        path = token_path(folder, role)
        try:
            token = path.read_text(encoding="ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            token = ""
        if not LEAST_CHARACTERS <= len(token) <= MOST_CHARACTERS:
            token = secrets.token_hex(32)
            write_whole(path, f"{token}\n".encode(), mode=0o600)
        holders[token] = Holder(role, name)
    return holders
