"""One suite for both stores: any history against a dictionary that sums everything anew."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from coordinator.aggregate.contribution import Contribution, Weighting
from coordinator.aggregate.memory import DiskMemory, Memory, MemoryConfig, MemoryType, RamMemory
from coordinator.aggregate.memory.contract import Float64
from edge_sdk.protocol.errors import BlockError, StateError
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.contract.memory.oracle import PLAN, Oracle, bound, movement

DEVICES = ("ada", "bob", "eve")
DTYPES: tuple[MemoryType, ...] = ("fp32", "fp16", "int8")

movements = st.lists(
    st.tuples(
        st.sampled_from(DEVICES),
        st.integers(0, 4),
        st.lists(st.integers(0, PLAN.block_count - 1), max_size=PLAN.block_count),
        st.integers(0, 2**32 - 1),
        st.sampled_from([1.0, 1.0, 1e-3]),
        st.sampled_from([0.1, 0.05]),
        st.integers(1, 9),
    ),
    max_size=5,
)
"""Device, rounds late, blocks, seed, magnitude, learning rate, samples."""


def _put(change: Float64, start: int, stretch: Float64) -> None:
    """Collect a change; every parameter is to be shown once."""
    part = change[start : start + len(stretch)]
    assert np.isnan(part).all()
    part[...] = stretch


class History(RuleBasedStateMachine):
    """Writes, late writes, advances with expiries, commits, reopenings."""

    on_disk: ClassVar[bool]
    memory: Memory

    @initialize(
        memory_type=st.sampled_from(DTYPES),
        damping=st.sampled_from([1.0, 0.8]),
        max_staleness=st.integers(0, 6),
        weighting=st.sampled_from(["uniform", "samples", "level"]),
        threads=st.sampled_from([1, 1, 2]),
    )
    def begin(self, **options: object) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.config = MemoryConfig(**options)  # type: ignore[arg-type]
        self.oracle = Oracle(PLAN, self.config)
        self.open()

    def open(self) -> None:
        if self.on_disk:
            self.memory = DiskMemory(self.folder, PLAN, self.config, reserve_bytes=0)
        else:
            self.memory = RamMemory(PLAN, self.config)

    def teardown(self) -> None:
        self.memory.close()
        shutil.rmtree(self.folder)

    @rule(rounds=st.integers(0, 3))
    def advance(self, rounds: int) -> None:
        self.memory.advance(self.oracle.now + rounds)
        self.oracle.advance(self.oracle.now + rounds)

    @rule(device=st.sampled_from(DEVICES))
    def forget(self, device: str) -> None:
        blocks = self.memory.forget(device)
        held = [where for where in self.oracle.held if where[0] == device]
        assert blocks == len(held)
        for where in held:
            del self.oracle.held[where]

    @precondition(lambda self: self.oracle.now > 0)
    @rule(given=movements)
    def write(self, given: list[tuple[str, int, list[int], int, float, float, int]]) -> None:
        now = self.oracle.now
        contributions = [
            movement(
                device,
                max(1, now - late),
                ids,
                seed,
                magnitude=magnitude,
                learning_rate=rate,
                samples=samples,
            )
            for device, late, ids, seed, magnitude, rate, samples in given
        ]
        # A device may say something twice; the same round twice has no order, so it is not asked.
        unique = list({(one.device, one.made): one for one in contributions}.values())
        before = self.oracle.total()[1]
        expected = self.oracle.write(unique)
        change = np.full(self.memory.plan.parameters, np.nan)
        self.memory.write(unique, partial(_put, change))
        # Old values left as they were held, new ones came as they were given.
        assert (abs(change - expected) <= before + self.rounding()).all()

    @rule()
    def commit(self) -> None:
        self.memory.commit()

    @precondition(lambda self: self.on_disk)
    @rule()
    def reopen(self) -> None:
        self.memory.commit()
        bits = [array.tobytes() for array in (self.memory.total, self.memory.weight)]
        self.memory.close()
        self.open()
        assert self.memory.now == self.oracle.now
        assert [array.tobytes() for array in (self.memory.total, self.memory.weight)] == bits

    @invariant()
    def rounds_and_entries_are_the_oracles(self) -> None:
        for device in DEVICES:
            assert self.memory.rounds(device).tolist() == self.oracle.rounds(device)
        assert self.memory.entries.tolist() == self.oracle.entries()
        assert self.memory.weight.tolist() == self.oracle.weight()
        assert self.memory.oldest() == self.oracle.oldest()

    @invariant()
    def recall_is_what_was_written(self) -> None:
        for device in DEVICES:
            found = 0
            rounds = []
            for piece in self.memory.recall(device):
                rounds.append(piece.made.round)
                start = 0
                for block in piece.blocks.ids.tolist():
                    entry = self.oracle.held[device, block]
                    values = piece.blocks.values[start : start + len(entry.values)]
                    start += len(entry.values)
                    assert piece.made == entry.made
                    off = abs(values.astype(np.float64) - entry.values)
                    assert (off <= bound(self.config.memory_type, entry.values)).all()
                    found += 1
                assert start == len(piece.blocks.values)
            assert rounds == sorted(rounds)
            assert found == sum(where[0] == device for where in self.oracle.held)

    @invariant()
    def sum_is_that_of_the_entries(self) -> None:
        total, slack = self.oracle.total()
        assert (abs(self.memory.total - total) <= slack + self.rounding()).all()
        held = np.zeros(PLAN.parameters)
        for device in DEVICES:
            for piece in self.memory.recall(device):
                faded = self.config.damping ** (self.memory.now - piece.made.round)
                factor = piece.made.weight * faded / piece.made.learning_rate
                start = 0
                for block in piece.blocks.ids.tolist():
                    low, high = PLAN.block_offsets[block : block + 2].tolist()
                    values = piece.blocks.values[start : start + high - low]
                    held[low:high] += factor * values.astype(np.float64)
                    start += high - low
        # What is summed is what is held: nothing of the type's own error is in this.
        assert (abs(self.memory.total - held) <= self.rounding()).all()

    def rounding(self) -> float:
        """Of float64 sums of numbers up to 5 · 9 / 0.05, over a history of a few hundred."""
        return 1000 * 5 * 9 / 0.05 * 2.0**-52


class RamHistory(History):
    on_disk = False


class DiskHistory(History):
    on_disk = True


few = settings(max_examples=40, stateful_step_count=25)
TestRamHistory = RamHistory.TestCase
TestRamHistory.settings = few
TestDiskHistory = DiskHistory.TestCase
TestDiskHistory.settings = few


Open = Callable[..., Memory]


@pytest.fixture(params=["ram", "disk"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens memories with these settings; they are closed afterwards."""
    with ExitStack() as stack:

        def open_memory(folder: str = ".", plan: ModelPlan = PLAN, **settings: Any) -> Memory:
            config, memory = MemoryConfig(**settings), None
            if request.param == "disk":
                memory = DiskMemory(tmp_path / folder, plan, config, reserve_bytes=0)
            made: Memory = memory or RamMemory(plan, config)
            stack.callback(made.close)
            return made

        yield open_memory


def test_round_going_back_is_refused(opened: Open) -> None:
    memory = opened()
    memory.advance(3)
    with pytest.raises(StateError, match="round 3"):
        memory.advance(2)


def test_movement_that_cannot_be_is_refused_and_changes_nothing(opened: Open) -> None:
    memory = opened()
    memory.advance(2)
    good = movement("ada", 2, [0, 3], seed=1)
    size = len(good.blocks.values)
    for bad, error in (
        (movement("bob", 3, [1], seed=2), StateError),
        (movement("bob", 2, [1], seed=2, learning_rate=0.0), StateError),
        (_with(Blocks(np.array([3, 0]), good.blocks.values)), BlockError),
        (_with(Blocks(np.array([0, 9]), good.blocks.values)), BlockError),
        (_with(Blocks(np.array([-1, 3]), good.blocks.values)), BlockError),
        (_with(Blocks(np.array([0, 3]), good.blocks.values[: size - 1])), BlockError),
        (_with(Blocks(np.array([0, 3]), good.blocks.values.astype(np.float64))), BlockError),
    ):
        with pytest.raises(error, match=r"bob|block"):
            memory.write([good, bad])
        assert memory.entries.sum() == 0
    memory.write([good])
    assert memory.entries.sum() == 2


def _with(blocks: Blocks) -> Contribution:
    return Contribution("bob", 2, blocks, 0.1, 0.5, 1)


def test_recall_of_some_blocks_gives_those(opened: Open) -> None:
    memory = opened(memory_type="fp32")
    memory.advance(1)
    given = movement("ada", 1, list(range(9)), seed=1)
    memory.write([given])
    (piece,) = memory.recall("ada", np.array([2, 3, 7]))
    offsets = PLAN.block_offsets
    expected = [given.blocks.values[offsets[b] : offsets[b + 1]] for b in (2, 3, 7)]
    assert piece.blocks.ids.tolist() == [2, 3, 7]
    assert piece.blocks.values.tolist() == np.concatenate(expected).tolist()
    assert not piece.blocks.values.flags.writeable
    assert memory.recall("bob") == []


def test_recalled_piece_outlives_what_replaces_it(opened: Open) -> None:
    memory = opened(memory_type="fp32")
    memory.advance(1)
    given = movement("ada", 1, list(range(9)), seed=1)
    memory.write([given])
    memory.commit()
    (piece,) = memory.recall("ada")
    memory.advance(2)
    memory.write([movement("ada", 2, list(range(9)), seed=2)])
    memory.commit()
    memory.advance(3)
    memory.write([movement("ada", 3, list(range(9)), seed=3)])
    memory.commit()
    assert piece.blocks.values.tolist() == given.blocks.values.tolist()


def test_given_values_may_be_changed_after_writing(opened: Open) -> None:
    memory = opened(memory_type="fp32")
    memory.advance(1)
    given = movement("ada", 1, list(range(9)), seed=1)
    expected = given.blocks.values.tolist()
    memory.write([given])
    given.blocks.values[...] = 7
    assert memory.recall("ada")[0].blocks.values.tolist() == expected


@pytest.mark.parametrize("memory_type", ["fp32", "fp16"])
def test_values_that_cannot_change_are_remembered_before_and_after_a_commit(
    opened: Open, memory_type: MemoryType
) -> None:
    """A type without scales writes them late; a second movement of a device reads the first."""
    first, second = movement("ada", 1, [0, 1, 2, 3], seed=1), movement("ada", 2, [2, 3, 4], seed=2)
    other = movement("bob", 2, list(range(9)), seed=3)
    frozen = opened(memory_type=memory_type, folder="frozen")
    plain = opened(memory_type=memory_type, folder="plain")
    for memory, writeable in ((frozen, False), (plain, True)):
        for each in (first, second, other):
            each.blocks.values.flags.writeable = writeable
        memory.advance(2)
        memory.write([first, second, other])
        memory.prepare()

    def held(memory: Memory) -> list[tuple[Any, ...]]:
        return [
            (device, piece.made.round, piece.blocks.ids.tolist(), piece.blocks.values.tolist())
            for device in ("ada", "bob")
            for piece in memory.recall(device)
        ]

    assert len(held(plain)) == 3
    assert held(frozen) == held(plain)
    frozen.commit()
    plain.commit()
    assert held(frozen) == held(plain)
    assert frozen.total.tolist() == plain.total.tolist()


def test_sum_is_zero_again_when_huge_values_have_left(opened: Open) -> None:
    memory = opened(memory_type="fp16", max_staleness=1)
    memory.advance(1)
    memory.write([movement("ada", 1, [0, 1], 1, magnitude=1e30), movement("bob", 1, [0], 2)])
    memory.advance(3)
    assert not memory.total.any()
    assert not memory.weight.any()


def test_memory_without_sums_keeps_entries_only(opened: Open) -> None:
    memory = opened(sums=False, max_staleness=1)
    memory.advance(1)
    memory.write([movement("ada", 1, [0, 4], 1)], lambda *_: pytest.fail("a change without sums"))
    memory.commit()
    assert memory.total.shape == memory.weight.shape == (0,)
    assert memory.entries.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert len(memory.recall("ada")) == 1
    memory.advance(3)
    assert memory.recall("ada") == []
    assert memory.entries.sum() == 0


def test_closing_again_closes_nothing_else(opened: Open, tmp_path: Path) -> None:
    """A descriptor's number goes to the next file that is opened."""
    memory = opened("twice")
    memory.close()
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / f"{n}").open("w+")) for n in range(8)]
        memory.close()
        assert [file.write("whole") for file in files] == [5] * 8


def test_closed_memory_refuses(tmp_path: Path) -> None:
    config = MemoryConfig()
    for memory in (RamMemory(PLAN, config), DiskMemory(tmp_path, PLAN, config, reserve_bytes=0)):
        memory.close()
        with pytest.raises(StateError, match="open it again"):
            memory.advance(1)
        with pytest.raises(StateError, match="open it again"):
            memory.recall("ada")


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_of_many_devices_is_that_of_its_batches_to_the_bit(
    opened: Open, dtype: MemoryType
) -> None:
    """Batches of 64 devices change the sums one after the other, though in one pass."""
    together = opened("together", memory_type=dtype, damping=0.8)
    apart = opened("apart", memory_type=dtype, damping=0.8)
    changes = np.full((2, PLAN.parameters), np.nan)
    for now in (1, 2):
        given = [
            movement(
                f"{n:03}", now, [b for b in range(9) if (b + n + now) % 3], seed=1000 * now + n
            )
            for n in range(150)
        ]
        together.advance(now)
        apart.advance(now)
        changes[0] = np.nan
        together.write(given[::-1], partial(_put, changes[0]))
        changes[1] = 0
        for first in range(0, 150, 64):
            part = np.full(PLAN.parameters, np.nan)
            apart.write(given[first : first + 64], partial(_put, part))
            changes[1] += part
        assert together.total.tobytes() == apart.total.tobytes()
        assert changes[0].tobytes() == changes[1].tobytes()
        assert together.weight.tolist() == apart.weight.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_values_at_any_address_are_held_and_summed_alike(
    opened: Open, dtype: MemoryType, shift: int
) -> None:
    straight = opened("straight", memory_type=dtype)
    odd = opened("odd", memory_type=dtype)
    given = movement("ada", 1, list(range(9)), seed=1)
    data = memoryview(bytearray(shift) + given.blocks.values.tobytes())[shift:]
    values = np.frombuffer(data, np.float32)
    assert not values.flags.aligned
    for memory, blocks in ((straight, given.blocks), (odd, Blocks(given.blocks.ids, values))):
        memory.advance(1)
        memory.write([replace(given, blocks=blocks)])
    assert straight.total.tobytes() == odd.total.tobytes()
    held = [memory.recall("ada")[0].blocks.values.tobytes() for memory in (straight, odd)]
    assert held[0] == held[1]


LARGE = ModelPlan(
    axes=(Axis("a", (30, 50, 20)), Axis("b", (10, 90))),
    tensors=(
        Tensor("w", "float32", (Dim(100, 0), Dim(100, 1))),
        Tensor("u", "float32", (Dim(150_000),)),
        Tensor("v", "float32", (Dim(3000, 0, outer=30), Dim(100, 1))),
    ),
)
"""Blocks of 200 to 150,000 parameters: some share a tile, some go over several."""


def large_rounds(memory: Memory, *, rounds: int = 4) -> list[list[Contribution]]:
    """Write the same few rounds to any memory."""
    stream = np.random.default_rng(7)
    written = []
    for now in range(1, rounds + 1):
        memory.advance(now)
        given = [
            movement(
                device,
                now - int(stream.integers(0, 2)) if now > 1 else 1,
                np.flatnonzero(stream.random(LARGE.block_count) < 0.6).tolist(),
                int(stream.integers(2**32)),
                magnitude=float(10.0 ** stream.integers(-6, 1)),
                samples=int(stream.integers(1, 9)),
                plan=LARGE,
            )
            for device in DEVICES
        ]
        memory.write(given[::-1])
        memory.commit()
        written.append(given)
    return written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_sums_over_many_tiles_are_the_oracles(
    opened: Open, dtype: MemoryType, weighting: Weighting
) -> None:
    said: dict[str, Any] = {"memory_type": dtype, "weighting": weighting}
    memory = opened(plan=LARGE, damping=0.8, max_staleness=2, **said)
    oracle = Oracle(LARGE, MemoryConfig(damping=0.8, max_staleness=2, **said))
    for now, given in enumerate(large_rounds(memory), start=1):
        oracle.advance(now)
        oracle.write(given)
    total, slack = oracle.total()
    assert (abs(memory.total - total) <= slack + 1e-11).all()
    assert memory.weight.tolist() == oracle.weight()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_store_or_threads(tmp_path: Path, dtype: MemoryType) -> None:
    results = set()
    for threads in (1, 2, 3):
        config = MemoryConfig(memory_type=dtype, damping=0.8, max_staleness=2, threads=threads)
        memories: list[Memory] = [
            RamMemory(LARGE, config),
            DiskMemory(tmp_path / str(threads), LARGE, config, reserve_bytes=0),
        ]
        for memory in memories:
            large_rounds(memory)
            held = b"".join(
                piece.blocks.values.tobytes()
                for device in DEVICES
                for piece in memory.recall(device)
            )
            results.add((memory.total.tobytes(), memory.weight.tobytes(), held))
            memory.close()
    assert len(results) == 1
