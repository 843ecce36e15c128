"""A device whose task nobody offers says which tasks there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_sdk.device.service import offers
from edge_sdk.device.service import service as service_module
from edge_sdk.device.service.ending import BrokerError
from edge_sdk.device.service.offers import MAX_TASKS, TaskList, list_tasks
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Presence, TaskNotice
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.transport.link import Connected, Deliver, Disconnected, LinkEvent, Received, Will
from edge_sdk.transport.settings import BrokerSettings, DeniedError
from tests.unit.edge_sdk.device.service.test_service import Start, coordinator, play, stage, start
from tests.unit.edge_sdk.scripted import TASK, Coordinator, Stage

__all__ = ["coordinator", "stage", "start"]

RUN = "0123456789abcdef"


def notice(task: str) -> Received:
    blob = Blob(0, ())
    message = TaskNotice(task=task, run=RUN, plan=blob, manifest=blob, graphs={}, chunk_bytes=4096)
    return Received(Topics(task).task, encode_message(message), True)


def presence(task: str, *, online: bool = True) -> Received:
    message = Presence(name="coordinator", session=1, online=online)
    return Received(Topics(task).coordinator, encode_message(message), True)


def test_list_knows_tasks_and_whether_their_coordinators_are_there() -> None:
    tasks = TaskList()
    assert tasks.hear(presence("digits")) is False
    assert tasks.hear(notice("letters"))
    assert tasks.hear(notice("digits"))
    assert not tasks.hear(notice("digits"))
    assert [(each.name, each.online) for each in tasks.tasks] == [
        ("digits", True),
        ("letters", False),
    ]
    assert tasks.hear(replace(notice("letters"), payload=b""))
    assert [each.name for each in tasks.tasks] == ["digits"]


def test_list_ignores_nonsense_and_has_an_end() -> None:
    tasks = TaskList()
    for topic, payload in (("x", b""), (Topics("a").task, b"?"), (Topics("a").round, b"?")):
        assert not tasks.hear(Received(topic, payload, True))
    for number in range(MAX_TASKS + 10):
        tasks.hear(notice(f"task-{number}"))
    assert len(tasks.tasks) == MAX_TASKS


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("digts", "nobody offers the task 'digts'; the broker has digits, letters. did you mean"),
        ("sound", "nobody offers the task 'sound'; the broker has digits, letters. Waiting"),
    ],
)
def test_advice_names_the_nearest(wanted: str, words: str) -> None:
    tasks = TaskList()
    assert "the broker has no other: is its coordinator running" in tasks.advice(wanted)
    for name in ("digits", "letters"):
        tasks.hear(notice(name))
    assert words in tasks.advice(wanted)


def test_device_with_a_wrong_task_says_which_there_are_and_still_waits(
    stage: Stage,
    coordinator: Coordinator,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(service_module, "TASK_S", 0.01)
    monkeypatch.setattr(service_module, "ANSWER_S", 0.05)
    caplog.set_level("INFO")
    link = stage.broker.open_link(name="somebody", deliver=lambda _: None)
    other = notice(f"{TASK}s")
    link.publish(other.topic, other.payload, retain=True)
    start()
    words = f"nobody offers the task {TASK!r}; the broker has {TASK}s. did you mean '{TASK}s'?"
    stage.until(lambda: words in caplog.text)
    # A message about another task is none of ours.
    monkeypatch.setattr(service_module, "ROUND_S", 0.05)
    coordinator.present()
    coordinator.announce()
    stage.until(lambda: "waiting for a round: the coordinator may be waiting" in caplog.text)
    play(coordinator, 1)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "CONNECT_S", 0.1)
    monkeypatch.setattr(offers, "QUIET_S", 0.1)


class Said:
    """A link that delivers what it is told to, at once."""

    def __init__(self, deliver: Deliver, events: list[LinkEvent]) -> None:
        for event in events:
            deliver(event)

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


def listed(*events: LinkEvent) -> list[str]:
    def opener(*, name: str, deliver: Deliver, will: Will | None = None) -> Said:
        return Said(deliver, list(events))

    found = list_tasks(BrokerSettings(), "robot", opener=opener)  # type: ignore[arg-type]
    return [each.name for each in found]


def test_tasks_are_listed_once_connected() -> None:
    assert listed(notice("b"), Connected(first=True), notice("a")) == ["a", "b"]
    assert listed(Connected(first=True)) == []


def test_broker_that_refuses_or_is_away_is_said_in_words() -> None:
    with pytest.raises(DeniedError, match="refuses this device: wrong password"):
        listed(Disconnected("wrong password", 1))
    with pytest.raises(BrokerError, match=r"no connection within 0\.1 s: nothing listens there"):
        listed(Disconnected("nothing listens there"))
