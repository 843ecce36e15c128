"""The record of issued certificates: a JSON file, always replaced as a whole.

It never holds a key. A pair of certificates is recorded before it is handed out, so that every
existing one can be revoked. Beside it stand the tasks that its owner may take part in; enrolments
of version 2 name none and are for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from coordinator.checksums import open_versioned, seal_json
from coordinator.operate.identity.errors import IdentityError
from coordinator.operate.identity.files import File, write_file
from edge_sdk.protocol.messages.topics import COORDINATOR, VIEWER, is_named

VERSION = 3
_UNCHECKED = 2
"""The first version with checksums; the one before it is read, too."""

Standing = Literal["valid", "expired", "revoked"]

AllowedTasks = tuple[str, ...] | None
"""Tasks that a device may take part in, sorted; None: all, those of the future included."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """The two certificates of a participant, control and bulk. Times are UTC."""

    name: str
    serials: tuple[int, int]
    issued: datetime
    until: datetime
    revoked: datetime | None = None
    tasks: AllowedTasks = None

    def standing(self, now: datetime) -> Standing:
        """Return the state of the pair at this time."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if now >= self.until else "valid"

    @property
    def is_coordinator(self) -> bool:
        """True if it grants a coordinator's rights."""
        return is_named(self.name, COORDINATOR)

    @property
    def is_viewer(self) -> bool:
        """True if it grants a viewer's rights: to read what runs tell dashboards."""
        return is_named(self.name, VIEWER)

    @property
    def is_device(self) -> bool:
        """True if it is that of a device."""
        return not (self.is_coordinator or self.is_viewer)


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """The broker's address, and the folder its files were written to (None: not yet)."""

    host: str
    port: int
    files: Path | None = None
    by_task: bool = False
    """True if its access rules name every device with its tasks, so that they have to be written
    again when somebody comes, goes or changes; False: they let every device into every task."""


@dataclass(frozen=True, slots=True)
class EnrolmentIndex:
    """All issued certificates, oldest first, and the brokers that accept them."""

    enrolments: tuple[Enrolment, ...] = ()
    broker: BrokerPlace | None = None
    """The broker of `broker-config` and `enroll`; None: not known yet."""
    runs: tuple[BrokerPlace, ...] = ()
    """Embedded brokers of runs, the last started one last."""

    @property
    def place(self) -> BrokerPlace | None:
        """The broker for new bundles."""
        return self.broker or (self.runs[-1] if self.runs else None)

    def allowed(self, now: datetime) -> dict[str, AllowedTasks]:
        """Return the tasks of every device with a valid certificate, by name."""
        valid = (each for each in self.enrolments if each.standing(now) == "valid")
        return {each.name: each.tasks for each in valid if each.is_device}

    def viewers(self, now: datetime) -> dict[str, AllowedTasks]:
        """Return the tasks of every viewer with a valid certificate, by name."""
        valid = (each for each in self.enrolments if each.standing(now) == "valid")
        return {each.name: each.tasks for each in valid if each.is_viewer}

    def leaving(self, now: datetime) -> dict[str, AllowedTasks]:
        """Return the tasks of devices that were revoked, whose connections may still stand."""
        here = self.allowed(now)
        return {
            each.name: each.tasks
            for each in self.enrolments
            if each.standing(now) == "revoked"
            and now < each.until
            and each.name not in here
            and each.is_device
        }

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders on this machine that hold files of a broker."""
        places = (self.broker, *self.runs)
        return tuple(dict.fromkeys(each.files for each in places if each and each.files))

    def of(self, name: str) -> tuple[Enrolment, ...]:
        """Return the enrolments of a participant, oldest first."""
        return tuple(each for each in self.enrolments if each.name == name)

    def with_enrolment(self, enrolment: Enrolment) -> EnrolmentIndex:
        """Return the index with one more enrolment."""
        return replace(self, enrolments=(*self.enrolments, enrolment))

    def with_tasks(self, name: str, tasks: AllowedTasks, now: datetime) -> EnrolmentIndex:
        """Return the index with these tasks for every valid enrolment of a device."""
        return replace(
            self,
            enrolments=tuple(
                replace(each, tasks=tasks)
                if each.name == name and each.standing(now) == "valid"
                else each
                for each in self.enrolments
            ),
        )

    def with_run(self, place: BrokerPlace) -> EnrolmentIndex:
        """Return the index with the embedded broker of a run, without runs that were deleted."""
        others = [
            each
            for each in self.runs
            if each.files is not None and each.files != place.files and each.files.is_dir()
        ]
        # Earlier versions noted a run as the broker.
        known = None if self.broker and self.broker.files == place.files else self.broker
        return replace(self, broker=known, runs=(*others, place))

    def with_revoked(self, name: str, now: datetime) -> EnrolmentIndex:
        """Return the index with every valid enrolment of a participant revoked."""
        return replace(
            self,
            enrolments=tuple(
                replace(each, revoked=now)
                if each.name == name and each.standing(now) == "valid"
                else each
                for each in self.enrolments
            ),
        )


def sorted_tasks(tasks: Iterable[str]) -> tuple[str, ...]:
    """Return tasks in the order that the index keeps them, each once."""
    return tuple(sorted(set(tasks)))


def read_index(path: Path) -> EnrolmentIndex:
    """Read an index. Raises `IdentityError` when it is damaged."""
    try:
        content = open_versioned(path.read_bytes(), _UNCHECKED)
        if content["version"] not in (_UNCHECKED, VERSION):
            raise IdentityError(
                f"{path} has version {content['version']}; this program reads version {VERSION}"
            )
        broker = content["broker"]
        return EnrolmentIndex(
            tuple(_read_enrolment(each) for each in content["enrolments"]),
            None if broker is None else _read_broker(broker),
            tuple(map(_read_broker, content.get("runs", ()))),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IdentityError(
            f"{path} cannot be read ({type(error).__name__}: {error}): restore it from a backup; "
            "without it no certificate can be revoked"
        ) from error


def write_index(path: Path, index: EnrolmentIndex) -> None:
    """Write an index, replacing the file."""
    broker = index.broker
    content = {
        "version": VERSION,
        "broker": None if broker is None else _write_broker(broker),
        "runs": [_write_broker(each) for each in index.runs],
        "enrolments": [
            {
                "name": each.name,
                "serials": [f"{serial:x}" for serial in each.serials],
                "issued": each.issued.isoformat(),
                "until": each.until.isoformat(),
                "revoked": None if each.revoked is None else each.revoked.isoformat(),
                "tasks": None if each.tasks is None else list(each.tasks),
            }
            for each in index.enrolments
        ],
    }
    write_file(path, File(seal_json(content)))


def _read_enrolment(content: dict[str, Any]) -> Enrolment:
    control, bulk = (int(serial, 16) for serial in content["serials"])
    revoked, tasks = content["revoked"], content.get("tasks")
    return Enrolment(
        name=content["name"],
        serials=(control, bulk),
        issued=datetime.fromisoformat(content["issued"]),
        until=datetime.fromisoformat(content["until"]),
        revoked=None if revoked is None else datetime.fromisoformat(revoked),
        tasks=None if tasks is None else sorted_tasks(tasks),
    )


def _write_broker(broker: BrokerPlace) -> dict[str, Any]:
    files = None if broker.files is None else str(broker.files)
    return {"host": broker.host, "port": broker.port, "files": files, "by_task": broker.by_task}


def _read_broker(content: dict[str, Any]) -> BrokerPlace:
    files = content["files"]
    place = None if files is None else Path(files)
    return BrokerPlace(content["host"], content["port"], place, content.get("by_task") is True)
