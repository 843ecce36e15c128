"""Keys are made on the device, with the package or with the program."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs cryptography: it reads the requests")

import edge_sdk.join.keys
from coordinator.operate.identity.authority import read_request
from edge_sdk.join.code import JoinError
from edge_sdk.join.keys import make_key, make_request

WAYS = [
    "cryptography",
    pytest.param(
        "openssl",
        marks=pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing"),
    ),
]


@pytest.mark.parametrize("way", WAYS)
def test_key_is_private_and_signs_its_own_request(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_sdk.join.keys, "_has_package", lambda: way == "cryptography")
    path = tmp_path / "robot.key"
    make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = read_request(make_request(path, "robot"))
    monkeypatch.setattr(edge_sdk.join.keys, "_has_package", lambda: way != "cryptography")
    second = read_request(make_request(path, "robot"))
    assert first.public_numbers() == second.public_numbers()


def test_without_package_and_program_the_error_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_sdk.join.keys, "_has_package", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JoinError, match=r"tessera-fl\[join\].*apt install openssl"):
        make_key(tmp_path / "robot.key")
    assert list(tmp_path.iterdir()) == []


def test_damaged_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "robot.key").write_text("no key")
    with pytest.raises(JoinError, match=r"robot\.key is not a key: remove it"):
        make_request(tmp_path / "robot.key", "robot")
