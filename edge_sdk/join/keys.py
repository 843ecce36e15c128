"""The device's key (P-256), made here and never sent, and the request for its certificates.

Python's standard library cannot make keys. The package `cryptography` does it where it is installed
(the extra `join`), and otherwise the program `openssl`, which nearly every Linux system has.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_sdk.join.code import JoinError
from edge_sdk.program.files import write_whole
from edge_sdk.program.processes import run_child

OPENSSL_S = 60.0


def make_key(path: Path) -> None:
    """Write a new key, readable by its owner only. Raises `JoinError`."""
    write_whole(path, _cryptography_key() if _has_package() else _openssl_key(), mode=0o600)


def make_request(key: Path, name: str) -> bytes:
    """Return a certificate signing request (PEM) for a key and a name. Raises `JoinError`."""
    return _cryptography_request(key, name) if _has_package() else _openssl_request(key, name)


def _has_package() -> bool:
    return find_spec("cryptography") is not None


def _cryptography_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _cryptography_request(path: Path, name: str) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise JoinError(f"{path} is not a key: remove it, and join again") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise JoinError(f"{path} is not a P-256 key: remove it, and join again")
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _openssl_key() -> bytes:
    return _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")


def _openssl_request(path: Path, name: str) -> bytes:
    with TemporaryDirectory(prefix="tessera-join-") as folder:
        config = Path(folder) / "openssl.cnf"
        config.write_text("[req]\ndistinguished_name = name\n[name]\n")
        subject = ["-subj", f"/CN={name}", "-config", str(config)]
        return _openssl("req", "-new", "-sha256", "-key", str(path), *subject)


def _openssl(*arguments: str) -> bytes:
    program = shutil.which("openssl")
    if program is None:
        raise JoinError(
            "making this device's key needs the package cryptography or the program openssl: "
            "pip install 'tessera-fl[join]', or apt install openssl"
        )
    done = run_child([program, *arguments], timeout_s=OPENSSL_S)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise JoinError(f"openssl {arguments[0]} failed: {said[-1] if said else 'no reason given'}")
    return done.stdout.encode()
