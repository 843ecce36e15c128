"""Encodings as values and as text, and what is available."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from edge_sdk.protocol.encoding.encoding import Encoding, available_encodings, usable
from edge_sdk.protocol.encoding.zstd import compress
from edge_sdk.protocol.errors import EncodingError

TEXTS = {
    "fp32": Encoding(),
    "fp16": Encoding(kind="fp16"),
    "int8+zstd": Encoding(kind="int8", zstd=True),
    "top-k:0.1": Encoding(kind="top-k"),
    "top-k:0.25+zstd": Encoding(kind="top-k", keep=0.25, zstd=True),
    "top-k:1e-05": Encoding(kind="top-k", keep=1e-5),
    "top-k:1e-05+zstd": Encoding(kind="top-k", keep=1e-5, zstd=True),
    "top-k:1.0": Encoding(kind="top-k", keep=1),
}


@pytest.mark.parametrize(("text", "encoding"), TEXTS.items(), ids=list(TEXTS))
def test_text_names_one_encoding(text: str, encoding: Encoding) -> None:
    assert str(encoding) == text
    assert Encoding.parse(text) == encoding


def test_top_k_without_a_share_keeps_a_tenth() -> None:
    assert Encoding.parse("top-k") == Encoding.parse("top-k:0.1") == Encoding(kind="top-k")
    assert Encoding.parse("top-k+zstd") == Encoding.parse("top-k:0.1+zstd")


@pytest.mark.parametrize(
    "text", ["", "fp8", "FP16", " fp16", "fp16 ", "zstd", "+zstd", "fp16+zst", "int8:0.5", "top-k:"]
)
def test_unknown_text_lists_the_known_ones(text: str) -> None:
    with pytest.raises(EncodingError, match=r"fp32, fp16, int8, top-k .* \+zstd"):
        Encoding.parse(text)


@pytest.mark.parametrize("text", ["top-k:0", "top-k:-0.1", "top-k:1.01", "top-k:1e999"])
def test_share_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(EncodingError, match="share in"):
        Encoding.parse(text)


def test_share_that_is_no_number_is_refused() -> None:
    with pytest.raises(EncodingError, match=r"'1\.2\.3' in 'top-k:1\.2\.3' is not a share"):
        Encoding.parse("top-k:1.2.3")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "fp8"}, "unknown encoding 'fp8'"),
        ({"kind": None}, "unknown encoding None"),
        ({"kind": "fp16", "keep": 0.5}, "only top-k"),
        ({"kind": "top-k", "keep": float("nan")}, "share"),
        ({"kind": "top-k", "keep": True}, "share"),
        ({"kind": "top-k", "keep": "0.5"}, "share"),
        ({"kind": "int8", "zstd": 1}, "true or false"),
    ],
)
def test_encoding_that_makes_no_sense_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(EncodingError, match=text):
        Encoding(**fields)


def test_agreed_drops_zstd_where_it_is_missing() -> None:
    wanted = Encoding(kind="int8", zstd=True)
    assert wanted.agreed(["fp32", "int8", "zstd"]) == wanted
    assert wanted.agreed(["fp32", "int8"]) == Encoding(kind="int8")
    assert Encoding(kind="int8").agreed(["int8", "zstd"]) == Encoding(kind="int8")
    with pytest.raises(EncodingError, match="int8 is not known"):
        wanted.agreed(["fp32", "zstd"])


def test_without_zstandard_every_kind_is_available_and_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what Python does for a missing module
    assert available_encodings() == ("fp32", "fp16", "int8", "top-k")
    assert usable(Encoding.parse("fp16+zstd")) == Encoding.parse("fp16")
    with pytest.raises(EncodingError, match=r"pip install 'tessera-fl\[zstd\]'"):
        compress([np.zeros(3, dtype=np.float32)])


def test_with_zstandard_it_is_available() -> None:
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    assert available_encodings() == ("fp32", "fp16", "int8", "top-k", "zstd")
