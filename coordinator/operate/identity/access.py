"""Carries access rules to the brokers of an authority: written beside them, and read by them.

Brokers that were set up before rules named tasks, or for every task, are left as they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coordinator.operate.identity.authority import Authority
from coordinator.operate.identity.files import write_file
from coordinator.operate.identity.index import BrokerPlace
from coordinator.operate.identity.mosquitto import ACL, rules_file
from edge_sdk.program.control import ControlError, NotServedError, ask_run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenRules:
    """Where rules were written, before the brokers there have read them."""

    folders: tuple[Path, ...] = ()
    """Folders of brokers of runs on this machine, which can be told: all of them, as one may have
    missed rules that were written before."""
    own: BrokerPlace | None = None
    """The broker of `broker-config`, if its rules name tasks; somebody has to reload it."""
    failures: tuple[tuple[Path, str], ...] = ()
    """Folders that could not be written to, each with the reason."""


def write_rules(authority: Authority) -> WrittenRules:
    """Write the access rules beside every broker of this authority on this machine."""
    index, file = authority.index, rules_file(authority, by_task=True)
    failures, folders = list[tuple[Path, str]](), list[Path]()
    own = index.broker if index.broker is not None and index.broker.by_task else None
    for place in (*index.runs, *([own] if own else [])):
        folder = place.files
        if folder is None or not place.by_task or not folder.is_dir():
            continue  # on another machine, or deleted
        path = folder / ACL
        try:
            if path.exists() and path.read_bytes() == file.content:
                own = None if place is own else own
            else:
                write_file(path, file)
        except OSError as error:
            failures.append((folder, error.strerror or str(error)))
            continue
        if place is not own:
            folders.append(folder)
    return WrittenRules(tuple(folders), own, tuple(failures))


def reload_brokers(folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Let the brokers of served runs read their files again; returns those that do not, and why.

    A run that is not being served reads them when it starts.
    """
    answers = ((folder, _reload(folder)) for folder in folders)
    return [(folder, reason) for folder, reason in answers if reason is not None]


def _reload(folder: Path) -> str | None:
    try:
        ask_run(folder.parent, "broker.reload")
    except NotServedError:
        return None
    except ControlError as error:
        return str(error)
    return None


def reload_later(folders: Iterable[Path]) -> None:
    """Let the brokers of other runs read their files, without waiting for them."""
    wanted = tuple(folders)

    def tell() -> None:
        for folder, reason in reload_brokers(wanted):
            log.warning("%s: its broker has not read the new access rules: %s", folder, reason)

    if wanted:
        threading.Thread(target=tell, name="access", daemon=True).start()
