"""Metrics for Prometheus: the runs' overviews, read when it asks; and this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from coordinator.operate.http.answers.shapes import STATES
from coordinator.operate.http.viewed import ViewedRun, ViewedRuns

RunMetric = GaugeMetricFamily | CounterMetricFamily
Own = Callable[[], dict[str, float]]
"""The server's own numbers: `sessions`, `streams`, `failures`."""


def make_registry(runs: ViewedRuns, own: Own, *, by_device: bool) -> CollectorRegistry:
    """Return the registry of a process that serves these runs."""
    registry = CollectorRegistry()
    registry.register(RunCollector(runs, own, by_device=by_device))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render_metrics(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics in the form that a client accepts, and its name."""
    encoder, form = choose_encoder(accept)
    return encoder(registry), form


class RunCollector(Collector):
    """Reads every run's overview when metrics are asked for."""

    def __init__(self, runs: ViewedRuns, own: Own, *, by_device: bool) -> None:
        self._runs, self._own, self._by_device = runs, own, by_device

    def describe(self) -> list[Metric]:
        """Return nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of all runs, with the task as a label."""
        families = _families()
        for run in self._runs.all():
            _add_run(families, run)
            if self._by_device:
                _add_devices(families, run)
        own = self._own()
        families["tessera_http_sessions"].add_metric([], own["sessions"])
        families["tessera_http_event_streams"].add_metric([], own["streams"])
        families["tessera_http_failed_sign_ins"].add_metric([], own["failures"])
        info = InfoMetricFamily("tessera_run", "The run of a task.", labels=["task"])
        for run in self._runs.all():
            status = run.overview.status()
            info.add_metric([run.task], {"run": status["run"], "version": status["version"]})
        yield info
        yield from (family for family in families.values() if family.samples)


_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tessera_state", "1 for the state that the run is in.", ("task", "state")),
    ("tessera_waiting", "1 while the run waits for something.", ("task",)),
    ("tessera_round", "The present round.", ("task",)),
    ("tessera_committed_rounds", "Rounds that were committed.", ("task",)),
    ("tessera_planned_rounds", "Rounds that were asked for.", ("task",)),
    ("tessera_round_seconds", "Duration of the last round.", ("task",)),
    ("tessera_round_end_timestamp_seconds", "End of the last round, in Unix time.", ("task",)),
    ("tessera_devices", "Devices, by what they are counted as.", ("task", "state")),
    ("tessera_level_devices", "Devices that train a level in this round.", ("task", "level")),
    ("tessera_skips", "Devices that skip this round, by reason.", ("task", "code")),
    ("tessera_accuracy", "Accuracy of a level, 0 to 1.", ("task", "level")),
    ("tessera_best_accuracy", "The best accuracy of the run.", ("task",)),
    ("tessera_broker_connected", "1 while the broker is connected.", ("task",)),
    ("tessera_silent_seconds", "Seconds since the run's loop gave a sign of life.", ("task",)),
    ("tessera_http_sessions", "Browsers that have signed in.", ()),
    ("tessera_http_event_streams", "Streams of events that are open.", ()),
    ("tessera_device_present", "1 while the device is connected.", ("task", "device")),
    ("tessera_device_state", "1 for the state of the device.", ("task", "device", "state")),
    ("tessera_device_level", "The level that it trained last.", ("task", "device")),
    ("tessera_device_last_seen_timestamp_seconds", "Last heard of.", ("task", "device")),
    ("tessera_device_battery_ratio", "Charge, 0 to 1.", ("task", "device")),
    ("tessera_device_temperature_celsius", "The hottest sensor.", ("task", "device")),
    ("tessera_device_staleness_rounds", "Rounds since its newest movement.", ("task", "device")),
)
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tessera_seconds", "Seconds of all rounds.", ("task",)),
    ("tessera_joules", "Joules that devices reported.", ("task",)),
    ("tessera_bytes", "Bytes of devices; up is to the coordinator.", ("task", "direction")),
    ("tessera_movements", "Movements of devices, by what became of them.", ("task", "outcome")),
    ("tessera_skipped", "Rounds that devices skipped.", ("task",)),
    ("tessera_http_failed_sign_ins", "Attempts with a wrong token.", ()),
    ("tessera_device_joules", "Joules that it reported.", ("task", "device")),
    ("tessera_device_bytes", "Bytes that it sent and got.", ("task", "device", "direction")),
    ("tessera_device_movements", "Movements that it sent.", ("task", "device", "outcome")),
    ("tessera_device_skipped", "Rounds that it skipped.", ("task", "device")),
)


def _families() -> dict[str, RunMetric]:
    gauges: dict[str, RunMetric] = {
        name: GaugeMetricFamily(name, says, labels=labels) for name, says, labels in _GAUGES
    }
    counters: dict[str, RunMetric] = {
        name: CounterMetricFamily(name, says, labels=labels) for name, says, labels in _COUNTERS
    }
    return gauges | counters


def _add_run(families: dict[str, RunMetric], run: ViewedRun) -> None:
    view, task = run.overview, run.task
    status = view.status()

    def add(name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            families[name].add_metric([task, *labels], float(value))

    for state in STATES:
        add("tessera_state", status["state"] == state, state)
    add("tessera_waiting", status["waits_for"] is not None)
    add("tessera_round", status["round"])
    add("tessera_committed_rounds", status["committed"])
    add("tessera_planned_rounds", status["rounds"])
    recent = [row for row in view.rounds(max(0, status["round"] - 2)) if row["event"] is None]
    if recent:
        add("tessera_round_seconds", recent[-1]["seconds"])
        add("tessera_round_end_timestamp_seconds", recent[-1]["time"])
    for state, number in status["devices"].items():
        add("tessera_devices", number, state)
    for level, number in status["levels"].items():
        add("tessera_level_devices", number, level)
    for code, number in status["skips"].items():
        add("tessera_skips", number, code)
    for level, accuracy in _accuracies(status).items():
        add("tessera_accuracy", accuracy, level)
    add("tessera_best_accuracy", None if status["best"] is None else status["best"]["accuracy"])
    add("tessera_broker_connected", status["broker_connected"])
    add("tessera_silent_seconds", run.silent_s())
    totals = status["totals"]
    add("tessera_seconds", totals["seconds"])
    add("tessera_joules", totals["joules"])
    add("tessera_bytes", totals["bytes_up"], "up")
    add("tessera_bytes", totals["bytes_down"], "down")
    for outcome in ("trained", "late", "rejected"):
        add("tessera_movements", totals[outcome], outcome)
    add("tessera_skipped", totals["skipped"])


def _accuracies(status: dict[str, Any]) -> dict[str, float | None]:
    """Accuracy by level; the run's own is that of the whole model, where no level has one."""
    found = {f"{each['level']:g}": each["accuracy"] for each in status["level_reports"]}
    return {"1": status["accuracy"], **found}


def _add_devices(families: dict[str, RunMetric], run: ViewedRun) -> None:
    for row in run.overview.devices():
        labels = [run.task, str(row["device"])]
        for name, value in (
            ("tessera_device_present", row["present"]),
            ("tessera_device_level", row["level"]),
            ("tessera_device_last_seen_timestamp_seconds", row["last_seen"]),
            ("tessera_device_battery_ratio", row["battery"]),
            ("tessera_device_temperature_celsius", row["temperature_c"]),
            ("tessera_device_staleness_rounds", row["staleness"]),
            ("tessera_device_joules", row["joules"]),
            ("tessera_device_skipped", row["skipped"]),
        ):
            if value is not None:
                families[name].add_metric(labels, float(value))
        families["tessera_device_state"].add_metric([*labels, row["state"]], 1.0)
        for direction in ("up", "down"):
            if (size := row[f"bytes_{direction}"]) is not None:
                families["tessera_device_bytes"].add_metric([*labels, direction], float(size))
        for outcome in ("trained", "late", "rejected"):
            families["tessera_device_movements"].add_metric([*labels, outcome], row[outcome])
