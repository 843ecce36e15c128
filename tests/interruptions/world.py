"""A small federation of real programs to interrupt: Mosquitto, coordinator, devices, proxies.

    def test_device_killed_while_it_trains(worlds: Worlds) -> None:
        \"\"\"What was done, for the matrix.\"\"\"
        world = worlds.make(devices=("one", "two"), rounds=3, steps=4000)
        world.start()
        one = world.device("one")
        one.wait_for("training", round=2)
        one.kill()
        one.start()
        outcome = world.finish()                the checks of every case, see there
        world.expect_undisturbed()              all was counted once: the same bits
        world.note("round 2 was trained again")         for the matrix

- Every device reaches the broker through a proxy of its own, `world.proxy(name)` (`proxy.py`: cut,
  delay, throttle, blackhole, hold or change single messages); the coordinator through
  `world.proxy("coordinator")`.
- Programs are waited on by the lines of their JSON logs (`programs.py`):
  `program.wait_for(event, match=…, **facts)`; `find` lists lines, `after=line` looks behind one.
  There is no sleeping.
- "While it trains" is `world.trains_on(name)` and `wait_for("training")`; "in the middle of an
  upload" is `proxy.hold(topic_ends("/chunk"), after=5)` and its `wait`; "between upload and
  receipt" is a hold on the receipt (`is_message(Receipt)`).
- The task is scikit-learn's digits with a model of 64-`units`-10; a movement of the whole model has
  300 × `units` bytes, in chunks of `chunk_bytes`.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregate.model import PLAIN
from coordinator.operate.taskfile import compile_task
from coordinator.run.folder import About, Run, create_run, read_history
from coordinator.service.courses.parts import make_model
from coordinator.task.saved_model import read_model, save_model
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.topics import parse_topic
from edge_sdk.protocol.messages.wire import decode_message, decode_stamped, encode_message
from tests.interruptions.programs import Mosquitto, Program
from tests.interruptions.proxy import Match, Packet, Proxy
from tests.waiting import locked, made_once

TASK = "digits"
COORDINATOR = "coordinator"
SAMPLES, INPUTS, CLASSES = 60, 64, 10
BATCH_SIZE = 8
SEED = 5

TASK_FILE = """\
import torch
from coordinator.task.task import make_task

def digits():
    torch.manual_seed(1)
    layers = torch.nn.Linear(64, {units}), torch.nn.Tanh(), torch.nn.Linear({units}, 10)
    return make_task(torch.nn.Sequential(*layers), torch.zeros(2, 64), groups=4)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a world is made of. Equal ones give equal models, if every device is always counted."""

    devices: tuple[str, ...] = ("one", "two")
    rounds: int = 3
    steps: int = 3
    units: int = 64
    chunk_bytes: int = 4096
    persistent: bool = True
    keepalive_s: int = 10
    rule: str = "ram-fed"
    asynchronous: bool = False
    bid_s: float = 600.0
    train_s: float = 600.0
    """Deadlines that nobody misses: who is late makes the run another one."""
    evaluate_every: int = 0
    round: dict[str, Any] = field(default_factory=dict)
    """More of the coordinator's [round] table."""

    @property
    def key(self) -> str:
        """Names what the model depends on."""
        return f"{'-'.join(self.devices)}.{self.rounds}.{self.steps}.{self.units}.{self.rule}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run."""

    rounds: list[int]
    """Their numbers, as the history has them."""
    counted: dict[int, list[str]]
    """For every round, whose movement counted."""
    receipts: dict[str, Counter[str]]
    """For every device, how often it was told which outcome."""

    @property
    def movements(self) -> int:
        """How many counted."""
        return sum(map(len, self.counted.values()))


class World:
    """One federation in one folder. Everything has ended after `close`."""

    def __init__(self, folder: Path, setup: Setup, shared: Path) -> None:
        """`shared`: where compiled models and results of undisturbed runs are kept."""
        self.folder = folder
        self.setup = setup
        self.notes: list[str] = []
        self._shared = shared
        self._proxies: dict[str, Proxy] = {}
        self._programs: dict[str, Program] = {}
        self._run_name = "run"
        self.broker = Mosquitto(folder / "broker", persistent=setup.persistent)
        self.run_id = secrets.token_hex(8)
        self._make_run()
        self._config.write_text(self._run_toml("task.py:digits"))
        self._programs[COORDINATOR] = self._make_coordinator()
        for name in setup.devices:
            self.add_device(name)

    # -- the parts --------------------------------------------------------------------------

    @property
    def run_folder(self) -> Path:
        return self.folder / self._run_name

    @property
    def _config(self) -> Path:
        return self.run_folder.with_suffix(".toml")

    @property
    def coordinator(self) -> Program:
        return self._programs[COORDINATOR]

    @property
    def devices(self) -> list[Program]:
        return [self._programs[name] for name in self.setup.devices]

    def device(self, name: str) -> Program:
        return self._programs[name]

    def proxy(self, name: str) -> Proxy:
        """What stands between a program and the broker."""
        if name not in self._proxies:
            self._proxies[name] = Proxy(self.broker.port)
        return self._proxies[name]

    def add_device(self, name: str, *, state: str = "", program: str = "") -> Program:
        """A device that is not started yet. `state`: with a state folder of this name; `program`:
        what the program is called here, if there is one of this name already.
        """
        own = self.folder / (program or name)
        (own / "data").mkdir(parents=True)
        random = np.random.default_rng([SEED, *name.encode()])
        x = random.random((SAMPLES, INPUTS), dtype=np.float32)
        np.savez(own / "data" / "own.npz", x=x, y=random.integers(0, CLASSES, SAMPLES))
        port = self.proxy(program or name).port
        state_dir = self.folder / (state or name) / "state"
        values = {
            "task": TASK,
            "name": name,
            "data": "data",
            "state_dir": str(state_dir),
            "seed": SEED,
            "evaluate_every": self.setup.evaluate_every,
            "log_format": "json",
        }
        broker = {"port": port, "keepalive_s": self.setup.keepalive_s}
        (own / "device.toml").write_text(_toml(values) + "[broker]\n" + _toml(broker))
        made = Program(
            program or name,
            ["edge_sdk.cli", "run", "--config", str(own / "device.toml")],
            self.folder / f"{program or name}.log",
        )
        self._programs[program or name] = made
        return made

    def without_proxy(self, name: str) -> None:
        """Let a program that is not started yet reach the broker directly: a flood is for it, and
        the proxy would be what gives in.
        """
        path = self.folder / ("run.toml" if name == COORDINATOR else f"{name}/device.toml")
        through, text = f"port = {self.proxy(name).port}\n", path.read_text()
        assert through in text
        path.write_text(text.replace(through, f"port = {self.broker.port}\n"))

    def trains_on(self, name: str) -> None:
        """Let a device be told to take so many steps that it trains until it is stopped, or until
        its proxy has no `tamper` any more and it is told again.
        """

        def lengthen(packet: Packet) -> list[Packet]:
            if not is_message(RoundOpen)(packet):
                return [packet]
            opened, epoch = decode_stamped(parse_topic(packet.topic), packet.payload)
            assert isinstance(opened, RoundOpen)
            return [packet.with_payload(encode_message(replace(opened, steps=10**9), epoch))]

        self.proxy(name).tamper = lengthen

    def heard(self, kind: type[Any], **fields: Any) -> None:
        """Wait until the broker has sent a message on to the coordinator."""
        proxy, match = self.proxy(COORDINATOR), is_message(kind, **fields)
        proxy.wait_for(lambda: any(p.direction == "down" and match(p) for p in proxy.passed))

    def state_dir(self, name: str) -> Path:
        """What a device keeps."""
        return self.folder / name / "state" / TASK / name

    def start(self) -> None:
        """Start everything."""
        self.broker.start()
        self.coordinator.start()
        for device in self.devices:
            device.start()

    def copy_run(self, *flags: str, new: bool = False) -> Program:
        """Copy the run's folder, and return a coordinator for the copy, which is not started. It
        is the coordinator of the world from now on; the other one is called `first`. `new`: for a
        new run of the task in place of a copy.
        """
        old, self._run_name = self.run_folder, f"{self._run_name}-next"
        if new:
            self.run_id = secrets.token_hex(8)
            self._make_run()
        else:
            shutil.copytree(old, self.run_folder, ignore=shutil.ignore_patterns("*.sock"))
        self._config.write_text(self._run_toml("task.py:digits"))
        self._programs.setdefault("first", self.coordinator)
        self._programs[COORDINATOR] = self._make_coordinator(*flags)
        return self.coordinator

    def _make_coordinator(self, *flags: str) -> Program:
        command = ["coordinator.cli", "serve", "--log-format", "json", *flags, "--config"]
        return Program(
            COORDINATOR,
            [*command, str(self._config)],
            self.folder / "coordinator.log",
        )

    def replace_run(self, **changes: Any) -> None:
        """Let the coordinator, which must have ended, begin a new run; `changes` of the `Setup`."""
        self.setup = replace(self.setup, **changes)
        self._config.write_text(self._run_toml("task.py:digits"))
        self.run_folder.rename(self.folder / f"run-{self.run_id}")
        self.run_id = secrets.token_hex(8)
        self._make_run()

    def _make_run(self) -> None:
        about = About(task=TASK, run=self.run_id, source="task.py:digits", batch_size=BATCH_SIZE)
        create_run(self.run_folder, about, read_model(compiled(self.setup.units, self._shared)))

    # -- the end ----------------------------------------------------------------------------

    def finish(self, *, codes: dict[str, int] | None = None, whole_log: bool = True) -> Outcome:
        """Wait for the end, and check what must be true of every run.

        Every round is finished; nobody counts twice in one; every receipt `counted` that a device
        was given is in the history; all programs that run exit with 0. `codes`: with which others
        end instead. Not `whole_log`: the coordinator was killed at any instruction, perhaps just
        before it logged what it had done.
        """
        wanted = {name: (codes or {}).get(name, 0) for name in self._programs}
        for name, program in self._programs.items():
            if program.process is not None:
                code = program.wait()
                assert code == wanted[name], f"{name} ended with {code}\n{self.logs()}"
        outcome = self.outcome()
        # An asynchronous run counts updates, and has a line for every few of them.
        done = outcome.rounds[-1:] if self.setup.asynchronous else [len(outcome.rounds)]
        assert done == [self.setup.rounds], f"{outcome}\n{self.logs()}"
        assert len(set(outcome.rounds)) == len(outcome.rounds)
        said = self.counted_by_the_coordinator()
        assert len(set(said)) == len(said), f"counted twice: {said}\n{self.logs()}"
        if self.setup.asynchronous and whole_log:
            assert len(said) == self.setup.rounds, f"{len(said)} updates\n{self.logs()}"
        self._check_receipts(outcome, whole_log=whole_log)
        for program in self._programs.values():
            broken = [line for line in program.lines if "exception" in line.content]
            assert not broken, f"{program.name} failed inside: {broken[0].content['exception']}"
        return outcome

    def outcome(self) -> Outcome:
        """What became of the run so far."""
        entries = [each for each in read_history(self.run_folder) if "round" in each]
        return Outcome(
            rounds=[entry["round"] for entry in entries],
            counted={
                entry["round"]: [
                    device["device"] for device in entry["devices"] if device["loss"] is not None
                ]
                for entry in entries
            },
            receipts={
                name: Counter(
                    str(line.content["outcome"]) for line in self.device(name).find("receipt")
                )
                for name in self.setup.devices
            },
        )

    def counted_by_the_coordinator(self) -> list[tuple[str, int]]:
        """Device and round of every movement that it said it counted."""
        lines = self.coordinator.find("movement", match="counted")
        return [(line.content["device"], line.content["round"]) for line in lines]

    def digest(self) -> str:
        """SHA-256 of the last checkpoint's model."""
        with Run(self.run_folder) as run:
            return str(make_model(run.plan, run.latest(), PLAIN, 0).digest)

    def expect_undisturbed(self) -> None:
        """Fail unless the model is that of the same run without any interruption, bit for bit."""
        path = self._shared / f"digest.{self.setup.key}"
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                folder = self._shared / f"undisturbed.{self.setup.key}"
                folder.mkdir()
                with made(World(folder, self.setup, self._shared)) as world:
                    world.start()
                    world.finish()
                    path.write_text(world.digest())
        same = self.digest() == path.read_text()
        assert same, f"the model is another than without interruption\n{self.logs()}"
        self.note("model as without interruption, bit for bit")

    def note(self, text: str) -> None:
        """Something that the matrix is to say of this case, beside `Outcome`."""
        self.notes.append(text)

    def logs(self) -> str:
        """The last lines of all programs."""
        return "\n".join(program.tail() for program in self._programs.values())

    def close(self) -> None:
        """End everything that runs."""
        for program in self._programs.values():
            program.end()
        self.broker.kill()
        for proxy in self._proxies.values():
            proxy.close()

    def _check_receipts(self, outcome: Outcome, *, whole_log: bool) -> None:
        by_devices = {
            (name, line.content["round"])
            for name in self.setup.devices
            for line in self.device(name).find("receipt", outcome="counted")
            if line.content["run"] == self.run_id
        }
        lost = by_devices - set(self.counted_by_the_coordinator()) if whole_log else set()
        if not self.setup.asynchronous:  # whose history does not tell rounds of devices
            counted = {(name, round) for round, names in outcome.counted.items() for name in names}
            lost |= by_devices - counted
        most = self.setup.rounds * (1 if self.setup.asynchronous else len(self.setup.devices))
        assert len(by_devices) <= most, f"{len(by_devices)} receipts, {most} counted"
        assert not lost, f"receipts for what did not count: {lost}\n{self.logs()}"

    def _run_toml(self, source: str) -> str:
        setup = self.setup
        length = "updates" if setup.asynchronous else "rounds"
        tables: dict[str, dict[str, Any]] = {
            "task": {"name": TASK, "source": source},
            "run": {
                "folder": self._run_name,
                length: setup.rounds,
                "steps": setup.steps,
                "batch_size": BATCH_SIZE,
                "seed": SEED,
                **({} if setup.asynchronous else {"grow": 0.0}),  # uploads of one size
            },
            "rule": {"name": setup.rule},
            "round": {
                "min_devices": len(setup.devices),
                # Nobody is left out, so that the model is the same however long it takes.
                "min_participants": len(setup.devices),
                "away_s": setup.train_s,
                "bid_s": setup.bid_s,
                "train_deadline_s": setup.train_s,
                **setup.round,
            },
            "broker": {
                "port": self.proxy(COORDINATOR).port,
                "chunk_bytes": setup.chunk_bytes,
                "keepalive_s": setup.keepalive_s,
                "probe": False,
            },
        }
        return "".join(f"[{name}]\n{_toml(values)}" for name, values in tables.items())


class Worlds:
    """Makes worlds for a test, and ends them."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self._folder = folder
        self._shared = shared
        self.made: list[World] = []

    def make(self, **changes: Any) -> World:
        """A world; `changes` are those of `Setup`."""
        folder = self._folder / f"world{len(self.made)}"
        folder.mkdir()
        world = World(folder, Setup(**changes), self._shared)
        self.made.append(world)
        return world

    def close(self) -> None:
        """End all of them."""
        for world in self.made:
            world.close()


@contextmanager
def made(world: World) -> Iterator[World]:
    """A world that has ended afterwards."""
    try:
        yield world
    finally:
        world.close()


# -- messages that pass a proxy ------------------------------------------------------------------


def is_message(*kinds: type[Any], **fields: Any) -> Match:
    """Control messages of these types with these values."""

    def match(packet: Packet) -> bool:
        try:
            message = decode_message(packet.payload)
        except MessageError:
            return False
        return isinstance(message, kinds) and all(
            getattr(message, name) == value for name, value in fields.items()
        )

    return match


def upload_chunks(packet: Packet) -> bool:
    """Chunks that a device uploads."""
    return packet.direction == "up" and packet.topic.endswith("/chunk") and "/up/" in packet.topic


def model_chunks(packet: Packet) -> bool:
    """Chunks that a device fetches."""
    return packet.direction == "down" and "/chunk/" in packet.topic and bool(packet.payload)


def indices(packets: Iterable[Packet]) -> list[int]:
    """The numbers of the chunks of uploads among messages."""
    return [
        int.from_bytes(each.payload[16:20], "little") for each in packets if upload_chunks(each)
    ]


# -- what is made once ---------------------------------------------------------------------------


def compiled(units: int, shared: Path) -> Path:
    """A folder with the task's model and graphs, compiled once."""

    def make(folder: Path) -> None:
        source = shared / f"task{units}.py"
        source.write_text(TASK_FILE.format(units=units))
        save_model(compile_task(f"{source}:digits", shared, batch_size=BATCH_SIZE), folder)

    return made_once(shared / f"model.{units}", make)


def _toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
