"""Whether a coordinator may start: every state of the folder beside every state of the broker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.operate.serve.charge import LastServed, RetainedFacts, objection, take_charge
from coordinator.run.folder import About, Run, create_run
from coordinator.service.outgoing.fence import FencedError
from edge_sdk.protocol.messages.epoch import Claim, Epoch
from edge_sdk.protocol.messages.round import RoundClosed
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.transport.link import Deliver, Link, Will
from tests.memory_broker import MemoryBroker
from tests.unit.coordinator.service.service_world import saved_model

OWN, EARLIER, LATER = (Epoch(counter, "a" * 16) for counter in (5, 4, 6))
RUN = "0123456789abcdef"
TOPICS = Topics("tiny")


def known(**changes: Any) -> LastServed:
    return LastServed(**{"epoch": OWN, "session": 50, "opened": 10, "copied": False, **changes})


FRESH: dict[str, Any] = {"epoch": None, "session": 0, "opened": 0}


@pytest.mark.parametrize(
    ("folder", "broker", "words"),
    [
        pytest.param({}, {}, None, id="restart"),
        pytest.param({}, {"epoch": OWN, "session": 50, "round": 10}, None, id="after a crash"),
        pytest.param({}, {"epoch": EARLIER, "round": 9}, None, id="broker restored"),
        pytest.param({}, {"epoch": OWN, "session": 49}, None, id="will of a start before that"),
        pytest.param(FRESH, {}, None, id="first start"),
        pytest.param(FRESH, {"epoch": LATER}, None, id="new run, nobody online"),
        pytest.param({"copied": True}, {"epoch": OWN, "round": 10}, None, id="moved house"),
        pytest.param({}, {"epoch": OWN, "losses": 5}, None, id="restart on a bad network"),
        pytest.param({}, {"epoch": LATER}, "started after", id="taken over"),
        pytest.param({"copied": True}, {"epoch": LATER}, "started after", id="old copy"),
        pytest.param({}, {"epoch": OWN, "round": 11}, "heard of round 11", id="restored backup"),
        pytest.param(FRESH, {"epoch": LATER, "session": 60}, "is online. Stop", id="second start"),
        pytest.param(FRESH, {"session": 60}, "is online. Stop", id="older version online"),
        pytest.param(FRESH, {"epoch": LATER, "losses": 2}, "is online. Stop", id="name contested"),
        pytest.param(
            {"copied": True}, {"epoch": OWN, "session": 50}, "copy of the one it", id="live copy"
        ),
        pytest.param(
            {"epoch": None}, {"session": 50}, None, id="folder of an older version, after a crash"
        ),
    ],
)
def test_start_is_refused_where_it_would_do_harm(
    folder: dict[str, Any], broker: dict[str, Any], words: str | None
) -> None:
    found = objection(known(**folder), RetainedFacts(**broker), "tiny")
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in found
        assert "--take-over" in found


# -- over a broker -------------------------------------------------------------------------------


class Busy:
    """A broker in memory whose thread is busy as long as the block lasts."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def open_link(self, *, name: str, deliver: Deliver, will: Will | None = None) -> Link:
        with self._lock:
            return self.broker.open_link(name=name, deliver=deliver, will=will)

    def retain(self, topic: str, data: bytes) -> None:
        self.broker._retained[topic] = data

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            with self._lock:
                self.broker.run()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    create_run(
        tmp_path / "run",
        About(task="tiny", run=RUN, source="t.py:f", batch_size=4),
        saved_model(),
    )
    return Run(tmp_path / "run")


def start(run: Run, broker: Busy, *, take_over: bool = False) -> Epoch | None:
    return take_charge(
        run, broker.open_link, take_over=take_over, stop=threading.Event(), listen_s=0.0
    )


def test_first_epoch_and_the_next(run: Run) -> None:
    with Busy() as broker, run:
        first = start(run, broker)
        assert first is not None
        assert first.counter == 1
        broker.retain(TOPICS.epoch, encode_message(Claim(run=RUN), first))
        again = start(run, broker)
        assert again is not None
        assert again.counter == 2
        assert again == run.epoch
    with Run(run.folder) as opened:
        assert opened.epoch == again


def test_new_run_counts_on_from_the_broker(run: Run) -> None:
    with Busy() as broker, run:
        broker.retain(TOPICS.epoch, encode_message(Claim(run=RUN), Epoch(41, "b" * 16)))
        epoch = start(run, broker)
        assert epoch is not None
        assert epoch.counter == 42


def test_old_copy_is_refused_and_changes_nothing_until_it_takes_over(run: Run) -> None:
    with Busy() as broker, run:
        own = start(run, broker)
        broker.retain(TOPICS.epoch, encode_message(Claim(run=RUN), Epoch(7, "b" * 16)))
        broker.retain(TOPICS.round, encode_message(RoundClosed(round=30, run=RUN)))
        before = dict(broker.broker.retained)
        with pytest.raises(FencedError, match=r"run: another coordinator of task 'tiny' was start"):
            start(run, broker)
        assert run.epoch == own
        assert dict(broker.broker.retained) == before
        taken = start(run, broker, take_over=True)
        assert taken is not None
        assert taken.counter == 8
        assert run.opened == 31  # no number of a round is used twice


def test_online_coordinator_is_left_alone(run: Run) -> None:
    with Busy() as broker, run:
        broker.retain(TOPICS.epoch, encode_message(Claim(run=RUN), Epoch(7, "b" * 16)))
        here = Presence(name="coordinator", session=9, online=True)
        broker.retain(TOPICS.coordinator, encode_message(here, Epoch(7, "b" * 16)))
        with pytest.raises(FencedError, match="is online"):
            start(run, broker)


def test_nonsense_on_the_topics_is_ignored(run: Run) -> None:
    with Busy() as broker, run:
        for topic in (TOPICS.epoch, TOPICS.coordinator, TOPICS.round, TOPICS.echo):
            broker.retain(topic, b"\xc1 nonsense")
        assert start(run, broker) is not None


def test_stop_ends_the_wait_for_a_broker(run: Run) -> None:
    stop = threading.Event()
    broker = MemoryBroker()  # which nobody steps
    with run:
        stop.set()
        assert take_charge(run, broker.open_link, take_over=False, stop=stop) is None
    assert run.epoch is None
