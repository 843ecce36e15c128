"""Server optimisers against the paper's formulas, block by block, over random histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregate.optimizer import OptimizerName, RamMoments, ServerOptimizer
from coordinator.aggregate.robust.sums import PIECE
from coordinator.aggregate.rules import Rule, make_rule
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from tests.property.rules.histories import MAX_STALENESS, History, drive, histories
from tests.property.rules.oracle import Heard, Oracle, Values
from tests.property.strategies import law

NAMES: tuple[OptimizerName, ...] = ("momentum", "adam", "yogi")


@dataclass(slots=True)
class NaiveOptimizer:
    """The moments of every block that anybody ever spoke about, in float64."""

    options: ServerOptimizer
    moments: dict[int, tuple[Values, Values]] = field(default_factory=dict)

    def step(self, block: int, movement: Values) -> Values:
        options = self.options
        assert options.rate is not None
        nothing = np.zeros_like(movement)
        m, s = self.moments.get(block, (nothing, nothing + options.tau**2))
        if options.name == "momentum":
            m = options.beta1 * m + movement
            self.moments[block] = (m, s)
            return options.rate * m
        m = options.beta1 * m + (1 - options.beta1) * movement
        if options.name == "adam":
            s = options.beta2 * s + (1 - options.beta2) * movement**2
        else:
            s = s - (1 - options.beta2) * movement**2 * np.sign(s - movement**2)
        self.moments[block] = (m, s)
        return np.asarray(options.rate * m / (np.sqrt(s) + options.tau))


def is_spoken_about(oracle: Oracle, heard: Heard, block: int) -> bool:
    """Whether any movement, fresh, replayed or remembered, counts for the block."""
    if any(block in word.blocks for word in heard.fresh):
        return True
    recent = range(int(max(0, heard.round - oracle.within)), heard.round + 1)
    if oracle.rule in ("ccfl-1", "ccfl-3") and any(
        block in word.blocks and word.made in recent for word in heard.replayed
    ):
        return True
    match oracle.rule:
        case "ram-fed" | "fedvarp":
            devices, rounds = list(heard.samples), range(heard.round + 1)
        case "ccfl-2" | "ccfl-3":
            devices, rounds = list(heard.silent), recent
        case "strategy-2":
            devices, rounds = list(heard.silent), range(heard.round + 1)
        case _:
            return False
    words = [oracle.newest(device, block, heard.round) for device in devices]
    return any(word is not None and word.made in rounds for word in words)


@pytest.mark.parametrize("rule_name", ["ra-fed", "ram-fed", "ccfl-3", "strategy-2"])
@settings(law, max_examples=10)
@given(
    history=histories(),
    name=st.sampled_from(NAMES),
    beta1=st.sampled_from([0.9, 0.0, 0.5]),
    beta2=st.sampled_from([0.99, 0.5]),
    rate=st.sampled_from([1.0, 0.1]),
)
def test_optimizer_follows_the_paper_on_blocks_that_were_spoken_about(
    rule_name: str,
    history: History,
    name: OptimizerName,
    beta1: float,
    beta2: float,
    rate: float,
) -> None:
    more = {} if name == "momentum" else {"beta2": beta2, "tau": 0.1}
    optimizer = ServerOptimizer(name=name, rate=rate, beta1=beta1, **more)
    rule = make_rule(rule_name)
    assert isinstance(rule, Rule)
    oracle = Oracle(rule=rule_name, max_staleness=MAX_STALENESS)
    naive = NaiveOptimizer(optimizer)
    for step in drive(history, rule, optimizer=optimizer):
        heard = step.heard
        ends = []
        for block, movement in enumerate(oracle.move(heard)):
            end = heard.theta[block].copy()
            if is_spoken_about(oracle, heard, block):
                end += naive.step(block, movement)
            ends.append(end)
        expected = np.concatenate(ends)
        # A rule's error in float32 is divided by τ, and movements of memory can be 12 times longer.
        bound = 1e-3 * max(1.0, float(np.abs(expected).max()))
        assert np.abs(step.theta - expected).max() <= bound
        oracle.remember(heard, step.late)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ServerOptimizer(name="momentum", beta1=0.5), [2.0, 2.0]),
        (ServerOptimizer(name="momentum", rate=0.5, beta1=0.5), [1.0, 1.0]),
        # m = 1, 1; s = 4·½ + ½·1, then 2.5·½ + ½·1
        (
            ServerOptimizer(name="adam", rate=1.0, beta1=0.5, beta2=0.5, tau=1.0),
            [1 / (1 + 2.5**0.5), 1 / (1 + 1.75**0.5)],
        ),
        # s = 1 + ½·4, then 3 − ½·1
        (
            ServerOptimizer(name="yogi", rate=1.0, beta1=0.5, beta2=0.5, tau=1.0),
            [1 / (1 + 3**0.5), 1 / (1 + 2.5**0.5)],
        ),
        (ServerOptimizer(name="adam", beta1=0.5, beta2=0.5, tau=1.0), [0.01 / (1 + 2.5**0.5)]),
    ],
)
def test_two_steps_worked_out_by_hand(options: ServerOptimizer, expected: list[float]) -> None:
    plan = ModelPlan((), (Tensor("w", "float32", (Dim(1),)),))
    moments = RamMoments(options, plan)
    for number, (movement, step) in enumerate(zip([2.0, 1.0], expected, strict=False), 1):
        values = np.array([movement], dtype=np.float32)
        options.step(plan, values, np.array([True]), moments, round=number)
        assert values[0] == pytest.approx(step, rel=1e-6)


def test_block_that_nobody_moved_keeps_its_moments_across_pieces_and_threads() -> None:
    axes = (Axis("a", (PIECE - 7, 11, 2 * PIECE)),)
    plan = ModelPlan(axes, (Tensor("w", "float32", (Dim(3 * PIECE + 4, 0),)),))
    options, random = ServerOptimizer(name="yogi", tau=0.1), np.random.default_rng(4)
    rounds = [(True, True, True), (True, False, True), (False, True, False), (True, True, True)]
    values = [random.normal(size=plan.parameters).astype(np.float32) for _ in rounds]
    results = []
    for threads in (1, 3):
        moments = RamMoments(options, plan)
        naive = [RamMoments(options, plan) for _ in range(3)]
        for number, (moved, drawn) in enumerate(zip(rounds, values, strict=True), 1):
            movement, marks = drawn.copy(), np.array(moved)
            options.step(plan, movement, marks, moments, round=number, threads=threads)
            results.append(movement)
            for block, (low, high) in enumerate([(0, PIECE - 7), (PIECE - 7, PIECE + 4)]):
                if not moved[block]:
                    assert not movement[low:high].any()
                    continue
                alone = drawn.copy()
                options.step(plan, alone, np.array([True] * 3), naive[block], round=number)
                assert (alone[low:high] == movement[low:high]).all()
    for one, many in zip(results[:4], results[4:], strict=True):
        assert (one == many).all()
