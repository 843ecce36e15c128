"""Our own certificate, read by hand, beside what a library reads in it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs cryptography: it makes the certificates")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.transport.mqtt.certificates import Certificate, certificate_advice, read_certificate

NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)
KEY = ec.generate_private_key(ec.SECP256R1())


def make(
    path: Path, *, name: str | None = "robot", since: datetime = NOW, until: datetime | None = None
) -> Path:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "robot's owner")]
    if name is not None:
        attributes.append(x509.NameAttribute(NameOID.COMMON_NAME, name))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "some authority")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(attributes))
        .issuer_name(issuer)
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until or since + timedelta(days=365))
        .sign(KEY, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


seconds = st.datetimes(datetime(1960, 1, 1), datetime(2099, 1, 1)).map(
    lambda time: time.replace(microsecond=0, tzinfo=timezone.utc)
)


@settings(max_examples=40)
@given(name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=64), since=seconds)
def test_certificate_says_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, name: str, since: datetime
) -> None:
    path = make(tmp_path_factory.mktemp("c") / "c.pem", name=name, since=since)
    oracle = x509.load_pem_x509_certificate(path.read_bytes())
    (common,) = oracle.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert read_certificate(path) == Certificate(
        str(common.value), oracle.not_valid_before_utc, oracle.not_valid_after_utc
    )


def test_certificate_after_2050_and_behind_text_is_read(tmp_path: Path) -> None:
    path = make(tmp_path / "c.pem", name=None, until=datetime(2051, 2, 3, tzinfo=timezone.utc))
    path.write_text(f"Subject: somebody\n{path.read_text()}{path.read_text()}")
    found = read_certificate(path)
    assert found == Certificate("", NOW, datetime(2051, 2, 3, tzinfo=timezone.utc))


@settings(max_examples=200)
@given(place=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 500))
def test_damaged_certificate_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: int
) -> None:
    import ssl

    folder = tmp_path_factory.mktemp("c")
    der = bytearray(ssl.PEM_cert_to_DER_cert(make(folder / "c.pem").read_text()))
    if place < len(der):
        der[place] = byte
    (folder / "c.pem").write_text(ssl.DER_cert_to_PEM_cert(bytes(der[: len(der) - cut])))
    read_certificate(folder / "c.pem")


@pytest.mark.parametrize("content", [b"", b"no PEM", b"\xff", b"-----BEGIN CERTIFICATE-----\n"])
def test_file_that_is_no_certificate_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.pem"
    path.write_bytes(content)
    assert read_certificate(path) is None
    assert read_certificate(tmp_path / "missing.pem") is None


@pytest.mark.parametrize(
    ("days", "name", "words"),
    [
        (0, "robot", None),
        (334, "robot", None),
        (336, "robot", "expires on 2027-06-01"),
        (366, "robot", "expired on 2027-06-01"),
        (-1, "robot", "is the clock right?"),
        (0, "other", "is for 'robot', not for 'other'"),
        (0, None, None),
    ],
)
def test_advice_speaks_of_what_its_owner_should_know(
    tmp_path: Path, days: int, name: str | None, words: str | None
) -> None:
    path = make(tmp_path / "c.pem")
    advice = list(certificate_advice((path, None), name, NOW + timedelta(days=days)))
    assert len(advice) == (words is not None)
    assert words is None or words in advice[0]


def test_advice_knows_the_name_of_the_bulk_connection(tmp_path: Path) -> None:
    own, bulk = make(tmp_path / "c.pem"), make(tmp_path / "b.pem", name="robot-bulk")
    assert not list(certificate_advice((own, bulk), "robot", NOW))
    (advice,) = certificate_advice((own, own), "robot", NOW)
    assert "not for 'robot-bulk'" in advice
