"""The device as a program, against a coordinator that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partialmethod
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import UNFIT, DataError
from edge_sdk.decide.costs.costing import Costing
from edge_sdk.decide.decision import Policy
from edge_sdk.device.delivering import Delivering
from edge_sdk.device.service import training_thread
from edge_sdk.device.service.ending import VANISHED, BrokerError, ReplacedError
from edge_sdk.device.service.service import Device, DeviceService, run_device
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.errors import ConfigError, GraphError, TrainingStopped
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.epoch import Epoch
from edge_sdk.protocol.messages.round import Bid, Movement, Outcome
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Evaluation, Offer, Presence, Want
from edge_sdk.protocol.messages.wire import decode_message, encode_message
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.tuning import Tuned
from edge_sdk.transport.link import Deliver, Link, Refused, Will
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.edge_sdk.scripted import (
    DEVICE,
    RULE,
    TASK,
    Coordinator,
    Running,
    Stage,
    make_config,
    make_data,
)
from tests.unit.edge_sdk.train.handmade import Reference

WRONG = ArrayData((np.zeros((5, 9), dtype=np.float32),), np.zeros(5, dtype=np.int64))
ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def coordinator(stage: Stage) -> Coordinator:
    return Coordinator(stage)


Start = Callable[..., Running]


@pytest.fixture
def start(stage: Stage, tmp_path: Path) -> Iterator[Start]:
    """Starts devices, with changes of their configuration; they are stopped afterwards."""
    with ExitStack() as stack:

        def begin(data: ArrayData | None = None, **changes: Any) -> Running:
            running = Running(stage, make_config(tmp_path, **changes), data)
            stack.callback(running.stop)
            return running

        yield begin


@pytest.fixture
def started(coordinator: Coordinator, start: Start) -> Running:
    """A device, and a coordinator that has announced the task."""
    coordinator.present()
    coordinator.announce()
    return start()


def session_of(coordinator: Coordinator) -> int:
    """The newest session of the device."""
    return max(each.session for each in coordinator.all(Presence))


def say_presence(stage: Stage, session: int, *, online: bool = True) -> None:
    """Say something under the device's name, as another program would."""
    link = stage.broker.open_link(name="somebody", deliver=lambda _: None)
    presence = Presence(name=DEVICE, session=session, online=online)
    link.publish(Topics(TASK).presence(DEVICE), encode_message(presence), retain=True)


def bid_of(coordinator: Coordinator, round: int) -> Bid:
    return coordinator.stage.until(lambda: coordinator.last(Bid, lambda bid: bid.round == round))


def movement_of(coordinator: Coordinator, round: int) -> Movement:
    def found() -> Movement | None:
        return next((m for offer, m in coordinator.movements if m.round == round), None)

    return coordinator.stage.until(found)


def replay_for(coordinator: Coordinator, round: int) -> Movement:
    def found() -> Movement | None:
        return next((m for offer, m in coordinator.movements if offer.answers == round), None)

    return coordinator.stage.until(found)


def give(coordinator: Coordinator, round: int, **more: Any) -> None:
    """A round up to the assignment."""
    coordinator.open(round, **more)
    bid_of(coordinator, round)
    coordinator.assign(round)


def play(coordinator: Coordinator, round: int, outcome: Outcome = Outcome.COUNTED) -> Movement:
    """A whole round: open, bid, assignment, movement, receipt."""
    give(coordinator, round)
    movement = movement_of(coordinator, round)
    coordinator.receipt(round, outcome)
    return movement


def trained_here(coordinator: Coordinator, round: int) -> Array:
    """The movement's values, made by the backend without any of the device program."""
    groups = {"hidden": (0, 2)}
    plan, weights = coordinator.plan, coordinator.plan.unflatten(coordinator.theta)
    backend = OnnxBackend(plan, coordinator.manifest, coordinator.files)
    job = Job(
        groups=groups,
        weights=plan.cut(weights, groups),
        buffers={},
        rule=RULE,
        mask_stream=stream(7, DEVICE, round, "dropout"),
    )
    batches = make_data().batches(3, 4, stream(7, DEVICE, round, "batches"))
    return plan.scatter(backend.train(job, batches).movement, groups).values


def test_device_takes_part_until_the_run_is_finished(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    for round in (1, 2):
        movement = play(coordinator, round)
        groups, blocks = decode_blocks(coordinator.plan, movement.payload)
        assert groups == {"hidden": (0, 2)}
        np.testing.assert_array_equal(blocks.values, trained_here(coordinator, round))
        coordinator.theta = coordinator.theta + np.float32(0.25)
    bid = coordinator.last(Bid)
    assert bid is not None
    assert (bid.run, bid.samples) == (coordinator.run, 20)
    coordinator.finish(2)
    assert started.wait() is None
    presence = decode_message(stage.broker.retained[coordinator.topics.presence(DEVICE)])
    assert presence == farewell(coordinator, "the run is finished")


def test_device_looks_for_the_fastest_ways_when_it_has_nothing_to_do(
    coordinator: Coordinator, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It bids before, and a round that opens ends the search, which then goes on."""
    asked: list[float] = []
    hold = Event()

    def tune(backend: OnnxBackend, job: Job, *_: Any, level: float, **more: Any) -> Tuned:
        asked.append(level)
        kept = backend.plan.kept_atoms(backend.plan.choose(job.groups))
        while not hold.wait(0.01):
            if more["should_stop"]():
                raise TrainingStopped(0)
        return Tuned(level=level, kept=kept, ways={}, default_s=1.0, step_s=1.0)

    monkeypatch.setattr(OnnxBackend, "has_ways", True)
    monkeypatch.setattr(OnnxBackend, "tune", tune)
    monkeypatch.setattr(training_thread, "QUIET_S", 0.05)
    coordinator.present()
    coordinator.announce()
    coordinator.open(1)
    start(weigh=True)
    bid_of(coordinator, 1)
    assert not asked
    coordinator.assign(1)
    movement_of(coordinator, 1)
    coordinator.receipt(1)
    stage = coordinator.stage
    stage.until(lambda: bool(asked))
    coordinator.open(2)
    bid_of(coordinator, 2)
    assert len(asked) == 1
    hold.set()
    coordinator.assign(2)
    movement_of(coordinator, 2)
    coordinator.receipt(2)
    costs = tmp_path / TASK / DEVICE / "costs.json"

    def kept() -> Any:
        return json.loads(costs.read_text()).get("tuned")

    stage.until(kept)
    assert [each["level"] for each in kept()] == [0.25, 0.5, 0.75, 1.0]
    assert asked == [0.25, 0.25, 0.5, 0.75, 1.0]


def learned_rounds(tmp_path: Path) -> int:
    content = json.loads((tmp_path / TASK / DEVICE / "costs.json").read_text())
    return int(content["learned"]["rounds"])


def test_what_rounds_taught_of_costs_is_written_when_the_device_stops(
    coordinator: Coordinator, start: Start, tmp_path: Path
) -> None:
    coordinator.present()
    coordinator.announce()
    running = start(weigh=True, tune=False)
    for round in (1, 2, 3):
        play(coordinator, round)
    assert learned_rounds(tmp_path) == 0  # the calibration was just written
    running.stop()
    assert learned_rounds(tmp_path) == 3


def test_what_rounds_taught_of_costs_is_written_when_the_device_rests(
    coordinator: Coordinator, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_thread, "REST_S", 0.05)
    monkeypatch.setattr(Costing, "__init__", partialmethod(Costing.__init__, keep_s=0.5))
    coordinator.present()
    coordinator.announce()
    start(weigh=True, tune=False)
    play(coordinator, 1)
    coordinator.stage.until(lambda: learned_rounds(tmp_path) == 1)


def farewell(coordinator: Coordinator, reason: str, code: int = 0) -> Presence:
    session = session_of(coordinator)
    return Presence(name=DEVICE, session=session, online=False, reason=reason, exit_code=code)


def test_device_that_starts_first_waits_for_the_coordinator(stage: Stage, start: Start) -> None:
    start()
    for _ in range(50):
        with stage.lock:
            stage.broker.step()
    coordinator = Coordinator(stage)
    # The round may be heard of before the task it belongs to.
    coordinator.open(4)
    coordinator.announce()
    bid_of(coordinator, 4)


def test_movement_without_receipt_is_offered_again_after_a_restart(
    stage: Stage, coordinator: Coordinator, started: Running, start: Start, tmp_path: Path
) -> None:
    coordinator.answers_offers = False
    give(coordinator, 1)
    first = stage.until(lambda: coordinator.last(Offer))
    started.stop()
    assert coordinator.movements == []
    coordinator.answers_offers = True
    again = start()
    movement = movement_of(coordinator, 1)
    assert coordinator.movements[0][0] == first
    values = decode_blocks(coordinator.plan, movement.payload)[1].values
    np.testing.assert_array_equal(values, trained_here(coordinator, 1))
    coordinator.receipt(1)
    coordinator.finish(1)
    assert again.wait() is None
    assert not list(tmp_path.rglob("*.movement"))
    sessions = {each.session for each in coordinator.all(Presence) if each.name == DEVICE}
    assert [session >> 16 for session in sorted(sessions)] == [1, 2]


def test_upload_goes_on_when_a_cut_took_a_chunk_with_it(
    stage: Stage, coordinator: Coordinator, start: Start
) -> None:
    coordinator.announce()
    lost: list[object] = []

    def lose_the_first(name: str, event: object) -> list[int]:
        chunk = name == "coordinator" and getattr(event, "topic", "").endswith("/up/pi-bulk/chunk")
        if chunk and not lost:
            lost.append(event)
            return []
        return [0]

    start()
    coordinator.open(1)
    bid_of(coordinator, 1)
    stage.broker.tamper = lose_the_first
    coordinator.assign(1)
    stage.until(lambda: bool(lost))
    link = stage.device_links[-1]
    with stage.lock:
        stage.broker.cut(link)
        stage.broker.restore(link)
    movement_of(coordinator, 1)
    assert len(coordinator.all(Offer)) == 2


def test_broker_that_comes_back_empty_is_no_end(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    coordinator.open(2)
    bid_of(coordinator, 2)
    with stage.lock:
        stage.broker.stop()
        stage.broker.start(keep_retained=False)
    coordinator.announce()
    # A bid that nobody answered is said again.
    stage.until(lambda: len([b for b in coordinator.all(Bid) if b.round == 2]) > 1)
    coordinator.open(2)
    coordinator.assign(2)
    movement_of(coordinator, 2)
    retained = stage.broker.retained[coordinator.topics.presence(DEVICE)]
    session = session_of(coordinator)
    assert decode_message(retained) == Presence(name=DEVICE, session=session, online=True)


def test_new_run_starts_the_device_anew(
    stage: Stage, coordinator: Coordinator, started: Running, tmp_path: Path
) -> None:
    coordinator.answers_offers = False
    give(coordinator, 3)
    stage.until(lambda: coordinator.last(Offer))
    coordinator.answers_offers = True
    old, coordinator.run = coordinator.run, "00000000000000ff"
    coordinator.announce()
    play(coordinator, 1)
    assert {offer.run for offer, _ in coordinator.movements} == {coordinator.run}
    assert not list(tmp_path.rglob(f"runs/{old}"))
    assert coordinator.last(Bid, lambda bid: bid.run == old and bid.round == 1) is None


def test_messages_of_another_run_are_ignored(coordinator: Coordinator, started: Running) -> None:
    play(coordinator, 1)
    coordinator.tell(replace(coordinator.opening(2), run="00000000000000ff"))
    coordinator.open(3)
    bid_of(coordinator, 3)
    assert coordinator.last(Bid, lambda bid: bid.round == 2) is None


def test_coordinator_that_was_started_again_gets_a_new_bid_for_the_same_round(
    coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    give(coordinator, 2)
    first = movement_of(coordinator, 2)
    coordinator.forget()
    coordinator.present(session=2)
    coordinator.open(2)
    bid_of(coordinator, 2)
    coordinator.receipt(2)
    coordinator.finish(2)
    assert started.wait() is None
    assert first.round == 2


def test_round_by_invitation_is_answered_once_the_invitation_is_there(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    coordinator.open(2, by_invitation=True)
    coordinator.open(3, by_invitation=True)
    coordinator.tell(coordinator.opening(3))
    bid_of(coordinator, 3)
    assert coordinator.last(Bid, lambda bid: bid.round == 2) is None
    coordinator.heard.clear()
    coordinator.open(3, by_invitation=True)  # as a broker does that sends what it retained
    coordinator.present(session=2)
    bid_of(coordinator, 3)
    coordinator.assign(3)
    assert movement_of(coordinator, 3).round == 3


def test_device_that_stays_takes_part_in_the_next_run(
    coordinator: Coordinator, start: Start
) -> None:
    coordinator.announce()
    start(stay=True)
    play(coordinator, 1)
    coordinator.finish(1)
    coordinator.forget()
    coordinator.run = "00000000000000ff"
    coordinator.announce()
    play(coordinator, 1)
    assert {offer.run for offer, _ in coordinator.movements} == {coordinator.run}


def test_run_that_goes_on_after_its_end_is_taken_up_again(
    coordinator: Coordinator, start: Start
) -> None:
    coordinator.announce()
    start(stay=True)
    play(coordinator, 1)
    coordinator.finish(1)
    play(coordinator, 2)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("presence_first", [True, False])
def test_coordinator_that_goes_back_is_followed(
    coordinator: Coordinator, start: Start, finished: bool, presence_first: bool
) -> None:
    coordinator.present()
    coordinator.announce()
    start(stay=finished)
    for round in (1, 2, 3):
        play(coordinator, round)
    if finished:
        coordinator.finish(3)
    else:
        coordinator.open(4)
        bid_of(coordinator, 4)
    coordinator.forget()
    if presence_first:
        coordinator.present(session=2)
        if not finished:
            bid_of(coordinator, 4)
        give(coordinator, 2)
    else:
        coordinator.open(2)
        coordinator.present(session=2)
        bid_of(coordinator, 2)
        coordinator.assign(2)
    movement_of(coordinator, 2)
    coordinator.receipt(2)
    play(coordinator, 3)


def test_opening_that_comes_after_the_end_of_its_run_changes_nothing(
    coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    play(coordinator, 2)
    coordinator.finish(2)
    for round in (1, 2):
        coordinator.tell(coordinator.opening(round))
    assert started.wait() is None


def test_finished_device_does_not_wait_for_ever_for_a_receipt(
    coordinator: Coordinator, started: Running, tmp_path: Path
) -> None:
    give(coordinator, 1)
    movement_of(coordinator, 1)
    coordinator.finish(1)
    started.hurry(coordinator, lambda: started.ended)
    assert started.error is None
    assert list(tmp_path.rglob("1.movement"))


def test_end_of_the_run_stops_a_training(coordinator: Coordinator, started: Running) -> None:
    give(coordinator, 1, steps=10**7)
    coordinator.finish(1)
    assert started.wait() is None
    assert coordinator.movements == []


def test_device_that_is_stopped_while_it_trains_withdraws_its_bid(
    stage: Stage, coordinator: Coordinator, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    coordinator.announce()
    running = start()
    give(coordinator, 1, steps=10**7)
    stage.until(lambda: "training, 10000000 steps" in caplog.text)
    running.stop()
    skip = stage.until(lambda: coordinator.last(Bid, lambda bid: bid.level is None))
    assert (skip.round, skip.run) == (1, coordinator.run)
    assert "stopped" in skip.reason


def test_broker_that_does_not_give_us_the_task_ends_the_device(
    stage: Stage, tmp_path: Path
) -> None:
    def strict(*, name: str, deliver: Deliver, will: Will | None = None) -> Link:
        link = stage.open_link(name=name, deliver=deliver, will=will)
        deliver(Refused("tessera/v1/toy/up/pi-bulk/chunk", "too large"))
        deliver(Refused("tessera/v1/toy/pub/task", "not allowed"))
        return link

    with pytest.raises(BrokerError, match="pub/task: not allowed"):
        DeviceService(make_config(tmp_path), make_data(), open_link=strict).run()


def test_nonsense_from_the_broker_is_ignored(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    topics = coordinator.topics
    for topic in (topics.task, topics.round, topics.down_control(DEVICE)):
        for payload in (b"", b"\xff" * 40, b"\x81\xa1v\x07"):
            stage.broker.open_link(name="mischief", deliver=lambda _: None).publish(topic, payload)
    play(coordinator, 1)


def test_chunks_that_the_broker_does_not_keep_are_asked_for_directly(
    stage: Stage, start: Start
) -> None:
    coordinator = Coordinator(stage)
    coordinator.retains_chunks = False
    coordinator.announce()
    running = start()
    running.hurry(coordinator, lambda: coordinator.last(Want))
    movement = play(coordinator, 1)
    values = decode_blocks(coordinator.plan, movement.payload)[1].values
    np.testing.assert_array_equal(values, trained_here(coordinator, 1))


def test_device_that_cannot_get_the_weights_withdraws_its_bid(
    coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    coordinator.retains_chunks = False
    coordinator.theta = coordinator.theta * 2
    coordinator.open(2)
    coordinator.chunks.clear()
    bid_of(coordinator, 2)
    coordinator.assign(2)
    skip = started.hurry(
        coordinator,
        lambda: coordinator.last(Bid, lambda bid: bid.round == 2 and bid.level is None),
    )
    assert "chunks did not come" in skip.reason


def test_refused_upload_is_not_offered_for_ever(
    stage: Stage, coordinator: Coordinator, started: Running, tmp_path: Path
) -> None:
    coordinator.refuses = "too large"
    give(coordinator, 1)
    stage.until(lambda: coordinator.last(Offer))
    coordinator.finish(1)
    assert started.wait() is None
    assert not list(tmp_path.rglob("*.movement"))


def test_skip_is_spoken_for_by_the_last_movement(coordinator: Coordinator, start: Start) -> None:
    coordinator.announce()
    policy = Policy(participation=0.5)
    start(policy=policy)
    for round in range(1, 5):
        coordinator.open(round, replay_within=5)
        bid = bid_of(coordinator, round)
        if bid.level is not None:
            coordinator.assign(round)
            movement_of(coordinator, round)
            coordinator.receipt(round)
        elif bid.replays:
            replay_for(coordinator, round)
            coordinator.receipt(round)
    answers = [offer.answers for offer, _ in coordinator.movements]
    assert any(answers)
    assert None in answers


def test_evaluation_is_the_whole_models_on_the_devices_data(
    stage: Stage, coordinator: Coordinator, start: Start
) -> None:
    coordinator.announce()
    running = start(evaluate_every=2)
    play(coordinator, 1)
    play(coordinator, 2)
    said = stage.until(lambda: coordinator.last(Evaluation))
    data, weights = make_data(), coordinator.plan.unflatten(coordinator.theta)
    exact = {name: array.astype(np.float64) for name, array in weights.items()}
    x, reference = data.inputs[0].astype(np.float64), Reference()
    assert said.loss == pytest.approx(reference.loss(exact, x, data.targets), rel=1e-5)
    right = np.mean(reference.logits(exact, x).argmax(1) == data.targets)
    assert said.accuracy == pytest.approx(right)
    assert (said.round, said.samples, said.run) == (2, 20, coordinator.run)
    running.stop()
    assert len(coordinator.all(Evaluation)) == 1


def test_data_of_another_kind_ends_the_device(
    stage: Stage, coordinator: Coordinator, start: Start
) -> None:
    coordinator.announce()
    running = start(WRONG)
    error = running.wait()
    assert isinstance(error, DataError)
    assert "float32 4" in str(error)
    assert "float32 9" in str(error)
    # It says why, but what the error quotes of the data stays here.
    gone = stage.until(lambda: coordinator.last(Presence, lambda each: not each.online))
    assert gone.exit_code == 3
    assert "data" in gone.reason
    assert "float32" not in gone.reason


LABELS = np.full(5, 777, dtype=np.int64)


@pytest.mark.parametrize(
    ("data", "quoted"),
    [(WRONG, "float32 9"), (ArrayData((np.zeros((5, 4), np.float32),), LABELS), "777")],
)
def test_device_that_stays_logs_what_is_wrong_with_its_data_and_never_sends_it(
    coordinator: Coordinator,
    start: Start,
    data: ArrayData,
    quoted: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator.announce()
    coordinator.open(1)
    start(data, stay=True)
    bid = bid_of(coordinator, 1)
    assert (bid.level, bid.code) == (None, "data")
    assert bid.reason == f"skip: {UNFIT}"
    (said,) = (each.getMessage() for each in caplog.records if each.levelname == "ERROR")
    assert said.startswith("the data does not fit the task, so every round is skipped: ")
    assert quoted in said


def offer_model(coordinator: Coordinator, round: int, model: Blob) -> None:
    """Announce a model for inference."""
    plan = coordinator.plan
    notice = ModelNotice(
        round=round,
        plan_hash=plan.hash,
        levels=(1.0,),
        groups=(plan.full_groups(),),
        accuracies=(None,),
        rescale=0.0,
        run=coordinator.run,
        model=model,
    )
    coordinator.announce_model(notice)


def test_delivery_that_fails_unexpectedly_is_not_tried_again_at_once(
    stage: Stage,
    coordinator: Coordinator,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[int] = []

    def fail(self: Delivering, notice: ModelNotice, **_: object) -> bool:
        tried.append(notice.round)
        raise IndexError("a fault")

    monkeypatch.setattr(Delivering, "deliver", fail)
    coordinator.announce()
    running = start(deliver="latest")
    offer_model(coordinator, 1, Blob(1, (bytes(16),)))
    stage.until(lambda: tried)
    play(coordinator, 1)
    play(coordinator, 2)
    assert tried == [1]
    assert "the model is delivered later" in caplog.text
    assert running.hurry(coordinator, lambda: tried[1:] or None) == [1]


def test_orders_end_a_delivery(
    stage: Stage, coordinator: Coordinator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.device.transfer.fetching.IDLE_S", 1e9)  # it ends for orders only
    coordinator.announce()
    start(deliver="latest")
    gone = bytes(16)
    offer_model(coordinator, 5, Blob(1, (gone,)))
    stage.until(lambda: coordinator.last(Want, lambda want: gone in want.chunks))
    play(coordinator, 1)


def test_task_that_needs_a_newer_runtime_ends_the_device(stage: Stage, start: Start) -> None:
    coordinator = Coordinator(stage)
    coordinator.manifest = replace(coordinator.manifest, min_onnxruntime="99.0.0")
    coordinator.announce()
    running = start()
    error = running.wait()
    assert isinstance(error, GraphError)
    gone = stage.until(lambda: coordinator.last(Presence, lambda each: not each.online))
    assert gone == farewell(coordinator, f"this device cannot train the task: {error}", code=5)


def test_device_in_an_asyncio_program_stops_with_its_block(
    stage: Stage, coordinator: Coordinator, tmp_path: Path
) -> None:
    coordinator.announce()

    async def program() -> None:
        config = make_config(tmp_path)
        async with Device(config, make_data(), open_link=stage.open_link) as device:
            task = asyncio.ensure_future(device.run())
            while coordinator.last(Presence, lambda each: each.online) is None:
                with stage.lock:
                    stage.broker.step()
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(program())
    with stage.lock:
        stage.broker.run()
    assert coordinator.last(Presence) == farewell(coordinator, "it was told to stop")


def test_device_without_data_is_told_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data is missing"):
        run_device(make_config(tmp_path))


# -- who we are ----------------------------------------------------------------------------------


def test_newer_program_with_the_same_name_ends_the_device(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    ours = session_of(coordinator)
    say_presence(stage, ours + 2**16)
    error = started.wait()
    assert isinstance(error, ReplacedError)
    assert "another program was started as 'pi'" in str(error)
    # What is said under the name is now the other's to say.
    last = decode_message(stage.broker.retained[coordinator.topics.presence(DEVICE)])
    assert last == Presence(name=DEVICE, session=ours + 2**16, online=True)


def test_older_program_with_the_same_name_is_told_that_it_is_not_the_newest(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    ours = session_of(coordinator)
    say_presence(stage, ours - 2**16, online=False)
    topic = coordinator.topics.presence(DEVICE)
    truth = Presence(name=DEVICE, session=ours, online=True)
    stage.until(lambda: len([p for p in coordinator.all(Presence) if p == truth]) > 1)
    stage.until(lambda: decode_message(stage.broker.retained[topic]) == truth)
    play(coordinator, 2)


def test_device_without_its_folder_counts_on_from_what_the_broker_has(
    stage: Stage, coordinator: Coordinator, start: Start
) -> None:
    say_presence(stage, 41 << 16, online=False)
    for _ in range(20):
        with stage.lock:
            stage.broker.step()
    coordinator.announce()
    start()
    play(coordinator, 1)
    assert session_of(coordinator) >> 16 == 42
    link = stage.device_links[-1]
    with stage.lock:
        stage.broker.cut(link)
    # Its will is of the session that it has now.
    session = session_of(coordinator)
    gone = Presence(name=DEVICE, session=session, online=False, reason=VANISHED)
    stage.until(lambda: gone in coordinator.all(Presence))
    with stage.lock:
        stage.broker.restore(link)


def test_session_that_nobody_can_have_is_ignored(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    play(coordinator, 1)
    say_presence(stage, 2**53)
    play(coordinator, 2)


def test_link_on_which_nothing_comes_back_after_a_reconnect_is_renewed(
    stage: Stage, coordinator: Coordinator, start: Start
) -> None:
    coordinator.present()
    coordinator.announce()
    settings = BrokerSettings(keepalive_s=1)
    start(broker=settings)
    play(coordinator, 1)
    link = stage.device_links[-1]
    topic = coordinator.topics.presence(DEVICE)
    connections = link.connection

    def lose_presence(name: str, event: object) -> list[int]:
        ours = name == DEVICE and getattr(event, "topic", "") == topic
        return [] if ours and link.connection == connections + 1 else [0]

    stage.broker.tamper = lose_presence
    with stage.lock:
        stage.broker.cut(link)
        stage.broker.restore(link)
    stage.until(lambda: link.connection == connections + 2)
    play(coordinator, 2)


def test_broker_that_keeps_our_presence_from_us_is_lived_with(
    stage: Stage, coordinator: Coordinator, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    topic = coordinator.topics.presence(DEVICE)
    stage.broker.tamper = lambda name, event: [] if (name, event.topic) == (DEVICE, topic) else [0]
    coordinator.announce()
    start(broker=BrokerSettings(keepalive_s=1))
    stage.until(lambda: "does not let us read" in caplog.text)
    play(coordinator, 1)
    assert stage.device_links[-1].connection == 1


# -- what waits, and what is given up ------------------------------------------------------------


def test_new_run_ends_the_training_of_the_old_one(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    give(coordinator, 1, steps=2_000_000_000)
    stage.until(lambda: coordinator.last(Bid))
    coordinator.run = "f" * 16
    coordinator.announce()
    play(coordinator, 1)
    assert [movement.round for _, movement in coordinator.movements] == [1]


def test_round_for_another_plan_is_skipped_and_not_taken_for_the_newest(
    coordinator: Coordinator, started: Running, caplog: pytest.LogCaptureFixture
) -> None:
    play(coordinator, 1)
    coordinator.tell(replace(coordinator.opening(99), plan_hash="ab" * 32))
    skipped = bid_of(coordinator, 99)
    assert skipped.level is None
    assert "ab" * 6 in skipped.reason
    assert coordinator.plan.hash[:12] in skipped.reason
    play(coordinator, 2)


def test_bid_that_nobody_answers_is_said_again(coordinator: Coordinator, start: Start) -> None:
    coordinator.announce()
    running = start()
    coordinator.open(1)
    running.hurry(coordinator, lambda: len([b for b in coordinator.all(Bid) if b.round == 1]) >= 3)
    coordinator.assign(1)
    movement_of(coordinator, 1)
    coordinator.receipt(1)


def test_coordinator_that_was_not_listening_is_told_again(
    stage: Stage, coordinator: Coordinator, started: Running
) -> None:
    coordinator.answers_offers = False
    give(coordinator, 1)
    stage.until(lambda: coordinator.last(Offer))
    coordinator.answers_offers = True
    coordinator.present()
    movement_of(coordinator, 1)


def test_evaluation_is_given_up_when_a_round_opens(
    coordinator: Coordinator, start: Start, tmp_path: Path
) -> None:
    coordinator.announce()
    start(evaluate_every=1)
    # Nobody has the rest of the model.
    give(coordinator, 1)
    movement_of(coordinator, 1)
    held = {hash for hash in coordinator.chunks if hash not in cached(tmp_path)}
    coordinator.chunks = {h: c for h, c in coordinator.chunks.items() if h not in held}
    for hash in held:
        coordinator.clear_chunk(hash)
    coordinator.receipt(1)
    coordinator.theta = coordinator.theta + np.float32(1)
    play(coordinator, 2)


def cached(folder: Path) -> set[bytes]:
    return {bytes.fromhex(path.name) for path in folder.rglob("chunks/*") if len(path.name) == 32}


def test_taking_part_does_not_depend_on_what_time_it_is() -> None:
    """Certificates have an end, and owners have nights; nothing else knows the hour."""
    clocks = ("time.time(", "time_ns(", "datetime.now", "datetime.utcnow", "localtime", "gmtime")
    parts = ["device/app.py", "device/machine.py", "device/service/*.py", "device/stores/*.py"]
    parts += ["device/transfer/*.py", "protocol/**/*.py", "transport/**/*.py", "train/**/*.py"]
    files = {part: sorted((ROOT / "edge_sdk").glob(part)) for part in parts}
    assert all(files.values())
    found = [
        f"{path.name}: {line.strip()}"
        for path in chain.from_iterable(files.values())
        for line in path.read_text().splitlines()
        if any(clock in line for clock in clocks)
    ]
    assert [line for line in found if "certificate" not in line and "own.until" not in line] == []


# -- two coordinators ----------------------------------------------------------------------------


def test_device_obeys_the_largest_epoch_also_after_a_restart(
    coordinator: Coordinator, start: Start
) -> None:
    coordinator.claim(7)
    coordinator.present()
    coordinator.announce()
    first = start()
    play(coordinator, 1)
    coordinator.epoch = Epoch(6, "f" * 16)  # one that was replaced, and does not know it
    coordinator.open(2)
    coordinator.epoch = Epoch(7, "8" * 16)
    coordinator.open(3)
    bid_of(coordinator, 3)
    assert coordinator.last(Bid, lambda bid: bid.round == 2) is None
    first.stop()
    coordinator.forget()
    coordinator.epoch = Epoch(6, "f" * 16)
    coordinator.open(4)  # retained, when the device returns
    start()
    coordinator.epoch = Epoch(8, "0" * 16)
    coordinator.open(5)
    bid_of(coordinator, 5)
    assert coordinator.last(Bid, lambda bid: bid.round == 4) is None


def test_receipt_of_a_coordinator_that_was_replaced_frees_no_movement(
    stage: Stage, coordinator: Coordinator, start: Start, tmp_path: Path
) -> None:
    """Its folder has the movement, but is not served any more."""
    coordinator.claim(7)
    coordinator.present()
    coordinator.announce()
    start()
    give(coordinator, 1)
    movement_of(coordinator, 1)
    coordinator.epoch = Epoch(6, "f" * 16)
    coordinator.receipt(1)
    coordinator.epoch = Epoch(7, "8" * 16)
    coordinator.open(2)
    bid_of(coordinator, 2)
    assert [path.name for path in tmp_path.rglob("*.movement")] == ["1.movement"]
    coordinator.receipt(1)
    stage.until(lambda: not list(tmp_path.rglob("*.movement")))


def test_device_follows_a_smaller_epoch_that_nobody_contradicts(
    coordinator: Coordinator, start: Start
) -> None:
    """A new run folder, and a broker that lost its messages: what is retained is heard again."""
    coordinator.claim(7)
    coordinator.present()
    coordinator.announce()
    device = start()
    play(coordinator, 1)
    coordinator.claim(1)
    coordinator.present(2)
    coordinator.announce()
    coordinator.open(2)
    device.hurry(coordinator, lambda: coordinator.last(Bid, lambda bid: bid.round == 2))
    assert device.service._allegiance.epoch == coordinator.epoch
