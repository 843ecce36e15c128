"""Probes: sources of snapshots of the device.

    choose_probe()     this machine, detected automatically or chosen by name
    PushedProbe        values pushed by a host app, over another probe or none
    StaticProbe        always the same

A probe never raises and never waits for a sensor: a value that cannot be read is unknown.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from edge_sdk.machine.sensors import android, desktop, jetson, raspberry_pi
from edge_sdk.machine.sensors.commands import Background, Command
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.power_supply import read_battery
from edge_sdk.machine.sensors.linux.system import LinuxSources, network_manager
from edge_sdk.machine.sensors.linux.thermal import read_heat
from edge_sdk.machine.snapshot import Probe, Snapshot
from edge_sdk.program.plain import ProfileError

log = logging.getLogger(__name__)

ProbeName = Literal["linux", "raspberry-pi", "jetson", "android", "macos", "windows"]

Source = Callable[[], Snapshot]
"""Reads what it knows, without waiting. May raise: that loses its values and no more."""


class StaticProbe:
    """Always the same snapshot, for devices without sensors, and for tests."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        """See `Probe`."""
        return self._snapshot


class PushedProbe:
    """The latest values pushed by a host app, completed from `base`.

    An app may push parts at different times; each value lasts until a newer one comes or until it
    is `max_age_s` old, when it becomes unknown again. Any thread may push.
    """

    def __init__(
        self,
        base: Probe | None = None,
        *,
        max_age_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pushed = Snapshot()
        self._at = clock()

    def push(self, said: Snapshot | Mapping[str, Any]) -> None:
        """Take every known value in `said`; a mapping is as in `Snapshot.from_dict`.

        Raises `ProfileError` for impossible values, and then takes nothing.
        """
        new = Snapshot.from_dict(said.to_dict() if isinstance(said, Snapshot) else said)
        with self._lock:
            now = self._clock()
            self._pushed = new.filled_from(self._pushed.aged(now - self._at))
            self._at = now

    def snapshot(self) -> Snapshot:
        """See `Probe`."""
        with self._lock:
            pushed = self._pushed.aged(self._clock() - self._at).no_older_than(self._max_age_s)
        return pushed if self._base is None else pushed.filled_from(self._base.snapshot())


class LocalProbe:
    """This machine: sources are read directly, commands run in the background.

    Earlier sources take precedence over later ones, and all of them over commands. Snapshots that
    are asked for within `lasts_s` of one are the same, aged.
    """

    def __init__(
        self,
        name: ProbeName,
        sources: Sequence[Source],
        commands: Sequence[Command] = (),
        *,
        lasts_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._sources = tuple(sources)
        self._commands = [Background(command, clock) for command in commands]
        self._lasts_s = lasts_s
        self._clock = clock
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._last: tuple[float, Snapshot] | None = None
        self._wanted: list[Background] | None = None
        """Commands that had to fill the last snapshot; None: there was none."""

    def snapshot(self) -> Snapshot:
        """See `Probe`."""
        with self._lock:
            now = self._clock()
            if self._last is not None and 0 <= (age := now - self._last[0]) < self._lasts_s:
                return self._last[1].aged(age) if age else self._last[1]
            snapshot = Snapshot()
            for source in self._sources:
                snapshot = snapshot.filled_from(self._read(source))
            self._wanted = []
            for command in self._commands:
                known = snapshot.known()
                if any(path not in known for path in command.fills):
                    self._wanted.append(command)
                    snapshot = snapshot.filled_from(self._read(command.latest))
            self._last = now, snapshot
            return snapshot

    def only(self, *parts: str) -> LocalProbe:
        """Return a probe that reads only the sensors for these parts, such as `power`: for many
        readings per second. A sensor that has nothing to say now, such as a battery where there is
        none, is not read again.
        """
        narrow = copy(self)
        narrow._last, narrow._wanted, narrow._lasts_s = None, None, 0.0
        with self._lock:
            narrow._sources = tuple(
                each for each in self._sources if _tells(self._read(each).known(), parts)
            )
        narrow._commands = [each for each in self._commands if _tells(each.fills, parts)]
        return narrow

    def settle(self, timeout_s: float) -> bool:
        """Start the commands that are due, and wait for those that run, at most this long; False:
        some are not done. The next snapshot reads everything anew.
        """
        if self._wanted is None:
            self.snapshot()
        for command in self._wanted or ():
            command.latest()
        deadline = time.monotonic() + timeout_s
        done = all(
            command.settle(max(0.0, deadline - time.monotonic())) for command in self._commands
        )
        with self._lock:
            self._last = None
        return done

    def close(self) -> None:
        """Kill running commands; later snapshots learn nothing new from them."""
        for command in self._commands:
            command.close()

    def _read(self, source: Source) -> Snapshot:
        try:
            return self._credible(source())
        except Exception:
            # A surprising sensor must not end the device; it is logged once, with the traceback.
            if repr(source) not in self._told:
                self._told.add(repr(source))
                log.exception("%s: reading failed; its values are unknown", self.name)
            return Snapshot()

    def _credible(self, snapshot: Snapshot) -> Snapshot:
        snapshot, wrong = snapshot.credible()
        for sentence in wrong:
            path = sentence.partition(" ")[0]
            if path not in self._told:
                self._told.add(path)
                log.warning("%s: %s; treated as unknown", self.name, sentence)
        return snapshot


def _tells(paths: Iterable[str], parts: tuple[str, ...]) -> bool:
    return any(path.partition(".")[0] in parts for path in paths)


def choose_probe(
    root: Path = Path("/"),
    *,
    name: ProbeName | None = None,
    lasts_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> LocalProbe:
    """Return the probe for the machine below `root`; `name` None: detect it. `lasts_s`: see
    `LocalProbe`.

    A root other than / stands for a Linux machine: /proc, /sys and programs are looked up there.
    Raises `ProfileError` for an unknown name.
    """
    files = Files(root, clock)
    if name is None:
        name = _recognised(files)
    if name not in get_args(ProbeName):
        raise ProfileError(f"probe {name!r}: must be one of {', '.join(get_args(ProbeName))}")
    sources, commands = _PROBES[name](files, clock)
    return LocalProbe(name, sources, commands, lasts_s=lasts_s, clock=clock)


def _recognised(files: Files) -> ProbeName:
    if files.is_machine and sys.platform == "darwin":
        return "macos"
    if files.is_machine and sys.platform == "win32":
        return "windows"
    model = files.text("proc/device-tree/model") or ""
    if android.is_android(files):
        return "android"
    if jetson.is_jetson(files, model):
        return "jetson"
    return "raspberry-pi" if raspberry_pi.is_raspberry_pi(model) else "linux"


_Parts = tuple[list[Source], list[Command]]


def _linux(files: Files, clock: Callable[[], float]) -> _Parts:
    linux = LinuxSources(files, clock)
    own = [partial(read_battery, files), partial(read_heat, files)]
    sources: list[Source] = [linux.cpu, linux.memory, linux.network, *own]
    return sources, [network_manager(files)]


def _raspberry_pi(files: Files, clock: Callable[[], float]) -> _Parts:
    linux = LinuxSources(files, clock)
    read = (raspberry_pi.read_flags, raspberry_pi.read_undervoltage, raspberry_pi.read_zones)
    own = [partial(each, files) for each in (*read, read_battery)]
    sources: list[Source] = [linux.cpu, linux.memory, linux.network, *own]
    return sources, [raspberry_pi.vcgencmd(files), network_manager(files)]


def _jetson(files: Files, clock: Callable[[], float]) -> _Parts:
    sources, commands = _linux(files, clock)
    own = [partial(jetson.read_power, files), partial(jetson.read_gpu, files)]
    return [*own, jetson.read_unified, *sources], [
        jetson.nvpmodel(files),
        jetson.jtop(files),
        *commands,
    ]


def _android(files: Files, clock: Callable[[], float]) -> _Parts:
    linux = LinuxSources(files, clock)
    own = [partial(android.read_battery, files), partial(read_heat, files)]
    sources: list[Source] = [linux.cpu, linux.memory, linux.network, *own]
    return sources, [android.battery_status(files), android.wifi_info(files)]


def _macos(files: Files, clock: Callable[[], float]) -> _Parts:
    psutil = desktop.PsutilSources(clock)
    sources = [psutil.cpu, psutil.memory, psutil.battery, psutil.network]
    return sources, [desktop.ioreg(files), desktop.pmset(files)]


def _windows(files: Files, clock: Callable[[], float]) -> _Parts:
    psutil = desktop.PsutilSources(clock)
    sources = [psutil.cpu, psutil.memory, psutil.battery, psutil.network]
    return sources, [desktop.powershell(files)]


_PROBES: dict[ProbeName, Callable[[Files, Callable[[], float]], _Parts]] = {
    "linux": _linux,
    "raspberry-pi": _raspberry_pi,
    "jetson": _jetson,
    "android": _android,
    "macos": _macos,
    "windows": _windows,
}
