"""The owner's commands to a running device, and several tasks on one, over the in-memory broker."""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from edge_sdk.decide.decision import Sight
from edge_sdk.decide.observer import Observer
from edge_sdk.device.config import DeviceTask
from edge_sdk.device.service.answering import answering, socket_folder
from edge_sdk.device.service.service import DeviceService
from edge_sdk.device.service.several import SeveralTasks
from edge_sdk.device.service.training_thread import RETRY_S, GiveUp, Training
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import read_logbook
from edge_sdk.device.stores.movements import DeviceFolder, device_path
from edge_sdk.device.stores.slot import ANOTHER
from edge_sdk.program.control import SOCKET, ControlError, NotServedError, ask_run
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.round import Bid, Outcome, RoundOpen
from edge_sdk.protocol.messages.transfer import Offer, Presence, Want
from edge_sdk.transport.link import Link
from edge_sdk.transport.settings import LinkError
from tests.unit.edge_sdk.scripted import (
    DEVICE,
    TASK,
    Coordinator,
    Running,
    Stage,
    make_config,
    make_data,
)

FOREVER = 10**9
"""Steps of a training that only stops when it is told to."""


@pytest.fixture
def stage() -> Stage:
    return Stage()


@contextmanager
def running(stage: Stage, folder: Path, **changes: Any) -> Iterator[Running]:
    """A device of one task that answers its owner."""
    config = make_config(folder, **changes)
    device = Running(stage, config)
    try:
        with answering(config, device.service._household, [device.service]):
            yield device
    finally:
        device.stop()


def ask(folder: Path, command: str, **arguments: Any) -> Any:
    return ask_run(socket_folder(make_config(folder)), command, **arguments)


def task_status(folder: Path) -> dict[str, Any]:
    """What is known of the one task; nothing before it has started."""
    tasks = ask(folder, "status")["tasks"]
    return defaultdict(lambda: None, tasks[0] if tasks else {})


def skip_of(coordinator: Coordinator, round: int, code: str) -> Bid:
    def found() -> Bid | None:
        return coordinator.last(Bid, lambda bid: bid.round == round and bid.code == code)

    bid = coordinator.stage.until(found)
    assert bid.level is None
    return bid


def bid_of(coordinator: Coordinator, round: int) -> Bid:
    return coordinator.stage.until(
        lambda: coordinator.last(Bid, lambda bid: bid.round == round and bid.level is not None)
    )


def movement_of(coordinator: Coordinator, round: int) -> object:
    return coordinator.stage.until(
        lambda: next((m for offer, m in coordinator.movements if offer.round == round), None)
    )


def present(stage: Stage, task: str = TASK) -> Coordinator:
    coordinator = Coordinator(stage, task=task)
    coordinator.present()
    coordinator.announce()
    return coordinator


GONE = bytes(16)
"""The hash of a chunk that nobody has."""


def offer_model(coordinator: Coordinator) -> None:
    """Offer a model for inference that cannot be fetched."""
    coordinator.announce_model(
        ModelNotice(
            round=1,
            plan_hash=coordinator.plan.hash,
            levels=(1.0,),
            groups=(coordinator.plan.full_groups(),),
            accuracies=(None,),
            rescale=0.0,
            run=coordinator.run,
            model=Blob(1, (GONE,)),
        )
    )


def wants_model(coordinator: Coordinator) -> bool:
    return coordinator.last(Want, lambda want: GONE in want.chunks) is not None


# -- status ----------------------------------------------------------------------------------------


def test_status_follows_a_round(stage: Stage, tmp_path: Path) -> None:
    with running(stage, tmp_path):
        stage.until(lambda: (tmp_path / TASK / DEVICE / SOCKET).exists())
        stage.until(lambda: task_status(tmp_path)["phase"] == "waiting for the coordinator")
        coordinator = present(stage)
        stage.until(lambda: task_status(tmp_path)["phase"] == "resting")
        coordinator.open(1)
        bid_of(coordinator, 1)
        stage.until(lambda: task_status(tmp_path)["phase"] == "bidding")
        coordinator.answers_offers = False
        coordinator.assign(1)
        stage.until(lambda: coordinator.last(Offer))
        stage.until(lambda: task_status(tmp_path)["phase"] == "uploading")
        seen = task_status(tmp_path)
        assert (seen["trained"], seen["skipped"]) == (1, 0)
        assert seen["decision"]["level"] == 1.0
        assert seen["bytes"]["up"] > 0
        assert seen["bytes"]["down"] == seen["bytes"]["down_today"] > 1000
        coordinator.receipt(1, Outcome.LATE)
        stage.until(lambda: task_status(tmp_path)["verdicts"])
        stage.until(lambda: task_status(tmp_path)["phase"] == "resting")
        (verdict,) = task_status(tmp_path)["verdicts"]
        assert (verdict["round"], verdict["outcome"]) == (1, "late")
        (row,) = ask(tmp_path, "history")
        assert (row["round"], row["level"], row["outcome"]) == (1, 1.0, "late")
        with pytest.raises(ControlError, match="'radio', but in toy"):
            ask(tmp_path, "history", task="radio")
    with pytest.raises(NotServedError):
        ask(tmp_path, "status")
    kept = read_logbook(device_path(tmp_path, TASK, DEVICE))
    assert kept is not None
    assert (kept["trained"], kept["ended"]["code"]) == (1, 0)
    with running(stage, tmp_path):  # goes on from there
        stage.until(lambda: (task_status(tmp_path)["broker"] or {}).get("connected"))
        assert task_status(tmp_path)["trained"] == 1
        assert task_status(tmp_path)["bytes"]["down"] >= seen["bytes"]["down"]


def test_steps_of_a_training_are_told(stage: Stage, tmp_path: Path) -> None:
    coordinator = present(stage)
    with running(stage, tmp_path):
        coordinator.open(1, steps=FOREVER)
        bid_of(coordinator, 1)
        coordinator.assign(1)
        stage.until(lambda: (task_status(tmp_path)["step"] or 0) > 1)
        seen = task_status(tmp_path)
        assert (seen["phase"], seen["steps"]) == ("training", FOREVER)


def test_last_warning_is_told(stage: Stage, tmp_path: Path) -> None:
    with running(stage, tmp_path) as device:
        stage.until(lambda: device.service.logbook is not None)
        logging.getLogger("edge_sdk.device").warning("the %s is loose", "wire")
        assert task_status(tmp_path)["error"]["words"] == "the wire is loose"


def test_device_runs_without_a_socket_and_says_so_once(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(socket.socket, "bind", refuse)  # as on storage shared with Android's apps
    coordinator = present(stage)
    with running(stage, tmp_path):
        Household(tmp_path, DEVICE).pause.begin()
        coordinator.open(1)
        skip_of(coordinator, 1, "paused")
    (line,) = [each for each in caplog.messages if "no socket" in each]
    assert "they use files instead" in line


# -- pause -----------------------------------------------------------------------------------------


def test_pause_stops_a_training_and_withdraws_it(stage: Stage, tmp_path: Path) -> None:
    coordinator = present(stage)
    with running(stage, tmp_path):
        coordinator.open(1, steps=FOREVER)
        bid_of(coordinator, 1)
        coordinator.assign(1)
        stage.until(lambda: task_status(tmp_path)["phase"] == "training")
        ask(tmp_path, "pause")
        assert skip_of(coordinator, 1, "paused").reason == "skip: paused by its owner"
        coordinator.open(2)
        skip_of(coordinator, 2, "paused")
        assert ask(tmp_path, "resume") == {"lifted": True}
        assert ask(tmp_path, "resume") == {"lifted": False}
        coordinator.open(3)
        bid_of(coordinator, 3)
        coordinator.assign(3)
        movement_of(coordinator, 3)
        assert task_status(tmp_path)["skipped"] == 2


def test_pause_withdraws_an_offer_without_an_assignment(stage: Stage, tmp_path: Path) -> None:
    coordinator = present(stage)
    with running(stage, tmp_path):
        coordinator.open(1)
        bid_of(coordinator, 1)
        ask(tmp_path, "pause")
        skip_of(coordinator, 1, "paused")
        coordinator.assign(1)  # too late: it is ignored
        coordinator.open(2)
        skip_of(coordinator, 2, "paused")
    assert coordinator.movements == []


def test_finished_movement_is_uploaded_while_paused(stage: Stage, tmp_path: Path) -> None:
    coordinator = present(stage)
    coordinator.answers_offers = False
    with running(stage, tmp_path) as device:
        coordinator.open(1)
        bid_of(coordinator, 1)
        coordinator.assign(1)
        stage.until(lambda: coordinator.last(Offer))
        ask(tmp_path, "pause")
        coordinator.answers_offers = True
        device.hurry(coordinator, lambda: coordinator.movements)
        coordinator.receipt(1)
        stage.until(lambda: not list(tmp_path.rglob("*.movement")))


def test_pause_outlives_a_restart(stage: Stage, tmp_path: Path) -> None:
    coordinator = present(stage)
    with running(stage, tmp_path):
        terms = ask(tmp_path, "pause", seconds=3600)
        assert terms["until"] == pytest.approx(terms["since"] + 3600)
    with running(stage, tmp_path):
        coordinator.open(1)
        skip_of(coordinator, 1, "paused")
        with pytest.raises(ControlError, match="must be a number above 0"):
            ask(tmp_path, "pause", seconds=-1)
        ask(tmp_path, "resume")
        coordinator.open(2)
        bid_of(coordinator, 2)


def test_paused_device_waits_though_a_model_is_offered(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    patience = Training._patience_s

    def noted(training: Training) -> float | None:
        wait_s = patience(training)
        if training._inbox.model is not None and training._part is not None:
            waits.append(wait_s)
        return wait_s

    monkeypatch.setattr(Training, "_patience_s", noted)
    Household(tmp_path, DEVICE).pause.begin()
    coordinator = present(stage)
    with running(stage, tmp_path, deliver="latest"):
        offer_model(coordinator)
        stage.until(lambda: waits)
        coordinator.open(1)
        skip_of(coordinator, 1, "paused")
    assert set(waits) == {RETRY_S}


def test_paused_device_fetches_no_last_model(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Household(tmp_path, DEVICE).pause.begin()
    coordinator = present(stage)
    offer_model(coordinator)
    coordinator.finish(1)
    with running(stage, tmp_path, deliver="latest") as device:
        stage.until(lambda: device.ended or wants_model(coordinator))
    assert not wants_model(coordinator)
    assert "no latest model was delivered: paused by its owner" in caplog.text


def test_link_that_cannot_be_opened_is_the_end_that_the_logbook_tells(tmp_path: Path) -> None:
    def refuse(**_: object) -> Link:
        raise LinkError("ca = 'x': there is no such file")

    with pytest.raises(LinkError):
        DeviceService(make_config(tmp_path), make_data(), open_link=refuse).run()
    kept = read_logbook(device_path(tmp_path, TASK, DEVICE))
    assert kept is not None
    assert (kept["ended"]["code"], kept["ended"]["words"]) == (
        2,
        "[broker] ca = 'x': there is no such file",
    )


# -- several tasks -------------------------------------------------------------------------------


class RunningTasks:
    """A device of several tasks in a thread, which answers its owner."""

    def __init__(self, stage: Stage, folder: Path, tasks: tuple[DeviceTask, ...]) -> None:
        data = make_data()
        folder.mkdir(exist_ok=True)
        np.savez(folder / "own.npz", x=data.inputs[0], y=data.targets)
        config = replace(make_config(folder), task=tasks[0].task, tasks=tasks)
        config = replace(config, data=str(folder / "own.npz"))
        self.stage, self.config = stage, config
        self.household = Household(folder, DEVICE, config.priorities())
        self.device = SeveralTasks(config, household=self.household, open_link=stage.open_link)
        self.error: Exception | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        stage.until(lambda: (socket_folder(config) / SOCKET).exists())

    def _run(self) -> None:
        try:
            with answering(self.config, self.household, self.device.services):
                self.device.run()
        except Exception as error:
            self.error = error

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = ask_run(socket_folder(self.config), "status")
        return found

    def wait(self) -> Exception | None:
        self.stage.until(lambda: not self._thread.is_alive())
        return self.error

    def stop(self) -> None:
        self.device.stop()
        self.wait()


Tasks = Callable[..., RunningTasks]


@pytest.fixture
def start(stage: Stage, tmp_path: Path) -> Iterator[Tasks]:
    with ExitStack() as stack:

        def begin(*tasks: DeviceTask) -> RunningTasks:
            device = RunningTasks(stage, tmp_path, tasks)
            stack.callback(device.stop)
            return device

        yield begin


def test_two_tasks_share_one_link_and_finish(stage: Stage, start: Tasks) -> None:
    toy, other = present(stage), present(stage, "radio")
    device = start(DeviceTask(task=TASK), DeviceTask(task="radio"))
    for round in (1, 2):
        for coordinator in (toy, other):
            coordinator.open(round)
            bid_of(coordinator, round)
            coordinator.assign(round)
            movement_of(coordinator, round)
            coordinator.receipt(round)
    assert len(stage.device_links) == 1
    for coordinator in (toy, other):
        coordinator.finish(2)
    assert device.wait() is None
    for coordinator in (toy, other):
        last = partial(coordinator.last, Presence, lambda each: not each.online)
        assert stage.until(last).reason == "the run is finished"


def test_task_skips_while_another_one_trains_and_says_so(stage: Stage, start: Tasks) -> None:
    toy, other = present(stage), present(stage, "radio")
    device = start(DeviceTask(task=TASK), DeviceTask(task="radio"))
    other.open(1, steps=FOREVER)
    bid_of(other, 1)
    other.assign(1)
    stage.until(lambda: device.status()["training"] == "radio")
    toy.tell(replace(toy.opening(1), bid_s=0.1))  # it goes first, but interrupts nothing
    bid = skip_of(toy, 1, "task")
    assert bid.reason == "skip: another task of this device is trained now"
    assert "radio" not in bid.reason
    assert device.status()["training"] == "radio"
    # It is owed the turn: a round of the other one that comes before its own is skipped.
    ask_run(socket_folder(device.config), "pause")
    skip_of(other, 1, "paused")
    ask_run(socket_folder(device.config), "resume")
    other.tell(replace(other.opening(2), bid_s=0.1))
    skip_of(other, 2, "task")
    toy.open(2)
    bid_of(toy, 2)
    toy.assign(2)
    movement_of(toy, 2)
    other.open(3)
    bid_of(other, 3)


def test_offer_yields_to_a_task_of_higher_priority(stage: Stage, start: Tasks) -> None:
    toy, other = present(stage), present(stage, "radio")
    start(DeviceTask(task="radio", priority=2), DeviceTask(task=TASK, priority=1))
    other.open(1)
    bid_of(other, 1)
    toy.open(1)
    bid_of(toy, 1)
    skip_of(other, 1, "task")
    toy.assign(1)
    other.assign(1)  # it came too late
    movement_of(toy, 1)
    other.open(2)
    bid_of(other, 2)
    assert other.movements == []


def test_task_that_fails_leaves_the_others_alone(
    stage: Stage, start: Tasks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy, other = present(stage), present(stage, "radio")
    tmp_path.mkdir(exist_ok=True)
    np.savez(tmp_path / "wrong.npz", x=np.zeros((5, 9), np.float32), y=np.zeros(5, np.int64))
    device = start(
        DeviceTask(task="radio", data=str(tmp_path / "wrong.npz")), DeviceTask(task=TASK)
    )
    stage.until(lambda: "task radio ends, the others go on" in caplog.text)
    assert other.movements == []
    told = {each["task"]: each["error"] for each in device.status()["tasks"]}
    assert "the others go on" in told["radio"]["words"]
    assert told[TASK] is None
    toy.open(1)
    bid_of(toy, 1)
    toy.assign(1)
    movement_of(toy, 1)
    toy.receipt(1)
    toy.finish(1)
    error = device.wait()
    assert error is not None
    assert "does not fit" in str(error)


def test_pause_is_for_all_tasks(stage: Stage, start: Tasks) -> None:
    toy, other = present(stage), present(stage, "radio")
    device = start(DeviceTask(task=TASK), DeviceTask(task="radio"))
    stage.until(lambda: len(device.status()["tasks"]) == 2)
    ask_run(socket_folder(device.config), "pause")
    for coordinator in (toy, other):
        coordinator.open(1)
        skip_of(coordinator, 1, "paused")


def test_will_is_that_of_the_highest_priority_however_slowly_its_loop_starts(
    stage: Stage, start: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_opened = Event()
    listen, prepare = DeviceService._listen, DeviceFolder.next_session

    def listens(service: DeviceService) -> None:
        listen(service)
        if service.config.task != TASK:
            other_opened.set()

    def next_session(folder: DeviceFolder, **options: int) -> int:
        if folder.path.parent.name == TASK:
            other_opened.wait(0.2)  # as long as a slow disk takes
        return prepare(folder, **options)

    monkeypatch.setattr(DeviceService, "_listen", listens)
    monkeypatch.setattr(DeviceFolder, "next_session", next_session)
    toy, other = present(stage), present(stage, "radio")
    start(DeviceTask(task="radio", priority=2), DeviceTask(task=TASK, priority=1))
    for coordinator in (toy, other):
        stage.until(partial(coordinator.last, Presence))
    with stage.lock:
        stage.broker.cut(stage.device_links[0])
    stage.until(lambda: toy.last(Presence, lambda each: not each.online))


def test_task_whose_coordinator_is_gone_is_owed_nothing(
    stage: Stage, start: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    toy, other = present(stage), present(stage, "radio")
    device = start(DeviceTask(task=TASK), DeviceTask(task="radio"))
    other.open(1, steps=FOREVER)
    bid_of(other, 1)
    other.assign(1)
    stage.until(lambda: device.status()["training"] == "radio")
    toy.tell(replace(toy.opening(1), bid_s=0.1))
    skip_of(toy, 1, "task")
    ask_run(socket_folder(device.config), "pause")
    skip_of(other, 1, "paused")
    ask_run(socket_folder(device.config), "resume")
    toy.leave()
    stage.until(lambda: "the coordinator is away" in caplog.text)
    other.tell(replace(other.opening(2), bid_s=0.1))
    bid_of(other, 2)


def test_unexpected_error_of_one_task_gives_the_turn_back(
    stage: Stage, start: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, other = present(stage), present(stage, "radio")
    look, failed = Observer.look, Event()

    def fails_once(observer: Observer, opened: RoundOpen) -> Sight:
        if failed.is_set():
            return look(observer, opened)
        failed.set()
        raise IndexError("a fault")

    monkeypatch.setattr(Observer, "look", fails_once)
    start(DeviceTask(task=TASK), DeviceTask(task="radio"))
    other.open(1)
    stage.until(failed.is_set)
    toy.open(1)
    bid_of(toy, 1)


def test_offer_of_a_later_round_outlives_the_loss_of_an_earlier_one(
    stage: Stage, start: Tasks
) -> None:
    other = present(stage, "radio")
    device = start(DeviceTask(task=TASK), DeviceTask(task="radio"))
    other.open(2)
    bid_of(other, 2)
    device.device.services[1]._inbox.put(GiveUp(ANOTHER, "task"))  # of round 1, and it comes late
    other.assign(2)
    movement_of(other, 2)


def test_service_of_one_task_refuses_settings_of_several(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), tasks=(DeviceTask(task=TASK),))
    with pytest.raises(ConfigError, match="SeveralTasks"):
        DeviceService(config, make_data())
