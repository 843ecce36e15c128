"""A device in a survey: what it runs, what it tells, and what keeps it from both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.gates import Limits
from edge_sdk.decide.observer import Observer
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.examining import Examiner
from edge_sdk.device.stores.movements import MemoryMovements
from edge_sdk.machine.snapshot import Battery, Heat, MemoryState, Network, Snapshot
from edge_sdk.protocol.errors import GraphError, TesseraError
from edge_sdk.protocol.messages.survey import (
    Survey,
    SurveyFinding,
    decode_statistics,
    encode_statistics,
)
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from edge_sdk.train.statistics import Moments, moments_of, read_moments, survey_rows
from tests.unit.edge_sdk.decide.test_observer import Priced, Shown
from tests.unit.edge_sdk.device.test_app import Doubling, Source

MEAN, VAR = "n.running_mean", "n.running_var"
PLAN = ModelPlan(
    axes=(Axis("a", (2, 2)),),
    tensors=(Tensor("w", "float32", (Dim(4, 0),)),),
    buffers=tuple(Buffer(name, "float32", (Dim(4, 0),), statistic=True) for name in (MEAN, VAR)),
)
WHOLE, HALF = {"a": (0, 1)}, {"a": (1,)}
BATCH = 4


@dataclass
class Product:
    """Its BatchNorm sees input × weight; the class is the sign of the sum of all less the mean."""

    plan: ModelPlan = PLAN
    batches: list[int] = field(default_factory=list)
    error: Exception | None = None

    def _seen(self, weights: Mapping[str, Array], inputs: Sequence[Array]) -> Array:
        if self.error is not None:
            raise self.error
        self.batches.append(len(inputs[0]))
        return inputs[0] * weights["w"]

    def moments(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
        batch_size: int = 64,
    ) -> Moments | None:
        seen = self._seen(weights, inputs).astype(np.float64)
        # As a graph that is made for a larger batch: samples are repeated.
        return moments_of(2 * len(seen), {MEAN: seen.mean(0), VAR: seen.var(0)})

    def predict(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
    ) -> Array:
        above = (self._seen(weights, inputs) - buffers[MEAN]).sum(1)
        return np.stack([-above, above], axis=1)


@dataclass
class Levels:
    """θ is 1, 2, 3, 4; for an evaluation, the means are known."""

    lost: frozenset[int] = frozenset()

    def fetch_level(self, survey: Survey, number: int) -> tuple[Blocks, dict[str, Array]]:
        if number in self.lost:
            raise TesseraError("the chunks did not come")
        groups = survey.groups[number]
        blocks = PLAN.select(np.arange(1, 5, dtype=np.float32), groups)
        size = 2 * len(groups["a"])
        mean = 10.0 if survey.wants == "evaluation" else 0.0
        return blocks, {MEAN: np.full(size, mean, "f4"), VAR: np.ones(size, "f4")}


def survey(**changes: Any) -> Survey:
    usual: dict[str, Any] = {
        "round": 3,
        "plan_hash": PLAN.hash,
        "wants": "statistics",
        "levels": (1.0, 0.5),
        "groups": (WHOLE, HALF),
        "rescale": 0.0,
        "samples": 10,
        "batch_size": BATCH,
        "wait_s": 20.0,
    }
    return Survey(**{**usual, **changes})


def data(samples: int = 30) -> ArrayData:
    inputs = np.random.default_rng(2).normal(2, 3, (samples, 1)).astype(np.float32)
    return ArrayData((inputs,), np.asarray(inputs[:, 0] > 4, dtype=np.int64))


class Whole(Doubling):
    plan = PLAN


@dataclass
class Bench:
    runtime: Product = field(default_factory=Product)
    own: ArrayData = field(default_factory=data)
    policy: Policy = field(default_factory=lambda: Policy(level=0.5))
    observer: Observer | None = None
    evaluates: bool = True
    overtaken: bool = False
    source: Levels = field(default_factory=Levels)
    spent: list[float] = field(default_factory=list)

    def answer(self, asked: Survey) -> list[SurveyFinding]:
        app = DeviceApp(
            "pi",
            backend=Whole(),
            data=self.own,
            policy=self.policy,
            source=Source(),
            seed=1,
            movements=MemoryMovements(),
            observer=self.observer,
            examiner=Examiner(
                "pi",
                self.own,
                self.source,
                lambda: self.runtime,
                evaluates=self.evaluates,
                spend=self.spent.append,
            ),
            overtaken=lambda _: self.overtaken,
        )
        sent = app.receive(asked)
        assert all(isinstance(each, SurveyFinding) for each in sent)
        return [each for each in sent if isinstance(each, SurveyFinding)]


def test_moments_are_those_of_whole_batches_of_the_same_samples_each_time() -> None:
    bench = Bench()
    found = bench.answer(survey())
    assert [(each.level, each.samples, each.wants) for each in found] == [
        (1.0, 8, "statistics"),
        (0.5, 8, "statistics"),
    ]
    assert bench.runtime.batches == [4, 4, 4, 4]
    rows = bench.own.inputs[0][survey_rows(30, 10)[:8]].astype(np.float64)
    cases: list[tuple[Groups, list[int]]] = [(WHOLE, [1, 2, 3, 4]), (HALF, [3, 4])]
    for each, (groups, weights) in zip(found, cases, strict=True):
        moments = read_moments(PLAN, groups, each)
        seen = rows * np.array(weights)
        np.testing.assert_allclose(moments.means[MEAN], seen.mean(0), rtol=1e-6)
        np.testing.assert_allclose(moments.m2s[VAR] / 8, seen.var(0), rtol=1e-6)
    assert Bench().answer(survey()) == found
    assert bench.spent == [0.0, 0.0]  # the plan knows of no products


def test_few_samples_are_one_batch_of_their_own() -> None:
    bench = Bench(own=data(3))
    assert [each.samples for each in bench.answer(survey())] == [3, 3]
    assert bench.runtime.batches == [3, 3]


def test_evaluation_uses_the_statistics_of_the_level() -> None:
    bench = Bench()
    whole, half = bench.answer(survey(wants="evaluation"))
    x = bench.own.inputs[0][survey_rows(30, 10)][:, 0]
    right = bench.own.targets[survey_rows(30, 10)]
    assert (whole.samples, whole.means) == (10, {})
    assert whole.accuracy == np.mean((10 * x > 40) == right) == 1.0
    assert half.accuracy == np.mean((7 * x > 20) == right) < 1.0


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (Bench(own=data(0)), "no data"),
        (Bench(overtaken=True), "something newer came"),
        (Bench(runtime=Product(error=GraphError("no graph fits"))), "no graph fits"),
        (Bench(runtime=Product(error=ZeroDivisionError("oh"))), "ZeroDivisionError: oh"),
    ],
)
def test_device_that_finds_nothing_says_why(bench: Bench, words: str) -> None:
    found = bench.answer(survey())
    assert [(each.level, each.samples) for each in found] == [(1.0, 0), (0.5, 0)]
    assert all(words in each.reason for each in found)


def test_level_that_does_not_come_is_not_answered() -> None:
    found = Bench(source=Levels(frozenset({0}))).answer(survey())
    assert [(each.level, each.samples) for each in found] == [(0.5, 8)]


def test_owner_who_wants_no_evaluations_still_gives_statistics() -> None:
    bench = Bench(evaluates=False)
    assert all(each.samples == 8 for each in bench.answer(survey()))
    told = bench.answer(survey(wants="evaluation"))
    assert [(each.samples, each.accuracy) for each in told] == [(0, None), (0, None)]
    assert "evaluate_every" in told[0].reason


MAINS = Snapshot(battery=Battery(present=False), memory=MemoryState(available_bytes=100e6))


@dataclass
class Forward(Priced):
    """A forward pass takes 200 MB and 8 s of the whole model, and half of it for half."""

    is_off = False

    def renew(self, should_stop: Callable[[], bool]) -> None:
        return

    def forward(self, survey: Survey, number: int, samples: int) -> Cost:
        share = survey.levels[number]
        return Cost(
            level=share,
            seconds=8 * share,
            joules=None if self.joules is None else self.joules * share,
            peak_bytes=200e6 * share,
            bytes_down=0,
            bytes_up=0,
        )


def ran(seen: Snapshot, *, joules: float = 1.0, limits: Any = None, **asked: Any) -> list[str]:
    """Return the reasons of a device that sees this of itself; empty ones: it ran the level."""
    policy = Policy(level=0.25, participation=0.1, limits=Limits() if limits is None else limits)
    observer = Observer(policy, Shown(seen), Forward(joules))
    bench = Bench(policy=policy, observer=observer)
    return [each.reason for each in bench.answer(survey(**asked))]


def test_levels_are_run_if_their_forward_pass_fits_whatever_the_owner_lets_it_train() -> None:
    plenty = replace(MAINS, memory=MemoryState(available_bytes=1e9))
    assert ran(plenty) == ["", ""]
    little = replace(MAINS, memory=MemoryState(available_bytes=150e6))
    assert ran(little) == ["full model needs 200 MB, 120 MB free", ""]
    unknown = replace(MAINS, memory=MemoryState())
    assert all("memory is not known" in each for each in ran(unknown))
    assert ran(plenty, wait_s=5.0) == ["full model needs 8 s, the round has 5 s", ""]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Snapshot(battery=Battery(present=True, percent=10, charging=False)), "battery 10 %"),
        (replace(MAINS, heat=Heat(throttling=True)), "slowed down by heat"),
        (replace(MAINS, network=Network(metered=True)), "metered"),
    ],
)
def test_closed_gates_forbid_a_survey(seen: Snapshot, words: str) -> None:
    assert all(words in each for each in ran(seen))


def test_energy_of_a_pass_is_weighed_and_booked() -> None:
    battery = Battery(present=True, percent=80, charging=False, capacity_wh=10)
    phone = Snapshot(battery=battery, memory=MemoryState(available_bytes=1e9))
    wide, narrow = ran(phone, joules=3600.0)
    assert "3.6e+03 J" in wide
    assert narrow == ""
    policy = Policy()
    observer = Observer(policy, Shown(phone), Forward(100.0))
    Bench(policy=policy, observer=observer).answer(survey())
    assert observer.history.spent_j == 150


def test_statistics_of_levels_survive_their_bytes() -> None:
    levels = {1.0: {MEAN: np.arange(4, dtype=np.float32)}, 0.5: {VAR: np.ones(2, np.float32)}}
    read = decode_statistics(PLAN, {1.0: WHOLE, 0.5: HALF}, encode_statistics(levels))
    assert read.keys() == levels.keys()
    for level, arrays in levels.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(read[level][name], array)
    assert list(decode_statistics(PLAN, {0.5: HALF}, encode_statistics(levels))) == [0.5]
