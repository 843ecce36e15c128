"""Tessera on the device: what a phone, a board or a small machine needs to take part.

`import edge_sdk` is cheap: neither torch nor onnxruntime nor paho is loaded until it is used, nor
are msgpack and OpenSSL (4 MB, through hashlib) until the first plan is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.plan import ModelPlan

if TYPE_CHECKING:
    from edge_sdk.protocol.plan_codec import decode_plan

__all__ = ["ModelPlan", "TesseraError", "__version__", "decode_plan"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "decode_plan":
        from edge_sdk.protocol.plan_codec import decode_plan

        return decode_plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
