"""Residuals: values that top-k left out, kept on the device and added to later movements.

    corrected = residuals.corrected(round, movement)         movement + residuals of its blocks
    data      = encode_blocks(plan, groups, corrected, …)    sent
    residuals.keep(round, movement, decode_blocks(plan, data)[1])
    …
    residuals.settle(round, used=True)                       the receipt says that it was counted

Every block has its own residual, and the round it is of. A movement that was used adds
`movement − sent` to the residuals of its blocks; one that was not used adds nothing, and before its
receipt nothing changes. So, as long as nothing is forgotten, and to float32's rounding:

    sum of all that was sent and used + residual = sum of the movements that were used

in whatever order receipts come, and however many are awaited at once. A residual more than
`forget_after` rounds old is forgotten: it is no longer added, and is removed at the next receipt. A
movement that waits that long for its receipt settles nothing.

A store belongs to one task. It survives a stop at any instruction: a receipt that is processed
twice counts once. Files that are damaged, or of another plan, are ignored.
"""

from __future__ import annotations

import logging
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.program.files import make_folder, remove, remove_leftovers, write_whole
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

log = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]


class ArrayStore:
    """Named sets of arrays; this one is in memory. Names are letters, digits and dashes."""

    def __init__(self) -> None:
        self._held: dict[str, Arrays] = {}

    def read(self, name: str) -> Arrays | None:
        """Return the arrays under this name; None if there are none, or they are damaged."""
        return self._held.get(name)

    def write(self, name: str, arrays: Arrays) -> None:
        """Replace the arrays under this name, all at once or not at all."""
        self._held[name] = {key: array.copy() for key, array in arrays.items()}

    def remove(self, name: str) -> None:
        """Forget the name, if it is there."""
        self._held.pop(name, None)

    def names(self) -> Iterable[str]:
        """Return all names."""
        return list(self._held)


class FolderStore(ArrayStore):
    """An `ArrayStore` in a folder: one `.npz` file per name, replaced as a whole.

    One more array holds the CRC-32 of all others. Files without it, of earlier versions, count as
    damaged.

    Raises `OSError` where the disk does, also when it is full; the old file then stays.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        remove_leftovers(folder)
        self._folder = folder

    def read(self, name: str) -> Arrays | None:
        """See `ArrayStore`."""
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:
                arrays = dict(loaded)
            if arrays.pop(CHECK).tobytes() != _check_of(arrays).tobytes():
                raise ValueError("its checksum does not match")
        except UNREADABLE as error:
            log.warning("%s is damaged and is ignored: %r", path, error)
            return None
        return arrays

    def write(self, name: str, arrays: Arrays) -> None:
        """See `ArrayStore`."""
        all = {**arrays, CHECK: _check_of(arrays)}
        write_whole(self._path(name), lambda file: np.savez(file, allow_pickle=False, **all))

    def remove(self, name: str) -> None:
        """See `ArrayStore`."""
        remove(self._path(name))

    def names(self) -> Iterable[str]:
        """See `ArrayStore`."""
        return [path.stem for path in self._folder.glob("*.npz")]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"


@dataclass(frozen=True, slots=True, eq=False)
class HeldResiduals:
    """The residuals of some blocks."""

    blocks: Blocks
    rounds: Indices
    """Per block, the newest round whose movement is in its residual."""
    last: int
    """The round that was settled last; 0 if none was."""


NOTHING = HeldResiduals(
    Blocks(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)),
    np.empty(0, dtype=np.int64),
    0,
)


def fresh(held: HeldResiduals, sizes: Indices, round: int, forget_after: int) -> HeldResiduals:
    """Return the residuals without those that are too old in this round."""
    young = round - held.rounds <= forget_after
    if young.all():
        return held
    ids = held.blocks.ids
    blocks = Blocks(ids[young], held.blocks.values[np.repeat(young, sizes[ids])])
    return HeldResiduals(blocks, held.rounds[young], held.last)


def added(held: Blocks, movement: Blocks, sizes: Indices) -> Blocks:
    """Return the movement plus the residuals of its blocks."""
    values = movement.values.copy()
    values[_within(movement.ids, held.ids, sizes)] += held.values[
        _within(held.ids, movement.ids, sizes)
    ]
    return Blocks(movement.ids, values)


def settled(held: HeldResiduals, change: Blocks, round: int, sizes: Indices) -> HeldResiduals:
    """Return the residuals plus the change that a round's movement makes."""
    ids = np.union1d(held.blocks.ids, change.ids)
    values = np.zeros(int(sizes[ids].sum()), dtype=np.float32)
    rounds = np.zeros(len(ids), dtype=np.int64)
    values[_within(ids, held.blocks.ids, sizes)] = held.blocks.values
    values[_within(ids, change.ids, sizes)] += change.values
    rounds[np.isin(ids, held.blocks.ids)] = held.rounds
    moved = np.isin(ids, change.ids)
    rounds[moved] = np.maximum(rounds[moved], round)
    return HeldResiduals(Blocks(ids, values), rounds, round)


class Residuals:
    """The residuals of one device and task, in a store; see the module's docstring."""

    def __init__(
        self, plan: ModelPlan, store: ArrayStore, *, forget_after: int, fades: bool = True
    ) -> None:
        """`forget_after` is in rounds, at least 1. `fades` False: only movements that wait for
        their receipt are forgotten.
        """
        if forget_after < 1:
            raise ValueError(f"residuals are kept for 1 round or more, not {forget_after}")
        self._plan = plan
        self._store = store
        self._forget_after = forget_after
        self._fades = fades

    def corrected(self, round: int, movement: Blocks) -> Blocks:
        """Return the values to encode: the movement plus its residuals. Changes nothing."""
        held = self._fresh(self._held(), round)
        return added(held.blocks, movement, self._plan.block_sizes)

    def keep(self, round: int, movement: Blocks, sent: Blocks) -> None:
        """Remember, until its receipt, the change that a movement makes.

        `movement` is as trained, before `corrected`; `sent` is as the coordinator decodes it. Both
        have the same blocks.
        """
        for name in list(self._store.names()):
            waiting = _round_of(name)
            if waiting is not None and round - waiting > self._forget_after:
                self._store.remove(name)
        values = movement.values - sent.values
        self._write(_name_of(round), Blocks(movement.ids, values))

    def settle(self, round: int, *, used: bool) -> None:
        """Process the receipt of this round's movement; it may come more than once."""
        name, held = _name_of(round), self._held()
        # After a stop right behind the last settlement, its change is still here.
        self._store.remove(_name_of(held.last))
        waiting = self._read(name)
        if waiting is not None and used:
            sizes = self._plan.block_sizes
            change = Blocks(waiting["ids"], waiting["values"])
            now = settled(self._fresh(held, round), change, round, sizes)
            self._write(HELD, now.blocks, rounds=now.rounds, last=np.array(now.last))
        self._store.remove(name)

    def _fresh(self, held: HeldResiduals, round: int) -> HeldResiduals:
        """Return the residuals without those that are forgotten in this round."""
        if not self._fades:
            return held
        return fresh(held, self._plan.block_sizes, round, self._forget_after)

    def _held(self) -> HeldResiduals:
        stored = self._read(HELD)
        if stored is None:
            return NOTHING
        return HeldResiduals(
            Blocks(stored["ids"], stored["values"]), stored["rounds"], int(stored["last"])
        )

    def _read(self, name: str) -> Arrays | None:
        stored = self._store.read(name)
        if stored is None:
            return None
        if stored["plan"].tobytes().hex() != self._plan.hash:
            log.warning("residuals %r are of another plan and are ignored", name)
            return None
        return stored

    def _write(self, name: str, blocks: Blocks, **more: NDArray[Any]) -> None:
        plan = np.frombuffer(bytes.fromhex(self._plan.hash), dtype=np.uint8)
        self._store.write(name, {"plan": plan, "ids": blocks.ids, "values": blocks.values, **more})


HELD = "held"
CHECK = "check"
UNREADABLE = (
    *(ValueError, KeyError, EOFError, OSError, RuntimeError, SyntaxError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
"""Errors that reading a damaged file may raise."""
_WAITING = "round-"


def _check_of(arrays: Arrays) -> NDArray[np.uint32]:
    """Return the CRC-32 of arrays with their names, types and shapes."""
    check = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        check = zlib.crc32(f"{name} {array.dtype.str} {array.shape}\n".encode(), check)
        data = array.data.cast("B") if array.ndim and array.size else array.tobytes()
        check = zlib.crc32(data, check)
    return np.array([check], dtype=np.uint32)


def _name_of(round: int) -> str:
    return f"{_WAITING}{round}"


def _round_of(name: str) -> int | None:
    number = name.removeprefix(_WAITING)
    return int(number) if number != name and number.isdecimal() else None


def _within(ids: Indices, others: Indices, sizes: Indices) -> NDArray[np.bool_]:
    """Mark every value of the blocks `ids` whose block is among `others`."""
    return np.repeat(np.isin(ids, others), sizes[ids])
