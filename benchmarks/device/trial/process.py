"""Code that runs in the fresh processes of `benchmarks.device.measure`; each prints JSON.

    predict    calibrate a family, and predict every level with the SDK's cost model
    case       train rounds at one level; time, memory, energy, heat
    learn      train one level on real data; the accuracy after every round

It imports only what a device needs, and torch only if it is the backend.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.device.kit import CHUNK_BYTES
from benchmarks.device.trial.providers import provider_of
from benchmarks.device.trial.trainee import RULE, Times, Took, Trainee, onnx_backend, torch_backend
from edge_sdk.decide.costs.calibration import LIMIT_S, calibrate
from edge_sdk.decide.costs.model import CostModel
from edge_sdk.decide.costs.work import largest_groups, work_at
from edge_sdk.machine.energy import EnergyMeter, probed_watts
from edge_sdk.machine.probe import LocalProbe, choose_probe
from edge_sdk.machine.resident import peak_resident_bytes, resident_bytes
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding, available_encodings
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.packs.index import encode_index, pack_model
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.streams import stream

if TYPE_CHECKING:
    from edge_sdk.train.backend import Backend

ENCODINGS = ("fp32", "fp16", "int8", "int8+zstd", "top-k:0.1")
SENSOR_PERIOD_S = 0.06
"""Seconds between readings of watts: including the reading itself, more than 10 per second."""
HEAT_PERIOD_S = 0.25
PROCESSOR = re.compile(r"cpu|soc|tj|pkg|core", re.IGNORECASE)
"""Pattern in names of zones that give the processor's temperature."""
SETTLE_S = 5.0
"""Time for commands such as nvpmodel."""
LEARNING_RULE = LocalRule(learning_rate=0.1, momentum=0.5, rescale=0)
"""The submodel stands alone, so nothing is scaled to the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Request to a process; one JSON object on its command line."""

    folder: str
    """Folder of the family, in a kit."""
    backend: str
    threads: int
    levels: tuple[float, ...]
    batch: int
    steps: int
    rounds: int = 1
    burst_s: float = 0.0
    calibrate_s: float = LIMIT_S
    disk: str | None = None
    """Folder for movements; None: that of temporary files."""
    root: str = "/"
    """Root of the sensors' files."""
    idle_w: float | None = None
    sized: bool = False
    """True if the bytes of every encoding are wanted too."""
    data: str | None = None
    """A file of arrays x, y, test_x, test_y, to learn from."""

    def text(self) -> str:
        """Return the text for `asked`."""
        return json.dumps(asdict(self))

    def trainee(self) -> Trainee:
        """Make the trainee with its backend."""
        disk = None if self.disk is None else Path(self.disk)
        return Trainee(Path(self.folder), self._backend, disk)

    def _backend(self, trainee: Trainee) -> Backend:
        if self.backend == "torch":
            return torch_backend(trainee, self.threads)
        return onnx_backend(trainee, self.threads, provider_of(self.backend))

    def probe(self) -> LocalProbe:
        """Make a probe below the root; sensors that are programs have answered."""
        probe = choose_probe(Path(self.root))
        probe.snapshot()
        probe.settle(SETTLE_S)
        return probe


def asked(text: str) -> Asked:
    """Parse a request from a command line."""
    content = json.loads(text)
    content["levels"] = tuple(content["levels"])
    return Asked(**{each.name: content[each.name] for each in fields(Asked)})


def predict(text: str) -> None:
    """Calibrate; print the cost model's prediction for every level."""
    ask = asked(text)
    trainee, probe = ask.trainee(), ask.probe()
    available = probe.snapshot().memory.available_bytes
    calibration = calibrate(
        trainee.backend,
        trainee.manifest,
        levels=ask.levels,
        batch=ask.batch,
        room_bytes=available,
        watts=probed_watts(probe),
        limit_s=ask.calibrate_s,
    )
    model = CostModel(trainee.plan, trainee.manifest, calibration)
    opened = trainee.opened(ask.steps, ask.batch, RULE, "fp32")
    costs = model.predict(ask.levels, opened)
    _say(
        [
            {
                "level": cost.level,
                "seconds": cost.seconds,
                "grown_bytes": cost.peak_bytes,
                "joules": cost.joules,
            }
            for cost in costs
        ]
    )


def case(text: str) -> None:
    """Train at one level, for a number of rounds and seconds; print the costs."""
    ask = asked(text)
    [level] = ask.levels
    trainee, probe = ask.trainee(), ask.probe()
    opened = trainee.opened(ask.steps, ask.batch, RULE, "fp32")
    before = resident_bytes()
    trainee.round(opened, level)  # opens the graph and fills the caches; unlike the others
    trainee.check_provider(provider_of(ask.backend))
    times: list[Times] = []
    others = _OtherPrograms() if Path(ask.root) == Path("/") else None
    heat = _HeatWatch(probe)
    meter = EnergyMeter(probed_watts(probe), idle_w=ask.idle_w, period_s=SENSOR_PERIOD_S)
    with heat, meter:
        until = time.perf_counter() + ask.burst_s
        while len(times) < ask.rounds or time.perf_counter() < until:
            # Keep only the times of a round: a device does not have two movements either.
            times.append((last := trainee.round(opened, level)).times)
    peak = peak_resident_bytes()
    steps = [each for one in times for each in one.step_s[1:] or one.step_s]
    work = work_at(trainee.plan, trainee.manifest, level, ask.batch)
    energy = meter.energy
    _say(
        {
            "parameters": work.weight_bytes // 4,
            "macs": work.macs,
            "step_s": _spread(steps),
            "round_s": _spread([one.seconds for one in times]),
            "train_s": _spread([one.train_s for one in times]),
            "peak_bytes": peak,
            "grown_bytes": max(0, peak - before),
            "energy": None
            if energy is None
            else {
                "gross": energy.gross_j / len(times),
                "net": None if energy.net_j is None else energy.net_j / len(times),
                "hz": meter.hz,
            },
            "heat": heat.seen(),
            "busy": None if others is None else others.share(),
            "bytes": _sizes(trainee, level, last) if ask.sized else [],
        }
    )


def learn(text: str) -> None:
    """Train one level alone on real data; print the accuracy after every round."""
    from edge_sdk.data.arrays import ArrayData
    from edge_sdk.train.backend import Job
    from edge_sdk.train.inference import Predictor, accuracy

    ask = asked(text)
    [level] = ask.levels
    trainee = ask.trainee()
    plan, groups = trainee.plan, largest_groups(trainee.plan, level)
    with np.load(str(ask.data), allow_pickle=False) as arrays:
        train = ArrayData((arrays["x"],), arrays["y"])
        test = ArrayData((arrays["test_x"],), arrays["test_y"])
    blocks, buffers = trainee.model(groups)
    weights = {name: array.copy() for name, array in plan.assemble(blocks, groups).items()}
    files = {path.stem: path.read_bytes() for path in trainee.folder.glob("*.onnx")}
    predictor = Predictor(plan, trainee.manifest, files, threads=ask.threads)
    accuracies = []
    for number in range(ask.rounds):
        job = Job(
            groups=groups,
            weights=weights,
            buffers=buffers,
            rule=LEARNING_RULE,
            mask_stream=stream(number, "learn", "dropout"),
        )
        batches = train.batches(ask.steps, ask.batch, stream(number, "learn", "batches"))
        trained = trainee.backend.train(job, batches)
        weights = {name: weights[name] + moved for name, moved in trained.movement.items()}
        buffers = {**buffers, **trained.statistics}
        outputs = predictor.predict(
            weights, buffers, test.inputs, groups=groups, batch_size=ask.batch
        )
        accuracies.append(accuracy(outputs, test.targets))
    _say(accuracies)


class _OtherPrograms:
    """Processor time of other programs, since it was made."""

    def __init__(self) -> None:
        self._began = self._read()

    def share(self) -> float | None:
        """Return the share of the machine's time that others took; None: no time has passed."""
        (total, busy, own), (total_0, busy_0, own_0) = self._read(), self._began
        passed = total - total_0
        return max(0.0, busy - busy_0 - (own - own_0)) / passed if passed > 0 else None

    def _read(self) -> tuple[float, float, float]:
        every, own = psutil.cpu_times(), psutil.Process().cpu_times()
        total = sum(every[:8] if len(every) > 8 else every)  # guests are in user already
        idle = every.idle + getattr(every, "iowait", 0.0)
        return total, total - idle, own.user + own.system


class _HeatWatch:
    """Reads the processor's temperature now and then in a thread while its block runs."""

    def __init__(self, probe: LocalProbe) -> None:
        self._probe = probe.only("heat")
        self._celsius: list[float] = []
        self._throttling: list[bool] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heat", daemon=True)

    def __enter__(self) -> None:
        self._read()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._read()

    def seen(self) -> dict[str, Any]:
        """Return the readings, as in `results.TrialHeat`."""
        celsius, throttling = self._celsius, self._throttling
        return {
            "start_c": celsius[0] if celsius else None,
            "highest_c": max(celsius, default=None),
            "throttled": any(throttling) if throttling else None,
        }

    def _run(self) -> None:
        while not self._done.wait(HEAT_PERIOD_S):
            self._read()

    def _read(self) -> None:
        heat = self._probe.snapshot().heat
        if heat.zones:
            # A Jetson's PMIC always says 100 °C, so the processor's own zones go first.
            own = [zone for zone in heat.zones if PROCESSOR.search(zone.name)]
            self._celsius.append(max(zone.celsius for zone in own or heat.zones))
        if heat.throttling is not None:
            self._throttling.append(heat.throttling)


def _sizes(trainee: Trainee, level: float, took: Took) -> list[dict[str, Any]]:
    """Measure the last movement and the model in every encoding available here."""
    plan, groups = trainee.plan, largest_groups(trainee.plan, level)
    whole, buffers = trainee.model(plan.all_groups())
    packs = find_packs(plan)
    rows = []
    for name in ENCODINGS:
        encoding = Encoding.parse(name)
        if encoding.agreed(available_encodings()) != encoding:
            continue
        draws = stream(0, "sizes", name)
        payload = encode_blocks(plan, groups, took.moved, encoding, draws)
        up = len(encode_movement(replace(took.movement, payload=payload)))
        down = None
        if encoding.kind != "top-k":
            encoded = encode_model(plan, whole.values, encoding, draws)
            index, _ = pack_model(plan, encoded, buffers, CHUNK_BYTES)
            numbers = packs.of_submodel(plan, plan.choose(groups))
            down = len(encode_index(plan, index)) + sum(index.packs[n].size for n in numbers)
        rows.append({"encoding": name, "up": up, "down": down})
    return rows


def _spread(seconds: Sequence[float]) -> dict[str, Any]:
    # A single value, which quantiles() rejects, is all that is known.
    p90 = quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    middle = median(seconds)
    return {"median": middle, "p90": max(middle, p90), "samples": len(seconds)}


def _say(result: Any) -> None:
    print(json.dumps(result))
