"""The owner's commands to a device that runs, through a socket in its state folder (mode 0600).

    status {}              what it does, per task, and what its tasks share
    history {task}         the last rounds of a task
    pause {seconds}        null: until it is resumed
    resume {}

The folder is the task's, or with several tasks `<state_dir>/_device/<device>`. Where there can be
no socket, as on storage shared with Android's apps, the device says so once and runs without: its
logbook and the file of the pause do, only less promptly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_sdk import __version__
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.service import DeviceService
from edge_sdk.device.stores.household import Household, shared_path
from edge_sdk.device.stores.movements import device_path
from edge_sdk.program.control import ControlCommand, ControlError, ControlSocket
from edge_sdk.program.files import make_folder
from edge_sdk.program.logs import fact, scope_of
from edge_sdk.protocol.errors import ConfigError

log = logging.getLogger(__name__)


def socket_folder(config: DeviceConfig) -> Path:
    """Return the folder of the socket while a device with these settings runs."""
    if config.tasks:
        return shared_path(config.state_dir, config.name)
    return device_path(config.state_dir, config.task, config.name)


@contextmanager
def answering(
    config: DeviceConfig, household: Household, services: Sequence[DeviceService]
) -> Iterator[None]:
    """Answer the owner's commands, and note the last error, while the context lasts.

    Without a socket if that is not possible here.
    """
    notes = _LastError(services)
    logging.getLogger("edge_sdk").addHandler(notes)
    control = _open(socket_folder(config), _Commands(config, household, services))
    try:
        yield
    finally:
        if control is not None:
            control.close()
        logging.getLogger("edge_sdk").removeHandler(notes)


def _open(folder: Path, commands: _Commands) -> ControlSocket | None:
    try:
        make_folder(folder)
        control = ControlSocket(folder, commands.table)
        control.start()
    except (ControlError, OSError, AttributeError) as error:  # Windows knows no such sockets
        log.warning(
            "no socket for status, pause and resume: %s; they use files instead",
            error,
            extra=fact("no_socket"),
        )
        return None
    return control


class _Commands:
    def __init__(
        self, config: DeviceConfig, household: Household, services: Sequence[DeviceService]
    ) -> None:
        self._config = config
        self._household = household
        self._services = services
        self.table: dict[str, ControlCommand] = {
            "status": self.status,
            "history": self.history,
            "pause": self.pause,
            "resume": self.resume,
        }

    def status(self) -> dict[str, Any]:
        slot = self._household.slot
        return {
            "device": self._config.name,
            "version": __version__,
            "pid": os.getpid(),
            "training": None if slot is None else slot.training,
            "tasks": [
                each.logbook.to_dict() for each in self._services if each.logbook is not None
            ],
        }

    def history(self, task: str | None = None) -> list[dict[str, Any]]:
        for each in self._services:
            if each.config.task == (task or self._services[0].config.task):
                return [] if each.logbook is None else each.logbook.rounds
        names = ", ".join(each.config.task for each in self._services)
        raise ConfigError(f"this device does not take part in {task!r}, but in {names}")

    def pause(self, seconds: float | None = None) -> dict[str, Any]:
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 < seconds < 1e10):
            raise ConfigError(f"seconds = {seconds!r}: must be a number above 0, or null")
        terms = self._household.pause.begin(seconds)
        self._look()
        return {"since": terms.since, "until": terms.until}

    def resume(self) -> dict[str, Any]:
        lifted = self._household.pause.lift()
        self._look()
        return {"lifted": lifted}

    def _look(self) -> None:
        for each in self._services:
            each.look()


class _LastError(logging.Handler):
    """Notes warnings and errors in the logbook of the task that they are about."""

    def __init__(self, services: Sequence[DeviceService]) -> None:
        super().__init__(logging.WARNING)
        self._services = services

    def emit(self, record: logging.LogRecord) -> None:
        name = scope_of("task")
        for each in self._services:
            if each.logbook is not None and name in (None, each.config.task):
                each.logbook.error(record.getMessage())
                return
