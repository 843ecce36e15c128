"""Laws of clipping and of robust means, whatever devices send."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize  # type: ignore[import-untyped]

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import MemoryConfig, RamMemory
from coordinator.aggregate.robust import (
    Robust,
    RobustName,
    Weighed,
    clipping,
    distances,
    order,
    robust_mean,
)
from coordinator.aggregate.robust.clipping import clipped, measure, yardstick
from coordinator.aggregate.robust.distances import weiszfeld
from coordinator.aggregate.robust.root import STEP, root_yardstick, trusted
from coordinator.aggregate.rules import Closing
from coordinator.aggregate.rules.ra_fed import RaFed
from coordinator.aggregate.rules.ram_fed import RamFed
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim, Tensor
from tests.property.rules.histories import by_block, normal
from tests.property.strategies import law, plans, random_choice, random_plan, seeds

MEANS: list[RobustName] = ["median", "trimmed-mean", "geometric-median", "multi-krum"]
few = settings(law, max_examples=40)
RATE = 0.1


def movement(plan: ModelPlan, device: int, seed: int, *, whole: bool, scale: float) -> Contribution:
    rng = random.Random(seed)
    groups = plan.all_groups() if whole else random_choice(rng, plan)
    values = np.multiply(normal(seed, plan.parameters), scale, dtype=np.float32)
    return Contribution(f"d{device}", 1, plan.select(values, groups), RATE, 1.0, 1 + seed % 9)


def fleet(plan: ModelPlan, seed: int, count: int, *, whole: bool = False) -> list[Contribution]:
    rng = random.Random(seed)
    return [
        movement(
            plan,
            number,
            rng.randrange(2**32),
            whole=whole or rng.random() < 0.3,
            scale=rng.choice([1, 1, 2, 0.5, 30]),
        )
        for number in range(count)
    ]


def mean_of(
    plan: ModelPlan, terms: Sequence[Weighed], robust: Robust, *, threads: int = 1
) -> Float32:
    return robust_mean(plan, terms, robust, threads=threads).values


def weighed(parts: Sequence[Contribution]) -> list[Weighed]:
    return [Weighed(part.blocks, float(part.samples)) for part in parts]


def held(plan: ModelPlan, part: Contribution) -> dict[int, Float32]:
    """The values of each block of a movement."""
    ends = np.cumsum(plan.block_sizes[part.blocks.ids])[:-1]
    return dict(zip(part.blocks.ids.tolist(), np.split(part.blocks.values, ends), strict=True))


@few
@given(plan=plans(), seed=seeds, name=st.sampled_from(MEANS), count=st.integers(1, 7))
def test_mean_lies_between_its_values_and_forgets_their_order(
    plan: ModelPlan, seed: int, name: RobustName, count: int
) -> None:
    parts, robust = fleet(plan, seed, count), Robust(name=name)
    result = mean_of(plan, weighed(parts), robust)
    turned = mean_of(plan, weighed([*parts[3:], *parts[:3]]), robust)
    largest = max(float(np.abs(part.blocks.values).max(initial=0)) for part in parts)
    if name != "multi-krum" or count < 4:  # of devices that are equally near, the first counts
        assert np.abs(turned - result).max(initial=0) <= 1e-5 * largest
    blocks = [held(plan, part) for part in parts]
    for block, values in enumerate(by_block(plan, result)):
        heard = [each[block] for each in blocks if block in each]
        low, high = (np.min(heard, axis=0), np.max(heard, axis=0)) if heard else (0, 0)
        assert (values >= low - 1e-6 * largest).all()
        assert (values <= high + 1e-6 * largest).all()


@few
@given(plan=plans(), seed=seeds, name=st.sampled_from(MEANS), count=st.integers(3, 6))
def test_equal_vectors_give_that_vector(
    plan: ModelPlan, seed: int, name: RobustName, count: int
) -> None:
    same = normal(seed, plan.parameters)
    terms = [Weighed(plan.select(same, plan.all_groups()), 1.0 + n) for n in range(count)]
    result = mean_of(plan, terms, Robust(name=name))
    assert np.allclose(result, same, rtol=1e-6, atol=1e-7)


@few
@given(
    plan=plans(),
    seed=seeds,
    name=st.sampled_from(MEANS),
    far=st.sampled_from([1e3, -1e9, 1e9]),
    count=st.integers(5, 7),
)
def test_one_bad_device_moves_the_mean_no_further_than_honest_ones_differ(
    plan: ModelPlan, seed: int, name: RobustName, far: float, count: int
) -> None:
    honest = fleet(plan, seed, count, whole=True)
    evil = Blocks(honest[0].blocks.ids, np.full(plan.parameters, far, dtype=np.float32))
    result = mean_of(plan, [*weighed(honest), Weighed(evil, 1.0)], Robust(name=name))
    vectors = np.array([part.blocks.values for part in honest], dtype=np.float64)
    for start, end in zip(plan.block_offsets[:-1], plan.block_offsets[1:], strict=True):
        own, got = vectors[:, start:end], result[start:end]
        if name == "geometric-median":
            weights = np.array([part.samples for part in honest], dtype=np.float64)
            share = 1 / (weights.sum() + 1)  # of the bad one; below a half, for weights are whole
            centre = own[0]
            radius = np.linalg.norm(own - centre, axis=1).max()
            bound = 2 * (1 - share) / (1 - 2 * share) * radius
            assert np.linalg.norm(got - centre) <= bound * (1 + 1e-5) + 1e-5
        else:
            assert (got >= own.min(axis=0) - 1e-4).all()
            assert (got <= own.max(axis=0) + 1e-4).all()


@few
@given(plan=plans(), seed=seeds, count=st.integers(3, 7), factor=st.sampled_from([0.5, 1.0, 2.0]))
def test_no_clipped_block_is_longer_than_the_yardstick_and_short_ones_stay(
    plan: ModelPlan, seed: int, count: int, factor: float
) -> None:
    parts = fleet(plan, seed, count)
    late = replace(parts[0], device="late", blocks=parts[-1].blocks, learning_rate=RATE / 4)
    robust = Robust(name="clip-median", factor=factor)
    limit = factor**2 * yardstick(plan, measure(plan, parts))
    after = clipped(plan, robust, parts, [late])
    for before, now in zip([*parts, late], after, strict=True):
        (lengths,), (were,) = measure(plan, [now]), measure(plan, [before])
        assert (lengths.squares <= limit[lengths.ids] * (1 + 1e-5)).all()
        one, other = held(plan, before), held(plan, now)
        for number, block in enumerate(before.blocks.ids.tolist()):
            if were.squares[number] <= limit[block]:
                assert np.array_equal(one[block], other[block])


def test_round_of_two_has_no_yardstick_and_clip_has_its_own() -> None:
    plan = ModelPlan((), (Tensor("w", "float32", (Dim(50),)),))
    parts = fleet(plan, 3, 2, whole=True)
    assert clipped(plan, Robust(name="clip-median"), parts) == parts
    for part in clipped(plan, Robust(name="clip", norm=0.5), parts):
        assert np.linalg.norm(part.blocks.values) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("name", MEANS)
def test_bits_depend_on_no_number_of_threads_and_no_size_of_a_piece(
    name: RobustName, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = random_plan(11, 3, 4)
    parts, robust = fleet(plan, 5, 9), Robust(name=name)
    found = {
        mean_of(plan, weighed(clipped(plan, robust, parts, threads=n)), robust, threads=n).tobytes()
        for n in (1, 2, 3)
    }
    monkeypatch.setattr(order, "ROOM", 40)
    monkeypatch.setattr(clipping, "ROOM", 40)
    found.add(mean_of(plan, weighed(clipped(plan, robust, parts)), robust).tobytes())
    assert len(found) == 1
    monkeypatch.setattr(distances, "ROOM", 40)  # sums of products in other pieces: other rounding
    other = mean_of(plan, weighed(clipped(plan, robust, parts)), robust)
    assert np.allclose(other, np.frombuffer(found.pop(), np.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_geometric_median_is_the_least_sum_of_distances(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, weights = rng.standard_normal((6, 3)), rng.integers(1, 5, 6).astype(np.float64)
    if seed == 5:
        points[:4] = points[0]  # then it is a point itself, where the sum has no gradient

    def total(point: np.ndarray) -> float:
        return float(weights @ np.linalg.norm(points - point, axis=1))

    shares = weiszfeld((points @ points.T)[None], weights[None])[0]
    best = minimize(total, points.mean(axis=0), method="Nelder-Mead", options={"xatol": 1e-10})
    assert shares.sum() == pytest.approx(1)
    assert total(shares @ points) <= best.fun * (1 + 1e-6)


@few
@given(plan=plans(), seed=seeds, weighting=st.sampled_from(["uniform", "samples"]))
def test_defence_that_has_nothing_to_do_changes_no_bit(
    plan: ModelPlan, seed: int, weighting: str
) -> None:
    parts = fleet(plan, seed, 4)
    closing = Closing(plan=plan, round=1, theta=np.zeros(plan.parameters, np.float32),
                      learning_rate=RATE, fresh=parts)  # fmt: skip
    plain = RaFed(weighting=weighting).move(closing)  # type: ignore[arg-type]
    for robust in (Robust(name="clip", norm=1e9), Robust(name="clip-median", factor=1e9)):
        fresh = clipped(plan, robust, parts)
        same = RaFed(weighting=weighting).move(replace(closing, fresh=fresh, robust=robust))  # type: ignore[arg-type]
        assert same.tobytes() == plain.tobytes()


@few
@given(plan=plans(), seed=seeds, name=st.sampled_from([*MEANS, "clip-median"]))
def test_memory_sums_are_those_of_clipped_entries(
    plan: ModelPlan, seed: int, name: RobustName
) -> None:
    rule, robust = RamFed(damping=0.8), Robust(name=name)
    memory = RamMemory(plan, MemoryConfig(memory_type="fp32", damping=0.8))
    for round in (1, 2, 3):
        parts = [replace(part, made=round) for part in fleet(plan, seed + round, 4)]
        fresh = clipped(plan, robust, parts)
        rule.move(
            Closing(plan=plan, round=round, theta=np.zeros(plan.parameters, np.float32),
                    learning_rate=RATE, fresh=fresh, registered=4.0, memory=memory, robust=robust)
        )  # fmt: skip
        for part in fresh:
            newest = [piece for piece in memory.recall(part.device) if piece.made.round == round]
            if name != "multi-krum":  # which leaves some out
                assert np.array_equal(newest[0].blocks.values, part.blocks.values)
        total, entries = np.zeros(plan.parameters), np.zeros(plan.block_count)
        for number in range(4):
            for piece in memory.recall(f"d{number}"):
                faded = 0.8 ** (round - piece.made.round) / RATE
                entries[piece.blocks.ids] += 1
                whole = plan.block_offsets
                sizes = np.cumsum(plan.block_sizes[piece.blocks.ids])[:-1]
                for block, values in zip(
                    piece.blocks.ids, np.split(piece.blocks.values, sizes), strict=True
                ):
                    total[whole[block] : whole[block + 1]] += faded * values.astype(np.float64)
        assert np.array_equal(memory.entries, entries)
        assert np.allclose(memory.total, total, rtol=1e-9, atol=1e-9 * np.abs(total).max(initial=1))


@few
@given(plan=plans(), seed=seeds)
def test_trust_is_the_cosine_with_the_root_over_the_blocks_that_a_device_holds(
    plan: ModelPlan, seed: int
) -> None:
    root = plan.select(normal(seed, plan.parameters), plan.full_groups())
    parts = fleet(plan, seed, 3)
    parts.append(replace(parts[0], blocks=Blocks(root.ids, -3 * root.values)))
    parts.append(replace(parts[0], blocks=Blocks(root.ids, 7 * root.values)))
    found = trusted(plan, root, parts)
    known = held(plan, replace(parts[0], blocks=root))
    for before, part in zip(parts, found, strict=True):
        own = held(plan, before)
        a = np.concatenate([own[i] for i in own]).astype(np.float64)
        b = np.concatenate([known.get(i, np.zeros_like(own[i])) for i in own]).astype(np.float64)
        scale = np.linalg.norm(a) * np.linalg.norm(b)
        cosine = max(0.0, float(a @ b) / scale) if scale else 0.0
        assert abs(part.trust - cosine) <= STEP
        assert part.weight("samples") == before.samples * part.trust
    assert [part.trust for part in found[3:]] == [0.0, 1.0]
    limit = root_yardstick(plan, root, RATE)
    short = clipped(plan, Robust(name="root"), found, root=limit)
    for lengths in measure(plan, short):
        assert (lengths.squares <= limit[lengths.ids] * (1 + 1e-5)).all()
