"""Coordinator and devices as programs on Mosquitto, beside the federation in one process.

Five devices, one run for each family of rules. A synchronous rule ends with the bits of the
federation; for an asynchronous one it matters who is first, so it is held to less.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES
from coordinator.cli import EXIT_TERMINATED
from coordinator.masks import make_masks
from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.operate.serve.serving import broker_table
from coordinator.operate.taskfile import compile_task
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import MODEL, About, Checkpoint, Run, create_run, is_run, read_history
from coordinator.simulate.demo.digits import deal, load_digits
from coordinator.simulate.federation import Federation, Member, RoundReport
from coordinator.task.saved_model import SavedModel, read_model, save_model
from edge_sdk.decide.decision import Policy
from edge_sdk.program.processes import ChildProcess, Children
from edge_sdk.program.settings.types import kinds
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.transport.settings import BrokerSettings
from tests.waiting import HANGS_S, made_once, until

pytestmark = pytest.mark.skipif(
    "mosquitto" not in available(), reason="needs mosquitto, which is not installed"
)

PROGRAMS = Path(sys.executable).parent
DEVICES, ROUNDS, STEPS, BATCH_SIZE, SEED = 5, 6, 10, 16, 11
ASYNCHRONOUS_ROUNDS = 16
POLICIES = (
    Policy(level=1.0),
    Policy(level=1.0, participation=0.5),
    Policy(level=0.75),
    Policy(level=0.5, participation=0.6, schedule="ad-hoc"),
    Policy(level=0.25, participation=1 / 3),
)
"""Five kinds of device, from one that can do everything to one that can hardly take part."""
LOCAL_RULE = LocalRule(learning_rate=0.1, momentum=0.5)
TAIL_LINES = 20

TASK_FILE = """\
import torch
from torch import nn

from coordinator.task.task import make_task as task_of


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))

    def forward(self, x):
        return x + self.inner(x)


def make_task():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.ReLU(),
            Residual(),
            Residual(),
            nn.Linear(32, 10),
        )
    return task_of(model, torch.zeros(2, 1, 8, 8), groups=4, regions="both")
"""
"""Cut by width and by depth: of two residual blocks, levels below 1 have one."""


class Fleet(Children):
    """A folder with the configuration of a run, and the programs that take part in it."""

    def __init__(self, folder: Path, settings: BrokerSettings) -> None:
        self.folder, self.run = folder, folder / "run"
        super().__init__()
        self._broker = broker_table(settings)
        (folder / "task.py").write_text(TASK_FILE)
        digits = load_digits(SEED)
        np.savez(folder / "test.npz", x0=digits.test.inputs[0], y=digits.test.targets)
        names = [f"device-{number}" for number in range(1, DEVICES + 1)]
        shares = deal(digits.train, names, SEED)
        self.members = [
            Member(name, policy, shares[name]) for name, policy in zip(names, POLICIES, strict=True)
        ]

    def adopt(self, model: SavedModel) -> None:
        """Begin the run with a model that is compiled already."""
        about = About(
            task="digits", run="0" * 16, source="task.py:make_task", batch_size=BATCH_SIZE
        )
        create_run(self.run, about, model)

    @property
    def coordinator(self) -> ChildProcess:
        """The last one that was started."""
        return [each for each in self.started if each.name == "coordinator"][-1]

    @property
    def devices(self) -> list[ChildProcess]:
        return [each for each in self.started if each.name != "coordinator"]

    def start_coordinator(self, rule: str, *, min_devices: int = DEVICES, **length: int) -> None:
        # Deadlines that no device misses: who is late makes the run another one.
        tables: dict[str, dict[str, Any]] = {
            "task": {"name": "digits", "source": "task.py:make_task", "evaluation": "test.npz"},
            "run": {
                "folder": "run",
                "steps": STEPS,
                "batch_size": BATCH_SIZE,
                "seed": SEED,
                **asdict(LOCAL_RULE),
                **length,
            },
            "rule": {"name": rule},
            "round": {
                "min_devices": min_devices,
                "bid_s": 600,
                "train_deadline_s": 600,
                "rest_s": 0.1,
            },
        }
        text = "".join(f"[{name}]\n{_lines(values)}" for name, values in tables.items())
        config = self.folder / "run.toml"
        config.write_text(text + self._broker)
        self._start("coordinator", "tessera-coordinator", "serve", "--config", config)

    def start_devices(self) -> None:
        for member in self.members:
            folder = self.folder / member.name
            (folder / "data").mkdir(parents=True)
            np.savez(folder / "data/own.npz", x0=member.data.inputs[0], y=member.data.targets)
            config = folder / "device.toml"
            values = {"task": "digits", "name": member.name, "data": "data", "seed": SEED}
            values["tune"] = False  # what is fastest depends on the moment, and rounds differently
            policy = {key: getattr(member.policy, key) for key in kinds(Policy) if key != "limits"}
            config.write_text(_lines({**values, "state_dir": "state", **policy}) + self._broker)
            self._start(member.name, "tessera-device", "run", "--config", config)

    def stop_coordinator(self) -> None:
        coordinator = self.coordinator
        coordinator.process.terminate()
        assert coordinator.process.wait(HANGS_S) == EXIT_TERMINATED, coordinator.last_words()
        self.stop(coordinator)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; a program that failed is not waited for."""

        def holds() -> bool:
            failed = [each.name for each in self.started if each.failed]
            assert not failed, f"{failed} failed\n{self.last_words()}"
            return condition()

        until(holds, lambda: f"nothing more happens\n{self.last_words()}")

    def finish(self) -> list[dict[str, Any]]:
        """Wait until all programs have ended well; the run's history."""
        self.until(lambda: all(each.process.poll() == 0 for each in self.started))
        return self.history()

    def history(self) -> list[dict[str, Any]]:
        return list(read_history(self.run)) if is_run(self.run) else []

    def result(self) -> Checkpoint:
        with Run(self.run) as run:
            return run.latest()

    def last_words(self) -> str:
        return "\n".join(each.last_words() for each in self.started)

    def _start(self, name: str, program: str, *arguments: object) -> None:
        kept = {key: text for key, text in os.environ.items() if not key.startswith("TESSERA_")}
        command = [str(PROGRAMS / program), *map(str, arguments)]
        self.start(name, command, self.folder / f"{name}.log", {**kept, "TESSERA_WEIGH": "false"})


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with (
        embedded_broker(tmp_path / "broker", kind="mosquitto") as settings,
        Fleet(tmp_path, settings) as fleet,
    ):
        yield fleet


@pytest.fixture
def compiled(shared: Path, tmp_path: Path) -> SavedModel:
    """The task's model and graphs, compiled once."""

    def make(folder: Path) -> None:
        (tmp_path / "task.py").write_text(TASK_FILE)
        save_model(compile_task("task.py:make_task", tmp_path, batch_size=BATCH_SIZE), folder)

    return read_model(made_once(shared / "small-cnn", make))


def _lines(values: dict[str, Any]) -> str:
    """TOML, which spells these values as JSON does; None is left out."""
    given = {key: value for key, value in values.items() if value is not None}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())


def in_process(fleet: Fleet, rule: str, members: Sequence[Member]) -> Federation:
    """The same run in this process, from the model that the coordinator compiled."""
    fleet.until(lambda: is_run(fleet.run))
    made = read_model(fleet.run / MODEL)
    config = RoundsConfig(
        plan=made.plan,
        rule=RULES[rule](),
        masks=make_masks("coverage"),
        local_rule=LOCAL_RULE,
        rounds=ROUNDS,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        min_devices=DEVICES,
        seed=SEED,
    )
    return Federation(
        config,
        GlobalModel(made.plan, made.weights, made.buffers, seed=SEED),
        lambda: OnnxBackend(made.plan, made.manifest, made.files),
        members,
    )


def assert_bits(result: Checkpoint, model: GlobalModel) -> None:
    assert result.theta.tobytes() == model.theta.tobytes()
    assert result.buffers.keys() == model.buffers.keys()
    for name, buffer in model.buffers.items():
        assert result.buffers[name].tobytes() == buffer.tobytes(), name


def told(reports: Sequence[RoundReport]) -> list[list[tuple[object, ...]]]:
    return [
        [(d.device, d.level, d.reason, d.loss, d.bytes_up, d.replayed) for d in report.devices]
        for report in reports
    ]


def recorded(history: Sequence[dict[str, Any]]) -> list[list[tuple[object, ...]]]:
    names = ("device", "level", "reason", "loss", "bytes_up", "replayed")
    return [[tuple(d[name] for name in names) for d in entry["devices"]] for entry in history]


def test_synchronous_programs_end_with_the_bits_of_one_process(fleet: Fleet) -> None:
    fleet.start_coordinator("ram-fed", rounds=ROUNDS)
    fleet.start_devices()
    federation = in_process(fleet, "ram-fed", fleet.members)
    assert federation.model.plan.regions == "both"
    reports = list(federation.run())
    history = fleet.finish()
    assert [entry["round"] for entry in history] == list(range(1, ROUNDS + 1))
    assert recorded(history) == told(reports)
    assert [entry["oldest_memory"] for entry in history] == [r.oldest_memory for r in reports]
    assert_bits(fleet.result(), federation.model)


def test_programs_that_skip_are_heard_through_their_copies(
    fleet: Fleet, compiled: SavedModel
) -> None:
    fleet.adopt(compiled)
    fleet.start_coordinator("ccfl-1", rounds=ROUNDS)
    fleet.start_devices()
    federation = in_process(fleet, "ccfl-1", fleet.members)
    reports = list(federation.run())
    forgetful = [replace(m, policy=replace(m.policy, keeps_copy=False)) for m in fleet.members]
    unheard = in_process(fleet, "ccfl-1", forgetful)
    list(unheard.run())
    history = fleet.finish()
    lines = [device for entry in history for device in entry["devices"]]
    skipped = [line for line in lines if line["level"] is None]
    replayed = [line for line in lines if line["replayed"]]
    assert {line["device"] for line in skipped} == {
        member.name for member in fleet.members if member.policy.participation < 1
    }
    assert {line["device"] for line in replayed} == {line["device"] for line in skipped}
    assert all(line["level"] is None and line["bytes_up"] > 0 for line in replayed)
    assert recorded(history) == told(reports)
    assert_bits(fleet.result(), federation.model)
    assert federation.model.digest != unheard.model.digest


def test_asynchronous_programs_finish_and_all_contribute(
    fleet: Fleet, compiled: SavedModel
) -> None:
    fleet.adopt(compiled)
    updates = DEVICES * ASYNCHRONOUS_ROUNDS
    always = [replace(m, policy=replace(m.policy, participation=1.0)) for m in fleet.members]
    fleet.members = always
    # A run that waits for one device more than there are: all make ready, nobody begins. Whoever
    # is slow to start could else find that the others have done it all.
    fleet.start_coordinator("fed-raa", min_devices=DEVICES + 1, updates=updates)
    fleet.start_devices()
    fleet.until(lambda: all("onnx backend" in device.log.read_text() for device in fleet.devices))
    fleet.stop_coordinator()
    assert fleet.history() == []
    fleet.start_coordinator("fed-raa", updates=updates)
    history = fleet.finish()
    trained = [d for entry in history for d in entry["devices"] if d["level"] is not None]
    counts = [DEVICES * n for n in range(1, ASYNCHRONOUS_ROUNDS + 1)]
    assert [entry["round"] for entry in history] == counts
    assert len(trained) == updates
    assert {line["device"] for line in trained} == {member.name for member in fleet.members}
    result = fleet.result()
    assert result.version == updates
    assert result.counted.keys() == {member.name for member in fleet.members}
    # Ten classes, and at the start one guess in ten is right.
    assert history[-1]["accuracy"] > 0.4
    losses = [np.mean([line["loss"] for line in entry["devices"]]) for entry in history]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
