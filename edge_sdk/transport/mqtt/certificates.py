"""Reads our own certificate for messages to people: its name and validity.

Only these few fields are read, and nothing is verified: that is OpenSSL's job. Python's `ssl` reads
certificates of peers, but not one's own.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from edge_sdk.protocol.messages.topics import BULK

SOON = timedelta(days=30)
"""Time before expiry at which we warn: enough to distribute a new certificate."""

_COMMON_NAME = bytes((0x55, 0x04, 0x03))
_VERSION, _UTC_TIME = 0xA0, 0x17
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate's common name (empty if it has none) and validity, UTC."""

    name: str
    since: datetime
    until: datetime


def read_certificate(path: Path) -> Certificate | None:
    """Read the first certificate in a PEM file; None if that fails."""
    try:
        _, begin, rest = path.read_text(encoding="ascii").partition(_BEGIN)
        body, end, _ = rest.partition(_END)
        return _parse(ssl.PEM_cert_to_DER_cert(begin + body + end))
    except (OSError, ValueError, LookupError):
        return None


def _parse(der: bytes) -> Certificate:
    (_, whole), *_ = _items(der)
    (_, signed), *_ = _items(whole)
    fields = [content for tag, content in _items(signed) if tag != _VERSION]
    # serial number, algorithm, issuer, validity, subject, …
    since, until = (_time(tag, content) for tag, content in _items(fields[3]))
    return Certificate(_common_name(fields[4]), since, until)


def _common_name(subject: bytes) -> str:
    for _, alternatives in _items(subject):
        for _, attribute in _items(alternatives):
            (_, kind), (_, value) = _items(attribute)
            if kind == _COMMON_NAME:
                return value.decode()
    return ""


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        # A two-digit year: 50 to 99 are in the last century.
        text = ("19" if text[0] >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of a DER sequence's elements. Raises ValueError or LookupError."""
    place = 0
    while place < len(data):
        tag, size = data[place], data[place + 1]
        place += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(data[place : place + count], "big")
            place += count
        if place + size > len(data):
            raise ValueError("cut short")
        yield tag, data[place : place + size]
        place += size


def certificate_advice(
    paths: Iterable[Path | None], name: str | None, now: datetime
) -> Iterator[str]:
    """Yield warnings for the owner of certificates: that they expire or name somebody else.

    `paths` are those of the control and the bulk connection; `name` is the participant's (None: any
    name).
    """
    for path, wanted in zip(paths, (name, name and name + BULK), strict=True):
        own = read_certificate(path) if path is not None else None
        if own is None:
            continue
        if own.until <= now:
            yield f"the certificate {path} expired on {own.until:%Y-%m-%d}; get a new one"
        elif own.until <= now + SOON:
            yield f"the certificate {path} expires on {own.until:%Y-%m-%d}; get a new one before"
        if own.since > now:
            yield f"the certificate {path} is valid from {own.since:%Y-%m-%d}: is the clock right?"
        if wanted is not None and own.name != wanted:
            yield (
                f"the certificate {path} is for {own.name!r}, not for {wanted!r}: a broker that "
                "identifies clients by certificate drops what we send"
            )
