"""The certificate authority (CA) of one deployment.

    <folder>/  ca.pem      its certificate, which participants and the broker trust
               ca.key      its key, to be kept secret: whoever has it can pose as anybody
               crl.pem     the revoked certificates
               listed*     two certificates on this list and on none before, to test a broker with
               index.json  the record of issued certificates (`index.py`)

Keys are P-256. A participant's certificate may only connect (`clientAuth`), the broker's only
accept connections (`serverAuth`): no device can pose as the broker.

OpenSSL refuses *every* certificate when the revocation list is past its `nextUpdate`. This list
changes only when somebody revokes a certificate by hand, so it lasts as long as the authority.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.operate.identity.errors import IdentityError
from coordinator.operate.identity.files import File, write_file
from coordinator.operate.identity.index import (
    AllowedTasks,
    BrokerPlace,
    Enrolment,
    EnrolmentIndex,
    read_index,
    sorted_tasks,
    write_index,
)
from edge_sdk.program.files import lock_file, make_folder, remove_leftovers
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import BULK, COORDINATOR, VIEWER, check_device, check_name

CA, CA_KEY, CRL, INDEX, LOCK = "ca.pem", "ca.key", "crl.pem", "index.json", "lock"
VALID, LISTED = "valid", "listed"
"""Names of the files of `Passes`, before `.pem` and `.key`."""

BROKER_DAYS = 825

BACKDATED = timedelta(days=1)
"""Certificates start this long in the past: clocks of small boards lag until they are set."""

PASS_LASTS = timedelta(minutes=10)
"""Validity of the certificates with which connections of a revoked name are ended."""

MAX_NAME = 64 - len(BULK)

Clock = Callable[[], datetime]
PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def utc_now() -> datetime:
    """Return the current time, to the second, as certificates state it."""
    return datetime.now(timezone.utc).replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, in PEM format."""

    name: str
    certificate: bytes
    key: bytes

    def files(self) -> dict[str, File]:
        """Return the files under their names in bundles."""
        return {
            f"{self.name}.pem": File(self.certificate),
            f"{self.name}.key": File(self.key, private=True),
        }


@dataclass(frozen=True, slots=True)
class Passes:
    """Certificates with which connections of a revoked name are ended (`takeover.py`)."""

    name: str
    files: dict[str, File]
    """The authority's certificate; two certificates in this name, VALID for minutes, for control
    and bulk; and two that are LISTED as revoked."""


def coordinator_name(text: str) -> str:
    """Return a coordinator's name: `coordinator`, or `coordinator-<text>`. Raises IdentityError."""
    name = f"{COORDINATOR}-{text}" if text else COORDINATOR
    try:
        check_name(name, "coordinator")
    except MessageError as error:
        raise IdentityError(str(error)) from error
    if len(name) > MAX_NAME:
        raise IdentityError(f"{name!r} is too long for a certificate: use at most {MAX_NAME}")
    return name


def viewer_name(text: str) -> str:
    """Return a viewer's name: `viewer`, or `viewer-<text>`. Raises IdentityError."""
    name = f"{VIEWER}-{text}" if text else VIEWER
    try:
        check_name(name, "viewer")
    except MessageError as error:
        raise IdentityError(str(error)) from error
    if len(name) > MAX_NAME:
        raise IdentityError(f"{name!r} is too long for a certificate: use at most {MAX_NAME}")
    return name


def read_request(pem: bytes) -> PublicKey:
    """Return the key of a signing request; the names in it do not count. Raises IdentityError."""
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        valid = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"the signing request cannot be read ({error})") from error
    if not isinstance(key, PublicKey) or not isinstance(key.curve, ec.SECP256R1) or not valid:
        raise IdentityError("the signing request must be signed by its own P-256 key")
    return key


def device_name(text: str) -> str:
    """Return a device's name, checked. Raises IdentityError for a name devices may not have."""
    if text == "ca":
        raise IdentityError("a device cannot be called ca: its bundle has the authority's ca.pem")
    try:
        return check_device(text)
    except MessageError as error:
        raise IdentityError(str(error)) from error


class Authority:
    """An open authority folder; one process at a time may have it open."""

    def __init__(
        self,
        folder: Path,
        *,
        create_days: int | None = None,
        clock: Clock = utc_now,
        wait_s: float = 0.0,
    ) -> None:
        """Open the authority. `create_days`: make one, valid that long, if there is none.

        `wait_s`: seconds to wait for another process that has it open. Raises `IdentityError` if
        it does not exist, is busy or is damaged.
        """
        self.folder = folder
        self._clock = clock
        if create_days is not None:
            make_folder(folder, mode=0o700)
        elif not (folder / INDEX).exists():
            raise IdentityError(
                f"{folder} holds no authority: create one with tessera-coordinator enroll, or name "
                "its folder with --dir"
            )
        self._lock = _lock(folder, wait_s)
        try:
            remove_leftovers(folder)
            self.is_new = not (folder / INDEX).exists()
            if self.is_new and create_days is not None:
                self._create(create_days)
            self._key, self.certificate = _read_authority(folder)
            self.index = read_index(folder / INDEX)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Authority:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder for other processes."""
        os.close(self._lock)

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its certificate, in hex."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    @property
    def until(self) -> datetime:
        """Time at which the authority, and every certificate with it, expires."""
        return self.certificate.not_valid_after_utc

    @property
    def crl(self) -> bytes:
        """Return the list of revoked certificates, in PEM format."""
        return (self.folder / CRL).read_bytes()

    def enroll(
        self, name: str, *, days: int, renew: bool = False, tasks: AllowedTasks = None
    ) -> tuple[Issued, Issued]:
        """Issue new certificates to a participant, for control and bulk. `name` must be checked.

        `tasks`: those that it may take part in, besides those it has already; None: all, or those
        it has. Raises `IdentityError` if it has valid ones and `renew` is False. Renewing leaves
        the old ones valid until they expire or are revoked together with the new ones.
        """
        now = self._clock()
        if (valid := self.valid(name)) and not renew:
            raise IdentityError(
                f"{name!r} is enrolled until {valid[-1].until:%Y-%m-%d}: --renew makes new "
                "certificates beside the old ones; if its key is lost or stolen, revoke it first"
            )
        control, bulk = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        given = self.tasks(name) if valid and tasks is None else self._joined(name, tasks)
        keys = control.public_key(), bulk.public_key()
        first, second = self._enroll(name, *keys, now, days, given)
        return (
            Issued(name, first, _key_pem(control)),
            Issued(name + BULK, second, _key_pem(bulk)),
        )

    def certify(
        self, name: str, key: PublicKey, *, days: int, tasks: AllowedTasks = None
    ) -> tuple[bytes, bytes]:
        """Issue certificates (PEM) to a participant that has made its own key, for control and
        bulk.

        `name` must be checked. `tasks`: those that it may take part in, besides those it has
        already; None: all. Old certificates stay valid; whether it may have new ones is for the
        caller to say (`valid`).
        """
        now = self._clock()
        days = min(days, (self.until - now).days)
        return self._enroll(name, key, key, now, days, self._joined(name, tasks))

    def valid(self, name: str) -> list[Enrolment]:
        """Return the valid enrolments of a participant, oldest first."""
        now = self._clock()
        return [each for each in self.index.of(name) if each.standing(now) == "valid"]

    def tasks(self, name: str) -> AllowedTasks:
        """Return the tasks of an enrolled device. Raises `IdentityError` if it is not enrolled."""
        if not (valid := self.valid(name)) or valid[-1].is_coordinator:
            raise IdentityError(
                f"{name!r} is not an enrolled device: see tessera-coordinator identities"
            )
        return valid[-1].tasks

    def allow(self, name: str, tasks: AllowedTasks) -> bool:
        """Let an enrolled device take part in these tasks and no others; True if that is a change.

        None: in all. Raises as `tasks`.
        """
        wanted = None if tasks is None else sorted_tasks(tasks)
        if self.tasks(name) == wanted:
            return False
        self._save(self.index.with_tasks(name, wanted, self._clock()))
        return True

    @property
    def now(self) -> datetime:
        """Time by the authority's clock."""
        return self._clock()

    def revoke(self, name: str) -> list[Enrolment]:
        """Revoke a participant's certificates and return them; none if they were revoked before.

        Raises `IdentityError` if it never had any, or they have expired.
        """
        now, ended = self._clock(), self.valid(name)
        if ended:
            self._save(self.index.with_revoked(name, now))
            self._make_listed(now)
        # Even if nothing was revoked: an earlier crash may have updated only the index.
        self._write_crl()
        known = self.index.of(name)
        if not ended and not (known and known[-1].standing(now) == "revoked"):
            why = f"its certificates are {known[-1].standing(now)}" if known else "not enrolled"
            raise IdentityError(
                f"{name!r} has nothing to revoke: {why}; see tessera-coordinator identities"
            )
        return ended

    def passes(self, name: str) -> Passes:
        """Issue what it takes to end connections of a revoked name."""
        now = self._clock()
        if self._listed() is None:  # by an earlier version of this program
            self._make_listed(now)
            self._write_crl()
        files = {CA: File(self.pem)}
        for suffix in ("", BULK):
            issued, _ = self._issue_pass(name + suffix, now, min(now + PASS_LASTS, self.until))
            files |= replace(issued, name=VALID + suffix).files()
            for end in (".pem", ".key"):
                file = LISTED + suffix + end
                files[file] = File((self.folder / file).read_bytes(), private=True)
        return Passes(name, files)

    def broker_certificate(self, hosts: Sequence[str]) -> Issued:
        """Issue the broker's certificate for these names or addresses, and loopback."""
        now = self._clock()
        names = dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])
        days = min(BROKER_DAYS, (self.until - now).days)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, _ = self._issue(
            # Not a host name: a participant could have that name.
            "Tessera broker",
            key.public_key(),
            now,
            self._until(now, days),
            ExtendedKeyUsageOID.SERVER_AUTH,
            [_general_name(host) for host in names],
        )
        return Issued("broker", certificate, _key_pem(key))

    def remember_broker(self, broker: BrokerPlace) -> None:
        """Record the address of the broker that `broker-config` or `enroll` named."""
        if broker != self.index.broker:
            self._save(replace(self.index, broker=broker))

    def remember_run(self, broker: BrokerPlace) -> None:
        """Record the embedded broker of a run, beside all others."""
        if (index := self.index.with_run(broker)) != self.index:
            self._save(index)

    # -- inside ------------------------------------------------------------------------------

    def _joined(self, name: str, tasks: AllowedTasks) -> AllowedTasks:
        """Return these tasks, and those that valid certificates of this name have already."""
        has = self.tasks(name) if self.valid(name) else ()
        return None if has is None or tasks is None else (*has, *tasks)

    def _save(self, index: EnrolmentIndex) -> None:
        write_index(self.folder / INDEX, index)
        self.index = index

    def _until(self, now: datetime, days: int) -> datetime:
        if days < 1:
            raise IdentityError(f"--days {days}: must be at least 1")
        until = now + timedelta(days=days)
        if until > self.until:
            raise IdentityError(
                f"--days {days} is longer than the authority lasts ({self.until:%Y-%m-%d}): give "
                f"at most {(self.until - now).days}, or make a new authority in another folder and "
                "enroll everybody there"
            )
        return until

    def _create(self, days: int) -> None:
        if days < 1:
            raise IdentityError(f"--days {days}: must be at least 1")
        now, key = self._clock(), ec.generate_private_key(ec.SECP256R1())
        # Part of the key, so that the names of two authorities differ.
        mark = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:8]
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Tessera authority {mark}")])
        usage = _usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(name, name, key.public_key(), now, now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        write_file(self.folder / CA_KEY, File(_key_pem(key), private=True))
        write_file(self.folder / CA, File(certificate.public_bytes(serialization.Encoding.PEM)))
        self._key, self.certificate, self.index = key, certificate, EnrolmentIndex()
        self._write_crl()
        # Last: a folder with an index is a complete authority.
        write_index(self.folder / INDEX, self.index)

    def _enroll(
        self,
        name: str,
        control: PublicKey,
        bulk: PublicKey,
        now: datetime,
        days: int,
        tasks: AllowedTasks,
    ) -> tuple[bytes, bytes]:
        """Issue and record a pair of certificates."""
        until, purpose = self._until(now, days), ExtendedKeyUsageOID.CLIENT_AUTH
        first, one = self._issue(name, control, now, until, purpose, ())
        second, two = self._issue(name + BULK, bulk, now, until, purpose, ())
        allowed = None if tasks is None else sorted_tasks(tasks)
        enrolment = Enrolment(name, (one, two), now, until, tasks=allowed)
        index = self.index.with_enrolment(enrolment)
        # Older certificates of the same device have the same rights: rules are by name.
        self._save(index.with_tasks(name, allowed, now))
        return first, second

    def _issue(
        self,
        name: str,
        key: PublicKey,
        now: datetime,
        until: datetime,
        purpose: x509.ObjectIdentifier,
        hosts: Sequence[x509.GeneralName],
    ) -> tuple[bytes, int]:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer_key = self._key.public_key()
        builder = (
            _builder(subject, self.certificate.subject, key, now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
            )
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), certificate.serial_number

    def _issue_pass(self, name: str, now: datetime, until: datetime) -> tuple[Issued, int]:
        key, purpose = ec.generate_private_key(ec.SECP256R1()), ExtendedKeyUsageOID.CLIENT_AUTH
        pem, serial = self._issue(name, key.public_key(), now, until, purpose, ())
        return Issued(name, pem, _key_pem(key)), serial

    def _make_listed(self, now: datetime) -> None:
        """Make the certificates that the next list is the first to have."""
        for suffix in ("", BULK):
            # Not a participant's name.
            issued, _ = self._issue_pass("Tessera list" + suffix, now, self.until)
            for name, file in replace(issued, name=LISTED + suffix).files().items():
                write_file(self.folder / name, file)

    def _listed(self) -> list[int] | None:
        """Return the serial numbers of these certificates; None if there are none."""
        paths = [self.folder / f"{LISTED}{suffix}.pem" for suffix in ("", BULK)]
        if not all(path.exists() for path in paths):
            return None
        return [x509.load_pem_x509_certificate(path.read_bytes()).serial_number for path in paths]

    def _write_crl(self) -> None:
        now = self._clock()
        issuer_key = self._key.public_key()
        revoked = [each for each in self.index.enrolments if each.revoked is not None]
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - BACKDATED)
            .next_update(self.until)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
            )
            .add_extension(x509.CRLNumber(len(revoked)), critical=False)
        )
        dates = {serial: each.revoked or now for each in revoked for serial in each.serials}
        for serial, date in {**dates, **dict.fromkeys(self._listed() or (), now)}.items():
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date).build()
            )
        crl = builder.sign(self._key, hashes.SHA256())
        write_file(self.folder / CRL, File(crl.public_bytes(serialization.Encoding.PEM)))


def _builder(
    subject: x509.Name, issuer: x509.Name, public: PublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise IdentityError(
            f"--host {host!r} cannot be put in a certificate: give an ASCII name or an address"
        ) from error


def _read_authority(folder: Path) -> tuple[PrivateKey, x509.Certificate]:
    try:
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise IdentityError(
            f"{folder}: the authority's {CA} or {CA_KEY} cannot be read ({error}); restore it "
            "from a backup"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{folder / CA_KEY} is not a key made by this program")
    if key.public_key() != certificate.public_key():
        raise IdentityError(f"{folder}: {CA_KEY} does not belong to {CA}; restore both together")
    return key, certificate


def _lock(folder: Path, wait_s: float) -> int:
    by = time.monotonic() + wait_s
    while True:
        try:
            return lock_file(folder / LOCK, mode=0o600)
        except BlockingIOError as error:  # noqa: PERF203  it waits
            if time.monotonic() >= by:
                raise IdentityError(f"{folder} is in use by another process: try again") from error
            time.sleep(0.02)
