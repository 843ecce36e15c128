"""Random histories of rounds, and how they go through the coordinator and through the oracle.

A history says, round by round, who is there, who trains what and what becomes of it. It does not
depend on the rule; `drive` plays it for one, as the round machine would: what is too late enters
memory or is dropped, a device that skips replays where the rule takes replays, and where a rule
takes whole models only a smaller offer is a skip.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from coordinator.aggregate.arrivals import Arrival, Expected, check_arrival
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import RamMoments, ServerOptimizer
from coordinator.aggregate.robust import Robust
from coordinator.aggregate.rules import Rule
from coordinator.aggregate.screening import Usual
from coordinator.masks import make_masks
from coordinator.rounds.persistent import PersistentMap, PersistentSet
from coordinator.rounds.synchronous import Commit, RoundsConfig, start
from coordinator.service.close import close_round, open_memory, weights_of
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from tests.messages import make_movement
from tests.property.rules.oracle import Heard, Oracle, Values, Word
from tests.property.strategies import Choice, plans, random_choice, seeds

MAX_STALENESS = 3
PLAIN = ServerOptimizer()
UNDEFENDED = Robust()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one selected device does in one round."""

    groups: Choice | None
    """What it trains; None if it skips."""
    seed: int = 0
    """Of the movement's numbers."""
    delay: int | None = 0
    """Rounds after which its movement is there: 0 in time, None never."""
    samples: int = 1
    level: float = 1.0
    keeps_copy: bool = False
    replays: bool = False
    """If it skips and can, it sends its last movement again."""


@dataclass(frozen=True, slots=True)
class RoundOf:
    """One round of a history."""

    rate: float
    devices: frozenset[str]
    """All that have joined so far."""
    turns: dict[str, Turn]
    """Of the selected ones."""


@dataclass(frozen=True, slots=True)
class History:
    """A plan, a start and what happens."""

    plan: ModelPlan
    rounds: tuple[RoundOf, ...]
    seed: int


# -- strategies --------------------------------------------------------------------------------


def histories() -> st.SearchStrategy[History]:
    """Up to six rounds of up to five devices that join by and by.

    The plan, the devices and the rounds shrink; what happens in them follows from a seed.
    """
    devices, rounds = st.sampled_from([3, 4, 5, 2, 1]), st.sampled_from([4, 5, 6, 3, 2, 1])
    return st.builds(random_history, plans(), devices, rounds, seeds)


def random_history(plan: ModelPlan, device_count: int, round_count: int, seed: int) -> History:
    """See `histories`."""
    rng = random.Random(seed)
    plan = replace(plan, buffers=())
    joins = {f"device{number}": rng.choice([1, 1, 2, 3]) for number in range(device_count)}
    rounds = []
    for number in range(1, 1 + round_count):
        there = [name for name, joined in joins.items() if joined <= number]
        selected = [name for name in there if rng.random() < 0.75]
        rounds.append(
            RoundOf(
                rate=rng.choice([0.1, 0.05, 0.025, 0.3]),
                devices=frozenset(there),
                turns={name: random_turn(rng, plan) for name in selected},
            )
        )
    return History(plan, tuple(rounds), seed)


def random_turn(rng: random.Random, plan: ModelPlan) -> Turn:
    """What some device does in some round."""
    fate = rng.choice(["fresh", "fresh", "skip", "late", "fresh", "skip", "lost"])
    groups = None
    if fate != "skip":
        groups = plan.all_groups() if rng.random() < 0.5 else random_choice(rng, plan)
    return Turn(
        groups=groups,
        delay={"fresh": 0, "late": rng.randint(1, 3)}.get(fate),
        samples=rng.choice([1, 3, 1, 20, 0]),
        level=rng.choice([1.0, 0.5, 0.3]),
        keeps_copy=rng.random() < 0.5,
        replays=rng.random() < 0.5,
        seed=rng.randrange(2**32),
    )


# -- through the coordinator -------------------------------------------------------------------

Say = Callable[[ModelPlan, Turn, float], Float32]
"""What a device would move all parameters by, given its turn and the learning rate."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One round as it went: what was heard, what was late, and what the coordinator made of it."""

    heard: Heard
    late: Sequence[Word]
    theta: Float32
    """The model after the round."""


def random_words(plan: ModelPlan, turn: Turn, rate: float) -> Float32:
    """Normal numbers from the turn's own seed, whatever the learning rate."""
    return normal(turn.seed, plan.parameters)


def drive(
    history: History,
    rule: Rule,
    *,
    max_staleness: int = MAX_STALENESS,
    threads: int = 1,
    folder: Path | None = None,
    from_zero: bool = False,
    say: Say = random_words,
    optimizer: ServerOptimizer = PLAIN,
    robust: Robust = UNDEFENDED,
) -> Iterator[Step]:
    """Play a history. `from_zero`: every round begins at 0, so it ends at the rule's movement."""
    plan = history.plan
    model = GlobalModel(plan, plan.unflatten(normal(history.seed, plan.parameters)), {})
    config = RoundsConfig(
        min_participants=0,
        plan=plan,
        rule=rule,
        masks=make_masks("random"),
        local_rule=LocalRule(learning_rate=1.0),
        steps=1,
        batch_size=1,
        min_devices=1,
        seed=0,
        rounds=len(history.rounds),
        max_staleness=max_staleness,
        server_optimizer=optimizer,
        robust=robust,
    )
    moments = RamMoments(optimizer, plan) if optimizer.starts else None
    memory = open_memory(config, folder, threads=threads)
    post = Post(plan, rule, say)
    for number, now in enumerate(history.rounds, 1):
        if from_zero:
            model.theta = np.zeros_like(model.theta)
        before = model.theta.copy()
        commit, arrivals = post.collect(number, now)
        state = start(config)
        samples = PersistentMap(post.samples)
        total = sum(samples.get(name, 0) for name in now.devices)
        fleet = replace(state.fleet, samples=samples, total_samples=total)
        state = replace(state, fleet=fleet, round=number, devices=PersistentSet(now.devices))
        close_round(
            replace(config, local_rule=LocalRule(learning_rate=now.rate)),
            weights_of(config, state, commit),
            commit,
            model,
            memory,
            arrivals,
            moments=moments,
            threads=threads,
        )
        if memory is not None:
            memory.commit()
        words = {key: _word(plan, arrival) for key, arrival in arrivals.items()}
        heard = Heard(
            round=number,
            rate=now.rate,
            theta=by_block(plan, before),
            fresh=[words[name, number] for name in commit.fresh],
            replayed=[words[name, number] for name in commit.replayed],
            silent=commit.silent,
            samples={name: post.samples.get(name, 0) for name in now.devices},
        )
        yield Step(heard, [words[key] for key in commit.late], model.theta)
    if memory is not None:
        memory.close()


class Post:
    """What devices send, and when it is there."""

    def __init__(self, plan: ModelPlan, rule: Rule, say: Say) -> None:
        self.samples: dict[str, int] = {}
        """What every device last said; 0 is no answer."""
        self._plan = plan
        self._rule = rule
        self._say = say
        self._last: dict[str, Arrival] = {}
        """The newest movement of every device, whether it was heard or not."""
        self._under_way: list[tuple[int, Arrival]] = []

    def collect(self, round: int, now: RoundOf) -> tuple[Commit, dict[tuple[str, int], Arrival]]:
        """What is there as the round closes."""
        arrivals: dict[tuple[str, int], Arrival] = {}
        fresh, replayed = [], []
        for name, turn in now.turns.items():
            if turn.samples:
                self.samples[name] = turn.samples
            if self._trains(turn):
                words = self._say(self._plan, turn, now.rate)
                self._last[name] = arrive(self._plan, name, round, now.rate, turn, words)
                if turn.delay == 0:
                    arrivals[name, round] = self._last[name]
                    fresh.append(name)
                elif turn.delay is not None:
                    self._under_way.append((round + turn.delay, self._last[name]))
            elif turn.replays and self._can_replay(name):
                arrivals[name, round] = self._last[name]
                replayed.append(name)
        late = []
        if self._rule.remembers == "movements":
            for when, arrival in self._under_way:
                if when == round:
                    late.append((arrival.contribution.device, arrival.contribution.made))
                    arrivals[late[-1]] = arrival
        commit = Commit(
            round=round,
            fresh=tuple(sorted(fresh)),
            replayed=tuple(sorted(replayed)),
            silent=tuple(sorted(now.turns.keys() - {*fresh, *replayed})),
            late=tuple(sorted(late)),
        )
        return commit, arrivals

    def _trains(self, turn: Turn) -> bool:
        """Whether it does, and the rule has a use for it."""
        whole = turn.groups == self._plan.all_groups()
        return turn.groups is not None and (whole or not self._rule.whole_models)

    def _can_replay(self, name: str) -> bool:
        """ccfl-1's devices all keep what they made; where the rule has a memory some do not."""
        if not self._rule.replay_within or name not in self._last:
            return False
        return self._rule.remembers == "nothing" or self._last[name].contribution.keeps_copy


def arrive(
    plan: ModelPlan,
    device: str,
    round: int,
    rate: float,
    turn: Turn,
    words: Float32,
    statistics: Mapping[str, Array] | None = None,
) -> Arrival:
    """A device's movement, cut out of `words`, after it went over the wire and was checked."""
    assert turn.groups is not None
    movement = make_movement(
        plan,
        turn.groups,
        plan.select(words, turn.groups).values,
        device=device,
        round=round,
        statistics={} if statistics is None else statistics,
        learning_rate=rate,
        level=turn.level,
        samples=turn.samples,
        keeps_copy=turn.keeps_copy,
    )
    expected = Expected(turn.groups, movement.level, movement.samples)
    return check_arrival(plan, movement, expected, Encoding(), rate, Usual(), None)


def by_block(plan: ModelPlan, flat: Float32) -> list[Values]:
    """The blocks of a vector over the whole model."""
    return [flat[a:b].astype(np.float64) for a, b in pairwise(plan.block_offsets.tolist())]


def normal(seed: int, size: int) -> Float32:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def _word(plan: ModelPlan, arrival: Arrival) -> Word:
    part = arrival.contribution
    blocks, start = {}, 0
    for block in part.blocks.ids.tolist():
        end = start + int(plan.block_sizes[block])
        blocks[block] = part.blocks.values[start:end].astype(np.float64)
        start = end
    terms = part.learning_rate, part.level, part.samples, part.keeps_copy
    return Word(part.device, part.made, *terms, blocks)


# -- against the oracle ------------------------------------------------------------------------


def assert_follows(
    history: History,
    rule: Rule,
    oracle: Oracle,
    *,
    threads: int = 1,
    robust: Robust = UNDEFENDED,
    clip: Callable[[Heard, Sequence[Word]], tuple[Heard, Sequence[Word]]] | None = None,
    rounding: float = 4e-6,
    say: Say = random_words,
) -> None:
    """The coordinator's model goes where the oracle says, in every round, but for float32.

    `clip`: what becomes of the movements of a round before the oracle hears them.
    """
    most = oracle.max_staleness
    for step in drive(history, rule, max_staleness=most, threads=threads, robust=robust, say=say):
        heard, late = step.heard, step.late
        if clip is not None:
            heard, late = clip(heard, late)
        moved = oracle.move(heard)
        words = [*heard.fresh, *heard.replayed, *oracle.past]
        sizes = [
            float(np.abs(values).max()) * max(1.0, heard.rate / word.rate)
            for word in words
            for values in word.blocks.values()
        ]
        sizes += [float(np.abs(theta).max()) for theta in heard.theta]
        ends = [theta + movement for theta, movement in zip(heard.theta, moved, strict=True)]
        error = float(np.abs(step.theta - np.concatenate(ends)).max())
        bound = rounding * max(sizes) * max(1.0, oracle.server_rate)
        assert error <= bound, f"round {heard.round}: {error} above {bound}"
        oracle.remember(heard, late)
