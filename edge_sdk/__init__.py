"""Tessera on the device: what a phone, a board or a small machine needs to take part.

`import edge_sdk` is cheap: neither torch nor onnxruntime nor paho is loaded until it is used, nor
are msgpack and OpenSSL (4 MB, through hashlib) until the first plan is decoded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_sdk.protocol.errors import TesseraError

if TYPE_CHECKING:
    from edge_sdk.device.config import DeviceConfig, load_config
    from edge_sdk.device.service.service import Device, run_device
    from edge_sdk.protocol.plan.codec import decode_plan
    from edge_sdk.protocol.plan.plan import ModelPlan

__all__ = [
    "Device",
    "DeviceConfig",
    "ModelPlan",
    "TesseraError",
    "__version__",
    "decode_plan",
    "load_config",
    "run_device",
]

__version__ = "0.1.0"

_LATER = {
    "Device": "edge_sdk.device.service.service",
    "DeviceConfig": "edge_sdk.device.config",
    "ModelPlan": "edge_sdk.protocol.plan.plan",
    "decode_plan": "edge_sdk.protocol.plan.codec",
    "load_config": "edge_sdk.device.config",
    "run_device": "edge_sdk.device.service.service",
}
"""Where to find what is loaded when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
