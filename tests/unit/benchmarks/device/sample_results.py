"""Results as `tessera-bench device` writes them, made up: with sensors, without, and modelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.device.results import (
    Amount,
    BackendName,
    Case,
    Config,
    CoreClock,
    Curve,
    Joules,
    LearningPoint,
    LeftOut,
    Machine,
    Predicted,
    Provenance,
    Results,
    RoundBytes,
    TimeSpread,
    TrialHeat,
)

LEVELS = (1.0, 0.75, 0.5, 0.25)
WORK = {"mlp": 0.4, "cnn": 6.0, "sensor-cnn": 1.5}
"""Milliseconds of a step at full width on one thread of the made-up board."""


def spread(median: float, factor: float, samples: int, provenance: Provenance) -> TimeSpread:
    return TimeSpread(median=median, p90=median * factor, samples=samples, provenance=provenance)


def make_config(**changes: Any) -> Config:
    fields: dict[str, Any] = {
        "families": ("mlp", "cnn"),
        "levels": LEVELS,
        "backends": ("onnx",),
        "threads": (1, 2),
        "batch": 32,
        "steps": 20,
        "rounds": 3,
        "burst_s": 0.2,
        "data": "digits",
    }
    return Config(**{**fields, **changes})


def make_case(
    family: str = "cnn",
    level: float = 1.0,
    backend: BackendName = "onnx",
    threads: int = 1,
    *,
    provenance: Provenance = "measured",
    slowness: float = 1.0,
    **others: Any,
) -> Case:
    """A case without joules, heat and prediction; a step of a round of 20 takes a 20th of it."""
    step_s = slowness * WORK[family] / 1e3 * (0.1 + 0.9 * level**2) / threads**0.7
    step_s *= 1.3 if backend == "torch" else 1.0
    grown = (8e6 + 30e6 * level) * (1.5 if backend == "torch" else 1.0)
    parameters = int(200_000 * level**2)
    more = 1.0 if provenance == "modelled" else 1.15
    sent = {"fp32": 4 * parameters, "fp16": 2 * parameters}
    fields: dict[str, Any] = {
        "family": family,
        "level": level,
        "backend": backend,
        "threads": threads,
        "parameters": parameters,
        "macs": 1e6 * level**2,
        "step_s": spread(step_s, more, 200, provenance),
        "round_s": spread(20 * step_s + 0.01, more, 10, provenance),
        "train_s": spread(20 * step_s, more, 10, provenance),
        "peak_bytes": Amount(
            value=grown + (210e6 if backend == "torch" else 45e6), provenance=provenance
        ),
        "grown_bytes": Amount(value=grown, provenance=provenance),
        "bytes": (
            *(RoundBytes(encoding=e, up=n, down=n, provenance="counted") for e, n in sent.items()),
            RoundBytes(encoding="int8", up=parameters, provenance="counted"),
            RoundBytes(encoding="top-k:0.01+zstd", up=parameters // 20, provenance="counted"),
        ),
    }
    return Case(**{**fields, **others})


def board_with_sensors(**changes: Any) -> Results:
    """Measured, all that there is to know: three families, two backends, three thread counts."""
    source = "rail VDD_IN, read at 20 Hz"
    cases = []
    for family in WORK:
        for level in LEVELS:
            for backend, threads in (("onnx", 1), ("onnx", 2), ("onnx", 4), ("torch", 4)):
                case = make_case(family, level, backend, threads, slowness=2.0)  # type: ignore[arg-type]
                seconds = case.round_s.median
                cases.append(
                    replace(
                        case,
                        joules=Joules(
                            gross=seconds * (4 + threads),
                            net=seconds * (1 + threads),
                            provenance="measured",
                            source=source,
                        ),
                        heat=TrialHeat(
                            start_c=41.0, highest_c=50.0 + 5 * threads, throttled=threads > 2
                        ),
                        predicted=Predicted(
                            seconds=seconds * (0.9 + 0.3 * level),
                            grown_bytes=case.grown_bytes.value * 1.2,
                            joules=seconds * (1.1 + threads),
                        ),
                    )
                )
    curves = tuple(
        Curve(
            family=family,
            level=level,
            data="digits",
            provenance="measured",
            joules_source=source,
            points=tuple(
                LearningPoint(
                    round=round,
                    accuracy=0.1 + (0.8 + 0.07 * level) * (1 - 0.8**round),
                    seconds=round * 0.3 * level,
                    bytes=round * 1e6 * level,
                    joules=round * 1.8 * level,
                )
                for round in range(13)
            ),
        )
        for family in ("mlp", "sensor-cnn")
        for level in LEVELS
    )
    fields: dict[str, Any] = {
        "title": "Jetson Orin Nano",
        "provenance": "measured",
        "started": "2026-11-03T10:00:00+00:00",
        "seconds": 612.0,
        "complete": True,
        "machine": Machine(
            model="NVIDIA Jetson Orin Nano Developer Kit",
            board="jetson_orin_nano",
            system="Linux 5.15.136-tegra aarch64",
            python="3.10.12",
            cores=6.0,
            clocks=(CoreClock(cores=6, max_mhz=1510.4, governor="performance", pinned=True),),
            memory_bytes=7.4e9,
            power_mode="15W",
            cooling="fan",
            fed_by="mains",
            power_sensor="VDD_IN",
            sensor_hz=20.0,
            idle_w=Amount(value=3.02, provenance="measured"),
            versions={"onnxruntime": "1.23.2", "numpy": "2.2.6", "tessera-fl": "0.1.0"},
        ),
        "config": make_config(
            families=tuple(WORK),
            backends=("onnx", "torch"),
            threads=(1, 2, 4),
            rounds=10,
            burst_s=1.0,
            learn_rounds=12,
        ),
        "cases": tuple(cases),
        "left_out": (
            LeftOut(family="cnn", level=1.0, backend="torch", threads=1, why="asked to stop"),
            LeftOut(family="cnn", level=0.75, backend="torch", threads=1, why="asked to stop"),
            LeftOut(family="mlp", level=1.0, backend="torch", threads=2, why="needs 9 GB"),
        ),
        "curves": curves,
    }
    return Results(**{**fields, **changes})


def computer_without_sensors(**changes: Any) -> Results:
    """Measured, where no sensor tells anything: no joules, no heat, no clocks."""
    fields: dict[str, Any] = {
        "title": "Laptop",
        "provenance": "measured",
        "started": "2026-11-02T08:00:00+00:00",
        "seconds": 95.0,
        "complete": True,
        "machine": Machine(system="Linux 6.1 x86_64", python="3.11.7", versions={"numpy": "2.4.0"}),
        "config": make_config(learn_rounds=2, quick=True),
        "cases": tuple(
            make_case(family, level, "onnx", threads)
            for family in ("mlp", "cnn")
            for level in LEVELS
            for threads in (1, 2)
        ),
        "curves": (
            Curve(
                family="mlp",
                level=1.0,
                data="digits",
                provenance="measured",
                points=(
                    LearningPoint(round=0, accuracy=0.1, seconds=0.0, bytes=0.0),
                    LearningPoint(round=1, accuracy=0.6, seconds=0.5, bytes=1e6),
                    LearningPoint(round=2, accuracy=0.8, seconds=1.0, bytes=2e6),
                ),
            ),
        ),
    }
    return Results(**{**fields, **changes})


def modelled_phone(**changes: Any) -> Results:
    """Modelled from a profile: nothing of it was run."""
    modelled: dict[str, Any] = {"provenance": "modelled"}

    def joules(level: float) -> Joules:
        return Joules(gross=3.55 * level, source="profile pixel_6, 3.55 W", **modelled)

    fields: dict[str, Any] = {
        "title": "Google Pixel 6",
        "provenance": "modelled",
        "started": "2026-11-01T12:00:00+00:00",
        "seconds": 20.0,
        "complete": True,
        "machine": Machine(
            board="pixel_6",
            system="Linux 6.1 x86_64",
            python="3.11.7",
            clocks=(CoreClock(cores=2, max_mhz=2800.0), CoreClock(cores=4, max_mhz=1800.0)),
            memory_bytes=8.59e9,
            fed_by="battery",
            idle_w=Amount(value=0.149, provenance="modelled"),
            versions={"numpy": "2.4.0"},
        ),
        "config": make_config(families=("cnn",), threads=(8,)),
        "cases": tuple(
            make_case("cnn", level, "onnx", 8, slowness=3.0, joules=joules(level), **modelled)
            for level in LEVELS
        ),
    }
    return Results(**{**fields, **changes})
