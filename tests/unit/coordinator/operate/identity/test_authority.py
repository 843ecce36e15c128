"""Certificates: what is in them, what OpenSSL makes of them, and that a crash forgets none."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.checksums import seal_json
from coordinator.operate.identity.authority import (
    BACKDATED,
    PASS_LASTS,
    Authority,
    Issued,
    coordinator_name,
    device_name,
    utc_now,
)
from coordinator.operate.identity.errors import IdentityError
from coordinator.operate.identity.index import (
    BrokerPlace,
    Enrolment,
    EnrolmentIndex,
    read_index,
    write_index,
)

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    with Authority(tmp_path / "identity", create_days=1_000) as made:
        yield made


def parsed(issued: Issued) -> x509.Certificate:
    return x509.load_pem_x509_certificate(issued.certificate)


def common_name(certificate: x509.Certificate) -> str:
    (attribute,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attribute.value)


def crl_of(authority: Authority) -> x509.CertificateRevocationList:
    return x509.load_pem_x509_crl(authority.crl)


def handshake(
    folder: Path, *, server: Issued, client: Issued | None, host: str = "127.0.0.1", ca: bytes
) -> str:
    """What a handshake in memory ends with: `ok`, or the first error, of whoever has it.

    The server asks for a certificate and checks the revocation list, as the broker does; both
    sides are as strict as Python 3.13 is on its own.
    """
    for issued in filter(None, (server, client)):
        for name, file in issued.files().items():
            (folder / name).write_bytes(file.content)
    outer = ssl.create_default_context(cadata=ca.decode())
    outer.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    inner = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=ca.decode())
    inner.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT | ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    inner.load_verify_locations(cafile=folder / "crl.pem")
    inner.verify_mode = ssl.CERT_REQUIRED
    inner.load_cert_chain(folder / f"{server.name}.pem", folder / f"{server.name}.key")
    if client is not None:
        outer.load_cert_chain(folder / f"{client.name}.pem", folder / f"{client.name}.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        outer.wrap_bio(to_client, to_server, server_hostname=host),
        inner.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(10):
            if sum(step(end) for end in ends) == len(ends):
                return "ok"
    except ssl.SSLError as error:
        return str(error)
    raise AssertionError("the handshake does not end")


def step(end: ssl.SSLObject) -> bool:
    """Go on with a handshake; whether this end is done."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def test_pair_of_a_participant_has_its_names_and_may_only_connect(authority: Authority) -> None:
    pair = authority.enroll("robot", days=30)
    assert [common_name(parsed(each)) for each in pair] == ["robot", "robot-bulk"]
    for each in pair:
        certificate = parsed(each)
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)
        certificate.verify_directly_issued_by(authority.certificate)
    assert parsed(pair[0]).public_key() != parsed(pair[1]).public_key()


def test_openssl_lets_an_enrolled_participant_in_and_others_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "identity", create_days=1_000)
    robot, _ = authority.enroll("robot", days=30)
    gone, _ = authority.enroll("gone", days=30)
    authority.revoke("gone")
    (tmp_path / "crl.pem").write_bytes(authority.crl)
    broker = authority.broker_certificate(["broker.example.org"])
    with Authority(tmp_path / "other", create_days=10) as other:
        stranger, _ = other.enroll("robot", days=5)
    authority.close()
    with Authority(authority.folder, clock=lambda: utc_now() - timedelta(days=365)) as past:
        late, _ = past.enroll("late", days=30)

    def outcome(client: Issued | None, **options: str) -> str:
        return handshake(tmp_path, server=broker, client=client, ca=authority.pem, **options)

    assert outcome(robot) == "ok"
    assert outcome(robot, host="broker.example.org") == "ok"
    assert outcome(robot, host="localhost") == "ok"
    assert "Hostname mismatch" in outcome(robot, host="other.example.org")
    assert "certificate revoked" in outcome(gone)
    assert "certificate has expired" in outcome(late)
    assert "unable to get" in outcome(stranger)
    assert "did not return a certificate" in outcome(None)


def test_device_cannot_pose_as_the_broker_nor_the_broker_as_a_device(
    authority: Authority, tmp_path: Path
) -> None:
    robot, _ = authority.enroll("robot", days=30)
    other, _ = authority.enroll("other", days=30)
    broker = authority.broker_certificate(["broker.example.org"])
    (tmp_path / "crl.pem").write_bytes(authority.crl)
    for server, client in ((robot, other), (broker, broker)):
        said = handshake(tmp_path, server=server, client=client, ca=authority.pem, host="robot")
        assert said != "ok"
    said = handshake(tmp_path, server=broker, client=broker, ca=authority.pem)
    assert "purpose" in said
    # Whatever names a broker has, its certificate has no participant's.
    assert common_name(parsed(authority.broker_certificate(["coordinator"]))) == "Tessera broker"


def test_revoked_pairs_are_listed_and_the_list_lasts_as_long_as_the_authority(
    authority: Authority,
) -> None:
    assert len(crl_of(authority)) == 0
    first = authority.enroll("robot", days=30)
    second = authority.enroll("robot", days=60, renew=True)
    authority.enroll("other", days=30)
    ended = authority.revoke("robot")
    serials = {parsed(each).serial_number for each in (*first, *second)}
    assert {serial for each in ended for serial in each.serials} == serials
    crl = crl_of(authority)
    assert {each.serial_number for each in crl} == serials | listed(authority)
    assert crl.next_update_utc == authority.until
    assert crl.is_signature_valid(authority.certificate.public_key())  # type: ignore[arg-type]
    again = authority.enroll("robot", days=30)
    assert not serials & {parsed(each).serial_number for each in again}
    assert {each.serial_number for each in crl_of(authority)} == serials | listed(authority)


def listed(authority: Authority) -> set[int]:
    """Serial numbers of the certificates that brokers are tested with."""
    files = authority.passes("robot").files
    pems = (files["listed.pem"].content, files["listed-bulk.pem"].content)
    return {x509.load_pem_x509_certificate(pem).serial_number for pem in pems}


def test_every_list_has_certificates_that_no_earlier_list_had(authority: Authority) -> None:
    for name in ("robot", "other"):
        authority.enroll(name, days=30)
    authority.revoke("robot")
    first = listed(authority)
    before = {each.serial_number for each in crl_of(authority)}
    assert authority.revoke("robot") == []
    assert listed(authority) == first  # nothing new was revoked: a broker need not read it again
    authority.revoke("other")
    assert not listed(authority) & before
    assert listed(authority) <= {each.serial_number for each in crl_of(authority)}


def test_passes_are_valid_for_minutes_and_bear_the_revoked_name(authority: Authority) -> None:
    authority.enroll("robot", days=30)
    authority.revoke("robot")
    files = authority.passes("robot").files
    revoked = {each.serial_number for each in crl_of(authority)}
    for suffix in ("", "-bulk"):
        own = x509.load_pem_x509_certificate(files[f"valid{suffix}.pem"].content)
        test = x509.load_pem_x509_certificate(files[f"listed{suffix}.pem"].content)
        assert own.subject.rfc4514_string() == f"CN=robot{suffix}"
        assert own.not_valid_after_utc - own.not_valid_before_utc <= BACKDATED + PASS_LASTS
        assert own.serial_number not in revoked
        assert test.subject.rfc4514_string() == f"CN=Tessera list{suffix}"
        assert test.serial_number in revoked
    assert not list(authority.folder.glob("valid*"))


def test_name_with_a_valid_certificate_is_not_enrolled_twice_by_accident(
    authority: Authority,
) -> None:
    authority.enroll("robot", days=30)
    with pytest.raises(IdentityError, match="--renew"):
        authority.enroll("robot", days=30)
    assert len(authority.index.of("robot")) == 1


def test_name_whose_certificate_has_expired_is_enrolled_again(tmp_path: Path) -> None:
    now = [utc_now() - timedelta(days=100)]
    with Authority(tmp_path, create_days=1_000, clock=lambda: now[0]) as authority:
        authority.enroll("robot", days=30)
        now[0] += timedelta(days=31)
        with pytest.raises(IdentityError, match="certificates are expired"):
            authority.revoke("robot")
        authority.enroll("robot", days=30)
        standings = [each.standing(now[0]) for each in authority.index.of("robot")]
    assert standings == ["expired", "valid"]


@pytest.mark.parametrize("days", [0, -3, 1_000_000])
def test_days_that_cannot_be_are_refused(authority: Authority, days: int) -> None:
    with pytest.raises(IdentityError, match=f"--days {days}"):
        authority.enroll("robot", days=days)
    assert authority.index.enrolments == ()


def test_certificates_begin_before_they_are_made(authority: Authority) -> None:
    certificate = parsed(authority.enroll("robot", days=30)[0])
    assert utc_now() - certificate.not_valid_before_utc >= timedelta(hours=23)
    assert certificate.not_valid_after_utc <= utc_now() + timedelta(days=30)


def test_authority_is_found_again_and_its_key_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    with Authority(folder, create_days=10) as authority:
        authority.enroll("robot", days=5)
        authority.remember_broker(BrokerPlace("b.example.org", 8883, tmp_path))
        assert authority.is_new
        before = authority.index, authority.fingerprint
    with Authority(folder, create_days=20) as authority:
        assert not authority.is_new
        assert (authority.index, authority.fingerprint) == before
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    assert names == {"ca.pem", "ca.key", "crl.pem", "index.json", "lock"}


def test_folder_that_holds_no_authority_is_said_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="holds no authority"):
        Authority(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_authority_is_changed_by_one_process_at_a_time(tmp_path: Path) -> None:
    with Authority(tmp_path, create_days=10):
        code = (
            "from pathlib import Path\n"
            "from coordinator.operate.identity.authority import Authority\n"
            f"Authority(Path({str(tmp_path)!r}))"
        )
        other = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
        )
    assert "in use by another process" in other.stderr
    Authority(tmp_path).close()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("ca.key", b"", "cannot be read"),
        ("ca.pem", b"no PEM", "cannot be read"),
        ("index.json", b"{", "restore it from a backup"),
        ("index.json", b'{"version": 9}', "no checksum"),
        ("index.json", seal_json({"version": 9}), "version 9"),
        ("index.json", b'{"version": 1, "broker": null, "enrolments": [3]}', "cannot be read"),
    ],
)
def test_damaged_authority_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    Authority(tmp_path, create_days=10).close()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(IdentityError, match=words):
        Authority(tmp_path)


def test_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Authority(tmp_path / name, create_days=10).close()
    (tmp_path / "one" / "ca.key").write_bytes((tmp_path / "two" / "ca.key").read_bytes())
    with pytest.raises(IdentityError, match="does not belong"):
        Authority(tmp_path / "one")


def test_crash_while_it_is_made_leaves_something_that_is_made_anew(tmp_path: Path) -> None:
    Authority(tmp_path, create_days=10).close()
    (tmp_path / "index.json").unlink()  # written last
    with Authority(tmp_path, create_days=10) as authority:
        assert authority.is_new
        authority.enroll("robot", days=5)


def test_crash_between_index_and_list_is_mended_by_revoking_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.enroll("robot", days=5)
    with monkeypatch.context() as patch:
        patch.setattr(Authority, "_write_crl", lambda _: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            authority.revoke("robot")
    assert len(crl_of(authority)) == 0
    assert authority.revoke("robot") == []
    assert len(crl_of(authority)) == 2 + 2  # and those that a broker is tested with


def test_certificate_is_in_the_index_before_anybody_has_it(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr("coordinator.operate.identity.authority.write_index", fail)
    with pytest.raises(OSError, match="full"):
        authority.enroll("robot", days=5)
    assert authority.index.enrolments == ()


@pytest.mark.parametrize("name", ["coordinator", "coordinator-bulk", "x-bulk", "A", "a" * 60, ""])
def test_name_that_devices_may_not_have_is_not_enrolled(name: str) -> None:
    with pytest.raises(IdentityError, match="cannot name a device"):
        device_name(name)


def test_device_may_not_be_called_like_the_authoritys_file() -> None:
    with pytest.raises(IdentityError, match=r"ca\.pem"):
        device_name("ca")


def test_names_of_coordinators() -> None:
    assert coordinator_name("") == "coordinator"
    assert coordinator_name("eu") == "coordinator-eu"
    for wrong in ("EU", "bulk", "x-bulk", "a/b", "x" * 48):
        with pytest.raises(IdentityError):
            coordinator_name(wrong)


def test_longest_names_fit_into_certificates(authority: Authority) -> None:
    for name in (device_name("d" * 59), coordinator_name("x" * 47)):
        _, bulk = authority.enroll(name, days=5)
        assert common_name(parsed(bulk)) == f"{name}-bulk"
        assert len(f"{name}-bulk") == 64


def test_index_is_read_as_written(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    later = now + timedelta(days=1)
    index = EnrolmentIndex(
        (
            Enrolment("robot", (1, 2**159), now, later, revoked=later),
            Enrolment("coordinator-eu", (3, 4), now, later),
        ),
        BrokerPlace("::1", 8883, tmp_path / "with spaces"),
        (BrokerPlace("10.0.0.1", 8885, tmp_path / "run" / "broker"),),
    )
    write_index(tmp_path / "index.json", index)
    assert read_index(tmp_path / "index.json") == index
    whole = (tmp_path / "index.json").read_bytes()
    for place in range(len(whole)):
        flipped = bytes([whole[place] ^ 1 << place % 8])
        (tmp_path / "damaged.json").write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(IdentityError, match="restore it from a backup"):
            read_index(tmp_path / "damaged.json")
    assert [each.is_coordinator for each in index.enrolments] == [False, True]
    assert not Enrolment("coordinators", (5, 6), now, later).is_coordinator


def test_runs_stand_beside_the_broker_and_each_other(tmp_path: Path) -> None:
    one, two = (BrokerPlace("10.0.0.1", port, tmp_path / str(port)) for port in (8883, 8885))
    for place in (one, two):
        assert place.files is not None
        place.files.mkdir()
    own = BrokerPlace("b.example.org", 8883, tmp_path)
    index = EnrolmentIndex(broker=own).with_run(one).with_run(two)
    assert (index.broker, index.place, index.runs) == (own, own, (one, two))
    assert index.folders == (own.files, one.files, two.files)
    moved = replace(one, host="10.0.0.2")
    assert index.with_run(moved).runs == (two, moved)
    (tmp_path / "8883").rmdir()  # the run was deleted
    assert index.with_run(two).runs == (two,)
    # An index of an earlier version names the last started run as the broker.
    write_index(tmp_path / "index.json", EnrolmentIndex(broker=two))
    old = json.loads((tmp_path / "index.json").read_text())
    del old["runs"], old["check"]
    old["version"] = 1  # had no checksum
    (tmp_path / "index.json").write_text(json.dumps(old))
    read = read_index(tmp_path / "index.json")
    assert (read.broker, read.runs) == (two, ())
    assert read.with_run(two) == EnrolmentIndex(runs=(two,))
