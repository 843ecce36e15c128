"""Canary delivery: the rules, and a coordinator whose devices vote."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from rich.console import Console

from coordinator.aggregate.rules.fed_raa import FedAsync
from coordinator.masks import make_masks
from coordinator.operate.control.tables import status_table
from coordinator.operate.serve.serving import is_quiet
from coordinator.run.folder import DELIVERY, Run, RunError, checkpoint_rounds, read_result
from coordinator.run.history import news_of
from coordinator.run.steering.orders import read_steered
from coordinator.service.admission.demands import Demands
from coordinator.service.outgoing.canary import (
    CanarySettings,
    CanaryState,
    CanaryTrial,
    begin,
    ended,
    pack_state,
    unpack_state,
    verdict,
    vote,
)
from coordinator.service.outgoing.rollout import ANSWERS_S, NO_JUDGES, UNHEARD_S
from coordinator.service.overview.folder import overview_of
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.delivery import ModelNotice, canary_draw
from edge_sdk.protocol.messages.round import RoundClosed
from edge_sdk.protocol.messages.transfer import MAX_LOSS, Evaluation
from tests.unit.coordinator.service.service_world import (
    TOPICS,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)
from tests.unit.coordinator.service.test_delivery import announced, same, weights_of
from tests.unit.coordinator.service.test_service import scored

RUN = "0123456789abcdef"
SETTINGS = CanarySettings(share=0.2, min_devices=3, hours=2.0)
FLEET = [f"device-{number}" for number in range(40)]


def answer(device: str, round: int, after: float, before: float | None = 0.8) -> Evaluation:
    return Evaluation(
        device=device,
        run=RUN,
        round=round,
        samples=50,
        loss=0.5,
        accuracy=after,
        canary=True,
        before_loss=None if before is None else 0.5,
        before_accuracy=before,
    )


# -- rules ---------------------------------------------------------------------------------------


def tried(devices: list[str] = FLEET, **changes: Any) -> tuple[CanaryState, list[str]]:
    """A trial of round 7 that began at time 0, and its members."""
    state = CanaryState(promoted=5, decided=5)
    state = begin(replace(SETTINGS, **changes), state, RUN, 7, 0.9, devices, 0.0)
    assert state.trial is not None
    drawn = [each for each in devices if canary_draw(RUN, each, 7) < state.trial.share]
    return state, drawn


def voted(state: CanaryState, devices: list[str], after: float) -> CanaryState:
    for each in devices:
        state = vote(SETTINGS, state, RUN, each, answer(each, 7, after))
    return state


def test_share_of_the_fleet_tries_a_model_and_other_models_have_others() -> None:
    state, drawn = tried()
    assert state.trial is not None
    assert 8 <= len(drawn) == state.trial.members <= 16
    again, same_ones = tried()
    assert (again, same_ones) == (state, drawn)
    assert {name for name in FLEET if canary_draw(RUN, name, 8) < 0.2} != set(drawn)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_small_fleet_has_enough_members(count: int) -> None:
    _, drawn = tried(FLEET[:count])
    assert len(drawn) >= min(count, 3)


def test_enough_votes_promote_and_few_do_not() -> None:
    state, drawn = tried()
    half = -(-len(drawn) // 2)
    assert verdict(SETTINGS, voted(state, drawn[: half - 1], 0.8), 1.0) is None
    found = verdict(SETTINGS, voted(state, drawn[:half], 0.79), 1.0)  # within the tolerance
    assert found is not None
    assert found.promoted
    after = ended(voted(state, drawn[:half], 0.79), found)
    assert (after.promoted, after.best, after.decided, after.trial) == (7, (7, 0.9), 7, None)


def test_too_many_votes_against_end_the_trial_at_once() -> None:
    state, drawn = tried()
    least = int(SETTINGS.errors * len(drawn)) + 1
    assert verdict(SETTINGS, voted(state, drawn[: least - 1], 0.7), 1.0) is None
    found = verdict(SETTINGS, voted(state, drawn[:least], 0.7), 1.0)
    assert found is not None
    assert not found.promoted
    after = ended(voted(state, drawn, 0.7), found)
    assert (after.promoted, after.decided) == (5, 7)


def test_one_device_decides_nothing_alone() -> None:
    """Whatever it says, and however often."""
    state, drawn = tried(FLEET[:3])
    for after in (0.0, 1.0):
        alone = voted(state, [drawn[0]] * 5, after)
        assert verdict(SETTINGS, alone, 1.0) is None
        late = verdict(SETTINGS, alone, 2 * 3600.0)
        assert late is not None
        assert not late.promoted
        assert "only 1 of 3" in late.words


def test_time_is_up() -> None:
    state, drawn = tried()
    found = verdict(SETTINGS, voted(state, drawn[:3], 0.9), 2 * 3600.0)
    assert found is not None
    assert found.promoted
    mixed = voted(voted(state, drawn[:2], 0.9), drawn[2:4], 0.1)
    found = verdict(SETTINGS, mixed, 2 * 3600.0)
    assert found is not None
    assert not found.promoted


def test_votes_that_do_not_count() -> None:
    state, drawn = tried()
    stranger = next(each for each in FLEET if each not in drawn)
    for device, found in (
        (stranger, answer(stranger, 7, 0.9)),  # it is not drawn
        (drawn[0], answer(drawn[0], 6, 0.9)),  # another model
        (drawn[0], answer(drawn[0], 7, 0.9, None)),  # nothing to compare with
    ):
        assert vote(SETTINGS, state, RUN, device, found) is state
    once = vote(SETTINGS, state, RUN, drawn[0], answer(drawn[0], 7, 0.1))
    assert vote(SETTINGS, once, RUN, drawn[0], answer(drawn[0], 7, 0.9)) is once


def test_first_model_needs_only_to_be_sound() -> None:
    state = begin(SETTINGS, CanaryState(), RUN, 7, None, FLEET, 0.0)
    assert state.trial is not None
    drawn = [each for each in FLEET if canary_draw(RUN, each, 7) < state.trial.share]
    good = vote(SETTINGS, state, RUN, drawn[0], answer(drawn[0], 7, 0.1, None))
    broken = replace(answer(drawn[1], 7, 0.1, None), loss=MAX_LOSS)
    bad = vote(SETTINGS, good, RUN, drawn[1], broken)
    assert bad.trial is not None
    assert bad.trial.votes == {drawn[0]: True, drawn[1]: False}


def test_tasks_without_accuracy_are_judged_by_their_loss() -> None:
    state, drawn = tried()
    for loss, good in ((1.019, True), (1.021, False)):
        said = Evaluation(
            device=drawn[0],
            run=RUN,
            round=7,
            samples=9,
            loss=loss,
            accuracy=None,
            canary=True,
            before_loss=1.0,
        )
        found = vote(SETTINGS, state, RUN, drawn[0], said).trial
        assert found is not None
        assert found.votes == {drawn[0]: good}


def test_state_comes_back_from_json() -> None:
    state, drawn = tried()
    state = voted(state, drawn[:2], 0.9)
    assert unpack_state(pack_state(state)) == state
    assert unpack_state(pack_state(CanaryState())) == CanaryState()


# -- a coordinator -------------------------------------------------------------------------------

FEW = CanarySettings(share=0.5, min_devices=2, hours=2.0)
NAMES = ("one", "two", "three", "four")


def world_of(worlds: Worlds, *accuracies: float, rounds: int = 9, **options: Any) -> World:
    said = iter([*accuracies, *[0.5] * 20])
    world = worlds.make(
        rounds_config(rounds=rounds, min_devices=4, min_participants=4),
        evaluate=lambda _, levels: scored(levels, next(said), 0.1),
        canary=FEW,
        **options,
    )
    for name in NAMES:
        world.add(name, sends=False)
    world.settle()
    return world


def commit(world: World) -> int:
    """A round of all devices; returns its number."""
    round = world.state.round
    for device in world.devices:
        if round in device.movements:
            device.send(round)
    return round


def members(world: World) -> list[str]:
    trial = announced(world, "canary")
    assert trial is not None
    assert trial.canary is not None
    return [name for name in NAMES if canary_draw(RUN, name, trial.round) < trial.canary]


def answers(world: World, after: float, before: float | None = 0.8) -> None:
    """All members of the trial answer."""
    trial = announced(world, "canary")
    assert trial is not None
    for device in world.devices:
        if device.name in members(world):
            device.tell(answer(device.name, trial.round, after, before))
    world.settle()


def told(world: World) -> list[str]:
    return [line["canary"]["what"] for line in world.history if "canary" in line]


def rounds_of(world: World) -> list[int | None]:
    found = [announced(world, choice) for choice in ("latest", "best", "canary")]
    return [None if each is None else each.round for each in found]


def test_model_is_tried_promoted_and_another_rolled_back(worlds: Worlds) -> None:
    world = world_of(worlds, 0.2, 0.6, 0.7, 0.4)
    assert commit(world) == 1
    assert rounds_of(world) == [None, None, 1]
    assert 2 <= len(members(world)) < 4
    commit(world)
    assert rounds_of(world) == [None, None, 1]  # one at a time
    answers(world, 0.1, None)  # the first one has nothing before it
    assert rounds_of(world) == [1, 1, 2]  # the second is current, and tried next
    latest = announced(world, "latest")
    assert latest is not None
    assert (latest.decided, latest.canary) == (1, None)
    assert same(weights_of(world, latest), dict(read_result(world.folder, 1).weights))
    trial = announced(world, "canary")
    assert same(weights_of(world, trial), dict(read_result(world.folder, 2).weights))
    answers(world, 0.5)
    assert rounds_of(world) == [1, 1, None]
    assert (announced(world, "latest") or latest).decided == 2
    commit(world)
    assert rounds_of(world) == [1, 1, 3]
    answers(world, 0.8)
    assert rounds_of(world) == [3, 3, None]
    commit(world)
    answers(world, 0.8)
    assert rounds_of(world) == [4, 3, None]  # its accuracy is below the best
    assert told(world) == [
        *("started", "promoted", "started", "rolled_back", "started", "promoted"),
        *("started", "promoted"),
    ]
    words = [news_of(line) for line in world.history if "canary" in line]
    assert words[3] == (
        "the model of round 2 is rolled back; devices return to round 1: "
        "0 of 1 devices found it no worse"
    )


def test_checkpoints_of_delivered_models_stay(worlds: Worlds) -> None:
    world = world_of(worlds)
    commit(world)
    answers(world, 0.1, None)
    commit(world)  # on trial for ever
    for _ in range(6):
        commit(world)
    assert {1, 2} <= set(checkpoint_rounds(world.folder))
    assert 3 not in checkpoint_rounds(world.folder)
    world.restart()
    assert rounds_of(world) == [1, 1, 2]
    assert same(
        weights_of(world, announced(world, "latest")), dict(read_result(world.folder, 1).weights)
    )
    assert same(
        weights_of(world, announced(world, "canary")), dict(read_result(world.folder, 2).weights)
    )


@pytest.mark.parametrize("moment", ["begun", "voted", "state", "announced", "told"])
def test_kill_at_any_moment_ends_the_same(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between groups, too: the votes that were heard count, and all is told once."""
    world = world_of(worlds, 0.2, 0.6)
    commit(world)
    answers(world, 0.1, None)
    if moment == "begun":
        commit(world)
        world.restart()
    else:
        commit(world)
    trial, (first, *others) = announced(world, "canary"), members(world)
    assert trial is not None
    by_name = {device.name: device for device in world.devices}
    by_name[first].tell(answer(first, 2, 0.9))
    world.settle()
    if moment == "voted":
        world.restart()

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    rollout = world.service._parts.rollout
    assert rollout is not None
    place = {"state": "promote", "announced": "deliver_none"}.get(moment)
    if place is not None:
        monkeypatch.setattr(rollout._outlet, place, kill)
    elif moment == "told":
        monkeypatch.setattr(rollout, "_record", kill)
    try:
        for name in others:
            by_name[name].tell(answer(name, 2, 0.9))
        world.settle()
    except Killed:
        world.restart()
    assert rounds_of(world) == [2, 2, None]
    assert told(world) == ["started", "promoted", "started", "promoted"]
    world.restart()
    assert rounds_of(world) == [2, 2, None]
    assert told(world) == ["started", "promoted", "started", "promoted"]


def test_time_limit_counts_across_a_restart(worlds: Worlds) -> None:
    world = world_of(worlds)
    commit(world)
    world.clock.now += 3600
    world.restart()
    assert rounds_of(world) == [None, None, 1]
    world.clock.now += 3601
    world.settle()
    assert told(world)[:2] == ["started", "rolled_back"]
    ends = [each["canary"]["words"] for each in world.history if "canary" in each]
    assert "only 0 of 2 devices answered in 2 h" in ends[1]


def test_rollback_of_the_run_takes_its_models_along(worlds: Worlds) -> None:
    world = world_of(worlds)
    commit(world)
    answers(world, 0.1, None)
    commit(world)
    answers(world, 0.8)
    assert rounds_of(world) == [2, 1, None]
    world.crash()
    with Run(world.folder) as run:
        run.rollback(1)
    world.start()
    world.settle()
    assert rounds_of(world)[1] == 1
    assert announced(world, "latest") is None
    commit(world)
    trial = announced(world, "canary")
    assert trial is not None
    assert trial.round > 2


def test_run_without_canary_clears_what_is_left(worlds: Worlds) -> None:
    world = world_of(worlds)
    commit(world)
    assert announced(world, "canary") is not None
    world._changes["canary"] = CanarySettings()
    world.restart()
    assert rounds_of(world) == [1, 1, None]


def test_damaged_state_is_refused(worlds: Worlds) -> None:
    world = world_of(worlds)
    commit(world)
    world.crash()
    path = world.folder / DELIVERY
    path.write_bytes(path.read_bytes().replace(b"trial", b"trail"))
    with pytest.raises(RunError, match="is damaged"):
        world.start()


def test_asynchronous_run_tries_its_models_too(worlds: Worlds) -> None:
    machine = fragments_config(
        rule=FedAsync(), masks=make_masks("random"), updates=8, min_devices=2
    )
    world = worlds.make(machine, canary=CanarySettings(share=0.5, min_devices=1))
    world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    trial = announced(world, "canary")
    assert isinstance(trial, ModelNotice)
    answers(world, 0.1, None)
    assert (announced(world, "latest") or trial).round == trial.round


def test_trial_is_plain_data() -> None:
    assert CanaryTrial(round=1, share=1.0, members=1, since=0.0).votes == {}


@pytest.mark.parametrize("when", ["round", "now"])
def test_complete_run_whose_last_model_is_tried_can_be_stopped(worlds: Worlds, when: str) -> None:
    """Else it lasts until the devices have decided."""
    world = world_of(worlds, rounds=1)
    overview, stop = world.service.overview, threading.Event()
    assert not is_quiet(overview)
    commit(world)
    assert world.service.finished
    assert told(world) == ["started"]
    assert is_quiet(overview)  # no round is missing
    step, steps = world.service._step, count()

    def work(wait_s: float) -> None:
        number = next(steps)
        if number == 20:
            assert world.service.helm.stop(when, "anna")["changed"]
        assert number < 40, "it does not stop"
        world.clock.now += 1.0
        step(0.0)

    world.service._step = work  # type: ignore[method-assign]
    world.service.serve(stop)
    assert next(steps) > 20
    world.stop()
    assert read_steered(world.folder).stopping is None


def test_devices_that_may_not_take_part_are_no_members_of_a_trial(worlds: Worlds) -> None:
    """Nothing that they say counts, so a trial that waited for them could not succeed."""
    world = worlds.make(
        rounds_config(rounds=9, min_devices=1),
        evaluate=lambda _, levels: scored(levels, 0.5, 0.1),
        canary=CanarySettings(share=1.0, min_devices=1),
        demands=Demands(labels={"site": "berlin"}),
    )
    for name in NAMES:
        world.add(name, sends=False)
    world.settle()
    for device in world.devices[:1]:
        device.tell(Condition(device=device.name, labels={"site": "berlin"}))
    world.settle()
    commit(world)
    assert announced(world, "canary") is not None
    world.devices[0].tell(answer("one", 1, 0.8, None))
    world.settle()
    assert told(world)[:2] == ["started", "promoted"]


# -- the end of a run ----------------------------------------------------------------------------


def told_end(world: World) -> bool:
    return isinstance(world.retained(TOPICS.round), RoundClosed)


def test_devices_learn_of_the_end_once_the_last_model_is_promoted(worlds: Worlds) -> None:
    """Else those without `stay` leave with an earlier model."""
    world = world_of(worlds, rounds=2)
    commit(world)
    answers(world, 0.1, None)
    commit(world)
    assert world.service.finished
    assert rounds_of(world) == [1, 1, 2]
    assert not told_end(world)
    answers(world, 0.9)
    assert rounds_of(world)[0] == 2
    assert told_end(world)


def test_trial_without_answers_is_given_up_for_the_last_model(worlds: Worlds) -> None:
    world = world_of(worlds, rounds=3)
    commit(world)
    answers(world, 0.1, None)
    commit(world)  # on trial, and nobody answers
    commit(world)
    assert rounds_of(world) == [1, 1, 3]
    assert not told_end(world)
    answers(world, 0.9)
    assert rounds_of(world)[0] == 3
    assert told_end(world)


def test_trial_with_too_few_answers_holds_the_last_model_back_for_a_while(worlds: Worlds) -> None:
    world = world_of(worlds, rounds=3)
    commit(world)
    answers(world, 0.1, None)
    commit(world)
    first = members(world)[0]
    by_name = {device.name: device for device in world.devices}
    by_name[first].tell(answer(first, 2, 0.9))
    world.settle()
    commit(world)
    assert rounds_of(world) == [1, 1, 2]
    world.wait(ANSWERS_S + 1)
    assert rounds_of(world) == [1, 1, 3]
    assert not told_end(world)
    world.wait(ANSWERS_S - 1)
    assert not told_end(world)
    world.wait(2)
    assert told_end(world)
    assert rounds_of(world) == [1, 1, 3]  # devices that stay may still decide


def test_end_does_not_wait_for_devices_that_left(worlds: Worlds) -> None:
    world = world_of(worlds, rounds=1)
    commit(world)
    assert not told_end(world)
    for device in list(world.devices):
        world.leave(device)
    world.settle()
    assert told_end(world)


def test_run_that_nobody_can_judge_says_so(worlds: Worlds, caplog: Any) -> None:
    world = world_of(worlds, rounds=1)
    commit(world)
    delivery = world.service.overview.status()["delivery"]
    assert delivery == {
        "round": 1,
        "since": world.clock.now,
        "answers": 0,
        "members": len(members(world)),
        "promoted": None,
        "judges": 0,
        "advice": NO_JUDGES,
    }
    assert "evaluate_every" in NO_JUDGES
    world.wait(UNHEARD_S - 1)
    assert not told_end(world)
    world.wait(2)
    assert told_end(world)
    assert [line for line in world.history if NO_JUDGES in line.get("event", "")]
    assert sum(NO_JUDGES in each for each in caplog.messages) == 2


def test_status_shows_the_trial_served_and_not(worlds: Worlds) -> None:
    world = world_of(worlds, rounds=3)
    commit(world)
    answers(world, 0.1, None)
    commit(world)
    found = world.service.overview.status()
    assert (found["delivery"]["round"], found["delivery"]["promoted"]) == (2, 1)
    assert found["delivery"]["judges"] > 0
    assert found["delivery"]["advice"] is None
    text = io.StringIO()
    Console(file=text, width=200).print(status_table(found))
    assert "the model of round 1; that of round 2 is on trial" in text.getvalue()
    world.stop()
    kept = overview_of(world.folder).status()["delivery"]
    assert kept == {**found["delivery"], "judges": 0}
