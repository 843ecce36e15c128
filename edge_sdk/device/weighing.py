"""From a device's settings to what weighs its rounds: the probe, the board, the costs.

<state_dir>/<task>/<device>/costs.json       `edge_sdk.decide.costs.calibration`
<state_dir>/<task>/<device>/history.json     `edge_sdk.decide.observer`
<state_dir>/<task>/<device>/emulation.jsonl  `edge_sdk.decide.emulation.emulation`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edge_sdk.decide.account import EnergyAccount
from edge_sdk.decide.gates import closed_gate
from edge_sdk.decide.observer import Observer, local_minute
from edge_sdk.device.config import DeviceConfig
from edge_sdk.machine.snapshot import Battery, Probe, Snapshot
from edge_sdk.protocol.errors import ConfigError

if TYPE_CHECKING:
    from edge_sdk.decide.costs.costing import Costing
    from edge_sdk.decide.emulation.emulation import Emulation
    from edge_sdk.machine.board import Board
    from edge_sdk.protocol.task.graphs import Manifest
    from edge_sdk.train.backend import Backend

HISTORY = "history.json"
LASTS_S = 1.0
"""Seconds for which a snapshot is good while a device trains; each decision takes a new one."""


class BoardProbe:
    """A probe that knows from the board's profile what its sensors do not tell."""

    def __init__(self, probe: Probe, board: Board) -> None:
        self._probe = probe
        capacity = None if board.battery is None else board.battery.battery_wh.value
        self._known = Snapshot(battery=Battery(capacity_wh=capacity))

    def snapshot(self) -> Snapshot:
        """See `Probe`."""
        return self._probe.snapshot().filled_from(self._known)

    def settle(self, timeout_s: float) -> bool:
        """See `LocalProbe`."""
        settle = getattr(self._probe, "settle", None)
        return settle is None or bool(settle(timeout_s))


def find_board(config: DeviceConfig) -> Board | None:
    """The board that the settings name. Raises `ConfigError`."""
    from edge_sdk.machine import board

    if config.board is None:
        return None
    try:
        if config.board.endswith(".toml"):
            return board.load_board(Path(config.board))
        return board.find_board(config.board)
    except ConfigError as error:
        raise ConfigError(f"board = {config.board!r}: {error}") from error


def make_probe(config: DeviceConfig) -> Probe:
    """The probe for this machine. Raises `ConfigError`."""
    from edge_sdk.machine.probe import choose_probe

    return with_board(config, choose_probe(name=config.probe, lasts_s=LASTS_S))


def with_board(config: DeviceConfig, probe: Probe) -> Probe:
    """The probe, with what the board's profile knows besides. Raises `ConfigError`."""
    board = find_board(config)
    return probe if board is None else BoardProbe(probe, board)


def make_emulation(config: DeviceConfig, folder: Path) -> Emulation | None:
    """The device to pretend to be, if any; its story is in `folder`. Raises `ConfigError`."""
    if config.emulate is None:
        return None
    from edge_sdk.decide.emulation.emulation import STORY, emulate
    from edge_sdk.decide.emulation.fleet import load_fleet

    try:
        fleet = load_fleet(config.emulate.fleet)
        return emulate(fleet, config.emulate.member, story=folder / STORY)
    except ConfigError as error:
        raise ConfigError(f"emulate: {error}") from error


def make_costing(
    config: DeviceConfig,
    probe: Probe,
    backend: Backend,
    manifest: Manifest,
    folder: Path,
    samples: int,
    emulation: Emulation | None = None,
    may_measure: Callable[[], bool] = lambda: True,
) -> Costing:
    """Return the task's costs on this machine; measures them first if needed, for seconds.

    `may_measure`: whether the owner allows that now.
    """
    from edge_sdk.decide.costs.calibration import FILE_NAME
    from edge_sdk.decide.costs.costing import Costing
    from edge_sdk.decide.costs.model import known_of

    policy = config.policy
    wall = time.time if emulation is None else emulation.wall
    return Costing(
        backend,
        manifest,
        folder / FILE_NAME,
        probe=probe,
        levels=policy.offered_levels(),
        known=known_of(
            find_board(config) if emulation is None else emulation.board, policy.bytes_per_s
        ),
        samples=samples,
        memory_share=policy.limits.memory_share,
        providers=(*config.providers, *([] if config.precision == "auto" else [config.precision])),
        threads=config.threads,
        may_measure=lambda: (
            may_measure()
            and closed_gate(policy.limits, probe.snapshot(), local_minute(wall())) is None
        ),
        tunes=config.tune and emulation is None,
        clock=time.perf_counter if emulation is None else emulation.clock,
        busy=time.process_time if emulation is None else None,
    )


def make_observer(
    config: DeviceConfig,
    probe: Probe | None,
    backend: Backend,
    manifest: Manifest,
    folder: Path,
    samples: int,
    emulation: Emulation | None = None,
    *,
    account: EnergyAccount | None = None,
    may_measure: Callable[[], bool] = lambda: True,
) -> Observer:
    """Make the device's view of itself, empty with `weigh = false`. `folder`: of the device.

    `probe` None: this machine's own. `emulation`: the device it pretends to be, whose own probe
    and clocks count. `account`: the energy of all tasks of this machine; None: of this one alone.
    Raises `ConfigError`, and what measuring raises.
    """
    history = folder / HISTORY
    if not config.weigh:
        return Observer(config.policy, history=history, account=account)
    if emulation is not None:
        probe = emulation.probe
        costs = make_costing(config, probe, backend, manifest, folder, samples, emulation)
        clock, wall = emulation.clock, emulation.wall
        return Observer(config.policy, probe, costs, history=history, clock=clock, wall=wall)
    probe = make_probe(config) if probe is None else with_board(config, probe)
    costs = make_costing(config, probe, backend, manifest, folder, samples, may_measure=may_measure)
    return Observer(config.policy, probe, costs, history=history, account=account)
