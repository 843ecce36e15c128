"""A QR code in the terminal, for phones. Needs the extra `qr`."""

from __future__ import annotations

from io import StringIO


def draw_qr(text: str) -> str:
    """Return a QR code as text of half blocks. Raises `ModuleNotFoundError` without segno."""
    import segno

    out = StringIO()
    segno.make(text, error="l", micro=False).terminal(out, border=2, compact=True)
    return out.getvalue()
