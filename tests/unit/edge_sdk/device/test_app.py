"""A device put together: no error of one round ends it, and nothing unreceipted is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.data.errors import UNFIT
from edge_sdk.decide.decision import Policy
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.stores.movements import (
    FolderMovements,
    MemoryMovements,
    MovementStore,
    StoredMovement,
)
from edge_sdk.device.stores.residuals import Arrays, ArrayStore
from edge_sdk.protocol.encoding.codec import decode_blocks, decode_header
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.messages.local_rule import Classes, LocalRule
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import SurveyFinding
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.train.backend import Job, Metrics, Trained
from tests.messages import make_opening

PLAN = ModelPlan(axes=(Axis("a", (1, 1)),), tensors=(Tensor("w", "float32", (Dim(2, 0), Dim(3))),))


class Doubling:
    """A backend whose movement is the weights themselves."""

    plan = PLAN
    data: DataSpec | None = None

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        self.jobs.append(job)
        steps = len(list(batches))
        return Trained(dict(job.weights), {}, Metrics(steps, steps, 1.0, 1.0, 1.0))


@dataclass
class Source:
    """θ is 0, 1, 2 …; raises `error` if there is one."""

    error: Exception | None = None

    def fetch(self, assignment: Assignment, opened: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        if self.error is not None:
            raise self.error
        return PLAN.select(np.arange(6, dtype=np.float32), assignment.groups), {}


Sent = Bid | SurveyFinding | Movement | Replay | StoredMovement


@dataclass
class Bench:
    """A device on a bench: what it sent, and a source that can be broken."""

    sent: list[Sent] = field(default_factory=list)
    source: Source = field(default_factory=Source)
    policy: Policy = field(default_factory=lambda: Policy(level=0.5))
    backend: Doubling = field(default_factory=Doubling)
    movements: MovementStore[Movement | Replay | StoredMovement] = field(
        default_factory=MemoryMovements
    )
    store: ArrayStore = field(default_factory=ArrayStore)
    targets: tuple[float, ...] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        self.app = DeviceApp(
            "pi",
            backend=self.backend,
            data=ArrayData((np.zeros((4, 3), dtype=np.float32),), np.array(self.targets)),
            policy=self.policy,
            source=self.source,
            seed=1,
            movements=self.movements,
            store=self.store,
            clock=lambda: 5.0,
        )

    def receive(self, message: RoundOpen | Assignment | Receipt | RoundClosed) -> None:
        self.sent += self.app.receive(message)

    def connected(self) -> None:
        self.sent += self.app.connected()

    def open(self, round: int, plan_hash: str = PLAN.hash, **more: Any) -> Sent:
        self.receive(make_opening(round, plan_hash=plan_hash, steps=2, batch_size=2, **more))
        return self.sent[-1]

    def assign(self, round: int, groups: tuple[int, ...] = (1,)) -> Sent:
        self.receive(Assignment(device="pi", round=round, groups={"a": groups}))
        return self.sent[-1]


def test_device_sends_the_movement_of_its_groups() -> None:
    bench = Bench()
    bid = bench.open(1)
    assert isinstance(bid, Bid)
    assert bid == Bid(device="pi", round=1, level=0.5, reason=bid.reason, samples=4, code="owner")
    movement = bench.assign(1)
    assert isinstance(movement, Movement)
    groups, blocks = decode_blocks(PLAN, movement.payload)
    assert groups == {"a": (1,)}
    assert blocks.values.tolist() == [3, 4, 5]
    assert movement.level == 0.5


@pytest.mark.parametrize("error", [BlockError("block 3 is missing"), OSError("disk full")])
def test_failed_fetch_is_a_skip_and_the_next_round_goes_on(error: Exception) -> None:
    bench = Bench()
    bench.open(1)
    bench.source.error = error
    skip = bench.assign(1)
    assert isinstance(skip, Bid)
    assert skip.level is None
    assert str(error) in skip.reason
    bench.source.error = None
    bench.open(2)
    assert isinstance(bench.assign(2), Movement)


def test_assignment_that_makes_no_sense_is_a_skip() -> None:
    bench = Bench()
    bench.open(1)
    skip = bench.assign(1, groups=(7,))
    assert isinstance(skip, Bid)
    assert "groups 0 to 1" in skip.reason


def test_narrower_widths_of_an_assignment_are_trained() -> None:
    bench = Bench(policy=Policy())
    bench.open(1)
    narrow = ({"a": (1,)},)
    bench.receive(Assignment(device="pi", round=1, groups={"a": (0, 1)}, widths=narrow))
    assert isinstance(bench.sent[-1], Movement)
    (job,) = bench.backend.jobs
    assert (job.widths, job.passes) == (narrow, 2)
    assert job.width_stream is not None
    drawn = job.width_stream.integers(2**40, size=3).tolist()
    assert drawn == stream(1, "pi", 1, "widths").integers(2**40, size=3).tolist()


@pytest.mark.parametrize(("wanted", "classes"), [("own", (0, 3)), ("all", ())])
def test_rule_by_own_classes_gets_those_of_the_data(
    wanted: Classes, classes: tuple[int, ...]
) -> None:
    bench = Bench(targets=(3, 0, 0, 3))
    bench.open(1, local_rule=LocalRule(learning_rate=0.1, classes=wanted))
    bench.assign(1)
    (job,) = bench.backend.jobs
    assert job.classes == classes


@pytest.mark.parametrize(
    ("widths", "why"),
    [
        (({"a": (0,)},), "narrower width 1 of the assignment: axis 'a': groups [0]"),
        (({"a": (1,)}, {"a": (0,)}), "narrower width 2"),
        (({"a": (7,)},), "axis 'a' has groups 0 to 1, not 7"),
        (({"b": (1,)},), "unknown axis 'b'"),
        (({},), "no groups for axis 'a'"),
    ],
)
def test_widths_that_are_not_nested_are_refused(
    widths: tuple[dict[str, tuple[int, ...]], ...], why: str
) -> None:
    bench = Bench()
    bench.open(1)
    bench.receive(Assignment(device="pi", round=1, groups={"a": (1,)}, widths=widths))
    refused = bench.sent[-1]
    assert isinstance(refused, Bid)
    assert refused.level is None
    assert why in refused.reason
    assert not bench.backend.jobs
    assert isinstance(bench.open(2), Bid)
    assert isinstance(bench.assign(2), Movement)


def test_round_for_another_plan_is_skipped() -> None:
    skip = Bench().open(1, plan_hash="f" * 64)
    assert isinstance(skip, Bid)
    assert skip.level is None
    assert "ffffffffffff" in skip.reason


def test_movement_is_sent_again_until_its_receipt() -> None:
    bench = Bench()
    bench.open(1)
    movement = bench.assign(1)
    bench.connected()
    assert bench.sent[-2:] == [movement, movement]
    bench.receive(Receipt(device="pi", round=1, outcome=Outcome.COUNTED))
    bench.connected()
    assert len(bench.sent) == 3
    assert bench.movements.waiting == frozenset()


def test_what_top_k_left_out_is_sent_once_the_receipt_is_here() -> None:
    bench, sparse = Bench(), Encoding.parse("top-k:0.34")
    sent = []
    for round in (1, 2, 3):
        bench.open(round, up=sparse)
        movement = bench.assign(round)
        assert isinstance(movement, Movement)
        sent.append(decode_blocks(PLAN, movement.payload)[1].values.tolist())
        if round == 2:
            bench.receive(Receipt(device="pi", round=2, outcome=Outcome.COUNTED))
    # 3, 4, 5 every round: one of three values goes, what stays behind counts from the receipt on.
    assert sent == [[0, 0, 5], [0, 0, 5], [0, 8, 0]]


@pytest.mark.parametrize(
    ("verdict", "last"), [(Outcome.COUNTED, [0, 8, 0]), (Outcome.REJECTED, [0, 0, 5])]
)
def test_what_top_k_left_out_waits_for_the_verdict(verdict: Outcome, last: list[float]) -> None:
    bench, sparse = Bench(), Encoding.parse("top-k:0.34")
    sent = []
    for round in (1, 2, 3):
        bench.open(round, up=sparse)
        movement = bench.assign(round)
        assert isinstance(movement, Movement)
        sent.append(decode_blocks(PLAN, movement.payload)[1].values.tolist())
        if round == 1:
            bench.receive(Receipt(device="pi", round=1, outcome=Outcome.KEPT))
            assert bench.movements.waiting == {1}
        if round == 2:
            bench.receive(Receipt(device="pi", round=1, outcome=verdict))
    assert sent == [[0, 0, 5], [0, 0, 5], last]


def test_skip_sends_the_copy_of_the_last_movement_again() -> None:
    bench = Bench(policy=Policy(level=0.5, participation=0.5))
    opened = [bench.open(round, replay_within=9) for round in (1,)]
    made = None
    for round in range(2, 6):
        answer = opened[-1]
        if isinstance(answer, Bid) and answer.level is not None:
            made = bench.assign(round - 1)
        opened.append(bench.open(round, replay_within=9))
    replays = [message for message in bench.sent if isinstance(message, Replay)]
    assert replays
    assert isinstance(made, Movement)
    assert all(replay.movement.round < replay.round for replay in replays)
    assert replays[-1].movement.round <= made.round


@pytest.mark.parametrize(
    ("schedule", "within", "says"),
    [("ad-hoc", 8, "34 %"), ("round-robin", 3, "57 %"), ("round-robin", 8, ""), ("ad-hoc", 60, "")],
)
def test_device_that_trains_too_rarely_for_the_horizon_says_so_once(
    caplog: pytest.LogCaptureFixture, schedule: Any, within: int, says: str
) -> None:
    bench = Bench(policy=Policy(level=0.5, participation=1 / 8, schedule=schedule))
    for round in range(1, 12):
        bench.open(round, replay_within=within)
    told = [each.getMessage() for each in caplog.records if "horizon" in each.getMessage()]
    assert len(told) == bool(says)
    assert all(says in each and "several times 8" in each for each in told)


@pytest.mark.parametrize("within", [0, 9])
def test_device_that_may_not_keep_a_copy_skips_in_silence(within: int) -> None:
    bench = Bench(policy=Policy(level=0.5, participation=0.5, keeps_copy=within == 0))
    for round in range(1, 6):
        bench.open(round, replay_within=within)
        bench.assign(round)
    assert not any(isinstance(message, Replay) for message in bench.sent)


def test_warm_up_gets_the_whole_model_whatever_the_policy() -> None:
    bid = Bench().open(1, whole=True, warmup=True)
    assert isinstance(bid, Bid)
    assert bid.level == 1


def test_device_whose_data_is_not_the_tasks_skips_and_logs_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Doubling()
    backend.data = DataSpec((ArraySpec("float32", (1, 28, 28)),), ArraySpec("int64", (), 9))
    skip = Bench(backend=backend).open(1)
    assert isinstance(skip, Bid)
    assert skip.level is None
    assert skip.reason == f"skip: {UNFIT}"
    assert "1×28×28" in caplog.text


def test_what_has_no_receipt_is_sent_by_the_next_app_with_the_same_store(tmp_path: Path) -> None:
    first = Bench(movements=FolderMovements(tmp_path))
    first.open(1, replay_within=5)
    made = first.assign(1)
    assert isinstance(made, StoredMovement)
    second = Bench(movements=FolderMovements(tmp_path))
    second.connected()
    (again,) = second.sent
    assert isinstance(again, StoredMovement)
    assert (again.round, again.answers, again.data) == (1, None, made.data)
    second.receive(Receipt(device="pi", round=1, outcome=Outcome.COUNTED))
    third = Bench(
        movements=FolderMovements(tmp_path), policy=Policy(level=0.5, participation=0.0001)
    )
    third.connected()
    assert third.sent == []
    third.open(2, replay_within=5)
    bid, replay = third.sent
    assert isinstance(bid, Bid)
    assert bid.replays
    assert isinstance(replay, StoredMovement)
    assert (replay.round, replay.answers, replay.data) == (1, 2, made.data)


def test_copy_that_cannot_be_read_does_not_silence_the_skip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Bench(movements=FolderMovements(tmp_path))
    first.open(1, replay_within=5)
    first.assign(1)
    second = Bench(
        movements=FolderMovements(tmp_path), policy=Policy(level=0.5, participation=0.0001)
    )
    (tmp_path / "1.movement").unlink()
    skip = second.open(2, replay_within=5)
    assert second.sent == [skip]
    assert isinstance(skip, Bid)
    assert skip.level is None
    assert "round 1: cannot send the movement" in caplog.text


def test_movement_is_sent_though_the_disk_is_full(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryMovements):
        def keep(self, movement: Movement) -> None:
            raise OSError("no space left on device")

    bench = Bench(movements=Full())
    bench.open(1)
    assert isinstance(bench.assign(1), Movement)
    assert "no space left" in caplog.text
    bench.connected()
    bench.receive(Receipt(device="pi", round=1, outcome=Outcome.COUNTED))
    bench.open(2)
    assert isinstance(bench.assign(2), Movement)


def test_movement_for_other_groups_is_the_one_sent_though_the_disk_is_full() -> None:
    class Filling(MemoryMovements):
        def keep(self, movement: Movement) -> None:
            if self.waiting:
                raise OSError(28, "No space left on device")
            super().keep(movement)

    movements = Filling()
    before = Bench(movements=movements)
    before.open(1)
    before.assign(1)
    bench = Bench(movements=movements)
    bench.open(1)
    movement = bench.assign(1, (0,))
    assert isinstance(movement, Movement)
    assert decode_blocks(PLAN, movement.payload)[0] == {"a": (0,)}


class SmallStore(ArrayStore):
    """Residuals on a disk that is full at times."""

    full = False

    def write(self, name: str, arrays: Arrays) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(name, arrays)


def test_full_disk_never_sends_what_top_k_left_out_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SmallStore()
    bench, sparse, sent = Bench(store=store), Encoding.parse("top-k:0.34"), []
    for round in (1, 2, 3, 4, 5):
        store.full = round in (2, 3)
        bench.open(round, up=sparse)
        movement = bench.assign(round)
        assert isinstance(movement, Movement)
        sent.append(decode_blocks(PLAN, movement.payload)[1].values.tolist())
        bench.receive(Receipt(device="pi", round=round, outcome=Outcome.COUNTED))
    # Round 1 leaves [3, 4, 0] behind. While the disk is full it stays there, and what rounds 2 and
    # 3 leave out is lost; then it goes on from where it was.
    assert sent == [[0, 0, 5], [0, 0, 5], [0, 0, 5], [0, 8, 0], [0, 0, 10]]
    assert "have no room on the disk" in caplog.text


def test_receipt_that_the_disk_has_no_room_for_is_noted_later() -> None:
    store = SmallStore()
    bench, sparse = Bench(store=store), Encoding.parse("top-k:0.34")
    sent = []
    for round in (1, 2, 3):
        bench.open(round, up=sparse)
        movement = bench.assign(round)
        assert isinstance(movement, Movement)
        sent.append(decode_blocks(PLAN, movement.payload)[1].values.tolist())
        store.full = round == 1
        bench.receive(Receipt(device="pi", round=round, outcome=Outcome.COUNTED))
        store.full = False
    assert bench.movements.waiting == frozenset()
    assert sent == [[0, 0, 5], [0, 8, 0], [0, 0, 10]]


def test_movement_made_before_a_restart_is_not_trained_again() -> None:
    bench = Bench()
    bench.open(1)
    made = bench.assign(1)
    again = Bench(movements=bench.movements)
    again.source.error = AssertionError("nothing is to be fetched")
    assert isinstance(again.open(1), Bid)
    sent = again.assign(1)
    assert isinstance(sent, Movement)
    assert isinstance(made, Movement)
    assert sent.payload == made.payload
    # Other groups are another matter.
    other = Bench(movements=bench.movements)
    other.open(1)
    movement = other.assign(1, (0,))
    assert isinstance(movement, Movement)
    assert decode_blocks(PLAN, movement.payload)[0] == {"a": (0,)}


def test_movement_kept_on_disk_is_not_trained_again_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(movements=FolderMovements(tmp_path))
    bench.open(1)
    made = bench.assign(1)
    again = Bench(movements=FolderMovements(tmp_path))
    again.source.error = AssertionError("nothing is to be fetched")
    again.open(1)
    sent = again.assign(1)
    assert isinstance(made, StoredMovement)
    assert isinstance(sent, StoredMovement)
    assert (sent.round, sent.data) == (1, made.data)


def test_restarted_coordinator_gets_the_bid_again_and_what_has_no_receipt() -> None:
    bench = Bench()
    bench.open(1)
    movement = bench.assign(1)
    opened = bench.app.newest
    bid = bench.open(2)
    assert bench.app.newest is not None
    assert bench.app.restarted(bench.app.newest) == [movement, bid]
    assert opened is not None
    (back,) = bench.app.receive(opened)
    assert isinstance(back, Bid)
    assert back.round == 1


def test_device_without_zstandard_sends_uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as if it were not installed
    bench = Bench()
    bench.open(1, up=Encoding.parse("fp16+zstd"))
    movement = bench.assign(1)
    assert isinstance(movement, Movement)
    assert decode_header(PLAN, movement.payload).encoding == Encoding.parse("fp16")
