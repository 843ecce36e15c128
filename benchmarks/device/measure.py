"""Measures the costs of levels on this machine: one fresh process per case, in a fixed order.

A case that fails, or would not fit into memory, is left out with the reason; the others continue.
After every case there are complete `Results`: a run that stops keeps them, and `measure` continues
from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.data import Dataset
from benchmarks.device.modelled import board_cores, joules_of
from benchmarks.device.results import (
    Amount,
    BackendName,
    Case,
    Config,
    Curve,
    Joules,
    Key,
    LeftOut,
    Predicted,
    Results,
    RoundBytes,
    TimeSpread,
    TrialHeat,
)
from benchmarks.device.trial.fresh import ProcessFailed, run_fresh
from benchmarks.device.trial.learning import learn, make_curve
from benchmarks.device.trial.machine import LEAST_RISE, Seen, power_sensor
from benchmarks.device.trial.process import Asked
from benchmarks.device.validity import reached
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent
from edge_sdk.decide.costs.calibration import LIMIT_S

QUICK_TARGET_S = 120.0
LEAST_HZ = 10.0
"""Lowest rate at which watts are read; the process asks for more."""
QUICK_CALIBRATE_S = 1.5
QUICK_CASES_S, QUICK_ALL_S = 85.0, 105.0
"""Seconds after which a quick run begins no further case, and no further training: it then ends
within its target on a busy or a slow machine, too."""
TOO_SLOW = "the machine is busy or slow, and --quick has two minutes: measure without it"


@dataclass(frozen=True, slots=True)
class Bench:
    """Tools for measuring cases."""

    kit: Path
    seen: Seen
    data: Dataset | None = None
    """Data for curves; None: no curves."""
    root: Path = Path("/")
    """Root of the sensors' files."""
    disk: Path | None = None
    """Folder for movements; None: that of temporary files."""

    def ask(self, config: Config, family: str, backend: str, threads: int) -> Asked:
        """Make a request for one family, without levels."""
        return Asked(
            folder=str(self.kit / family),
            backend=backend,
            threads=threads,
            levels=(),
            batch=config.batch,
            steps=config.steps,
            root=str(self.root),
            disk=None if self.disk is None else str(self.disk),
        )


def all_keys(config: Config) -> list[Key]:
    """Return all cases, in the order of measurement."""
    return [
        (family, level, backend, threads)
        for family, backend, threads, level in product(
            config.families, config.backends, config.threads, config.levels
        )
    ]


def missing(results: Results) -> list[Key]:
    """Return the cases still to be measured."""
    done = {case.key for case in results.cases} | {each.key for each in results.left_out}
    return [key for key in all_keys(results.config) if key not in done]


def missing_curves(results: Results) -> list[tuple[str, float]]:
    """Return family and level of the curves still to be made."""
    done = {(curve.family, curve.level) for curve in results.curves}
    wanted = product(results.config.learners, results.config.levels)
    return [pair for pair in wanted if pair not in done]


def measure(bench: Bench, results: Results, begin: Begin = silent) -> Iterator[Results]:
    """Measure what `results` lacks, and yield them again after every case and curve.

    `begin` is called with each of those, and its result once.
    """
    config = results.config
    started = time.monotonic() - results.seconds
    predictions: dict[tuple[str, str, int], dict[float, Predicted] | str] = {}
    for key in missing(results):
        family, level, backend, threads = key
        tick = begin(f"{family} {level:.0%} {backend}, {_threads(threads)}")
        of = (family, backend, threads)
        done: Case | LeftOut
        if config.quick and time.monotonic() - started > QUICK_CASES_S and results.cases:
            done = _left_out(key, TOO_SLOW)
        else:
            if of not in predictions:
                predictions[of] = _predict(bench, config, *of)
            done = _case(bench, results, key, predictions[of])
        results = _with(results, done, time.monotonic() - started)
        tick()
        yield results
    for family, level in missing_curves(results):
        tick = begin(f"{family} {level:.0%} learns {config.data}")
        if config.quick and time.monotonic() - started > QUICK_ALL_S:
            curve = Curve(
                family=family,
                level=level,
                data=config.data,
                provenance="measured",
                failed=TOO_SLOW,
            )
        else:
            curve = _curve(bench, results, family, level)
        seconds = time.monotonic() - started
        results = replace(results, curves=(*results.curves, curve), seconds=seconds)
        tick()
        yield results
    yield replace(results, complete=True)


def _with(results: Results, done: Case | LeftOut, seconds: float) -> Results:
    results = replace(results, seconds=seconds)
    if isinstance(done, Case):
        return replace(results, cases=(*results.cases, done))
    return replace(results, left_out=(*results.left_out, done))


def _predict(
    bench: Bench, config: Config, family: str, backend: str, threads: int
) -> dict[float, Predicted] | str:
    """Predict every level with the cost model; a text: why that failed."""
    ask = replace(
        bench.ask(config, family, backend, threads),
        levels=config.levels,
        calibrate_s=QUICK_CALIBRATE_S if config.quick else LIMIT_S,
    )
    try:
        said = run_fresh("predict", ask)
    except ProcessFailed as error:
        return str(error)
    return {row.pop("level"): Predicted(**row) for row in said}


def _case(
    bench: Bench, results: Results, key: Key, predicted: dict[float, Predicted] | str
) -> Case | LeftOut:
    family, level, backend, threads = key
    config, probe, idle_w = results.config, bench.seen.probe, results.machine.idle_w
    if isinstance(predicted, str):
        return _left_out(key, f"calibrating failed: {predicted}")
    free, wanted = probe.snapshot().memory.available_bytes, predicted[level].grown_bytes
    if free is not None and wanted > free:
        return _left_out(
            key, f"it may take {wanted / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free"
        )
    alike = (each for each in results.cases if (each.family, each.level) == (family, level))
    sized = next(alike, None)
    ask = replace(
        bench.ask(config, family, backend, threads),
        levels=(level,),
        rounds=config.rounds,
        burst_s=config.burst_s,
        idle_w=None if idle_w is None else idle_w.value,
        sized=sized is None,
    )
    try:
        repeats = [
            run_fresh("case", replace(ask, sized=ask.sized and not number))
            for number in range(config.repeats)
        ]
    except ProcessFailed as error:
        return _left_out(key, str(error))
    said = repeats[0]
    round_s = _times(repeats, "round_s")
    sensor, board = power_sensor(probe.snapshot()), bench.seen.board
    joules = _joules(_energy([each["energy"] for each in repeats]), sensor)
    if joules is None and board is not None and threads == board_cores(board):
        joules = joules_of(board, round_s.median)  # its watts are those of all cores
    return Case(
        family=family,
        level=level,
        backend=cast("BackendName", backend),
        threads=threads,
        parameters=said["parameters"],
        macs=said["macs"],
        step_s=_times(repeats, "step_s"),
        round_s=round_s,
        train_s=_times(repeats, "train_s"),
        peak_bytes=_most(repeats, "peak_bytes"),
        grown_bytes=_most(repeats, "grown_bytes"),
        joules=joules,
        bytes=tuple(RoundBytes(**row, provenance="counted") for row in said["bytes"])
        if sized is None
        else sized.bytes,
        heat=_heat([each["heat"] for each in repeats]),
        predicted=predicted[level],
        repeat_s=tuple(each["round_s"]["median"] for each in repeats),
        busy=max((each["busy"] for each in repeats if each["busy"] is not None), default=None),
    )


def _left_out(key: Key, why: str) -> LeftOut:
    family, level, backend, threads = key
    name = cast("BackendName", backend)
    return LeftOut(family=family, level=level, backend=name, threads=threads, why=why)


def _times(repeats: Sequence[Mapping[str, Any]], name: str) -> TimeSpread:
    """Return the median of the repeats' medians, and of their p90."""
    spreads = [each[name] for each in repeats]
    middle = median(each["median"] for each in spreads)
    return TimeSpread(
        median=middle,
        p90=max(middle, median(each["p90"] for each in spreads)),
        samples=sum(each["samples"] for each in spreads),
        provenance="measured",
    )


def _most(repeats: Sequence[Mapping[str, Any]], name: str) -> Amount:
    return Amount(value=max(each[name] for each in repeats), provenance="measured")


def _heat(repeats: Sequence[Mapping[str, Any]]) -> TrialHeat:
    """Return the first temperature, the highest, and whether any repeat was slowed down."""
    slowed = [each["throttled"] for each in repeats if each["throttled"] is not None]
    return TrialHeat(
        start_c=repeats[0]["start_c"],
        highest_c=max(
            (each["highest_c"] for each in repeats if each["highest_c"] is not None), default=None
        ),
        throttled=any(slowed) if slowed else None,
    )


def _energy(repeats: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the medians of the repeats that have an energy; None: none has."""
    known = [each for each in repeats if each is not None]
    if not known:
        return None
    net = [each["net"] for each in known if each["net"] is not None]
    return {
        "gross": median(each["gross"] for each in known),
        "net": median(net) if net else None,
        "hz": min(each["hz"] for each in known),
    }


def _joules(energy: Mapping[str, Any] | None, sensor: str | None) -> Joules | None:
    if energy is None:
        return None
    gross, net = energy["gross"], energy["net"]
    source = sensor or "a sensor"
    if energy["hz"] < LEAST_HZ:
        source += f", read only {energy['hz']:.1f} times a second, too rarely to follow a training"
    if net is not None and net <= LEAST_RISE * gross:
        source += ", which does not follow the training: hardly more than at rest"
        net = 0.0 if net < 1e-9 * gross else net  # of two numbers that differ only by rounding
    return Joules(gross=gross, net=net, provenance="measured", source=source)


def _curve(bench: Bench, results: Results, family: str, level: float) -> Curve:
    config = results.config
    cases = [each for each in results.cases if (each.family, each.level) == (family, level)]
    none = Curve(family=family, level=level, data=config.data, provenance="measured")
    if not cases or bench.data is None:
        return replace(none, failed="what its rounds cost is not known")
    costed = [case for case in cases if case.joules is not None] or cases
    fastest = min(costed, key=lambda case: case.round_s.median)
    ask = replace(
        bench.ask(config, family, "onnx", fastest.threads),
        levels=(level,),
        rounds=config.learn_rounds,
    )
    try:
        accuracies = learn(bench.kit, family, bench.data, ask)
    except ProcessFailed as error:
        return replace(none, failed=str(error))
    return make_curve(fastest, config.data, accuracies)


def device_figures(results: Results) -> list[Figure]:
    """Return the figures of a run."""
    figures = []
    for case in results.cases:
        level = f"{case.level * 100:g}".replace(".", "_")
        stem = f"device.{case.family}.{level}.{case.backend}.threads-{case.threads}"
        figures += [
            Figure(f"{stem}.step", case.step_s.median, "s"),
            Figure(f"{stem}.round", case.round_s.median, "s"),
            Figure(f"{stem}.peak", case.peak_bytes.value / 1e6, "MB"),
        ]
        if case.joules is not None and case.joules.gross is not None:
            figures.append(Figure(f"{stem}.energy", case.joules.gross, "J"))
    for curve in results.curves:
        if (point := reached(curve)) is not None:
            level = f"{curve.level * 100:g}".replace(".", "_")
            stem = f"device.{curve.family}.{level}.to_quality"
            figures.append(Figure(f"{stem}.seconds", point.seconds, "s"))
            if point.joules is not None:
                figures.append(Figure(f"{stem}.energy", point.joules, "J"))
    errors = [case.time_error for case in results.cases if case.time_error is not None]
    if errors:
        figures.append(Figure("device.time_error", median(errors), "×"))
    done = results.complete and results.provenance == "measured" and results.cases
    if results.config.quick and done:
        figures.append(Figure("device.quick", results.seconds, "s", target=QUICK_TARGET_S))
    return figures


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"
