"""Forgetting a device: its entries leave memory, and its movements the open rounds.

    forget.json    a device that is to be forgotten: device, id, account and time

The file is written first, and removed when all is done. A process that is killed in between leaves
a device that the next one forgets before anything else, so it is forgotten or it is not. Memory
changes in one transaction of its own. What is in the model stays there.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from coordinator.aggregate.memory import DiskMemory, Memory, stored_config
from coordinator.checksums import open_json, seal_json
from coordinator.errors import ConfigError
from coordinator.rounds.arrivals import DISOWNED
from coordinator.run.errors import RunError
from coordinator.run.folder import KEPT, MEMORY, MOVEMENTS, ROUND, Run, read_history
from coordinator.run.journal import Journal
from coordinator.run.lines import PRIVATE
from coordinator.run.resuming import whole_checkpoint
from coordinator.run.steering.audit import Audit, AuditEntry
from edge_sdk.program.files import remove, sync_folder, write_whole

log = logging.getLogger(__name__)

FORGET = "forget.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """A device that was forgotten: what of it, by whom and when; a line of the history."""

    device: str
    id: str
    """Tells two requests apart."""
    by: str
    """Account that asked for it."""
    time: str
    """UTC."""
    round: int
    """Newest committed round."""
    blocks: int
    """Blocks that memory held of it."""
    movements: int
    """Movements that were kept for rounds not yet committed."""


def forget(run: Run, memory: Memory | None, device: str, by: str) -> Forgotten:
    """Forget a device. Raises `ConfigError`, and nothing has changed, if nothing is kept of it.

    `memory` is as of its last commit, and the run's; None if its rule has none.
    """
    held = memory is not None and bool(memory.rounds(device).any())
    if not held and not _movements(run.folder, device):
        raise ConfigError(
            f"nothing is kept of {device!r}: memory has no entry of it, and no open round a "
            "movement; history shows the devices of every round"
        )
    now = datetime.now(timezone.utc)
    asked = {"device": device, "id": secrets.token_hex(8), "by": by, "time": f"{now:%FT%TZ}"}
    write_whole(run.folder / FORGET, seal_json(asked), mode=PRIVATE)
    forgotten = finish_forgetting(run, memory)
    if forgotten is None:
        raise RunError(f"{run.folder / FORGET} vanished while {device!r} was being forgotten")
    return forgotten


def finish_forgetting(run: Run, memory: Memory | None) -> Forgotten | None:
    """Do what is asked for, or was when an earlier process ended; None: nothing was.

    Doing it again changes nothing. Raises `RunError` if the request cannot be read.
    """
    path = run.folder / FORGET
    if not path.exists():
        return None
    asked = read_request(path)
    movements = _movements(run.folder, asked["device"])
    _leave_out(run.folder / KEPT, {seal_json({"file": each.name}) for each in movements})
    for each in movements:
        remove(each)
    if movements:
        sync_folder(run.folder / MOVEMENTS)
        Journal(run.folder / ROUND).disown(asked["device"], f"skip: rejected: {DISOWNED}")
    blocks = 0
    if memory is not None:
        blocks = memory.forget(asked["device"])
        memory.commit()
    forgotten = Forgotten(**asked, round=run.rounds()[-1], blocks=blocks, movements=len(movements))
    known = (line.get("forgotten", {}).get("id") for line in read_history(run.folder))
    if asked["id"] not in known:
        run.record({"forgotten": asdict(forgotten)})
    Audit(run.folder).put(_audited(forgotten))
    remove(path)
    sync_folder(run.folder)
    log.info(
        "forgot %s: %d blocks in memory, %d movements of open rounds",
        *(forgotten.device, blocks, len(movements)),
        extra={"facts": {"event": "forgotten", **asdict(forgotten)}},
    )
    return forgotten


def _audited(forgotten: Forgotten) -> AuditEntry:
    at = datetime.strptime(forgotten.time, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return AuditEntry(
        id=forgotten.id,
        time=at.timestamp(),
        by=forgotten.by,
        what="forget",
        details={
            "device": forgotten.device,
            "blocks": forgotten.blocks,
            "movements": forgotten.movements,
        },
    )


def forget_in_folder(folder: Path, device: str, by: str) -> Forgotten:
    """Forget a device in the folder of a stopped run.

    Raises `RunError` if the run is open elsewhere, and as `forget` and `DiskMemory`.
    """
    with Run(folder) as run:
        memory = None
        if (folder / MEMORY).is_dir():
            config = stored_config(folder / MEMORY, run.plan)
            memory = DiskMemory(folder / MEMORY, run.plan, config, reserve_bytes=0)
        try:
            whole_checkpoint(run, memory, Journal(folder / ROUND))
            finish_forgetting(run, memory)
            return forget(run, memory, device, by)
        finally:
            if memory is not None:
                memory.close()


def _movements(folder: Path, device: str) -> list[Path]:
    """Return the files of a device's movements that are kept for open rounds."""
    found = folder / MOVEMENTS
    if not found.is_dir():
        return []
    return sorted(path for path in found.iterdir() if path.name.partition("-")[2] == device)


def _leave_out(path: Path, lines: set[bytes]) -> None:
    """Take the names of movements out of the list of those that must be there."""
    if lines and path.is_file():
        rest = [each for each in path.read_bytes().splitlines(keepends=True) if each not in lines]
        write_whole(path, b"".join(rest), mode=PRIVATE)


def read_request(path: Path) -> dict[str, Any]:
    """Read which device is to be forgotten. Raises `RunError`."""
    try:
        asked = open_json(path.read_bytes())
        return {name: str(asked[name]) for name in ("device", "id", "by", "time")}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} cannot be read: delete it, and forget the device again ({error!r})"
        ) from error
