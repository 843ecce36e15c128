"""Join codes: they survive being pasted, notice typing mistakes, and keep their secret."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.join.code import FINGERPRINT_BYTES, SECRET_BYTES, JoinCode, JoinError, parse_code

CODE = JoinCode(
    host="192.168.178.20",
    port=8884,
    task="digits",
    fingerprint=bytes(range(FINGERPRINT_BYTES)),
    secret=bytes(range(100, 100 + SECRET_BYTES)),
)


@given(
    host=st.from_regex(r"[a-z0-9.:-]{1,60}", fullmatch=True),
    port=st.integers(1, 65535),
    task=st.from_regex(r"[a-z0-9][a-z0-9._]{0,30}", fullmatch=True),
    fingerprint=st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES),
    secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
)
def test_code_is_read_back(
    host: str, port: int, task: str, fingerprint: bytes, secret: bytes
) -> None:
    code = JoinCode(host=host, port=port, task=task, fingerprint=fingerprint, secret=secret)
    assert parse_code(code.text) == code
    assert re.fullmatch(r"[a-z2-7]+", code.text)


def test_code_has_enough_secret_and_fits_on_a_line() -> None:
    assert 8 * SECRET_BYTES >= 80
    assert len(CODE.text) <= 100


def test_code_is_read_as_people_paste_it() -> None:
    spoilt = " " + "-".join(re.findall(".{1,5}", CODE.text.upper())) + " \n"
    assert parse_code(spoilt) == CODE


@pytest.mark.parametrize("place", range(0, len(CODE.text), 7))
def test_mistyped_code_is_noticed(place: int) -> None:
    other = "b" if CODE.text[place] != "b" else "c"
    with pytest.raises(JoinError):
        parse_code(CODE.text[:place] + other + CODE.text[place + 1 :])


@given(text=st.text(max_size=120))
def test_other_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(JoinError, match="join code"):
        parse_code(text)


def test_shortened_code_is_refused() -> None:
    with pytest.raises(JoinError, match="incomplete or mistyped: copy the whole line"):
        parse_code(CODE.text[:-3])


def test_secret_is_in_neither_the_name_nor_the_words_nor_the_mac() -> None:
    secret = CODE.secret.hex()
    for shown in (repr(CODE), str(CODE), CODE.id, CODE.mac(b"body"), CODE.address):
        assert secret not in shown
        assert CODE.text not in shown
        assert repr(CODE.secret) not in shown


def test_mac_depends_on_secret_and_body() -> None:
    other = replace(CODE, secret=bytes(SECRET_BYTES))
    assert len({CODE.mac(b"a"), CODE.mac(b"b"), other.mac(b"a")}) == 3
    assert other.id != CODE.id
