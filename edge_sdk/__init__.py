"""Tessera on the device: what a phone, a board or a small machine needs to take part.

`import edge_sdk` is cheap: neither torch nor onnxruntime nor paho is loaded until it is used.
"""

from __future__ import annotations

from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.protocol.plan_codec import decode_plan

__all__ = ["ModelPlan", "TesseraError", "__version__", "decode_plan"]

__version__ = "0.1.0"
