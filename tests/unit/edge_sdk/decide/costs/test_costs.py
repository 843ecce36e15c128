"""Costs: the fit, what rounds teach it, and the laws of predictions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.models import mlp
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.decide.costs.fit import fit, time_features
from edge_sdk.decide.costs.model import (
    MARGIN,
    ROUNDS_TO_JUDGE,
    Calibration,
    CostModel,
    Known,
    Learned,
    Sample,
    known_of,
    memory_bound,
)
from edge_sdk.decide.costs.work import Work, largest_groups, work_at
from edge_sdk.machine.board import Board, CoreSpec, MemorySpec, NetworkSpec, PowerSpec, Quantity
from edge_sdk.machine.energy import Energy
from edge_sdk.program.plain import ProfileError
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import GroupError
from edge_sdk.protocol.messages.local_rule import LocalRule, Widths
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.packs.index import encode_index, needed_chunks, pack_model
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor, split_atoms
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job
from tests.messages import make_movement, make_opening

LEVELS = (1.0, 0.75, 0.5, 0.25)
RULE = LocalRule(learning_rate=0.1)


@pytest.fixture(scope="module")
def task() -> Task:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(mlp(12, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    return make_task(model, torch.zeros(2, 12), groups=4)


@pytest.fixture(scope="module")
def compiled(task: Task) -> CompiledGraphs:
    return compile_graphs(task, levels=LEVELS, batch_sizes=(8, 32))


def step_s(work: Work) -> float:
    """The truth about a machine; written out, so that it is not the code under test."""
    return 2e-9 * work.macs + 3e-9 * work.weight_bytes + 4e-5 * work.samples + 5e-4


def fixed_s(work: Work) -> float:
    return 7e-8 * work.weight_bytes + 0.01


def grown_bytes(work: Work) -> float:
    return 15e6 + 6 * work.weight_bytes + 0.5 * work.activation_bytes + 1e4 * work.samples


def sample(task: Task, compiled: CompiledGraphs | None, level: float, batch: int) -> Sample:
    work = work_at(task.plan, None if compiled is None else compiled.manifest, level, batch)
    return Sample(
        level=level,
        samples=work.samples,
        macs=work.macs,
        weight_bytes=work.weight_bytes,
        activation_bytes=work.activation_bytes,
        step_s=step_s(work),
        fixed_s=fixed_s(work),
        steps=5,
        grown_bytes=grown_bytes(work),
    )


def model_of(
    task: Task, compiled: CompiledGraphs | None, levels: tuple[float, ...] = (1.0, 0.25)
) -> CostModel:
    cases = [sample(task, compiled, level, batch) for level in levels for batch in (8, 32)]
    manifest = None if compiled is None else compiled.manifest
    return CostModel(task.plan, manifest, Calibration(samples=tuple(cases)))


def opened(task: Task, **changes: Any) -> RoundOpen:
    usual = make_opening(plan_hash=task.plan.hash, local_rule=RULE, steps=20, batch_size=16)
    return replace(usual, **{"train_deadline_s": 10, **changes})


# -- the fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_graphs", [True, False])
def test_prediction_matches_a_machine_of_that_form(
    task: Task, compiled: CompiledGraphs, with_graphs: bool
) -> None:
    graphs = compiled if with_graphs else None
    manifest = graphs.manifest if graphs is not None else None
    round = opened(task, batch_size=64, steps=7)
    for cost in model_of(task, graphs).predict(LEVELS, round):
        work = work_at(task.plan, manifest, cost.level, 64)
        assert cost.seconds == pytest.approx(7 * step_s(work) + fixed_s(work), rel=1e-6)


WORKS = st.builds(
    Work,
    samples=st.integers(1, 256),
    macs=st.integers(0, 10**9),
    weight_bytes=st.integers(1, 10**8),
    activation_bytes=st.just(0),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(WORKS, st.floats(1e-5, 10)), min_size=1, max_size=5))
def test_fit_is_as_good_as_projected_descent(measured: list[tuple[Work, float]]) -> None:
    found = fit(time_features, measured)
    assert min(found.coefficients) >= 0
    values = np.array([value for _, value in measured])
    rows = np.array([time_features(work) for work, _ in measured]) / values[:, None]
    scaled = rows / np.maximum(rows.max(axis=0), 1e-300)
    guess = np.zeros(4)
    rate = 1 / max(np.linalg.norm(scaled, 2) ** 2, 1e-12)
    for _ in range(2000):
        guess = np.maximum(0, guess - rate * scaled.T @ (scaled @ guess - 1))
    error = sum((found(work) / value - 1) ** 2 for work, value in measured)
    assert error <= float(np.square(scaled @ guess - 1).sum()) + 1e-6


def test_fit_of_one_case_is_in_proportion_to_the_macs() -> None:
    one = Work(samples=8, macs=1000, weight_bytes=50, activation_bytes=0)
    found = fit(time_features, [(one, 0.5)])
    assert found(replace(one, macs=2000)) == pytest.approx(1.0)


def test_calibration_without_samples_is_refused() -> None:
    with pytest.raises(ProfileError, match="calibrate again"):
        Calibration(samples=())


def test_calibration_with_an_impossible_step_is_refused(task: Task) -> None:
    bad = replace(sample(task, None, 1.0, 8), step_s=-1.0)
    with pytest.raises(ProfileError, match="impossible step"):
        Calibration(samples=(bad,))


# -- forward passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_graphs", [True, False])
def test_forward_pass_is_cheaper_than_training_and_rises_with_the_level(
    task: Task, compiled: CompiledGraphs, with_graphs: bool
) -> None:
    plan, graphs = task.plan, compiled if with_graphs else None
    model = model_of(task, graphs)
    costs = [
        model.forward(level, largest_groups(plan, level), samples=160, batch=16) for level in LEVELS
    ]
    trained = model.predict(LEVELS, opened(task, steps=10, batch_size=16))
    for cost, training in zip(costs, trained, strict=True):
        assert cost.level == training.level
        assert 0 < cost.seconds < training.seconds
        assert 0 < cost.peak_bytes < training.peak_bytes
    for more, less in itertools.pairwise(costs):
        assert more.seconds > less.seconds
        assert more.peak_bytes > less.peak_bytes
    once = model.forward(1.0, plan.all_groups(), samples=16, batch=16)
    assert once.seconds < costs[0].seconds
    assert once.peak_bytes == costs[0].peak_bytes


# -- laws ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    ratios=st.dictionaries(st.sampled_from(LEVELS), st.floats(0.1, 10)),
    steps=st.integers(1, 500),
    more=st.integers(0, 500),
    levels=st.lists(st.floats(0.05, 1), min_size=1, max_size=5),
    widths=st.sampled_from(["own", "ordered-dropout", "sandwich"]),
    narrower=st.sets(st.floats(0.05, 1), max_size=4),
)
def test_predictions_do_not_fall_with_level_or_steps(
    task: Task,
    compiled: CompiledGraphs,
    ratios: dict[float, float],
    steps: int,
    more: int,
    levels: list[float],
    widths: Widths,
    narrower: set[float],
) -> None:
    learned = Learned(rounds=1, ratios={repr(level): ratio for level, ratio in ratios.items()})
    model = replace(model_of(task, compiled), learned=learned, known=Known(net_w=2.0))
    nested: dict[str, object] = {
        "local_rule": replace(RULE, widths=widths),
        "levels": tuple(sorted(narrower, reverse=True)),
    }
    few = model.predict(sorted(levels), opened(task, steps=steps, **nested))
    for before, after in itertools.pairwise(few):
        for name in ("seconds", "joules", "peak_bytes", "bytes_up", "bytes_down"):
            assert getattr(before, name) <= getattr(after, name)
        both = [each.seconds + each.second_s for each in (before, after)]
        assert both[0] <= both[1] + 1e-9
    many = model.predict(sorted(levels), opened(task, steps=steps + more, **nested))
    for one, other in zip(few, many, strict=True):
        assert one.seconds <= other.seconds
        assert one.second_s <= other.second_s + 1e-9


def test_predictions_come_in_the_order_asked(task: Task, compiled: CompiledGraphs) -> None:
    costs = model_of(task, compiled).predict((0.25, 1.0, 0.5), opened(task))
    assert [cost.level for cost in costs] == [0.25, 1.0, 0.5]


def test_sam_pays_for_two_passes(task: Task, compiled: CompiledGraphs) -> None:
    model = model_of(task, compiled)
    [plain] = model.predict([0.5], opened(task))
    [sam] = model.predict([0.5], opened(task, local_rule=replace(RULE, sam_radius=0.1)))
    fixed = fixed_s(work_at(task.plan, compiled.manifest, 0.5, 16))
    assert sam.seconds - fixed == pytest.approx(2 * (plain.seconds - fixed))


def _in_turns(each_s: list[float], steps: int) -> float:
    """Seconds of steps that take turns with widths, the slowest first."""
    slowest_first = sorted(each_s, reverse=True)
    return sum(slowest_first[step % len(each_s)] for step in range(steps))


@pytest.mark.parametrize("kind", ["ordered-dropout", "sandwich"])
@pytest.mark.parametrize("with_graphs", [True, False])
def test_several_widths_take_turns_and_a_second_pass_costs_the_rest(
    task: Task, compiled: CompiledGraphs, kind: Widths, with_graphs: bool
) -> None:
    manifest = compiled.manifest if with_graphs else None
    model = model_of(task, compiled if with_graphs else None)
    rule = replace(RULE, widths=kind, sam_radius=0.1)
    nested = opened(task, local_rule=rule, levels=(1.0, 0.5, 0.25))
    [three, two, one] = model.predict((0.75, 0.5, 0.25), nested)
    [alone] = model.predict([0.25], opened(task, local_rule=replace(RULE, sam_radius=0.1)))
    assert one == alone
    steps = {each: step_s(work_at(task.plan, manifest, each, 16)) for each in LEVELS}
    for cost, below in ((three, (0.5, 0.25)), (two, (0.25,))):
        fixed = fixed_s(work_at(task.plan, manifest, cost.level, 16))
        once = _in_turns([steps[cost.level], *(steps[each] for each in below)], 20)
        assert cost.seconds == pytest.approx(2 * once + fixed)
        both = 20 * steps[cost.level] + _in_turns([steps[each] for each in below], 20)
        second = 2 * (both - once) if kind == "sandwich" else 0.0
        assert cost.second_s == pytest.approx(second, abs=1e-12)
        assert (cost.second_bytes > 0) is (kind == "sandwich")


def test_narrower_passes_take_memory_for_their_cut_and_gradient(
    task: Task, compiled: CompiledGraphs
) -> None:
    model = model_of(task, compiled)
    rule = replace(RULE, widths="sandwich")
    [plain] = model.predict([1.0], opened(task, local_rule=rule))
    [nested] = model.predict([1.0], opened(task, local_rule=rule, levels=(1.0, 0.5, 0.25)))
    weights = {
        each: work_at(task.plan, compiled.manifest, each, 16).weight_bytes for each in LEVELS
    }
    assert nested.peak_bytes - plain.peak_bytes == pytest.approx(MARGIN * 2 * weights[0.5])
    assert nested.second_bytes == pytest.approx(MARGIN * weights[1.0])
    assert (plain.second_s, plain.second_bytes) == (0, 0)


def test_distillation_takes_memory_for_graphs_of_its_own(
    task: Task, compiled: CompiledGraphs
) -> None:
    """The calibration's gradient graph stays open beside them, as much as training made grow."""
    model = model_of(task, compiled)
    rule = replace(RULE, widths="sandwich")
    costs = [
        model.predict([1.0], opened(task, local_rule=each, levels=(1.0, 0.5)))[0]
        for each in (rule, replace(rule, distillation=0.5))
    ]
    work = work_at(task.plan, compiled.manifest, 1.0, 16)
    assert costs[0].peak_bytes == costs[1].peak_bytes
    more = costs[1].second_bytes - costs[0].second_bytes
    assert more == pytest.approx(MARGIN * grown_bytes(work), rel=1e-6)
    round = opened(task, local_rule=replace(rule, distillation=0.5), levels=(1.0, 0.5))
    held = costs[1].peak_bytes + more / 4
    [again] = model.predict([1.0], round, held_bytes=held)
    assert again.second_bytes == pytest.approx(costs[1].second_bytes - more / 4)
    [blind] = model_of(task, None).predict([1.0], round)  # without graphs there are none to open
    assert blind.second_bytes == pytest.approx(MARGIN * 4 * task.plan.parameters)


def test_small_data_makes_small_batches(task: Task, compiled: CompiledGraphs) -> None:
    model = model_of(task, compiled)
    assert model.predict([1.0], opened(task), samples=4) == model.predict(
        [1.0], opened(task, batch_size=4)
    )


# -- what rounds teach ---------------------------------------------------------------------------


def test_correction_converges_for_each_level(task: Task, compiled: CompiledGraphs) -> None:
    model, round = model_of(task, compiled), opened(task)
    truth = {c.level: c.seconds * (0.6 + c.level) for c in model.predict(LEVELS, round)}
    for _ in range(25):
        for level in (1.0, 0.5):
            model = model.observed(round, level, truth[level])
    for cost in model.predict((1.0, 0.5), round):
        assert cost.seconds == pytest.approx(truth[cost.level], rel=0.01)


def test_correction_of_one_level_moves_the_others(task: Task, compiled: CompiledGraphs) -> None:
    model, round = model_of(task, compiled), opened(task)
    [before] = model.predict([0.25], round)
    slow = model.observed(round, 1.0, 3 * model.predict([1.0], round)[0].seconds)
    assert slow.predict([0.25], round)[0].seconds == pytest.approx(3 * before.seconds)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("steps", [3, 4, 50])
def test_widths_that_were_drawn_do_not_pass_for_a_slow_machine(
    task: Task, compiled: CompiledGraphs, steps: int, passes: int
) -> None:
    """Rounds as fast as calibrated teach nothing, few as their draws may be."""
    model = model_of(task, compiled)
    rule = replace(RULE, widths="sandwich")
    round = opened(task, local_rule=rule, levels=(1.0, 0.5, 0.25), steps=steps)
    widths = (0.5, 0.25)
    job = Job(
        groups=task.plan.all_groups(),
        weights={},
        buffers={},
        rule=rule,
        mask_stream=stream(0, "masks"),
        widths=tuple(largest_groups(task.plan, each) for each in widths),
        width_stream=stream(steps, "widths"),
        passes=passes,
    )
    works = [work_at(task.plan, compiled.manifest, each, 16) for each in (1.0, *widths)]
    drawn = itertools.islice(job.drawn(), steps)
    took = sum(step_s(works[width]) for each in drawn for width in each) + fixed_s(works[0])
    seen = model.observed(round, 1.0, took, job=job)
    assert seen.learned.ratio == pytest.approx(1)
    before, after = model.predict(LEVELS, round), seen.predict(LEVELS, round)
    assert [cost.seconds for cost in after] == pytest.approx([cost.seconds for cost in before])


def test_observed_is_blind_to_times_that_cannot_be(task: Task, compiled: CompiledGraphs) -> None:
    model = model_of(task, compiled)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        assert model.observed(opened(task), 1.0, seconds) is model


@pytest.mark.parametrize(
    ("ratios", "off"),
    [
        ([1.1] * 20, False),
        ([1.0, 1.0, 1.0, 3.0], False),
        ([1.0, 1.0, 1.0, 3.0, 3.0], True),
        ([1.0, 3.0, 1.0, 3.0, 1.0, 3.0], True),
        ([4.0] * (ROUNDS_TO_JUDGE - 1), False),
    ],
)
def test_calibration_is_due_when_predictions_are_off(
    task: Task, compiled: CompiledGraphs, ratios: list[float], off: bool
) -> None:
    model, round = model_of(task, compiled), opened(task)
    [cost] = model.predict([0.5], round)
    seen = []
    for ratio in ratios:
        model = model.observed(round, 0.5, ratio * cost.seconds)
        seen.append(model.learned.is_off)
    assert any(seen) is off


def test_recalibrated_keeps_link_and_watts_only() -> None:
    learned = Learned(rounds=9, ratio=2.0, ratios={"1.0": 2.0}, off=0.5, net_w=3.0)
    assert learned.recalibrated() == Learned(net_w=3.0)


# -- link ----------------------------------------------------------------------------------------


def test_unknown_link_is_not_counted_and_said_so(task: Task, compiled: CompiledGraphs) -> None:
    [cost] = model_of(task, compiled).predict([1.0], opened(task))
    assert not cost.transfers_counted
    assert cost.bytes_up > 0 < cost.bytes_down


def test_transfers_take_what_the_owners_link_allows(task: Task, compiled: CompiledGraphs) -> None:
    model = model_of(task, compiled)
    [bare] = model.predict([1.0], opened(task))
    owned = replace(model, known=Known(up_bytes_per_s=1e3, down_bytes_per_s=2e3))
    [cost] = owned.predict([1.0], opened(task))
    assert cost.transfers_counted
    transfers = cost.bytes_up / 1e3 + cost.bytes_down / 2e3
    assert cost.seconds == pytest.approx(bare.seconds + transfers)


def _quantity(value: float) -> Quantity:
    return Quantity(value, "somebody measured it", "measured")


def test_known_is_the_boards_but_the_link_first_the_owners() -> None:
    board = Board(
        name="board",
        title="A board",
        kind="board",
        soc="chip",
        cores=(CoreSpec(core="core", count=_quantity(4)),),
        memory=MemorySpec(memory_mb=_quantity(512)),
        power=PowerSpec(idle_w=_quantity(1.5), train_w=_quantity(4.0)),
        network=NetworkSpec(up_mbit_s=_quantity(8), down_mbit_s=_quantity(80)),
    )
    assert known_of(board, None) == Known(net_w=2.5, up_bytes_per_s=1e6, down_bytes_per_s=1e7)
    assert known_of(board, 5e4) == Known(net_w=2.5, up_bytes_per_s=5e4, down_bytes_per_s=5e4)
    assert known_of(replace(board, power=PowerSpec(train_w=_quantity(4))), None).net_w is None
    assert known_of(None, None) == Known()
    assert known_of(None, 5e4) == Known(up_bytes_per_s=5e4, down_bytes_per_s=5e4)


def test_bytes_down_are_the_chunks_of_the_model(task: Task, compiled: CompiledGraphs) -> None:
    plan = task.plan
    encoding = Encoding.parse("int8")
    encoded = encode_model(plan, plan.flatten(task.weights), encoding, stream(0, "down"))
    index, chunks = pack_model(plan, encoded, task.buffers, 1024)
    data = encode_index(plan, index)
    blob = Blob(len(data), (b"0" * 16,))
    for cost in model_of(task, compiled).predict(
        LEVELS, opened(task, model=blob), model_encoding=encoding
    ):
        hashes = needed_chunks(plan, index, largest_groups(plan, cost.level))
        assert cost.bytes_down == len(data) + sum(len(chunks[each]) for each in hashes)


@pytest.mark.parametrize("text", ["fp32", "fp16", "int8", "top-k:0.1"])
@pytest.mark.parametrize("level", [1.0, 0.25])
def test_bytes_up_bound_a_movement(
    task: Task, compiled: CompiledGraphs, text: str, level: float
) -> None:
    plan, encoding = task.plan, Encoding.parse(text)
    groups = largest_groups(plan, level)
    size = int(plan.block_sizes[plan.block_ids(plan.choose(groups))].sum())
    values = stream(0, "up").standard_normal(size, dtype=np.float32)
    movement = make_movement(plan, groups, values, encoding=encoding)
    movement = replace(movement, device="d" * 40, round=12345, samples=1000, keeps_copy=True)
    real = len(encode_movement(movement))
    [cost] = model_of(task, compiled).predict([level], opened(task, up=encoding))
    assert real <= cost.bytes_up <= real + 1024


ATOMS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


@given(ATOMS, st.floats(0.01, 1))
def test_largest_groups_are_the_fullest_set_there_is(atoms: list[int], level: float) -> None:
    axis = Axis("width", tuple(atoms))
    plan = ModelPlan(
        axes=(axis,),
        tensors=(Tensor("w", "float32", (Dim(sum(atoms), 0), Dim(3))),),
        buffers=(),
        macs=(),
    )
    chosen = largest_groups(plan, level)["width"]
    assert chosen == tuple(sorted(set(chosen)))
    sets = [
        sum(atoms[group] for group in groups)
        for count in range(1, len(atoms) + 1)
        for groups in itertools.combinations(range(len(atoms)), count)
        if axis.equal is False or count == max(1, int(level * len(atoms) + 1e-9))
    ]
    if not axis.equal:
        sets = [size for size in sets if size <= level * sum(atoms) + 1e-9] or [min(atoms)]
    assert sum(atoms[group] for group in chosen) == max(sets)


def test_largest_groups_refuse_no_level(task: Task) -> None:
    with pytest.raises(GroupError, match="share"):
        largest_groups(task.plan, 0.0)
    assert split_atoms(32, 4) == task.plan.axes[0].groups


# -- energy and memory ---------------------------------------------------------------------------


def test_energy_is_measured_before_it_is_the_profiles(task: Task, compiled: CompiledGraphs) -> None:
    bare, round = model_of(task, compiled), opened(task)
    [cost] = bare.predict([1.0], round)
    assert (cost.joules, cost.energy_from) == (None, "unknown")

    profiled = replace(bare, known=Known(net_w=2.0))
    [cost] = profiled.predict([1.0], round)
    assert (cost.joules, cost.energy_from) == (2 * cost.seconds, "profile")

    calibrated = replace(profiled, calibration=replace(bare.calibration, net_w=3.0))
    [cost] = calibrated.predict([1.0], round)
    assert (cost.joules, cost.energy_from) == (3 * cost.seconds, "measured")

    metered = Energy(seconds=10, gross_j=60, idle_w=2.0)
    seen = calibrated.observed(round, 1.0, cost.seconds, energy=metered)
    [cost] = seen.predict([1.0], round)
    assert cost.joules == pytest.approx(4 * cost.seconds)
    assert cost.energy_from == "measured"


def test_memory_is_above_what_was_measured(task: Task, compiled: CompiledGraphs) -> None:
    for cost in model_of(task, compiled).predict(LEVELS, opened(task)):
        work = work_at(task.plan, compiled.manifest, cost.level, 16)
        assert cost.peak_bytes >= MARGIN * grown_bytes(work)


def test_memory_that_is_held_is_not_needed_again(task: Task, compiled: CompiledGraphs) -> None:
    model, round = model_of(task, compiled), opened(task)
    [cost] = model.predict([1.0], round)
    assert model.predict([1.0], round, held_bytes=7e6)[0].peak_bytes == cost.peak_bytes - 7e6
    # Sessions of other ways to compute may hold it.
    [alone] = replace(model, tuned=True, memo={}).predict([1.0], round, held_bytes=7e6)
    assert alone.peak_bytes == cost.peak_bytes
    # But arrays as large as the weights may not find room in it.
    [least] = model.predict([1.0], round, held_bytes=1e12)
    weights = work_at(task.plan, compiled.manifest, 1.0, 16).weight_bytes
    assert least.peak_bytes == pytest.approx(MARGIN * 5 * weights + 5e6)


def test_memory_of_a_level_not_tried_is_the_graphs_bound(
    task: Task, compiled: CompiledGraphs
) -> None:
    model, round = model_of(task, compiled, levels=(0.25,)), opened(task)
    small, full = model.predict((0.25, 1.0), round)
    work = work_at(task.plan, compiled.manifest, 1.0, 16)
    data = 16 * (12 * 4 + 8)
    assert full.peak_bytes == memory_bound(work, data, RULE, Encoding())
    assert small.peak_bytes < full.peak_bytes


def test_memory_grows_with_what_rule_and_encoding_keep(
    task: Task, compiled: CompiledGraphs
) -> None:
    model = model_of(task, compiled)
    [plain] = model.predict([1.0], opened(task))
    [sam] = model.predict([1.0], opened(task, local_rule=replace(RULE, sam_radius=0.1)))
    [top] = model.predict([1.0], opened(task, up=Encoding.parse("top-k:0.1")))
    weights = work_at(task.plan, compiled.manifest, 1.0, 16).weight_bytes
    assert sam.peak_bytes == pytest.approx(plain.peak_bytes + MARGIN * 2 * weights)
    assert top.peak_bytes == pytest.approx(plain.peak_bytes + MARGIN * 4 * weights)
