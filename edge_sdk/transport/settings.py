"""Settings for reaching the broker, checked once.

    TesseraError
    └── LinkError        settings with which no link can ever work; names the setting and what to do
        └── DeniedError  the broker refuses our name, password or certificate

A broker that is away, or that refuses us, is not an error here: a link reports it and tries again.
The link's user may give up and raise `DeniedError`.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_sdk.protocol.errors import TesseraError

MAX_CHUNK_BYTES = 262_144
"""Larger messages cost more to send than they save: the sender copies the rest of a message every
time the socket takes part of it."""

MIN_CHUNK_BYTES = 1_024


class LinkError(TesseraError):
    """Settings with which no link can work; the text names the setting and what to do."""


class DeniedError(LinkError):
    """The broker refuses our name, password or certificate; the text has its reason."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Settings of a broker. Raises LinkError for a contradiction; files are not opened yet.

    `tls` checks the broker's certificate and its name against `ca` (None: the CAs this machine
    trusts). `certificate` and `key` are ours, PEM, for brokers that ask; `bulk_certificate` and
    `bulk_key` are for the connection that carries chunks (None: the same), for brokers that let
    each certificate connect once. `chunk_bytes` is the most one message of a transfer carries. A
    connection without a sign of life is given up after at most 2 × `keepalive_s`.
    `allow_plaintext` permits a broker on another machine without TLS.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    bulk_certificate: Path | None = None
    bulk_key: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    chunk_bytes: int = MAX_CHUNK_BYTES
    keepalive_s: int = 30
    allow_plaintext: bool = False

    def __post_init__(self) -> None:
        if not self.host or "/" in self.host or any(c.isspace() for c in self.host):
            raise LinkError(
                f"host {self.host!r}: give a name or an address, such as broker.example.org, "
                "without a scheme; the port is a separate setting"
            )
        _between("port", self.port, 1, 65_535)
        _between("chunk_bytes", self.chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
        _between("keepalive_s", self.keepalive_s, 1, 3_600)
        self._check_tls()
        if self.password is not None and self.username is None:
            raise LinkError("password is set but username is not; MQTT needs both")

    def _check_tls(self) -> None:
        for name in ("ca", "certificate", "key", "bulk_certificate", "bulk_key"):
            if getattr(self, name) is not None and not self.tls:
                raise LinkError(f"{name} is set but tls is off; set tls = true, or remove {name}")
        for pair in (("certificate", "key"), ("bulk_certificate", "bulk_key")):
            given = [name for name in pair if getattr(self, name) is not None]
            if len(given) == 1:
                missing = pair[1 - pair.index(given[0])]
                raise LinkError(f"{given[0]} is set but {missing} is not; set both or neither")
        if self.bulk_certificate is not None and self.certificate is None:
            raise LinkError("bulk_certificate is set but certificate is not; set both or neither")
        if not self.tls and not self.allow_plaintext and not is_loopback(self.host):
            raise LinkError(
                f"host {self.host!r} is another machine and tls is off: anybody on the network "
                "could read and change the password, the model and what devices learn. Set "
                "tls = true, or allow_plaintext = true to accept that risk on a trusted "
                "network"
            )

    def for_bulk(self) -> BrokerSettings:
        """Return the settings of the connection for chunks, with its own certificate if set."""
        if self.bulk_certificate is None:
            return self
        return replace(self, certificate=self.bulk_certificate, key=self.bulk_key)

    @property
    def address(self) -> str:
        """Host and port, for messages to people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """True if a host is this machine, by its text alone; no name is looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(settings: BrokerSettings) -> ssl.SSLContext | None:
    """Make the TLS context; None for plaintext. Raises LinkError for unusable files."""
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except OSError as error:
        raise LinkError(f"ca {settings.ca}: {_words(error)}; give the CA's PEM file") from error
    context.sslsocket_class = _TidySocket
    if settings.certificate is not None and settings.key is not None:
        for name, path in (("certificate", settings.certificate), ("key", settings.key)):
            if not path.is_file():
                raise LinkError(f"{name} {path}: there is no such file")
        try:
            context.load_cert_chain(settings.certificate, settings.key, password=_no_passphrase)
        except OSError as error:
            raise LinkError(
                f"certificate {settings.certificate} and key {settings.key}: {_words(error)}; "
                "both must be PEM files, and the key must belong to the certificate"
            ) from error
    return context


class _TidySocket(ssl.SSLSocket):
    """Closes itself when the handshake fails; paho, which made it, would leave it open.

    Reads the broker's last words: under TLS 1.3 the broker judges our certificate after the
    handshake, says what is wrong and closes, while we are about to send.
    """

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError as error:
            raise self._last_words() or error from None

    def _last_words(self) -> ssl.SSLError | None:
        try:
            self.recv(1)
        except ssl.SSLError as error:
            return error if "ALERT" in str(error).upper() else None
        except OSError:
            return None
        return None


def _no_passphrase() -> str:
    # Without this, OpenSSL would ask on the terminal and a service would hang.
    raise LinkError("key: it is encrypted; give a key without a passphrase, readable only by us")


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LinkError(f"{name} = {value}: must be from {low} to {high}")
