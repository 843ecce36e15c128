"""The device's state machine: every cell of its table, and all that is not in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from edge_sdk.decide.decision import Decision
from edge_sdk.device.machine import (
    Decide,
    Decided,
    DevicePhase,
    DeviceState,
    Effect,
    Event,
    Examine,
    Examined,
    Facts,
    Failed,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Found,
    KeepMovement,
    LinkUp,
    Resend,
    Restarted,
    SendMessage,
    SendReplay,
    Train,
    handle,
)
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding, Wants
from edge_sdk.protocol.plan.blocks import Blocks
from tests.messages import MOVEMENT, make_opening

BLOCKS = Blocks(np.arange(1), np.zeros(1, dtype=np.float32))


def opening(
    round: int, replay_within: int = 0, plan_hash: str = "p", *, by_invitation: bool = False
) -> RoundOpen:
    return make_opening(
        round, plan_hash=plan_hash, replay_within=replay_within, by_invitation=by_invitation
    )


def announcement(round: int) -> RoundOpen:
    return opening(round, by_invitation=True)


def assignment(round: int = 1, device: str = "pi") -> Assignment:
    return Assignment(device=device, round=round, groups={"a": (0,)})


def movement(round: int = 1, *, keeps_copy: bool = False) -> Movement:
    return replace(MOVEMENT, round=round, plan_hash="p", level=0.5, keeps_copy=keeps_copy)


def receipt(round: int = 1, device: str = "pi") -> Receipt:
    return Receipt(device=device, round=round, outcome=Outcome.COUNTED)


def survey(round: int = 1, wants: Wants = "statistics", **changes: Any) -> Survey:
    usual: dict[str, Any] = {"plan_hash": "p", "levels": (1.0,), "groups": ({"a": (0,)},)}
    numbers = {"rescale": 0.5, "samples": 4, "batch_size": 2, "wait_s": 9.0}
    return Survey(round=round, wants=wants, **{**usual, **numbers, **changes})


def finding(round: int = 1, wants: Wants = "statistics") -> SurveyFinding:
    return SurveyFinding(device="pi", round=round, wants=wants, level=1.0, samples=0, reason="hot")


LEVEL = Decided(1, Decision(0.5, "half", "memory"), Facts(7, 1e6, 2e5))
SKIP = Decided(1, Decision(None, "skip: tired", "schedule"), Facts(7))
SKIP_4 = replace(SKIP, round=4)
FETCHED = Fetched(BLOCKS, {})


def run(*events: Event) -> tuple[DeviceState, list[Effect]]:
    """The state after these events, and the effects of the last one."""
    state = DeviceState("pi", "p")
    effects: list[Effect] = []
    for event in events:
        state, effects = handle(state, event)
    return state, effects


PATHS: dict[DevicePhase, tuple[Event, ...]] = {
    DevicePhase.IDLE: (),
    DevicePhase.DECIDING: (opening(1),),
    DevicePhase.BIDDING: (opening(1), LEVEL),
    DevicePhase.FETCHING: (opening(1), LEVEL, assignment()),
    DevicePhase.TRAINING: (opening(1), LEVEL, assignment(), FETCHED),
    DevicePhase.EXAMINING: (opening(1), LEVEL, survey()),
}
"""The shortest way to each phase."""

LOCAL: dict[str, Event] = {
    "decided": LEVEL,
    "fetched": FETCHED,
    "found": Found(),
    "finished": Finished(movement()),
    "failed": Failed("hot"),
    "examined": Examined((finding(),)),
}
LEGAL_LOCAL = {
    (DevicePhase.DECIDING, "decided"),
    (DevicePhase.FETCHING, "fetched"),
    (DevicePhase.FETCHING, "found"),
    (DevicePhase.TRAINING, "finished"),
    (DevicePhase.FETCHING, "failed"),
    (DevicePhase.TRAINING, "failed"),
    (DevicePhase.EXAMINING, "examined"),
}


def test_round_goes_from_opening_to_receipt() -> None:
    _, effects = run(opening(1))
    assert effects == [Decide(opening(1))]
    state, effects = run(opening(1), LEVEL)
    bid = Bid(
        device="pi",
        round=1,
        level=0.5,
        reason="half",
        samples=7,
        compute=1e6,
        bytes_per_s=2e5,
        code="memory",
    )
    assert (state.phase, effects) == (DevicePhase.BIDDING, [SendMessage(bid)])
    _, effects = run(*PATHS[DevicePhase.FETCHING])
    assert effects == [Fetch(opening(1), assignment())]
    _, effects = run(*PATHS[DevicePhase.TRAINING])
    (train,) = effects
    assert isinstance(train, Train)
    assert train.weights is BLOCKS
    assert train.level == 0.5
    result = movement()
    state, effects = run(*PATHS[DevicePhase.TRAINING], Finished(result))
    keep, send = effects
    assert isinstance(keep, KeepMovement)
    assert isinstance(send, SendMessage)
    assert keep.movement is send.message is result
    assert (state.phase, state.unreceipted) == (DevicePhase.IDLE, frozenset({1}))
    state, effects = handle(state, receipt())
    assert (state.unreceipted, effects) == (frozenset(), [Forget(1, Outcome.COUNTED)])


def test_skip_is_sent_and_the_device_rests() -> None:
    state, effects = run(opening(1), SKIP)
    assert state.phase is DevicePhase.IDLE
    bid = Bid(device="pi", round=1, level=None, reason="skip: tired", samples=7, code="schedule")
    assert effects == [SendMessage(bid)]


def test_movement_that_was_made_before_is_sent_again_instead_of_trained() -> None:
    state, effects = run(*PATHS[DevicePhase.FETCHING], opening(2), Found())
    assert effects == [Resend(1), Decide(opening(2))]
    assert state.phase is DevicePhase.DECIDING


@pytest.mark.parametrize("phase", [DevicePhase.FETCHING, DevicePhase.TRAINING])
def test_failure_withdraws_the_offer(phase: DevicePhase) -> None:
    state, effects = run(*PATHS[phase], Failed("skip: too hot", "heat"))
    assert state.phase is DevicePhase.IDLE
    bid = Bid(device="pi", round=1, level=None, reason="skip: too hot", code="heat")
    assert effects == [SendMessage(bid)]


@pytest.mark.parametrize(("phase", "name"), list(product(DevicePhase, LOCAL)))
def test_local_event_outside_the_table_raises_and_changes_nothing(
    phase: DevicePhase, name: str
) -> None:
    state, _ = run(*PATHS[phase])
    before = replace(state)
    if (phase, name) in LEGAL_LOCAL:
        handle(state, LOCAL[name])
    else:
        with pytest.raises(StateError, match=phase.value):
            handle(state, LOCAL[name])
    assert state == before


@pytest.mark.parametrize("phase", list(DevicePhase))
@pytest.mark.parametrize(
    "message",
    [
        opening(1),
        assignment(9),
        assignment(device="tv"),
        receipt(9),
        receipt(1),
        RoundClosed(round=9),
    ],
    ids=lambda message: f"{type(message).__name__}-{message.round}",
)
def test_stale_or_foreign_message_is_ignored(phase: DevicePhase, message: Event) -> None:
    rest = () if phase is not DevicePhase.IDLE else (opening(1), SKIP)
    state, _ = run(*PATHS[phase], *rest)
    assert state.phase is phase
    assert handle(state, message) == (state, [])


@pytest.mark.parametrize("phase", [DevicePhase.IDLE, DevicePhase.DECIDING, DevicePhase.BIDDING])
def test_newer_round_is_taken_up_at_once(phase: DevicePhase) -> None:
    state, effects = run(*PATHS[phase], opening(4))
    assert (state.phase, effects) == (DevicePhase.DECIDING, [Decide(opening(4))])


@pytest.mark.parametrize("phase", [DevicePhase.FETCHING, DevicePhase.TRAINING])
def test_newer_round_waits_for_the_present_work(phase: DevicePhase) -> None:
    state, effects = run(*PATHS[phase], opening(2), opening(3))
    assert (state.phase, effects) == (phase, [])
    state, effects = handle(state, Failed("cancelled"))
    assert (state.phase, effects[-1]) == (DevicePhase.DECIDING, Decide(opening(3)))


def test_closed_round_ends_the_wait_for_an_assignment() -> None:
    state, _ = run(*PATHS[DevicePhase.BIDDING], RoundClosed(round=1))
    assert state.phase is DevicePhase.IDLE
    assert handle(state, assignment()) == (state, [])


def test_closed_round_does_not_stop_training() -> None:
    state, effects = run(*PATHS[DevicePhase.TRAINING], RoundClosed(round=1))
    assert (state.phase, effects) == (DevicePhase.TRAINING, [])


def test_movements_are_kept_over_many_rounds() -> None:
    state = DeviceState("pi", "p")
    for round in (1, 2):
        level = replace(LEVEL, round=round)
        work = (opening(round), level, assignment(round), FETCHED, Finished(movement(round)))
        for event in work:
            state, _ = handle(state, event)
    assert state.unreceipted == {1, 2}
    state, effects = handle(state, receipt(2))
    assert (state.unreceipted, effects) == (frozenset({1}), [Forget(2, Outcome.COUNTED)])
    assert handle(state, LinkUp()) == (state, [Resend(1)])


@pytest.mark.parametrize("phase", list(DevicePhase))
def test_connection_sends_again_what_has_no_receipt(phase: DevicePhase) -> None:
    state, _ = run(*PATHS[phase])
    state = replace(state, unreceipted=frozenset({7, 3}))
    assert handle(state, LinkUp()) == (state, [Resend(3), Resend(7)])


@pytest.mark.parametrize("phase", list(DevicePhase))
def test_round_for_another_plan_is_skipped_and_not_taken_for_the_newest(phase: DevicePhase) -> None:
    state, _ = run(*PATHS[phase])
    reason = "skip: the round is for plan q…, the task has p…"
    bid = Bid(device="pi", round=9, level=None, reason=reason, code="plan")
    assert handle(state, opening(9, plan_hash="q")) == (state, [SendMessage(bid)])


@pytest.mark.parametrize("phase", [DevicePhase.IDLE, DevicePhase.DECIDING, DevicePhase.BIDDING])
def test_restarted_coordinator_is_answered_anew(phase: DevicePhase) -> None:
    state, _ = run(*PATHS[phase])
    state = replace(state, unreceipted=frozenset({7, 3}))
    after, effects = handle(state, Restarted(opening(1)))
    assert effects == [Resend(3), Resend(7), Decide(opening(1))]
    assert after.phase is DevicePhase.DECIDING
    after, effects = handle(state, Restarted())
    assert (after.phase, after.newest, effects) == (DevicePhase.IDLE, None, [Resend(3), Resend(7)])


@pytest.mark.parametrize("phase", [DevicePhase.FETCHING, DevicePhase.TRAINING])
def test_restarted_coordinator_gets_the_present_work(phase: DevicePhase) -> None:
    state, _ = run(*PATHS[phase])
    after, effects = handle(replace(state, unreceipted=frozenset({7})), Restarted(opening(1)))
    assert (after.phase, after.newest, effects) == (phase, opening(1), [Resend(7)])


def test_rounds_go_back_once_after_a_restart_of_the_coordinator() -> None:
    state, _ = run(opening(4), SKIP_4, Restarted(opening(4)), SKIP_4)
    assert handle(state, opening(4)) == (state, [])  # it was answered
    state, effects = handle(state, opening(2))
    assert (state.newest, effects) == (opening(2), [Decide(opening(2))])
    assert handle(state, opening(1)) == (state, [])


def test_round_that_was_ignored_as_old_is_taken_up_after_a_restart() -> None:
    state, effects = run(opening(4), SKIP_4, opening(2))
    assert effects == []
    state, effects = handle(state, Restarted(opening(2)))
    assert (state.newest, effects) == (opening(2), [Decide(opening(2))])


def test_decision_overtaken_by_a_newer_round_is_ignored() -> None:
    state, _ = run(opening(1), opening(2))
    assert handle(state, LEVEL) == (state, [])
    state, effects = handle(state, replace(LEVEL, round=2))
    (send,) = effects
    assert isinstance(send, SendMessage)
    assert send.message.round == 2
    assert handle(state, LEVEL) == (state, [])


def test_decision_for_a_round_never_opened_raises() -> None:
    state, _ = run(opening(1))
    with pytest.raises(StateError):
        handle(state, replace(LEVEL, round=5))


@pytest.mark.parametrize("reason", ["", "x" * 10_000])
def test_failure_with_any_reason_becomes_a_sound_bid(reason: str) -> None:
    state, effects = run(*PATHS[DevicePhase.TRAINING], Failed(reason))
    (send,) = effects
    assert isinstance(send, SendMessage)
    assert isinstance(send.message, Bid)
    assert send.message.level is None
    assert state.phase is DevicePhase.IDLE


def after_training(*, keeps_copy: bool) -> DeviceState:
    state, _ = run(*PATHS[DevicePhase.TRAINING], Finished(movement(keeps_copy=keeps_copy)))
    return state


def skip_in(state: DeviceState, opened: RoundOpen) -> list[Effect]:
    state, _ = handle(state, opened)
    _, effects = handle(state, replace(SKIP, round=opened.round))
    return effects


def test_movement_that_is_kept_waits_for_its_verdict() -> None:
    state = after_training(keeps_copy=False)
    state, effects = handle(state, replace(receipt(1), outcome=Outcome.KEPT))
    assert state.unreceipted == state.kept == {1}
    assert not effects
    assert handle(state, LinkUp())[1] == [Resend(1)]
    state, effects = handle(state, replace(receipt(1), outcome=Outcome.REJECTED))
    assert (state.unreceipted, state.kept) == (frozenset(), frozenset())
    assert effects == [Forget(1, Outcome.REJECTED)]


def test_verdict_that_did_not_come_before_the_next_opening_is_asked_for_once() -> None:
    state, _ = handle(after_training(keeps_copy=False), replace(receipt(1), outcome=Outcome.KEPT))
    state, effects = handle(state, opening(2))
    assert effects == [Resend(1), Decide(opening(2))]
    state, effects = handle(state, opening(3))
    assert effects == [Decide(opening(3))]
    assert handle(state, receipt(1))[1] == [Forget(1, Outcome.COUNTED)]


def test_bid_that_is_declined_is_not_waited_with() -> None:
    state, _ = run(*PATHS[DevicePhase.BIDDING])
    declined = replace(receipt(1), outcome=Outcome.REJECTED, reason="quarantined")
    assert handle(state, replace(declined, round=9)) == (state, [])
    state, effects = handle(state, declined)
    assert (state.phase, effects) == (DevicePhase.IDLE, [])


def test_copy_of_a_rejected_movement_is_not_replayed() -> None:
    state = after_training(keeps_copy=True)
    state, _ = handle(state, replace(receipt(1), outcome=Outcome.REJECTED))
    (bid,) = skip_in(state, opening(2, replay_within=9))
    assert isinstance(bid, SendMessage)
    assert isinstance(bid.message, Bid)
    assert not bid.message.replays


def test_skip_is_spoken_for_by_the_copy_of_the_last_movement() -> None:
    bid, replay = skip_in(after_training(keeps_copy=True), opening(4, replay_within=3))
    assert isinstance(bid, SendMessage)
    assert isinstance(bid.message, Bid)
    assert (bid.message.level, bid.message.replays) == (None, True)
    assert replay == SendReplay(4, 1)


@pytest.mark.parametrize(
    ("keeps_copy", "opened"),
    [
        (True, opening(4, replay_within=2)),  # too old
        (True, opening(2)),  # not wanted
        (False, opening(2, replay_within=9)),  # no copy
    ],
)
def test_skip_is_silent_without_a_copy_that_is_wanted(keeps_copy: bool, opened: RoundOpen) -> None:
    (bid,) = skip_in(after_training(keeps_copy=keeps_copy), opened)
    assert isinstance(bid, SendMessage)
    assert isinstance(bid.message, Bid)
    assert not bid.message.replays


# -- rounds by invitation ------------------------------------------------------------------------


def test_round_by_invitation_is_not_decided_on_without_the_invitation() -> None:
    state, effects = run(announcement(1))
    assert (state.phase, effects) == (DevicePhase.IDLE, [])
    assert handle(state, opening(1))[1] == [Decide(opening(1))]
    state, effects = handle(state, opening(1, plan_hash="other", by_invitation=True))
    assert (state.phase, effects) == (DevicePhase.IDLE, [])


@pytest.mark.parametrize("phase", list(DevicePhase)[1:])
@pytest.mark.parametrize("again", [announcement(1), opening(1)])
def test_announcement_and_second_invitation_change_nothing(
    phase: DevicePhase, again: RoundOpen
) -> None:
    state, _ = run(*PATHS[phase])
    assert handle(state, again) == (state, [])


@pytest.mark.parametrize("late", [announcement(1), opening(1)])
def test_invitation_of_an_older_round_is_ignored(late: RoundOpen) -> None:
    state, _ = run(announcement(2))
    assert handle(state, late) == (state, [])


@pytest.mark.parametrize("phase", [DevicePhase.DECIDING, DevicePhase.BIDDING])
def test_newer_round_by_invitation_ends_the_wait_for_an_answer(phase: DevicePhase) -> None:
    state, effects = run(*PATHS[phase], announcement(2))
    assert (state.phase, effects) == (DevicePhase.IDLE, [])
    assert handle(state, LEVEL) == (state, [])
    assert handle(state, assignment()) == (state, [])
    assert handle(state, opening(2))[1] == [Decide(opening(2))]


@pytest.mark.parametrize("invited", [True, False])
def test_device_at_work_turns_to_the_newest_round_only_if_invited(invited: bool) -> None:
    heard = (announcement(2), opening(2)) if invited else (announcement(2),)
    state, _ = run(*PATHS[DevicePhase.TRAINING], *heard)
    assert state.phase is DevicePhase.TRAINING
    state, effects = handle(state, Finished(movement()))
    assert effects[2:] == [Decide(opening(2))] * invited
    assert state.phase is (DevicePhase.DECIDING if invited else DevicePhase.IDLE)


def test_announcement_by_a_restarted_coordinator_does_not_undo_the_invitation() -> None:
    state, effects = run(opening(1), LEVEL, Restarted(opening(1)))
    assert effects == [Decide(opening(1))]
    state, _ = handle(state, LEVEL)
    assert handle(state, announcement(1)) == (state, [])
    assert handle(state, assignment())[1] == [Fetch(opening(1), assignment())]
    _, effects = run(announcement(1), Restarted(announcement(1)), opening(1))
    assert effects == [Decide(opening(1))]


# -- surveys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(), (opening(1), SKIP), (opening(1), LEVEL)])
def test_survey_is_examined_by_a_device_at_rest(before: tuple[Event, ...]) -> None:
    state, effects = run(*before, survey())
    assert (state.phase, effects) == (DevicePhase.EXAMINING, [Examine(survey())])
    state, effects = handle(state, Examined((finding(),)))
    assert (state.phase, effects) == (DevicePhase.IDLE, [SendMessage(finding())])


def test_survey_waits_for_the_present_work() -> None:
    state, effects = run(*PATHS[DevicePhase.TRAINING], survey())
    assert (state.phase, effects) == (DevicePhase.TRAINING, [])
    _, effects = handle(state, Finished(movement()))
    assert effects[2:] == [Examine(survey())]
    state, _ = handle(state, opening(2))
    state, effects = handle(state, Finished(movement()))
    assert effects[2:] == [Decide(opening(2))]
    state, _ = handle(state, replace(SKIP, round=2))
    assert state.phase is DevicePhase.IDLE  # the newer round ended the survey
    state, effects = run(opening(1), survey(), SKIP)
    assert effects[1:] == [Examine(survey())]


def test_round_that_opens_during_a_survey_follows_it() -> None:
    state, effects = run(*PATHS[DevicePhase.EXAMINING], opening(2))
    assert (state.phase, effects) == (DevicePhase.EXAMINING, [])
    state, effects = handle(state, Examined((finding(),)))
    assert effects == [SendMessage(finding()), Decide(opening(2))]


def test_second_survey_follows_the_first() -> None:
    state, effects = run(*PATHS[DevicePhase.EXAMINING], survey(wants="evaluation"))
    assert (state.phase, effects) == (DevicePhase.EXAMINING, [])
    state, effects = handle(state, Examined((finding(),)))
    assert effects == [SendMessage(finding()), Examine(survey(wants="evaluation"))]
    state, effects = handle(state, Examined((finding(wants="evaluation"),)))
    assert state.phase is DevicePhase.IDLE


def test_survey_that_is_heard_again_is_answered_without_work() -> None:
    state, effects = run(*PATHS[DevicePhase.EXAMINING], survey(), Examined((finding(),)))
    assert (state.phase, effects) == (DevicePhase.IDLE, [SendMessage(finding())])
    assert handle(state, survey()) == (state, [SendMessage(finding())])
    state, _ = handle(state, Restarted())  # the coordinator asks again
    assert handle(state, survey()) == (state, [SendMessage(finding())])


def test_survey_of_which_a_level_did_not_come_is_examined_again() -> None:
    state, _ = run(*PATHS[DevicePhase.EXAMINING], Examined(()))
    assert handle(state, survey())[1] == [Examine(survey())]
    _, effects = run(*PATHS[DevicePhase.EXAMINING], survey(), Examined(()))
    assert effects == [Examine(survey())]


@pytest.mark.parametrize(
    "foreign", [survey(plan_hash="q"), survey(devices=("tv",)), survey()], ids=["plan", "tv", "old"]
)
def test_survey_of_others_or_of_an_older_round_is_ignored(foreign: Survey) -> None:
    state, _ = run(opening(2), replace(SKIP, round=2)) if foreign == survey() else run()
    assert handle(state, foreign) == (state, [])
    asked = survey(2, devices=("pi", "tv"))
    assert handle(state, asked)[1] == [Examine(asked)]
