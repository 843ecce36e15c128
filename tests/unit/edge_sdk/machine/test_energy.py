"""The meter integrates what a sensor says, and says nothing where there is none."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.machine.energy import (
    MAX_GAP_S,
    Energy,
    EnergyMeter,
    idle_watts,
    integrate,
    probed_watts,
)
from edge_sdk.machine.probe import StaticProbe
from edge_sdk.machine.snapshot import Battery, Power, Snapshot
from tests.waiting import HANGS_S


class Sensor:
    """Watts that follow a waveform; every reading is a tenth of a second after the last."""

    def __init__(self, waveform: Callable[[float], float | None], readings: int) -> None:
        self.now = 0.0
        self.done = threading.Event()
        self._waveform = waveform
        self._left = readings

    def watts(self) -> float | None:
        if self._left:
            self.now += 0.1
            self._left -= 1
        else:
            self.done.set()
        return self._waveform(self.now)

    def clock(self) -> float:
        return self.now


def measured(sensor: Sensor, idle_w: float | None = None) -> Energy | None:
    meter = EnergyMeter(sensor.watts, idle_w=idle_w, period_s=0, clock=sensor.clock)
    with meter:
        assert sensor.done.wait(HANGS_S)
    return meter.energy


def test_meter_matches_the_integral_of_a_sine() -> None:
    energy = measured(Sensor(lambda t: 5 + 3 * math.sin(t), readings=300), idle_w=2.0)
    assert energy is not None
    start, end = 0.1, 30.0
    exact = 5 * (end - start) - 3 * (math.cos(end) - math.cos(start))
    assert energy.seconds == pytest.approx(end - start)
    assert energy.gross_j == pytest.approx(exact, rel=1e-3)
    assert energy.net_j == pytest.approx(exact - 2 * (end - start), rel=1e-3)
    assert energy.net_w == pytest.approx((exact / (end - start)) - 2, rel=1e-3)


def test_meter_without_sensor_knows_nothing_and_starts_no_thread() -> None:
    before = threading.active_count()
    with EnergyMeter(lambda: None) as meter:
        assert threading.active_count() == before
    assert meter.energy is None


def test_meter_ends_its_thread_when_the_block_fails() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="training failed"), EnergyMeter(lambda: 1.0):
        raise ValueError("training failed")
    assert threading.active_count() == before


def test_energy_without_idle_has_no_net() -> None:
    energy = measured(Sensor(lambda _: 4.0, readings=10))
    assert energy is not None
    assert energy.gross_j == pytest.approx(4 * 0.9)
    assert energy.net_j is None
    assert energy.net_w is None


def test_net_energy_is_never_negative() -> None:
    assert Energy(seconds=2, gross_j=3, idle_w=5).net_j == 0


def test_integral_over_a_gap_is_unknown() -> None:
    assert integrate([(0, 1.0), (MAX_GAP_S, 1.0)]) == pytest.approx(MAX_GAP_S)
    assert integrate([(0, 1.0), (MAX_GAP_S + 0.01, 1.0)]) is None
    assert integrate([(0, 1.0)]) is None


@given(st.lists(st.tuples(st.floats(0.01, 0.9 * MAX_GAP_S), st.floats(0, 100)), min_size=2))
def test_integral_lies_between_least_and_most_watts(steps: list[tuple[float, float]]) -> None:
    now, readings = 0.0, []
    for step, watts in steps:
        now += step
        readings.append((now, watts))
    joules = integrate(readings)
    seconds = readings[-1][0] - readings[0][0]
    watts_seen = [watts for _, watts in readings]
    assert joules is not None
    assert min(watts_seen) * seconds <= joules + 1e-6
    assert joules <= max(watts_seen) * seconds + 1e-6


def test_watts_are_those_of_the_rails_before_the_battery() -> None:
    both = Snapshot(power=Power(total_watts=7), battery=Battery(watts=3))
    assert probed_watts(StaticProbe(both))() == 7
    assert probed_watts(StaticProbe(Snapshot(battery=Battery(watts=3))))() == 3
    assert probed_watts(StaticProbe(Snapshot()))() is None


def test_watts_that_are_old_are_unknown() -> None:
    old = Snapshot(battery=Battery(watts=3), ages_s={"battery.watts": 20.0})
    assert probed_watts(StaticProbe(old))() is None


def test_idle_watts_are_the_mean_of_a_rest() -> None:
    assert idle_watts(lambda: 2.5, seconds=0.05) == pytest.approx(2.5)
    assert idle_watts(lambda: None, seconds=0.05) is None


def test_meter_knows_nothing_when_its_sensor_fell_silent() -> None:
    said: list[float | None] = [10.0, 10.0, 10.0]
    meter = EnergyMeter(lambda: said.pop() if said else None, period_s=0.001)
    with meter:
        while said:
            time.sleep(0.001)
    assert meter.hz is not None
    assert meter.energy is None
