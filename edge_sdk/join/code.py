"""The join code: one line of text with all that a device needs to ask for its certificates.

    code    = base32(version (1) ‖ secret (12) ‖ fingerprint (16) ‖ port (2) ‖ length of host (1)
              ‖ host ‖ task ‖ CRC-16 of all that (2)), lower case, without padding

Upper case, spaces and hyphens are read too. A code may be for several tasks: it names the most
important one, and the coordinator's answer all of them. The secret never leaves the device: it is
the key of the HMAC over the request. The fingerprint is the first half of the SHA-256 of the
authority's certificate (DER), so the device knows the coordinator before it trusts anything that it
says. `docs/protocol.md` describes the requests.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass, field

from edge_sdk.protocol.errors import MessageError, TesseraError
from edge_sdk.protocol.messages.topics import check_name

VERSION = 1
SECRET_BYTES = 12
FINGERPRINT_BYTES = 16
MAC_HEADER = "Tessera-Mac"
AUTHORITY_PATH, JOIN_PATH = "/v1/authority", "/v1/join"
MAX_REQUEST_BYTES = 8_192
MAX_ANSWER_BYTES = 65_536
MAX_TASKS = 256
"""Most tasks of a code."""

_FIXED_BYTES = 1 + SECRET_BYTES + FINGERPRINT_BYTES + 2 + 1
_CHECK_BYTES = 2


class JoinError(TesseraError):
    """A code that cannot be used, or a coordinator that refuses it; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCode:
    """Content of a join code. Raises `JoinError` for values that do not fit into one."""

    host: str
    port: int
    task: str
    """The task, or the most important of several."""
    fingerprint: bytes
    """First 16 bytes of the SHA-256 of the authority's certificate."""
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        try:
            check_name(self.task, "task")
        except MessageError as error:
            raise JoinError(str(error)) from error
        if len(self.secret) != SECRET_BYTES or len(self.fingerprint) != FINGERPRINT_BYTES:
            raise JoinError("the secret or the fingerprint of a code has the wrong length")
        if not 0 < len(self.host) < 256 or not self.host.isascii():
            raise JoinError(f"{self.host[:80]!r} cannot be in a code: give an ASCII name")
        if not 0 < self.port < 65_536:
            raise JoinError(f"a port is from 1 to 65535, not {self.port}")

    @property
    def text(self) -> str:
        """The code as it is pasted."""
        host = self.host.encode()
        data = b"".join(
            (
                bytes([VERSION]),
                self.secret,
                self.fingerprint,
                self.port.to_bytes(2, "big"),
                bytes([len(host)]),
                host,
                self.task.encode(),
            )
        )
        return base64.b32encode(data + _check(data)).decode().rstrip("=").lower()

    @property
    def id(self) -> str:
        """Name of the code, which is no secret: 8 hex digits."""
        return hashlib.sha256(b"tessera join id" + self.secret).hexdigest()[:8]

    @property
    def address(self) -> str:
        """Host and port, for messages to people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def mac(self, body: bytes) -> str:
        """Authenticate a request: HMAC-SHA-256 under a key derived from the secret, in hex."""
        key = hashlib.sha256(b"tessera join mac" + self.secret).digest()
        return hmac.new(key, body, hashlib.sha256).hexdigest()

    def matches(self, certificate: bytes) -> bool:
        """True if this is the authority's certificate (DER) that the code means."""
        return hmac.compare_digest(fingerprint_of(certificate), self.fingerprint)


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the fingerprint of a certificate (DER), as codes carry it."""
    return hashlib.sha256(certificate).digest()[:FINGERPRINT_BYTES]


def parse_code(text: str) -> JoinCode:
    """Read a code as it was pasted. Raises only `JoinError`, for any other text."""
    compact = "".join(text.split()).replace("-", "").upper()
    try:
        data = base64.b32decode(compact + "=" * (-len(compact) % 8))
    except (binascii.Error, ValueError) as error:
        raise JoinError(f"this is not a join code: {_ADVICE}") from error
    content, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if len(content) <= _FIXED_BYTES or _check(content) != check:
        raise JoinError(f"the join code is incomplete or mistyped: {_ADVICE}")
    if content[0] != VERSION:
        raise JoinError(
            f"the join code has version {content[0]}, and this program reads version {VERSION}: "
            "install the version of tessera-fl that the coordinator has"
        )
    secret, rest = content[1 : 1 + SECRET_BYTES], content[1 + SECRET_BYTES :]
    fingerprint, rest = rest[:FINGERPRINT_BYTES], rest[FINGERPRINT_BYTES:]
    port, length, names = int.from_bytes(rest[:2], "big"), rest[2], rest[3:]
    try:
        host, task = names[:length].decode("ascii"), names[length:].decode("ascii")
    except UnicodeDecodeError as error:
        raise JoinError(f"this is not a join code: {_ADVICE}") from error
    return JoinCode(host=host, port=port, task=task, fingerprint=fingerprint, secret=secret)


_ADVICE = (
    "copy the whole line that tessera-coordinator serve printed, or ask for a new one "
    "(tessera-coordinator codes create)"
)


def _check(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0xFFFF).to_bytes(_CHECK_BYTES, "big")
