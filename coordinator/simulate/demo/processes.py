"""The demo as processes: a broker, `tessera-coordinator serve`, and a `tessera-device run` each.

One temporary folder holds all their files, and everything is removed when the run ends:

    task.py, run.toml, test.npz   input of the coordinator
    run/                          its state; the demo follows rounds through its history
    <device>/                     device.toml, data/own.npz, and the device's state, such as
                                  the story of its emulation
    *.log                         output of each program

Devices, data, seeds and random streams are those of the demo in one process, so a synchronous
rule ends with the same bits.

Nothing is left behind: a signal to stop takes effect once everything is stopped and removed, and
on Linux the programs end even if this one is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from coordinator.aggregate.model import PLAIN, GlobalModel
from coordinator.aggregate.pairings import check_pairing, fragment_advice
from coordinator.aggregate.rules import AsyncRule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.operate.serve.serving import broker_table
from coordinator.rounds.report import DeviceRound, LevelReport, RoundReport
from coordinator.run.folder import MODEL, Run, RunError, is_run, read_history
from coordinator.service.courses.parts import make_model
from coordinator.simulate.demo.config import DemoConfig
from coordinator.simulate.demo.digits import deal, load_digits
from coordinator.simulate.demo.emulated import choose_members, emulate_all, moment_of
from coordinator.simulate.demo.run import (
    BATCH_SIZE,
    STEPS,
    DemoRound,
    Ledger,
    choose_masks,
    choose_policies,
    demo_task,
    local_rule,
)
from coordinator.task.graphs.child import locate
from coordinator.task.levels import LevelScores
from coordinator.task.saved_model import SavedModel, read_model, save_model
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.emulation.emulation import STORY, Moment, read_story
from edge_sdk.decide.emulation.fleet import load_fleet
from edge_sdk.program.processes import Children
from edge_sdk.program.settings import PREFIX
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.settings import BrokerSettings

log = logging.getLogger(__name__)

TASK = "digits"
RUN, COORDINATOR = "run", "coordinator"
CONFIG, DEVICE_CONFIG, TEST = "run.toml", "device.toml", "test.npz"
STATE = "state"
BID_S = 60.0
"""Seconds to wait for bids; long, because a late device on a busy machine would change the run."""
POLL_S = 0.1

TASK_FILE = """\
from pathlib import Path

from coordinator.simulate.demo.run import demo_task


def make_task():
    return demo_task(seed={seed!r}, init={init})
"""


class ProcessDemo:
    """A run of programs. They run while `run()` is iterated over, and end when it is closed."""

    def __init__(self, config: DemoConfig) -> None:
        """Raises `ConfigError` for options that the programs do not support."""
        for refused, option, reason in (
            (config.backend != "onnx", "--backend torch", "programs train with onnx"),
            (
                config.memory is not None,
                "--memory",
                "each program keeps its memory in its run's folder",
            ),
            (config.threads != 1, "--threads", "programs train at the same time anyway"),
        ):
            if refused:
                raise ConfigError(f"{option} is for --in-process: {reason}")
        if config.init is not None and not config.init.is_file():
            raise ConfigError(f"cannot read weights: {config.init} is not a file")
        rule, self.config = choose_masks(config)
        masks = make_masks(str(self.config.mask), **config.mask_options)
        check_pairing(rule, masks, config.up, local_rule(config).widths)
        if not available():
            raise ConfigError(
                "no broker is installed: install mosquitto (apt install mosquitto, brew "
                "install mosquitto) or pip install 'tessera-fl[broker]', or add --in-process"
            )
        if config.mask_options.get("fragments") == "tied":  # else they leave out nothing
            log.warning("%s", fragment_advice(masks, demo_task(config.seed, None).plan))
        self.rounds: list[DemoRound] = []
        self._asynchronous = isinstance(rule, AsyncRule)
        digits = load_digits(config.seed)
        self.fleet = load_fleet(config.fleet)
        self._members = choose_members(self.fleet, config.devices)
        self._policies = choose_policies(config, self._members)
        self._shares = deal(digits.train, tuple(self._members), config.seed)
        self._ledger: Ledger | None = None
        self._test = digits.test
        self._initial: SavedModel | None = None
        self._result: GlobalModel | None = None
        self._levels = LevelScores()

    @property
    def initial(self) -> SavedModel:
        """The model before the first round. Raises `RunError` until that has closed."""
        if self._initial is None:
            raise RunError("the run ended before its first round closed")
        return self._initial

    @property
    def plan(self) -> ModelPlan:
        """Plan of the trained model. Raises `RunError` before the first round."""
        return self.initial.plan

    @property
    def test_samples(self) -> int:
        """Number of digits on which accuracy is measured."""
        return len(self._test)

    @property
    def digest(self) -> str:
        """SHA-256 of the last checkpoint's model. Raises `RunError` before the end of `run`."""
        return self._ended.digest

    @property
    def repeatable(self) -> bool:
        """False if the rule is asynchronous: there the order of devices matters."""
        return not self._asynchronous

    def save(self, path: Path) -> None:
        """Save the last checkpoint's model in a new folder."""
        ended = self._ended
        saved = replace(
            self.initial, weights=ended.weights, buffers=ended.buffers, levels=self._levels
        )
        save_model(saved.with_statistics(), path)

    def run(self) -> Generator[DemoRound]:
        """Start everything, yield every round as it closes, stop everything. Main thread only.

        Raises `RunError` when the coordinator or the devices end early, `BrokerStartError` when no
        broker can be started, and on signals like `signals_noted`.
        """
        prefix = "tessera-demo-"
        with signals_noted() as noted, TemporaryDirectory(prefix=prefix) as temporary:
            folder = Path(temporary)
            try:
                with embedded_broker(folder / "broker") as settings, Children() as children:
                    self._write(folder, settings)
                    coordinator = ["coordinator.cli", "serve", "--config", str(folder / CONFIG)]
                    _start(children, COORDINATOR, coordinator, folder)
                    for name in self._members:
                        if noted:
                            return
                        config = folder / name / DEVICE_CONFIG
                        device = ["edge_sdk.cli", "run", "--config", str(config)]
                        _start(children, name, device, folder)
                    yield from self._follow(folder, children, noted)
            finally:
                self._read_result(folder / RUN)

    @property
    def _ended(self) -> GlobalModel:
        if self._result is None:
            raise RunError("there is no result until the run ends")
        return self._result

    # -- input of the programs --------------------------------------------------------------

    def _write(self, folder: Path, settings: BrokerSettings) -> None:
        """Write every file that the programs read."""
        config = self.config
        init = "None" if config.init is None else f"Path({str(config.init.absolute())!r})"
        (folder / "task.py").write_text(TASK_FILE.format(seed=config.seed, init=init))
        _write_data(folder / TEST, self._test)
        (folder / CONFIG).write_text(self._run_toml() + broker_table(settings))
        for name in self._members:
            own = folder / name
            (own / "data").mkdir(parents=True)
            _write_data(own / "data" / "own.npz", self._shares[name])
            text = self._device_toml(name) + broker_table(settings)
            (own / DEVICE_CONFIG).write_text(text, encoding="utf-8")

    def _device_toml(self, name: str) -> str:
        config, member = self.config, self._members[name]
        own = {
            "task": TASK,
            "name": name,
            "data": "data",
            "state_dir": STATE,
            "seed": config.seed,
            "weigh": config.weigh,
            "level": self._policies[name].level,
            "levels": list(self._policies[name].levels),
            "deliver": "off",  # energy and bytes are those of training
        }
        emulate = {"fleet": str(config.fleet.absolute()), "member": member.name}
        return _lines(own) + _table("emulate", emulate)

    def _run_toml(self) -> str:
        config, devices = self.config, self.config.devices
        length = {"rounds": config.rounds}
        if self._asynchronous:
            length = {"updates": config.rounds * devices}
        run = {
            "folder": RUN,
            **length,
            "steps": STEPS,
            "batch_size": BATCH_SIZE,
            **asdict(local_rule(config)),
            "clip_norm": local_rule(config).clip_norm or 0,
            "grow": config.grow,
            "max_staleness": config.max_staleness,
            "seed": config.seed,
            "up": str(config.up),
            "down": str(config.down),
            "memory_type": config.memory_type,
            "robust": config.robust,
        }
        task = {"name": TASK, "source": "task.py:make_task", "evaluation": TEST}
        return "".join(
            [
                _table("task", task),
                _table("run", run),
                _table("rule", {"name": config.rule}),
                _table("rule.options", config.rule_options),
                _table("robust", config.robust_options),
                _table("mask", {"name": locate(str(config.mask), Path.cwd())}),
                _table("mask.options", config.mask_options),
                _table(
                    "round",
                    {
                        "min_devices": devices,
                        "min_participants": 0,  # a round in which all skip counts
                        "bid_s": BID_S,
                        "train_deadline_s": self.fleet.deadline_s,
                        "target_accuracy": config.target_accuracy,
                        "patience": config.patience,
                    },
                ),
            ]
        )

    # -- output of the programs -------------------------------------------------------------

    def _follow(
        self,
        folder: Path,
        children: Children,
        noted: Sequence[signal.Signals],
    ) -> Iterator[DemoRound]:
        """Yield every round as it closes, until the end or a signal. Raises `RunError`."""
        coordinator, *devices = children.started
        while not noted:
            ended = not coordinator.is_running  # checked first: no round is missed
            yield from self._closed_since(folder)
            if ended and not coordinator.failed:
                return
            if ended:
                raise RunError(f"the demo cannot continue: {coordinator.last_words()}")
            failed = [device for device in devices if device.failed]
            # The first round waits for all devices; later ones continue with those that are left.
            if failed and (not self.rounds or len(failed) == len(devices)):
                raise RunError(f"the demo cannot continue: {failed[0].last_words()}")
            time.sleep(POLL_S)

    def _closed_since(self, folder: Path) -> Iterator[DemoRound]:
        """Yield the rounds in the history that are not in `rounds` yet."""
        run = folder / RUN
        if not is_run(run):
            return
        for entry in list(read_history(run))[len(self.rounds) :]:
            if self._initial is None or self._ledger is None:
                self._initial = read_model(run / MODEL)
                self._ledger = self._new_ledger(self._initial.plan)
            report = _read_report(entry)
            # Devices may already be in the next round; asynchronous ones have their own rounds.
            until = None if self._asynchronous else report.round
            stories = {name: _read_story(folder, name) for name in self._members}
            moments = {
                name: moment
                for name, story in stories.items()
                if (moment := moment_of(story, until)) is not None
            }
            if self._asynchronous:  # its history counts updates
                report = replace(report, round=-(-report.round // self.config.devices))
            done = self._ledger.close(report, moments)
            self.rounds.append(done)
            yield done

    def _new_ledger(self, plan: ModelPlan) -> Ledger:
        samples = {name: len(share) for name, share in self._shares.items()}
        emulations = emulate_all(self.fleet, self._members)
        return Ledger(plan, local_rule(self.config), emulations, samples)

    def _read_result(self, run: Path) -> None:
        if self._initial is None:
            return
        with Run(run) as opened:
            checkpoint = opened.latest()
            self._result = make_model(opened.plan, checkpoint, PLAIN, self.config.seed)
        self._levels = checkpoint.levels


@contextmanager
def signals_noted() -> Iterator[Sequence[signal.Signals]]:
    """Collect signals that ask to stop. They take effect when the context is left.

    Then SIGINT raises `KeyboardInterrupt`, the others `SystemExit` with a shell's exit code.
    """
    noted: list[signal.Signals] = []
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Ignored signals stay ignored: the program may run in the background or under nohup.
    before = {each: signal.getsignal(each) for each in asking}
    before = {each: handler for each, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for each in before:
            signal.signal(each, lambda number, _: noted.append(signal.Signals(number)))
        yield noted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if noted and noted[0] != signal.SIGINT:
            raise SystemExit(128 + noted[0])
        if noted:
            raise KeyboardInterrupt


def _start(children: Children, name: str, command: Sequence[str], folder: Path) -> None:
    # Environment variables override files, and would be the same for all.
    environment = {key: text for key, text in os.environ.items() if not key.startswith(PREFIX)}
    environment["TMPDIR"] = str(folder)  # so that leftovers of a killed program are removed too
    command = [sys.executable, "-m", *command]
    children.start(name, command, folder / f"{name}.log", environment)


def _read_story(folder: Path, name: str) -> list[Moment]:
    return read_story(folder / name / STATE / TASK / name / STORY)


def _table(name: str, values: Mapping[str, Any]) -> str:
    return f"[{name}]\n{_lines(values)}\n"


def _lines(values: Mapping[str, Any]) -> str:
    """Write keys and values as TOML, whose syntax here equals JSON's; None is left out."""
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in values.items()
        if value is not None
    )


def _write_data(path: Path, data: ArrayData) -> None:
    inputs: dict[str, Any] = {f"x{number}": array for number, array in enumerate(data.inputs)}
    np.savez(path, y=data.targets, **inputs)


def _read_report(entry: Mapping[str, Any]) -> RoundReport:
    """Read a round's report from a line of the history."""
    known = [each.name for each in fields(RoundReport)]
    values = {name: entry[name] for name in known if name in entry}  # older lines have fewer
    values["devices"] = tuple(DeviceRound(**device) for device in entry["devices"])
    values["levels"] = tuple(LevelReport(**level) for level in entry.get("levels", ()))
    return RoundReport(**values)
