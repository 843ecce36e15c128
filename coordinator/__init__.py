"""Tessera on the VM: traces models, runs rounds, puts the pieces together.

The names below are the whole public face; modules behind them are private and may move.
`import coordinator` loads no torch; the names that need it do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.aggregate.model import GlobalModel
    from coordinator.aggregate.optimizer import ServerOptimizer
    from coordinator.aggregate.robust import Robust
    from coordinator.aggregate.rules import make_rule
    from coordinator.aggregate.rules.ccfl import Ccfl1, Ccfl2, Ccfl3, Strategy2
    from coordinator.aggregate.rules.fed_buff import FedBuff
    from coordinator.aggregate.rules.fed_raa import FedAsync, FedRaa
    from coordinator.aggregate.rules.ra_fed import FedAvg, RaFed, Strategy1, SubDisMo
    from coordinator.aggregate.rules.ram_fed import FedVarp, RamFed
    from coordinator.masks import MaskPolicy, Situation, make_masks
    from coordinator.operate.broker.embedded import embedded_broker
    from coordinator.rounds.fragments import FragmentsConfig
    from coordinator.rounds.synchronous import RoundsConfig
    from coordinator.run.folder import read_result
    from coordinator.run.tensorboard import TensorBoardSink
    from coordinator.service.courses.parts import Evaluator
    from coordinator.simulate.federation import Federation, Member
    from coordinator.simulate.partitions import (
        dirichlet_parts,
        iid_parts,
        key_parts,
        label_parts,
        own_test_parts,
        shard_parts,
    )
    from coordinator.task.graphs.cache import compiled_graphs
    from coordinator.task.graphs.child import compile_in_child
    from coordinator.task.graphs.compilation import compile_graphs
    from coordinator.task.graphs.errors import GraphCompileError
    from coordinator.task.saved_model import SavedModel, read_model
    from coordinator.task.task import Task, make_task
    from coordinator.task.tracing.norms import decouple_norms
    from coordinator.task.tracing.trace import trace_plan
    from edge_sdk.protocol.task.description import InputDescription

__all__ = [
    "Ccfl1",
    "Ccfl2",
    "Ccfl3",
    "Evaluator",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedRaa",
    "FedVarp",
    "Federation",
    "FragmentsConfig",
    "GlobalModel",
    "GraphCompileError",
    "InputDescription",
    "MaskPolicy",
    "Member",
    "RaFed",
    "RamFed",
    "Robust",
    "RoundsConfig",
    "SavedModel",
    "ServerOptimizer",
    "Situation",
    "Strategy1",
    "Strategy2",
    "SubDisMo",
    "Task",
    "TensorBoardSink",
    "compile_graphs",
    "compile_in_child",
    "compiled_graphs",
    "decouple_norms",
    "dirichlet_parts",
    "embedded_broker",
    "iid_parts",
    "key_parts",
    "label_parts",
    "make_masks",
    "make_rule",
    "make_task",
    "own_test_parts",
    "read_model",
    "read_result",
    "shard_parts",
    "trace_plan",
]

_HOMES = {
    "Ccfl1": "coordinator.aggregate.rules.ccfl",
    "Ccfl2": "coordinator.aggregate.rules.ccfl",
    "Ccfl3": "coordinator.aggregate.rules.ccfl",
    "Evaluator": "coordinator.service.courses.parts",
    "FedAsync": "coordinator.aggregate.rules.fed_raa",
    "FedAvg": "coordinator.aggregate.rules.ra_fed",
    "FedBuff": "coordinator.aggregate.rules.fed_buff",
    "FedRaa": "coordinator.aggregate.rules.fed_raa",
    "FedVarp": "coordinator.aggregate.rules.ram_fed",
    "Federation": "coordinator.simulate.federation",
    "FragmentsConfig": "coordinator.rounds.fragments",
    "GlobalModel": "coordinator.aggregate.model",
    "GraphCompileError": "coordinator.task.graphs.errors",
    "InputDescription": "edge_sdk.protocol.task.description",
    "MaskPolicy": "coordinator.masks",
    "Member": "coordinator.simulate.federation",
    "RaFed": "coordinator.aggregate.rules.ra_fed",
    "RamFed": "coordinator.aggregate.rules.ram_fed",
    "Robust": "coordinator.aggregate.robust",
    "RoundsConfig": "coordinator.rounds.synchronous",
    "SavedModel": "coordinator.task.saved_model",
    "ServerOptimizer": "coordinator.aggregate.optimizer",
    "Situation": "coordinator.masks",
    "Strategy1": "coordinator.aggregate.rules.ra_fed",
    "Strategy2": "coordinator.aggregate.rules.ccfl",
    "SubDisMo": "coordinator.aggregate.rules.ra_fed",
    "Task": "coordinator.task.task",
    "TensorBoardSink": "coordinator.run.tensorboard",
    "compile_graphs": "coordinator.task.graphs.compilation",
    "compile_in_child": "coordinator.task.graphs.child",
    "compiled_graphs": "coordinator.task.graphs.cache",
    "decouple_norms": "coordinator.task.tracing.norms",
    "dirichlet_parts": "coordinator.simulate.partitions",
    "embedded_broker": "coordinator.operate.broker.embedded",
    "iid_parts": "coordinator.simulate.partitions",
    "key_parts": "coordinator.simulate.partitions",
    "label_parts": "coordinator.simulate.partitions",
    "make_masks": "coordinator.masks",
    "make_rule": "coordinator.aggregate.rules",
    "make_task": "coordinator.task.task",
    "own_test_parts": "coordinator.simulate.partitions",
    "read_model": "coordinator.task.saved_model",
    "read_result": "coordinator.run.folder",
    "shard_parts": "coordinator.simulate.partitions",
    "trace_plan": "coordinator.task.tracing.trace",
}
"""Modules of the names, which are loaded when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
