"""A coordinator, a broker and many devices, for the duration of a context."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.network.load.site.broker import RestartedBroker
from benchmarks.network.load.site.files import open_files, write_run
from benchmarks.network.load.site.history import HistoryTail
from benchmarks.network.stage.files import device_names, run_folder, write_device
from benchmarks.network.stage.processes import cpu_s
from benchmarks.network.stage.programs import Programs, serve_command
from benchmarks.network.stage.tasks import PreparedTask
from coordinator.run.folder import HISTORY
from edge_sdk.program.processes import ChildProcess

FILES_PER_DEVICE = 12
"""Two connections, the wake-up pipes of their threads, and a few files now and then."""
MORE_FILES = 200
"""Open files of a process without devices."""


@dataclass(frozen=True, slots=True)
class CpuSpent:
    """CPU seconds of the coordinator, the broker, and all devices together."""

    coordinator_s: float
    broker_s: float
    devices_s: float


@dataclass(slots=True)
class Site:
    """The running programs. Made by `open_site`, at first without devices."""

    folder: Path
    devices: int
    together: int
    """Devices per process."""
    broker: RestartedBroker
    programs: Programs
    coordinator: ChildProcess
    history: HistoryTail
    fleets: list[ChildProcess] = field(default_factory=list)

    def start_devices(self) -> None:
        """Start all devices."""
        paths = [
            str(write_device(self.folder, name, self.broker.settings, stay=True))
            for name in device_names(self.devices)
        ]
        for number, at in enumerate(range(0, self.devices, self.together)):
            command = [
                "-m",
                "benchmarks.network.load.site.fleet_process",
                *paths[at : at + self.together],
            ]
            self.fleets.append(self.programs.begin(f"fleet-{number}", command))

    def wait_for_devices(self) -> None:
        """Wait until all are present. Raises `FigureError`."""
        presences = self.broker.presences
        self.programs.wait_until(
            lambda: presences.number >= self.devices, f"that {self.devices} devices are there"
        )

    def wait_for_rounds(self, number: int) -> None:
        """Wait until this many are over. Raises `FigureError`."""
        self.programs.wait_until(
            lambda: len(self.history.closed()) >= number, f"the end of round {number}"
        )

    def pause(self, seconds: float) -> None:
        """Let this much time pass. Raises `FigureError` when a program fails meanwhile."""
        until = time.monotonic() + seconds
        self.programs.wait_until(lambda: time.monotonic() >= until, "the end of a pause")

    def spent(self) -> CpuSpent:
        """Return the CPU seconds since the programs were started."""
        return CpuSpent(
            coordinator_s=cpu_s(self.coordinator.pid),
            broker_s=cpu_s(self.broker.pid),
            devices_s=sum(cpu_s(fleet.pid) for fleet in self.fleets),
        )


@contextmanager
def open_site(task: PreparedTask, devices: int, together: int, bytecode: Path) -> Iterator[Site]:
    """Start a broker, and a coordinator for this many devices, `together` per process.

    Raises `BrokerError` without Mosquitto, `FigureError` when something does not work.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        stack.enter_context(open_files(MORE_FILES + max(2 * devices, FILES_PER_DEVICE * together)))
        broker = stack.enter_context(RestartedBroker(folder / "broker"))
        broker.start()
        programs = stack.enter_context(Programs(folder, bytecode))
        path = write_run(folder, task, devices, broker.settings)
        coordinator = programs.begin("coordinator", serve_command(path))
        programs.wait_until(lambda: broker.presences.coordinator, "the coordinator's start")
        history = HistoryTail(run_folder(folder) / HISTORY)
        yield Site(folder, devices, together, broker, programs, coordinator, history)
