"""Tessera on the device: all that a phone, a board or a small machine needs to take part.

The names below are the whole public face; modules behind them are private and may move.
`import edge_sdk` is cheap: neither torch nor onnxruntime nor paho is loaded until it is used, nor
are msgpack and OpenSSL (4 MB, through hashlib) until the first plan is decoded.

Newer onnxruntime sends usage data to its maker and gives the machine an identifier, unless it is
told not to before it is loaded. This is said here, where every program passes; a variable that is
set already keeps its value.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_sdk.protocol.errors import TesseraError

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from edge_sdk.data.arrays import ArrayData
    from edge_sdk.decide.decision import Policy
    from edge_sdk.decide.emulation.fleet import find_fleet, load_fleet
    from edge_sdk.device.config import DeviceConfig, load_config
    from edge_sdk.device.service.service import Device, run_device
    from edge_sdk.machine.board import find_board, load_board
    from edge_sdk.machine.probe import PushedProbe
    from edge_sdk.machine.snapshot import Snapshot
    from edge_sdk.protocol.messages.local_rule import LocalRule
    from edge_sdk.protocol.plan.codec import decode_plan
    from edge_sdk.protocol.plan.plan import ModelPlan
    from edge_sdk.protocol.streams import stream
    from edge_sdk.train.backend import Job
    from edge_sdk.train.delivered import Model
    from edge_sdk.train.inference import ExportedModel
    from edge_sdk.train.onnx import OnnxBackend
    from edge_sdk.train.torch import TorchBackend
    from edge_sdk.transport.probe import probe_broker
    from edge_sdk.transport.settings import BrokerSettings

__all__ = [
    "ArrayData",
    "BrokerSettings",
    "Device",
    "DeviceConfig",
    "ExportedModel",
    "Job",
    "LocalRule",
    "Model",
    "ModelPlan",
    "OnnxBackend",
    "Policy",
    "PushedProbe",
    "Snapshot",
    "TesseraError",
    "TorchBackend",
    "decode_plan",
    "find_board",
    "find_fleet",
    "load_board",
    "load_config",
    "load_fleet",
    "probe_broker",
    "run_device",
    "stream",
]

__version__ = "0.1.0"

_HOMES = {
    "ArrayData": "edge_sdk.data.arrays",
    "BrokerSettings": "edge_sdk.transport.settings",
    "Device": "edge_sdk.device.service.service",
    "DeviceConfig": "edge_sdk.device.config",
    "ExportedModel": "edge_sdk.train.inference",
    "Job": "edge_sdk.train.backend",
    "LocalRule": "edge_sdk.protocol.messages.local_rule",
    "Model": "edge_sdk.train.delivered",
    "ModelPlan": "edge_sdk.protocol.plan.plan",
    "OnnxBackend": "edge_sdk.train.onnx",
    "Policy": "edge_sdk.decide.decision",
    "PushedProbe": "edge_sdk.machine.probe",
    "Snapshot": "edge_sdk.machine.snapshot",
    "TorchBackend": "edge_sdk.train.torch",
    "decode_plan": "edge_sdk.protocol.plan.codec",
    "find_board": "edge_sdk.machine.board",
    "find_fleet": "edge_sdk.decide.emulation.fleet",
    "load_board": "edge_sdk.machine.board",
    "load_config": "edge_sdk.device.config",
    "load_fleet": "edge_sdk.decide.emulation.fleet",
    "probe_broker": "edge_sdk.transport.probe",
    "run_device": "edge_sdk.device.service.service",
    "stream": "edge_sdk.protocol.streams",
}
"""Modules of the names that are loaded when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
