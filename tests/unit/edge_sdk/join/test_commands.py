"""`tessera-device join`, as far as it goes without a coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_sdk.cli import main
from edge_sdk.join.code import JoinCode

CODE = JoinCode(
    host="no-such-host.invalid", port=8443, task="toy", fingerprint=bytes(16), secret=bytes(12)
)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("notes.docx", "notes.docx is not one of those that can be read"),
        ("empty", "has no file that is one of those that can be read"),
        ("absent.csv", "absent.csv is not there"),
    ],
)
def test_code_is_not_spent_on_data_that_nothing_can_read(
    tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.docx").write_bytes(b"words")
    (tmp_path / "empty").mkdir()
    joined = tmp_path / "pi"
    asked = ["join", CODE.text, "--dir", str(joined), "--data", str(tmp_path / name)]
    assert main(asked) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "nothing was sent" in error
    assert not joined.exists()


@pytest.mark.parametrize("more", [["--data", "samples.py:load"], ["--no-start", "--data", "empty"]])
def test_data_that_is_made_or_still_comes_is_left_to_the_start(
    tmp_path: Path,
    more: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples.py").write_text("raise RuntimeError")
    (tmp_path / "empty").mkdir()
    assert main(["join", CODE.text, *more]) == 2
    assert "no-such-host.invalid:8443 cannot be reached" in capsys.readouterr().err
