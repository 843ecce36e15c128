"""Encodings of block values: as a value, as text, and which of them each side can read.

| text | per value | after decoding |
|---|---|---|
| `fp32` | 4 bytes | the same bits |
| `fp16` | 2 bytes | within 2⁻¹¹ of the value, or 2⁻³⁹ of its block's largest (`quantisation.py`) |
| `int8` | 1 byte | within one step, 1/127 of its block's largest; right on average |
| `top-k:0.1` | about 0.3 bytes | the largest tenth of each block as fp16, zeros elsewhere |

`+zstd` after any of them compresses the bytes without loss; it needs the package `zstandard`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, cast, get_args

from edge_sdk.protocol.errors import EncodingError

Kind = Literal["fp32", "fp16", "int8", "top-k"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_KEEP = 0.1
KNOWN = "fp32, fp16, int8, top-k or top-k:<share>, each optionally followed by +zstd"

_TEXT = re.compile(
    r"(?:(?P<plain>fp32|fp16|int8)|top-k(?::(?P<keep>[0-9.e+-]*[0-9.]))?)(?P<zstd>\+zstd)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One way to write blocks. `str()` gives the text that `parse` reads.

    Raises `EncodingError` for invalid values.
    """

    kind: Kind = "fp32"
    keep: float = DEFAULT_KEEP
    """Top-k: share of each block's values to keep, in (0, 1]; at least one value is kept."""
    zstd: bool = False
    """Compress without loss where that makes it smaller."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EncodingError(f"unknown encoding {self.kind!r}; use {KNOWN}")
        number = isinstance(self.keep, (int, float)) and not isinstance(self.keep, bool)
        if not (number and math.isfinite(self.keep) and 0 < self.keep <= 1):
            raise EncodingError(f"top-k keeps a share in (0, 1] of each block, not {self.keep!r}")
        if self.kind != "top-k" and self.keep != DEFAULT_KEEP:
            raise EncodingError(f"only top-k keeps a share; {self.kind} sends every value")
        if not isinstance(self.zstd, bool):
            raise EncodingError(f"zstd must be true or false, not {self.zstd!r}")

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Read the name of an encoding in a config file or command. Raises `EncodingError`."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise EncodingError(f"unknown encoding {text!r}; use {KNOWN}")
        try:
            keep = DEFAULT_KEEP if found["keep"] is None else float(found["keep"])
        except ValueError:
            raise EncodingError(f"{found['keep']!r} in {text!r} is not a share") from None
        return cls(
            kind=cast(Kind, found["plain"] or "top-k"), keep=keep, zstd=found["zstd"] is not None
        )

    def __str__(self) -> str:
        share = f":{float(self.keep)!r}" if self.kind == "top-k" else ""
        return f"{self.kind}{share}{'+zstd' if self.zstd else ''}"

    def agreed(self, available: Collection[str]) -> Encoding:
        """Adapt to a side with these `available_encodings`: no zstd if it has none.

        Raises `EncodingError` if the other side does not know the kind.
        """
        if self.kind not in available:
            known = ", ".join(sorted(available)) or "none"
            raise EncodingError(f"encoding {self.kind} is not known to the other side ({known})")
        return replace(self, zstd=False) if self.zstd and "zstd" not in available else self


def usable(encoding: Encoding) -> Encoding:
    """Adapt an encoding to this side; whether `zstandard` is installed is looked up if it matters.

    Raises `EncodingError` for a kind that this side does not know.
    """
    return encoding.agreed(available_encodings() if encoding.zstd else KINDS)


def available_encodings() -> tuple[str, ...]:
    """List what this side reads and writes: every kind, and "zstd" if `zstandard` is installed."""
    return (*KINDS, "zstd") if find_spec("zstandard") else KINDS
