"""Laws of turns, for tasks that ask, are refused, train and fail in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_sdk.decide.turns import LEAST_PATIENCE_S, TaskTurns

NAMES = ("a", "b", "c", "d")
LEASE_S = 5.0


class AnyTurns(RuleBasedStateMachine):
    """Tasks of any priorities do anything in any order; the oracle is what they were told."""

    @initialize(priorities=st.lists(st.integers(1, 3), min_size=2, max_size=4))
    def begin(self, priorities: list[int]) -> None:
        self.priorities = dict(zip(NAMES, priorities, strict=False))
        self.turns = TaskTurns(self.priorities)
        self.now = 0.0
        self.believes = dict.fromkeys(self.priorities, False)
        """Whether a task trains, by what it was told."""

    def pick(self, number: int) -> str:
        return list(self.priorities)[number % len(self.priorities)]

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, 3), offers=st.booleans())
    def ask(self, number: int, offers: bool) -> None:
        task = self.pick(number)
        trained = self.believes[task]
        self.believes[task] = False  # it asks when its training is over
        obstacle = self.turns.ask(task, self.now)
        if obstacle is None:
            assert not any(self.believes.values()), "granted while another one trains"
            if offers:
                self.turns.offer(task, self.now, LEASE_S)
        else:
            assert obstacle.task != task or trained
            assert obstacle.training == self.believes.get(obstacle.task, False)

    @rule(number=st.integers(0, 3))
    def refuse(self, number: int) -> None:
        self.turns.refuse(self.pick(number), self.now)

    @rule(number=st.integers(0, 3))
    def assigned(self, number: int) -> None:
        task = self.pick(number)
        self.believes[task] = self.turns.begin(task) or self.believes[task]

    @rule(number=st.integers(0, 3), leaves=st.booleans())
    def done(self, number: int, leaves: bool) -> None:
        task = self.pick(number)
        self.believes[task] = False
        (self.turns.leave if leaves else self.turns.end)(task)

    @precondition(lambda self: hasattr(self, "turns"))
    @invariant()
    def at_most_one_trains(self) -> None:
        training = [task for task, does in self.believes.items() if does]
        assert len(training) <= 1
        assert self.turns.training == (training[0] if training else None)


TestAnyTurns = AnyTurns.TestCase


@given(
    count=st.integers(2, 4),
    rounds=st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 3.0)), min_size=40, max_size=120),
    trains=st.integers(0, 3),
)
def test_among_equals_nobody_is_served_twice_before_one_whose_rounds_keep_coming(
    count: int, rounds: list[tuple[int, float]], trains: int
) -> None:
    """Tasks of one priority whose rounds come at any times, the trainings over several of them."""
    names = NAMES[:count]
    turns, now = TaskTurns(dict.fromkeys(names, 1)), 0.0
    since: dict[str, list[str]] = {}
    """Who began to train since a task was refused first."""
    left = 0
    asked = dict.fromkeys(names, 0.0)
    for number, step in rounds:
        now += step
        if turns.training is not None and left == 0:
            turns.end(turns.training)
        left = max(0, left - 1)
        # Each task asks at least once within the patience.
        late = [name for name in names if now - asked[name] > LEAST_PATIENCE_S - 4]
        task = late[0] if late else names[number % count]
        asked[task] = now
        if turns.training == task:
            continue
        if turns.ask(task, now) is not None:
            turns.refuse(task, now)
            since.setdefault(task, [])
            continue
        turns.offer(task, now, LEASE_S)
        assert turns.begin(task)
        left = trains
        since.pop(task, None)
        for waiting, served in since.items():
            served.append(task)
            assert len(set(served)) == len(served), f"{waiting} waits, and {served} were served"


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_highest_priority_is_served_whenever_nobody_trains(order: list[int]) -> None:
    turns = TaskTurns({"high": 1, "low": 2})
    for now, number in enumerate(order):
        task = ("high", "low")[number]
        if turns.ask(task, float(now)) is None:
            turns.offer(task, float(now), LEASE_S)
        else:
            assert task == "low"
            turns.refuse(task, float(now))
        # It trains, and is done, before the next one asks; an offer may still be open.
        if turns.holder == task and now % 2:
            assert turns.begin(task)
            turns.end(task)
