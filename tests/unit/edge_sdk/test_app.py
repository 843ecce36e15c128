"""A device put together: no error of one round ends it, and nothing unreceipted is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from edge_sdk.app import DeviceApp
from edge_sdk.decide import Policy
from edge_sdk.protocol.blocks import Blocks
from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.layout import Array
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.messages import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundOpen,
)
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.protocol.specs import Axis, Dim, Tensor
from edge_sdk.train.backend import Batch, Job, Metrics, Trained
from edge_sdk.train.data import ArrayData

PLAN = ModelPlan(axes=(Axis("a", (1, 1)),), tensors=(Tensor("w", "float32", (Dim(2, 0), Dim(3))),))


class Doubling:
    """A backend whose movement is the weights themselves."""

    plan = PLAN

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        steps = len(list(batches))
        return Trained(dict(job.weights), {}, Metrics(steps, steps, 1.0, 1.0, 1.0))


@dataclass
class Source:
    """θ is 0, 1, 2 …; raises `error` if there is one."""

    error: Exception | None = None

    def fetch(self, assignment: Assignment) -> tuple[Blocks, dict[str, Array]]:
        if self.error is not None:
            raise self.error
        return PLAN.select(np.arange(6, dtype=np.float32), assignment.groups), {}


@dataclass
class Bench:
    """A device on a bench: what it sent, and a source that can be broken."""

    sent: list[Bid | Movement] = field(default_factory=list)
    source: Source = field(default_factory=Source)

    def __post_init__(self) -> None:
        self.app = DeviceApp(
            "pi",
            backend=Doubling(),
            data=ArrayData((np.zeros((4, 3), dtype=np.float32),), np.zeros(4)),
            policy=Policy(level=0.5),
            source=self.source,
            send=self.sent.append,
            seed=1,
            clock=lambda: 5.0,
        )

    def open(self, round: int, plan_hash: str = PLAN.hash) -> Bid | Movement:
        self.app.receive(
            RoundOpen(
                round=round,
                plan_hash=plan_hash,
                rule=LocalRule(learning_rate=0.1),
                steps=2,
                batch_size=2,
                bid_s=1,
                train_s=1,
            )
        )
        return self.sent[-1]

    def assign(self, round: int, groups: tuple[int, ...] = (1,)) -> Bid | Movement:
        self.app.receive(Assignment(device="pi", round=round, groups={"a": groups}))
        return self.sent[-1]


def test_device_sends_the_movement_of_its_groups() -> None:
    bench = Bench()
    bid = bench.open(1)
    assert bid == Bid(device="pi", round=1, level=0.5, reason=bid.reason, samples=4)  # type: ignore[union-attr]
    movement = bench.assign(1)
    assert isinstance(movement, Movement)
    assert movement.blocks.ids.tolist() == [1]
    assert movement.blocks.values.tolist() == [3, 4, 5]


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


def test_round_for_another_plan_is_skipped() -> None:
    skip = Bench().open(1, plan_hash="f" * 64)
    assert isinstance(skip, Bid)
    assert skip.level is None
    assert "ffffffffffff" in skip.reason


def test_movement_is_sent_again_until_its_receipt() -> None:
    bench = Bench()
    bench.open(1)
    movement = bench.assign(1)
    bench.app.connected()
    assert bench.sent[-2:] == [movement, movement]
    bench.app.receive(Receipt(device="pi", round=1, outcome=Outcome.COUNTED))
    bench.app.connected()
    assert len(bench.sent) == 3
    assert bench.app.kept == {}
