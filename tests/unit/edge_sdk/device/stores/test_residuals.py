"""What top-k leaves out: conserved, committed on receipt, forgotten in time, safe on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.device.stores.residuals import ArrayStore, FolderStore, Residuals
from edge_sdk.protocol.encoding.codec import decode_blocks, encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan(
    axes=(Axis("hidden", (3, 2, 4)),),
    tensors=(
        Tensor("in", "float32", (Dim(9, 0), Dim(5))),
        Tensor("mix", "float32", (Dim(9, 0), Dim(9, 0))),
        Tensor("scale", "float32", ()),
    ),
)
EVERYTHING = PLAN.all_groups()
TOP_K = Encoding(kind="top-k", keep=0.2)
LONG = 10**6


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArrayStore:
    return ArrayStore() if request.param == "memory" else FolderStore(tmp_path / "residuals")


def movement_of(groups: dict[str, tuple[int, ...]], seed: int) -> Blocks:
    ids = PLAN.block_ids(PLAN.choose(groups))
    size = int(PLAN.block_sizes[ids].sum())
    return Blocks(ids, np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def send(groups: dict[str, tuple[int, ...]], corrected: Blocks) -> Blocks:
    """What the coordinator decodes."""
    data = encode_blocks(PLAN, groups, corrected, TOP_K, np.random.default_rng(0))
    return decode_blocks(PLAN, data)[1]


def train(
    residuals: Residuals, round: int, groups: dict[str, tuple[int, ...]] = EVERYTHING
) -> tuple[Blocks, Blocks]:
    """A round up to its receipt: the movement, and what was sent of it."""
    movement = movement_of(groups, seed=round)
    sent = send(groups, residuals.corrected(round, movement))
    residuals.keep(round, movement, sent)
    return movement, sent


def held(residuals: Residuals, round: int) -> NDArray[np.float32]:
    """What is added in a round, over the whole model."""
    zeros = np.zeros(PLAN.parameters, dtype=np.float32)
    return residuals.corrected(round, Blocks(np.arange(PLAN.block_count), zeros)).values


def whole(blocks: Blocks) -> NDArray[np.float64]:
    """Blocks in their places in the model, zeros elsewhere."""
    total = np.zeros(PLAN.parameters)
    inside = np.concatenate(
        [np.arange(*PLAN.block_offsets[block : block + 2]) for block in blocks.ids]
    )
    total[inside] = blocks.values
    return total


# -- the law -----------------------------------------------------------------------------------

some_groups = st.lists(st.integers(0, 2), min_size=1, unique=True).map(tuple)
steps = st.lists(
    st.tuples(some_groups, st.booleans(), st.sampled_from([0, 0, 0, 1, 2, 5])), max_size=12
)


@settings(max_examples=60)
@given(history=steps)
def test_used_and_residual_sum_to_the_movements(
    history: list[tuple[tuple[int, ...], bool, int]],
) -> None:
    """Whatever is used or not, and however late receipts come, several at once and in any order."""
    residuals = Residuals(PLAN, ArrayStore(), forget_after=LONG)
    awaited: list[tuple[int, int, bool]] = []
    moved, used_up = np.zeros(PLAN.parameters), np.zeros(PLAN.parameters)
    for round, (chosen, used, delay) in enumerate(history, start=1):
        movement, sent = train(residuals, round, {"hidden": chosen})
        if used:
            moved += whole(movement)
            used_up += whole(sent)
        awaited.append((round + delay, round, used))
        for receipt in sorted(receipt for receipt in awaited if receipt[0] <= round):
            residuals.settle(receipt[1], used=receipt[2])
            awaited.remove(receipt)
    for _, round, used in reversed(awaited):
        residuals.settle(round, used=used)
    np.testing.assert_allclose(used_up + held(residuals, 99), moved, rtol=0, atol=1e-4)


def test_residual_is_what_was_not_sent_block_by_block(store: ArrayStore) -> None:
    """Against plain error feedback, `e ← (D + e) − sent`, when every receipt comes in time."""
    residuals = Residuals(PLAN, store, forget_after=LONG)
    expected = np.zeros(PLAN.parameters)
    for round, chosen in enumerate([(0, 1), (1, 2), (0, 1, 2), (2,), (1,)], start=1):
        groups = {"hidden": chosen}
        movement, sent = train(residuals, round, groups)
        covered = np.repeat(PLAN.covers(PLAN.choose(groups)), PLAN.block_sizes)
        corrected = np.where(covered, whole(movement) + expected, 0)
        np.testing.assert_allclose(
            whole(send(groups, residuals.corrected(round, movement))), whole(sent)
        )
        residuals.settle(round, used=True)
        expected = np.where(covered, corrected - whole(sent), expected)
        np.testing.assert_allclose(held(residuals, round + 1), expected, rtol=0, atol=1e-5)
    assert np.count_nonzero(expected) > PLAN.parameters // 2


def test_value_left_out_is_sent_once_it_has_grown(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    values = np.ones(PLAN.parameters, dtype=np.float32)
    values[::7] = 3  # without a residual, only these and the first few others are ever sent
    movement = Blocks(np.arange(PLAN.block_count), values)
    reached = np.zeros(PLAN.parameters, dtype=bool)
    for round in range(1, 21):
        sent = send(EVERYTHING, residuals.corrected(round, movement))
        residuals.keep(round, movement, sent)
        residuals.settle(round, used=True)
        reached |= sent.values != 0
    assert reached.all()


# -- receipts ----------------------------------------------------------------------------------


def test_nothing_changes_without_a_receipt(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    train(residuals, 1)
    assert not held(residuals, 2).any()
    residuals.settle(1, used=True)
    before = held(residuals, 2)
    assert before.any()
    train(residuals, 2)
    assert held(residuals, 3).tobytes() == before.tobytes()


def test_movement_that_was_not_used_changes_nothing(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    train(residuals, 1)
    residuals.settle(1, used=True)
    before = held(residuals, 2)
    train(residuals, 2)
    residuals.settle(2, used=False)
    residuals.settle(2, used=True)  # it has been dealt with
    assert held(residuals, 3).tobytes() == before.tobytes()


def test_receipt_that_comes_twice_counts_once(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    train(residuals, 1)
    residuals.settle(1, used=True)
    before = held(residuals, 2)
    residuals.settle(1, used=True)
    residuals.settle(7, used=True)  # of a movement that was never kept
    assert held(residuals, 2).tobytes() == before.tobytes()


def test_corrected_leaves_the_movement_as_it_is(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    train(residuals, 1)
    residuals.settle(1, used=True)
    movement = movement_of(EVERYTHING, seed=2)
    before = movement.values.tobytes()
    assert residuals.corrected(2, movement).values.tobytes() != before
    assert movement.values.tobytes() == before


class Stopped(Exception):
    """The process ends here."""


@pytest.mark.parametrize("when", ["before the write", "after the write", "after the removal"])
@pytest.mark.parametrize("between", [False, True], ids=["at once", "after another round"])
def test_stop_while_a_receipt_is_dealt_with_counts_it_once(
    store: ArrayStore, monkeypatch: pytest.MonkeyPatch, when: str, between: bool
) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    movement, sent = train(residuals, 1)
    expected = whole(movement) - whole(sent)

    def stopping(operation: Callable[..., None], *, late: bool) -> Callable[..., None]:
        def stop(name: str, *arguments: object) -> None:
            if name == "round-0":  # what the round before the first would have left behind
                return
            if late:
                operation(name, *arguments)
            raise Stopped

        return stop

    with monkeypatch.context() as patch:
        if when == "after the removal":
            patch.setattr(store, "remove", stopping(store.remove, late=True))
        else:
            late = when == "after the write"
            patch.setattr(store, "write", stopping(store.write, late=late))
        with pytest.raises(Stopped):
            residuals.settle(1, used=True)
    again = Residuals(PLAN, store, forget_after=LONG)
    if between:
        movement, sent = train(again, 2)
        again.settle(2, used=True)
        expected += whole(movement) - whole(sent)
    again.settle(1, used=True)
    np.testing.assert_allclose(held(again, 3), expected, rtol=0, atol=1e-5)


# -- forgetting --------------------------------------------------------------------------------


def test_residual_is_forgotten_after_the_stated_rounds(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=3)
    train(residuals, 10)
    residuals.settle(10, used=True)
    assert held(residuals, 13).any()
    assert not held(residuals, 14).any()
    assert held(residuals, 13).any()  # looking does not forget


def test_each_block_is_forgotten_by_its_own_round(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=3)
    for round, chosen in ((10, (0, 1, 2)), (12, (1,))):
        train(residuals, round, {"hidden": chosen})
        residuals.settle(round, used=True)
    young = np.repeat(PLAN.covers(PLAN.choose({"hidden": (1,)})), PLAN.block_sizes)
    assert held(residuals, 13)[~young].any()
    assert not held(residuals, 14)[~young].any()
    assert held(residuals, 15)[young].any()


def test_forgotten_residual_does_not_come_back_with_a_new_one(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=3)
    train(residuals, 10)
    residuals.settle(10, used=True)
    movement, sent = train(residuals, 20)
    residuals.settle(20, used=True)
    expected = whole(movement) - whole(sent)
    np.testing.assert_allclose(held(residuals, 21), expected, rtol=0, atol=1e-6)


def test_movement_that_waits_too_long_settles_nothing(store: ArrayStore) -> None:
    residuals = Residuals(PLAN, store, forget_after=3)
    for round in (10, 11, 14):
        train(residuals, round)
    assert sorted(store.names()) == ["round-11", "round-14"]
    residuals.settle(10, used=True)
    assert not held(residuals, 14).any()


def test_residuals_must_be_kept_for_a_round_at_least() -> None:
    with pytest.raises(ValueError, match="1 round or more, not 0"):
        Residuals(PLAN, ArrayStore(), forget_after=0)


# -- stores ------------------------------------------------------------------------------------


def test_store_reads_what_was_written_last(store: ArrayStore) -> None:
    assert store.read("held") is None
    store.remove("held")
    first, second = np.arange(3.0), np.array(7)
    store.write("held", {"a": first})
    store.write("held", {"a": first * 2, "b": second})
    first[:] = -1
    stored = store.read("held")
    assert stored is not None
    assert {name: array.tolist() for name, array in stored.items()} == {"a": [0, 2, 4], "b": 7}
    assert list(store.names()) == ["held"]
    store.remove("held")
    assert store.read("held") is None
    assert list(store.names()) == []


def test_residuals_of_another_plan_are_left_aside(
    store: ArrayStore, caplog: pytest.LogCaptureFixture
) -> None:
    residuals = Residuals(PLAN, store, forget_after=LONG)
    train(residuals, 1)
    residuals.settle(1, used=True)
    other = ModelPlan((), (Tensor("w", "float32", (Dim(PLAN.parameters),)),))
    movement = Blocks(np.array([0]), np.ones(PLAN.parameters, dtype=np.float32))
    with caplog.at_level(logging.WARNING):
        corrected = Residuals(other, store, forget_after=LONG).corrected(2, movement)
    assert corrected.values.tolist() == movement.values.tolist()
    assert "another plan" in caplog.text


def test_residuals_on_disk_are_there_for_the_next_process(tmp_path: Path) -> None:
    residuals = Residuals(PLAN, FolderStore(tmp_path), forget_after=LONG)
    train(residuals, 1)
    Residuals(PLAN, FolderStore(tmp_path), forget_after=LONG).settle(1, used=True)
    again = Residuals(PLAN, FolderStore(tmp_path), forget_after=LONG)
    assert held(again, 2).any()
    assert held(again, 2).tobytes() == held(residuals, 2).tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["held.npz"]


def test_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.write("held", {"a": np.arange(3)})
    with pytest.raises(ValueError, match="Object arrays"):
        store.write("held", {"a": np.zeros(9), "b": np.array([object()])})
    stored = store.read("held")
    assert stored is not None
    assert stored["a"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["held.npz"]


def test_no_flipped_bit_gives_other_arrays(tmp_path: Path) -> None:
    store, path = FolderStore(tmp_path), tmp_path / "held.npz"
    arrays = {"a": np.arange(3), "b": np.zeros(0), "c": np.array(7)}
    store.write("held", arrays)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        read = store.read("held")
        assert read is None or {name: each.tolist() for name, each in read.items()} == {
            name: each.tolist() for name, each in arrays.items()
        }


def test_damaged_file_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, path = FolderStore(tmp_path), tmp_path / "held.npz"
    store.write("held", {"a": np.arange(100.0)})
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    for damaged in (*(data[:size] for size in range(0, len(data), 40)), bytes(flipped)):
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert store.read("held") is None
    assert "held.npz is damaged" in caplog.text
