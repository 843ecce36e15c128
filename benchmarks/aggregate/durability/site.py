"""A coordinator on a faulty disk with devices in memory, which can be ended and started again.

The service and its course are the real ones; only the link, the clock and the devices are not.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.aggregate.durability.disk import DiskStep, Fault, FaultyDisk, Killed
from benchmarks.aggregate.durability.orders import ScriptedOperator, script
from benchmarks.aggregate.durability.wire import (
    CHUNK_BYTES,
    LEARNING_RATE,
    RUN,
    TASK,
    ScriptedDevice,
    Wire,
    outcomes,
)
from coordinator.aggregate.rules import ASYNC_RULES, RULES
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.checksums import checksum
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import CHUNKS, UPLOADS, About, Run, create_run, read_history
from coordinator.run.steering.audit import read_audit
from coordinator.service.courses.parts import make_model as model_of
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.task.saved_model import SavedModel
from edge_sdk import TesseraError
from edge_sdk.program.files import WaitForRoom, waiting_for_room
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.graphs import Manifest

ASYNCHRONOUS = ("fed-raa", "fedbuff")
STEERED = "steered"
"""The case of a run with ram-fed that an operator steers."""
BESIDE = "beside"
"""The case of a run with ram-fed whose commits are done beside the loop."""
CASES = ("ram-fed", "ccfl-2", *ASYNCHRONOUS, STEERED, BESIDE)
ROUNDS = 3
STEERED_ROUNDS = 4
"""Rounds of a run that an operator makes longer."""
UPDATES = 6
MOST_TURNS = 400
MOST_STARTS = 8

T = TypeVar("T")
Changing = frozenset({"time", "seconds"})
"""Parts of a line of history that no two runs share."""


class PutOff:
    """Does work beside the loop later, in the site's turns: what was begun last comes first.

    A step of the disk is a step of the one thread there is, whatever the order of the work.
    """

    def __init__(self) -> None:
        self._works: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._done: Callable[[], object] = lambda: None
        self._wait: WaitForRoom | None = None

    def attend(self, done: Callable[[], object], wait: WaitForRoom) -> None:
        """See `Aside`."""
        self._done, self._wait = done, wait

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """See `Aside`."""
        future: Future[T] = Future()
        self._works.append((work, future))
        return future

    def act(self) -> bool:
        """Do one work; True if there was any."""
        if not self._works:
            return False
        work, future = self._works.pop()
        try:
            with waiting_for_room(self._wait):
                future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # the process ends: nobody waits for the rest
            self._works.append((work, future))
            self.abandon(error)
            raise
        self._done()
        return True

    def abandon(self, error: BaseException) -> None:
        """Let all work fail that was not done."""
        works, self._works = self._works, []
        for _, future in works:
            future.set_exception(error)


class Stuck(Exception):
    """The run does not come to its end."""


@cache
def make_model(inputs: int = 4, groups: tuple[int, ...] = (2, 2, 1, 1)) -> SavedModel:
    """Return a model with a statistic, and without graphs: nobody trains it.

    Its hidden layer has these groups of units; the default is tiny.
    """
    units = sum(groups)
    plan = ModelPlan(
        axes=(Axis("hidden", groups),),
        tensors=(
            Tensor("w1", "float32", (Dim(units, 0), Dim(inputs))),
            Tensor("b1", "float32", (Dim(units, 0),)),
            Tensor("w2", "float32", (Dim(3), Dim(units, 0))),
        ),
        buffers=(Buffer("mean", "float32", (Dim(units, 0),), statistic=True),),
    )
    random = np.random.default_rng(3)
    weights = {
        tensor.name: np.asarray(random.normal(size=tensor.shape), dtype=np.float32)
        for tensor in plan.tensors
    }
    manifest = Manifest(
        plan_hash=plan.hash,
        opset=18,
        ir_version=9,
        min_onnxruntime="1.18.0",
        loss="cross-entropy",
        tolerance=0.0,
        data=DataSpec((ArraySpec("float32", (inputs,)),), ArraySpec("int64", ())),
        graphs=(),
    )
    return SavedModel(plan, weights, {"mean": np.zeros(units, dtype=np.float32)}, manifest, {})


def machine_of(case: str, plan: ModelPlan) -> RoundsConfig | FragmentsConfig:
    """Return the settings of a case."""
    common: dict[str, Any] = {
        "plan": plan,
        "local_rule": LocalRule(learning_rate=LEARNING_RATE),
        "steps": 50,
        "batch_size": 4,
        "seed": 7,
        "bid_s": 10.0,
        "train_deadline_s": 100.0,
    }
    if case in ASYNCHRONOUS:
        # Of six updates, the first two wait in one checkpoint and the last two move the model.
        rule = FedBuff(size=4, fragments=True) if case == "fedbuff" else ASYNC_RULES[case]()
        return FragmentsConfig(
            **common,
            rule=rule,
            masks=make_masks("gre-raa"),
            min_devices=2,
            updates=UPDATES,
        )
    return RoundsConfig(
        **common,
        rule=RULES["ram-fed" if case in (STEERED, BESIDE) else case](),
        masks=make_masks("random"),
        min_devices=4,
        min_participants=1,
        quorum=1.0,
        rounds=ROUNDS,
    )


def make_devices(case: str, wire: Wire, plan: ModelPlan, chunk_bytes: int) -> list[ScriptedDevice]:
    """Return the fleet of a case. In rounds, of every three

    - the first closes at its deadline: a movement is withheld, and enters memory in the second;
    - the second closes at its deadline too: that device skips, and another never sends, and skips
      from then on;
    - the third closes with the last movement.

    Nobody who kept a round waiting takes part in one that closes before: whether the round still
    waits for such a device is the coordinator's choice.
    """

    def device(name: str, value: float, **options: Any) -> ScriptedDevice:
        level = options.pop("level", lambda _: 1.0)
        return ScriptedDevice(wire, plan, name, value, level, chunk_bytes=chunk_bytes, **options)

    if case in ASYNCHRONOUS:
        return [device("a", 0.02), device("b", -0.03, level=lambda _: 0.5), device("c", 0.05)]
    return [
        device("a", 0.02),
        device("b", -0.03, level=lambda _: 0.5),
        device(
            "late",
            0.05,
            level=lambda number: 1.0 if number % 3 == 1 else None,
            withholds=lambda number: number % 3 == 1,
        ),
        device(
            "mute",
            0.04,
            level=lambda number: 0.5 if number <= 2 else None,
            mute=lambda number: number == 2,
        ),
    ]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything of a finished run that a crash must not change."""

    rounds: tuple[int, ...]
    """Numbers of the rounds in the history."""
    digest: str
    """SHA-256 of the last checkpoint's model."""
    history: tuple[dict[str, Any], ...]
    orders: tuple[tuple[str, dict[str, Any]], ...]
    """Orders of operators, as the audit has them, each once."""
    receipts: dict[str, dict[int, str]]


@dataclass(slots=True)
class CrashSite:
    """A run in a folder, with its devices. Processes of the coordinator follow one another."""

    case: str
    base: Path
    """An empty folder for the states of the disk."""
    faults: tuple[Fault | None, ...] = ()
    """The fault of each process; later ones have none."""
    looks: bool = False
    """True: note which cuts differ at every step."""
    model: SavedModel = field(default_factory=make_model)
    chunk_bytes: int = CHUNK_BYTES
    make_disk: Callable[..., FaultyDisk] = FaultyDisk
    now: float = 1000.0
    starts: int = 0
    deaths: list[str] = field(default_factory=list)
    """Ends of the processes that did not finish."""
    versions: dict[int, str] = field(default_factory=dict)
    """Digest of every version of the model that a process had, and of what waits to move it."""
    doubts: list[str] = field(default_factory=list)
    """Checkpoints with other bits than the same version had before, and receipts for nothing."""
    disks: list[FaultyDisk] = field(default_factory=list)
    operator: ScriptedOperator = field(init=False)
    wire: Wire = field(init=False)
    devices: list[ScriptedDevice] = field(init=False)
    _put_off: PutOff = field(default_factory=PutOff)

    def __post_init__(self) -> None:
        self.operator = ScriptedOperator(tuple(script()) if self.case == STEERED else ())
        self.wire = Wire(lambda _: None)
        plan, size = self.model.plan, self.chunk_bytes
        self.devices = make_devices(self.case, self.wire, plan, size)
        self.wire.devices += self.devices
        about = About(task=TASK, run=RUN, source="t.py:f", batch_size=4)
        create_run(self.folder, about, self.model)
        for each in self.devices:
            each.join()

    @property
    def folder(self) -> Path:
        """The folder of the current process."""
        return self.base / f"{self.starts}"

    @property
    def steps(self) -> list[DiskStep]:
        """Steps of the first process."""
        return self.disks[0].steps

    def run(self) -> RunResult:
        """Start processes until one finishes the run. Raises `Stuck`."""
        while self.starts < MOST_STARTS:
            fault = self.faults[self.starts] if self.starts < len(self.faults) else None
            if self._process(fault):
                return self._result()
        raise Stuck(f"{self.starts} processes ended before the run: {self.deaths}")

    def _process(self, fault: Fault | None) -> bool:
        """Run one process to its end; True if it finished the run."""
        left = self.base / f"{self.starts + 1}"
        disk = self.make_disk(
            self.folder,
            left,
            fault,
            looks=self.looks,
            emptied=(f"{CHUNKS}/", f"{UPLOADS}/"),
            on_kill=self._killed,
        )
        self.wire.note = lambda subject: disk.step("send", subject)
        self.disks.append(disk)
        try:
            with disk, self._opened() as service:
                self._check_start(service)
                self.operator.look(self.folder)
                self._turns(service, disk)
                finished = service.finished
                service.close()
            if finished:
                return True
            shutil.copytree(self.folder, left, symlinks=True)  # it stopped, as it was told to
        except Killed:
            self.deaths.append(f"killed at {disk.steps[-1]}")
        except (TesseraError, OSError) as error:
            # The process says why, and ends; what it leaves is what there is.
            self.deaths.append(f"{type(error).__name__}: {_chain(error)}")
            shutil.copytree(self.folder, left, symlinks=True)
            self.wire.end_link(unsent=False)
        finally:
            self.wire.note = lambda _: None
        self.starts += 1
        return False

    @contextmanager
    def _opened(self) -> Iterator[Service]:
        with Run(self.folder) as run:
            config = ServiceConfig(
                machine=machine_of(self.case, self.model.plan),
                down=Encoding(),
                keeping=Keeping(keep_last=2),
                chunk_bytes=self.chunk_bytes,
            )
            self._put_off = PutOff()
            service = Service(
                run,
                config,
                open_link=self.wire.open_link,
                clock=self._clock,
                wall=self._clock,
                watch=lambda _: self._note(service),
                room_s=0.0,
                aside=self._put_off if self.case == BESIDE else None,
            )
            try:
                yield service
            except BaseException as error:
                self._put_off.abandon(error)
                with suppress(BaseException):
                    service.kill()
                raise

    def _check_start(self, service: Service) -> None:
        """Compare an asynchronous run with what earlier processes made and said."""
        version, digest = _bits(service)
        if self.versions.setdefault(version, digest) != digest:
            self.doubts.append(f"version {version} has other bits in process {self.starts + 1}")
        state = service.course.state
        if isinstance(state, FragmentsState):
            self.versions = {n: each for n, each in self.versions.items() if n <= version}
            for device in self.devices:
                told = [n for n, words in device.receipts.items() if "counted" in words]
                if max(told, default=0) > state.counted.get(device.name, 0):
                    self.doubts.append(f"{device.name} has a receipt for an update that is gone")

    def _note(self, service: Service) -> None:
        """Note the model: whenever all have said something, and when a checkpoint is there."""
        self.versions.setdefault(*_bits(service))

    def _clock(self) -> float:
        return self.now

    def _killed(self, unsent: bool) -> None:
        self.wire.end_link(unsent=unsent)

    def _turns(self, service: Service, disk: FaultyDisk) -> None:
        """Let everybody talk until the run is finished and nobody has anything left to say.

        When all are silent, devices offer again what has no receipt, as they do after a while; only
        then does time pass, up to the next deadline.
        """
        offered = False
        for _ in range(MOST_TURNS):
            busy = self.wire.pass_on()
            busy = service.pump() > 0 or busy or bool(self.wire.waiting)
            busy = self._put_off.act() or busy
            if disk.dead:
                raise Killed
            self._note(service)
            busy = self.operator.act(service, idle=not busy) or busy
            if service.helm.stops:
                return
            if busy:
                continue
            disk.make_room()
            waiting = [each for each in self.devices if each.waiting]
            if waiting and not offered:
                offered = True
                for each in waiting:
                    each.offer_all()
            elif not service.finished:
                offered = False
                self.now += 101.0
            elif waiting:
                names = [each.name for each in waiting]
                raise Stuck(f"the run is over, and {names} have no receipt")
            else:
                return
        raise Stuck(f"{MOST_TURNS} turns without an end; {service.course.waits_for}")

    def _result(self) -> RunResult:
        with Run(self.folder) as run:
            digest = model_of(run.plan, run.latest(), Encoding(), 0).digest
        lines = list(read_history(self.folder))
        history = [line for line in lines if "steered" not in line]
        audit = [(each["what"], each["details"]) for each in read_audit(self.folder)]
        told = [(e["what"], e["details"]) for e in (x.get("steered") for x in lines) if e]
        if told != audit:
            self.doubts.append(f"the history has the orders {told}, and the audit {audit}")
        return RunResult(
            rounds=tuple(line["round"] for line in history),
            digest=digest,
            history=tuple(_steady(line) for line in history),
            orders=tuple(audit),
            receipts=outcomes(self.devices),
        )


def _bits(service: Service) -> tuple[int, str]:
    """Return the number of updates or changes of the model, and a digest of all that they made."""
    model, state = service.model, service.course.state
    version = state.version if isinstance(state, FragmentsState) else model.version
    waiting = b"" if model.pending is None else checksum(model.pending.total.data)
    return version, model.digest + waiting.hex()


def _steady(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of history without what no two runs share, nor the words of refusals."""
    steady = {name: value for name, value in line.items() if name not in Changing}
    refusals = [{**each, "reason": ""} for each in line.get("refusals", ())]
    return {**steady, "refusals": refusals}


def _chain(error: BaseException) -> str:
    said = str(error)
    return said if error.__cause__ is None else f"{said} ← {_chain(error.__cause__)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing: thousands of crashes say little."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
