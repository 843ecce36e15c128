"""Settings for reaching the broker, checked once.

    ConfigError
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
from typing import Annotated, Any

from edge_sdk.program.settings import Example, Within, check_fields
from edge_sdk.protocol.errors import ConfigError

MAX_CHUNK_BYTES = 262_144
"""Larger messages cost more to send than they save: the sender copies the rest of a message every
time the socket takes part of it."""

MIN_CHUNK_BYTES = 1_024


class LinkError(ConfigError):
    """Settings with which no link can work; the text names the setting and what to do."""


class DeniedError(LinkError):
    """The broker refuses our name, password or certificate; the text has its reason."""


PortNumber = Annotated[int, Within(least=0, most=65_535)]


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The broker, and how to reach it.

    Raises `LinkError` for a contradiction. The password's file is read at once, others are not
    opened yet.
    """

    host: str = "127.0.0.1"
    """The broker's name or address."""
    port: PortNumber = 0
    """Its port; 0 means 8883 with TLS and 1883 without."""
    tls: bool = False
    """Encrypt the connection and check the broker's certificate and name. Needed for a broker on
    another machine."""
    ca: Annotated[Path | None, Example("ca.pem")] = None
    """PEM file of the authority that signed the broker's certificate; without it, the authorities
    that this machine trusts."""
    certificate: Annotated[Path | None, Example("own.pem")] = None
    """PEM file of our own certificate, for brokers that ask for one."""
    key: Annotated[Path | None, Example("own.key")] = None
    """PEM file of the key of `certificate`."""
    bulk_certificate: Annotated[Path | None, Example("own-bulk.pem")] = None
    """Certificate of the second connection, for chunks, where the broker lets each certificate
    connect once; without it, the same one."""
    bulk_key: Annotated[Path | None, Example("own-bulk.key")] = None
    """PEM file of the key of `bulk_certificate`."""
    username: Annotated[str | None, Example("kitchen-pi")] = None
    """Our name at the broker."""
    password: Annotated[str | None, Example("…")] = field(default=None, repr=False)
    """Our password at the broker."""
    password_file: Annotated[Path | None, Example("password")] = None
    """File that holds the password, in place of `password`."""
    chunk_bytes: Annotated[int, Within(least=MIN_CHUNK_BYTES, most=MAX_CHUNK_BYTES)] = (
        MAX_CHUNK_BYTES
    )
    """Bytes that one message of a transfer carries at most; 98304 suits AWS IoT Core."""
    keepalive_s: Annotated[int, Within(least=1, most=3_600)] = 30
    """Seconds between signs of life; a silent connection is given up after at most twice that."""
    allow_plaintext: bool = False
    """Allow a broker on another machine without TLS. Everybody on the way can then read the
    password, the model and what devices learn, and change them."""

    def __post_init__(self) -> None:
        if not self.host or "/" in self.host or any(c.isspace() for c in self.host):
            raise LinkError(
                f"host = {self.host!r}: give a name or an address, such as broker.example.org, "
                "without a scheme; the port is a separate setting"
            )
        try:
            check_fields(self)
        except ConfigError as error:
            raise LinkError(str(error)) from error
        if self.port == 0:
            object.__setattr__(self, "port", 8_883 if self.tls else 1_883)
        self._check_tls()
        if self.password_file is not None:
            self._read_password(self.password_file)
        if self.password is not None and self.username is None:
            raise LinkError("password is set but username is not; MQTT needs both")

    def _read_password(self, path: Path) -> None:
        if self.password is not None:
            raise LinkError("password and password_file are both set; give one")
        try:
            text = path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise LinkError(f"password_file cannot be read: {error}") from error
        object.__setattr__(self, "password", text)
        object.__setattr__(self, "password_file", None)

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
                f"host = {self.host!r} is another machine and tls is off: anybody on the network "
                "could read and change the password, the model and what devices learn. Set "
                "tls = true, or allow_plaintext = true to accept that risk on a trusted network"
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
