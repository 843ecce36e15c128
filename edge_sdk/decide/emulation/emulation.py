"""An emulated device: its probe, and the passing of its time and battery.

    emulation.probe          a `Probe`: cores, memory, battery and network of the member's board
    emulation.clock, .wall   seconds that pass only while the device works or waits
    emulation.emulated(b)    a `Backend`: trains for real, then advances the time it would take
    emulation.round_opened   lets the time between rounds pass

The rest of the SDK does not know of it: costs are calibrated, gates checked and levels decided as
on a real device, with these in place of the machine's own. Rules:

- Time is virtual, so the same rounds give the same story, on any machine and at any load.
- A step takes three forward passes, with SAM six, counted in multiply-accumulates, times `work`;
  of each width it trains, if there are several. It runs at the speed of all of the board's cores,
  less what others use.
- While training, the device draws `train_w`. While waiting, it draws `idle_w`, plus the share of
  the difference that equals the share of the processor others use. A charger gives `CHARGER_W`.
- The battery stays between 0 and 100 %. A device that runs empty continues: gates are there to
  prevent that, and a comparison without them shows it.
- Facts missing from the profile stay unknown. Memory is the board's: `work` does not change the
  memory of a training. How warm a board gets is unknown, so heat is unknown. Transfers take no time
  here; `transfer_s` tells how long they would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from edge_sdk.data.arrays import Batch
from edge_sdk.decide.budget import DAY_S
from edge_sdk.decide.emulation.fleet import Fleet, FleetMember
from edge_sdk.decide.gates import DAY_MINUTES
from edge_sdk.machine.board import Board, Quantity
from edge_sdk.machine.snapshot import (
    Battery,
    CoreClass,
    Cpu,
    MemoryState,
    Network,
    Snapshot,
)
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.train.backend import Backend, Job, TimedBackend

REFERENCE_MACS_PER_S = Quantity(
    5e9,
    "= 0.32 × 11.8e9 / 0.76: a Raspberry Pi 4, of speed 0.76, reaches 11.8 GFLOP/s of double "
    "precision in HPL (github.com/geerlingguy/sbc-reviews), which is as many multiply-accumulates "
    "of single precision; steps of the demo's model on one x86 core reached 15 to 39 % of what "
    "its own matrix product does, and 32 % makes a round number",
    "assumed",
)
"""Multiply-accumulates per second of one reference core in training."""
CHARGER_W = Quantity(
    7.5, "= 5 × 1.5: the least a dedicated charger gives by USB Battery Charging 1.2", "assumed"
)
"""Power that a charger feeds into battery and device together."""
STORY = "emulation.jsonl"
"""Name of the file with a device's story, beside its other state."""
PASSES = 3
"""Forward passes that take as long as one step."""
MIB = 1024.0**2
MIDNIGHT = (2026, 1, 1, 0, 0, 0, 0, 0, -1)
"""Local time from which `starts` counts; a day without a clock change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An emulated device at one time. None: it has no battery, or its power is unknown."""

    round: int
    """Newest round heard of; 0: none yet."""
    opened_s: float
    """Start of that round."""
    now_s: float
    """Seconds since it was switched on."""
    battery_j: float | None
    train_s: float
    """Seconds spent training so far, including calibration."""
    train_j: float | None
    """Joules drawn while training so far, including idle power."""


class Emulation:
    """One emulated device. For one thread at a time."""

    def __init__(
        self,
        member: FleetMember,
        *,
        work: float = 1.0,
        interval_s: float = 600.0,
        starts: int = 720,
        story: Path | None = None,
    ) -> None:
        """Takes its settings from a `Fleet`. `story`: a file to which every moment is added, and
        from which a restarted device continues; None: no file.

        Raises `ConfigError` when the profile lacks a necessary number, or `story` cannot be
        read; `OSError` when it cannot be written.
        """
        self.member = member
        board = member.board
        needed = {"speed.speed_ratio": board.speed.speed_ratio}
        if board.battery is not None:
            needed |= {"power.idle_w": board.power.idle_w, "power.train_w": board.power.train_w}
        for key, quantity in needed.items():
            if quantity is None:
                raise ConfigError(f"{board.name} cannot be emulated: its profile has no {key}")
        self._work = work
        self._interval_s = interval_s
        self._starts = starts
        self._story = story
        capacity_j = self._capacity_j
        percent = member.battery_percent
        self.moment = Moment(
            round=0,
            opened_s=0.0,
            now_s=0.0,
            battery_j=None if capacity_j is None else capacity_j * (percent or 0.0) / 100,
            train_s=0.0,
            train_j=None if board.power.train_w is None else 0.0,
        )
        if story is not None:
            self.moment = next(reversed(read_story(story)), self.moment)

    # -- replacements for the machine ---------------------------------------------------------

    @property
    def probe(self) -> Emulation:
        """The emulation itself, which is a `Probe`."""
        return self

    def clock(self) -> float:
        """Return seconds since the device was switched on."""
        return self.moment.now_s

    def wall(self) -> float:
        """Return seconds since 1970 of a day that is the same for every run, in local time."""
        return time.mktime(MIDNIGHT) + 60.0 * self._starts + self.moment.now_s

    @property
    def board(self) -> Board:
        """The member's board, with the member's link."""
        network, member = self.member.board.network, self.member
        rates = {
            key: Quantity(value, "the fleet's scenario", "assumed")
            for key in ("up_mbit_s", "down_mbit_s")
            if (value := getattr(member, key)) is not None
        }
        return replace(member.board, network=replace(network, link=member.network, **rates))

    def snapshot(self) -> Snapshot:
        """Return the device's current state; see `Probe`.

        No sensor gives its power, because a meter would read it in real time: the profile's
        watts count.
        """
        board, minute = self.member.board, self._minute
        app_mb = board.memory.app_mb
        load = self.member.background_load
        cores = sum(each.count.value for each in board.cores)
        return Snapshot(
            cpu=Cpu(
                cores=cores,
                load=load * cores,
                busy=load,
                max_mhz=None if board.cores[0].ghz is None else 1e3 * board.cores[0].ghz.value,
                classes=tuple(
                    CoreClass(
                        cores=int(each.count.value),
                        max_mhz=None if each.ghz is None else 1e3 * each.ghz.value,
                    )
                    for each in board.cores
                ),
            ),
            memory=MemoryState(
                total_bytes=MIB * board.memory.memory_mb.value,
                # Assumes that others use the same share of memory as of the processor.
                available_bytes=None if app_mb is None else MIB * app_mb.value * (1 - load),
            ),
            battery=Battery(present=False)
            if board.battery is None
            else Battery(
                present=True,
                percent=self.percent,
                charging=self.member.charges_at(minute),
                capacity_wh=board.battery.battery_wh.value,
            ),
            network=Network(metered=self.member.metered_at(minute)),
        )

    def emulated(self, backend: Backend) -> Backend:
        """Return a backend that trains like this one, in this device's time."""

        def stepping(job: Job) -> Callable[[Batch], None]:
            sam = 2 if job.rule.sam_radius > 0 else 1
            macs = job.step_macs(backend.plan)
            return lambda batch: self.trained(sam * PASSES * next(macs) * len(batch.targets))

        return TimedBackend(backend, stepping, self.note)

    def round_opened(self, round: int, now_s: float | None = None) -> None:
        """Begin a round: one interval after the last one heard of, whatever its number.

        The first one begins at once, as does one that was due while the device still trained. A
        round that is heard of again changes nothing. `now_s`: when it begins, if somebody else
        keeps the time.
        """
        moment = self.moment
        if round == moment.round:
            return
        if now_s is not None:
            self.wait_until(now_s)
        elif moment.round:
            due_s = moment.opened_s + self._interval_s
            self._pass(max(0.0, due_s - moment.now_s), self._waiting_w)
        self.moment = replace(self.moment, round=round, opened_s=self.moment.now_s)
        self.note()

    def wait_until(self, now_s: float) -> None:
        """Let time pass, waiting; nothing happens if it is later already."""
        self._pass(max(0.0, now_s - self.moment.now_s), self._waiting_w)

    def note(self) -> None:
        """Add the current moment to the story."""
        if self._story is not None:
            with self._story.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.moment)) + "\n")

    # -- results ------------------------------------------------------------------------------

    @property
    def percent(self) -> float | None:
        """Current battery charge; None: there is no battery."""
        return self.percent_at(self.moment)

    def percent_at(self, moment: Moment) -> float | None:
        """Return the battery charge at some moment of this device; None: there is no battery."""
        if moment.battery_j is None or self._capacity_j is None:
            return None
        return min(100.0, 100 * moment.battery_j / self._capacity_j)

    def step_s(self, macs: float) -> float:
        """Seconds of a training step of this many multiply-accumulates."""
        speed = self.member.board.speed.speed_ratio
        cores = (0.0 if speed is None else speed.value) * (1 - self.member.background_load)
        return self._work * macs / (REFERENCE_MACS_PER_S.value * cores)

    def trained(self, macs: float) -> None:
        """Note a training step of this many multiply-accumulates."""
        seconds, moment = self.step_s(macs), self.moment
        watts = self.member.board.power.train_w
        self._pass(seconds, 0.0 if watts is None else watts.value)
        joules = None
        if moment.train_j is not None and watts is not None:
            joules = moment.train_j + watts.value * seconds
        self.moment = replace(self.moment, train_s=moment.train_s + seconds, train_j=joules)

    def transfer_s(self, bytes_down: float, bytes_up: float) -> float | None:
        """Seconds of transfers on the member's link; None: its speed is unknown."""
        network = self.board.network
        if network.down_mbit_s is None or network.up_mbit_s is None:
            return None
        return 8e-6 * (bytes_down / network.down_mbit_s.value + bytes_up / network.up_mbit_s.value)

    def _pass(self, seconds: float, watts: float) -> None:
        """Let time pass at this power, in pieces where a charger comes and goes."""
        end = self.moment.now_s + seconds
        while self.moment.now_s < end:
            now = self.moment.now_s
            until = min(end, self._plugged_s(now))
            battery_j = self._battery_after(until - now, watts)
            self.moment = replace(self.moment, now_s=until, battery_j=battery_j)

    def _plugged_s(self, now_s: float) -> float:
        """Time at which the charger is next plugged in or out."""
        marks = [60.0 * (minute - self._starts) for minute in self.member.charging_hours or ()]
        return min((mark + DAY_S * ((now_s - mark) // DAY_S + 1) for mark in marks), default=inf)

    def _battery_after(self, seconds: float, watts: float) -> float | None:
        battery_j, capacity_j = self.moment.battery_j, self._capacity_j
        if battery_j is None or capacity_j is None:
            return None
        fed = CHARGER_W.value if self.member.charges_at(self._minute) else 0.0
        return min(capacity_j, max(0.0, battery_j + (fed - watts) * seconds))

    @property
    def _waiting_w(self) -> float:
        power = self.member.board.power
        if power.idle_w is None or power.train_w is None:
            return 0.0  # never used: there is no battery, which is checked
        span = power.train_w.value - power.idle_w.value
        return power.idle_w.value + self.member.background_load * span

    @property
    def _capacity_j(self) -> float | None:
        battery = self.member.board.battery
        return None if battery is None else 3600 * battery.battery_wh.value

    @property
    def _minute(self) -> int:
        return (self._starts + int(self.moment.now_s // 60)) % DAY_MINUTES


def emulate(fleet: Fleet, name: str, *, story: Path | None = None) -> Emulation:
    """Emulate the member of this name, in its fleet's scenario. Raises as the classes do."""
    return Emulation(
        fleet.find(name),
        work=fleet.work,
        interval_s=fleet.interval_s,
        starts=fleet.starts,
        story=story,
    )


def read_story(path: Path) -> list[Moment]:
    """Read the moments a device has written, without a last line that is still being written.

    Raises `ConfigError` for a file that is not such a story.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [Moment(**json.loads(line)) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not the story of an emulated device: {error}") from error
