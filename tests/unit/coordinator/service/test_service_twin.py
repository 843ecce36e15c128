"""Devices that really train: over the wire the model becomes what it does in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES, make_rule
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import Run, RunError
from coordinator.simulate.federation import Federation, Member
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.stores.movements import MemoryMovements
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import SurveyFinding
from edge_sdk.protocol.messages.wire import ControlMessage
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.onnx import OnnxBackend
from tests.unit.coordinator.service.service_world import (
    PLAN,
    ScriptedDevice,
    Worlds,
    rounds_config,
    saved_model,
)

SEED = 7
POLICIES = {
    "a": Policy(level=1.0),
    "b": Policy(level=0.5, participation=0.6, schedule="ad-hoc"),
    "c": Policy(level=0.75, participation=0.5),
}


class TrainingDevice(ScriptedDevice):
    """The device's own app behind a scripted device's link."""

    def start(self, data: ArrayData, policy: Policy) -> TrainingDevice:
        self.app = DeviceApp(
            self.name,
            backend=_backend(),
            data=data,
            policy=policy,
            source=self,
            seed=SEED,
            movements=MemoryMovements(),
        )
        return self

    def fetch(self, assignment: Assignment, opened: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        return self.read_model(opened, assignment.groups)

    def _receive(self, message: ControlMessage) -> None:
        if isinstance(message, RoundOpen):
            self.opened.setdefault(message.round, message)
        if isinstance(message, (RoundOpen, Assignment, Receipt, RoundClosed)):
            for answer in self.app.receive(message):
                assert not isinstance(answer, SurveyFinding)  # the model has no BatchNorm
                self._send(answer)
        if not isinstance(message, (RoundOpen, Assignment)):
            super()._receive(message)

    def _send(self, message: Bid | Movement | Replay) -> None:
        if isinstance(message, Bid):
            self.tell(replace(message, run=self.world.run.about.run))
        elif isinstance(message, Movement):
            self.offer(message)
        else:
            self.offer(message.movement, answers=message.round)


def _backend() -> OnnxBackend:
    model = saved_model()
    return OnnxBackend(model.plan, model.manifest, model.files)


def _data(name: str) -> ArrayData:
    random = stream(SEED, "data", name)
    inputs = np.asarray(random.normal(size=(20, 4)), dtype=np.float32)
    return ArrayData((inputs,), random.integers(0, 3, size=20))


@pytest.mark.parametrize(
    ("rule", "masks", "down"),
    [
        ("ram-fed", "coverage", Encoding()),
        ("ra-fed", "rolling", Encoding(kind="int8")),
        ("ccfl-2", "random", Encoding()),
        ("ra-fed", "prunefl", Encoding()),
    ],
)
def test_synchronous_run_is_that_of_one_process_bit_for_bit(
    worlds: Worlds, rule: str, masks: str, down: Encoding
) -> None:
    config = rounds_config(
        rule=RULES[rule](), masks=make_masks(masks), rounds=6, steps=3, min_devices=3
    )
    world = worlds.make(config, down=down)
    for name, policy in POLICIES.items():
        device = TrainingDevice(world, name).start(_data(name), policy)
        world.devices.append(device)
    world.settle()
    assert world.service.finished
    assert world.service.model.digest == _in_process(config, down)


@pytest.mark.parametrize(
    ("rule", "masks", "options"), [("ra-fed", "prunefl", {"period": 3, "overhead": 0.1})]
)
def test_run_that_is_killed_in_a_commit_is_that_of_one_process_bit_for_bit(
    worlds: Worlds,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    masks: str,
    options: dict[str, Any],
) -> None:
    """Twice: before the checkpoint of a round, and after it, before devices hear of it."""
    config = rounds_config(
        rule=RULES[rule](), masks=make_masks(masks, **options), rounds=5, steps=3, min_devices=3
    )
    world = worlds.make(config)
    for name in POLICIES:
        policy = Policy(level=POLICIES[name].level)
        world.devices.append(TrainingDevice(world, name).start(_data(name), policy))
    for method, round in (("save", 2), ("prune", 4)):
        works = getattr(Run, method)

        def crashes(
            run: Run, *arguments: Any, _works: Any = works, _round: int = round, **named: Any
        ) -> Any:
            if world.state.round == _round:
                raise OSError("the process ends here")
            return _works(run, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(Run, method, crashes)
            with pytest.raises(RunError, match=f"round {round} could not be committed"):
                world.settle()
        world.crash()
        world.start()
    world.settle()
    assert world.service.finished
    steady = {name: Policy(level=policy.level) for name, policy in POLICIES.items()}
    assert world.service.model.digest == _in_process(config, Encoding(), steady)


def test_run_by_invitation_is_that_of_one_process_bit_for_bit(worlds: Worlds) -> None:
    rule = make_rule("ram-fed", warmup_rounds=1)
    config = rounds_config(rule=rule, rounds=4, steps=2, min_devices=3, participants=2)
    world = worlds.make(config)
    for name, policy in POLICIES.items():
        world.devices.append(TrainingDevice(world, name).start(_data(name), policy))
    world.settle()
    while not world.service.finished:
        world.wait(10)  # a round in which all skip is void after the time for bids
    assert world.service.model.digest == _in_process(config, Encoding())


def _in_process(
    config: RoundsConfig, down: Encoding, policies: Mapping[str, Policy] = POLICIES
) -> str:
    saved = saved_model()
    model = GlobalModel(PLAN, saved.weights, saved.buffers, encoding=down, seed=SEED)
    members = [Member(name, policy, _data(name)) for name, policy in policies.items()]
    federation = Federation(config, model, _backend, members)
    assert len(list(federation.run())) == config.rounds
    return model.digest
